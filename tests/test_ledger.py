import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import warnings

import dp_accounting
import pytest
import torch
from dp_accounting import pld
from opacus.accountants import PRVAccountant, RDPAccountant

from dpquant_compile.errors import LedgerError, PrivacyBudgetError, PrivacySpecError
from dpquant_compile.private import accounting
from dpquant_compile.private import ledger as ledger_module
from dpquant_compile.private.ledger import Entry, Ledger

DELTA = 1e-5
TRAINING = {"q": 0.02, "sigma": 1.0}
ANALYSIS = {"q": 0.01, "sigma": 2.0}


def spent(ledger, kind="training", **args):
    ledger.spend(kind, **{**(TRAINING if kind == "training" else ANALYSIS), **args})


def counts(ledger):
    return [(entry.purpose, entry.steps) for entry in ledger.entries]


@pytest.fixture(scope="module")
def paper():
    """The 60-epoch CIFAR-10 run of the paper as it happens: two epochs, an analysis, two epochs, …"""
    ledger = Ledger()
    for epoch in range(60):
        ledger.spend("training", q=1 / 49, sigma=1.0, steps=49)
        if epoch % 2 and epoch < 59:
            ledger.spend("analysis", q=1 / 391, sigma=0.5)
    return ledger


def test_cifar10_of_the_paper(paper):
    assert [e.steps for e in paper.entries if e.purpose == "training"] == [98] * 30
    assert paper.epsilon(DELTA) == pytest.approx(7.167737, abs=1e-5)
    assert paper.epsilon(DELTA, "training") == pytest.approx(7.118166, abs=1e-5)


@pytest.mark.parametrize(("analyses", "epsilon"), [(0, 3.012279), (14, 3.043234)])
def test_emnist_of_the_paper(analyses, epsilon):
    ledger = Ledger()
    ledger.spend("training", q=1 / 111, sigma=1.0, steps=30 * 111)
    if analyses:
        ledger.spend("analysis", q=1 / 882, sigma=0.5, steps=analyses)
    assert ledger.epsilon(DELTA) == pytest.approx(epsilon, abs=1e-5)


def test_true_sensitivity_of_the_papers_analysis_costs_far_more():
    """Noise of half the clipping norm is a quarter of the true sensitivity 2C."""
    ledger = Ledger()
    ledger.spend("training", q=1 / 49, sigma=1.0, steps=60 * 49)
    ledger.spend("analysis", q=1 / 391, sigma=0.25, steps=29)
    assert ledger.epsilon(DELTA) == pytest.approx(20.27, abs=0.01)


def test_purposes_cost_less_than_the_whole_and_more_than_it_in_sum(paper):
    parts = paper.epsilons(DELTA)
    assert list(parts) == ["training", "analysis"]
    assert max(parts.values()) <= paper.epsilon(DELTA) <= sum(parts.values())
    assert paper.epsilon(DELTA, "tuning") == 0.0


def test_epsilon_is_computed_once(paper, monkeypatch):
    paper.epsilon(DELTA)
    monkeypatch.setattr(ledger_module, "composed_epsilon", lambda *_: pytest.fail("computed again"))
    assert paper.epsilon(DELTA) > 7


@pytest.mark.parametrize(
    "history",
    [
        ((1.0, 1 / 49, 2940), (0.5, 1 / 391, 29)),
        ((1.0, 1 / 49, 98), (2.0, 4 / 391, 2)),
        ((5.0, 1.0, 10), (0.8, 0.3, 5)),
    ],
)
def test_googles_accountant_agrees(history):
    ledger = Ledger()
    for sigma, q, steps in history:
        ledger.spend(f"sigma {sigma}", q=q, sigma=sigma, steps=steps)
    other = pld.PLDAccountant(value_discretization_interval=1e-3).compose(ledger.to_dp_event()).get_epsilon(DELTA)
    assert ledger.epsilon(DELTA) == pytest.approx(other, rel=0.01)


def test_dp_event_needs_its_library(monkeypatch):
    assert isinstance(Ledger().to_dp_event(), dp_accounting.ComposedDpEvent)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(LedgerError, match="pip install dp-accounting"):
        Ledger().to_dp_event()


