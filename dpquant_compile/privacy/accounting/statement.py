"""`statement`: the privacy claim of a ledger in plain words."""

import math
from typing import TYPE_CHECKING

from dpquant_compile.errors import PrivacySpecError
from dpquant_compile.privacy.accounting.epsilon import gathered

if TYPE_CHECKING:
    from dpquant_compile.privacy.accounting.ledger import Ledger

__all__ = ["UNIT", "claim_for", "statement"]

UNIT = "one sample of the dataset"


def claim_for(unit: str) -> tuple[str, str]:
    """Whom an ε protects, in two sentences: the unit of privacy, and which datasets are neighbours."""
    return (
        f"Unit of privacy: {unit}.",
        f"Adjacency: two datasets are neighbours if one is the other with {unit} added or removed.",
    )


def statement(ledger: "Ledger", delta: float, unit: str, adjacency: str) -> str:
    """See `Ledger.statement`.

    Guarantee: every spend of the ledger is in it, by purpose, and every caveat; no ε in it is rounded down.
    """
    if adjacency != "add_remove":
        raise PrivacySpecError(
            f"adjacency must be 'add_remove', not {adjacency!r}: the spends are of Poisson-subsampled Gaussian "
            "mechanisms whose σ is relative to what adding or removing one unit changes. The statement for "
            "'add_remove' says what follows for replacement."
        )
    total = ledger.epsilon(delta)
    counted = [_line(ledger, purpose, delta) for purpose in ledger.purposes] or ["  nothing: no release was made"]
    return "\n".join(
        [
            f"This run is (ε, δ)-differentially private with ε = {_up(total)} at δ = {delta:g}."
            if total < math.inf
            else "This run is not private: something was released without noise, or ε could not be bounded.",
            "",
            *claim_for(unit),
            "  If the unit is replaced by another instead, that is one removal and one addition: ε is up to twice "
            f"as large, at a δ of up to (1 + exp(ε)) times {delta:g}.",
            f"Accountant: {ledger.accountant} (Opacus), all of the following composed by it at once.",
            "Counted (ε in brackets is of that part alone; the parts add up to more than the whole):",
            *counted,
            "Not counted:",
            "  - hyperparameter tuning, and other runs on the same data: each spends anew, and is to be composed;",
            "  - values computed from the data and shown without noise, such as losses, accuracies, gradient norms "
            "or the sizes of batches;",
            "  - what finite-precision arithmetic and the source of random bits may give away: the claim is for "
            "exact real numbers and ideal Gaussian noise;",
            "  - releases that were not entered here.",
            *(f"Mind: {caveat}." for caveat in ledger.caveats),
        ]
    )


def _line(ledger: "Ledger", purpose: str, delta: float) -> str:
    parts = gathered(e for e in ledger.entries if e.purpose == purpose)
    spent = "; ".join(f"{n} step{'s' * (n != 1)} at q = {q:.6g}, σ = {sigma:.6g}" for sigma, q, n in parts)
    return f"  - {purpose}: {spent} [ε = {_up(ledger.epsilon(delta, purpose))}]"


def _up(epsilon: float) -> str:
    """Four decimals, rounded up: a claim must not be smaller than what was computed."""
    return f"{math.ceil(epsilon * 1e4) / 1e4:.4f}" if epsilon < math.inf else "infinite"
