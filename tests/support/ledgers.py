"""Spends that the tests of the ledger share."""

from typing import Any

from dpquant_compile.errors import PrivacyBudgetError
from dpquant_compile.privacy.accounting.ledger import Ledger

DELTA = 1e-5
TRAINING = {"q": 0.02, "sigma": 1.0}
ANALYSIS = {"q": 0.01, "sigma": 2.0}


def spent(ledger: Ledger, kind: str = "training", **args: Any) -> None:
    ledger.spend(kind, **{**(TRAINING if kind == "training" else ANALYSIS), **args})


def counts(ledger: Ledger) -> list[tuple[str, int]]:
    return [(entry.purpose, entry.steps) for entry in ledger.entries]


def exhaust(ledger: Ledger) -> int:
    """Spend training steps one by one until the ledger refuses; how many it took."""
    steps = 0
    while True:
        try:
            spent(ledger)
        except PrivacyBudgetError:
            return steps
        steps += 1
