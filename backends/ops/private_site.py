"""The dpquant:: operators of private training: a site with operands that are rounded once, and what clipping needs.

`policy`, `keys` and `samples` are those of `dpquant::site`. A site's input, output gradient and weight come twice: as
they are, for full precision and bfloat16, and in the form in which the kernel of its recipe keeps them (`codes` and
`unit`, `packed`), for low precision. What the policy does not ask for is left empty and never read. The weight is
packed once per optimizer step, the other two are rounded once per micro-batch. A site number of -1 is a layer that is
no site and stays in full precision. Where a sample's factor is NaN, that sample is left out, whatever its values are.

Convolutions give their results channels-last, so that nothing is laid out anew between two of them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dpquant_compile.backends.ops.site import (
    STATIC,
    TABLE,
    call_of,
    call_of_key,
    output_shape,
    plain_dtypes,
    site_arguments,
    static_key,
    streams_of,
)
from dpquant_compile.backends.reference.clipped_site import ClippedSite, FullSite, site_at
from dpquant_compile.backends.reference.per_sample import squares, wide_dtype
from dpquant_compile.backends.registry import Arithmetic, Operand, Shapes, SiteCall, Streams
from dpquant_compile.backends.rotated_site import arithmetic_of
from dpquant_compile.backends.site_args import Signature, by_name, grads_in_order, named_args, signature_of
from dpquant_compile.numerics.recipe import Precision

__all__ = ["channels_last", "define_fake", "define_operator", "pack_weight"]

_X = "Tensor x, Tensor? codes, Tensor? unit"
_GRAD = "Tensor grad, Tensor? grad_codes, Tensor? grad_unit"

_LIBRARY = torch.library.Library("dpquant", "FRAGMENT")


def define_operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define an operator whose implementation gets its arguments by name, see `by_name`.

    Not by `custom_op`: these run a hundred times a step, and its wrappers cost as much again.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        run = by_name(Signature.parse(f"dpquant::{name}", schema))(function)
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(name, run, device)
        return function

    return register


def define_fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say what an operator's results look like, for tracing."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        run = by_name(signature_of(getattr(torch.ops.dpquant, name).default))(function)
        torch.library.register_fake(f"dpquant::{name}", run, lib=_LIBRARY)
        return function

    return register


def channels_last(op: str) -> torch.memory_format:
    """The layout of what a private program's site computes."""
    return {"conv2d": torch.channels_last, "conv3d": torch.channels_last_3d}.get(op, torch.contiguous_format)


def pack_weight(weight: Tensor, keys: Tensor, call: SiteCall, precision: int) -> Tensor:
    """The weight as the products of this step take it; where they take it as it is, what stands in for it."""
    chosen, running = arithmetic_of(call, weight.device), call.running(precision)
    if running is None:
        return chosen.empty_packed(weight.detach(), call)
    with torch.no_grad():
        return chosen.packed(weight.detach(), running, Streams(keys, keys.new_zeros(0)))


def _laid_like(weight: Tensor, grad: Tensor) -> Tensor:
    """A gradient in a dense layout: that of its parameter, where the weight is the transpose of one."""
    turned = weight.dim() == 2 and not weight.is_contiguous() and weight.t().is_contiguous()
    return grad.t().contiguous().t() if turned else grad.contiguous()


