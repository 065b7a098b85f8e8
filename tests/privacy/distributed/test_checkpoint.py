"""Several processes and what can go wrong: deaths, restarts, checkpoints, other numbers of processes, the ledger."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dpquant_compile as dpq
from tests.privacy.distributed.test_world import close, same
from tests.support import distributed_workers as workers
from tests.support.distributed_workers import DELTA
from tests.support.processes import Raised, alone, succeeded, together

ROOT = Path(__file__).parents[3]


def on_disk(path: Path) -> int:
    """The number of spends in a ledger's file."""
    return sum(entry.steps for entry in dpq.Ledger.read(path).entries)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_run_and_no_entry_is_lost(victim: int, tmp_path: Path) -> None:
    results = together(2, workers.dying, tmp_path, victim, 6, folder=tmp_path)
    assert results[victim] is None
    text, steps, unchanged = results[1 - victim]
    assert f"rank {1 - victim} of 2 lost touch with the other processes after 6 optimizer steps" in text
    assert "No entry of the privacy ledger is lost" in text and "--max-restarts" in text
    assert steps == 6 and unchanged, "nothing came of the step that rank 0 has not paid for, or not added to"
    # Six steps and the analysis after the first epoch, of four; rank 0 may have paid for the seventh.
    assert on_disk(tmp_path / "ledger.json") in ([7] if victim == 0 else [7, 8])


def test_no_process_gets_a_sum_before_its_entry_is_on_disk(tmp_path: Path) -> None:
    """Other processes may read data while rank 0 still writes, but what they get of a step comes after that."""
    written, done = succeeded(together(2, workers.slow_ledger, tmp_path, folder=tmp_path))
    assert len(written) == len(done) == 4
    assert all(entry < step for entry, step in zip(written, done, strict=True))
    assert on_disk(tmp_path / "ledger.json") == 4


@pytest.mark.slow
def test_torchrun_restarts_from_the_checkpoint(tmp_path: Path) -> None:
    """Rank 1 is killed in the second epoch of its first life; the second life ends as a run without a death."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [*command, "-m", workers.__name__, tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "exitcode: -9" in done.stderr
    results = [torch.load(tmp_path / f"result-{rank}.pt", weights_only=False) for rank in range(2)]
    whole = succeeded(together(2, workers.whole_run, {}, folder=tmp_path))
    for name in ("parameters", "policies", "scores", "epsilon", "entries"):
        assert same(results + whole, name), name
    assert dpq.Ledger.read(tmp_path / "ledger.json").epsilon(DELTA) == whole[0]["epsilon"]
    assert len([p for p in tmp_path.iterdir() if p.name.startswith(".checkpoint.")]) == 1  # older ones are gone


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
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


@pytest.mark.parametrize("kept", [True, False], ids=["ledger on disk", "no file"])
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


def test_an_error_of_rank_0_is_raised_on_all_processes(tmp_path: Path) -> None:
    """Only rank 0 can see that the checkpoint is of another ledger."""
    options, path = {"ledger_path": tmp_path / "ledger.json"}, tmp_path / "checkpoint"
    succeeded(together(2, workers.train_and_save, options, path, 1, folder=tmp_path))
    other = {"ledger_path": tmp_path / "other.json"}
    for result in together(2, workers.other_ledger, other, path, folder=tmp_path):
        assert isinstance(result, Raised) and result.kind == "LedgerError" and "different runs" in result.text


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


@pytest.mark.slow
def test_benchmark_runs_on_its_small_setting(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "ddp.py", "--smoke", "--json", tmp_path / "figures.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(word in done.stdout for word in ("1 process", "2 processes", "samples/s", "communication"))
    assert (tmp_path / "figures.json").exists()


@pytest.mark.slow
def test_example_runs_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, ROOT / "examples" / "ddp.py", "--epochs", "2", "--out", tmp_path / "out"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("differentially private") == 1  # said by rank 0 alone
    assert (tmp_path / "out" / "checkpoint").is_dir() and on_disk(tmp_path / "out" / "ledger.json") > 2