def test_order_of_spending_does_not_matter():
    one, other = Ledger("rdp"), Ledger("rdp")
    for _ in range(3):
        spent(one)
        spent(one, "analysis")
    spent(other, "analysis", steps=3)
    spent(other, steps=3)
    assert len(one.entries) == 6
    assert one.epsilon(DELTA) == pytest.approx(other.epsilon(DELTA), rel=1e-12)


def test_rdp_and_opacus_accountant_are_those_of_opacus():
    for name, kind in (("rdp", RDPAccountant), ("prv", PRVAccountant)):
        ledger = Ledger(name)
        spent(ledger, steps=100)
        spent(ledger, "analysis")
        assert isinstance(ledger.opacus_accountant, kind)
        assert ledger.opacus_accountant.history == [(1.0, 0.02, 100), (2.0, 0.01, 1)]
        assert ledger.opacus_accountant.get_epsilon(DELTA) == ledger.epsilon(DELTA)


def test_nothing_spent_and_nothing_hidden():
    ledger = Ledger()
    assert ledger.epsilon(DELTA) == 0.0 and ledger.epsilons(DELTA) == {}
    spent(ledger, sigma=0.0)
    assert ledger.epsilon(DELTA) == math.inf
    assert "not private" in ledger.statement(DELTA)


@pytest.mark.parametrize("answer", [RuntimeError("Cannot compute epsilon"), math.nan, math.inf])
def test_prv_that_fails_is_replaced_by_rdp_and_says_so(monkeypatch, answer):
    def get_epsilon(self, delta, **_):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(PRVAccountant, "get_epsilon", get_epsilon)
    prv, rdp = Ledger("prv"), Ledger("rdp")
    spent(prv, steps=10)
    spent(rdp, steps=10)
    with pytest.warns(RuntimeWarning, match="PRV accountant failed.*RDP"):
        epsilon = prv.epsilon(DELTA)
    assert epsilon == rdp.epsilon(DELTA)


@pytest.mark.parametrize(("sigma", "steps"), [(0.01, 1), (0.05, 1000), (1.0, 10**9)])
def test_what_prv_cannot_hold_is_left_to_rdp(sigma, steps):
    ledger = Ledger()
    spent(ledger, sigma=sigma, steps=steps)
    with pytest.warns(RuntimeWarning, match="PRV accountant failed"):
        assert 100 < ledger.epsilon(DELTA) < math.inf


def test_what_no_accountant_can_hold_is_infinite():
    ledger = Ledger("rdp")
    spent(ledger, sigma=1e-200)
    with pytest.warns(RuntimeWarning, match="RDP accountant failed"):
        assert ledger.epsilon(DELTA) == math.inf


def test_gdp_takes_one_mechanism_and_warns_when_made():
    with pytest.warns(UserWarning, match="GDP accounting is experimental"):
        ledger = Ledger("gdp")
    spent(ledger)
    assert ledger.epsilon(1e-2) == 0.0  # so little that δ alone covers it
    spent(ledger, steps=1000)
    assert ledger.epsilon(DELTA) == pytest.approx(ledger.opacus_accountant.get_epsilon(DELTA))
    for refused in (ledger.check, ledger.spend):
        with pytest.raises(PrivacySpecError, match="accountant='prv' or accountant='rdp'"):
            refused("analysis", **ANALYSIS)
    assert counts(ledger) == [("training", 1001)]
    spent(ledger, steps=10**7)
    with pytest.raises(PrivacySpecError, match="cannot account for"):
        ledger.epsilon(DELTA)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"q": 0.0}, "q must.*0.0"),
        ({"q": 1.5}, "q must.*1.5"),
        ({"q": math.nan}, "q must.*nan"),
        ({"q": "much"}, "q must.*'much'"),
        ({"sigma": -1.0}, "sigma must.*-1.0"),
        ({"sigma": math.inf}, "sigma must.*inf"),
        ({"steps": 0}, "steps must.*0"),
        ({"steps": 1.5}, "steps must.*1.5"),
        ({"steps": True}, "steps must.*True"),
        ({"mechanism": "laplace"}, "'laplace'"),
    ],
)
def test_arguments_out_of_their_domain(args, message):
    ledger = Ledger()
    with pytest.raises(PrivacySpecError, match=message):
        spent(ledger, **args)
    assert ledger.entries == ()


