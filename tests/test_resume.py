"""Checkpoints: a run that is killed again and again ends where an uninterrupted one does, bit for bit."""

import copy
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from resuming import DELTA, EPOCHS, STEPS, engine_of, epoch, result_of, same

import dpquant_compile as dpq
from dpquant_compile.errors import CheckpointError, PrivateTrainingError
from dpquant_compile.privacy.mechanism import gaussian as noise

# Killed and started again

# Each run is a process of its own. They are forked off a server that has imported this file, which takes six seconds.
CONTEXT = multiprocessing.get_context("forkserver")


def main(folder: Path, tell: Any) -> None:
    """The run: train from the last checkpoint on, or from the start, and leave the result in the folder."""
    torch.set_num_threads(1)
    noise._missing_compiler = lambda: "it would take four seconds at every start"
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


@pytest.mark.slow
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


# In one process


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
    refused = 0
    for x, y in engine.run.loader:
        engine.run.criterion(engine.run.session.model(x), y).backward()
        engine.run.optimizer.step()
        with pytest.raises(CheckpointError, match="between epochs"):
            engine.save_checkpoint(path=tmp_path / "c.pt")
        refused += 1
    assert refused > 8 and not any(tmp_path.iterdir())
    engine.save_checkpoint(path=tmp_path / "c.pt")


def test_an_engine_that_has_trained_does_not_go_back() -> None:
    engine = engine_of()
    state = engine.state_dict()
    epoch(engine)
    before = result_of(engine)
    with pytest.raises(CheckpointError, match="trained already"):
        engine.load_state_dict(state)
    assert same(result_of(engine), before)
