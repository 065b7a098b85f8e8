"""The dpquant:: operators of private training: a site with operands that are rounded once, and what clipping needs.

`policy`, `keys` and `samples` are those of `dpquant::site`. A site's input, output gradient and weight come twice: as
they are, for full precision, and in the form in which the kernel of its recipe keeps them (`codes` and `unit`,
`packed`), for low precision. What the policy does not ask for is left empty and never read. The weight is packed once
per optimizer step, the other two are rounded once per micro-batch. A site number of -1 is a layer that is no site and
stays in full precision. Where a sample's factor is NaN, that sample is left out, whatever its values are.

Convolutions give their results channels-last, so that nothing is laid out anew between two of them.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from dpquant_compile.backends.ops.site import output_shape, plain_dtypes, site_call, streams_of
from dpquant_compile.backends.reference.clipped_site import FULL_SITE, ClippedSite
from dpquant_compile.backends.reference.per_sample import wide_dtype
from dpquant_compile.backends.registry import Arithmetic, Operand, Shapes, SiteCall, Streams, choose_kernel

__all__ = ["channels_last", "define_fake", "define_operator", "empty_packed", "pack_weight"]

# What all operators end on: the link table, then what is fixed about the call.
_TABLE = "Tensor policy, Tensor keys, Tensor samples"
_STATIC = "str op, int site, int call, int[] geometry, int[] axes, str recipe"
_X = "Tensor x, Tensor? codes, Tensor? unit"
_GRAD = "Tensor grad, Tensor? grad_codes, Tensor? grad_unit"

_LIBRARY = torch.library.Library("dpquant", "FRAGMENT")


def define_operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define an operator. Not by `custom_op`: these run a hundred times a step, and its wrappers cost as much again."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(name, function, device)
        return function

    return register


def define_fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say what an operator's results look like, for tracing."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_fake(f"dpquant::{name}", function, lib=_LIBRARY)
        return function

    return register


def channels_last(op: str) -> torch.memory_format:
    """The layout of what a private program's site computes."""
    return {"conv2d": torch.channels_last, "conv3d": torch.channels_last_3d}.get(op, torch.contiguous_format)


def pack_weight(weight: Tensor, keys: Tensor, call: SiteCall) -> Tensor:
    """The weight as the low-precision products of this step take it."""
    chosen = choose_kernel(call, weight.device).kernel.arithmetic
    with torch.no_grad():
        return chosen.packed(weight.detach(), call, Streams(keys, keys.new_zeros(0)))


def empty_packed(weight: Tensor, call: SiteCall) -> Tensor:
    """What stands in for a packed weight where the policy is full precision."""
    return choose_kernel(call, weight.device).kernel.arithmetic.empty_packed(weight.detach(), call)