def test_more_arguments_out_of_their_domain():
    with pytest.raises(PrivacySpecError, match="purpose"):
        Ledger().spend("", **TRAINING)
    with pytest.raises(PrivacySpecError, match="prv, rdp, gdp"):
        Ledger("moments")
    for target in ({"target_epsilon": 1.0}, {"target_epsilon": -1.0, "target_delta": DELTA}):
        with pytest.raises(PrivacySpecError, match="target_epsilon"):
            Ledger(**target)
    for delta in (0.0, 1.0, math.nan):
        with pytest.raises(PrivacySpecError, match="delta must"):
            Ledger().epsilon(delta)


def test_numbers_become_plain():
    ledger = Ledger()
    ledger.spend("training", q=torch.tensor(0.5), sigma=torch.tensor(1.0), steps=torch.tensor(2))
    assert ledger.entries == (Entry("training", "subsampled_gaussian", 0.5, 1.0, 2),)
    assert [type(v) for v in ledger.state_dict()["entries"][0].values()] == [str, str, float, float, int]


def test_statement_says_what_was_counted_and_what_not(paper):
    text = paper.statement(DELTA, unit="one patient")
    for words in ("7.1678", "2940 steps", "29 steps", "σ = 0.5", "one patient added or removed", "replaced", "prv"):
        assert words in text
    assert text.index("Not counted") < text.index("hyperparameter tuning") < text.index("without noise")
    with pytest.raises(PrivacySpecError, match="replace"):
        paper.statement(DELTA, adjacency="replace")


# The hard stop


def fitting(accountant, before, target):
    """How many training steps fit after the history `before`, by counting."""
    steps = 0
    while accounting.composed_epsilon(accountant, (*before, (1.0, 0.02, steps + 1)), DELTA) <= target:
        steps += 1
    return steps


def test_hard_stop_is_exact():
    target = 1.4
    ledger = Ledger("rdp", target_epsilon=target, target_delta=DELTA)
    fits = fitting("rdp", (), target)
    assert fits > 100
    for _ in range(fits):
        ledger.check("training", **TRAINING)
        spent(ledger)
    for refused in (ledger.check, ledger.spend):
        with pytest.raises(PrivacyBudgetError, match=r"from 1\.3\d+ to 1\.4\d+ .* past the target 1\.4"):
            refused("training", **TRAINING)
    assert counts(ledger) == [("training", fits)]
    assert ledger.epsilon(DELTA) <= target


def test_hard_stop_is_exact_with_other_spends_between():
    target = 1.4
    fits = fitting("rdp", ((2.0, 0.01, 1),), target)
    assert fits < fitting("rdp", (), target)
    ledger = Ledger("rdp", target_epsilon=target, target_delta=DELTA)
    spent(ledger, steps=20)
    ledger.check("training", **TRAINING, steps=fits)  # true, and no longer so after the next
    spent(ledger, "analysis")
    ledger.check("training", **TRAINING, steps=fits - 20)
    with pytest.raises(PrivacyBudgetError):
        ledger.check("training", **TRAINING, steps=fits - 19)
    spent(ledger, steps=fits - 20)
    with pytest.raises(PrivacyBudgetError):
        spent(ledger)


def test_hard_stop_of_prv_is_exact_and_asks_seldom(monkeypatch):
    asked = []

    def count(*args):
        asked.append(args)
        return accounting.composed_epsilon(*args)

    monkeypatch.setattr(ledger_module, "composed_epsilon", count)
    ledger = Ledger(target_epsilon=1.0, target_delta=DELTA)
    with pytest.raises(PrivacyBudgetError):
        for _ in range(10_000):
            spent(ledger)
    ((_, steps),) = counts(ledger)
    assert steps > 20 and len(asked) < 12
    assert accounting.composed_epsilon("prv", ((1.0, 0.02, steps),), DELTA) <= 1.0
    assert accounting.composed_epsilon("prv", ((1.0, 0.02, steps + 1),), DELTA) > 1.0


def test_no_noise_passes_every_target():
    ledger = Ledger("rdp", target_epsilon=1000.0, target_delta=DELTA)
    with pytest.raises(PrivacyBudgetError, match="to inf"):
        spent(ledger, sigma=0.0)


