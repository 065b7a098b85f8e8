"""A conv or a linear in full precision: the three products, as torch's own operators compute them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dpquant_compile.sites import ConvGeometry

__all__ = ["full_forward", "full_grad_input", "full_grad_params"]

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
