"""Checkpoints: a resumed run ends as an uninterrupted one, bit for bit; what does not fit is refused."""

import copy
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dpquant_compile as dpq
from dpquant_compile.errors import CheckpointError, LedgerError, PrivateTrainingError
from tests.support.resuming import DELTA, EPOCHS, STEPS, Net, engine_of, epoch, made_private_again, result_of, same

pytestmark = pytest.mark.slow  # each test trains several runs

OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": lambda: Net(width=6)}, "body.0.weight"),
    "buffer": ({"model": lambda: Net(frozen=5)}, "table"),
    "optimizer": ({"optimizer": lambda p: torch.optim.Adam(p, lr=0.1)}, "'SGD' saved, 'Adam' here"),
    "format": ({"compile_options": {"format": "uniform4"}}, "recipe: 'luq_fp4.*uniform4"),
    "rounding seed": ({"compile_options": {"seed": 8}}, "seed: 0 saved, 8 here"),
    "clipping": ({"max_grad_norm": 1.0}, r"max_grad_norm: \[0.5\] saved, \[1.0\] here"),
    "noise": ({"noise_multiplier": 2.0}, "noise_multiplier: 1.0 saved, 2.0 here"),
    "data": ({"samples": 49}, "dataset size: 48 saved, 49 here"),
    "micro-batches": ({"max_physical_batch_size": 12}, "max_physical_batch_size: 8 saved, 12 here"),
    "schedule": ({"schedule": {"beta": 3.0}}, r"What differs: scheduler\.beta: 10\.0 saved, 3\.0 here$"),
    "no schedule": ({"schedule": None}, "scheduler"),
    "secure mode": ({"secure": True}, "secure_mode: False saved, True here"),
}


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    engine = engine_of(schedule={})
    epoch(engine)
    return copy.deepcopy(engine.state_dict())  # the model goes on to other tests


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_run_is_refused_and_says_what_differs(name: str, trained: dict[str, Any]) -> None:
    options, message = OTHERS[name]
    engine = engine_of(**{"schedule": {}, **options})
    before = result_of(engine)
    with pytest.raises(CheckpointError, match=message):
        engine.load_state_dict(trained)
    after = result_of(engine)
    assert same(before, after)


def test_noise_of_another_release_is_not_taken_for_that_of_this_one(trained: dict[str, Any]) -> None:
    """The same seed gives other noise: a repetition would be a second release that nobody pays for."""
    noise = {name: value for name, value in trained["noise"].items() if name != "version"}
    engine = engine_of(schedule={})
    before = result_of(engine)
    with pytest.raises(CheckpointError, match=r"another release of dpquant_compile.*replay=False"):
        engine.load_state_dict({**trained, "noise": noise})
    assert same(before, result_of(engine))
    engine.load_state_dict({**trained, "noise": noise}, replay=False)
    assert engine.run.noise.state_dict()["seed"] != noise["seed"]


def test_broken_checkpoints_are_refused(tmp_path: Path, trained: dict[str, Any]) -> None:
    engine = engine_of(schedule={})
    before = result_of(engine)
    with pytest.raises(CheckpointError, match="version 99"):
        engine.load_state_dict({**trained, "version": 99})
    for missing in ("optimizer", "noise", "config"):
        with pytest.raises(CheckpointError):
            engine.load_state_dict({key: value for key, value in trained.items() if key != missing})
    source = engine_of(schedule={})
    source.save_checkpoint(path=tmp_path / "c.pt")
    data = (tmp_path / "c.pt").read_bytes()
    for size in (0, 10, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.pt").write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"cut\.pt"):
            engine.load_checkpoint(path=tmp_path / "cut.pt")
    torch.save({"weights": 1}, tmp_path / "other.pt")
    for path in (tmp_path / "other.pt", tmp_path / "nowhere.pt"):
        with pytest.raises(CheckpointError, match=path.name):
            engine.load_checkpoint(path=path)
    assert same(result_of(engine), before)


def test_a_ledger_of_another_run_is_refused(tmp_path: Path, trained: dict[str, Any]) -> None:
    engine = engine_of(tmp_path, schedule={})
    before = models_state(engine)
    with pytest.raises((LedgerError, CheckpointError), match="different runs"):
        engine.load_state_dict(trained)
    assert same(models_state(engine), before)


def models_state(engine: dpq.PrivacyEngine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.run.session.model.state_dict().items()}


def test_a_failing_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    engine.save_checkpoint(path=tmp_path / "c.pt")
    old = (tmp_path / "c.pt").read_bytes()
    epoch(engine)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space left"):
        engine.save_checkpoint(path=tmp_path / "c.pt")
    assert (tmp_path / "c.pt").read_bytes() == old


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


# Each run is a process of its own. They are forked off a server that has imported this file, which takes six seconds.
CONTEXT = multiprocessing.get_context("forkserver")


def main(folder: Path, tell: Any) -> None:
    """The run: train from the last checkpoint on, or from the start, and leave the result in the folder."""
    torch.set_num_threads(1)
    engine = engine_of(folder, schedule={})
    path = folder / "checkpoint.pt"
    if path.exists():
        engine.load_checkpoint(path=path)
    else:
        engine.save_checkpoint(path=path)  # before anything is spent: from here on a restart is a replay
    while engine.scheduler.epoch < EPOCHS:
        epoch(engine, tell.send)
        engine.save_checkpoint(path=path)
        tell.send("saved")
    torch.save(result_of(engine), folder / "result.pt")


def start(folder: Path) -> tuple[Any, Any]:
    """The process, and the words that it tells."""
    CONTEXT.set_forkserver_preload([__name__])
    folder.mkdir(exist_ok=True)
    words, tell = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=main, args=(folder, tell))
    process.start()
    tell.close()
    return process, words


