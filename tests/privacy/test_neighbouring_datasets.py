"""Neighbouring datasets through whole engine runs: what a record adds must not move how the other records are rounded.

The ledger's adjacency is one record added or removed, and a removed record shifts the numbers of all later ones. So
datasets are compared here, and not batches with ids that stay: the sum of clipped gradients, or of an analysis, must
move by at most one record's share, given the run's secret bits; and without those bits nobody can do better than ε.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile.privacy.mechanism.secret_bits import SecretBits
from dpquant_compile.privacy.schedule.estimators import PerSample
from tests.support.models import seeded

pytestmark = pytest.mark.slow  # each case trains on two datasets

FEATURES, CLASSES, IGNORED = 16, 5, -100
BOUND = 1.0
ROUNDING = 1e-5


def records(n: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(n, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (n,), generator=generator))


def chosen(data: TensorDataset, rows: Tensor) -> TensorDataset:
    return TensorDataset(*(tensor[rows] for tensor in data.tensors))


def emptied(data: TensorDataset, row: int) -> TensorDataset:
    """One record has no loss, and so no gradient."""
    x, y = (tensor.clone() for tensor in data.tensors)
    x[row], y[row] = 0, IGNORED
    return TensorDataset(x, y)


# Each neighbour with the numbers that its records have in the dataset itself.
Neighbour = Callable[[TensorDataset], tuple[TensorDataset, Tensor]]


def _without_first(data: TensorDataset) -> tuple[TensorDataset, Tensor]:
    kept = torch.arange(1, len(data))
    return chosen(data, kept), kept


def _reordered(data: TensorDataset) -> tuple[TensorDataset, Tensor]:
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(9))
    return chosen(data, order), order


def _with_an_empty_one(data: TensorDataset) -> tuple[TensorDataset, Tensor]:
    return emptied(data, 3), torch.arange(len(data))


NEIGHBOURS: dict[str, Neighbour] = {
    "first row deleted": _without_first,
    "rows reordered": _reordered,
    "a row made empty": _with_an_empty_one,
}


def network(width: int) -> nn.Module:
    inner = (nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    return nn.Sequential(*inner, nn.Tanh(), nn.Linear(width, CLASSES))


@lru_cache(maxsize=2)
def compiled(width: int) -> dpq.CompiledModule:
    """One for all runs, which then find its programs ready; no run changes its weights."""
    return dpq.compile(seeded(lambda: network(width)), budget=2, format="luq_fp4", backend="reference").train()


def run_of(
    data: TensorDataset,
    *,
    batch: int | None = None,
    sigma: float = 0.0,
    secure: bool = True,
    width: int = 32,
    model: dpq.CompiledModule | None = None,
) -> dpq.PrivacyEngine:
    """An engine before its first step, with all sites low; without `batch`, every record is in every batch."""
    model = model or compiled(width)
    model.step = 0
    engine = dpq.PrivacyEngine(secure_mode=secure)
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(reduction="sum", ignore_index=IGNORED),
        data_loader=DataLoader(data, batch_size=batch or len(data)),
        noise_multiplier=sigma,
        max_grad_norm=BOUND,
        max_physical_batch_size=8 * math.ceil(len(data) / 8),
        **({} if secure else {"noise_generator": torch.Generator().manual_seed(3)}),
    )
    model.set_policy("all")
    return engine


def step(engine: dpq.PrivacyEngine) -> Tensor:
    """The noised sum of one step, as one vector."""
    made = engine.run
    for x, y in made.loader:
        made.optimizer.zero_grad()
        made.criterion(made.session.model(x), y).backward()
        made.optimizer.step()
        break
    return torch.cat([p.grad.flatten().double() for p in made.session.model.parameters()])


def analysis(engine: dpq.PrivacyEngine) -> Tensor:
    """What an analysis of all records measures, before its noise."""
    measured: list[Tensor] = []

    class Kept(PerSample):
        def measure(self, *args: Any) -> Tensor:
            measured.append(super().measure(*args))
            return measured[-1]

    scheduler = dpq.Scheduler(engine, epochs=3, k=2, n_interval=1, n_sample=1, estimator=Kept(clip=0.05, sigma=1.0))
    scheduler.step()
    return measured[0]


# Given the bits


def _numbered_as(monkeypatch: pytest.MonkeyPatch, numbers: Tensor) -> None:
    """Give the records of a neighbour the bits that they have in the dataset itself: the coupling of the proof."""
    own = SecretBits.sample_ids

    def coupled(self: SecretBits, step: int, ids: Tensor) -> Tensor:
        return own(self, step, torch.where(ids >= 0, numbers[ids.clamp(min=0)], ids))

    monkeypatch.setattr(SecretBits, "sample_ids", coupled)


@pytest.mark.parametrize("name", NEIGHBOURS)
@pytest.mark.parametrize("measure", [step, analysis])
def test_given_the_bits_a_record_moves_the_sum_by_its_share(
    measure: Callable[[dpq.PrivacyEngine], Tensor], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = records(96)
    neighbour, numbers = NEIGHBOURS[name](data)
    own = measure(run_of(data, secure=False))
    bound = BOUND if measure is step else 0.05
    apart = float((own - measure(run_of(neighbour, secure=False))).norm())
    _numbered_as(monkeypatch, numbers)
    moved = float((own - measure(run_of(neighbour, secure=False))).norm())
    share = 0.0 if name == "rows reordered" else bound
    assert moved <= share + ROUNDING * bound * len(data)
    if name != "a row made empty":  # bits by another number are other bits, which is what the coupling is for
        assert apart > 3 * bound


# Without them


@pytest.mark.parametrize("name", NEIGHBOURS)
@pytest.mark.parametrize("measure", [step, analysis])
def test_on_average_over_the_bits_a_record_moves_the_sum_by_its_share(
    measure: Callable[[dpq.PrivacyEngine], Tensor], name: str
) -> None:
    """With bits that anyone can know, the mean over runs is one run, and all later records are rounded anew in it."""
    data, runs = records(96), 16
    neighbour, _ = NEIGHBOURS[name](data)
    first, second = (torch.stack([measure(run_of(d)) for _ in range(runs)]) for d in (data, neighbour))
    bound = BOUND if measure is step else 0.05
    # The means still vary by the bits; in each run by as much as the runs differ from each other.
    spread = math.sqrt(float(first.var(0).sum() + second.var(0).sum()) / runs)
    assert float((first.mean(0) - second.mean(0)).norm()) <= bound * (1 + ROUNDING) + 2 * spread
    assert spread > 0.1 * bound  # rounding is random from run to run


def test_dropout_of_a_known_seed_moves_the_sum_by_a_records_share() -> None:
    """Masks by place in the batch, from torch's seed, would be drawn anew for every record behind the first."""
    layers = (nn.Linear(FEATURES, 32, bias=False), nn.Dropout(0.5), nn.Linear(32, CLASSES, bias=False))
    model = dpq.compile(seeded(lambda: nn.Sequential(*layers)), budget=0, backend="reference").train()
    data, runs = records(96), 16
    neighbour, _ = _without_first(data)

    def of_seed(d: TensorDataset) -> Tensor:
        engine = run_of(d, model=model)
        torch.manual_seed(0)
        return step(engine)

    first, second = (torch.stack([of_seed(d) for _ in range(runs)]) for d in (data, neighbour))
    spread = math.sqrt(float(first.var(0).sum() + second.var(0).sum()) / runs)
    assert float((first.mean(0) - second.mean(0)).norm()) <= BOUND * (1 + ROUNDING) + 2 * spread
    assert spread > 0.1 * BOUND


def test_nobody_tells_neighbours_apart_better_than_epsilon_allows() -> None:
    """An adversary who has the code, all hyperparameters and both datasets, and sees one noised step.

    They run the code themselves, without noise and on all records, and look along the difference of what they find.
    """
    data = records(2048)
    neighbour, _ = _without_first(data)
    known = [step(run_of(d, width=128)) for d in (data, neighbour)]
    direction = (known[0] - known[1]) / (known[0] - known[1]).norm()
    middle = float((known[0] + known[1]) @ direction) / 16
    generator, trials, right = torch.Generator().manual_seed(0), 200, 0
    for _ in range(trials):
        whole = bool(torch.rand((), generator=generator) < 0.5)
        engine = run_of(data if whole else neighbour, batch=len(data) // 8, sigma=2.0, width=128)
        right += (float(step(engine) @ direction) > middle) == whole
    epsilon = engine.get_epsilon(1e-5)
    assert epsilon == pytest.approx(0.47, abs=0.02)
    chance = (math.exp(epsilon) + 1e-5) / (1 + math.exp(epsilon))  # of the best guess that (ε, δ) allows
    assert stats.binomtest(right, trials, chance, alternative="greater").pvalue > 1e-3, f"{right} of {trials}"
