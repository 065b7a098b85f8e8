"""The dpquant:: operators of private training: a site with a prepared weight, and what clipping needs of its gradient.

`policy`, `keys` and `samples` are those of `dpquant::site`. The weight comes rounded already where the policy asks for
it: that is done once per optimizer step, not once per micro-batch. A site number of -1 is a layer that is no site and
stays in full precision. Where a sample's factor is NaN, that sample is left out, whatever its values are.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpquant_compile.backends import per_sample
from dpquant_compile.backends.ops import fake_forward, fake_grad_input, layout_of, plain_dtypes, site_call, streams_of
from dpquant_compile.backends.reference import full_forward, full_grad_input
from dpquant_compile.backends.registry import Arithmetic, SiteCall, Streams, choose_kernel
from dpquant_compile.quantize import to_samples
from dpquant_compile.sites import BatchAxis

__all__ = ["prepare_weight"]


def prepare_weight(weight: Tensor, keys: Tensor, low: bool, call: SiteCall) -> Tensor:
    """The weight as this step's products take it: rounded, or itself."""
    if not low:
        return weight.detach()
    chosen = choose_kernel(call, weight.device).kernel.arithmetic
    with torch.no_grad():
        return chosen.weight(weight.detach(), call, Streams(keys, keys.new_zeros(0)))


@torch.library.custom_op("dpquant::computed_weight", mutates_args=())
def computed_weight(weight: Tensor, policy: Tensor, keys: Tensor, site: int, recipe: str) -> Tensor:
    """`prepare_weight` for a weight that forward computes of parameters, and so cannot be prepared before it."""
    call = site_call("linear", site, 0, recipe, [0, 1, 1, 0, 1, 1])
    return prepare_weight(weight, keys, bool(policy[site].item()), call).clone(memory_format=torch.contiguous_format)


@computed_weight.register_fake
def _fake_computed(weight: Tensor, policy: Tensor, keys: Tensor, site: int, recipe: str) -> Tensor:
    return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


