"""The dpquant:: operators: a conv and a linear that look their precision up when they run.

`policy` is a `Precision` per site, on the CPU. A compiled program holds these operators whole, so the policy is data to
it: changing the table changes what runs next and compiles nothing. Forward and backward get the same table and the same
keys as inputs, so a policy that is set between the two does not tear a step apart.

A site computes in the dtype of its weight, and in bfloat16 where the policy says so. Under autocast that is still so:
other operators around it may hand it activations of less precision, and it takes them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpquant_compile.backends.reference.products import Products, products_at
from dpquant_compile.backends.registry import Arithmetic, SiteCall, Streams
from dpquant_compile.backends.rotated_site import arithmetic_of
from dpquant_compile.backends.site_args import Signature, by_name, grads_in_order, named_args, signature_of
from dpquant_compile.errors import KernelError
from dpquant_compile.numerics.recipe import Recipe
from dpquant_compile.sites import BatchAxis, ConvGeometry

__all__ = [
    "STATIC",
    "TABLE",
    "axis_list",
    "bias_grad",
    "call_of",
    "call_of_key",
    "geometry_list",
    "layout_of",
    "output_shape",
    "plain_dtypes",
    "site_arguments",
    "site_call",
    "site_fake",
    "site_operator",
    "static_arguments",
    "static_key",
    "streams_of",
]


# What the operators of a site take beside tensors of their own: the link table, and what is fixed about the call.
# A field of a call is a word here, a parameter of `site_call` and an entry of `static_arguments`; all else follows.
TABLE = "Tensor policy, Tensor keys, Tensor samples"
STATIC = "str op, int site, int call, int[] geometry, int[] axes, str recipe"
_STATIC_NAMES = Signature.parse("static", f"({STATIC}) -> ()").names
_static_values = itemgetter(*_STATIC_NAMES)


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
    shape = None
    if geometry:
        *sizes, groups = geometry
        rank = len(sizes) // 3
        stride, padding, dilation = (tuple(sizes[i * rank : (i + 1) * rank]) for i in range(3))
        shape = ConvGeometry(stride, padding, dilation, groups)
    return SiteCall(op, Recipe.parse(recipe), BatchAxis(*axes[:3]), BatchAxis(*axes[3:]), shape, site, call)


def static_arguments(call: SiteCall) -> dict[str, Any]:
    """The plain arguments of an operator that `site_call` makes `call` of."""
    return {
        "op": call.op,
        "site": call.site,
        "call": call.call,
        "geometry": geometry_list(call.geometry),
        "axes": axis_list(call.axis, call.output_axis),
        "recipe": str(call.recipe),
    }


def site_arguments(table: Sequence[Tensor], call: SiteCall) -> dict[str, Any]:
    """`table` (policy, keys and sample ids) and `call` as arguments of an operator."""
    policy, keys, samples = table
    return {"policy": policy, "keys": keys, "samples": samples, **static_arguments(call)}


def static_key(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """What is fixed about a call, among the arguments of an operator, as a key that can be hashed."""
    return tuple([tuple(value) if isinstance(value, list) else value for value in _static_values(arguments)])


@lru_cache(maxsize=4096)
def call_of_key(key: tuple[Any, ...]) -> SiteCall:
    """The call that `static_key` gives this key."""
    return site_call(**dict(zip(_STATIC_NAMES, key, strict=True)))


def call_of(arguments: Mapping[str, Any]) -> SiteCall:
    """The call that is among the arguments of an operator."""
    return call_of_key(static_key(arguments))


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


class _Running(NamedTuple):
    """A call as it runs: by `low`, or where no recipe rounds its operands by `products`."""

    call: SiteCall
    low: Arithmetic | None
    products: Products


def _running(policy: Tensor, call: SiteCall, device: torch.device) -> _Running:
    precision = int(policy[call.site].item())
    running, products = call.running(precision), products_at(precision)
    if running is None:
        return _Running(call, None, products)
    return _Running(running, arithmetic_of(call, device), products)


def streams_of(keys: Tensor, samples: Tensor, x: Tensor, axis: BatchAxis) -> Streams:
    """`samples` holds ids for batches up to its length; this batch takes as many as it has samples."""
    count = x.shape[axis.dim] // (axis.outer * axis.inner)
    return Streams(keys, samples if samples.shape[0] == count else samples[:count])


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, this: _Running, streams: Streams) -> Tensor:
    call = this.call
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(weight.dtype)
    if x.dtype != weight.dtype:
        raise KernelError(
            f"a {call.op} site got an input of {x.dtype}, but its weight is {weight.dtype}: convert one of them"
        )
    with plain_dtypes(x):
        if this.low is None:
            y = this.products.forward(call.op, call.geometry, x, weight, bias)
        else:
            y = this.low.forward(x, weight, bias, call, streams)
    return y.contiguous(memory_format=layout_of(call.op, x))


def _grad_input(grad: Tensor, x: Tensor, weight: Tensor, this: _Running, streams: Streams) -> Tensor:
    call, like = this.call, x.to(weight.dtype)
    with plain_dtypes(x):
        if this.low is None:
            dx = this.products.grad_input(call.geometry, grad, like, weight)
        else:
            dx = this.low.grad_input(grad, like, weight, call, streams)
    return dx.to(x.dtype).contiguous(memory_format=layout_of(call.op, x))


def _grad_params(
    grad: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool], this: _Running, streams: Streams
) -> tuple[Tensor, Tensor]:
    call, x = this.call, x.to(weight.dtype)
    empty = weight.new_empty(0)
    with plain_dtypes(x):
        if this.low is None:
            dw, db = this.products.grad_params(call.geometry, grad, x, weight, mask)
            return dw.contiguous(), db
        dw = this.low.grad_weight(grad, x, weight, call, streams) if mask[0] else empty
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


def site_operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Define a custom operator whose implementation gets its arguments by name, see `by_name`."""

    def register(function: Callable[..., Any]) -> Any:
        run = by_name(Signature.parse(f"dpquant::{name}", schema))(function)
        return torch.library.custom_op(f"dpquant::{name}", run, mutates_args=(), schema=schema)

    return register


