"""What clipping needs of a site whose operands are plain numbers: as they are, or rounded and held as floats."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dpquant_compile.backends.reference import per_sample
from dpquant_compile.backends.reference.per_sample import wide_dtype
from dpquant_compile.backends.reference.products import FULL, Products, products_at
from dpquant_compile.backends.registry import Operand, Shapes, SiteCall, Streams
from dpquant_compile.numerics.quantize import to_samples
from dpquant_compile.numerics.recipe import Precision
from dpquant_compile.sites import BatchAxis

__all__ = ["FULL_SITE", "ClippedSite", "FullSite", "Taps", "site_at"]


@dataclass(frozen=True)
class Taps:
    """A call without the taps of its kernel that only ever meet padding; `kept` is None if there are none."""

    call: SiteCall
    kept: tuple[slice, ...] | None

    def weight(self, weight: Tensor) -> Tensor:
        """The weight without them."""
        return weight if self.kept is None else weight[(slice(None), slice(None), *self.kept)].contiguous()

    def shape(self, weight: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the weight without them."""
        return weight if self.kept is None else (*weight[:2], *(part.stop - part.start for part in self.kept))

    def whole(self, grad: Tensor, weight: tuple[int, ...]) -> Tensor:
        """A gradient [N, C, *trimmed] as one of the whole weight: dead taps have none."""
        if self.kept is None:
            return grad
        whole = grad.new_zeros(weight)
        whole[(slice(None), slice(None), *self.kept)] = grad
        return whole

    def whole_by_tap(self, grads: Tensor, weight: tuple[int, ...]) -> Tensor:
        """The same for gradients by tap, [B, N, taps · C]."""
        if self.kept is None:
            return grads
        lead = (*grads.shape[:2],)
        whole = grads.new_zeros((*lead, *weight[2:], weight[1]))
        inside: tuple[Any, ...] = (slice(None), slice(None), *self.kept)
        whole[inside] = grads.reshape(*lead, *self.shape(weight)[2:], weight[1])
        return whole.flatten(2)


@lru_cache(maxsize=4096)
def _taps(shapes: Shapes, call: SiteCall) -> Taps:
    g = call.geometry
    kept = None if g is None else per_sample.trimmed(g, shapes.x[2:], shapes.weight[2:])
    if g is None or kept is None:
        return Taps(call, None)
    padding = tuple(p - t.start * d for p, t, d in zip(g.padding, kept, g.dilation, strict=True))
    return Taps(replace(call, geometry=replace(g, padding=padding)), kept)


