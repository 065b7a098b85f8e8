"""What is fixed about the int8 products of a call at given sizes, worked out once: tables, layouts, structs."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from dpquant_compile.backends.cpu_int8 import build
from dpquant_compile.backends.cpu_int8.codes import Codes, codes_of
from dpquant_compile.backends.cpu_int8.conv_tables import Table, backward_table, forward_table, linear_table
from dpquant_compile.backends.cpu_int8.weights import Panels, packing
from dpquant_compile.backends.ops.site import output_shape
from dpquant_compile.backends.registry import Shapes, SiteCall
from dpquant_compile.numerics.operand_spec import OperandSpec
from dpquant_compile.numerics.quantize import from_samples, to_samples
from dpquant_compile.sites import BatchAxis

__all__ = [
    "SizedCall",
    "Sizes",
    "empty_samples",
    "layout_of",
    "shapes_of",
    "sized_call",
    "sizes_of",
    "spatial",
    "table_of",
    "weight_layout",
]


@dataclass(frozen=True)
class Sizes:
    """A call as the C++ sees it: pixels by channels."""

    batch: int
    in_pixels: int
    channels: int
    pixels: int
    features: int
    groups: int
    taps: int

    def problem(self, x: Codes, grad: Codes) -> tuple[int, ...]:
        """The struct that the C++ of per-sample gradients takes."""
        sizes = (self.batch, self.in_pixels, self.channels, self.pixels, self.features, self.groups, self.taps)
        return (*sizes, x.zero, x.largest, grad.zero, grad.largest)


def shapes_of(x: Tensor, weight: Tensor, call: SiteCall) -> Shapes:
    """The shapes of one call."""
    batch = x.shape[call.axis.dim] // (call.axis.outer * call.axis.inner)
    y = output_shape(tuple(x.shape), tuple(weight.shape), call.geometry)
    return Shapes(tuple(x.shape), tuple(weight.shape), y, batch)


def sizes_of(shapes: Shapes, call: SiteCall) -> Sizes:
    """The sizes of one call."""
    if call.geometry is None:
        places = math.prod(shapes.x) // max(shapes.batch * shapes.x[-1], 1)
        return Sizes(shapes.batch, places, shapes.x[-1], places, shapes.weight[0], 1, 1)
    pixels = math.prod(shapes.x[2:]), math.prod(shapes.y[2:])
    taps = math.prod(shapes.weight[2:])
    return Sizes(shapes.batch, pixels[0], shapes.x[1], pixels[1], shapes.weight[0], call.geometry.groups, taps)


def table_of(shapes: Shapes, call: SiteCall, sizes: Sizes) -> Table:
    """The pixels that the taps of a call meet."""
    if call.geometry is None:
        return linear_table(sizes.pixels)
    return forward_table(call.geometry, shapes.x[2:], shapes.weight[2:])


@dataclass(frozen=True)
class Product:
    """One product of a packed weight: the struct that the C++ takes, and the table to read its rows by."""

    struct: build.Numbers
    table: Table


class SizedCall:
    """One call at given sizes. A product's input is read by `read` and `read_table`: unfolded, with its taps among the
    channels, where a tap has only few of those."""

    def __init__(self, shapes: Shapes, call: SiteCall) -> None:
        self.shapes, self.call = shapes, call
        self.sizes = sizes_of(shapes, call)
        x, grad = codes_of(call.recipe.input), codes_of(call.recipe.grad_output)
        assert x is not None and grad is not None  # `_supports` has said so
        self.x_codes, self.grad_codes = x, grad
        self.packing = packing(shapes.weight, call.geometry)
        self.table = self.read_table = table_of(shapes, call, self.sizes)
        self.read, s = self.sizes, self.sizes
        if self.packing.unfolds:
            self.read = Sizes(s.batch, s.pixels, s.taps * s.channels, s.pixels, s.features, 1, 1)
            self.read_table = linear_table(s.pixels)
        self.problem = build.numbers(*self.sizes.problem(x, grad))
        self.read_problem = build.numbers(*self.read.problem(x, grad))

    @cached_property
    def forward(self) -> Product:
        read = self.read
        return self._product(self.read_table, read.in_pixels, read.channels, self.packing.forward, self.x_codes)

    @cached_property
    def backward(self) -> Product:
        geometry, sizes = self.call.geometry, self.sizes
        table = linear_table(sizes.pixels)
        if geometry is not None:
            table = backward_table(geometry, self.shapes.x[2:], self.shapes.weight[2:])
        return self._product(table, sizes.pixels, sizes.features, self.packing.backward, self.grad_codes)

    def _product(self, table: Table, pixels: int, channels: int, order: Panels, rows: Codes) -> Product:
        sizes = (self.sizes.batch, pixels, channels, table.pixels, table.taps, order.groups, order.columns, order.terms)
        places = order.panels, order.offsets, order.depth
        across = table.across(self.sizes.batch, build.load().rows)
        return Product(build.numbers(*sizes, rows.zero, *places, int(across)), table)

    @cached_property
    def tap_rows(self) -> tuple[tuple[int, int, int], ...]:
        """For each tap that meets a pixel at all: its number, and which rows of the C++'s `tap_rows` are its own."""
        rows, start = [], 0
        for tap, met in enumerate((self.table.source >= 0).sum(0).tolist()):
            if met:
                rows.append((tap, start, start + met * self.sizes.batch))
                start += met * self.sizes.batch
        return tuple(rows)

    @cached_property
    def tap_places(self) -> build.Numbers:
        """The place of each tap among those that meet a pixel, -1 for the others."""
        live = [tap for tap, _, _ in self.tap_rows]
        return build.numbers(*(live.index(tap) if tap in live else -1 for tap in range(self.sizes.taps)))


