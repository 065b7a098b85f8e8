"""One owner of a ledger: no second process, no forked child, and one file whatever the path."""

import copy
import errno
import fcntl
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dpquant_compile as dpq
from dpquant_compile.errors import CheckpointError, LedgerError
from dpquant_compile.lab import RunConfig
from dpquant_compile.lab.tasks import Task, register_task
from dpquant_compile.lab.train import train
from dpquant_compile.privacy.accounting.ledger import Ledger
from tests.support.ledgers import DELTA, counts, spent
from tests.support.resuming import engine_of, epoch
from tests.support.tiny_task import tiny_data, tiny_model

pytestmark = pytest.mark.slow  # most start processes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.json"


def script(text: str, *args: Any) -> "subprocess.Popen[str]":
    """A process that runs `text`, which has the ledger's class at hand, and what it prints."""
    begin = "import os, sys, time\nfrom dpquant_compile.errors import LedgerError\n"
    text = f"{begin}from dpquant_compile.privacy.accounting.ledger import Ledger\n{text}"
    return subprocess.Popen([sys.executable, "-c", text, *map(str, args)], stdout=subprocess.PIPE, text=True)


# One owner


OWNER = """
ledger = Ledger("rdp", sys.argv[1])
ledger.spend("training", q=0.02, sigma=1.0)
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_another_process_cannot_open_a_ledger_that_is_in_use(path: Path) -> None:
    with script(OWNER, path) as owner:
        assert owner.stdout is not None
        pid = owner.stdout.readline().strip()
        try:
            with pytest.raises(LedgerError, match=rf"ledger\.json is in use by process {pid} .*close\(\)"):
                Ledger("rdp", path)
            assert counts(Ledger.read(path)) == [("training", 1)]  # reading needs no lock
        finally:
            owner.kill()
    ledger = Ledger("rdp", path)  # the lock has ended with its owner
    spent(ledger)
    assert counts(Ledger.read(path)) == [("training", 2)]


def test_a_second_owner_in_the_same_process_is_refused_until_the_first_is_closed(path: Path) -> None:
    first = Ledger("rdp", path)
    with pytest.raises(LedgerError, match=rf"in use by this process \({os.getpid()}\) itself"):
        Ledger("rdp", path)
    first.close()
    second = Ledger("rdp", path)
    spent(second)
    with pytest.raises(LedgerError, match=r"was closed.*Nothing was spent"):
        spent(first)
    assert counts(Ledger.read(path)) == [("training", 1)]


def test_a_ledger_that_nobody_holds_any_more_is_free(path: Path) -> None:
    first = Ledger("rdp", path, 2.0, DELTA)
    first.check("training", q=0.02, sigma=1.0)  # which leaves a cycle of references
    with pytest.raises(LedgerError, match="in use"):
        Ledger("rdp", path)
    gc.disable()
    try:
        del first
        Ledger("rdp", path).close()
    finally:
        gc.enable()


def test_a_ledger_for_reading_takes_no_spend(path: Path) -> None:
    Ledger("rdp", path).close()
    ledger = Ledger.read(path)
    before = path.read_bytes()
    for refused in (
        lambda: spent(ledger),
        lambda: ledger.check("training", q=0.02, sigma=1.0),
        lambda: ledger.set_target(1.0, DELTA),
        lambda: ledger.load_state_dict(ledger.state_dict(), replays=True),
    ):
        with pytest.raises(LedgerError, match=r"Ledger\.read, for reading.*ledger_path"):
            refused()
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir() if file != path] == [".ledger.json.lock"]


def test_an_engine_lets_go_of_its_ledger_when_it_is_closed(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        epoch(engine)
        with pytest.raises(LedgerError, match="in use"):
            dpq.PrivacyEngine(accountant="rdp", ledger_path=tmp_path / "ledger.json")
    spends = engine.ledger.entries
    with pytest.raises(LedgerError, match="was closed"):
        epoch(engine)
    again = dpq.PrivacyEngine(accountant="rdp", ledger_path=tmp_path / "ledger.json")
    assert again.ledger.entries == engine.ledger.entries == spends and spends[0].steps == 4
    again.close()


def test_a_filesystem_without_locks_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", none)
        with pytest.raises(LedgerError, match=rf"folder {path.parent} has no locks .*local disk"):
            Ledger("rdp", path)
    assert not path.exists()
    Ledger("rdp", path).close()


def test_a_lock_file_that_was_removed_stops_the_owner(path: Path) -> None:
    """Whoever opens the ledger then gets a lock of its own."""
    ledger = Ledger("rdp", path)
    path.with_name(".ledger.json.lock").unlink()
    with pytest.raises(LedgerError, match=r"\.ledger\.json\.lock was removed.*Nothing was spent"):
        spent(ledger)
    assert counts(ledger) == counts(Ledger.read(path)) == []


def test_a_ledger_is_not_copied(path: Path) -> None:
    for ledger in (Ledger("rdp"), Ledger("rdp", path)):
        with pytest.raises(LedgerError, match="state_dict"):
            copy.deepcopy(ledger)


def test_a_run_of_the_lab_that_fails_lets_go_of_its_ledger(tmp_path: Path) -> None:
    def stop(row: Any) -> None:
        raise KeyboardInterrupt

    defaults = dict(lr=0.5, batch_size=40, epochs=2, physical=24, n_sample=2, delta=1e-3)
    task = Task("tiny-ledger", "for tests", tiny_model, tiny_data, "nothing", defaults, inner="eager")
    config = RunConfig(register_task(task).name)
    with pytest.raises(KeyboardInterrupt) as first:
        train(config, tmp_path, progress=stop)
    checkpoint = (tmp_path / "checkpoint.pt").read_bytes()
    (tmp_path / "checkpoint.pt").write_bytes(b"broken")
    with pytest.raises(CheckpointError) as second:
        train(config, tmp_path)
    (tmp_path / "checkpoint.pt").write_bytes(checkpoint)
    assert len(train(config, tmp_path).epochs) == 2
    assert first.traceback and second.traceback  # which hold the frames, and so the runs


# Forks

FORK = """
on_disk, in_memory = Ledger("rdp", sys.argv[1]), Ledger("rdp")
state = in_memory.state_dict()
if not os.fork():
    for ledger in (on_disk, in_memory):
        for write in (
            lambda: ledger.spend("training", q=0.02, sigma=1.0),
            lambda: ledger.check("training", q=0.02, sigma=1.0),
            lambda: ledger.set_target(1.0, 1e-5),
            lambda: ledger.load_state_dict(state, replays=True),
        ):
            try:
                write()
                print("written", flush=True)
            except LedgerError as error:
                print("parent process" in str(error) and "make a new engine in the child" in str(error), flush=True)
    on_disk.close()
    print("done", os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
on_disk.spend("training", q=0.02, sigma=1.0)
in_memory.spend("training", q=0.02, sigma=1.0)
time.sleep(60)
"""


def test_a_forked_child_neither_spends_nor_keeps_the_lock(path: Path) -> None:
    with script(FORK, path) as parent:
        assert parent.stdout is not None
        child = None
        try:
            lines = [parent.stdout.readline().split() for _ in range(9)]
            assert lines[:-1] == [["True"]] * 8 and lines[-1][0] == "done"
            child = int(lines[-1][1])
            with pytest.raises(
                LedgerError, match=f"in use by process {parent.pid} "
            ):  # close() in the child is nothing
                Ledger("rdp", path)
            parent.kill()
            parent.wait()
            os.kill(child, 0)  # it lives
            ledger = Ledger("rdp", path)
            assert sum(entry.steps for entry in ledger.entries) <= 1
        finally:
            parent.kill()
            if child is not None:
                os.kill(child, signal.SIGKILL)


# Paths


def test_a_link_to_a_ledger_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "disk" / "kept.json", tmp_path / "run" / "ledger.json"
    real.parent.mkdir()
    link.parent.mkdir()
    link.symlink_to(Path("..") / "disk" / "kept.json")  # to nothing yet
    engine = engine_of(link.parent)
    epoch(engine)
    assert link.is_symlink() and engine.ledger.path == real
    assert [file.name for file in link.parent.iterdir()] == ["ledger.json"]
    assert {file.name for file in real.parent.iterdir()} == {"kept.json", "kept.json.releases", ".kept.json.lock"}
    with pytest.raises(LedgerError, match="in use"):
        Ledger("rdp", real)  # one file, one owner, whatever the name
    engine.close()
    assert Ledger.read(real).entries == Ledger.read(link).entries == engine.ledger.entries


def test_a_relative_path_is_that_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    ledger = Ledger("rdp", "ledger.json")
    monkeypatch.chdir(tmp_path / "elsewhere")
    spent(ledger)
    assert counts(Ledger.read(tmp_path / "ledger.json")) == [("training", 1)]
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_link_that_leads_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledger.json").symlink_to(tmp_path / "ledger.json")
    with pytest.raises(LedgerError, match="leads to no file"):
        Ledger("rdp", tmp_path / "ledger.json")


def test_a_ledger_with_two_names_is_refused(tmp_path: Path) -> None:
    Ledger("rdp", tmp_path / "a.json").close()
    (tmp_path / "b.json").hardlink_to(tmp_path / "a.json")
    for name in ("a.json", "b.json"):
        with pytest.raises(LedgerError, match="hard link"):
            Ledger("rdp", tmp_path / name)
