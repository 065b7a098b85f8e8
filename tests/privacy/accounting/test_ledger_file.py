"""The ledger on disk: the file that is ahead of every release, and resuming."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from dpquant_compile.errors import LedgerError, PrivacyBudgetError
from dpquant_compile.privacy.accounting.ledger import Ledger
from tests.support.heavy import few
from tests.support.ledgers import DELTA, TRAINING, counts, exhaust, spent

# The file


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.json"


def test_file_goes_on_where_it_was(path):
    first = Ledger("rdp", path, 8.0, DELTA)
    for _ in range(3):
        spent(first)
        assert Ledger.read(path).entries == first.entries  # on disk before spend returns
    spent(first, "analysis")
    path.with_name(f".{path.name}.tmp").write_text("left by a crash")
    first.close()
    second = Ledger("rdp", str(path))
    assert second.entries == first.entries and (second.target_epsilon, second.target_delta) == (8.0, DELTA)
    spent(second)
    assert counts(Ledger.read(path)) == [("training", 3), ("analysis", 1), ("training", 1)]


@pytest.mark.parametrize(
    ("args", "differs"), [({"accountant": "prv"}, "'rdp'.*'prv'"), ({"target_epsilon": 9.0}, "8.0.*9.0")]
)
def test_file_of_other_settings(path, args, differs):
    begun = {"accountant": "rdp", "path": path, "target_epsilon": 8.0, "target_delta": DELTA}
    Ledger(**begun).close()
    with pytest.raises(LedgerError, match=differs):
        Ledger(**{**begun, **args})


@pytest.mark.parametrize("fault", ["replace", "fsync", "open"])
def test_failed_write_spends_nothing(path, monkeypatch, fault):
    ledger = Ledger("rdp", path)
    spent(ledger)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(os, fault, fail)
        with pytest.raises(OSError, match="disk is gone"):
            spent(ledger)
    assert counts(ledger) == [("training", 1)]
    # Only the folder's fsync comes after the file is in place; then the file is ahead, never behind.
    assert path.read_bytes() == before or fault == "open"
    spent(ledger, "analysis")
    assert counts(Ledger.read(path)) == [("training", 1), ("analysis", 1)]


def test_spend_is_durable_before_it_counts(path, monkeypatch):
    ledger = Ledger("rdp", path)
    events = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, real=real, name=name: (events.append((name, ledger.entries)), real(*a))
        )
    spent(ledger)
    assert events == [("fsync", ()), ("replace", ()), ("fsync", ())]


def test_every_truncation_and_flip_is_found(path):
    ledger = Ledger("rdp", path, 8.0, DELTA)
    spent(ledger, steps=7)
    spent(ledger, "analysis")
    ledger.close()
    whole = path.read_bytes()
    rng = random.Random(0)
    damaged = [whole[:end] for end in range(len(whole))]
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << rng.randrange(8)
        damaged.append(bytes(flipped))
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(LedgerError, match=r"ledger\.json.*(put back|release that wrote it)"):
            Ledger("rdp", path)
        assert path.read_bytes() == data  # never reset
    path.write_bytes(whole)
    assert Ledger.read(path).entries == ledger.entries


def test_edited_file_other_version_and_no_place(path, tmp_path):
    ledger = Ledger("rdp", path)
    spent(ledger, steps=7)
    ledger.close()
    body = json.loads(path.read_bytes())
    path.write_text(json.dumps({**body, "entries": [{**body["entries"][0], "steps": 1}]}, indent=1))
    with pytest.raises(LedgerError, match="checksum"):
        Ledger("rdp", path)
    path.write_text(json.dumps({**body, "version": 3}, indent=1))
    with pytest.raises(LedgerError, match="version 3"):
        Ledger("rdp", path)
    for nowhere in (tmp_path, tmp_path / "not" / "there.json"):
        with pytest.raises(LedgerError, match=r"no privacy ledger|does not exist"):
            Ledger("rdp", nowhere)
    with pytest.raises(LedgerError, match="no privacy ledger"):
        Ledger.read(tmp_path / "none.json")


def test_two_owners_of_one_file(path):
    first = Ledger("rdp", path)
    spent(first)
    with pytest.raises(LedgerError, match=rf"in use by this process \({os.getpid()}\) itself.*close\(\)"):
        Ledger("rdp", path)
    assert counts(Ledger.read(path)) == [("training", 1)]
    spent(first)
    path.unlink()
    with pytest.raises(LedgerError, match="changed under this process"):
        spent(first)


CHILD = """
import os, sys
from dpquant_compile.privacy.accounting.ledger import Ledger

for _ in sys.stdin:
    child = os.fork()
    if not child:
        ledger = Ledger("rdp", sys.argv[1])
        done = sum(entry.steps for entry in ledger.entries)
        os.write(1, f"pid {os.getpid()}\\n".encode())
        while True:
            ledger.spend("training" if done % 5 else "analysis", q=0.02, sigma=1.0)
            done += 1
            os.write(1, f"spent {done}\\n".encode())
    os.waitpid(child, 0)
    os.write(1, b"dead 0\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", few([8, 25], 8))