def killed_after(folder: Path, count: int, delay: float) -> None:
    """Start the run, and kill it a moment after its word of this number."""
    process, words = start(folder)
    for _ in range(count):
        words.recv()
    time.sleep(delay)
    process.kill()  # SIGKILL: no handler, no clean-up
    process.join()
    assert process.exitcode == -9 and not (folder / "result.pt").exists()


def finished(process: Any, words: Any) -> bool:
    try:
        while True:
            words.recv()
    except EOFError:
        process.join()
    return process.exitcode == 0


def test_a_run_that_is_killed_at_random_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = start(tmp_path / "whole")  # beside the others
    chance, folder = random.Random(17), tmp_path / "killed"
    # An epoch tells about ten words. In the first epoch; in a later one; in an analysis or a checkpoint; anywhere.
    for count in (chance.randint(2, 7), chance.randint(11, 17), 9, chance.randint(1, 17)):
        killed_after(folder, count, 0.1 * chance.random())
    assert finished(*start(folder)) and finished(*whole)
    first, second = (torch.load(tmp_path / name / "result.pt", weights_only=True) for name in ("whole", "killed"))
    assert [name for name in first if not same(first[name], second[name])] == []
    assert len(first["scheduler"]["history"]) == EPOCHS and first["scheduler"]["analyses"] == EPOCHS - 1
    on_disk = [dpq.Ledger.read(tmp_path / name / "ledger.json") for name in ("whole", "killed")]
    assert on_disk[0].entries == on_disk[1].entries
    assert sum(e.steps for e in on_disk[0].entries if e.purpose == "training") == STEPS * EPOCHS


def test_a_checkpoint_is_plain_and_brings_everything_back(tmp_path: Path) -> None:
    first = engine_of(schedule={})
    epoch(first)
    first.save_checkpoint(path=tmp_path / "c.pt", checkpoint_dict={"note": "of mine"})
    saved = result_of(first)
    epoch(first)
    assert set(torch.load(tmp_path / "c.pt", weights_only=True)) == {"note", "dpquant"}
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]  # no temporary file is left
    second = engine_of(schedule={})
    torch.manual_seed(99)
    assert second.load_checkpoint(path=tmp_path / "c.pt") == {"note": "of mine"}
    assert same(result_of(second), saved)
    epoch(second)
    assert same(result_of(second), result_of(first))


def test_schedules_of_noise_and_clipping_are_in_it() -> None:
    first = engine_of()
    epoch(first)
    first.run.optimizer.noise_multiplier, first.run.optimizer.max_grad_norm = 0.7, 0.25
    state = copy.deepcopy(first.state_dict())
    epoch(first)
    second = engine_of()
    second.load_state_dict(state)
    assert (second.run.optimizer.noise_multiplier, second.run.optimizer.max_grad_norm) == (0.7, 0.25)
    epoch(second)
    assert same(result_of(second), result_of(first))


def test_a_replay_is_not_charged_and_what_follows_is(tmp_path: Path) -> None:
    first = engine_of(tmp_path, schedule={})
    epoch(first)
    first.save_checkpoint(path=tmp_path / "c.pt")
    epoch(first)
    entries, state = first.ledger.entries, result_of(first)
    first.close()
    second = engine_of(tmp_path, schedule={})
    second.load_checkpoint(path=tmp_path / "c.pt")
    assert second.ledger.entries == entries  # what was spent stays spent
    epoch(second)
    assert second.ledger.entries == entries and same(result_of(second), state)
    epoch(second)
    assert second.get_epsilon(DELTA) > first.get_epsilon(DELTA)


def test_a_replay_that_departs_is_stopped_and_goes_on_only_with_new_noise(tmp_path: Path) -> None:
    """The same noise on another sum would leave their difference bare."""
    first = engine_of(tmp_path, schedule={})
    epoch(first)
    first.save_checkpoint(path=tmp_path / "c.pt")
    epoch(first)
    spent, drawn = first.ledger.entries, first.run.noise.state_dict()
    first.close()
    second = engine_of(tmp_path, schedule={})
    second.load_checkpoint(path=tmp_path / "c.pt")
    second.run.optimizer.original_optimizer.param_groups[0]["lr"] = 0.3
    with pytest.raises(PrivateTrainingError, match="replay=False"):
        epoch(second)
    assert second.ledger.entries == spent
    second.close()
    third = engine_of(tmp_path, schedule={})
    third.load_checkpoint(path=tmp_path / "c.pt", replay=False)
    assert third.run.noise.state_dict()["seed"] != drawn["seed"]
    third.run.optimizer.original_optimizer.param_groups[0]["lr"] = 0.3
    epoch(third)
    assert sum(e.steps for e in third.ledger.entries if e.purpose == "training") == 3 * STEPS


