"""Estimators: what one sample can change, replayed on the same bits, and a model that is left as it was found."""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpquant_compile.errors import PrivacySpecError
from dpquant_compile.privacy.data.poisson_loader import MicroBatch
from dpquant_compile.privacy.schedule.estimators import ADJACENCIES, Paper, PerSample, Setting, make_estimator
from dpquant_compile.privacy.schedule.probe import Batch, Probe
from tests.support import models
from tests.support.private_loops import Run, made, train
from tests.support.probes import OUTLIERS, batch_of, cross_entropy, group_of, ordered, rows

NUMBER, PHYSICAL = 2, 6
IDS = [3, 17, 4, 1001, 8]
EXTRA = 50  # the id of the sample that neighbours differ in


class Plain(nn.Module):
    """No norm and no bounded activation: an outlier goes through at full size; [B, 6] to 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.middle, self.fc = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.middle(torch.relu(self.body(x)))))


def run_of(model: nn.Module | None = None, **options: Any) -> Run:
    return made(
        model or models.seeded(Plain),
        n=24,
        compile_options={"inner": "eager"},
        max_physical_batch_size=PHYSICAL,
        **options,
    )


def setting_of(run: Run, expected: float = 6.0) -> Setting:
    return Setting(run.engine.session, run.optimizer, run.criterion, NUMBER, expected)


@lru_cache(maxsize=1)
def shared() -> tuple[Setting, list[frozenset[str]], Batch]:
    """One private model for all replays, its policies, and the batch S."""
    run = run_of()
    policies = [frozenset({name}) for name in run.model.sites.names]
    x = torch.randn(len(IDS), 6, generator=torch.Generator().manual_seed(1))
    return setting_of(run), policies, batch_of(x, IDS)


def with_sample(batch: Batch, x: Tensor, target: int) -> Batch:
    """The batch and one sample more."""
    args = (torch.cat([batch.args[0], x[None]]),)
    ids = torch.cat([batch.ids, torch.tensor([EXTRA])])
    return Batch(args, {}, torch.cat([batch.target, torch.tensor([target])]), ids, group_of(ids))


def parts(batch: Batch) -> list[Batch]:
    """As a draw comes: groups together, in parts of at most the physical size."""
    whole = ordered(batch)
    return [rows(whole, range(i, min(i + PHYSICAL, len(whole.ids)))) for i in range(0, len(whole.ids), PHYSICAL)]


@lru_cache(maxsize=1)
def extras() -> list[tuple[Tensor, int]]:
    """The samples that neighbours differ in: every outlier at several places and with every target."""
    generator = torch.Generator().manual_seed(2)
    bases = [torch.randn(6, generator=generator) for _ in range(3)]
    return [(change(x), target) for x in bases for change in OUTLIERS.values() for target in range(3)]


def moved(estimator: Any, policies: Sequence[frozenset[str]], batch: Batch) -> tuple[float, float]:
    """How far the vector moves at most when a sample is added, and when one is replaced by another."""
    setting = shared()[0]
    alone = estimator.measure(setting, policies, parts(batch))
    found = [estimator.measure(setting, policies, parts(with_sample(batch, x, target))) for x, target in extras()]
    assert all(bool(vector.isfinite().all()) for vector in (alone, *found))
    added = max(float((vector - alone).norm()) for vector in found)
    replaced = max(float((a - b).norm()) for a, b in itertools.combinations(found, 2))
    return added, replaced


# Sensitivity, replayed


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [PerSample(), PerSample(clip=0.05, repetitions=2)], ids=["default", "tight"])
def test_per_sample_moves_by_clip_if_one_is_added_and_by_twice_that_if_one_is_replaced(estimator: PerSample) -> None:
    _, policies, batch = shared()
    added, replaced = moved(estimator, policies, batch)
    assert added <= estimator.sensitivity("add_remove") * (1 + 1e-5)
    assert replaced <= estimator.sensitivity("replace_one") * (1 + 1e-5)
    # Both bounds are needed: the first is reached, and a replacement goes well beyond it.
    assert added > 0.99 * estimator.clip and replaced > 1.2 * estimator.clip


@pytest.mark.slow
def test_the_papers_vector_moves_by_more_than_its_clipping_norm() -> None:
    """The published sensitivity is C. These neighbours, one sample apart, lie on opposite sides of the ball."""
    _, policies, batch = shared()
    estimator = Paper(repetitions=1)
    steep = Batch((30 * batch.args[0],), {}, batch.target, batch.ids, batch.groups)  # its vector is longer than C
    added, replaced = moved(estimator, policies, steep)
    assert added > 1.5 * estimator.clip
    for adjacency, distance in (("add_remove", added), ("replace_one", replaced)):
        assert distance <= estimator.sensitivity(adjacency) * (1 + 1e-5)


def test_sensitivities_by_adjacency() -> None:
    assert [PerSample(clip=0.5).sensitivity(a) for a in ADJACENCIES] == [0.5, 1.0]
    assert [Paper(clip=0.01).sensitivity(a) for a in ADJACENCIES] == [0.02, 0.02]
    for estimator in (PerSample(), Paper()):
        with pytest.raises(PrivacySpecError, match="add_remove, replace_one"):
            estimator.sensitivity("user")


# What they measure


def test_per_sample_is_the_sum_of_clipped_differences() -> None:
    setting, policies, batch = shared()
    estimator = PerSample(clip=0.02, repetitions=2)
    total = torch.zeros(len(policies), dtype=torch.float64)
    for i in range(len(IDS)):
        one = rows(batch, [i])
        # Steps of an analysis are negative and its own: no training step or other analysis has the same bits.
        turns = [Probe(setting.session, cross_entropy, setting.step(turn)) for turn in (0, 1)]
        vector = torch.stack([probe.differences(one, policies)[0] for probe in turns]).double().mean(0)
        total += vector * min(1.0, 0.02 / float(vector.norm()))
    torch.testing.assert_close(estimator.measure(setting, policies, parts(batch)), total, rtol=1e-4, atol=1e-7)
    assert estimator.divisor(setting) == 6.0


def test_per_sample_does_not_depend_on_how_a_draw_is_cut() -> None:
    setting, policies, batch = shared()
    whole = ordered(batch)
    cut = [rows(whole, [0, 1]), rows(whole, [2]), rows(whole, [3, 4])]
    first, second = (PerSample().measure(setting, policies, batches) for batches in ([whole], cut))
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def by_hand(run: Run, policy: frozenset[str], batches: Sequence[Batch], turn: int, lr: float, expected: float) -> float:
    """Algorithm 1's inner loop without noise: clipped sums under the policy, an SGD step, the mean loss after it."""
    session, model = run.engine.session, run.model
    kept, step = models.state(model), model.step
    model.train()
    model.set_policy(policy)
    model.step = setting_of(run).step(turn)
    with session.rehearsal(1.0):
        for number, batch in enumerate(batches):
            session.announce(MicroBatch(batch.ids, first=number == 0, last=number + 1 == len(batches)))
            run.criterion(model(*batch.args), batch.target).backward()
        twin = copy.deepcopy(session.internals.original).eval()
        with torch.no_grad():
            for name, parameter in twin.named_parameters():
                parameter -= lr * session.parameters[name].summed_grad / expected  # type: ignore[attr-defined]
            losses = torch.cat([cross_entropy(twin(*batch.args), batch.target) for batch in batches])
    model.set_policy("none")
    model.step = step
    assert all(torch.equal(kept[name], value) for name, value in models.state(model).items())
    return float(losses.mean())


