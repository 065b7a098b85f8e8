"""`plan`: the least noise that keeps training and analyses within a budget."""

import dataclasses
import math
import time
import warnings

import pytest

from dpquant_compile.errors import PrivacyBudgetError, PrivacySpecError
from dpquant_compile.privacy.accounting import planning as plan_module
from dpquant_compile.privacy.accounting.ledger import Ledger
from dpquant_compile.privacy.accounting.planning import Plan, plan

DELTA = 1e-5
CIFAR10 = {"delta": DELTA, "dataset_size": 50_000, "batch_size": 1024, "epochs": 60}


@pytest.fixture(scope="module")
def papers() -> Plan:
    """The budget that the paper's CIFAR-10 run spent, so its noise must come out."""
    begun = time.process_time()
    result = plan(target_epsilon=7.168, estimator="paper", **CIFAR10)
    assert time.process_time() - begun < 15
    return result


@pytest.mark.slow
def test_papers_run_comes_out(papers):
    assert papers.noise_multiplier == 1.0
    assert papers.epsilon == pytest.approx(7.167737, abs=1e-5)
    assert (papers.steps, papers.sample_rate) == (2940, 1 / 49)
    assert (papers.analyses, papers.analysis_rate, papers.sigma_measure) == (29, 1 / 391, 0.5)
    assert papers.epsilons["training"] == pytest.approx(7.118166, abs=1e-5)


def test_ledger_with_the_planned_spends_says_the_same(papers):
    ledger = Ledger()
    ledger.spend("training", q=papers.sample_rate, sigma=papers.noise_multiplier, steps=papers.steps)
    ledger.spend("analysis", q=papers.analysis_rate, sigma=papers.sigma_measure, steps=papers.analyses)
    assert ledger.epsilon(DELTA) == papers.epsilon


def test_table_can_be_read(papers):
    lines = str(papers).splitlines()
    assert lines[1].split() == ["training", "2940", "0.020408", "1.000", "7.1182"]
    assert lines[2].split()[:4] == ["analysis", "29", "0.002558", "0.500"]
    assert lines[3].split() == ["together", "7.1677"]


def test_noise_in_the_place_of_a_target_has_the_same_cost(papers):
    priced = plan(noise_multiplier=1.0, estimator="paper", **CIFAR10)
    assert priced == dataclasses.replace(papers, target_epsilon=None)
    assert str(priced).splitlines()[:-1] == str(papers).splitlines()[:-1] and "target" not in str(priced)


def test_training_alone():
    bare = plan(target_epsilon=7.1182, estimator=None, **CIFAR10)
    assert bare.noise_multiplier == 1.0 and bare.epsilon == bare.epsilons["training"]
    assert bare.analyses == 0 and list(bare.epsilons) == ["training"] and "analysis" not in str(bare)


@pytest.mark.parametrize("target", [0.3, 3.0, 20.0])
def test_answer_is_within_the_target_and_the_least(target):
    """One step of the grid less noise passes the target. RDP, since it is fast."""
    result = plan(target_epsilon=target, accountant="rdp", **CIFAR10)
    assert result.epsilon <= target

    ledger = Ledger("rdp")
    ledger.spend("training", q=1 / 49, sigma=result.noise_multiplier - 1e-3, steps=2940)
    ledger.spend("analysis", q=result.analysis_rate, sigma=2.0, steps=29)
    assert ledger.epsilon(DELTA) > target


def test_prv_needs_less_noise_than_rdp_and_is_tight():
    args = {"delta": DELTA, "dataset_size": 10_000, "batch_size": 500, "epochs": 5, "target_epsilon": 2.0}
    prv, rdp = plan(**args), plan(accountant="rdp", **args)
    assert prv.noise_multiplier < rdp.noise_multiplier
    assert 1.99 < prv.epsilon <= 2.0


def test_budget_that_rdp_cannot_reach_but_prv_can():
    result = plan(target_epsilon=0.05, delta=DELTA, dataset_size=10_000, batch_size=500, epochs=1, analyses=0)
    assert 0.04 < result.epsilon <= 0.05


def test_gdp_plans_training_alone():
    assert plan(target_epsilon=3.0, accountant="gdp", analyses=0, **CIFAR10).epsilon == pytest.approx(3.0, abs=0.01)
    with pytest.raises(PrivacySpecError, match="accountant='prv'"):
        plan(target_epsilon=3.0, accountant="gdp", **CIFAR10)


