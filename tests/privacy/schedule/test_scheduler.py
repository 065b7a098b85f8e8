"""`Scheduler`: when it analyses, what that costs and in which order, what it keeps, and what it chooses."""

import copy
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile.errors import CheckpointError, PrivacyBudgetError, PrivacySpecError, PrivateTrainingError
from dpquant_compile.privacy.schedule.estimators import ESTIMATORS, Paper, PerSample
from tests.support import models
from tests.support.private_loops import made
from tests.support.schedules import SITES, Constant, Numbers, engine_of, run_epochs, six, zeros


def policies_of(scheduler: dpq.Scheduler, epochs: int) -> list[tuple[str, ...]]:
    """The policies of some epochs, by the history, which must say what the model was set to."""
    for _ in range(epochs - 1):
        assert scheduler.step() == scheduler.run.session.model.policy
        assert scheduler.history[-1].policy == tuple(sorted(scheduler.run.session.model.policy))
    return [record.policy for record in scheduler.history]


# Modes


def test_pls_draws_k_sites_uniformly_and_anew_each_epoch() -> None:
    scheduler = dpq.Scheduler(engine_of(), mode="pls", seed=3)
    chosen = policies_of(scheduler, 400)
    assert scheduler.k == 2 and all(len(policy) == 2 for policy in chosen)
    assert stats.chisquare(list(Counter(chosen).values())).pvalue > 1e-3 and len(set(chosen)) == 15
    assert list(scheduler.probabilities.values()) == pytest.approx([1 / 6] * 6)
    assert not scheduler.engine.ledger.entries and not any(record.analysed for record in scheduler.history)
    assert chosen == policies_of(dpq.Scheduler(engine_of(), mode="pls", seed=3), 400)
    assert chosen != policies_of(dpq.Scheduler(engine_of(), mode="pls", seed=4), 400)


def test_static_keeps_one_subset_drawn_once_or_given() -> None:
    drawn = {policies_of(dpq.Scheduler(engine_of(), mode="static", k=3, seed=s), 5)[0] for s in range(6)}
    assert len(drawn) > 2 and all(len(policy) == 3 for policy in drawn)
    assert len(set(policies_of(dpq.Scheduler(engine_of(), mode="static", seed=0), 9))) == 1
    given = dpq.Scheduler(engine_of(), mode="static", static=["4", "1", "0"])
    assert set(policies_of(given, 4)) == {("0", "1", "4")} and not given.engine.ledger.entries


def test_greedy_takes_the_lowest_scores_once_it_has_some() -> None:
    measured = Constant([0.5, -0.5, 0.3, 0.9, 0.0, 0.7])
    scheduler = dpq.Scheduler(engine_of(), mode="greedy", estimator=measured, n_interval=2, k=3)
    chosen = policies_of(scheduler, 8)
    assert set(chosen[2:]) == {("1", "2", "4")} and chosen[0] != chosen[1]
    assert all(math.isfinite(p) for record in scheduler.history for p in record.probabilities.values())


def test_dpquant_draws_by_its_scores() -> None:
    values = [0.0, 0.5, 1.0, 0.0, 0.5, 1.0]
    scheduler = dpq.Scheduler(engine_of(), estimator=Constant(values), n_interval=1, k=1, beta=2.0, ema=1.0)
    seen = Counter(policy[0] for policy in policies_of(scheduler, 1500)[1:])
    weights = [math.exp(-2 * value) for value in values]
    expected = [1499 * w / sum(weights) for w in weights]
    assert stats.chisquare([seen[site] for site in SITES], expected).pvalue > 1e-3
    assert list(scheduler.probabilities.values()) == pytest.approx([w / sum(weights) for w in weights], rel=1e-5)


def test_an_object_of_the_users_is_asked_once_per_epoch() -> None:
    asked: list[tuple[int, tuple[str, ...], int]] = []

    class Mine:
        def choose(self, epoch: int, sites: Sequence[str], k: int) -> Iterable[str]:
            asked.append((epoch, tuple(sites), k))
            return [sites[epoch % 6]]

    scheduler = dpq.Scheduler(engine_of(), mode=Mine(), epochs=4)
    assert policies_of(scheduler, 5) == [("0",), ("1",), ("2",), ("3",)]
    assert asked == [(epoch, SITES, 2) for epoch in range(4)] and not scheduler.engine.ledger.entries
    Mine.choose = lambda self, epoch, sites, k: ["nowhere"]  # type: ignore[method-assign]
    with pytest.raises(PrivacySpecError, match="nowhere"):
        dpq.Scheduler(engine_of(), mode=Mine())


