"""Checkpoints of several processes: restarts, other numbers of processes, and spends that no process may lose."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dpquant_compile as dpq
from dpquant_compile.privacy.distributed.world import World
from tests.support import distributed_workers as workers
from tests.support.distributed_workers import DELTA
from tests.support.heavy import few
from tests.support.processes import Raised, alone, close, on_disk, same, succeeded, together
from tests.support.resuming import made_private_again

pytestmark = pytest.mark.slow  # each test starts processes

ROOT = Path(__file__).parents[3]


@pytest.mark.heavy
@pytest.mark.parametrize("form", ["whole", "sharded"])
def test_torchrun_restarts_from_the_checkpoint(form: str, tmp_path: Path) -> None:
    """Rank 1 is killed in the second epoch of its first life; the second life ends as a run without a death."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [*command, "-m", workers.__name__, tmp_path, form],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "exitcode: -9" in done.stderr
    results = [torch.load(tmp_path / f"result-{rank}.pt", weights_only=False) for rank in range(2)]
    options = {"wrap": workers.sharded} if form == "sharded" else {}
    whole = succeeded(together(2, workers.whole_run, options, folder=tmp_path))
    for name in ("parameters", "policies", "scores", "epsilon", "entries"):
        assert same(results + whole, name), name
    assert dpq.Ledger.read(tmp_path / "ledger.json").epsilon(DELTA) == whole[0]["epsilon"]
    assert len([p for p in tmp_path.iterdir() if p.name.startswith(".checkpoint.")]) == 1  # older ones are gone


@pytest.mark.parametrize(("before", "after"), few([(2, 1), (1, 2), (2, 4)], (2, 1)))
def test_resume_on_another_number_of_processes(before: int, after: int, tmp_path: Path) -> None:
    options, path = {"ledger_path": tmp_path / "ledger.json"}, tmp_path / "checkpoint"
    succeeded(together(before, workers.train_and_save, options, path, 2, folder=tmp_path))
    assert path.is_symlink() == path.is_dir() == (before > 1)
    again = tmp_path / "again"
    results = succeeded(together(after, workers.resume, options, path, again, folder=tmp_path))
    whole = alone(workers.whole_run, {}, folder=tmp_path)
    assert same(results, "parameters") and same(results, "policies")
    assert results[0]["policies"] == whole["policies"] and results[0]["epsilon"] == whole["epsilon"]
    assert results[0]["entries"] == whole["entries"] and close(results[0]["parameters"], whole["parameters"], 1e-4)
    assert again.exists()


def test_resume_on_as_many_processes_repeats_bit_for_bit(tmp_path: Path) -> None:
    """The ledger is ahead of the checkpoint by an epoch and an analysis, which the resumed run is not charged again."""
    options, path = {"ledger_path": tmp_path / "ledger.json"}, tmp_path / "checkpoint"
    succeeded(together(2, workers.train_and_save, options, path, 1, 1, folder=tmp_path))
    ahead = on_disk(tmp_path / "ledger.json")
    results = succeeded(together(2, workers.resume, options, path, folder=tmp_path))
    whole = succeeded(together(2, workers.whole_run, {}, folder=tmp_path))
    assert same(results + whole, "parameters") and same(results + whole, "epsilon")
    assert on_disk(tmp_path / "ledger.json") == 3 * 4 + 2 and ahead == 2 * 4 + 2


def test_a_repetition_that_differs_is_stopped_on_all_processes(tmp_path: Path) -> None:
    options, path = {"ledger_path": tmp_path / "ledger.json"}, tmp_path / "checkpoint"
    succeeded(together(2, workers.train_and_save, options, path, 1, 1, folder=tmp_path))
    changed: dict[str, Any] = {**options, "data": workers.records(48)}
    changed["data"].tensors[0].mul_(1.5)
    for result in together(2, workers.resume, changed, path, folder=tmp_path):
        assert isinstance(result, Raised) and result.kind == "PrivateTrainingError"
        assert "does not repeat the interrupted one" in result.text


@pytest.mark.parametrize("kept", few([True, False], True), ids=["ledger on disk", "no file"])
def test_another_number_of_processes_repeats_nothing(kept: bool, tmp_path: Path) -> None:
    """Its sums differ in the last bits: the noise of releases since the checkpoint must not come again."""
    options = {"ledger_path": tmp_path / "ledger.json"} if kept else {}
    path = tmp_path / "checkpoint"
    succeeded(together(2, workers.train_and_save, options, path, 1, 1, folder=tmp_path))
    one = alone(workers.resume, options, path, folder=tmp_path)
    whole = alone(workers.whole_run, {}, folder=tmp_path)
    assert not close(one["parameters"], whole["parameters"], 1e-2)
    assert one["drawn"][0] != whole["drawn"][1], "batches that come again are no independent draws"
    assert one["epsilon"] > whole["epsilon"] if kept else one["epsilon"] == whole["epsilon"]


def test_a_state_is_rank_0s(tmp_path: Path) -> None:
    first, second = together(2, workers.state_on_each, folder=tmp_path)
    assert "model" in first and "world" in first
    assert isinstance(second, Raised) and second.kind == "CheckpointError"
    assert "save_checkpoint() on every process" in second.text


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    succeeded(together(2, workers.train_and_save, {}, path, 1, folder=tmp_path))
    (path / ".metadata").unlink()
    result = together(1, workers.resume, {}, path, folder=tmp_path)[0]
    assert isinstance(result, Raised) and result.kind == "CheckpointError" and "no checkpoint" in result.text


@pytest.mark.parametrize(("before", "after"), few([(2, 1), (1, 2)], (1, 2)))
def test_resume_with_the_default_physical_batch(before: int, after: int, tmp_path: Path) -> None:
    schedule: dict[str, Any] = {"max_physical_batch_size": None, "schedule": {"n_sample": 1}}
    options, path = {**schedule, "ledger_path": tmp_path / "ledger.json"}, tmp_path / "checkpoint"
    succeeded(together(before, workers.train_and_save, options, path, 2, folder=tmp_path))
    results = succeeded(together(after, workers.resume, options, path, folder=tmp_path))
    whole = alone(workers.whole_run, schedule, folder=tmp_path)
    assert all(results[0][name] == whole[name] for name in ("policies", "epsilon", "entries"))
    assert close(results[0]["parameters"], whole["parameters"], 1e-4)
    chosen = {**options, "max_physical_batch_size": 4}
    for result in together(after, workers.resume, chosen, path, folder=tmp_path):
        assert isinstance(result, Raised) and "max_physical_batch_size: " in result.text


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
