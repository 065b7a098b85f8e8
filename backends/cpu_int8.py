"""Exact int8 arithmetic on the CPU: FP4 products that are faster than float32's, not emulated by them.

The codes of `luq_fp4` (0 and ±2^0…±2^6) and `uniform4` (-8…7) fit a signed byte, their products 16 bits, and sums of
up to 2^17 products 31 bits; longer ones are split. So a product of codes is exact, and the result is that integer times
the units of its operands:

    y[b] = (Σ codes · codes) as float32 · (unit of sample b · unit of the weight) + bias

What the reference computes in float32 differs from it by float32's rounding alone. Inputs and output gradients are kept
as bytes, a quarter of their size in float32. Where the contraction is so short that widening the sums would cost more
than the products, weight gradients are float32 matrix products over the whole batch.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dpquant_compile.backends import native
from dpquant_compile.backends.clipped import FULL_SITE
from dpquant_compile.backends.compiled import quantize_compiled
from dpquant_compile.backends.conv_tables import Table, backward_table, forward_table, linear_table
from dpquant_compile.backends.int8_weights import Codes, Panels, packing
from dpquant_compile.backends.ops import output_shape
from dpquant_compile.backends.per_sample import as_weight
from dpquant_compile.backends.reference import EmulatedSite
from dpquant_compile.backends.registry import Kernel, Operand, Shapes, SiteCall, Streams, register_kernel
from dpquant_compile.bits import ROLES, fold_int
from dpquant_compile.quantize import from_samples, to_samples
from dpquant_compile.sites import BatchAxis

__all__ = ["CPU_INT8", "Int8Site", "norm_method"]


_FORMATS = {"luq_fp4": Codes(0, 64, 128), "uniform4": Codes(1, 8, 15)}
_LONGEST = 1 << 17
# Contractions up to here are float32 matrix products over the batch, see docs/performance.md.
_SHORT = 4


def norm_method(sizes: "_Sizes") -> str:
    """The cheaper way to norms, "gram" or "direct"; the constants are measured, see docs/performance.md."""
    n, c = sizes.features // sizes.groups, sizes.channels // sizes.groups
    gram = _GRAM_COST * (sizes.in_pixels**2 * c + sizes.pixels**2 * n) + _SHIFT_COST * sizes.taps * sizes.pixels**2
    # Grams are int32, and their products are added up in 64 bits, where nothing is lost as long as the sum itself fits.
    fits = (
        4096 * max(sizes.taps * c, n) < 2**31 and sizes.features * sizes.taps * c * (4096 * sizes.pixels) ** 2 < 2**63
    )
    return "gram" if fits and gram < sizes.pixels * sizes.taps * c * n else "direct"


_GRAM_COST = 1.5
_SHIFT_COST = 3.0


@dataclass(frozen=True)
class _Sizes:
    """A call as the C++ sees it: pixels by channels."""

    batch: int
    in_pixels: int
    channels: int
    pixels: int
    features: int
    groups: int
    taps: int

    def problem(self, codes: Codes) -> tuple[int, ...]:
        """The struct that the C++ of per-sample gradients takes."""
        sizes = (self.batch, self.in_pixels, self.channels, self.pixels, self.features, self.groups, self.taps)
        return (*sizes, codes.zero, codes.largest)


@lru_cache(maxsize=1024)
def _sizes(shapes: Shapes, call: SiteCall) -> _Sizes:
    if call.geometry is None:
        places = math.prod(shapes.x) // max(shapes.batch * shapes.x[-1], 1)
        return _Sizes(shapes.batch, places, shapes.x[-1], places, shapes.weight[0], 1, 1)
    pixels = math.prod(shapes.x[2:]), math.prod(shapes.y[2:])
    taps = math.prod(shapes.weight[2:])
    return _Sizes(shapes.batch, pixels[0], shapes.x[1], pixels[1], shapes.weight[0], call.geometry.groups, taps)


def _forward_table(shapes: Shapes, call: SiteCall, sizes: _Sizes) -> Table:
    if call.geometry is None:
        return linear_table(sizes.pixels)
    return forward_table(call.geometry, shapes.x[2:], shapes.weight[2:])


class Int8Site:
    """The products of a quantized site in int8; see `Arithmetic`. Tensors that are not float32 are emulated."""

    def __init__(self) -> None:
        self._emulated = EmulatedSite(quantize_compiled)
        self._dense = FULL_SITE

    # Without clipping

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: SiteCall, streams: Streams) -> Tensor:
        operand, packed = self.operand(x, "input", call, streams), self.packed(weight, call, streams)
        return self.product(operand, packed, bias, _shapes(x, weight, call), call, streams)

    def grad_input(self, grad: Tensor, x: Tensor, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        operand, packed = self.operand(grad, "grad_output", call, streams), self.packed(weight, call, streams)
        return self.product_grad_input(operand, packed, _shapes(x, weight, call), call, streams)

    def grad_weight(self, grad: Tensor, x: Tensor, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        shapes = _shapes(x, weight, call)
        operands = self.operand(x, "input", call, streams), self.operand(grad, "grad_output", call, streams)
        return self.weighted_grad(*operands, torch.ones(shapes.batch), shapes, call, streams)

    # Operands

    def operand(self, x: Tensor, role: str, call: SiteCall, streams: Streams) -> Operand:
        if x.dtype != torch.float32:
            return self._emulated.operand(x, role, call, streams)
        axis = call.axis if role == "input" else call.output_axis
        view = to_samples(x.detach(), axis)
        if call.geometry is None:
            rows = (
                view.reshape(view.shape[0], -1, view.shape[-1]) if view.numel() else view.reshape(view.shape[0], 0, 1)
            )
            channels, numbering = 2, (rows.shape[2], 1)
        else:
            rows = view.flatten(2)
            channels, numbering = 1, (1, rows.shape[2])
        codes, unit = self.empty_operand(x, call, view.shape[0])
        pixels = 3 - channels
        sizes = (rows.shape[0], rows.shape[pixels], rows.shape[channels])
        strides = (rows.stride(0), rows.stride(pixels), rows.stride(channels))
        self._quantize(
            rows, (*sizes, *strides, *numbering), _key(role, call, streams), streams.samples, call, codes, unit
        )
        return Operand(codes, unit)

    def packed(self, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        if weight.dtype != torch.float32:
            return self._emulated.packed(weight, call, streams)
        blob, codes = self.empty_packed(weight, call), _FORMATS[call.recipe.format]
        numbers = torch.empty(weight.numel(), dtype=torch.uint8)
        key, only = int(streams.keys[call.site, ROLES.index("weight")]), torch.zeros(1, dtype=torch.int64)
        shape = (1, 1, weight.numel(), weight.numel(), 1, 1, 1, 1)
        self._quantize(weight.detach().contiguous(), shape, key, only, call, numbers, blob[:4].view(torch.float32))
        packing(tuple(weight.shape), call.geometry).fill(blob, numbers.sub_(codes.zero).view(torch.int8), codes)
        return blob

    def empty_operand(self, x: Tensor, call: SiteCall, batch: int) -> Operand:
        if x.dtype != torch.float32:
            return self._emulated.empty_operand(x, call, batch)
        size = x.numel() + native.load().slack
        return Operand(torch.empty(size, dtype=torch.uint8, device=x.device), x.new_empty(batch))

    def empty_packed(self, weight: Tensor, call: SiteCall) -> Tensor:
        if weight.dtype != torch.float32:
            return self._emulated.empty_packed(weight, call)
        return torch.empty(packing(tuple(weight.shape), call.geometry).size, dtype=torch.uint8, device=weight.device)

    # Products

    def product(
        self, x: Operand, packed: Tensor, bias: Tensor | None, shapes: Shapes, call: SiteCall, streams: Streams
    ) -> Tensor:
        if x.codes.dtype != torch.uint8:
            return self._emulated.product(x, packed, bias, shapes, call, streams)
        sizes, order = _sizes(shapes, call), packing(shapes.weight, call.geometry).forward
        codes, sizes, table = self._places(x.codes, sizes, shapes, call)
        out = torch.empty(sizes.batch, sizes.pixels, sizes.features)
        bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        self._products(codes, sizes.in_pixels, sizes.channels, table, packed, order, x.unit, bias, out, call)
        return _spatial(out, shapes.y, call.output_axis, call)

    def product_grad_input(
        self, grad: Operand, packed: Tensor, shapes: Shapes, call: SiteCall, streams: Streams
    ) -> Tensor:
        if grad.codes.dtype != torch.uint8:
            return self._emulated.product_grad_input(grad, packed, shapes, call, streams)
        sizes, order = _sizes(shapes, call), packing(shapes.weight, call.geometry).backward
        table = linear_table(sizes.pixels)
        if call.geometry is not None:
            table = backward_table(call.geometry, shapes.x[2:], shapes.weight[2:])
        out = torch.empty(sizes.batch, sizes.in_pixels, sizes.channels)
        widths = sizes.pixels, sizes.features
        self._products(grad.codes, *widths, table, packed, order, grad.unit, None, out, call)
        return _spatial(out, shapes.x, call.axis, call)

    def sample_norms(
        self, x: Operand, grad: Operand, shapes: Shapes, method: str, call: SiteCall, streams: Streams
    ) -> Tensor:
        if x.codes.dtype != torch.uint8:
            return self._emulated.sample_norms(x, grad, shapes, method, call, streams)
        sizes = _sizes(shapes, call)
        if sizes.pixels > _LONGEST:
            return self._dense.sample_norms(*self._values(x, grad, shapes, call), shapes, method, call, streams)
        norms, way = torch.empty(sizes.batch, dtype=torch.float64), norm_method(sizes)
        codes, format = x.codes, _FORMATS[call.recipe.format]
        table = _forward_table(shapes, call, sizes)
        if way == "direct":
            codes, sizes, table = self._places(codes, sizes, shapes, call)
        native.load()(f"norms_{way}", sizes.problem(format), codes, grad.codes, table.source, norms)
        if sizes.pixels <= _SHORT:
            norms += self._slack(x, grad, _sizes(shapes, call), call)
        unit = x.unit.double() * grad.unit.double()
        # Units that float32 cannot hold make a weight gradient that it cannot hold either: left out, and counted.
        return (norms * unit.square()).masked_fill(unit > torch.finfo(torch.float32).max, torch.inf)

    def sample_grads(self, x: Operand, grad: Operand, shapes: Shapes, call: SiteCall, streams: Streams) -> Tensor:
        if x.codes.dtype != torch.uint8:
            return self._emulated.sample_grads(x, grad, shapes, call, streams)
        sizes = _sizes(shapes, call)
        if sizes.pixels > _LONGEST:
            return self._dense.sample_grads(*self._values(x, grad, shapes, call), shapes, call, streams)
        out = torch.empty(sizes.batch, sizes.features, math.prod(shapes.weight[1:]))
        codes, sizes, table = self._places(x.codes, sizes, shapes, call)
        problem = sizes.problem(_FORMATS[call.recipe.format])
        native.load()("sample_grads", problem, codes, grad.codes, table.source, x.unit * grad.unit, out)
        return out

    def weighted_grad(
        self, x: Operand, grad: Operand, factors: Tensor, shapes: Shapes, call: SiteCall, streams: Streams
    ) -> Tensor:
        if x.codes.dtype != torch.uint8:
            return self._emulated.weighted_grad(x, grad, factors, shapes, call, streams)
        sizes = _sizes(shapes, call)
        if sizes.pixels > _LONGEST:
            values = self._values(x, grad, shapes, call)
            return self._dense.weighted_grad(*values, factors, shapes, call, streams)
        # In one product of doubles: a factor times one unit may lie where float32 has few digits, or none.
        scale = (factors.double() * x.unit.double() * grad.unit.double()).to(torch.float32)
        if sizes.pixels <= _SHORT:
            values = self._values(x._replace(unit=torch.ones_like(x.unit)), grad._replace(unit=scale), shapes, call)
            left_out = torch.where(scale.isnan(), torch.nan, 1.0)
            return self._dense.weighted_grad(*values, left_out, shapes, call, streams)
        codes, sizes, table = self._places(x.codes, sizes, shapes, call)
        out = torch.empty(shapes.weight)
        problem = sizes.problem(_FORMATS[call.recipe.format])
        native.load()("weighted", problem, codes, grad.codes, table.source, scale, out)
        unfolded = table.taps == 1 and len(shapes.weight) > 2
        return as_weight(out.flatten(1), shapes.weight) if unfolded else out

    def sample_factors(self, x: Operand, grad: Operand, shapes: Shapes, call: SiteCall) -> tuple[Tensor, Tensor]:
        if x.codes.dtype == torch.uint8:
            x, grad = self._values(x, grad, shapes, call)
        return self._dense.sample_factors(x, grad, shapes, call)

    # The parts of it

    def _quantize(
        self, x: Tensor, shape: tuple[int, ...], key: int, samples: Tensor, call: SiteCall, out: Tensor, unit: Tensor
    ) -> None:
        if shape[0] * shape[1] * shape[2] == 0:
            unit.fill_(torch.finfo(torch.float32).tiny)
            return
        number = _FORMATS[call.recipe.format].number
        native.load()("quantize", x.data_ptr(), shape, key, samples, number, out, unit)

    def _products(
        self,
        codes: Tensor,
        in_pixels: int,
        channels: int,
        table: Table,
        packed: Tensor,
        order: Panels,
        unit: Tensor,
        bias: Tensor | None,
        out: Tensor,
        call: SiteCall,
    ) -> None:
        start, zero = packed.data_ptr(), _FORMATS[call.recipe.format].zero
        places = start + order.panels, start + order.offsets, start + order.depth
        sizes = order.groups, order.columns, order.terms, zero
        where = table.source, table.order, table.pixels, table.taps
        native.load()(
            "products", codes, out.shape[0], in_pixels, channels, *where, *places, *sizes, unit, start, bias, out
        )

    def _places(self, codes: Tensor, sizes: "_Sizes", shapes: Shapes, call: SiteCall) -> tuple[Tensor, "_Sizes", Table]:
        """Input codes, and the sizes and table to read them by; unfolded where a tap has only few channels."""
        table = _forward_table(shapes, call, sizes)
        if not packing(shapes.weight, call.geometry).unfolds:
            return codes, sizes, table
        load, zero = native.load(), _FORMATS[call.recipe.format].zero
        channels = sizes.taps * sizes.channels
        rows = torch.empty(sizes.batch * sizes.pixels * channels + load.slack, dtype=torch.uint8)
        counts = sizes.batch, sizes.in_pixels, sizes.channels, sizes.pixels, sizes.taps, zero
        load("unfold", codes, table.source, *counts, rows)
        flat = _Sizes(sizes.batch, sizes.pixels, channels, sizes.pixels, sizes.features, 1, 1)
        return rows, flat, linear_table(sizes.pixels)

    def _values(self, x: Operand, grad: Operand, shapes: Shapes, call: SiteCall) -> tuple[Operand, Operand]:
        """The operands as the numbers that they stand for."""
        sizes, zero = _sizes(shapes, call), _FORMATS[call.recipe.format].zero
        values = []
        for part, shape, axis, pixels, channels in (
            (x, shapes.x, call.axis, sizes.in_pixels, sizes.channels),
            (grad, shapes.y, call.output_axis, sizes.pixels, sizes.features),
        ):
            codes = part.codes[: sizes.batch * pixels * channels].view(sizes.batch, pixels, channels)
            numbers = (codes.to(torch.float32) - zero) * part.unit[:, None, None]
            values.append(Operand(_spatial(numbers, shape, axis, call), part.unit))
        return values[0], values[1]

    def _slack(self, x: Operand, grad: Operand, sizes: _Sizes, call: SiteCall) -> Tensor:
        """What a float32 matrix product may be off by, in squares of codes: see `per_sample`."""
        zero, squares = _FORMATS[call.recipe.format].zero, []
        for part, width in ((x, sizes.in_pixels * sizes.channels), (grad, sizes.pixels * sizes.features)):
            codes = part.codes[: sizes.batch * width].view(sizes.batch, width)
            squares.append((codes.to(torch.float64) - zero).square().sum(1))
        return (1024 * torch.finfo(torch.float32).eps) ** 2 * sizes.taps * squares[0] * squares[1]


def _key(role: str, call: SiteCall, streams: Streams) -> int:
    return fold_int(int(streams.keys[call.site, ROLES.index(role)]), call.call)


def _shapes(x: Tensor, weight: Tensor, call: SiteCall) -> Shapes:
    batch = x.shape[call.axis.dim] // (call.axis.outer * call.axis.inner)
    y = output_shape(tuple(x.shape), tuple(weight.shape), call.geometry)
    return Shapes(tuple(x.shape), tuple(weight.shape), y, batch)


def _spatial(out: Tensor, shape: tuple[int, ...], axis: BatchAxis, call: SiteCall) -> Tensor:
    """[batch, pixels, channels] as a tensor of that shape; a conv's is channels-last."""
    if call.geometry is not None:
        return out.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
    rest = to_samples(torch.empty(shape, device="meta"), axis).shape
    return from_samples(out.view(rest), axis, shape)


def _supports(call: SiteCall, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"for the CPU only, not for {device.type}"
    if call.recipe.format not in _FORMATS:
        return f"computes {' and '.join(_FORMATS)}, not {call.recipe.format}"
    if call.recipe.outputs != "none":
        return f"needs quantize_outputs='none', not {call.recipe.outputs!r}"
    if call.geometry is not None and (call.axis != BatchAxis(0) or call.output_axis != BatchAxis(0)):
        return "a sample of this conv is more than one image"
    return native.unavailable()


CPU_INT8 = register_kernel(
    Kernel(
        backend="cpu_int8",
        arithmetic=Int8Site(),
        supports=_supports,
        native=True,
        reference="reference",
        priority=20,
        note="exact int8 products",
    )
)