class ClippedSite(ABC):
    """Norms, weighted sums and per-sample gradients of operands whose codes are the numbers themselves."""

    def taps(self, shapes: Shapes, call: SiteCall) -> Taps:
        """The call as it is computed."""
        return _taps(shapes, call)

    def summed_values(self, operand: Operand, call: SiteCall) -> Tensor:
        """The numbers of an operand that weight gradients are made of."""
        return operand.codes

    def sample_norms(
        self, x: Operand, grad: Operand, shapes: Shapes, method: str, call: SiteCall, streams: Streams
    ) -> Tensor:
        taps = self.taps(shapes, call)
        xs, grads = self.summed_values(x, call), self.summed_values(grad, call)
        if not self._rounds_grads(call):
            return per_sample.sample_norms(taps.call, xs, grads, taps.shape(shapes.weight), method)
        norms = torch.zeros(shapes.batch, dtype=wide_dtype(xs), device=xs.device)

        def measure(rounded: Tensor, part: slice) -> None:
            norms[part] = rounded.to(norms.dtype).flatten(1).square().sum(1)

        self._each_rounded(xs, grads, shapes, call, streams, measure)
        return norms

    def sample_grads(self, x: Operand, grad: Operand, shapes: Shapes, call: SiteCall, streams: Streams) -> Tensor:
        taps = self.taps(shapes, call)
        operands = self.summed_values(x, call), self.summed_values(grad, call)
        grads = per_sample.sample_grads(taps.call, *operands, taps.shape(shapes.weight))
        grads = taps.whole_by_tap(grads, shapes.weight)
        if not self._rounds_grads(call):
            return grads
        rounded = self.sample_grad(per_sample.as_weight(grads, shapes.weight), call, streams)
        return rounded.flatten(3).transpose(-1, -2).flatten(2) if rounded.dim() > 3 else rounded

    def weighted_grad(
        self, x: Operand, grad: Operand, factors: Tensor, shapes: Shapes, call: SiteCall, streams: Streams
    ) -> Tensor:
        taps, out = self.taps(shapes, call), factors.isnan()
        xs, grads = self.summed_values(x, call), self.summed_values(grad, call)
        # The CPU looks, since there is mostly no such sample; on another device looking would make the host wait.
        if xs.device.type != "cpu" or bool(out.any()):
            # Zero times NaN is NaN, so such a sample's values are taken out, not only its factor.
            factors = factors.masked_fill(out, 0.0)
            xs = xs.masked_fill(per_sample.spread(out, call.axis, xs), 0.0)
            grads = grads.masked_fill(per_sample.spread(out, call.output_axis, grads), 0.0)
        dtype = wide_dtype(xs)
        if not self._rounds_grads(call):
            shape = taps.shape(shapes.weight)
            total = per_sample.weighted_sum(taps.call, xs, grads, shape, factors)
            return taps.whole(total.to(dtype), shapes.weight)
        total = torch.zeros(shapes.weight, dtype=dtype, device=xs.device)

        def add(rounded: Tensor, part: slice) -> None:
            total.add_(torch.einsum("b,b...->...", factors[part].to(dtype), rounded.to(dtype)))

        self._each_rounded(xs, grads, shapes, call, streams, add)
        return total

    def sample_factors(self, x: Operand, grad: Operand, shapes: Shapes, call: SiteCall) -> tuple[Tensor, Tensor]:
        operands = self.summed_values(x, call), self.summed_values(grad, call)
        left, right = per_sample.factors(call, *operands, shapes.weight)
        return left[:, 0], right[:, 0]

    # Rounded gradients

    def _rounds_grads(self, call: SiteCall) -> bool:
        return call.recipe.outputs == "all"

    @abstractmethod
    def sample_grad(self, grads: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        """The gradients [B, *weight] of samples, rounded."""

    def _each_rounded(
        self,
        x: Tensor,
        grad: Tensor,
        shapes: Shapes,
        call: SiteCall,
        streams: Streams,
        use: Callable[[Tensor, slice], None],
    ) -> None:
        """Hand the rounded gradient of every sample to `use`, a few samples at a time."""
        step = max(1, (16 << 20) // max(4 * torch.Size(shapes.weight).numel(), 1))
        xs, grads = to_samples(x, call.axis), to_samples(grad, call.output_axis)
        taps = self.taps(shapes, call)
        alone = replace(taps.call, axis=BatchAxis(0), output_axis=BatchAxis(0))
        for start in range(0, shapes.batch, step):
            part = slice(start, min(start + step, shapes.batch))
            found = per_sample.sample_grads(alone, xs[part], grads[part], taps.shape(shapes.weight))
            found = per_sample.as_weight(taps.whole_by_tap(found, shapes.weight), shapes.weight)
            use(self.sample_grad(found, call, Streams(streams.keys, streams.samples[part])), part)


@dataclass(frozen=True)
class FullSite(ClippedSite):
    """A layer whose operands are what they are. `products` compute output and input gradient.

    Guarantee: norms, weighted sums and per-sample gradients are those of the unrounded operands in full precision,
    whatever `products` are. So a sample's norm is that of what the weighted sum takes of it.
    """

    products: Products = FULL

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, shapes: Shapes, call: SiteCall) -> Tensor:
        taps = self.taps(shapes, call)
        return self.products.forward(call.op, taps.call.geometry, x, taps.weight(weight), bias)

    def grad_input(self, grad: Tensor, x: Tensor, weight: Tensor, shapes: Shapes, call: SiteCall) -> Tensor:
        taps = self.taps(shapes, call)
        return self.products.grad_input(taps.call.geometry, grad, x, taps.weight(weight))

    def sample_grad(self, grads: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        return grads

    def _rounds_grads(self, call: SiteCall) -> bool:
        return False


FULL_SITE = FullSite()


_BFLOAT16_SITE = FullSite(products_at(Precision.BFLOAT16))


def site_at(precision: int) -> FullSite:
    """What runs a site that runs by no recipe."""
    return _BFLOAT16_SITE if precision == Precision.BFLOAT16 else FULL_SITE
