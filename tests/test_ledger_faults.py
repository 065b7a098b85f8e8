"""What must not happen to a ledger: two owners, a spend of a forked child, a link that is replaced."""

import copy
import errno
import fcntl
import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ledgers import DELTA, counts, spent
from resuming import engine_of, epoch
from test_lab import tiny_data, tiny_model
from torch.utils.data import DataLoader

import dpquant_compile as dpq
from dpquant_compile.errors import CheckpointError, LedgerError, PrivacySpecError
from dpquant_compile.lab import RunConfig
from dpquant_compile.lab.recipes import TrainRecipe, register_recipe
from dpquant_compile.lab.train import train
from dpquant_compile.private.ledger import Ledger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.json"


def script(text: str, *args: Any) -> "subprocess.Popen[str]":
    """A process that runs `text`, which has the ledger's class at hand, and what it prints."""
    begin = "import os, sys, time\nfrom dpquant_compile.errors import LedgerError\n"
    text = f"{begin}from dpquant_compile.private.ledger import Ledger\n{text}"
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
    recipe = TrainRecipe("tiny-ledger", "for tests", tiny_model, tiny_data, "nothing", defaults, inner="eager")
    config = RunConfig(register_recipe(recipe).name)
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
                print("parent process" in str(error) and "engine of its own" in str(error), flush=True)
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
    made = engine.made
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
