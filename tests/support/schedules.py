"""An engine with a private model of six linears, and an estimator that measures what it is told to."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dpquant_compile as dpq
from tests.support import models

SITES = tuple(str(i) for i in range(6))


class Numbers(Dataset[Any]):
    """As many samples as asked, of nothing but zeros; every read is noted."""

    def __init__(self, size: int) -> None:
        self.size, self.reads = size, []

    def __len__(self) -> int:
        return self.size

    def __getitems__(self, ids: list[int]) -> list[int]:
        self.reads.append(list(ids))
        return ids


def zeros(ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    return torch.zeros(len(ids), 4), torch.zeros(len(ids), dtype=torch.int64)


def six() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in SITES))


def engine_of(
    data: Any = None,
    batch: int = 8,
    physical: int = 8,
    model: nn.Module | None = None,
    noise: int = 0,
    accountant: str = "rdp",
    collate: Any = zeros,
    criterion: bool = True,
    **options: Any,
) -> dpq.PrivacyEngine:
    """An engine with a private model of six linears; budget 2."""
    compiled = dpq.compile(
        model or models.seeded(six), budget=2, format="luq_fp4", backend="reference", inner="eager"
    ).train()
    engine = dpq.PrivacyEngine(accountant=accountant, **options)
    engine.make_private(
        module=compiled,
        optimizer=torch.optim.SGD(compiled.parameters(), lr=0.0),
        data_loader=DataLoader(
            data or Numbers(64), batch_size=batch, collate_fn=collate, generator=torch.Generator().manual_seed(noise)
        ),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=physical,
        noise_generator=torch.Generator().manual_seed(noise),
        **({"criterion": nn.CrossEntropyLoss()} if criterion else {"loss_reduction": "sum"}),
    )
    return engine


class Constant:
    """An estimator that measures what it is told to, after reading its draw."""

    def __init__(self, values: Any, sigma: float = 1e-9, scale: float = 1.0, divisor: float = 1.0) -> None:
        self.values, self.sigma, self.scale, self.number = values, sigma, scale, divisor
        self.drawn: list[list[int]] = []

    def sensitivity(self, adjacency: str) -> float:
        return self.scale if adjacency == "add_remove" else 2 * self.scale

    def measure(self, setting: Any, policies: Sequence[frozenset[str]], batches: Iterable[Any]) -> Tensor:
        self.drawn.append([i for batch in batches for i in batch.ids.tolist()])
        return torch.tensor(self.values, dtype=torch.float64).expand(len(policies))

    def divisor(self, setting: Any) -> float:
        return self.number


def run_epochs(scheduler: dpq.Scheduler, epochs: int) -> None:
    for _ in range(epochs):
        for _ in scheduler.run.loader:
            pass
        scheduler.step()
