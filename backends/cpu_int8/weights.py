"""Weights packed for int8 products: one array of bytes that holds the unit and the panels for forward and backward."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dpquant_compile.backends.cpu_int8 import build
from dpquant_compile.backends.cpu_int8.codes import Codes
from dpquant_compile.sites import ConvGeometry

__all__ = ["Packing", "Panels", "packing"]

# Convs of fewer channels per tap take an unfolded input: a tap's channels are read in words of four.
_THIN = 16


@dataclass(frozen=True)
class Panels:
    """A weight in the order in which one product reads it. The first three are places in the array of bytes."""

    panels: int
    offsets: int
    depth: int
    groups: int
    columns: int
    terms: int
    taps: int


@dataclass(frozen=True)
class Packing:
    """Where the parts of a packed weight lie. The unit, a float32, is at its start.

    unfolds   whether forward takes an unfolded input, with the taps among the terms
    """

    shape: tuple[int, ...]
    forward: Panels
    backward: Panels
    unfolds: bool
    size: int

    def fill(self, blob: Tensor, codes: Tensor, x: Codes, grad: Codes) -> None:
        """Put the codes of a weight, int8 by tap [taps, N, C], into the panels; `x` and `grad` are what they meet."""
        n, c = self.shape[:2]
        by_group = n // self.backward.groups * c
        first, strides = codes, (by_group, c, 1, n * c)
        if self.unfolds:
            taps = math.prod(self.shape[2:])
            first, strides = codes.view(taps, n, c).transpose(0, 1).contiguous(), (0, c * taps, 1, 1)
        self._pack(blob, first, self.forward, strides, x)
        self._pack(blob, codes, self.backward, (by_group, 1, c, n * c), grad)

    def _pack(self, blob: Tensor, codes: Tensor, to: Panels, strides: tuple[int, ...], rows: Codes) -> None:
        start = blob.data_ptr()
        counts = to.groups, to.columns, to.terms, to.taps, *strides, rows.zero, rows.largest
        build.load()("pack", codes, *counts, start + to.panels, start + to.offsets, start + to.depth)


@lru_cache(maxsize=4096)
def packing(shape: tuple[int, ...], geometry: ConvGeometry | None) -> Packing:
    """How a weight of that shape is packed on this machine."""
    groups = 1 if geometry is None else geometry.groups
    features, channels, taps = shape[0] // groups, shape[1], math.prod(shape[2:])
    unfolds = groups == 1 and channels < _THIN and taps > 1
    at, made = 64, list[Panels]()
    for order in (
        (1, features, channels * taps, 1) if unfolds else (groups, features, channels, taps),
        (groups, channels, features, taps),
    ):
        places = []
        for size in _bytes(*order):
            places.append(at)
            at += -(-size // 64) * 64
        made.append(Panels(places[0], places[1], places[2], *order))
    return Packing(shape, made[0], made[1], unfolds, at)


def _bytes(groups: int, columns: int, terms: int, taps: int) -> tuple[int, int, int]:
    width = build.load().columns
    blocks = groups * -(-columns // width)
    numbers = blocks * taps * width
    return numbers * 4 * -(-terms // 4), numbers * torch.int32.itemsize, blocks
