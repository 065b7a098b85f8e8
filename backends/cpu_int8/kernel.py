"""Exact int8 arithmetic on the CPU: low-precision products that are faster than float32's, not emulated by them.

The codes of `luq_fp4` (0 and ±2^0…±2^6), `uniform4` (-8…7), `int8` and `int4` (level times multiplier) fit a signed
byte, their products 16 bits, and sums of up to 2^16 products 31 bits; longer ones are split. So a product of codes is
exact, and the result is that integer times the units of its operands:

    y[b] = (Σ codes · codes) as float32 · (unit of sample b · unit of the weight) + bias

What the reference computes in float32 differs from it by float32's rounding alone. Inputs and output gradients are kept
as bytes, a quarter of their size in float32. Where the contraction is so short that widening the sums would cost more
than the products, weight gradients are float32 matrix products over the whole batch.
"""

import math

import torch
from torch import Tensor

from dpquant_compile.backends.by_operands import ByOperands
from dpquant_compile.backends.compiled import quantize_compiled
from dpquant_compile.backends.cpu_int8 import build
from dpquant_compile.backends.cpu_int8.codes import Codes, codes_of, why_not
from dpquant_compile.backends.cpu_int8.sized_call import (
    Product,
    SizedCall,
    Sizes,
    empty_samples,
    layout_of,
    sized_call,
    spatial,
    weight_layout,
)
from dpquant_compile.backends.cpu_int8.weights import packing
from dpquant_compile.backends.reference.clipped_site import FULL_SITE
from dpquant_compile.backends.reference.emulated import EmulatedSite
from dpquant_compile.backends.reference.per_sample import as_weight
from dpquant_compile.backends.registry import Kernel, Operand, Shapes, SiteCall, Streams, register_kernel
from dpquant_compile.backends.scratch import scratch
from dpquant_compile.numerics.hadamard import Room, rotate_features, rotation_block
from dpquant_compile.numerics.operand_spec import OperandSpec
from dpquant_compile.numerics.quantize import from_samples, to_samples
from dpquant_compile.numerics.random_bits import ROLES, fold_int
from dpquant_compile.sites import BatchAxis

__all__ = ["CPU_INT8", "Int8Site", "norm_method"]


_LONGEST = 1 << 16
# Contractions up to here are float32 matrix products over the batch, see docs/performance.md.
_SHORT = 4


def norm_method(sizes: Sizes, x: Codes, grad: Codes) -> str:
    """The cheaper way to norms, "gram" or "direct"; the constants are measured, by benchmarks/norm_ways.py."""
    n, c = sizes.features // sizes.groups, sizes.channels // sizes.groups
    gram = _GRAM_COST * (sizes.in_pixels**2 * c + sizes.pixels**2 * n) + _SHIFT_COST * sizes.taps * sizes.pixels**2
    # Grams are int32, and their products are added up in 64 bits, where nothing is lost as long as the sum itself fits.
    fits = (
        max(x.highest**2 * sizes.taps * c, grad.highest**2 * n) < 2**31
        and sizes.features * sizes.taps * c * (x.highest * grad.highest * sizes.pixels) ** 2 < 2**63
    )
    return "gram" if fits and gram < sizes.pixels * sizes.taps * c * n else "direct"


_GRAM_COST = 1.0
_SHIFT_COST = 4.0