class _Static:
    """What is fixed about a call of an operator, worked out once: there are a hundred calls in a step."""

    def __init__(self, spec: SiteCall, device: torch.device) -> None:
        self.spec, self.layout = spec, channels_last(spec.op)
        self.kernel = choose_kernel(spec, device).kernel.arithmetic
        self._shapes: dict[tuple[tuple[int, ...], tuple[int, ...]], Shapes] = {}

    def shapes(self, x: tuple[int, ...], weight: tuple[int, ...]) -> Shapes:
        found = self._shapes.get((x, weight))
        if found is None:
            axis, y = self.spec.axis, output_shape(x, weight, self.spec.geometry)
            found = self._shapes[x, weight] = Shapes(x, weight, y, x[axis.dim] // (axis.outer * axis.inner))
        return found


@lru_cache(maxsize=4096)
def _decoded(
    op: str, site: int, call: int, geometry: tuple[int, ...], axes: tuple[int, ...], recipe: str, device: torch.device
) -> _Static:
    return _Static(site_call(op, site, call, recipe, axes, geometry), device)


class _Call:
    """One call of an operator, decoded. `low` is what runs it in low precision; None in full precision."""

    def __init__(self, table: Sequence[Tensor], static: Sequence[Any], device: torch.device) -> None:
        policy, self.keys, self.samples = table
        op, site, call, geometry, axes, recipe = static
        self._static = _decoded(op, site, call, tuple(geometry), tuple(axes), recipe, device)
        self.spec, self.kernel, self.layout = self._static.spec, self._static.kernel, self._static.layout
        self.low: Arithmetic | None = self.kernel if site >= 0 and policy[site].item() else None

    def streams(self, x: Tensor) -> Streams:
        return streams_of(self.keys, self.samples, x, self.spec.axis)

    def shapes(self, x: Sequence[int], weight: Tensor) -> Shapes:
        return self._static.shapes(tuple(x), tuple(weight.shape))

    def operand(self, value: Tensor, codes: Tensor | None, unit: Tensor | None) -> Operand:
        if self.low is None:
            return Operand(value, value)
        assert codes is not None and unit is not None
        return Operand(codes, unit)

    @property
    def clipped(self) -> "Arithmetic | ClippedSite":
        return FULL_SITE if self.low is None else self.low


@define_operator("packed_weight", f"(Tensor weight, {_TABLE}, {_STATIC}) -> Tensor")
def packed_weight(weight: Tensor, *rest: Any) -> Tensor:
    """`pack_weight` for a weight that forward computes of parameters, and so cannot be packed before it."""
    this = _Call(rest[:3], rest[3:], weight.device)
    if this.low is None:
        return empty_packed(weight, this.spec)
    return pack_weight(weight, this.keys, this.spec).clone(memory_format=torch.contiguous_format)


@define_operator("round_operand", f"(Tensor x, {_TABLE}, str role, {_STATIC}) -> (Tensor, Tensor)")
def round_operand(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """An input or an output gradient as the kernel of the recipe keeps it; `role` says which."""
    role, static = rest[3], rest[4:]
    this = _Call(rest[:3], static, x.device)
    axis = this.spec.axis if role == "input" else this.spec.output_axis
    streams = streams_of(this.keys, this.samples, x, axis)
    if this.low is None:
        codes, unit = this.kernel.empty_operand(x, this.spec, streams.samples.shape[0])
    else:
        with plain_dtypes(x):
            codes, unit = this.low.operand(x, role, this.spec, streams)
    return codes, unit


@define_operator("private_site", f"({_X}, Tensor weight, Tensor? packed, Tensor? bias, {_TABLE}, {_STATIC}) -> Tensor")
def private_site(x: Tensor, codes: Any, unit: Any, weight: Tensor, packed: Any, bias: Any, *rest: Any) -> Tensor:
    """`dpquant::site` with operands that are rounded already."""
    this = _Call(rest[:3], rest[3:], x.device)
    shapes = this.shapes(x.shape, weight)
    with plain_dtypes(x):
        if this.low is None:
            laid = x.to(weight.dtype).contiguous(memory_format=this.layout)
            y = FULL_SITE.forward(laid, weight, bias, shapes, this.spec)
        else:
            y = this.low.product(Operand(codes, unit), packed, bias, shapes, this.spec, this.streams(x))
    return y.to(weight.dtype).contiguous(memory_format=this.layout)


@define_operator(
    "private_grad_input", f"({_GRAD}, Tensor weight, Tensor? packed, {_TABLE}, int[] size, {_STATIC}) -> Tensor"
)
def private_grad_input(grad: Tensor, codes: Any, unit: Any, weight: Tensor, packed: Any, *rest: Any) -> Tensor:
    """The gradient of a site's input, whose shape is `size`."""
    this = _Call(rest[:3], rest[4:], grad.device)
    shapes = this.shapes(rest[3], weight)
    with plain_dtypes(grad):
        if this.low is None:
            # Of the input only shape and layout are asked for.
            like = torch.empty(shapes.x, dtype=weight.dtype, device=grad.device, memory_format=this.layout)
            laid = grad.contiguous(memory_format=this.layout)
            dx = FULL_SITE.grad_input(laid, like, weight, shapes, this.spec)
        else:
            streams = streams_of(this.keys, this.samples, grad, this.spec.output_axis)
            dx = this.low.product_grad_input(Operand(codes, unit), packed, shapes, this.spec, streams)
    return dx.to(weight.dtype).contiguous(memory_format=this.layout)


@define_operator("sample_norms", f"({_X}, {_GRAD}, Tensor weight, {_TABLE}, str method, {_STATIC}) -> Tensor")
def sample_norms(x: Tensor, codes: Any, unit: Any, grad: Tensor, g_codes: Any, g_unit: Any, *rest: Any) -> Tensor:
    """‖Gᵢ‖² [B] of the weight's per-sample gradients, never less than what the weighted sum takes of a sample."""
    weight, table, method, static = rest[0], rest[1:4], rest[4], rest[5:]
    this = _Call(table, static, x.device)
    with plain_dtypes(x):
        xs, grads = this.operand(x.to(weight.dtype), codes, unit), this.operand(grad, g_codes, g_unit)
        shapes = this.shapes(x.shape, weight)
        norms = this.clipped.sample_norms(xs, grads, shapes, method, this.spec, this.streams(x))
    return norms.to(wide_dtype(weight))


@define_operator("sample_grads", f"({_X}, {_GRAD}, Tensor weight, {_TABLE}, {_STATIC}) -> Tensor")
def sample_grads(x: Tensor, codes: Any, unit: Any, grad: Tensor, g_codes: Any, g_unit: Any, *rest: Any) -> Tensor:
    """Gᵢ by tap, [B, N, taps · C]: for weights so small, or used so, that they are better kept."""
    weight, table, static = rest[0], rest[1:4], rest[4:]
    this = _Call(table, static, x.device)
    with plain_dtypes(x):
        xs, grads = this.operand(x.to(weight.dtype), codes, unit), this.operand(grad, g_codes, g_unit)
        found = this.clipped.sample_grads(xs, grads, this.shapes(x.shape, weight), this.spec, this.streams(x))
    return found.to(wide_dtype(weight)).contiguous()


@define_operator("weighted_grad", f"({_X}, {_GRAD}, Tensor weight, Tensor factors, {_TABLE}, {_STATIC}) -> Tensor")
def weighted_grad(x: Tensor, codes: Any, unit: Any, grad: Tensor, g_codes: Any, g_unit: Any, *rest: Any) -> Tensor:
    """Σᵢ factorᵢ Gᵢ, leaving samples out whose factor is NaN."""
    weight, factors, table, static = rest[0], rest[1], rest[2:5], rest[5:]
    this = _Call(table, static, x.device)
    with plain_dtypes(x):
        xs, grads = this.operand(x.to(weight.dtype), codes, unit), this.operand(grad, g_codes, g_unit)
        shapes = this.shapes(x.shape, weight)
        total = this.clipped.weighted_grad(xs, grads, factors, shapes, this.spec, this.streams(x))
    return total.to(wide_dtype(weight)).contiguous()


@define_operator("sample_factors", f"({_X}, {_GRAD}, Tensor weight, {_TABLE}, {_STATIC}) -> (Tensor, Tensor)")
def sample_factors(
    x: Tensor, codes: Any, unit: Any, grad: Tensor, g_codes: Any, g_unit: Any, *rest: Any
) -> tuple[Tensor, Tensor]:
    """D [B, T, N] and U [B, T, K] with Gᵢ = Dᵢᵀ Uᵢ, for a weight that is used at several places."""
    weight, table, static = rest[0], rest[1:4], rest[4:]
    this = _Call(table, static, x.device)
    with plain_dtypes(x):
        xs, grads = this.operand(x.to(weight.dtype), codes, unit), this.operand(grad, g_codes, g_unit)
        parts = this.clipped.sample_factors(xs, grads, this.shapes(x.shape, weight), this.spec)
    left, right = (part.to(wide_dtype(weight)).clone(memory_format=torch.contiguous_format) for part in parts)
    return left, right


# Shapes and layouts, for tracing


@define_fake("packed_weight")
def _fake_packed(weight: Tensor, *rest: Any) -> Tensor:
    return empty_packed(weight, _spec(rest))


@define_fake("round_operand")
def _fake_operand(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    spec = _spec(rest)
    axis = spec.axis if rest[3] == "input" else spec.output_axis
    kernel = choose_kernel(spec, x.device).kernel.arithmetic
    codes, unit = kernel.empty_operand(x, spec, x.shape[axis.dim] // (axis.outer * axis.inner))
    return codes, unit


@define_fake("private_site")
def _fake_site(x: Tensor, codes: Any, unit: Any, weight: Tensor, *rest: Any) -> Tensor:
    shape = output_shape(tuple(x.shape), tuple(weight.shape), _spec(rest).geometry)
    return torch.empty(shape, dtype=weight.dtype, device=x.device, memory_format=channels_last(rest[-6]))


@define_fake("private_grad_input")
def _fake_grad_input(grad: Tensor, codes: Any, unit: Any, weight: Tensor, *rest: Any) -> Tensor:
    return torch.empty(rest[4], dtype=weight.dtype, device=grad.device, memory_format=channels_last(rest[-6]))


@define_fake("sample_norms")
def _fake_norms(x: Tensor, codes: Any, unit: Any, grad: Tensor, g: Any, u: Any, weight: Tensor, *rest: Any) -> Tensor:
    return torch.empty(_batch(x, rest), dtype=wide_dtype(weight), device=x.device)


@define_fake("sample_grads")
def _fake_grads(x: Tensor, codes: Any, unit: Any, grad: Tensor, g: Any, u: Any, weight: Tensor, *rest: Any) -> Tensor:
    shape = (_batch(x, rest), weight.shape[0], weight.numel() // weight.shape[0])
    return torch.empty(shape, dtype=wide_dtype(weight), device=x.device)


@define_fake("weighted_grad")
def _fake_weighted(x: Tensor, c: Any, u: Any, grad: Tensor, g: Any, v: Any, weight: Tensor, *rest: Any) -> Tensor:
    return torch.empty(weight.shape, dtype=wide_dtype(weight), device=x.device)


@define_fake("sample_factors")
def _fake_factors(
    x: Tensor, c: Any, u: Any, grad: Tensor, g: Any, v: Any, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    batch = _batch(x, rest)
    count = grad.numel() // (batch * weight.shape[0])
    widths = (weight.shape[0], weight.numel() // weight.shape[0])
    left, right = (torch.empty((batch, count, n), dtype=wide_dtype(weight), device=x.device) for n in widths)
    return left, right


def _spec(rest: Sequence[Any]) -> SiteCall:
    op, site, call, geometry, axes, recipe = rest[-6:]
    return site_call(op, site, call, recipe, axes, geometry)


def _batch(x: Tensor, rest: Sequence[Any]) -> int:
    dim, outer, inner = rest[-2][:3]
    return cast(int, x.shape[dim] // (outer * inner))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, _, weight, packed, _, policy, keys, samples, *static = inputs
    ctx.save_for_backward(weight, packed, policy, keys, samples)
    ctx.size, ctx.static = list(x.shape), static


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    # The gradients of weight and bias are not autograd's here: clipping takes them from x and grad.
    dx = None
    if ctx.needs_input_grad[0]:
        weight, packed, *table = ctx.saved_tensors
        codes, unit = torch.ops.dpquant.round_operand(grad, *table, "grad_output", *ctx.static)
        dx = torch.ops.dpquant.private_grad_input(grad, codes, unit, weight, packed, *table, ctx.size, *ctx.static)
    return (dx, *[None] * (8 + len(ctx.static)))


torch.library.register_autograd("dpquant::private_site", _backward, setup_context=_save, lib=_LIBRARY)