def test_groups_of_sites_are_policies() -> None:
    groups = {"early": ["0", "1"], "late": ["4", "5"], "mixed": ["1", "2", "4"]}
    measured = Constant([0.1, 0.9, 0.2])
    scheduler = dpq.Scheduler(engine_of(), mode="greedy", policies=groups, estimator=measured, n_interval=1, k=2)
    assert policies_of(scheduler, 3)[-1] == ("0", "1", "2", "4")  # the union: each site once
    assert list(scheduler.scores) == list(scheduler.probabilities) == ["early", "late", "mixed"]
    assert dpq.Scheduler(engine_of(), policies=groups).k == 1  # a budget of 2 in 6 sites is a third of the groups
    for wrong in ({"a": ["9"]}, {"a": []}):
        with pytest.raises(PrivacySpecError, match="policies="):
            dpq.Scheduler(engine_of(), policies=wrong)


# When, and what it costs


@pytest.mark.parametrize(("epochs", "interval"), [(7, 2), (6, 2), (6, 3), (5, 1), (2, 2), (1, 1), (3, 5)])
@pytest.mark.parametrize("mode", ["dpquant", "greedy"])
def test_analyses_come_after_every_interval_and_never_after_the_last_epoch(
    mode: str, epochs: int, interval: int
) -> None:
    engine = engine_of()
    scheduler = dpq.Scheduler(engine, epochs=epochs, mode=mode, estimator=Constant(0.0, sigma=3.0), n_interval=interval)
    for epoch in range(1, epochs + 1):
        for _ in scheduler.run.loader:
            pass
        before = len([e for e in engine.ledger.entries if e.purpose == "analysis"])
        scheduler.step()
        after = len([e for e in engine.ledger.entries if e.purpose == "analysis"])
        assert after - before == (epoch % interval == 0 and epoch < epochs)
    assert len(scheduler.estimator.drawn) == scheduler.state_dict()["analyses"] == (epochs - 1) // interval
    assert [r.epoch for r in scheduler.history if r.analysed] == list(range(interval, epochs, interval))
    assert len(scheduler.history) == epochs and scheduler.epoch == epochs
    training, analysis = ([e for e in engine.ledger.entries if e.purpose == p] for p in ("training", "analysis"))
    assert sum(e.steps for e in training) == 8 * epochs and {(e.q, e.sigma) for e in training} == {(1 / 8, 1.0)}
    assert {(e.q, e.sigma, e.steps) for e in analysis} <= {(1 / 8, 3.0, 1)}


def test_defaults_follow_the_estimator() -> None:
    ours = dpq.Scheduler(engine_of(Numbers(50_000), 1024, 128))
    assert ours.estimator == PerSample(clip=0.1, sigma=8.0) and ours.n_interval == 2
    assert ours.sample_rate == 4 / 391 and ours.sample_rate * 50_000 == pytest.approx(512, abs=1)
    paper = dpq.Scheduler(engine_of(Numbers(50_000), 1024, 128), estimator="paper")
    assert paper.estimator == Paper(clip=0.01, sigma=0.5, repetitions=2) and paper.sample_rate == 1 / 391
    assert dpq.Scheduler(engine_of(Numbers(100))).sample_rate == 1.0  # fewer samples than it would like: all of them
    custom = dpq.Scheduler(engine_of(Numbers(640)), n_sample=3, sigma_measure=5.0, clip_measure=0.1, repetitions=2)
    assert custom.sample_rate == 3 / 80 and custom.estimator == PerSample(0.1, 5.0, 2)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("physical", [32, 128, 1024])
def test_plan_counts_the_analyses_as_the_scheduler_makes_them(estimator: str, physical: int) -> None:
    scheduler = dpq.Scheduler(engine_of(Numbers(50_000), 1024, physical), estimator=estimator)
    planned = dpq.plan(
        noise_multiplier=1.0,
        delta=1e-5,
        dataset_size=50_000,
        batch_size=1024,
        epochs=5,
        max_physical_batch_size=physical,
        estimator=estimator,
        accountant="rdp",
    )
    assert (planned.analysis_rate, planned.sigma_measure) == (scheduler.sample_rate, scheduler.estimator.sigma)