@pytest.mark.slow
@pytest.mark.parametrize("size", [5, 8])
def test_the_papers_estimator_is_algorithm_1(size: int) -> None:
    """R = 2 updates under each policy and under none; loss differences, clipped to C. 8 samples make two parts."""
    lr = 0.5
    run = run_of(noise_multiplier=0.0, optimizer=lambda p: torch.optim.SGD(p, lr=lr))
    setting = setting_of(run, expected=7.0)
    policies = [frozenset({name}) for name in run.model.sites.names]
    batches = parts(batch_of(torch.randn(size, 6, generator=torch.Generator().manual_seed(3)), list(range(size))))
    means = [
        sum(by_hand(run, policy, batches, turn, lr, 7.0) for turn in (0, 1)) / 2
        for policy in (frozenset[str](), *policies)
    ]
    vector = torch.tensor([mean - means[0] for mean in means[1:]], dtype=torch.float64)
    assert float(vector.norm()) > 1e-3
    for clip in (1e3, 0.3 * float(vector.norm())):
        expected = vector * min(1.0, clip / float(vector.norm()))
        got = Paper(clip=clip).measure(setting, policies, batches)
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-6)
    assert Paper().divisor(setting) == 1.0


@pytest.mark.parametrize("repetitions", [1, 3])
def test_the_paper_repeats_each_policy_and_the_baseline(repetitions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    setting, policies, batch = shared()
    seen: list[tuple[frozenset[str], int]] = []

    def loss(self: Paper, setting: Setting, policy: frozenset[str], batches: Any, turn: int) -> float:
        seen.append((policy, turn))
        return 0.001 * len(policy) * (1 + turn)

    monkeypatch.setattr(Paper, "_loss", loss)
    vector = Paper(repetitions=repetitions).measure(setting, policies, parts(batch))
    turns = range(repetitions)
    assert sorted(seen, key=str) == sorted(itertools.product([frozenset[str](), *policies], turns), key=str)
    assert vector.tolist() == pytest.approx([0.001 * sum(1 + t for t in turns) / repetitions] * len(policies))


# What comes in


@pytest.mark.parametrize("estimator", [PerSample(), Paper()], ids=["per_sample", "paper"])
def test_an_empty_draw_measures_zeros(estimator: Any) -> None:
    setting, policies, _ = shared()
    vector = estimator.measure(setting, policies, [])
    assert vector.dtype == torch.float64 and vector.tolist() == [0.0] * len(policies)


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_a_sample_that_is_not_finite_adds_nothing(kind: str) -> None:
    setting, policies, batch = shared()
    broken = with_sample(batch, OUTLIERS[kind](torch.ones(6)), 0)
    alone, with_it = (PerSample().measure(setting, policies, parts(b)) for b in (batch, broken))
    torch.testing.assert_close(with_it, alone, rtol=1e-5, atol=1e-6)
    assert alone.any()
    # Algorithm 1 has one mean loss for all: there it leaves nothing.
    assert not Paper(repetitions=1).measure(setting, policies, parts(broken)).any()


# A model that is left as it was found

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
}