def site_fake(operator: Any) -> Callable[[Callable[..., Any]], Any]:
    """Say what the results of a `site_operator` look like, for tracing."""
    return lambda function: operator.register_fake(by_name(signature_of(operator._opoverload))(function))


@site_operator("site", f"(Tensor x, Tensor weight, Tensor? bias, {TABLE}, {STATIC}) -> Tensor")
def site_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    policy: Tensor,
    keys: Tensor,
    samples: Tensor,
    rest: Mapping[str, Any],
) -> Tensor:
    """A conv or a linear in the precision that `policy[site]` asks for.

    op         "conv1d", "conv2d", "conv3d" or "linear"
    call       counts the calls of a layer that is used more than once
    geometry   stride, padding, dilation and groups of a conv in a row; empty for a linear
    axes       the batch axes of x and of the output, see `axis_list`
    """
    this = _running(policy, call_of(rest), x.device)
    return _forward(x, weight, bias, this, streams_of(keys, samples, x, this.call.axis))


@site_operator("site_grad_input", f"(Tensor grad, Tensor x, Tensor weight, {TABLE}, {STATIC}) -> Tensor")
def site_grad_input(
    grad: Tensor, x: Tensor, weight: Tensor, policy: Tensor, keys: Tensor, samples: Tensor, rest: Mapping[str, Any]
) -> Tensor:
    """The gradient of a site's input."""
    this = _running(policy, call_of(rest), x.device)
    return _grad_input(grad, x, weight, this, streams_of(keys, samples, x, this.call.axis))


@site_operator(
    "site_grad_params",
    f"(Tensor grad, Tensor x, Tensor weight, {TABLE}, bool need_weight, bool need_bias, {STATIC}) -> (Tensor, Tensor)",
)
def site_grad_params(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    policy: Tensor,
    keys: Tensor,
    samples: Tensor,
    need_weight: bool,
    need_bias: bool,
    rest: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:
    """The gradients of a site's weight and bias, each an empty tensor where it is not needed."""
    this, mask = _running(policy, call_of(rest), x.device), (need_weight, need_bias)
    return _grad_params(grad, x, weight, mask, this, streams_of(keys, samples, x, this.call.axis))


@site_fake(site_forward)
def _fake_forward(x: Tensor, weight: Tensor, rest: Mapping[str, Any]) -> Tensor:
    call = call_of(rest)
    # Not torch's own shape function: its choice of algorithm puts guards on the batch size.
    shape = output_shape(x.shape, weight.shape, call.geometry)
    return torch.empty(shape, dtype=weight.dtype, device=x.device, memory_format=layout_of(call.op, x))


@site_fake(site_grad_input)
def _fake_grad_input(x: Tensor, op: str, rest: Mapping[str, Any]) -> Tensor:
    return torch.empty_like(x, memory_format=layout_of(op, x))


@site_fake(site_grad_params)
def _fake_grad_params(
    weight: Tensor, need_weight: bool, need_bias: bool, rest: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    return (
        weight.new_empty(weight.shape if need_weight else (0,)),
        weight.new_empty((weight.shape[0],) if need_bias else (0,)),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    given = named_args(_SITE, inputs)
    ctx.save_for_backward(given.x, given.weight, given.policy, given.keys, given.samples)
    ctx.call = call_of(vars(given))


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, *table = ctx.saved_tensors
    need, rest = named_args(_SITE, ctx.needs_input_grad), site_arguments(table, ctx.call)
    grads: dict[str, Tensor] = {}
    if need.x:
        grads["x"] = torch.ops.dpquant.site_grad_input(grad=grad, x=x, weight=weight, **rest)
    if need.weight or need.bias:
        dw, db = torch.ops.dpquant.site_grad_params(
            grad=grad, x=x, weight=weight, need_weight=need.weight, need_bias=need.bias, **rest
        )
        grads |= ({"weight": dw} if need.weight else {}) | ({"bias": db} if need.bias else {})
    return grads_in_order(_SITE, **grads)


_SITE = torch.ops.dpquant.site.default
site_forward.register_autograd(_backward, setup_context=_save)