def test_an_estimator_of_ones_own_draws_one_physical_batch_or_what_it_says() -> None:
    class Large(Constant):
        expected_samples = 640

    assert dpq.Scheduler(engine_of(Numbers(640), 64, 32), estimator=Constant(0.0)).n_sample == 1
    assert dpq.Scheduler(engine_of(Numbers(640), 64, 32), estimator=Large(0.0)).n_sample == 20


def test_a_draw_is_poisson_and_apart_from_the_training_batches() -> None:
    measured = Constant(0.0)
    engine = engine_of(Numbers(400), 8, 8)
    scheduler = dpq.Scheduler(engine, estimator=measured, n_interval=1, n_sample=5)
    state = engine.run.loader.generator.get_state()
    for _ in range(300):
        scheduler.step()
    assert torch.equal(engine.run.loader.generator.get_state(), state), "an analysis must not shift training's draws"
    counts = torch.bincount(torch.tensor([i for draw in measured.drawn for i in draw]), minlength=400)
    assert stats.binomtest(int(counts.sum()), 400 * 300, 5 / 50).pvalue > 1e-3
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3
    sizes = torch.tensor([float(len(draw)) for draw in measured.drawn])
    assert 0.75 < float(sizes.var()) / (400 * 0.1 * 0.9) < 1.3


def test_the_ledger_is_charged_before_data_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Numbers(64)
    engine = engine_of(data)
    scheduler = dpq.Scheduler(engine, estimator=Constant(0.0), n_interval=1)
    data.reads.clear()
    real, events = engine.ledger.spend, []

    def spend(purpose: str, **given: Any) -> None:
        events.append((purpose, len(data.reads)))
        real(purpose, **given)

    monkeypatch.setattr(engine.ledger, "spend", spend)
    scheduler.step()
    assert events == [("analysis", 0)] and len(data.reads) > 0


def test_a_refused_spend_reads_nothing_and_changes_no_score() -> None:
    data = Numbers(64)
    engine = engine_of(data, target_epsilon=1e-3, target_delta=1e-5)
    measured = Constant(1.0, sigma=0.1)
    scheduler = dpq.Scheduler(engine, estimator=measured, n_interval=1)
    data.reads.clear()
    before = scheduler.scores
    with pytest.raises(PrivacyBudgetError):
        scheduler.step()
    assert not data.reads and not measured.drawn and scheduler.scores == before and not engine.ledger.entries


# Noise, and what is kept


def test_scores_are_the_running_mean_of_noised_measurements() -> None:
    values = [0.5, -0.5, 0.3, 0.9, 0.0, 0.7]
    engine = engine_of()
    scheduler = dpq.Scheduler(engine, estimator=Constant(values, 2.0, 0.25, 10.0), n_interval=1, ema=0.4)
    twin, scores = copy.deepcopy(engine.run.noise), torch.zeros(6, dtype=torch.float64)
    for _ in range(4):
        scheduler.step()
        noisy = (torch.tensor(values).double() + 2.0 * 0.25 * twin.fill(6).double()) / 10.0
        scores = 0.6 * scores + 0.4 * noisy
        assert list(scheduler.scores.values()) == pytest.approx(scores.tolist(), rel=1e-6)


@pytest.mark.parametrize(("adjacency", "factor"), [("add_remove", 1.0), ("replace_one", 2.0)])
def test_noise_has_the_stated_multiple_of_the_sensitivity(adjacency: str, factor: float) -> None:
    groups = {f"policy {i}": ["0"] for i in range(500)}
    measured = Constant(3.0, sigma=1.5, scale=0.2, divisor=7.0)
    scheduler = dpq.Scheduler(
        engine_of(), estimator=measured, policies=groups, k=1, n_interval=1, ema=1.0, adjacency=adjacency
    )
    found: list[float] = []
    for _ in range(10):
        scheduler.step()
        found += scheduler.scores.values()
    assert stats.kstest(found, "norm", (3.0 / 7.0, 1.5 * 0.2 * factor / 7.0)).pvalue > 1e-3