@lru_cache(maxsize=4096)
def sized_call(shapes: Shapes, call: SiteCall) -> SizedCall:
    """What is fixed about a call at these sizes."""
    return SizedCall(shapes, call)


# How tensors lie in memory: the C++ takes and gives samples by pixels by channels.


@lru_cache(maxsize=4096)
def layout_of(shape: tuple[int, ...], strides: tuple[int, ...], axis: BatchAxis, conv: bool) -> build.Numbers | None:
    """The struct by which a tensor is rounded where it lies; None if it has to be copied first, or holds nothing.

    The struct is [batch, pixels, channels], their strides in elements, how random bits are numbered by pixel and
    channel (by the flat index in the sample, see `quantize_parts`), and where codes go: pixels by channels.
    """
    dims = list(zip(shape, strides, strict=True))
    dim = axis.dim % len(shape)
    batch = shape[dim] // (axis.outer * axis.inner)
    step = strides[dim]
    dims[dim : dim + 1] = [(axis.outer, step * batch * axis.inner), (axis.inner, step)]
    channels = dims.pop(2 if conv else -1)  # a conv's samples are its dimension 0, which is two by now
    pixels = _joined(dims)
    if pixels is None or math.prod(shape) == 0:
        return None
    numbering = (1, pixels[0]) if conv else (channels[0], 1)
    strides_of = step * axis.inner, pixels[1], channels[1]
    return build.numbers(batch, pixels[0], channels[0], *strides_of, *numbering, channels[0], 1)


@lru_cache(maxsize=4096)
def weight_layout(shape: tuple[int, ...], spec: OperandSpec) -> build.Numbers:
    """A weight as `layout_of` describes tensors: one sample, in which groups are channels or blocks of a row."""
    rows, width = shape[0], math.prod(shape[1:])
    count = rows * width
    if spec.scale == "channel":  # pixels by channels is [width, rows], and codes stay where their numbers are
        return build.numbers(1, width, rows, count, 1, width, 1, width, 1, width)
    return build.numbers(1, rows, width, count, width, 1, width, 1, width, 1)


def _joined(dims: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Dimensions (size, stride) as one; None if they do not follow one another in memory."""
    real = [(size, stride) for size, stride in dims if size != 1]
    for (_, outer), (size, inner) in itertools.pairwise(real):
        if outer != size * inner:
            return None
    return math.prod(size for size, _ in real), real[-1][1] if real else 1


def empty_samples(shape: tuple[int, ...], axis: BatchAxis, conv: bool, device: torch.device | str = "cpu") -> Tensor:
    """Room for what kernels write. A conv's has the shape already, channels-last; a linear's is in sample view."""
    made: dict[str, Any] = dict(dtype=torch.float32, device=device)
    if not conv:
        return torch.empty(_sample_shape(shape, axis), **made)
    if len(shape) == 3:
        return torch.empty((shape[0], shape[2], shape[1]), **made).transpose(1, 2)
    layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return torch.empty(shape, memory_format=layout, **made)


@lru_cache(maxsize=4096)
def _sample_shape(shape: tuple[int, ...], axis: BatchAxis) -> tuple[int, ...]:
    return tuple(to_samples(torch.empty(shape, device="meta"), axis).shape)


def spatial(out: Tensor, shape: tuple[int, ...], axis: BatchAxis, call: SiteCall) -> Tensor:
    """[batch, pixels, channels] as a tensor of that shape; a conv's is channels-last."""
    if call.geometry is not None:
        return out.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
    rest = to_samples(torch.empty(shape, device="meta"), axis).shape
    return from_samples(out.view(rest), axis, shape)
