"""Sites for graphs that are specialised to one policy: the quantized branch alone, written out so that it fuses.

The bits are those of `dpquant::site` with the switch on. A site with products in bfloat16 is that operator, with a
switch that stands still: it rounds nothing that could fuse.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpquant_compile.backends.ops.site import (
    STATIC,
    bias_grad,
    call_of,
    layout_of,
    plain_dtypes,
    site_arguments,
    site_fake,
    site_operator,
    static_arguments,
    streams_of,
)
from dpquant_compile.backends.reference.emulated import REFERENCE_SITE, EmulatedSite
from dpquant_compile.backends.reference.products import Products, full_forward, full_grad_input, full_grad_params
from dpquant_compile.backends.registry import SiteCall, Streams, choose_kernel
from dpquant_compile.backends.rotated_site import turned
from dpquant_compile.backends.site_args import Signature, by_name
from dpquant_compile.numerics.quantize import quantize_values
from dpquant_compile.numerics.recipe import Precision, Recipe
from dpquant_compile.sites import BatchAxis, ConvGeometry

__all__ = ["bfloat16_site", "low_precision_site", "sealed_conv"]


@torch.library.custom_op("dpquant::round_weight", mutates_args=())
def round_weight(weight: Tensor, keys: Tensor, site: int, recipe: str) -> Tensor:
    """A weight rounded as `dpquant::site` rounds it. One operator, since there is nothing around it to fuse with."""
    spec = SiteCall("linear", Recipe.parse(recipe), BatchAxis(0), BatchAxis(0), None, site, 0)
    chosen = choose_kernel(spec, weight.device).kernel.arithmetic
    emulated = chosen if isinstance(chosen, EmulatedSite) else REFERENCE_SITE
    return emulated.weight(
        turned(weight, spec) if weight.dim() == 2 else weight, spec, Streams(keys, keys.new_zeros(0))
    ).contiguous()


@round_weight.register_fake
def _fake_round_weight(weight: Tensor, keys: Tensor, site: int, recipe: str) -> Tensor:
    return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


@site_operator(
    "sample_grad_sum", f"(Tensor grad, Tensor x, Tensor weight, Tensor keys, Tensor samples, {STATIC}) -> Tensor"
)
def sample_grad_sum(
    grad: Tensor, x: Tensor, weight: Tensor, keys: Tensor, samples: Tensor, rest: Mapping[str, Any]
) -> Tensor:
    """Σᵢ Q(dwᵢ) of rounded operands. One operator, since a loop over samples must stay out of a traced program."""
    spec = call_of(rest)
    return REFERENCE_SITE.summed_sample_grads(grad, x, weight, spec, streams_of(keys, samples, x, spec.axis))


@site_fake(sample_grad_sum)
def _fake_sample_grad_sum(weight: Tensor, rest: Mapping[str, Any]) -> Tensor:
    return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


def _standing(precision: Precision) -> tuple[Tensor, Tensor, Tensor]:
    """A link table of one site, at this precision; it has no random bits."""
    nothing = torch.zeros(1, dtype=torch.int64)
    return torch.full((1,), precision, dtype=torch.uint8), nothing[None], nothing


def _full_precision(geometry: ConvGeometry) -> dict[str, Any]:
    """Table and call of `dpquant::site` for a conv in full precision."""
    op, recipe = f"conv{len(geometry.stride)}d", Recipe(backend="reference")
    call = SiteCall(op, recipe, BatchAxis(0), BatchAxis(0), geometry, 0, 0)
    return site_arguments(_standing(Precision.FULL), call)


def _sealed_forward(op: str, geometry: ConvGeometry | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if geometry is None:
        return full_forward(op, geometry, x, weight, bias)
    y: Tensor = torch.ops.dpquant.site(x=x, weight=weight, bias=bias, **_full_precision(geometry))
    return y


def _sealed_grad_input(geometry: ConvGeometry | None, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    if geometry is None:
        return full_grad_input(geometry, grad, x, weight)
    dx: Tensor = torch.ops.dpquant.site_grad_input(grad=grad, x=x, weight=weight, **_full_precision(geometry))
    return dx


def _sealed_grad_params(
    geometry: ConvGeometry | None, grad: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    if geometry is None:
        return full_grad_params(geometry, grad, x, weight, mask)
    need_weight, need_bias = mask
    dw, db = torch.ops.dpquant.site_grad_params(
        grad=grad, x=x, weight=weight, need_weight=need_weight, need_bias=need_bias, **_full_precision(geometry)
    )
    return dw, db


# The reference with its convs as operators: torch's own shape function of a conv puts guards on the batch size, so a
# program that was compiled for one Poisson batch would be compiled again for another.
_SEALED_SITE = EmulatedSite(quantize_values, Products(_sealed_forward, _sealed_grad_input, _sealed_grad_params))


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def sealed_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """A conv in full precision, for programs that serve all batch sizes."""
    geometry = ConvGeometry(tuple(stride), tuple(padding), tuple(dilation), groups)
    return _sealed_forward(f"conv{len(geometry.stride)}d", geometry, x, weight, bias)


class _LowPrecisionSite(torch.autograd.Function):
    """The quantized branch alone, in reference arithmetic, for graphs that are specialised to one policy.

    Rounded operands are kept for the backward pass, so that each is rounded once, in a loop that Inductor can fuse
    with whatever produced the tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, keys: Tensor, samples: Tensor, spec: SiteCall
    ) -> Tensor:
        streams = streams_of(keys, samples, x, spec.axis)
        ctx.layout, x = layout_of(spec.op, x), turned(x, spec)
        rounded = _SEALED_SITE.input(x, spec, streams)
        rounded_weight = torch.ops.dpquant.round_weight(weight, keys, spec.site, str(spec.recipe))
        # Of most recipes it is the same tensor, traced once.
        summed = _SEALED_SITE.summed(x, "input", spec, streams) if spec.recipe.hadamard else rounded
        ctx.save_for_backward(summed, rounded_weight, keys, samples)
        ctx.spec = spec
        with plain_dtypes(x):
            y = _SEALED_SITE.rounded_product(rounded, rounded_weight, bias, spec, streams)
        return y.contiguous(memory_format=ctx.layout)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, keys, samples = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        spec, streams = ctx.spec, streams_of(keys, samples, x, ctx.spec.axis)
        grad = _SEALED_SITE.grad(grads[0], spec, streams)
        dx = dw = db = None
        if need_x:
            dx = turned(_SEALED_SITE.rounded_grad_input(grad, x, weight, spec, streams), spec)
            dx = dx.contiguous(memory_format=ctx.layout)
        if need_weight and spec.recipe.hadamard:
            grad = _SEALED_SITE.summed(grads[0], "grad_output", spec, streams)
        if need_weight and spec.recipe.outputs == "all":
            dw = torch.ops.dpquant.sample_grad_sum(
                grad=grad, x=x, weight=weight, keys=keys, samples=samples, **static_arguments(spec)
            )
        elif need_weight:
            dw = turned(_SEALED_SITE.rounded_grad_weight(grad, x, weight, spec, streams), spec)
        if need_bias:
            db = bias_grad(grads[0], spec)
        return dx, dw, db, None, None, None


