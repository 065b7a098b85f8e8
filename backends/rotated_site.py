"""Linears whose input and weight are rounded after a rotation of their features, whatever kernel multiplies them.

    y = W u = (W H) (H u)        dx = H ((W H)ᵀ dy)        Gᵢ = (Dᵢᵀ (Uᵢ H)) H

for the symmetric orthogonal H of `numerics/hadamard.py`. A kernel computes the bracketed products of what it is given;
this file rotates what goes in and what comes out, of calls whose recipe says so.

Guarantee: a rotation mixes the features of one place of one sample, so scales, statistics and random bits stay within
their sample as they are without it. Norms are at least those of the gradients that are summed: H keeps them, and what
its rounding may add is added to the norms.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpquant_compile.backends.registry import Arithmetic, Operand, Shapes, SiteCall, Streams, choose_kernel
from dpquant_compile.numerics.hadamard import Room, Rotation, rotate_features, rotation_block

__all__ = ["RotatedSite", "arithmetic_of", "turned"]

# The rotation of a gradient rounds each element once a level, six times in all, each time by a share of 2^-24.
_SLACK = 1 + 2.0**-19


@dataclass(frozen=True)
class RotatedSite:
    """`inner` on rotated operands, see `Arithmetic`; calls of convs, and of recipes without rotation, as they are."""

    inner: Arithmetic
    rotate: Rotation

    # Without clipping

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: SiteCall, streams: Streams) -> Tensor:
        return self.inner.forward(self._turned(x, call), self._turned(weight, call), bias, call, streams)

    def grad_input(self, grad: Tensor, x: Tensor, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        return self._turned(self.inner.grad_input(grad, x, self._turned(weight, call), call, streams), call)

    def grad_weight(self, grad: Tensor, x: Tensor, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        return self._turned(self.inner.grad_weight(grad, self._turned(x, call), weight, call, streams), call)

    # Operands

    def operand(self, x: Tensor, role: str, call: SiteCall, streams: Streams) -> Operand:
        return self.inner.operand(self._turned(x, call, "lent") if role == "input" else x, role, call, streams)

    def packed(self, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        return self.inner.packed(self._turned(weight, call, "lent"), call, streams)

    def empty_operand(self, x: Tensor, call: SiteCall, batch: int) -> Operand:
        return self.inner.empty_operand(x, call, batch)

    def empty_packed(self, weight: Tensor, call: SiteCall) -> Tensor:
        return self.inner.empty_packed(weight, call)

    # Products

    def product(
        self, x: Operand, packed: Tensor, bias: Tensor | None, shapes: Shapes, call: SiteCall, streams: Streams
    ) -> Tensor:
        return self.inner.product(x, packed, bias, shapes, call, streams)

    def product_grad_input(
        self, grad: Operand, packed: Tensor, shapes: Shapes, call: SiteCall, streams: Streams
    ) -> Tensor:
        return self._turned(self.inner.product_grad_input(grad, packed, shapes, call, streams), call, "same")

    def sample_norms(
        self, x: Operand, grad: Operand, shapes: Shapes, method: str, call: SiteCall, streams: Streams
    ) -> Tensor:
        norms = self.inner.sample_norms(x, grad, shapes, method, call, streams)
        return norms * _SLACK if _turns(shapes.x[-1], call) else norms

    def sample_grads(self, x: Operand, grad: Operand, shapes: Shapes, call: SiteCall, streams: Streams) -> Tensor:
        return self._turned(self.inner.sample_grads(x, grad, shapes, call, streams), call, "same")

    def weighted_grad(
        self, x: Operand, grad: Operand, factors: Tensor, shapes: Shapes, call: SiteCall, streams: Streams
    ) -> Tensor:
        return self._turned(self.inner.weighted_grad(x, grad, factors, shapes, call, streams), call, "same")

    def sample_factors(self, x: Operand, grad: Operand, shapes: Shapes, call: SiteCall) -> tuple[Tensor, Tensor]:
        left, right = self.inner.sample_factors(x, grad, shapes, call)
        return left, self._turned(right, call)

    def _turned(self, x: Tensor, call: SiteCall, room: Room = "new") -> Tensor:
        """Operands that a kernel rounds at once may be "lent"; its results, which nobody else has, be in the "same"."""
        return turned(x, call, self.rotate, room)


def turned(x: Tensor, call: SiteCall, rotate: Rotation = rotate_features, room: Room = "new") -> Tensor:
    """A tensor whose last dimension is the features of a call, rotated where the call's recipe says so."""
    if not _turns(x.shape[-1], call):
        return x
    # Of float16 and bfloat16 in float32: six sums would lose most of their digits.
    wide = torch.promote_types(x.dtype, torch.float32)
    return rotate(x.detach().to(wide), room).to(x.dtype)


def _turns(features: int, call: SiteCall) -> bool:
    return call.recipe.rotated and call.geometry is None and rotation_block(features) > 0


def arithmetic_of(call: SiteCall, device: torch.device) -> Arithmetic:
    """What computes a call on a device, at any precision that a recipe of it sets."""
    kernel = choose_kernel(call, device).kernel
    return kernel.arithmetic if call.geometry is not None else RotatedSite(kernel.arithmetic, kernel.rotate)
