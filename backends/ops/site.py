"""The dpquant:: operators: a conv and a linear that look their precision up when they run.

`policy` is a bool per site, on the CPU. A compiled program holds these operators whole, so the policy is data to it:
changing the table changes what runs next and compiles nothing. Forward and backward get the same table and the
same keys as inputs, so a policy that is set between the two does not tear a step apart.

A site computes in the dtype of its weight. Under autocast that is still so: other operators around it may hand it
activations of less precision, and it takes them.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dpquant_compile.backends.reference.products import full_forward, full_grad_input, full_grad_params
from dpquant_compile.backends.registry import Arithmetic, SiteCall, Streams, choose_kernel
from dpquant_compile.errors import KernelError
from dpquant_compile.numerics.recipe import Recipe
from dpquant_compile.sites import BatchAxis, ConvGeometry

__all__ = [
    "axis_list",
    "bias_grad",
    "fake_forward",
    "fake_grad_input",
    "geometry_list",
    "layout_of",
    "output_shape",
    "plain_dtypes",
    "site_call",
    "streams_of",
]


def axis_list(*axes: BatchAxis) -> list[int]:
    """Batch axes as the flat list of ints that an operator takes."""
    return [value for axis in axes for value in (axis.dim, axis.outer, axis.inner)]


def geometry_list(geometry: ConvGeometry | None) -> list[int]:
    """Stride, padding, dilation and groups in a row; empty for a linear."""
    g = geometry
    return [] if g is None else [*g.stride, *g.padding, *g.dilation, g.groups]


def site_call(
    op: str, site: int, call: int, recipe: str, axes: Sequence[int], geometry: Sequence[int] = ()
) -> SiteCall:
    """The `SiteCall` behind the plain arguments of an operator."""
    return _site_call(op, site, call, recipe, tuple(axes), tuple(geometry))


@lru_cache(maxsize=4096)
def _site_call(
    op: str, site: int, call: int, recipe: str, axes: tuple[int, ...], geometry: tuple[int, ...]
) -> SiteCall:
    rank = (len(geometry) - 1) // 3
    shape = None
    if geometry:
        stride, padding, dilation = (geometry[i * rank : (i + 1) * rank] for i in range(3))
        shape = ConvGeometry(stride, padding, dilation, geometry[-1])
    return SiteCall(op, Recipe.parse(recipe), BatchAxis(*axes[:3]), BatchAxis(*axes[3:]), shape, site, call)


def output_shape(x: Sequence[Any], weight: Sequence[int], geometry: ConvGeometry | None) -> tuple[Any, ...]:
    """The shape of a site's output."""
    if geometry is None:
        return (*x[:-1], weight[0])
    sizes = zip(x[2:], weight[2:], geometry.stride, geometry.padding, geometry.dilation, strict=True)
    return (x[0], weight[0], *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes))


def layout_of(op: str, x: Tensor) -> torch.memory_format:
    """The memory format of a site's results: that of its input, so that fake and real tensors agree on strides."""
    if op == "linear":
        return torch.contiguous_format
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        return torch.channels_last
    if x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d) and not x.is_contiguous():
        return torch.channels_last_3d
    return torch.contiguous_format


def _arithmetic(policy: Tensor, call: SiteCall, device: torch.device) -> Arithmetic | None:
    """What runs this call under `policy`; None for full precision."""
    return choose_kernel(call, device).kernel.arithmetic if bool(policy[call.site].item()) else None


def streams_of(keys: Tensor, samples: Tensor, x: Tensor, axis: BatchAxis) -> Streams:
    """`samples` holds ids for batches up to its length; this batch takes as many as it has samples."""
    count = x.shape[axis.dim] // (axis.outer * axis.inner)
    return Streams(keys, samples if samples.shape[0] == count else samples[:count])


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, call: SiteCall, streams: Streams, low: Arithmetic | None
) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(weight.dtype)
    if x.dtype != weight.dtype:
        raise KernelError(
            f"a {call.op} site got an input of {x.dtype}, but its weight is {weight.dtype}: convert one of them"
        )
    with plain_dtypes(x):
        if low is None:
            y = full_forward(call.op, call.geometry, x, weight, bias)
        else:
            y = low.forward(x, weight, bias, call, streams)
    return y.contiguous(memory_format=layout_of(call.op, x))


def _grad_input(
    grad: Tensor, x: Tensor, weight: Tensor, call: SiteCall, streams: Streams, low: Arithmetic | None
) -> Tensor:
    like = x.to(weight.dtype)
    with plain_dtypes(x):
        if low is None:
            dx = full_grad_input(call.geometry, grad, like, weight)
        else:
            dx = low.grad_input(grad, like, weight, call, streams)
    return dx.to(x.dtype).contiguous(memory_format=layout_of(call.op, x))


