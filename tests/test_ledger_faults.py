"""What must not be forgotten: caveats of a run, and spends when a checkpoint is loaded or a ledger is copied."""

import hashlib
import json
from pathlib import Path

import distributed_workers as workers
import pytest
import torch
from ledgers import DELTA, counts, spent
from processes import succeeded, together
from resuming import engine_of, epoch, result_of, same
from torch.utils.data import DataLoader

import dpquant_compile as dpq
from dpquant_compile.errors import LedgerError, PrivacySpecError, PrivateTrainingError
from dpquant_compile.privacy.accounting.ledger import Ledger
from dpquant_compile.privacy.distributed.world import World


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.json"


# Caveats

SECURE_OFF = "secure_mode was off"


def version_1(path: Path, ledger: Ledger) -> None:
    """Write the file that the earlier release would have written of a ledger."""
    body = {
        "version": 1,
        "accountant": ledger.accountant,
        "target_epsilon": None,
        "target_delta": None,
        **{name: ledger.state_dict()[name] for name in ("entries", "runs")},
    }
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps({**body, "checksum": hashlib.sha256(canonical).hexdigest()}, indent=1))


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


def test_what_the_earlier_release_wrote_is_read_and_goes_on(path: Path) -> None:
    old = Ledger("rdp")
    spent(old, steps=5)
    state = {name: value for name, value in {**old.state_dict(), "version": 1}.items() if name != "caveats"}
    version_1(path, old)
    before = path.read_bytes()
    assert "did not record whether secure_mode was on" in Ledger.read(path).statement(DELTA)
    ledger = Ledger("rdp", path)
    assert path.read_bytes() == before  # opening is no reason to write
    ledger.load_state_dict(state, replays=True)
    spent(ledger, steps=2)
    assert counts(Ledger.read(path)) == [("training", 7)]
    alone = Ledger("rdp")
    alone.load_state_dict(state, replays=True)
    assert alone.caveats == ledger.caveats == Ledger.read(path).caveats and len(alone.caveats) == 1
    assert json.loads(path.read_bytes())["version"] == 2


def test_a_checkpoint_of_the_earlier_release_keeps_what_it_says() -> None:
    source = engine_of()
    state = source.state_dict()
    old = {name: value for name, value in state["ledger"].items() if name != "caveats"}
    engine = engine_of()
    engine.load_state_dict({**state, "ledger": {**old, "version": 1}, "uncounted": True})
    assert "uncounted" not in state and "are not counted here" in engine.ledger.statement(DELTA)
    again = engine_of()
    again.load_state_dict(engine.state_dict())
    assert "are not counted here" in again.ledger.statement(DELTA)


# Going back


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


def made_private_again(engine: dpq.PrivacyEngine, lr: float = 0.2) -> None:
    """`make_private` as `engine_of` did it: the noise is at its beginning again."""
    made = engine.run
    engine.make_private(
        module=made.session.model,
        optimizer=torch.optim.SGD(made.session.model.parameters(), lr=lr, momentum=0.9),
        criterion=torch.nn.CrossEntropyLoss(),
        data_loader=DataLoader(made.loader.dataset, batch_size=12, generator=torch.Generator().manual_seed(2)),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        max_physical_batch_size=8,
        noise_generator=torch.Generator().manual_seed(3),
    )


def test_a_checkpoint_into_an_engine_that_has_spent_keeps_what_it_spent() -> None:
    engine = engine_of()
    start = engine.state_dict()
    epoch(engine)
    spends, result = engine.ledger.entries, result_of(engine)
    made_private_again(engine)
    engine.load_state_dict(start)
    assert engine.ledger.entries == spends
    epoch(engine)
    assert engine.ledger.entries == spends and same(result_of(engine), result)  # the same releases: nothing new
    epoch(engine)
    assert sum(entry.steps for entry in engine.ledger.entries) == 8


def test_a_repetition_within_one_engine_is_verified_without_a_file() -> None:
    engine = engine_of()
    start = engine.state_dict()
    epoch(engine)
    made_private_again(engine)
    engine.load_state_dict(start)
    engine.run.optimizer.original_optimizer.param_groups[0]["lr"] = 0.3
    with pytest.raises(PrivateTrainingError, match=r"does not repeat.*replay=False"):
        epoch(engine)
    assert sum(entry.steps for entry in engine.ledger.entries) == 4


def test_a_step_that_failed_before_its_release_is_repeated_within_one_engine() -> None:
    whole = engine_of()
    epoch(whole)
    result = result_of(whole)
    engine = engine_of()
    start, seen = engine.state_dict(), []
    account = engine.run.optimizer._account
    note = account.note

    def fail(values: list[torch.Tensor]) -> None:
        seen.append(1)
        if len(seen) == 3:
            raise KeyboardInterrupt
        note(values)

    account.note = fail
    with pytest.raises(KeyboardInterrupt):
        epoch(engine)
    made_private_again(engine)
    engine.load_state_dict(start)
    epoch(engine)
    assert same(result_of(engine), result)


def test_a_checkpoint_of_another_run_leaves_an_engine_that_has_spent_as_it_was() -> None:
    other, engine = engine_of(), engine_of()
    for one in (other, engine):
        epoch(one)
    made_private_again(engine)
    before = result_of(engine)
    for replay in (True, False):
        with pytest.raises(LedgerError, match="different runs"):
            engine.load_state_dict(other.state_dict(), replay=replay)
        assert same(result_of(engine), before)


def spends_of_rank_1(again: bool) -> list[str]:
    """Rank 1 has a spend of its own before the ledger of rank 0 is copied to it."""
    engine = workers.engine_of()
    state = engine.state_dict() if workers.rank() == 0 else None
    if workers.rank() == 1:
        engine.ledger.spend("training", q=0.5, sigma=2.0)
    try:
        if again:
            made_private_again(engine)
        else:
            engine.load_state_dict(World.current().on_first("a state", lambda: state))
    except dpq.errors.DPQuantError as error:
        return [type(error).__name__, str(error), *map(repr, engine.ledger.entries)]
    return ["nothing", "", *map(repr, engine.ledger.entries)]


@pytest.mark.parametrize("again", [True, False], ids=["make_private", "load_checkpoint"])
def test_a_process_does_not_drop_spends_that_rank_0_lacks(again: bool, tmp_path: Path) -> None:
    first, second = succeeded(together(2, spends_of_rank_1, again, folder=tmp_path))
    for kind, text, *_ in (first, second):
        assert kind == ("LedgerError" if again else "DistributedError"), text
        assert "rank 1 of 2 has privacy spends that rank 0 lacks" in text if again else "at load_checkpoint" in text
    assert len(first) == 2 and "sigma=2.0" in second[2]
