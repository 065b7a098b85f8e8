"""Probe batches whose targets and groups go with their samples, and samples that are outliers."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dpquant_compile.privacy.schedule.probe import Batch

STEP, GROUPS = -7, 4


def cross_entropy(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs, target, reduction="none")


def group_of(ids: Tensor, groups: int = GROUPS) -> Tensor:
    """Some function of the id."""
    return (ids * 2_654_435_761 >> 9) % groups


def batch_of(x: Tensor, ids: Sequence[int], classes: int = 3) -> Batch:
    """Samples whose target, and group, is a function of their id, so that it goes with them."""
    own = torch.tensor(ids)
    return Batch((x,), {}, torch.tensor([i % classes for i in ids]), own, group_of(own))


def rows(batch: Batch, keep: Sequence[int]) -> Batch:
    at = list(keep)
    return Batch(tuple(a[at] for a in batch.args), {}, batch.target[at], batch.ids[at], batch.groups[at])


def ordered(batch: Batch) -> Batch:
    """As `draw_batch` gives it: the samples of a group side by side."""
    return rows(batch, torch.argsort(batch.groups, stable=True).tolist())


def poke(x: Tensor, value: float) -> Tensor:
    return torch.where(torch.arange(x.numel()).view(x.shape) == 0, value, x)


OUTLIERS: dict[str, Callable[[Tensor], Tensor]] = {
    "usual": lambda x: x,
    "huge": lambda x: 1e4 * x,
    "1e30": lambda x: 1e30 * x,
    "zeros": torch.zeros_like,
    "nan": lambda x: poke(x, math.nan),
    "inf": lambda x: poke(x, math.inf),
}
