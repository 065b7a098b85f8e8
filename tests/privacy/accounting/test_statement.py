"""Statements: every caveat of a run is recorded with its spends, and is never forgotten."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from dpquant_compile.errors import PrivacySpecError
from dpquant_compile.privacy.accounting.ledger import Ledger
from tests.support.ledgers import DELTA, counts, spent
from tests.support.resuming import engine_of, epoch


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.json"


SECURE_OFF = "secure_mode was off"


@pytest.mark.slow
def test_a_statement_from_the_file_has_every_caveat_of_the_run(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        assert SECURE_OFF in engine.ledger.statement(DELTA)
        assert Ledger.read(tmp_path / "ledger.json").caveats == ()  # nothing is spent, nothing to be said
        epoch(engine)
    assert Ledger.read(tmp_path / "ledger.json").statement(DELTA) == engine.ledger.statement(DELTA)
    with engine_of(tmp_path, secure=True) as second:
        assert SECURE_OFF in second.ledger.statement(DELTA)
        epoch(second)
    assert SECURE_OFF in Ledger.read(tmp_path / "ledger.json").statement(DELTA)


def test_a_caveat_outlives_the_next_make_private() -> None:
    engine = engine_of(poisson_sampling=False)
    epoch(engine)
    made = engine.run
    engine.make_private(
        module=made.session.model,
        optimizer=made.optimizer,
        criterion=torch.nn.CrossEntropyLoss(),
        data_loader=DataLoader(made.loader.dataset, batch_size=12),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
    )
    assert "were not Poisson samples" in engine.ledger.statement(DELTA)


def test_caveats_are_recorded_with_the_spends_that_they_go_with(path: Path) -> None:
    ledger = Ledger("rdp", path)
    ledger.standing = ("one",)
    assert ledger.caveats == ("one",) and Ledger.read(path).caveats == ()
    spent(ledger)
    ledger.standing = ("two", "one")
    spent(ledger)
    ledger.standing = ()
    ledger.add_caveat("three")  # at once
    assert ledger.caveats == Ledger.read(path).caveats == ("one", "two", "three")
    ledger.set_target(8.0, DELTA)
    spent(ledger)
    assert Ledger.read(path).caveats == ("one", "two", "three") and Ledger.read(path).entries == ledger.entries
    for bad in ("", 3):
        with pytest.raises(PrivacySpecError, match="sentence"):
            ledger.add_caveat(bad)
    ledger.standing = (4,)
    with pytest.raises(PrivacySpecError, match="sentence"):
        spent(ledger)  # it would leave a file that cannot be read
    assert Ledger.read(path).caveats == ("one", "two", "three")


def test_a_spend_that_is_repeated_brings_its_caveats(path: Path) -> None:
    first = Ledger("rdp", path)
    state = first.state_dict()
    spent(first)
    first.close()
    second = Ledger("rdp", path)
    second.load_state_dict(state, replays=True)
    second.standing = ("the code has learnt to say this",)
    spent(second)
    assert counts(Ledger.read(path)) == [("training", 1)] and Ledger.read(path).caveats == second.standing


def test_caveats_of_a_checkpoint_are_merged(path: Path) -> None:
    ledger = Ledger("rdp", path)
    ledger.add_caveat("of the file")
    state = {**ledger.state_dict(), "caveats": ["of the checkpoint", "of the file"]}
    ledger.load_state_dict(state, replays=True)
    alone = Ledger("rdp")
    alone.add_caveat("of its own")
    alone.load_state_dict(state, replays=False)
    assert ledger.caveats == Ledger.read(path).caveats == ("of the file", "of the checkpoint")
    assert alone.caveats == ("of its own", "of the checkpoint", "of the file")
