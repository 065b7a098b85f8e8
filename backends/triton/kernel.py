"""Exact int8 arithmetic on NVIDIA GPUs: the numbers of `cpu_int8`, by the int8 tensor cores.

Codes are signed bytes, samples by pixels by channels, with one unit per sample. A product of codes is an exact integer,
and the result is that integer times the units of its operands:

    y[b] = (Σ codes · codes) as float32 · (unit of sample b · unit of the weight) + bias

So output, input gradient, per-sample gradients and norms are those of `cpu_int8`, bit for bit. The weighted sum adds
exact per-sample gradients in float32, in the order of the samples. What the reference computes in float32 differs by
float32's rounding alone.

Never run on hardware. Under `TRITON_INTERPRET=1` the kernels run on the CPU, in Triton's interpreter, where
`backend="triton"` asks for them.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dpquant_compile.backends.by_operands import ByOperands
from dpquant_compile.backends.cpu_int8.codes import Codes, codes_of, why_not
from dpquant_compile.backends.cpu_int8.conv_tables import backward_table, forward_table
from dpquant_compile.backends.cpu_int8.sized_call import (
    Sizes,
    empty_samples,
    layout_of,
    sizes_of,
    spatial,
    weight_layout,
)
from dpquant_compile.backends.reference.clipped_site import FULL_SITE
from dpquant_compile.backends.reference.emulated import REFERENCE_SITE
from dpquant_compile.backends.reference.per_sample import as_weight
from dpquant_compile.backends.registry import Kernel, Operand, Shapes, SiteCall, Streams, register_kernel
from dpquant_compile.backends.triton.launch import NEVER_RUN, ceil_div, launch, load, unavailable
from dpquant_compile.numerics.integers import GROUP
from dpquant_compile.numerics.operand_spec import OperandSpec
from dpquant_compile.numerics.quantize import from_samples, to_samples
from dpquant_compile.numerics.random_bits import ROLES
from dpquant_compile.sites import BatchAxis

__all__ = ["TRITON", "TritonSite"]

# Untuned: nothing has run.
_BLOCK = 2048  # elements to a program that rounds
_TALL, _WIDE, _DEPTH = 128, 64, 64  # the largest tile of a product, and how many terms it takes at a time
_ROWS, _COLUMNS = 64, 64  # the largest tile of a weight gradient
_THIN = 16  # taps of fewer channels are taken several at a time
_PROGRAMS = 256  # that a weighted sum is spread over, if the batch is large enough

_SUMMED = 1 << 63  # squares of a sample's gradient that could come to more are added up in halves
_LONGEST = 1 << 16  # pixels whose products of codes surely fit 32 bits when summed
_HEADER = 16  # bytes before the codes of a packed weight; the unit is the first four


@dataclass(frozen=True)
class _Plan:
    """What is fixed about a call at given sizes, on a device. Tables are None where a pixel meets its own number."""

    sizes: Sizes
    x: Codes
    weight: Codes
    grad: Codes
    forward: Tensor | None
    backward: Tensor | None

    @property
    def terms(self) -> int:
        """Input channels of one group."""
        return self.sizes.channels // self.sizes.groups

    @property
    def rows(self) -> int:
        """Output channels of one group."""
        return self.sizes.features // self.sizes.groups


@lru_cache(maxsize=4096)
def _plan(shapes: Shapes, call: SiteCall, device: torch.device) -> _Plan:
    sizes, g, tables = sizes_of(shapes, call), call.geometry, list[Tensor | None]([None, None])
    if g is not None and any((sizes.taps > 1, *(s > 1 for s in g.stride), *g.padding)):
        spatial_sizes = g, shapes.x[2:], shapes.weight[2:]
        tables = [table(*spatial_sizes).source.to(device) for table in (forward_table, backward_table)]
    codes = [codes_of(spec) for spec in call.recipe.operands]
    x, weight, grad = codes
    assert x is not None and weight is not None and grad is not None  # `_supports` has said so
    return _Plan(sizes, x, weight, grad, *tables)


class TritonSite(ByOperands):
    """The products of a quantized site in int8; see `Arithmetic`. Tensors that are not float32 are emulated."""

    def __init__(self) -> None:
        self._emulated = REFERENCE_SITE
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
            key, spec = streams.keys[call.site, ROLES.index(role)], call.recipe.of(role)
            _quantize(x.detach(), tuple(layout), key, streams.samples, call.call, spec, codes, unit)
        return Operand(codes, unit)

    def packed(self, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        if weight.dtype != torch.float32:
            return self._emulated.packed(weight, call, streams)
        blob, spec, key = self.empty_packed(weight, call), call.recipe.weight, streams.keys[call.site]
        (n, c), taps = weight.shape[:2], weight[0, 0].numel()
        codes, unit = torch.empty(weight.numel(), dtype=torch.int8, device=weight.device), blob[:4].view(torch.float32)
        layout = tuple(weight_layout(tuple(weight.shape), spec))
        _quantize(weight.detach().contiguous(), layout, key[ROLES.index("weight")], None, 0, spec, codes, unit)
        # Tensor cores read the terms of a sum side by side, which are channels going forward and features going back.
        forward, backward = _packed_codes(blob, codes.numel())
        forward.view(taps, n, c).copy_(codes.view(n, c, taps).permute(2, 0, 1))
        backward.view(taps, c, n).copy_(codes.view(n, c, taps).permute(2, 1, 0))
        return blob

    def empty_operand(self, x: Tensor, call: SiteCall, batch: int) -> Operand:
        if x.dtype != torch.float32:
            return self._emulated.empty_operand(x, call, batch)
        return Operand(torch.empty(x.numel(), dtype=torch.int8, device=x.device), x.new_empty(batch))

    def empty_packed(self, weight: Tensor, call: SiteCall) -> Tensor:
        if weight.dtype != torch.float32:
            return self._emulated.empty_packed(weight, call)
        return torch.empty(_HEADER + 2 * _padded(weight.numel()), dtype=torch.int8, device=weight.device)

    # Products

    def product(
        self, x: Operand, packed: Tensor, bias: Tensor | None, shapes: Shapes, call: SiteCall, streams: Streams
    ) -> Tensor:
        if x.codes.dtype != torch.int8:
            return self._emulated.product(x, packed, bias, shapes, call, streams)
        plan = _plan(shapes, call, x.codes.device)
        sizes, terms, rows = plan.sizes, plan.terms, plan.rows
        strides = sizes.features * terms, terms, rows * terms
        weight, _ = _packed_codes(packed, sizes.features * terms * sizes.taps)
        out = _empty(shapes.y, call.output_axis, call, x.codes.device)
        places = plan.forward, sizes.batch, sizes.pixels, sizes.in_pixels
        bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        most = plan.x.highest * plan.weight.highest
        _product(x, weight, packed, bias, out, places, (sizes, terms, rows, strides), most)
        return out if call.geometry is not None else from_samples(out, call.output_axis, shapes.y)

    def product_grad_input(
        self, grad: Operand, packed: Tensor, shapes: Shapes, call: SiteCall, streams: Streams
    ) -> Tensor:
        if grad.codes.dtype != torch.int8:
            return self._emulated.product_grad_input(grad, packed, shapes, call, streams)
        plan = _plan(shapes, call, grad.codes.device)
        sizes, terms, rows = plan.sizes, plan.terms, plan.rows
        strides = sizes.features * terms, sizes.features, rows
        _, weight = _packed_codes(packed, sizes.features * terms * sizes.taps)
        out = _empty(shapes.x, call.axis, call, grad.codes.device)
        places = plan.backward, sizes.batch, sizes.in_pixels, sizes.pixels
        most = plan.grad.highest * plan.weight.highest
        _product(grad, weight, packed, None, out, places, (sizes, rows, terms, strides), most)
        return out if call.geometry is not None else from_samples(out, call.axis, shapes.x)

    def sample_norms(
        self, x: Operand, grad: Operand, shapes: Shapes, method: str, call: SiteCall, streams: Streams
    ) -> Tensor:
        if x.codes.dtype != torch.int8:
            return self._emulated.sample_norms(x, grad, shapes, method, call, streams)
        plan = _plan(shapes, call, x.codes.device)
        if plan.sizes.pixels > _LONGEST:
            return self._dense.sample_norms(*self._values(x, grad, shapes, call), shapes, method, call, streams)
        squares = _squares(x, grad, plan)
        # Units whose product float32 cannot hold make a weight gradient that it cannot hold either: infinite, so that
        # the sample is left out, and counted.
        unit = x.unit.double() * grad.unit.double()
        return torch.where(unit > torch.finfo(torch.float32).max, torch.inf, squares * (unit * unit))

    def sample_grads(self, x: Operand, grad: Operand, shapes: Shapes, call: SiteCall, streams: Streams) -> Tensor:
        if x.codes.dtype != torch.int8:
            return self._emulated.sample_grads(x, grad, shapes, call, streams)
        plan = _plan(shapes, call, x.codes.device)
        if plan.sizes.pixels > _LONGEST:
            return self._dense.sample_grads(*self._values(x, grad, shapes, call), shapes, call, streams)
        sizes = plan.sizes
        out = x.unit.new_empty(sizes.batch, sizes.features, sizes.taps * plan.terms)
        tiles, across, arguments, constants = _gradient(plan)
        tensors = _codes_of(x, grad, plan.forward), x.unit, grad.unit, out
        if sizes.batch:
            grid = (sizes.batch * tiles, sizes.groups)
            launch(load().gradients, grid, *tensors[0], *tensors[1:], *arguments, across, tiles, **constants)
        return out

    def weighted_grad(
        self, x: Operand, grad: Operand, factors: Tensor, shapes: Shapes, call: SiteCall, streams: Streams
    ) -> Tensor:
        if x.codes.dtype != torch.int8:
            return self._emulated.weighted_grad(x, grad, factors, shapes, call, streams)
        plan = _plan(shapes, call, x.codes.device)
        if plan.sizes.pixels > _LONGEST:
            values = self._values(x, grad, shapes, call)
            return self._dense.weighted_grad(*values, factors, shapes, call, streams)
        sizes = plan.sizes
        tiles, across, arguments, constants = _gradient(plan)
        # Parts of the batch are summed apart where the weight is too small to keep a GPU busy.
        share = ceil_div(sizes.batch, max(1, min(sizes.batch, _PROGRAMS // (tiles * sizes.groups))))
        parts = max(1, ceil_div(sizes.batch, max(1, share)))
        out = x.unit.new_empty(parts, sizes.features, sizes.taps * plan.terms)
        tensors = x.unit, grad.unit, factors.to(torch.float32).contiguous(), out
        grid = (tiles, sizes.groups, parts)
        codes = _codes_of(x, grad, plan.forward)
        launch(load().weighted, grid, *codes, *tensors, sizes.batch, share, *arguments, across, **constants)
        return as_weight(out[0] if parts == 1 else out.sum(0), shapes.weight)

    def sample_factors(self, x: Operand, grad: Operand, shapes: Shapes, call: SiteCall) -> tuple[Tensor, Tensor]:
        if x.codes.dtype == torch.int8:
            x, grad = self._values(x, grad, shapes, call)
        return self._dense.sample_factors(x, grad, shapes, call)

    def _values(self, x: Operand, grad: Operand, shapes: Shapes, call: SiteCall) -> tuple[Operand, Operand]:
        """The operands as the numbers that they stand for."""
        sizes, values = sizes_of(shapes, call), []
        for part, shape, axis, pixels, channels in (
            (x, shapes.x, call.axis, sizes.in_pixels, sizes.channels),
            (grad, shapes.y, call.output_axis, sizes.pixels, sizes.features),
        ):
            numbers = part.codes.view(sizes.batch, pixels, channels).to(torch.float32) * part.unit[:, None, None]
            values.append(Operand(spatial(numbers, shape, axis, call), part.unit))
        return values[0], values[1]


# Memory


def _padded(count: int) -> int:
    return ceil_div(count, _HEADER) * _HEADER


def _packed_codes(blob: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The codes of a packed weight: [taps, features, channels], and [taps, channels, features]."""
    second = _HEADER + _padded(count)
    return blob[_HEADER : _HEADER + count], blob[second : second + count]