@pytest.mark.parametrize(
    "given",
    [
        *({"mode": "fast"}, {"estimator": "other"}, {"normalise": "z"}, {"adjacency": "user"}, {"ema": 0.0}),
        *({"ema": 1.5}, {"beta": -1.0}, {"beta": math.nan}, {"epochs": 0}, {"n_interval": 0}, {"n_sample": 0}),
        *({"k": 7}, {"k": -1}, {"static": ["9"], "mode": "static"}, {"sigma_measure": 0.0}, {"clip_measure": math.nan}),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(PrivacySpecError):
        dpq.Scheduler(engine_of(), **given)


def test_an_analysis_needs_the_loss_and_uniform_draws_do_not() -> None:
    with pytest.raises(PrivacySpecError, match="criterion="):
        dpq.Scheduler(engine_of(criterion=False))
    dpq.Scheduler(engine_of(criterion=False), mode="pls").step()


class OneOfTwo(nn.Module):
    """Only Dynamo can capture it, and only then is it known that one of its layers is never called; [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.fc = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.used(x) if x.shape[1] > 3 else self.unused(x))


def test_sites_that_are_not_known_yet_are_found() -> None:
    engine = engine_of(model=models.seeded(OneOfTwo))
    assert list(dpq.Scheduler(engine).policies) == ["used", "fc"]


# The paper's numbers

ROWS = [
    ("CIFAR-10", 50_000, 60, "pls", 7.118166),
    ("CIFAR-10", 50_000, 60, "dpquant", 7.167737),
    ("EMNIST", 112_800, 30, "pls", 3.012279),
    ("EMNIST", 112_800, 30, "dpquant", 3.043234),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "epochs", "mode", "epsilon"), ROWS)
def test_the_ledger_of_a_schedule_has_the_papers_epsilon(
    name: str, size: int, epochs: int, mode: str, epsilon: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spend is made when a batch is fetched, so going through the loader costs what training on it would.

    What is in the batches costs nothing, so the draws are left out, and the measurement.
    """
    monkeypatch.setattr(UniformWithReplacementSampler, "__iter__", lambda self: iter([[]] * len(self)))
    monkeypatch.setattr(Paper, "measure", lambda self, s, policies, batches: torch.zeros(len(policies)).double())
    engine = engine_of(Numbers(size), 1024, 128, accountant="prv")
    scheduler = dpq.Scheduler(engine, epochs=epochs, mode=mode, estimator="paper")
    for _ in range(epochs):
        for _ in engine.run.loader:
            pass
        scheduler.step()
    assert engine.get_epsilon(1e-5) == pytest.approx(epsilon, abs=1e-5)
    if (name, mode) == ("CIFAR-10", "dpquant"):
        # What the published noise, σ·C on a vector that moves by 2C, really costs: a multiplier of σ/2.
        honest = dpq.Ledger("prv")
        for e in engine.ledger.entries:
            honest.spend(e.purpose, q=e.q, sigma=e.sigma / 2 if e.purpose == "analysis" else e.sigma, steps=e.steps)
        assert honest.epsilon(1e-5) == pytest.approx(20.27, abs=0.01)


# What it is for


class Fragile(nn.Module):
    """Five sites that hardly matter and one, in the middle, whose rounding moves every logit."""

    def __init__(self) -> None:
        super().__init__()
        self.sites = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in SITES)

    def forward(self, x: Tensor) -> Tensor:
        for i, site in enumerate(self.sites):
            x = 20 * site(x) if i == 2 else x + 0.01 * site(x)
        return x


@pytest.mark.heavy
def test_a_fragile_site_is_avoided_for_hardly_any_privacy() -> None:
    size, epochs, k = 40_000, 24, 3
    spent = set()
    for seed in range(6):
        model = models.seeded(Fragile, seed)
        x = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))
        data = TensorDataset(x, model(x).argmax(1))  # a model that has learnt: rounding can only make it worse
        engine = engine_of(data, 1024, 128, model, noise=seed, accountant="prv", collate=None)
        scheduler = dpq.Scheduler(engine, epochs=epochs, n_interval=6, k=k, seed=seed)
        chosen = policies_of(scheduler, epochs)[6:]
        assert sum("sites.2" in policy for policy in chosen) <= 0.2 * k / 6 * len(chosen), f"seed {seed}"
        spent.add(engine.ledger.entries)
    assert len(spent) == 1 and 0 < engine.ledger.epsilon(1e-5, "analysis") < 0.1