def everything(run: Run) -> dict[str, Any]:
    """All that an analysis might change, in a form that compares."""
    session, model, wrapped = run.engine.session, run.model, run.optimizer.original_optimizer
    tensors = dict(models.state(model))
    plain: dict[str, Any] = {"modes": {name: m.training for name, m in session.internals.original.named_modules()}}
    for number, slots in wrapped.state_dict()["state"].items():
        for slot, value in slots.items():
            tensors[f"{number} {slot}"] = torch.as_tensor(value).clone()
    plain["state"] = sorted(tensors)
    plain["groups"] = wrapped.state_dict()["param_groups"]
    plain |= {"step": model.step, "policy": sorted(model.policy), "training": model.training}
    plain |= {"dropped": session.dropped, "micro": session.micro, "noise": run.engine.run.noise.state_dict()}
    plain |= {"ids": model.sample_ids, "entries": run.engine.ledger.entries, "paid": session.step.paid}
    return {"plain": plain, "tensors": tensors}


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("estimator", [PerSample(), Paper()], ids=["per_sample", "paper"])
def test_an_analysis_leaves_everything_as_it_was(estimator: Any, name: str, trained: bool) -> None:
    run = run_of(optimizer=OPTIMIZERS[name], policy=["middle"])
    if trained:
        train(run)
    run.engine.session.internals.original.middle.eval()  # a mode of its own
    before = everything(run)
    batches = parts(batch_of(torch.randn(8, 6), list(range(8))))
    policies = [frozenset({n}) for n in run.model.sites.names]
    vector = estimator.measure(setting_of(run), policies, batches)
    after = everything(run)
    assert vector.any() and before["plain"] == after["plain"]
    assert all(torch.equal(after["tensors"][key], value) for key, value in before["tensors"].items())
    assert all(getattr(p, "summed_grad", None) is None for p in run.model.parameters())
    assert torch.equal(vector, estimator.measure(setting_of(run), policies, batches)), "the same bits each time"


def test_training_goes_on_as_if_no_analysis_had_been() -> None:
    """Rounding bits and noise of the steps that follow are those of a run without it, so the weights are too."""
    final = []
    for analysed in (False, True):
        run = run_of(optimizer=OPTIMIZERS["adam"], policy=["body", "fc"])
        train(run)
        if analysed:
            Paper().measure(setting_of(run), [frozenset({"fc"})], parts(batch_of(torch.randn(8, 6), list(range(8)))))
        train(run)
        final.append(models.state(run.model))
    assert all(torch.equal(final[0][name], value) for name, value in final[1].items())


def test_a_failing_loss_leaves_the_weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(optimizer=OPTIMIZERS["momentum"], policy=["middle"])
    train(run)
    before = everything(run)

    def fails(*args: Any) -> float:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Paper, "_evaluate", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        Paper().measure(setting_of(run), [frozenset({"fc"})], parts(batch_of(torch.randn(5, 6), IDS)))
    after = everything(run)
    assert before["plain"] == after["plain"]
    assert all(torch.equal(after["tensors"][key], value) for key, value in before["tensors"].items())


# Making one


def test_defaults_follow_the_estimator_and_settings_are_checked() -> None:
    assert make_estimator("per_sample") == PerSample(clip=0.1, sigma=8.0, repetitions=1)
    assert make_estimator("paper") == Paper(clip=0.01, sigma=0.5, repetitions=2)
    assert make_estimator("paper", clip=None, sigma=1.5, repetitions=4) == Paper(0.01, 1.5, 4)
    own = Paper()
    assert make_estimator(own, clip=None) is own
    for kind, given in (
        ("mine", {}),
        ("paper", {"clip": 0.0}),
        ("paper", {"sigma": -1.0}),
        ("per_sample", {"repetitions": 0}),
    ):
        with pytest.raises(PrivacySpecError):
            make_estimator(kind, **given)
    for value in (math.nan, math.inf):
        with pytest.raises(PrivacySpecError):
            make_estimator("per_sample", clip=value)
    with pytest.raises(PrivacySpecError, match="its settings"):
        make_estimator(own, sigma=1.0)