def batches_of(engine: dpq.PrivacyEngine) -> list[tuple[float, ...]]:
    """The samples of an epoch's batches, by their first features."""
    return [tuple(x[:, 0].tolist()) for x, _ in engine.run.loader]


@pytest.mark.parametrize("departs", [False, True], ids=["replay=False", "another sigma"])
def test_a_run_that_repeats_nothing_draws_other_batches(tmp_path: Path, departs: bool) -> None:
    """Batches that came again would be counted as independent draws, which they are not."""
    first = engine_of(tmp_path)
    first.save_checkpoint(path=tmp_path / "c.pt")
    drawn = batches_of(first)
    first.close()
    repeated = engine_of(tmp_path)
    repeated.load_checkpoint(path=tmp_path / "c.pt")
    assert batches_of(repeated) == drawn
    repeated.close()
    other = engine_of(tmp_path)
    other.load_checkpoint(path=tmp_path / "c.pt", replay=departs)
    if departs:
        other.run.optimizer.noise_multiplier = 2.0
    assert not set(batches_of(other)) & {batch for batch in drawn if len(batch) > 2}


def test_workers_that_drew_ahead_stop_a_run_that_departs(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    loader = engine.run.loader
    loader.num_workers, loader.prefetch_factor = 1, 2
    batches = iter(loader)
    next(batches)
    with pytest.raises(PrivateTrainingError, match="num_workers=0"):
        engine.renew()
    list(batches)
    engine.renew()  # between epochs nothing is drawn ahead


def test_a_replay_that_nothing_checks_is_told() -> None:
    first, second = engine_of(), engine_of()
    second.load_state_dict(first.state_dict())
    assert "noise may have been used twice" in second.ledger.statement(DELTA)
    assert "used twice" not in first.ledger.statement(DELTA)


def test_what_is_not_counted_stays_said() -> None:
    first = engine_of()
    again, third = engine_of(), engine_of()
    again.load_state_dict(first.state_dict(), replay=False)
    third.load_state_dict(again.state_dict())
    for engine in (again, third):
        assert "are not counted here" in engine.ledger.statement(DELTA)


@pytest.mark.parametrize("on_disk", [True, False])
def test_secure_mode_charges_everything_again(tmp_path: Path, on_disk: bool) -> None:
    folder = tmp_path if on_disk else None
    first = engine_of(folder, secure=True, schedule={})
    epoch(first)
    first.save_checkpoint(path=tmp_path / "c.pt")
    at_checkpoint = first.get_epsilon(DELTA)
    epoch(first)
    beyond = first.get_epsilon(DELTA)
    first.close()
    second = engine_of(folder, secure=True, schedule={})
    second.load_checkpoint(path=tmp_path / "c.pt")
    assert second.get_epsilon(DELTA) == (beyond if on_disk else at_checkpoint)
    weights = [first, second]
    epoch(second)
    steps = sum(e.steps for e in second.ledger.entries if e.purpose == "training")
    assert steps == STEPS * (3 if on_disk else 2) and second.get_epsilon(DELTA) >= beyond
    # The randomness is new, so this is another release than the first run's.
    a, b = (dict(engine.run.session.model.named_parameters()) for engine in weights)
    assert not any(torch.equal(a[name], b[name]) for name in a)


def test_no_checkpoint_while_a_loop_is_under_way(tmp_path: Path) -> None:
    engine = engine_of(max_physical_batch_size=4)
    left = len(engine.run.loader)
    assert left > 8
    for x, y in engine.run.loader:
        engine.run.criterion(engine.run.session.model(x), y).backward()
        left -= 1
        if left == 0:  # after the last step the epoch is over, though the loop has not asked for more
            with pytest.raises(CheckpointError, match="between epochs"):
                engine.save_checkpoint(path=tmp_path / "c.pt")
        engine.run.optimizer.step()
        if left > 0:
            with pytest.raises(CheckpointError, match="between epochs"):
                engine.save_checkpoint(path=tmp_path / "c.pt")
    assert left == 0 and not any(tmp_path.iterdir())
    engine.save_checkpoint(path=tmp_path / "c.pt")


def test_an_engine_that_has_trained_does_not_go_back() -> None:
    engine = engine_of()
    state = engine.state_dict()
    epoch(engine)
    before = result_of(engine)
    with pytest.raises(CheckpointError, match="trained already"):
        engine.load_state_dict(state)
    assert same(result_of(engine), before)
