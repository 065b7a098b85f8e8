"""The reference backend: every product of a quantized site in plain torch, on any device.

    forward      y  = op(Q(x), Q(w)) + b
    grad_input   dx = op_dgrad(Q(dy), Q(w))
    grad_weight  dw = op_wgrad(Q(dy), Q(x))

Each of x, w and dy is rounded once per step: the bits are a function of (seed, step, site, role, sample, element),
so the same rounded x serves forward and grad_weight, and no pass keeps random state. The recipe says how each is
rounded; with its Hadamard transform the operands of a linear's grad_weight are rounded apart, after the transform. The
bias and its gradient stay in full precision. This file is the numerics that every other backend is tested against.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dpquant_compile.backends.reference.clipped_site import ClippedSite
from dpquant_compile.backends.reference.products import FULL, Products, add_bias, full_grad_params
from dpquant_compile.backends.registry import Kernel, Operand, Shapes, SiteCall, Streams, register_kernel
from dpquant_compile.numerics.hadamard import transform_places
from dpquant_compile.numerics.operand_spec import OperandSpec
from dpquant_compile.numerics.quantize import from_samples, quantize_values, to_samples
from dpquant_compile.numerics.random_bits import ROLES, fold
from dpquant_compile.sites import BatchAxis

__all__ = ["REFERENCE_SITE", "EmulatedSite", "Quantizer", "key_of"]

Quantizer = Callable[[Tensor, OperandSpec, Tensor, Tensor, BatchAxis | None, int], Tensor]


@dataclass(frozen=True)
class EmulatedSite(ClippedSite):
    """The products of rounded operands, in full-precision arithmetic; `quantizer` does the rounding."""

    quantizer: Quantizer
    products: Products = FULL

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: SiteCall, streams: Streams) -> Tensor:
        x, weight = self.input(x, call, streams), self.weight(weight, call, streams)
        return self.rounded_product(x, weight, bias, call, streams)

    def grad_input(self, grad: Tensor, x: Tensor, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        grad, weight = self.grad(grad, call, streams), self.weight(weight, call, streams)
        return self.rounded_grad_input(grad, x, weight, call, streams)

    def grad_weight(self, grad: Tensor, x: Tensor, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        grad, x = (self.summed(part, role, call, streams) for part, role in ((grad, "grad_output"), (x, "input")))
        return self.rounded_grad_weight(grad, x, weight, call, streams)

    # The products of operands that are rounded already

    def rounded_product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, call: SiteCall, streams: Streams
    ) -> Tensor:
        y = self.products.forward(call.op, call.geometry, x, weight, None)
        if bias is not None:
            y = add_bias(y, bias, call.geometry)
        return y if call.recipe.outputs == "none" else self._activation(y, "output", call, streams, call.output_axis)

    def rounded_grad_input(self, grad: Tensor, x: Tensor, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        dx = self.products.grad_input(call.geometry, grad, x, weight)
        return dx if call.recipe.outputs == "none" else self._activation(dx, "grad_input", call, streams, call.axis)

    def rounded_grad_weight(self, grad: Tensor, x: Tensor, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        if call.recipe.outputs == "all":
            return self.summed_sample_grads(grad, x, weight, call, streams)
        return self.products.grad_params(call.geometry, grad, x, weight, (True, False))[0]

    def summed_sample_grads(self, grad: Tensor, x: Tensor, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        """Σᵢ Q(dwᵢ): one sample's gradient at a time, so that no [batch, weight] tensor is ever held."""
        total = torch.zeros_like(weight)
        xs, grads = to_samples(x, call.axis), to_samples(grad, call.output_axis)
        if call.geometry is not None:
            # The images of one sample, however they were folded into the batch.
            count = xs.shape[0]
            xs = xs.reshape(count, x.shape[0] // max(count, 1), *x.shape[1:])
            grads = grads.reshape(count, grad.shape[0] // max(count, 1), *grad.shape[1:])
        for i in range(xs.shape[0]):
            dw, _ = full_grad_params(call.geometry, grads[i], xs[i], weight, (True, False))
            total += self.sample_grad(dw[None], call, Streams(streams.keys, streams.samples[i : i + 1]))[0]
        return total

    # Operands of private programs: the rounded values themselves. Where the weight gradient takes others than the
    # products do, both are kept, one after the other.

    def operand(self, x: Tensor, role: str, call: SiteCall, streams: Streams) -> Operand:
        rounded = self.input(x, call, streams) if role == "input" else self.grad(x, call, streams)
        if _transforms(call):
            return Operand(torch.stack((rounded, self.summed(x, role, call, streams))), x.new_empty(0))
        like = torch.empty_like(x)  # the layout of `empty_operand`, which is what a traced program takes it to be
        return Operand(rounded if rounded.stride() == like.stride() else like.copy_(rounded), x.new_empty(0))

    def packed(self, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        return self.weight(weight, call, streams).contiguous()  # as `empty_packed` lies

    def empty_operand(self, x: Tensor, call: SiteCall, batch: int) -> Operand:
        codes = x.new_empty((2, *x.shape)) if _transforms(call) else torch.empty_like(x)
        return Operand(codes, x.new_empty(0))

    def empty_packed(self, weight: Tensor, call: SiteCall) -> Tensor:
        return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)

    def product(
        self, x: Operand, packed: Tensor, bias: Tensor | None, shapes: Shapes, call: SiteCall, streams: Streams
    ) -> Tensor:
        taps = self.taps(shapes, call)
        return self.rounded_product(_multiplied(x, call), taps.weight(packed), bias, taps.call, streams)

    def product_grad_input(
        self, grad: Operand, packed: Tensor, shapes: Shapes, call: SiteCall, streams: Streams
    ) -> Tensor:
        taps = self.taps(shapes, call)
        values = _multiplied(grad, call)
        # Of the input only shape and layout are asked for.
        x = torch.empty(shapes.x, dtype=values.dtype, device=values.device)
        if values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last):
            x = x.contiguous(memory_format=torch.channels_last)
        return self.rounded_grad_input(values, x, taps.weight(packed), taps.call, streams)

    def summed_values(self, operand: Operand, call: SiteCall) -> Tensor:
        return operand.codes[1] if _transforms(call) else operand.codes

    # Rounding

    def input(self, x: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        return self._activation(x, "input", call, streams, call.axis)

    def grad(self, grad: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        return self._activation(grad, "grad_output", call, streams, call.output_axis)

    def summed(self, x: Tensor, role: str, call: SiteCall, streams: Streams) -> Tensor:
        """An operand as the weight gradient takes it, `role` being "input" or "grad_output"."""
        axis = call.axis if role == "input" else call.output_axis
        if not _transforms(call):
            return self._activation(x, role, call, streams, axis)
        view = to_samples(x.detach(), axis)
        rows = transform_places(view.reshape(view.shape[0], math.prod(view.shape[1:-1]), view.shape[-1]))
        key = fold(key_of(role, call, streams), _TRANSFORMED)
        rounded = self.quantizer(rows, call.recipe.of(role), key, streams.samples, BatchAxis(0), 1)
        return from_samples(rounded.reshape(view.shape), axis, x.shape)

    def weight(self, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        # Weights are already private, so they alone may share scales; their bits do not depend on the call.
        key, spec = streams.keys[call.site, ROLES.index("weight")], call.recipe.weight
        only = torch.zeros(1, dtype=torch.int64, device=weight.device)
        rows = weight.flatten(1)
        return self.quantizer(rows, spec, key, only, None, _row_dim(spec)).reshape(weight.shape)

    def sample_grad(self, grads: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        # The gradients [B, *weight] of samples, each with scales and bits of its own.
        key, spec = key_of("grad_weight", call, streams), call.recipe.of("grad_weight")
        rows = grads.flatten(2)
        return self.quantizer(rows, spec, key, streams.samples, BatchAxis(0), 1 + _row_dim(spec)).reshape(grads.shape)

    def _activation(self, x: Tensor, role: str, call: SiteCall, streams: Streams, axis: BatchAxis) -> Tensor:
        features = -1 if call.geometry is None else 1
        return self.quantizer(x, call.recipe.of(role), key_of(role, call, streams), streams.samples, axis, features)


_TRANSFORMED = 1 << 32  # sets the bits of transformed operands apart from those of any call


def _row_dim(spec: OperandSpec) -> int:
    """Of a weight as rows [N, K]: channels are its rows, and blocks lie along them."""
    return 0 if spec.scale == "channel" else 1


def _transforms(call: SiteCall) -> bool:
    """Whether the weight gradient takes other operands than the products do. Those of a conv overlap: it never does."""
    return call.recipe.hadamard and call.geometry is None


def _multiplied(operand: Operand, call: SiteCall) -> Tensor:
    """The values of an operand as the products take them."""
    return operand.codes[0] if _transforms(call) else operand.codes


def key_of(role: str, call: SiteCall, streams: Streams) -> Tensor:
    """The key of a tensor's random bits: by site, role, step and call."""
    return fold(streams.keys[call.site, ROLES.index(role)], call.call)


REFERENCE_SITE = EmulatedSite(quantize_values)
REFERENCE = register_kernel(
    Kernel(
        backend="reference",
        arithmetic=REFERENCE_SITE,
        supports=lambda call, device: None,
        native=False,
        reference=None,
        priority=0,
        note="plain torch operations on any device",
    )
)