def test_killed_process_never_leaves_too_little(path, kills):
    """Kills that hit anywhere in a write: the file loads, and has every spend that `spend` returned from."""
    rng = random.Random(0)
    command = [sys.executable, "-c", CHILD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        last = 0
        for _ in range(kills):
            server.stdin.write("\n")
            server.stdin.flush()
            pid = int(server.stdout.readline().split()[1])
            time.sleep(rng.uniform(0, 0.03))
            os.kill(pid, signal.SIGKILL)
            while (line := server.stdout.readline().split())[0] != "dead":
                last = int(line[1])
            found = sum(entry.steps for entry in Ledger.read(path).entries)
            assert found - last in (0, 1)
            last = found
        server.stdin.close()
    assert last > kills


# Resuming


@pytest.fixture
def interrupted(path):
    """A run that was checkpointed after three spends and killed after six."""
    ledger = Ledger("rdp", path)
    spent(ledger, steps=3)
    state = ledger.state_dict()
    spent(ledger)
    spent(ledger, "analysis")
    spent(ledger)
    ledger.close()
    return state


def test_replay_counts_nothing_twice(path, interrupted):
    resumed = Ledger("rdp", path)
    resumed.load_state_dict(interrupted, replays=True)
    recorded, before = resumed.entries, path.read_bytes()
    for kind in ("training", "analysis", "training"):
        spent(resumed, kind)
    assert resumed.entries == recorded and path.read_bytes() == before
    spent(resumed)
    assert counts(resumed) == counts(Ledger.read(path)) == [("training", 4), ("analysis", 1), ("training", 2)]


def test_replay_in_other_portions(path, interrupted):
    resumed = Ledger("rdp", path)
    resumed.load_state_dict(interrupted, replays=True)
    spent(resumed)
    spent(resumed, "analysis")
    spent(resumed, steps=3)  # one recorded, two new
    assert counts(resumed) == [("training", 4), ("analysis", 1), ("training", 3)]


@pytest.mark.parametrize("other", [{"kind": "analysis"}, {"sigma": 1.5}, {"q": 0.03}])
def test_first_difference_ends_the_replay(path, interrupted, other):
    resumed = Ledger("rdp", path)
    resumed.load_state_dict(interrupted, replays=True)
    spent(resumed, **other)
    spent(resumed)  # it was due before, but the run is another one now
    assert sum(e.steps for e in resumed.entries) == 8
    assert resumed.entries[:3] == Ledger.read(path).entries[:3]


def test_new_randomness_counts_again(path, interrupted):
    resumed = Ledger("rdp", path)
    resumed.load_state_dict(interrupted, replays=False)
    spent(resumed)
    assert counts(resumed) == [("training", 4), ("analysis", 1), ("training", 2)]


def test_checkpoint_within_a_replay(path, interrupted):
    first = Ledger("rdp", path)
    first.load_state_dict(interrupted, replays=True)
    spent(first)
    state = first.state_dict()
    recorded = first.entries
    first.close()
    second = Ledger("rdp", path)
    second.load_state_dict(state, replays=True)
    spent(second, "analysis")
    spent(second)
    assert second.entries == recorded
    alone = Ledger("rdp")
    alone.load_state_dict(state, replays=True)
    spent(alone, "analysis")
    assert alone.entries == recorded


def test_spends_of_another_run_are_not_replayed(path, interrupted):
    """What was released with other random bits is no repetition, though it looks the same."""
    fresh = Ledger("rdp", path)
    fresh.load_state_dict(interrupted, replays=False)
    spent(fresh, steps=5)
    fresh.close()
    resumed = Ledger("rdp", path)
    resumed.load_state_dict(interrupted, replays=True)
    for kind in ("training", "analysis", "training"):
        spent(resumed, kind)
    assert counts(resumed)[-1] == ("training", 6)
    spent(resumed, steps=2)
    assert counts(resumed)[-1] == ("training", 8)
    resumed.close()
    again = Ledger("rdp", path)
    again.load_state_dict(interrupted, replays=True)
    for kind in ("training", "analysis", "training", "training", "training"):
        spent(again, kind)  # its own, before and after those of the other run
    assert counts(again)[-1] == ("training", 8)


def test_replay_needs_no_budget(path):
    ledger = Ledger("rdp", path, 2.0, DELTA)
    start = ledger.state_dict()
    steps = exhaust(ledger)
    ledger.close()
    resumed = Ledger("rdp", path)
    resumed.load_state_dict(start, replays=True)
    resumed.check("training", **TRAINING, steps=steps)
    spent(resumed, steps=steps)
    assert resumed.entries == ledger.entries
    with pytest.raises(PrivacyBudgetError):
        spent(resumed)


def test_checkpoint_of_another_run(path, tmp_path, interrupted):
    stranger = Ledger("rdp", tmp_path / "other.json")
    with pytest.raises(LedgerError, match="belong to different runs"):
        stranger.load_state_dict(interrupted, replays=True)
    spent(stranger, steps=3)  # the same numbers, and yet another run
    with pytest.raises(LedgerError, match="belong to different runs"):
        stranger.load_state_dict(interrupted, replays=True)
    assert counts(stranger) == [("training", 3)]


def test_state_without_a_file_is_taken_over_and_survives_torch_save(tmp_path, interrupted):
    torch.save(interrupted, tmp_path / "state.pt")
    ledger = Ledger("rdp")
    ledger.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), replays=False)
    assert counts(ledger) == [("training", 3)]
    for broken in ({}, {**interrupted, "version": 0}, {**interrupted, "done": 99}, {**interrupted, "runs": []}):
        with pytest.raises(LedgerError, match="not the state of a privacy ledger"):
            ledger.load_state_dict(broken, replays=True)


def test_accounting_leaves_the_warning_filters_alone():
    before = list(warnings.filters)
    Ledger("rdp", target_epsilon=2.0, target_delta=DELTA).check("training", **TRAINING)
    assert list(warnings.filters) == before


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
