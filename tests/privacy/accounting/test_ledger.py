"""The ledger: what it counts, and the hard stop."""

import math
import sys

import dp_accounting
import pytest
import torch
from dp_accounting import pld
from opacus.accountants import PRVAccountant, RDPAccountant

from dpquant_compile.errors import LedgerError, PrivacyBudgetError, PrivacySpecError
from dpquant_compile.privacy.accounting import ledger as ledger_module
from dpquant_compile.privacy.accounting.accountants import composed_epsilon
from dpquant_compile.privacy.accounting.ledger import Entry, Ledger
from tests.support.ledgers import ANALYSIS, DELTA, TRAINING, counts, exhaust, spent


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


@pytest.mark.slow
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


def test_gdp_takes_one_mechanism_and_warns_when_made():
    with pytest.warns(UserWarning, match="GDP accounting is experimental"):
        ledger = Ledger("gdp")
    spent(ledger)
    assert ledger.epsilon(0.1) == 0.0  # so little that δ alone covers it
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
    while composed_epsilon(accountant, (*before, (1.0, 0.02, steps + 1)), DELTA) <= target:
        steps += 1
    return steps


def test_hard_stop_is_exact():
    target = 2.0
    ledger = Ledger("rdp", target_epsilon=target, target_delta=DELTA)
    fits = fitting("rdp", (), target)
    assert fits > 100
    for _ in range(fits):
        ledger.check("training", **TRAINING)
        spent(ledger)
    for refused in (ledger.check, ledger.spend):
        with pytest.raises(PrivacyBudgetError, match=r"from 1\.99\d+ to 2\.00\d+ .* past the target 2"):
            refused("training", **TRAINING)
    assert counts(ledger) == [("training", fits)]
    assert ledger.epsilon(DELTA) <= target


def test_hard_stop_is_exact_with_other_spends_between():
    target = 2.0
    fits = fitting("rdp", ((0.8, 0.01, 1),), target)
    assert fits < fitting("rdp", (), target)
    ledger = Ledger("rdp", target_epsilon=target, target_delta=DELTA)
    spent(ledger, steps=20)
    ledger.check("training", **TRAINING, steps=fits - 19)  # not so any more after the next
    spent(ledger, "analysis", sigma=0.8)
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
        return composed_epsilon(*args)

    monkeypatch.setattr(ledger_module, "composed_epsilon", count)
    ledger = Ledger(target_epsilon=1.0, target_delta=DELTA)
    steps = exhaust(ledger)
    assert steps > 20 and len(asked) < 12
    assert composed_epsilon("prv", ((1.0, 0.02, steps),), DELTA) <= 1.0
    assert composed_epsilon("prv", ((1.0, 0.02, steps + 1),), DELTA) > 1.0


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