# Kept as one call by Dynamo and traced through by AOTAutograd: its Python is not for Dynamo, its operations fuse.
@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
@by_name(
    Signature.parse(
        "low_precision_site",
        f"(Tensor x, Tensor weight, Tensor? bias, Tensor keys, Tensor samples, {STATIC}) -> Tensor",
    )
)
def low_precision_site(
    x: Tensor, weight: Tensor, bias: Tensor | None, keys: Tensor, samples: Tensor, rest: Mapping[str, Any]
) -> Tensor:
    """`dpquant::site` with the switch on: the same bits, written out for whole-graph compilation."""
    apply: Any = _LowPrecisionSite.apply
    x = x.to(weight.dtype) if torch.is_autocast_enabled(x.device.type) else x
    result = apply(x, weight, bias, keys, samples, call_of(rest))
    assert isinstance(result, Tensor)
    return result


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
@by_name(Signature.parse("bfloat16_site", f"(Tensor x, Tensor weight, Tensor? bias, {STATIC}) -> Tensor"))
def bfloat16_site(x: Tensor, weight: Tensor, bias: Tensor | None, rest: Mapping[str, Any]) -> Tensor:
    """`dpquant::site` with products in bfloat16; it draws no bits, so its site is always 0."""
    table = site_arguments(_standing(Precision.BFLOAT16), call_of(rest))
    result: Tensor = torch.ops.dpquant.site(x=x, weight=weight, bias=bias, **table)
    return result