def test_schedulers_of_one_engine_draw_probe_batches_of_their_own() -> None:
    """They are charged as independent draws, so they must be."""
    data = Numbers(256)
    engine = engine_of(data)
    drawn = []
    for _ in range(3):
        scheduler = dpq.Scheduler(engine, epochs=9, n_interval=1, n_sample=16)
        data.reads.clear()
        scheduler.step()
        drawn.append(frozenset(i for ids in data.reads for i in ids))
    assert all(64 < len(ids) < 192 for ids in drawn) and len(set(drawn)) == 3
    assert sum(entry.steps for entry in engine.ledger.entries if entry.purpose == "analysis") == 3


DELTA = 1e-5


def calibrated(epochs: int = 4, accountant: str = "rdp", **options: Any) -> dpq.PrivacyEngine:
    """An engine whose noise is the least for so many epochs within ε = 8: 64 samples in batches of 8."""
    model = dpq.compile(models.seeded(six), budget=2, backend="reference", inner="eager").train()
    engine = dpq.PrivacyEngine(accountant=accountant)
    engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(Numbers(64), batch_size=8, collate_fn=zeros),
        target_epsilon=8.0,
        target_delta=DELTA,
        epochs=epochs,
        max_grad_norm=1.0,
        max_physical_batch_size=8,
        **options,
    )
    return engine


@pytest.mark.slow
def test_analyses_beyond_the_target_are_warned_of_at_the_start() -> None:
    engine = calibrated()
    with pytest.warns(UserWarning, match=r"epochs: 4, analyses: 1\).* past the target 8: .*dpq\.plan") as told:
        scheduler = dpq.Scheduler(engine, epochs=4)
    assert told[0].filename == __file__
    ledger, made = dpq.Ledger("rdp"), engine.run
    ledger.spend("training", q=1 / 8, sigma=made.noise_multiplier, steps=32)
    ledger.spend("analysis", q=scheduler.sample_rate, sigma=8.0)
    planned = re.search(r"ε = ([\d.]+) at δ = 1e-05", str(told[0].message))
    assert planned is not None and 8 < float(planned[1]) == pytest.approx(ledger.epsilon(DELTA), rel=1e-5)
    with pytest.raises(PrivacyBudgetError):  # and so it comes
        run_epochs(scheduler, 4)


def test_a_run_with_its_analyses_planned_is_not_warned_of() -> None:
    plan = dpq.plan(
        target_epsilon=8,
        delta=DELTA,
        dataset_size=64,
        batch_size=8,
        epochs=4,
        max_physical_batch_size=8,
        accountant="rdp",
    )
    engine = engine_of(target_epsilon=8, target_delta=DELTA)
    engine.run.optimizer.noise_multiplier = plan.noise_multiplier
    run_epochs(dpq.Scheduler(engine, epochs=4), 4)
    assert 7.9 < plan.epsilon <= 8 and engine.get_epsilon(DELTA) == pytest.approx(plan.epsilon)


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"mode": "pls"}, {"mode": "static"}, {"k": 0}, {"k": 6}, {"n_interval": 4}])
def test_without_analyses_the_calibrated_noise_will_do(given: dict[str, Any]) -> None:
    engine = calibrated()
    run_epochs(dpq.Scheduler(engine, epochs=4, **given), 4)
    assert engine.get_epsilon(DELTA) <= 8


@pytest.mark.slow
def test_the_length_of_the_run_is_that_of_the_scheduler_or_of_the_noise() -> None:
    with pytest.warns(UserWarning, match="epochs: 6, analyses: 0"):
        dpq.Scheduler(calibrated(), epochs=6, mode="pls")
    with pytest.warns(UserWarning, match="epochs: 4, analyses: 2"):  # one after the last, too
        dpq.Scheduler(calibrated())
    dpq.Scheduler(engine_of(target_epsilon=1e-3, target_delta=DELTA))  # nobody knows how long
    dpq.Scheduler(engine_of(), epochs=1000)  # no target
    dpq.Scheduler(calibrated(epochs=60), epochs=4)  # noise enough


