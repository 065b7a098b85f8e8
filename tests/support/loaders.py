"""What the tests of private loaders share: a dataset of its own indices, a listener, and what must hold of an epoch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from dpquant_compile.privacy.data.poisson_loader import MicroBatch, PrivateLoader, private_loader

N = 40


class Own(Dataset[Any]):
    """Each item holds its own index, in a form of choice."""

    def __init__(self, n: int = N, item: Callable[[int], Any] = lambda i: (torch.full((2,), float(i)), i)) -> None:
        self.n = n
        self.item = item

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


@dataclass
class Heard:
    """A listener that keeps what it was told."""

    all: list[MicroBatch | None] = field(default_factory=list)

    def __call__(self, micro: MicroBatch | None) -> None:
        self.all.append(micro)

    @property
    def last(self) -> MicroBatch:
        micro = self.all[-1]
        assert micro is not None
        return micro

    @property
    def ends(self) -> int:
        return self.all.count(None)


def make(
    source: DataLoader[Any],
    heard: Callable[[MicroBatch | None], None] = lambda micro: None,
    seed: int = 0,
    **options: Any,
) -> PrivateLoader:
    options = dict(max_physical_batch_size=None, poisson_sampling=True) | options
    return private_loader(source, listener=heard, generator=torch.Generator().manual_seed(seed), **options)


def indices(batch: Any) -> list[int]:
    return [int(i) for i in batch[1]]


def logical(loader: PrivateLoader, heard: Heard) -> list[list[int]]:
    """The logical batches of an epoch, put together from micro-batches; all that must hold of those is checked."""
    batches: list[list[int]] = []
    before_last, pieces, full = True, 0, True
    limit, count = loader.max_physical_batch_size, loader.micro_batches_per_step
    for batch in loader:
        micro = heard.last
        assert micro.ids.dtype == torch.int64 and micro.ids.tolist() == indices(batch)
        assert batch[0][:, 0].tolist() == indices(batch)
        assert micro.first == before_last  # the first one, and that after a last one
        if micro.first:
            batches.append([])
            pieces, full = 0, True
        pieces += 1
        assert limit is None or len(micro.ids) <= limit
        assert full or len(micro.ids) == 0  # full ones, at most one in part, empty ones
        full = len(micro.ids) == limit
        batches[-1] += indices(batch)
        before_last = micro.last
        assert not micro.last or pieces == max(count or 1, -(-len(batches[-1]) // (limit or N)))
        assert micro.divided or len(micro.ids) in (0, len(batches[-1]))
    assert before_last
    assert heard.all[-1] is None and heard.ends == 1
    return batches
