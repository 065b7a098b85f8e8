"""States of ledgers: loading one erases no spend, and takes none of another run."""

import pytest

from dpquant_compile.errors import LedgerError
from dpquant_compile.privacy.accounting.ledger import Ledger
from tests.support.ledgers import counts, spent


def test_a_state_that_is_behind_erases_nothing() -> None:
    ledger = Ledger("rdp")
    states = [ledger.state_dict()]
    for kind in ("training", "analysis", "training"):
        spent(ledger, kind)
        states.append(ledger.state_dict())
    entries = ledger.entries
    for number, state in enumerate(states):
        ledger.load_state_dict(state, replays=True)
        assert ledger.entries == entries and ledger.position == (state["run"], number)
    ledger.load_state_dict(states[1], replays=False)
    spent(ledger)
    assert counts(ledger) == [("training", 1), ("analysis", 1), ("training", 2)]
    behind = Ledger("rdp")
    behind.load_state_dict(states[1], replays=True)
    behind.load_state_dict(states[3], replays=True)  # and one that is ahead is taken over
    assert behind.entries == entries


def test_a_state_of_another_run_changes_nothing() -> None:
    """Also if its numbers are the same: these are other releases."""
    other, ledger = Ledger("rdp"), Ledger("rdp")
    spent(other, steps=3)
    spent(ledger, steps=3)
    ledger.add_caveat("of its own")
    before = ledger.state_dict()
    for state in (other.state_dict(), {**other.state_dict(), "caveats": ["of the other"]}):
        with pytest.raises(LedgerError, match=r"different runs.*new engine, or give both.*same ledger_path"):
            ledger.load_state_dict(state, replays=True)
        with pytest.raises(LedgerError, match="different runs"):
            ledger.mirror(state)
        assert ledger.state_dict() == before
    spent(other)
    with pytest.raises(LedgerError, match="different runs"):
        ledger.load_state_dict(other.state_dict(), replays=False)