@pytest.mark.slow
def test_batches_that_are_no_poisson_draws_count_in_full() -> None:
    with pytest.warns(UserWarning, match="analyses: 0"):
        dpq.Scheduler(calibrated(poisson_sampling=False), epochs=4, mode="pls")


def test_gdp_leaves_it_to_the_spend() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="GDP accounting is experimental")
        engine = calibrated(accountant="gdp")
    dpq.Scheduler(engine, epochs=4)


def test_a_resumed_run_is_not_counted_twice(tmp_path: Path) -> None:
    planned = dpq.Ledger("rdp")
    planned.spend("training", q=1 / 8, sigma=1.0, steps=32)
    planned.spend("analysis", q=1 / 8, sigma=3.0)

    def start() -> dpq.Scheduler:
        target = planned.epsilon(DELTA)
        engine = engine_of(target_epsilon=target, target_delta=DELTA, ledger_path=tmp_path / "ledger.json")
        return dpq.Scheduler(engine, epochs=4, estimator=Constant(0.0, sigma=3.0))

    first = start()
    run_epochs(first, 4)
    first.engine.close()
    assert start().engine.ledger.epsilon(DELTA) == planned.epsilon(DELTA)


# Loops that count


def test_a_loop_that_counts_its_batches_ends_an_epoch_with_its_last_step() -> None:
    """Trainers take `len(loader)` batches and never ask for one more, which would end the iteration."""
    run = made(max_physical_batch_size=3, compile_options=dict(inner="eager"))
    scheduler = dpq.Scheduler(run.engine, mode="pls", k=1)
    for epoch in range(1, 3):
        batches = iter(run.loader)
        for place in range(len(run.loader)):
            x, y = next(batches)
            run.criterion(run.model(x), y).backward()
            with pytest.raises(PrivateTrainingError, match="inside the loop"):
                scheduler.step()  # a step is still to come
            run.optimizer.step()
            if place < len(run.loader) - 1:
                with pytest.raises(CheckpointError, match="loop over the loader has not ended"):
                    run.engine.state_dict()
        assert epoch == 1 or run.engine.state_dict()  # this ends the iteration too
        scheduler.step()
        assert scheduler.epoch == epoch and next(batches, None) is None
    assert sum(entry.steps for entry in run.engine.ledger.entries) == 2 * run.loader.steps


# Sites that only a graph shows


class Branching(nn.Module):
    """Its sites are known only at its first forward: fx cannot trace it, and its weight is no module's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().amax(1, keepdim=True).clamp(min=1)
        return nn.functional.linear(self.fc(x / scale), self.weight)


def branching(rows: Tensor, **options: Any) -> tuple[dpq.PrivacyEngine, dpq.CompiledModule]:
    engine = dpq.PrivacyEngine(accountant="rdp")
    model = dpq.compile(Branching().train(), budget=1, backend="reference", inner="eager", **options)
    data = TensorDataset(rows, torch.zeros(len(rows), dtype=torch.int64))
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=4,
    )
    return engine, model


def test_sites_are_found_without_example_inputs() -> None:
    engine, model = branching(torch.randn(16, 4))
    scheduler = dpq.Scheduler(engine, epochs=2, n_interval=1, n_sample=1)
    assert set(scheduler.policies) == {"fc", "weight"} == set(model.sites.names)
    scheduler.step()
    assert any(scheduler.scores.values()) and torch.is_grad_enabled()


def test_finding_the_sites_reads_no_contents_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr(dpq.CompiledModule, "capture", lambda self, *args, **kwargs: seen.extend(args))
    engine, _ = branching(torch.full((16, 4), 7.0))
    dpq.Scheduler(engine, epochs=2, mode="pls")
    assert [tuple(x.shape) for x in seen] == [(2, 4)] and not seen[0].any()


def test_sites_that_cannot_be_found_are_refused_with_the_reason() -> None:
    engine, _ = branching(torch.randn(16, 4))
    with pytest.raises(PrivacySpecError, match=r"known only with its graph.*no columns.*unpack="):
        dpq.Scheduler(engine, epochs=2, unpack=no_columns)


def no_columns(batch: Any) -> Any:
    raise ValueError("no columns")
