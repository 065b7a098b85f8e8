"""A conv or a linear whose operands are as they are: the three products, as torch's own operators compute them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpquant_compile.numerics.recipe import Precision
from dpquant_compile.sites import ConvGeometry

__all__ = ["FULL", "Products", "add_bias", "full_forward", "full_grad_input", "full_grad_params", "products_at"]

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


@dataclass(frozen=True)
class Products:
    """The three products of a site; see the functions of these names."""

    forward: Callable[..., Tensor] = full_forward
    grad_input: Callable[..., Tensor] = full_grad_input
    grad_params: Callable[..., tuple[Tensor, Tensor]] = full_grad_params


def bfloat16_forward(op: str, geometry: ConvGeometry | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The site of input and weight rounded to bfloat16; weights of another dtype than float32 are left as they are.

    The library adds products up in float32 and rounds the sums to bfloat16, as under autocast. The bias is added to
    them in float32, which the result is in.
    """
    if weight.dtype != torch.float32:
        return full_forward(op, geometry, x, weight, bias)
    y = full_forward(op, geometry, _rounded(x), _rounded(weight), None)
    return y.to(weight.dtype) if bias is None else add_bias(y, bias, geometry)  # which is float32 by promotion


def bfloat16_grad_input(geometry: ConvGeometry | None, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the site's input, of output gradient and weight rounded to bfloat16; see `bfloat16_forward`."""
    if weight.dtype != torch.float32:
        return full_grad_input(geometry, grad, x, weight)
    like = torch.empty_like(x, dtype=torch.bfloat16)  # only shape and layout are asked for
    return full_grad_input(geometry, _rounded(grad), like, _rounded(weight)).to(weight.dtype)


def _rounded(x: Tensor) -> Tensor:
    # Element by element, to nearest even: no sample meets another.
    return x.to(torch.bfloat16)


FULL = Products()
# Weight gradients stay in full precision: what clipping bounds is what is summed, and steps with and without privacy
# train alike.
_BFLOAT16 = Products(bfloat16_forward, bfloat16_grad_input)


def products_at(precision: int) -> Products:
    """The products of a site that runs by no recipe."""
    return _BFLOAT16 if precision == Precision.BFLOAT16 else FULL


def add_bias(y: Tensor, bias: Tensor, geometry: ConvGeometry | None) -> Tensor:
    """A site's output with its bias."""
    return y + (bias if geometry is None else bias.view(-1, *(1 for _ in geometry.stride)))


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