def _grad_params(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mask: tuple[bool, bool],
    call: SiteCall,
    streams: Streams,
    low: Arithmetic | None,
) -> tuple[Tensor, Tensor]:
    x = x.to(weight.dtype)
    empty = weight.new_empty(0)
    with plain_dtypes(x):
        if low is None:
            dw, db = full_grad_params(call.geometry, grad, x, weight, mask)
            return dw.contiguous(), db
        dw = low.grad_weight(grad, x, weight, call, streams) if mask[0] else empty
    return dw.contiguous(), bias_grad(grad, call) if mask[1] else empty


def plain_dtypes(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast off: what is computed here is what was said about the result's dtype."""
    # Mostly it is off already, and the context takes longer than some of the operators it is for.
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def bias_grad(grad: Tensor, call: SiteCall) -> Tensor:
    """The gradient of a site's bias, in full precision."""
    features = grad.dim() - 1 if call.geometry is None else 1
    return grad.sum([d for d in range(grad.dim()) if d != features])


@torch.library.custom_op("dpquant::site", mutates_args=())
def site_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    policy: Tensor,
    keys: Tensor,
    samples: Tensor,
    op: str,
    site: int,
    call: int,
    geometry: Sequence[int],
    axes: Sequence[int],
    recipe: str,
) -> Tensor:
    """A conv or a linear in the precision that `policy[site]` asks for.

    op         "conv1d", "conv2d", "conv3d" or "linear"
    call       counts the calls of a layer that is used more than once
    geometry   stride, padding, dilation and groups of a conv in a row; empty for a linear
    axes       the batch axes of x and of the output, see `axis_list`
    """
    spec = site_call(op, site, call, recipe, axes, geometry)
    streams = streams_of(keys, samples, x, spec.axis)
    return _forward(x, weight, bias, spec, streams, _arithmetic(policy, spec, x.device))


@torch.library.custom_op("dpquant::site_grad_input", mutates_args=())
def site_grad_input(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    policy: Tensor,
    keys: Tensor,
    samples: Tensor,
    op: str,
    site: int,
    call: int,
    geometry: Sequence[int],
    axes: Sequence[int],
    recipe: str,
) -> Tensor:
    """The gradient of a site's input."""
    spec = site_call(op, site, call, recipe, axes, geometry)
    streams = streams_of(keys, samples, x, spec.axis)
    return _grad_input(grad, x, weight, spec, streams, _arithmetic(policy, spec, x.device))


@torch.library.custom_op("dpquant::site_grad_params", mutates_args=())
def site_grad_params(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    policy: Tensor,
    keys: Tensor,
    samples: Tensor,
    need_weight: bool,
    need_bias: bool,
    op: str,
    site: int,
    call: int,
    geometry: Sequence[int],
    axes: Sequence[int],
    recipe: str,
) -> tuple[Tensor, Tensor]:
    """The gradients of a site's weight and bias, each an empty tensor where it is not needed."""
    spec = site_call(op, site, call, recipe, axes, geometry)
    streams, mask = streams_of(keys, samples, x, spec.axis), (need_weight, need_bias)
    return _grad_params(grad, x, weight, mask, spec, streams, _arithmetic(policy, spec, x.device))


@site_forward.register_fake
def fake_forward(x: Tensor, weight: Tensor, bias: Any, *rest: Any) -> Tensor:
    """The shape and layout of a site's output."""
    op, _, _, geometry, axes, recipe = rest[-6:]
    # Not torch's own shape function: its choice of algorithm puts guards on the batch size.
    shape = output_shape(x.shape, weight.shape, site_call(op, 0, 0, recipe, axes, geometry).geometry)
    return torch.empty(shape, dtype=weight.dtype, device=x.device, memory_format=layout_of(op, x))


@site_grad_input.register_fake
def fake_grad_input(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """The shape and layout of the gradient of a site's input."""
    return torch.empty_like(x, memory_format=layout_of(rest[-6], x))


@site_grad_params.register_fake
def _fake_grad_params(
    grad: Tensor, x: Tensor, weight: Tensor, p: Any, k: Any, s: Any, need_weight: bool, need_bias: bool, *rest: Any
) -> tuple[Tensor, Tensor]:
    return (
        weight.new_empty(weight.shape if need_weight else (0,)),
        weight.new_empty((weight.shape[0],) if need_bias else (0,)),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, policy, keys, samples, *rest = inputs
    ctx.save_for_backward(x, weight, policy, keys, samples)
    ctx.rest = rest


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    tensors, rest = ctx.saved_tensors, ctx.rest
    need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
    dx = dw = db = None
    if need_x:
        dx = torch.ops.dpquant.site_grad_input(grad, *tensors, *rest)
    if need_weight or need_bias:
        dw, db = torch.ops.dpquant.site_grad_params(grad, *tensors, need_weight, need_bias, *rest)
    return (dx, dw if need_weight else None, db if need_bias else None, *[None] * (3 + len(rest)))


site_forward.register_autograd(_backward, setup_context=_save)
