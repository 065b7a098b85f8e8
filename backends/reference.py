"""The reference backend: every product of a quantized site in plain torch, on any device.

    forward      y  = op(Q(x), Q(w)) + b
    grad_input   dx = op_dgrad(Q(dy), Q(w))
    grad_weight  dw = op_wgrad(Q(dy), Q(x))

Each of x, w and dy is rounded once per step: the bits are a function of (seed, step, site, role, sample, element),
so the same rounded x serves forward and grad_weight, and no pass keeps random state. The bias and its gradient
stay in full precision. This file is the numerics that every other backend is tested against.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpquant_compile.backends.registry import Kernel, SiteCall, Streams, register_kernel
from dpquant_compile.bits import ROLES, fold
from dpquant_compile.quantize import quantize_values, to_samples
from dpquant_compile.sites import BatchAxis, ConvGeometry

__all__ = [
    "REFERENCE_SITE",
    "EmulatedSite",
    "Products",
    "Quantizer",
    "full_forward",
    "full_grad_input",
    "full_grad_params",
]

Quantizer = Callable[[Tensor, str, Tensor, Tensor, BatchAxis | None, int], Tensor]
_CONVS = {"conv1d": F.conv1d, "conv2d": F.conv2d, "conv3d": F.conv3d}


def full_forward(op: str, geometry: ConvGeometry | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The site in full precision."""
    if geometry is None:
        return F.linear(x, weight, bias)
    return _CONVS[op](x, weight, bias, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)


def full_grad_input(geometry: ConvGeometry | None, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the site's input, as autograd computes it for the plain operator."""
    if geometry is None:
        return _rows(grad).mm(weight).reshape(x.shape)
    return _conv_backward(geometry, grad, x, weight, [True, False, False])[0]


def full_grad_params(
    geometry: ConvGeometry | None, grad: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias, as autograd computes them; what `mask` leaves out is an empty tensor."""
    if geometry is None:
        rows = _rows(grad)
        weight_grad = rows.t().mm(_rows(x)) if mask[0] else weight.new_empty(0)
        if not mask[1]:
            return weight_grad, weight.new_empty(0)
        # torch folds the leading dimensions of a contiguous input only, and sums in the order that follows.
        leading = list(range(grad.dim() - 1))
        return weight_grad, rows.sum(0) if x.is_contiguous() else grad.sum(leading) if leading else grad
    _, weight_grad, bias_grad = _conv_backward(geometry, grad, x, weight, [False, *mask])
    return weight_grad if mask[0] else weight.new_empty(0), bias_grad if mask[1] else weight.new_empty(0)


def _rows(x: Tensor) -> Tensor:
    # Not reshape(-1, n): minus one is ambiguous for a batch of no samples.
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _conv_backward(
    geometry: ConvGeometry, grad: Tensor, x: Tensor, weight: Tensor, mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    g = geometry
    rank = len(g.stride)
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        grad, x, weight, [weight.shape[0]], g.stride, g.padding, g.dilation, False, [0] * rank, g.groups, mask
    )
    return result


@dataclass(frozen=True)
class Products:
    """The three products of full-precision operands; see the functions of these names."""

    forward: Callable[..., Tensor] = full_forward
    grad_input: Callable[..., Tensor] = full_grad_input
    grad_params: Callable[..., tuple[Tensor, Tensor]] = full_grad_params


@dataclass(frozen=True)
class EmulatedSite:
    """The three products with rounded operands, in full-precision arithmetic; `quantizer` does the rounding."""

    quantizer: Quantizer
    products: Products = Products()

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: SiteCall, streams: Streams) -> Tensor:
        return self.product(self.input(x, call, streams), self.weight(weight, call, streams), bias, call, streams)

    def grad_input(self, grad: Tensor, x: Tensor, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        grad, weight = self.grad(grad, call, streams), self.weight(weight, call, streams)
        return self.product_grad_input(grad, x, weight, call, streams)

    def grad_weight(self, grad: Tensor, x: Tensor, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        grad, x = self.grad(grad, call, streams), self.input(x, call, streams)
        return self.product_grad_weight(grad, x, weight, call, streams)

    # The products of operands that are rounded already

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: SiteCall, streams: Streams) -> Tensor:
        y = self.products.forward(call.op, call.geometry, x, weight, None)
        if bias is not None:
            y = y + (bias if call.geometry is None else bias.view(-1, *(1 for _ in call.geometry.stride)))
        return y if call.recipe.outputs == "none" else self._activation(y, "output", call, streams, call.output_axis)

    def product_grad_input(self, grad: Tensor, x: Tensor, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        dx = self.products.grad_input(call.geometry, grad, x, weight)
        return dx if call.recipe.outputs == "none" else self._activation(dx, "grad_input", call, streams, call.axis)

    def product_grad_weight(self, grad: Tensor, x: Tensor, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
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

    # Rounding

    def input(self, x: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        return self._activation(x, "input", call, streams, call.axis)

    def grad(self, grad: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        return self._activation(grad, "grad_output", call, streams, call.output_axis)

    def weight(self, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        # Weights are already private, so they alone may share one scale; their bits do not depend on the call.
        key = streams.keys[call.site, ROLES.index("weight")]
        only = torch.zeros(1, dtype=torch.int64, device=weight.device)
        return self.quantizer(weight, call.recipe.format, key, only, None, 1)

    def sample_grad(self, grads: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        # The gradients [B, *weight] of samples, each with its own scale and bits; blocks run along the input features.
        key = _key("grad_weight", call, streams)
        return self.quantizer(grads, call.recipe.format, key, streams.samples, BatchAxis(0), 2)

    def _activation(self, x: Tensor, role: str, call: SiteCall, streams: Streams, axis: BatchAxis) -> Tensor:
        features = -1 if call.geometry is None else 1
        return self.quantizer(x, call.recipe.format, _key(role, call, streams), streams.samples, axis, features)


def _key(role: str, call: SiteCall, streams: Streams) -> Tensor:
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