@pytest.mark.parametrize(
    ("args", "analyses", "rate", "sigma"),
    [
        ({}, 29, 4 / 391, 8.0),
        ({"estimator": "paper"}, 29, 1 / 391, 0.5),
        ({"epochs": 5, "n_interval": 2}, 2, 4 / 391, 8.0),
        ({"epochs": 4, "n_interval": 2}, 1, 4 / 391, 8.0),
        ({"epochs": 2, "n_interval": 2}, 0, 0.0, 0.0),
        ({"analyses": 7, "n_sample": 2, "sigma_measure": 3.0}, 7, 2 / 391, 3.0),
        ({"max_physical_batch_size": 2048}, 29, 1 / 25, 8.0),
        ({"batch_size": 64}, 29, 8 / 782, 8.0),
        ({"dataset_size": 300}, 29, 1.0, 8.0),
    ],
)
def test_conventions(monkeypatch, args, analyses, rate, sigma):
    monkeypatch.setattr(plan_module, "composed_epsilon", lambda _, history, __: sum(1 / s for s, _, _ in history))
    result = plan(**{**CIFAR10, "target_epsilon": 8.0, **args})
    assert (result.analyses, result.analysis_rate, result.sigma_measure) == (analyses, rate, sigma)


def test_analyses_that_cost_too_much():
    with pytest.raises(PrivacyBudgetError, match=r"29 analyses alone.*cost ε = 2\.8\d+\..*sigma_measure.*n_interval"):
        plan(target_epsilon=2.0, estimator="paper", **CIFAR10)


@pytest.mark.parametrize("target", [0.0, -1.0, 1e-4])
def test_targets_that_no_noise_reaches(target):
    for accountant in ("prv", "rdp"):
        with pytest.raises(PrivacyBudgetError, match=r"No noise multiplier up to 1000 .*Raise target_epsilon"):
            plan(target_epsilon=target, analyses=0, accountant=accountant, **CIFAR10)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"delta": 1.0}, "delta must"),
        ({"dataset_size": 0}, "dataset_size must.*0"),
        ({"batch_size": 2.5}, "batch_size must.*2.5"),
        ({"epochs": -1}, "epochs must.*-1"),
        ({"analyses": -1}, "analyses must.*-1"),
        ({"n_interval": 0}, "n_interval must.*0"),
        ({"n_sample": 0}, "n_sample must.*0"),
        ({"max_physical_batch_size": 0}, "max_physical_batch_size must.*0"),
        ({"sigma_measure": 0.0}, "sigma_measure must.*0.0"),
        ({"estimator": "other"}, "per_sample, paper.*'other'"),
        ({"accountant": "other"}, "prv, rdp, gdp.*'other'"),
        ({"target_epsilon": math.inf}, "target_epsilon must.*inf"),
        ({"target_epsilon": "low"}, "target_epsilon must.*'low'"),
        ({"target_epsilon": math.nan}, "target_epsilon must.*nan"),
        ({"target_epsilon": None}, "either target_epsilon.*or noise_multiplier"),
        ({"noise_multiplier": 1.0}, "either target_epsilon.*or noise_multiplier"),
        ({"target_epsilon": None, "noise_multiplier": -1.0}, "at least 0, not -1.0"),
    ],
)
def test_arguments_out_of_their_domain(args, message):
    with pytest.raises(PrivacySpecError, match=message):
        plan(**{"target_epsilon": 8.0, **CIFAR10, **args})


def test_fallback_is_said_of_the_answer_but_not_of_the_search(monkeypatch):
    """PRV fails on small noise only: the search passes there in silence. If it fails on the answer, that is said."""
    args = {**CIFAR10, "target_epsilon": 8.0}
    least = plan(accountant="rdp", **args).noise_multiplier
    real = plan_module.composed_epsilon

    def failing(accountant, history, delta):
        if accountant == "prv" and len(history) > 1 and history[0][0] < below:
            warnings.warn("Opacus' PRV accountant failed on this", RuntimeWarning, stacklevel=1)
        return real("rdp", history, delta)

    monkeypatch.setattr(plan_module, "composed_epsilon", failing)
    below = least
    assert plan(**args).noise_multiplier == least
    below = math.inf
    with pytest.warns(RuntimeWarning, match="PRV accountant failed"):
        plan(**args)