class _Site:
    """The operands of one call of an operator, decoded: `low` is what runs it, None in full precision.

    `call` and `taps` are for a kernel without the taps that only ever meet padding.
    """

    def __init__(
        self, x: Tensor, weight: Tensor, policy: Tensor, keys: Tensor, samples: Tensor, static: Sequence[Any]
    ) -> None:
        op, site, call, geometry, axes, recipe = static
        self.call = site_call(op, site, call, recipe, axes, geometry)
        self.whole = self.call
        self.taps: tuple[slice, ...] | None = None
        if self.call.geometry is not None:
            self.taps = per_sample.trimmed(self.call.geometry, tuple(x.shape[2:]), tuple(weight.shape[2:]))
            if self.taps is not None:
                g = self.call.geometry
                padding = tuple(p - t.start * d for p, t, d in zip(g.padding, self.taps, g.dilation, strict=True))
                self.call = replace(self.call, geometry=replace(g, padding=padding))
        self.streams = streams_of(keys, samples, x, self.call.axis)
        on = site >= 0 and bool(policy[site].item())
        self.low: Arithmetic | None = choose_kernel(self.call, x.device).kernel.arithmetic if on else None

    def trim(self, weight: Tensor) -> Tensor:
        """The weight without dead taps."""
        return weight if self.taps is None else weight[(slice(None), slice(None), *self.taps)].contiguous()

    def untrim(self, grads: Tensor, weight: Tensor) -> Tensor:
        """Gradients [..., *trimmed] as gradients of the whole weight: dead taps have none."""
        if self.taps is None:
            return grads
        lead = grads.shape[: grads.dim() - weight.dim()]
        whole = grads.new_zeros((*lead, *weight.shape))
        inside: tuple[Any, ...] = (..., slice(None), slice(None), *self.taps)
        whole[inside] = grads
        return whole

    def operands(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Input and output gradient as the products of this precision take them."""
        if self.low is None:
            return x, grad
        return self.low.input(x, self.call, self.streams), self.low.grad(grad, self.call, self.streams)

    @property
    def rounds_grads(self) -> bool:
        return self.low is not None and self.call.recipe.outputs == "all"

    def rounded_grads(self, x: Tensor, grad: Tensor, weight: Tensor, use: Callable[[Tensor, slice], None]) -> None:
        """Hand the rounded gradient of every sample to `use`, a few samples at a time."""
        assert self.low is not None
        batch = self.streams.samples.shape[0]
        step = max(1, (16 << 20) // max(4 * weight.numel(), 1))
        xs, all_grads = to_samples(x, self.call.axis), to_samples(grad, self.call.output_axis)
        call = replace(self.call, axis=BatchAxis(0), output_axis=BatchAxis(0))
        for start in range(0, batch, step):
            part = slice(start, min(start + step, batch))
            grads = per_sample.sample_grads(call, xs[part], all_grads[part], tuple(self.trim(weight).shape))
            grads = self.untrim(grads, weight)
            streams = Streams(self.streams.keys, self.streams.samples[part])
            use(self.low.sample_grad(grads, self.call, streams), part)


@torch.library.custom_op("dpquant::private_site", mutates_args=())
def private_site(
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
    """`dpquant::site` with a prepared weight."""
    this = _Site(x, weight, policy, keys, samples, (op, site, call, geometry, axes, recipe))
    with plain_dtypes(x):
        x = x.to(weight.dtype)
        if this.low is None:
            y = full_forward(op, this.call.geometry, x, this.trim(weight), bias)
        else:
            rounded = this.low.input(x, this.call, this.streams)
            y = this.low.product(rounded, this.trim(weight), bias, this.call, this.streams)
    return y.contiguous(memory_format=layout_of(op, x))


@torch.library.custom_op("dpquant::private_grad_input", mutates_args=())
def private_grad_input(
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
    """`dpquant::site_grad_input` with a prepared weight."""
    this = _Site(x, weight, policy, keys, samples, (op, site, call, geometry, axes, recipe))
    with plain_dtypes(x):
        if this.low is None:
            dx = full_grad_input(this.call.geometry, grad, x.to(weight.dtype), this.trim(weight))
        else:
            rounded = this.low.grad(grad, this.call, this.streams)
            dx = this.low.product_grad_input(rounded, x, this.trim(weight), this.call, this.streams)
    return dx.to(x.dtype).contiguous(memory_format=layout_of(op, x))


@torch.library.custom_op("dpquant::sample_norms", mutates_args=())
def sample_norms(
    x: Tensor,
    grad: Tensor,
    weight: Tensor,
    policy: Tensor,
    keys: Tensor,
    samples: Tensor,
    method: str,
    op: str,
    site: int,
    call: int,
    geometry: Sequence[int],
    axes: Sequence[int],
    recipe: str,
) -> Tensor:
    """‖Gᵢ‖² [B] of the weight's per-sample gradients, never less than what the weighted sum takes of a sample."""
    this = _Site(x, weight, policy, keys, samples, (op, site, call, geometry, axes, recipe))
    with plain_dtypes(x):
        x, grad = this.operands(x.to(weight.dtype), grad)
        if not this.rounds_grads:
            return per_sample.sample_norms(this.call, x, grad, tuple(this.trim(weight).shape), method)
        norms = torch.zeros(this.streams.samples.shape[0], dtype=_wide(x), device=x.device)

        def measure(grads: Tensor, part: slice) -> None:
            norms[part] = grads.to(norms.dtype).flatten(1).square().sum(1)

        this.rounded_grads(x, grad, weight, measure)
        return norms


@torch.library.custom_op("dpquant::sample_grads", mutates_args=())
def sample_grads(
    x: Tensor,
    grad: Tensor,
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
    """Gᵢ [B, *weight]: for weights so small, or used so, that they are better kept."""
    this = _Site(x, weight, policy, keys, samples, (op, site, call, geometry, axes, recipe))
    with plain_dtypes(x):
        x, grad = this.operands(x.to(weight.dtype), grad)
        grads = per_sample.sample_grads(this.call, x, grad, tuple(this.trim(weight).shape))
        grads = this.untrim(grads, weight)
        if this.rounds_grads:
            assert this.low is not None
            grads = this.low.sample_grad(grads, this.call, this.streams)
    return grads.contiguous()


@torch.library.custom_op("dpquant::weighted_grad", mutates_args=())
def weighted_grad(
    x: Tensor,
    grad: Tensor,
    weight: Tensor,
    factors: Tensor,
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
    """Σᵢ factorᵢ Gᵢ, leaving samples out whose factor is NaN."""
    this = _Site(x, weight, policy, keys, samples, (op, site, call, geometry, axes, recipe))
    with plain_dtypes(x):
        x, grad = this.operands(x.to(weight.dtype), grad)
        out = factors.isnan()
        if bool(out.any()):
            # Zero times NaN is NaN, so such a sample's values are taken out, not only its factor.
            factors = factors.masked_fill(out, 0.0)
            x = x.masked_fill(per_sample.spread(out, this.call.axis, x), 0.0)
            grad = grad.masked_fill(per_sample.spread(out, this.call.output_axis, grad), 0.0)
        if not this.rounds_grads:
            total = per_sample.weighted_sum(this.call, x, grad, this.trim(weight), factors)
            return this.untrim(total.to(_wide(x)), weight).contiguous()
        total = torch.zeros(weight.shape, dtype=_wide(x), device=x.device)

        def add(grads: Tensor, part: slice) -> None:
            total.add_(torch.einsum("b,b...->...", factors[part].to(total.dtype), grads.to(total.dtype)))

        this.rounded_grads(x, grad, weight, add)
        return total


@torch.library.custom_op("dpquant::sample_factors", mutates_args=())
def sample_factors(
    x: Tensor,
    grad: Tensor,
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
) -> tuple[Tensor, Tensor]:
    """D [B, T, N] and U [B, T, K] with Gᵢ = Dᵢᵀ Uᵢ, for a weight that is used at several places."""
    this = _Site(x, weight, policy, keys, samples, (op, site, call, geometry, axes, recipe))
    with plain_dtypes(x):
        x, grad = this.operands(x.to(weight.dtype), grad)
        left, right = per_sample.factors(this.whole, x, grad, tuple(weight.shape))
    return left[:, 0].clone(memory_format=torch.contiguous_format), right[:, 0].clone(
        memory_format=torch.contiguous_format
    )


def _wide(x: Tensor) -> torch.dtype:
    """Clipping, sums and noise are in float32 or wider."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _batch(x: Tensor, axes: Sequence[int]) -> Any:
    return x.shape[axes[0]] // (axes[1] * axes[2])


private_site.register_fake(fake_forward)
private_grad_input.register_fake(fake_grad_input)


@sample_norms.register_fake
def _fake_norms(x: Tensor, grad: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return torch.empty(_batch(x, rest[-2]), dtype=_wide(weight), device=x.device)


@sample_grads.register_fake
def _fake_grads(x: Tensor, grad: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return torch.empty((_batch(x, rest[-2]), *weight.shape), dtype=_wide(weight), device=x.device)


@weighted_grad.register_fake
def _fake_weighted(x: Tensor, grad: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return torch.empty(weight.shape, dtype=_wide(weight), device=x.device)


@sample_factors.register_fake
def _fake_factors(x: Tensor, grad: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch = _batch(x, rest[-2])
    count = grad.numel() // (batch * weight.shape[0])
    k = weight.numel() // weight.shape[0]
    dtype = _wide(weight)
    return (
        torch.empty((batch, count, weight.shape[0]), dtype=dtype, device=x.device),
        torch.empty((batch, count, k), dtype=dtype, device=x.device),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, policy, keys, samples, *rest = inputs
    ctx.save_for_backward(x, weight, policy, keys, samples)
    ctx.rest = rest


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    # The gradients of weight and bias are not autograd's here: clipping takes them from x and grad.
    dx = None
    if ctx.needs_input_grad[0]:
        dx = torch.ops.dpquant.private_grad_input(grad, *ctx.saved_tensors, *ctx.rest)
    return (dx, *[None] * (5 + len(ctx.rest)))


private_site.register_autograd(_backward, setup_context=_save)