def test_target_is_set_once(tmp_path):
    ledger = Ledger("rdp", tmp_path / "ledger.json")
    ledger.set_target(1.0, DELTA)
    ledger.set_target(1.0, DELTA)
    with pytest.raises(LedgerError, match="cannot become"):
        ledger.set_target(2.0, DELTA)
    assert Ledger.read(tmp_path / "ledger.json").target_epsilon == 1.0
    with pytest.raises(PrivacyBudgetError):
        spent(ledger, steps=100_000)


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
    second = Ledger("rdp", str(path))
    assert second.entries == first.entries and (second.target_epsilon, second.target_delta) == (8.0, DELTA)
    spent(second)
    assert counts(Ledger.read(path)) == [("training", 3), ("analysis", 1), ("training", 1)]


@pytest.mark.parametrize(
    ("args", "differs"), [({"accountant": "prv"}, "'rdp'.*'prv'"), ({"target_epsilon": 9.0}, "8.0.*9.0")]
)
def test_file_of_other_settings(path, args, differs):
    begun = {"accountant": "rdp", "path": path, "target_epsilon": 8.0, "target_delta": DELTA}
    Ledger(**begun)
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
    spent(Ledger("rdp", path), steps=7)
    body = json.loads(path.read_bytes())
    path.write_text(json.dumps({**body, "entries": [{**body["entries"][0], "steps": 1}]}, indent=1))
    with pytest.raises(LedgerError, match="checksum"):
        Ledger("rdp", path)
    path.write_text(json.dumps({**body, "version": 2}, indent=1))
    with pytest.raises(LedgerError, match="version 2"):
        Ledger("rdp", path)
    for nowhere in (tmp_path, tmp_path / "not" / "there.json"):
        with pytest.raises(LedgerError, match=r"no privacy ledger|does not exist"):
            Ledger("rdp", nowhere)
    with pytest.raises(LedgerError, match="no privacy ledger"):
        Ledger.read(tmp_path / "none.json")


def test_two_owners_of_one_file(path):
    first, second = Ledger("rdp", path), Ledger("rdp", path)
    spent(first)
    with pytest.raises(LedgerError, match="One process must own"):
        spent(second)
    assert second.entries == ()
    spent(first)
    path.unlink()
    with pytest.raises(LedgerError, match="changed under this process"):
        spent(first)


CHILD = """
import os, sys
from dpquant_compile.private.ledger import Ledger

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


def test_killed_process_never_leaves_too_little(path):
    """Kills that hit anywhere in a write: the file loads, and has every spend that `spend` returned from."""
    rng = random.Random(0)
    command = [sys.executable, "-c", CHILD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        last = 0
        for _ in range(40):
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
    assert last > 40


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
    assert resumed.entries[:3] == Ledger("rdp", path).entries[:3]


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
    resumed = Ledger("rdp", path)
    resumed.load_state_dict(interrupted, replays=True)
    for kind in ("training", "analysis", "training"):
        spent(resumed, kind)
    assert counts(resumed)[-1] == ("training", 6)
    spent(resumed, steps=2)
    assert counts(resumed)[-1] == ("training", 8)
    again = Ledger("rdp", path)
    again.load_state_dict(interrupted, replays=True)
    for kind in ("training", "analysis", "training", "training", "training"):
        spent(again, kind)  # its own, before and after those of the other run
    assert counts(again)[-1] == ("training", 8)


def test_replay_needs_no_budget(path):
    ledger = Ledger("rdp", path, 1.4, DELTA)
    start = ledger.state_dict()
    with pytest.raises(PrivacyBudgetError):
        while True:
            spent(ledger)
    recorded = ledger.entries
    resumed = Ledger("rdp", path)
    resumed.load_state_dict(start, replays=True)
    resumed.check("training", **TRAINING, steps=recorded[0].steps)
    spent(resumed, steps=recorded[0].steps)
    assert resumed.entries == recorded
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


def test_state_without_a_file_replaces_and_survives_torch_save(tmp_path, interrupted):
    torch.save(interrupted, tmp_path / "state.pt")
    ledger = Ledger("rdp")
    spent(ledger, "analysis", steps=9)
    ledger.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), replays=False)
    assert counts(ledger) == [("training", 3)]
    for broken in ({}, {**interrupted, "version": 0}, {**interrupted, "done": 99}, {**interrupted, "runs": []}):
        with pytest.raises(LedgerError, match="not the state of a privacy ledger"):
            ledger.load_state_dict(broken, replays=True)


def test_accounting_leaves_the_warning_filters_alone():
    before = list(warnings.filters)
    Ledger("rdp", target_epsilon=2.0, target_delta=DELTA).check("training", **TRAINING)
    assert list(warnings.filters) == before
