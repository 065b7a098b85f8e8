"""Convolutions as tables: which pixel of a map each tap meets, forward and backward, for any rank and geometry."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dpquant_compile.sites import ConvGeometry

__all__ = ["Table", "backward_table", "forward_table", "linear_table"]


@dataclass(frozen=True)
class Table:
    """`source` [pixels, taps] int32: the pixel that a tap meets, -1 outside the map; `order` [pixels] int32 is a
    permutation in which neighbours meet the same taps."""

    source: Tensor
    order: Tensor

    @property
    def pixels(self) -> int:
        return self.source.shape[0]

    @property
    def taps(self) -> int:
        return self.source.shape[1]

    def across(self, batch: int, tile: int) -> bool:
        """Whether tiles of rows had better take one pixel of several samples than several pixels of one.

        A tile takes the taps that any of its rows meets. One pixel meets the fewest, but samples may not fill all
        tiles, and rows that lie apart are read more slowly: by a tenth, measured.
        """
        meets = self.source >= 0
        along = meets[self.order.long()].repeat(tile, 1).unflatten(0, (self.pixels, tile)).any(1).sum()
        return bool(1.1 * meets.sum() * -(-batch // tile) * tile < along * batch)


@lru_cache(maxsize=1024)
def linear_table(pixels: int) -> Table:
    """A linear layer: one tap, which meets its own row."""
    order = torch.arange(pixels, dtype=torch.int32)
    return Table(order[:, None].contiguous(), order)


@lru_cache(maxsize=1024)
def forward_table(geometry: ConvGeometry, size: tuple[int, ...], kernel: tuple[int, ...]) -> Table:
    """For every output pixel and tap, the input pixel."""
    lines = []
    for n, k, s, p, d in zip(size, kernel, geometry.stride, geometry.padding, geometry.dilation, strict=True):
        outputs = (n + 2 * p - d * (k - 1) - 1) // s + 1
        at = torch.arange(outputs)[:, None] * s - p + torch.arange(k) * d
        lines.append(torch.where((at >= 0) & (at < n), at, -1))
    source = _combine(lines, size)
    return Table(source, torch.arange(source.shape[0], dtype=torch.int32))


@lru_cache(maxsize=1024)
def backward_table(geometry: ConvGeometry, size: tuple[int, ...], kernel: tuple[int, ...]) -> Table:
    """For every input pixel and tap, the output pixel that it was used for."""
    lines, classes, outputs = [], [], []
    for n, k, s, p, d in zip(size, kernel, geometry.stride, geometry.padding, geometry.dilation, strict=True):
        count = (n + 2 * p - d * (k - 1) - 1) // s + 1
        at = torch.arange(n)[:, None] + p - torch.arange(k) * d
        lines.append(torch.where((at >= 0) & (at % s == 0) & (at // s < count), at // s, -1))
        classes.append((torch.arange(n) + p) % s)
        outputs.append(count)
    # With a stride, pixels of one residue meet the same taps.
    kinds = torch.zeros(1, dtype=torch.int64)
    for own, s in zip(classes, geometry.stride, strict=True):
        kinds = (kinds[:, None] * s + own).flatten()
    return Table(_combine(lines, tuple(outputs)), torch.argsort(kinds, stable=True).to(torch.int32))


def _combine(lines: list[Tensor], size: tuple[int, ...]) -> Tensor:
    """Tables [pixels, taps] of single dimensions as one of all, row-major in both."""
    total = torch.zeros(1, 1, dtype=torch.int64)
    for line, n in zip(lines, size, strict=True):
        joined = total[:, None, :, None] * n + line[None, :, None, :]
        outside = (total[:, None, :, None] < 0) | (line[None, :, None, :] < 0)
        total = torch.where(outside, -1, joined).flatten(0, 1).flatten(1, 2)
    return total.to(torch.int32).contiguous()