def _empty(shape: tuple[int, ...], axis: BatchAxis, call: SiteCall, device: torch.device) -> Tensor:
    return empty_samples(shape, axis, call.geometry is not None, device)


def _codes_of(x: Operand, grad: Operand, table: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return x.codes, grad.codes, x.codes if table is None else table


# Launches


def _tile(size: int, most: int, least: int = 16) -> int:
    """A power of two that covers a size, if one up to `most` does."""
    return max(least, min(most, 1 << max(size - 1, 0).bit_length()))


def _quantize(
    x: Tensor,
    layout: tuple[int, ...],
    key: Tensor,
    samples: Tensor | None,
    call: int,
    spec: OperandSpec,
    codes: Tensor,
    unit: Tensor,
) -> None:
    """Codes and units of a tensor whose numbers lie as `layout_of` says; a weight has no `samples`."""
    batch, pixels, channels, by_sample, by_pixel, by_channel = layout[:6]
    found, kernels = codes_of(spec), load()
    assert found is not None  # `_supports` has said so
    sizes = torch.zeros(2 * batch, dtype=torch.int32, device=x.device)
    inner = (channels, by_pixel, by_channel) if by_channel <= by_pixel else (pixels, by_channel, by_pixel)
    blocks = ceil_div(pixels * channels, _BLOCK)
    arguments = (x, sizes, pixels * channels, inner[0], by_sample, inner[1], inner[2], blocks)
    launch(kernels.largest, (batch * blocks,), *arguments, block=_BLOCK)
    together, slots = 1, GROUP
    if found.grouped is None:
        scale, count = 0, ceil_div(pixels * channels, GROUP)
    elif found.grouped:
        scale, count = 3, pixels * ceil_div(channels, GROUP)
    elif pixels >= GROUP:
        scale, count = 1, channels * ceil_div(pixels, GROUP)
    else:
        together = ceil_div(GROUP, pixels)
        scale, count, slots = 2, ceil_div(channels, together), 2 * GROUP
    groups = _tile(count, _BLOCK // slots, 1)
    blocks = ceil_div(count, groups)
    ids = key if samples is None else samples
    launch(
        kernels.quantize, (batch * blocks,), x, sizes, key, ids, codes, unit, call, *layout[1:], together, count,
        blocks, fmt=found.number, nearest=int(found.nearest), scale=scale, folds=int(samples is not None),
        groups=groups, slots=slots,
    )  # fmt: skip


def _product(
    rows: Operand,
    weight: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    out: Tensor,
    places: tuple[Tensor | None, int, int, int],
    problem: tuple[Sizes, int, int, tuple[int, int, int]],
    most: int,
) -> None:
    """One product of a packed weight.

    places   the table, and how many samples, pixels of the result, and pixels of the operand there are
    problem  terms and columns of one group, and the weight's strides by tap, column and group
    most     the largest product of two codes
    """
    table, batch, pixels, in_pixels = places
    sizes, terms, columns, strides = problem
    if out.numel() == 0:
        return
    thin = table is not None and terms < _THIN and sizes.taps > 1
    length = sizes.taps * terms if thin else terms
    depth = _tile(length, _DEPTH, 32)
    span = 0 if sizes.taps * terms * most < 2**31 else (2**31 - 1) // (most * depth)
    # Sums in 64 bits take twice the registers, and so do places that are looked up one by one.
    tall, wide = _tile(batch * pixels, _TALL // 2 if span or thin else _TALL), _tile(columns, _WIDE)
    across = ceil_div(columns, wide)
    counts = batch * pixels, pixels, in_pixels, terms * sizes.groups, terms, columns, sizes.taps, *strides, across
    tensors = rows.codes, rows.unit, weight, packed[:4].view(torch.float32), out if bias is None else bias
    launch(
        load().product, (ceil_div(batch * pixels, tall) * across, sizes.groups), *tensors,
        rows.codes if table is None else table, out, *counts, own=int(table is None), thin=int(thin),
        biased=int(bias is not None), span=span, tall=tall, wide=wide, depth=depth,
    )  # fmt: skip


def _gradient(plan: _Plan) -> tuple[int, int, tuple[int, ...], dict[str, int]]:
    """Of per-sample gradients: how many tiles there are, and side by side, and what all kernels of them take."""
    sizes, terms, rows = plan.sizes, plan.terms, plan.rows
    thin = plan.forward is not None and terms < _THIN and sizes.taps > 1
    length = sizes.taps * terms if thin else terms
    tall, wide, depth = _tile(rows, _ROWS), _tile(length, _COLUMNS), _tile(sizes.pixels, _DEPTH, 32)
    across = ceil_div(length, wide) * (1 if thin else sizes.taps)
    counts = sizes.pixels, sizes.in_pixels, rows, terms, sizes.taps
    constants = dict(own=int(plan.forward is None), thin=int(thin), tall=tall, wide=wide, depth=depth)
    return across * ceil_div(rows, tall), across, counts, constants


def _squares(x: Operand, grad: Operand, plan: _Plan) -> Tensor:
    """Σ G² of the codes' gradients [B], in float64."""
    sizes = plan.sizes
    most = plan.x.highest * plan.grad.highest * sizes.pixels
    halves = sizes.features * sizes.taps * plan.terms * most**2 >= _SUMMED
    found = torch.zeros(sizes.batch, 1 + halves, dtype=torch.int64, device=x.codes.device)
    tiles, across, arguments, constants = _gradient(plan)
    if sizes.batch:
        grid, tensors = (sizes.batch * tiles, sizes.groups), (*_codes_of(x, grad, plan.forward), found)
        launch(load().norms, grid, *tensors, *arguments, across, tiles, halves=int(halves), **constants)
    return found[:, 0].double() * 2.0**32 + found[:, 1].double() if halves else found[:, 0].double()


def _supports(call: SiteCall, device: torch.device) -> str | None:
    if reason := unavailable(device):
        return reason
    if device.type == "cpu" and call.recipe.backend != "triton":
        return "the interpreter runs where backend='triton' asks for it"
    if reason := why_not(call.recipe):
        return reason
    if call.recipe.outputs != "none":
        return f"needs quantize_outputs='none', not {call.recipe.outputs!r}"
    if call.geometry is not None and (call.axis != BatchAxis(0) or call.output_axis != BatchAxis(0)):
        return "a sample of this conv is more than one image"
    return None


TRITON = register_kernel(
    Kernel(
        backend="triton",
        arithmetic=TritonSite(),
        supports=_supports,
        native=True,
        reference="reference",
        priority=15,
        note=f"exact int8 products in Triton; {NEVER_RUN}",
        dtypes=(torch.float32,),
    )
)