class Int8Site(ByOperands):
    """The products of a quantized site in int8; see `Arithmetic`. Tensors that are not float32 are emulated."""

    def __init__(self) -> None:
        self._emulated = EmulatedSite(quantize_compiled)
        self._dense = FULL_SITE

    # Operands

    def operand(self, x: Tensor, role: str, call: SiteCall, streams: Streams) -> Operand:
        if x.dtype != torch.float32:
            return self._emulated.operand(x, role, call, streams)
        axis, conv = call.axis if role == "input" else call.output_axis, call.geometry is not None
        if (layout := layout_of(tuple(x.shape), x.stride(), axis, conv)) is None:
            x = to_samples(x.detach(), axis).contiguous()
            layout = layout_of(tuple(x.shape), x.stride(), BatchAxis(0), conv)
        codes, unit = self.empty_operand(x, call, streams.samples.shape[0])
        if layout is None:  # no elements
            unit.fill_(torch.finfo(torch.float32).tiny)
        else:
            key = _key(role, call, streams)
            self._quantize(x, layout, key, streams.samples, call.recipe.of(role), codes, unit)
        return Operand(codes, unit)

    def packed(self, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        if weight.dtype != torch.float32:
            return self._emulated.packed(weight, call, streams)
        blob, spec = self.empty_packed(weight, call), call.recipe.weight
        codes, x, grad = (codes_of(operand) for operand in (spec, call.recipe.input, call.recipe.grad_output))
        assert codes is not None and x is not None and grad is not None  # `_supports` has said so
        count, order, load = weight.numel(), packing(tuple(weight.shape), call.geometry), build.load()
        numbers, by_tap = torch.empty(count + load.slack, dtype=torch.uint8), torch.empty(count, dtype=torch.int8)
        key, only = int(streams.keys[call.site, ROLES.index("weight")]), torch.zeros(1, dtype=torch.int64)
        unit, layout = blob[:4].view(torch.float32), weight_layout(tuple(weight.shape), spec)
        self._quantize(weight.detach().contiguous(), layout, key, only, spec, numbers, unit)
        taps = math.prod(weight.shape[2:])
        load("by_tap", numbers, count // taps, taps, codes.zero, by_tap)
        order.fill(blob, by_tap, x, grad)
        return blob

    def empty_operand(self, x: Tensor, call: SiteCall, batch: int) -> Operand:
        if x.dtype != torch.float32:
            return self._emulated.empty_operand(x, call, batch)
        size = x.numel() + build.load().slack
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
        sized = sized_call(shapes, call)
        out = empty_samples(shapes.y, call.output_axis, call.geometry is not None)
        bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        self._product(sized.forward, self._read(x.codes, sized), packed, x.unit, bias, out)
        return out if call.geometry is not None else from_samples(out, call.output_axis, shapes.y)

    def product_grad_input(
        self, grad: Operand, packed: Tensor, shapes: Shapes, call: SiteCall, streams: Streams
    ) -> Tensor:
        if grad.codes.dtype != torch.uint8:
            return self._emulated.product_grad_input(grad, packed, shapes, call, streams)
        out = empty_samples(shapes.x, call.axis, call.geometry is not None)
        self._product(sized_call(shapes, call).backward, grad.codes, packed, grad.unit, None, out)
        return out if call.geometry is not None else from_samples(out, call.axis, shapes.x)

    def sample_norms(
        self, x: Operand, grad: Operand, shapes: Shapes, method: str, call: SiteCall, streams: Streams
    ) -> Tensor:
        if x.codes.dtype != torch.uint8:
            return self._emulated.sample_norms(x, grad, shapes, method, call, streams)
        sized, load = sized_call(shapes, call), build.load()
        if sized.sizes.pixels > _LONGEST:
            return self._dense.sample_norms(*self._values(x, grad, shapes, call), shapes, method, call, streams)
        norms = torch.empty(shapes.batch, dtype=torch.float64)
        if norm_method(sized.sizes, sized.x_codes, sized.grad_codes) == "gram":
            load("norms_gram", sized.problem, x.codes, grad.codes, sized.table.source, norms)
        else:
            codes = self._read(x.codes, sized)
            load("norms_direct", sized.read_problem, codes, grad.codes, sized.read_table.source, norms)
        short = int(sized.sizes.pixels <= _SHORT)
        load("scale_norms", sized.problem, x.codes, grad.codes, short, x.unit, grad.unit, norms)
        return norms

    def sample_grads(self, x: Operand, grad: Operand, shapes: Shapes, call: SiteCall, streams: Streams) -> Tensor:
        if x.codes.dtype != torch.uint8:
            return self._emulated.sample_grads(x, grad, shapes, call, streams)
        sized = sized_call(shapes, call)
        if sized.sizes.pixels > _LONGEST:
            return self._dense.sample_grads(*self._values(x, grad, shapes, call), shapes, call, streams)
        sizes = (shapes.batch, sized.sizes.features, math.prod(shapes.weight[1:]))
        out = torch.empty(sizes, dtype=torch.float32)
        codes, table = self._read(x.codes, sized), sized.read_table
        build.load()("sample_grads", sized.read_problem, codes, grad.codes, table.source, x.unit, grad.unit, out)
        return out

    def weighted_grad(
        self, x: Operand, grad: Operand, factors: Tensor, shapes: Shapes, call: SiteCall, streams: Streams
    ) -> Tensor:
        if x.codes.dtype != torch.uint8:
            return self._emulated.weighted_grad(x, grad, factors, shapes, call, streams)
        sized = sized_call(shapes, call)
        if sized.sizes.pixels > _LONGEST:
            values = self._values(x, grad, shapes, call)
            return self._dense.weighted_grad(*values, factors, shapes, call, streams)
        scales = factors.to(torch.float32).contiguous(), x.unit, grad.unit
        if sized.sizes.pixels <= _SHORT:
            return self._weighted_by_tap(x.codes, grad.codes, scales, sized)
        out, codes = torch.empty(shapes.weight, dtype=torch.float32), self._read(x.codes, sized)
        build.load()("weighted", sized.read_problem, codes, grad.codes, sized.read_table.source, *scales, out)
        return as_weight(out.flatten(1), shapes.weight) if sized.packing.unfolds else out

    def sample_factors(self, x: Operand, grad: Operand, shapes: Shapes, call: SiteCall) -> tuple[Tensor, Tensor]:
        if x.codes.dtype == torch.uint8:
            x, grad = self._values(x, grad, shapes, call)
        return self._dense.sample_factors(x, grad, shapes, call)

    # The parts of it

    def _quantize(
        self, x: Tensor, layout: build.Numbers, key: int, samples: Tensor, spec: OperandSpec, out: Tensor, unit: Tensor
    ) -> None:
        codes = codes_of(spec)
        assert codes is not None  # `_supports` has said so
        function, which = ("quantize", codes.number) if codes.grouped is None else ("quantize_groups", codes.grouped)
        build.load()(function, x.data_ptr(), layout, key, samples, int(which), int(codes.nearest), out, unit)

    def _product(
        self, product: Product, codes: Tensor, packed: Tensor, unit: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        table = product.table
        build.load()("products", product.struct, codes, table.source, table.order, packed, unit, bias, out.data_ptr())

    def _read(self, codes: Tensor, sized: SizedCall) -> Tensor:
        """Input codes as the sizes `read` say."""
        if not sized.packing.unfolds:
            return codes
        load, sizes = build.load(), sized.sizes
        rows = torch.empty(sizes.batch * sizes.pixels * sized.read.channels + load.slack, dtype=torch.uint8)
        counts = sizes.batch, sizes.in_pixels, sizes.channels, sizes.pixels, sizes.taps, sized.x_codes.zero
        load("unfold", codes, sized.table.source, *counts, rows)
        return rows

    def _weighted_by_tap(self, x: Tensor, grad: Tensor, scales: tuple[Tensor, ...], sized: SizedCall) -> Tensor:
        """The weighted sum on tiny maps: for each tap, one float32 product over the samples and the pixels it meets."""
        sizes, weight, load = sized.sizes, sized.shapes.weight, build.load()
        rows = sized.tap_rows[-1][2] if sized.tap_rows else 0
        left, right = scratch("left", rows, sizes.features), scratch("right", rows, sizes.channels)
        load("tap_rows", sized.problem, x, grad, sized.table.source, *scales, left, right)
        whole = sizes.taps == 1 and len(sized.tap_rows) == 1
        shape = (len(sized.tap_rows), sizes.groups, sizes.features // sizes.groups, weight[1])
        grads = torch.empty(shape, dtype=torch.float32) if whole else scratch("grads", *shape)
        for place, (_, start, end) in enumerate(sized.tap_rows):
            if sizes.groups == 1:
                torch.mm(left[start:end].t(), right[start:end], out=grads[place, 0])
            else:
                sides = (side[start:end].unflatten(1, (sizes.groups, -1)).transpose(0, 1) for side in (left, right))
                first, second = sides
                torch.bmm(first.transpose(1, 2), second, out=grads[place])
        if whole:
            return grads.view(weight)
        out = torch.empty(weight, dtype=torch.float32)
        load("taps_last", grads, sized.tap_places, sizes.features * weight[1], sizes.taps, out)
        return out

    def _values(self, x: Operand, grad: Operand, shapes: Shapes, call: SiteCall) -> tuple[Operand, Operand]:
        """The operands as the numbers that they stand for."""
        sized = sized_call(shapes, call)
        sizes, values = sized.sizes, []
        for part, zero, shape, axis, pixels, channels in (
            (x, sized.x_codes.zero, shapes.x, call.axis, sizes.in_pixels, sizes.channels),
            (grad, sized.grad_codes.zero, shapes.y, call.output_axis, sizes.pixels, sizes.features),
        ):
            codes = part.codes[: sizes.batch * pixels * channels].view(sizes.batch, pixels, channels)
            numbers = (codes.to(torch.float32) - zero) * part.unit[:, None, None]
            values.append(Operand(spatial(numbers, shape, axis, call), part.unit))
        return values[0], values[1]


def _key(role: str, call: SiteCall, streams: Streams) -> int:
    return fold_int(int(streams.keys[call.site, ROLES.index(role)]), call.call)


def _supports(call: SiteCall, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"for the CPU only, not for {device.type}"
    if reason := why_not(call.recipe):
        return reason
    if call.recipe.outputs != "none":
        return f"needs quantize_outputs='none', not {call.recipe.outputs!r}"
    if call.geometry is not None and (call.axis != BatchAxis(0) or call.output_axis != BatchAxis(0)):
        return "a sample of this conv is more than one image"
    return build.unavailable()


def rotate(x: Tensor, room: Room = "new") -> Tensor:
    """`rotate_features` in one pass over memory; most of its time is fresh memory, where it needs that."""
    block = rotation_block(x.shape[-1])
    if x.dtype != torch.float32 or not block:
        return rotate_features(x)
    dense = x.contiguous()
    own = room == "same" or dense is not x  # a block is read as a whole before it is written
    out = dense if own else scratch("rotated", *x.shape) if room == "lent" else torch.empty_like(dense)
    x = dense
    build.load()("rotate", x, x.numel() // block, block, out)
    return out


CPU_INT8 = register_kernel(
    Kernel(
        backend="cpu_int8",
        arithmetic=Int8Site(),
        supports=_supports,
        native=True,
        reference="reference",
        priority=20,
        note="exact int8 products",
        dtypes=(torch.float32,),
        rotate=rotate,
    )
)