class _Static:
    """What is fixed about a call of an operator, worked out once: there are a hundred calls in a step."""

    def __init__(self, spec: SiteCall, device: torch.device) -> None:
        self.spec, self.layout = spec, channels_last(spec.op)
        self.running = tuple(spec.running(precision) for precision in Precision)
        self.kernel = arithmetic_of(spec, device)
        self._shapes: dict[tuple[tuple[int, ...], tuple[int, ...]], Shapes] = {}

    def shapes(self, x: tuple[int, ...], weight: tuple[int, ...]) -> Shapes:
        found = self._shapes.get((x, weight))
        if found is None:
            axis, y = self.spec.axis, output_shape(x, weight, self.spec.geometry)
            found = self._shapes[x, weight] = Shapes(x, weight, y, x[axis.dim] // (axis.outer * axis.inner))
        return found


@lru_cache(maxsize=4096)
def _decoded(key: tuple[Any, ...], device: torch.device) -> _Static:
    return _Static(call_of_key(key), device)


class _Call:
    """One call of an operator, decoded: `spec` as it runs, by `low`; None where no recipe rounds, which `full` runs."""

    def __init__(self, arguments: Mapping[str, Any], device: torch.device) -> None:
        self.keys, self.samples = arguments["keys"], arguments["samples"]
        self._static = _decoded(static_key(arguments), device)
        self.spec, self.kernel, self.layout = self._static.spec, self._static.kernel, self._static.layout
        self.precision = int(arguments["policy"][self.spec.site].item()) if self.spec.site >= 0 else Precision.FULL
        running = self._static.running[self.precision]
        self.low: Arithmetic | None = None if running is None else self.kernel
        self.full: FullSite = site_at(self.precision)
        self.spec = running or self.spec

    def streams(self, x: Tensor) -> Streams:
        return streams_of(self.keys, self.samples, x, self.spec.axis)

    def shapes(self, x: Sequence[int], weight: Tensor) -> Shapes:
        return self._static.shapes(tuple(x), tuple(weight.shape))

    def operands(self, x: Tensor, rest: Mapping[str, Any]) -> tuple[Operand, Operand]:
        """Input and output gradient: as they are where no recipe rounds them, else as the kernel keeps them."""
        if self.low is None:
            return Operand(x, x), Operand(rest["grad"], rest["grad"])
        assert all(rest[name] is not None for name in ("codes", "unit", "grad_codes", "grad_unit"))
        return Operand(rest["codes"], rest["unit"]), Operand(rest["grad_codes"], rest["grad_unit"])

    @property
    def clipped(self) -> "Arithmetic | ClippedSite":
        return self.full if self.low is None else self.low


@define_operator("packed_weight", f"(Tensor weight, {TABLE}, {STATIC}) -> Tensor")
def packed_weight(weight: Tensor, rest: Mapping[str, Any]) -> Tensor:
    """`pack_weight` for a weight that forward computes of parameters, and so cannot be packed before it."""
    this = _Call(rest, weight.device)
    packed = pack_weight(weight, this.keys, call_of(rest), this.precision)
    return packed.clone(memory_format=torch.contiguous_format)


@define_operator("round_operand", f"(Tensor x, {TABLE}, str role, {STATIC}) -> (Tensor, Tensor)")
def round_operand(x: Tensor, role: str, rest: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """An input or an output gradient as the kernel of the recipe keeps it; `role` says which."""
    this = _Call(rest, x.device)
    axis = this.spec.axis if role == "input" else this.spec.output_axis
    streams = streams_of(this.keys, this.samples, x, axis)
    if this.low is None:
        codes, unit = this.kernel.empty_operand(x, this.spec, streams.samples.shape[0])
    else:
        with plain_dtypes(x):
            codes, unit = this.low.operand(x, role, this.spec, streams)
    return codes, unit


@define_operator("private_site", f"({_X}, Tensor weight, Tensor? packed, Tensor? bias, {TABLE}, {STATIC}) -> Tensor")
def private_site(
    x: Tensor, codes: Any, unit: Any, weight: Tensor, packed: Any, bias: Any, rest: Mapping[str, Any]
) -> Tensor:
    """`dpquant::site` with operands that are rounded already."""
    this = _Call(rest, x.device)
    shapes = this.shapes(x.shape, weight)
    with plain_dtypes(x):
        if this.low is None:
            laid = x.to(weight.dtype).contiguous(memory_format=this.layout)
            y = this.full.forward(laid, weight, bias, shapes, this.spec)
        else:
            y = this.low.product(Operand(codes, unit), packed, bias, shapes, this.spec, this.streams(x))
    return y.to(weight.dtype).contiguous(memory_format=this.layout)


@define_operator(
    "private_grad_input", f"({_GRAD}, Tensor weight, Tensor? packed, {TABLE}, int[] size, {STATIC}) -> Tensor"
)
def private_grad_input(
    grad: Tensor,
    grad_codes: Any,
    grad_unit: Any,
    weight: Tensor,
    packed: Any,
    size: Sequence[int],
    rest: Mapping[str, Any],
) -> Tensor:
    """The gradient of a site's input, whose shape is `size`."""
    this = _Call(rest, grad.device)
    shapes = this.shapes(size, weight)
    with plain_dtypes(grad):
        if this.low is None:
            # Of the input only shape and layout are asked for.
            like = torch.empty(shapes.x, dtype=weight.dtype, device=grad.device, memory_format=this.layout)
            laid = grad.contiguous(memory_format=this.layout)
            dx = this.full.grad_input(laid, like, weight, shapes, this.spec)
        else:
            streams = streams_of(this.keys, this.samples, grad, this.spec.output_axis)
            dx = this.low.product_grad_input(Operand(grad_codes, grad_unit), packed, shapes, this.spec, streams)
    return dx.to(weight.dtype).contiguous(memory_format=this.layout)


@define_operator("sample_norms", f"({_X}, {_GRAD}, Tensor weight, {TABLE}, str method, {STATIC}) -> Tensor")
def sample_norms(x: Tensor, weight: Tensor, method: str, rest: Mapping[str, Any]) -> Tensor:
    """‖Gᵢ‖² [B] of the weight's per-sample gradients, never less than what the weighted sum takes of a sample."""
    this = _Call(rest, x.device)
    with plain_dtypes(x):
        xs, grads = this.operands(x.to(weight.dtype), rest)
        shapes = this.shapes(x.shape, weight)
        norms = this.clipped.sample_norms(xs, grads, shapes, method, this.spec, this.streams(x))
    return norms.to(wide_dtype(weight))


@define_operator("sample_grads", f"({_X}, {_GRAD}, Tensor weight, {TABLE}, {STATIC}) -> Tensor")
def sample_grads(x: Tensor, weight: Tensor, rest: Mapping[str, Any]) -> Tensor:
    """Gᵢ by tap, [B, N, taps · C]: for weights so small, or used so, that they are better kept."""
    this = _Call(rest, x.device)
    with plain_dtypes(x):
        xs, grads = this.operands(x.to(weight.dtype), rest)
        found = this.clipped.sample_grads(xs, grads, this.shapes(x.shape, weight), this.spec, this.streams(x))
    return found.to(wide_dtype(weight)).contiguous()


@define_operator("weighted_grad", f"({_X}, {_GRAD}, Tensor weight, Tensor factors, {TABLE}, {STATIC}) -> Tensor")
def weighted_grad(x: Tensor, weight: Tensor, factors: Tensor, rest: Mapping[str, Any]) -> Tensor:
    """Σᵢ factorᵢ Gᵢ, leaving samples out whose factor is NaN. For a weight that is the transpose of a parameter the sum
    lies in memory as the parameter does."""
    this = _Call(rest, x.device)
    with plain_dtypes(x):
        xs, grads = this.operands(x.to(weight.dtype), rest)
        shapes = this.shapes(x.shape, weight)
        total = this.clipped.weighted_grad(xs, grads, factors, shapes, this.spec, this.streams(x))
    return _laid_like(weight, total.to(wide_dtype(weight)))


@define_operator("sample_factors", f"({_X}, {_GRAD}, Tensor weight, {TABLE}, {STATIC}) -> (Tensor, Tensor)")
def sample_factors(x: Tensor, weight: Tensor, rest: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """D [B, T, N] and U [B, T, K] with Gᵢ = Dᵢᵀ Uᵢ, for a weight that is used at several places."""
    this = _Call(rest, x.device)
    with plain_dtypes(x):
        xs, grads = this.operands(x.to(weight.dtype), rest)
        parts = this.clipped.sample_factors(xs, grads, this.shapes(x.shape, weight), this.spec)
    left, right = (part.to(wide_dtype(weight)).clone(memory_format=torch.contiguous_format) for part in parts)
    return left, right


@define_operator(
    "embedding_products",
    f"({_X}, {_GRAD}, Tensor weight, Tensor tokens, Tensor rows, bool turned, {TABLE}, {STATIC}) -> (Tensor, Tensor)",
)
def embedding_products(
    x: Tensor, weight: Tensor, tokens: Tensor, rows: Tensor, turned: bool, rest: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Σ of Gᵢ times the gradient of an embedding that shares the weight, for each sample [B]; and Σₜ ‖dₜ‖‖uₜ‖ [B].

    The embedding adds `rows` [B, S, E] at `tokens` [B, S] of the weight, or with `turned` of the transposed weight.
    """
    this = _Call(rest, x.device)
    with plain_dtypes(x):
        xs, grads = this.operands(x.to(weight.dtype), rest)
        left, right = this.clipped.sample_factors(xs, grads, this.shapes(x.shape, weight), this.spec)
        size = (squares(left).sqrt() * squares(right).sqrt()).sum(1)
        looked, multiplied = (right, left) if turned else (left, right)
        index = tokens[:, None, :].expand(-1, looked.shape[1], -1)
        inner = (looked.gather(2, index) * (multiplied @ rows.to(left.dtype).transpose(1, 2))).sum((1, 2))
    return inner.to(wide_dtype(weight)), size.to(wide_dtype(weight))


# Shapes and layouts, for tracing


@define_fake("packed_weight")
def _fake_packed(weight: Tensor, rest: Mapping[str, Any]) -> Tensor:
    call = call_of(rest)
    return arithmetic_of(call, weight.device).empty_packed(weight, call)


@define_fake("round_operand")
def _fake_operand(x: Tensor, role: str, rest: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    spec = call_of(rest)
    axis = spec.axis if role == "input" else spec.output_axis
    kernel = arithmetic_of(spec, x.device)
    codes, unit = kernel.empty_operand(x, spec, x.shape[axis.dim] // (axis.outer * axis.inner))
    return codes, unit


@define_fake("private_site")
def _fake_site(x: Tensor, weight: Tensor, rest: Mapping[str, Any]) -> Tensor:
    spec = call_of(rest)
    shape = output_shape(tuple(x.shape), tuple(weight.shape), spec.geometry)
    return torch.empty(shape, dtype=weight.dtype, device=x.device, memory_format=channels_last(spec.op))


@define_fake("private_grad_input")
def _fake_grad_input(grad: Tensor, weight: Tensor, size: Sequence[int], op: str, rest: Mapping[str, Any]) -> Tensor:
    return torch.empty(size, dtype=weight.dtype, device=grad.device, memory_format=channels_last(op))


@define_fake("sample_norms")
def _fake_norms(x: Tensor, weight: Tensor, rest: Mapping[str, Any]) -> Tensor:
    return torch.empty(_batch(x, call_of(rest)), dtype=wide_dtype(weight), device=x.device)


@define_fake("sample_grads")
def _fake_grads(x: Tensor, weight: Tensor, rest: Mapping[str, Any]) -> Tensor:
    shape = (_batch(x, call_of(rest)), weight.shape[0], weight.numel() // weight.shape[0])
    return torch.empty(shape, dtype=wide_dtype(weight), device=x.device)


@define_fake("weighted_grad")
def _fake_weighted(x: Tensor, weight: Tensor, rest: Mapping[str, Any]) -> Tensor:
    return _laid_like(weight, torch.empty(weight.shape, dtype=wide_dtype(weight), device=x.device))


@define_fake("embedding_products")
def _fake_products(x: Tensor, weight: Tensor, rest: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    inner, size = (torch.empty(_batch(x, call_of(rest)), dtype=wide_dtype(weight), device=x.device) for _ in range(2))
    return inner, size


@define_fake("sample_factors")
def _fake_factors(x: Tensor, grad: Tensor, weight: Tensor, rest: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    batch = _batch(x, call_of(rest))
    count = grad.numel() // (batch * weight.shape[0])
    widths = (weight.shape[0], weight.numel() // weight.shape[0])
    left, right = (torch.empty((batch, count, n), dtype=wide_dtype(weight), device=x.device) for n in widths)
    return left, right


def _batch(x: Tensor, spec: SiteCall) -> int:
    return x.shape[spec.axis.dim] // (spec.axis.outer * spec.axis.inner)


_SITE = torch.ops.dpquant.private_site.default


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    given = named_args(_SITE, inputs)
    ctx.save_for_backward(given.weight, given.packed, given.policy, given.keys, given.samples)
    ctx.size, ctx.call = list(given.x.shape), call_of(vars(given))


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    # The gradients of weight and bias are not autograd's here: clipping takes them from x and grad.
    if not named_args(_SITE, ctx.needs_input_grad).x:
        return grads_in_order(_SITE)
    weight, packed, *table = ctx.saved_tensors
    rest = site_arguments(table, ctx.call)
    codes, unit = torch.ops.dpquant.round_operand(x=grad, role="grad_output", **rest)
    dx = torch.ops.dpquant.private_grad_input(
        grad=grad, grad_codes=codes, grad_unit=unit, weight=weight, packed=packed, size=ctx.size, **rest
    )
    return grads_in_order(_SITE, x=dx)


torch.library.register_autograd("dpquant::private_site", _backward, setup_context=_save, lib=_LIBRARY)
