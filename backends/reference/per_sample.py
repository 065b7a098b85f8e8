"""Per-sample weight gradients of a conv or a linear, as far as clipping needs them, in plain torch.

The gradient of sample i is Gᵢ = Dᵢᵀ Uᵢ, with Dᵢ [T, N] its output gradients and Uᵢ [T, K] its inputs (unfolded for a
conv), one row per place where the weight was applied. Clipping needs ‖Gᵢ‖² and Σᵢ cᵢ Gᵢ, and neither needs the tensor
[B, N, K]:

    gram     ‖Gᵢ‖² = Σₜₛ (Uᵢ Uᵢᵀ)ₜₛ (Dᵢ Dᵢᵀ)ₜₛ
    direct   Gᵢ itself, a few samples at a time
    kept     Gᵢ itself, kept for the weighted sum, which then costs nothing; for small weights

The gram matrix of a conv's unfolded input is a sum of shifted copies of the gram matrix of its pixels, so nothing is
unfolded for it.

Norms are never too small. Where a norm and the sum it bounds are computed in different ways, rounding could make the
norm of a sample whose terms cancel come out as nearly nothing, and clipping would let it pass unscaled. So the error
that the arithmetic can make is added to the norm: with m = Σₜ ‖uₜ‖‖dₜ‖ ≥ ‖G‖, the gram sum is off by a few ε m².
"""

import itertools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import suggest_memory_format

from dpquant_compile.backends.reference.products import full_grad_params
from dpquant_compile.backends.registry import SiteCall
from dpquant_compile.backends.scratch import scratch
from dpquant_compile.numerics.quantize import to_samples
from dpquant_compile.sites import BatchAxis, ConvGeometry

__all__ = [
    "as_weight",
    "choose_method",
    "factors",
    "places",
    "sample_grads",
    "sample_norms",
    "spread",
    "squares",
    "trimmed",
    "weighted_sum",
    "wide",
    "wide_dtype",
]

# What the sums of a gram matrix may be off by, in units of the dtype's epsilon.
_SLACK = 16.0
# Of a norm and not of its square: the noise of a sum that is computed anew grows with the number of its terms.
_DIRECT_SLACK = 1024.0
# Bytes of unfolded input that are held at a time, and of per-sample gradients that are worth keeping for one weight.
_CHUNK_BYTES = 32 << 20
_KEPT_BYTES = 24 << 20


def wide_dtype(x: Tensor) -> torch.dtype:
    """Norms, clipping, sums and noise are in float32 or wider, whatever a model computes in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    """`x` in `wide_dtype`."""
    return x.to(wide_dtype(x))


def places(weight_shape: tuple[int, ...], output_shape: tuple[int, ...], batch: int) -> int:
    """T: how many times the weight is applied to one sample."""
    return math.prod(output_shape) // max(batch * weight_shape[0], 1)


def choose_method(weight_shape: tuple[int, ...], groups: int, count: int, pixels: int, batch: int) -> str:
    """The cheapest way to the norms of one weight, by the products it takes and what it saves afterwards.

    `count` is T, `pixels` the size of the input's maps for one sample; for a linear both are T.
    """
    n, k, taps = weight_shape[0] // groups, math.prod(weight_shape[1:]), math.prod(weight_shape[2:])
    shifted = _SHIFT_COST * taps * count * count if taps > 1 else 0
    gram = groups * (pixels * pixels * (k // taps) + count * count * n + shifted)
    direct = groups * count * k * n
    small = 4 * batch * pixels * pixels <= _CHUNK_BYTES
    if count == 1 or (small and _GRAM_COST * gram < direct):
        return "gram"
    return "kept" if 4 * batch * math.prod(weight_shape) <= _KEPT_BYTES else "direct"


# Measured by benchmarks/norm_ways.py: an element of a shifted sum costs as much as a few multiply-adds.
_GRAM_COST = 1.0
_SHIFT_COST = 4


def factors(call: SiteCall, x: Tensor, grad: Tensor, weight_shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """D [B, groups, T, N/groups] and U [B, groups, T, K] of all samples, in at least float32.

    The columns of U are ordered by tap and then by channel, as a channels-last input has them; see `as_weight`.
    """
    xs, grads = wide(to_samples(x, call.axis)), wide(to_samples(grad, call.output_axis))
    batch, geometry = xs.shape[0], call.geometry
    if geometry is None:
        return grads.reshape(batch, 1, -1, grads.shape[-1]), xs.reshape(batch, 1, -1, xs.shape[-1])
    rank, groups = len(geometry.stride), geometry.groups
    images = xs.reshape(-1, *xs.shape[-rank - 1 :])
    left = grads.reshape(-1, *grads.shape[-rank - 1 :]).movedim(1, -1)
    left = left.reshape(batch, -1, groups, weight_shape[0] // groups).transpose(1, 2)
    right = _unfold(images, geometry, weight_shape[2:])
    right = right.reshape(batch, -1, right.shape[2], groups, weight_shape[1]).permute(0, 3, 1, 2, 4).flatten(3)
    return left, right


def as_weight(columns: Tensor, weight_shape: tuple[int, ...]) -> Tensor:
    """Gradients [..., N, taps · C] in the shape of the weight, [..., N, C, *kernel]."""
    if len(weight_shape) == 2:
        return columns
    by_tap = columns.reshape(*columns.shape[:-1], math.prod(weight_shape[2:]), weight_shape[1])
    return by_tap.transpose(-1, -2).reshape(*columns.shape[:-2], *weight_shape)


def sample_norms(call: SiteCall, x: Tensor, grad: Tensor, weight_shape: tuple[int, ...], method: str) -> Tensor:
    """‖Gᵢ‖² [B] or a little more, never less."""
    if method == "gram":
        return _gram_norms(*_grams(call, x, grad, weight_shape))
    parts = []
    for xs, grads in _chunks(call, x, grad, weight_shape):
        parts.append(_direct_norms(*factors(call, xs, grads, weight_shape)))
    return torch.cat(parts) if len(parts) != 1 else parts[0]


def sample_grads(call: SiteCall, x: Tensor, grad: Tensor, weight_shape: tuple[int, ...]) -> Tensor:
    """Gᵢ of all samples given, by tap: [B, N, taps · C]; see `as_weight`."""
    left, right = factors(call, x, grad, weight_shape)
    return _products(left, right).flatten(1, 2)


def weighted_sum(call: SiteCall, x: Tensor, grad: Tensor, weight_shape: tuple[int, ...], scale: Tensor) -> Tensor:
    """Σᵢ scaleᵢ Gᵢ by one product over the batch; `scale` goes into whichever operand is smaller."""
    x, grad = wide(x), wide(grad)
    if x.numel() < grad.numel():
        x = _scaled(x, call.axis, scale)
    else:
        grad = _scaled(grad, call.output_axis, scale)
    geometry = call.geometry
    if geometry is None or geometry.groups > 1 or math.prod(grad.shape[2:]) > _FEW_PLACES:
        # Only its shape is asked for, and its layout: one that differs from the input's would be copied.
        layout = torch.contiguous_format if geometry is None else suggest_memory_format(x)
        like = torch.empty(weight_shape, dtype=x.dtype, device=x.device, memory_format=layout)
        return full_grad_params(geometry, grad, x, like, (True, False))[0]
    # On tiny maps a conv's own weight gradient is slow, and the unfolded input small.
    left = grad.movedim(1, -1).reshape(-1, weight_shape[0])
    right = (
        _unfold(x, geometry, weight_shape[2:]).transpose(-1, -2).reshape(left.shape[0], -1)
    )  # by channel, then by tap
    return (left.t() @ right).reshape(weight_shape)


_FEW_PLACES = 4


def _scaled(x: Tensor, axis: BatchAxis, scale: Tensor) -> Tensor:
    return x * spread(scale.to(x.dtype), axis, x)


def spread(values: Tensor, axis: BatchAxis, like: Tensor) -> Tensor:
    """One value per sample [B], shaped so that it broadcasts over a tensor whose samples lie at `axis`."""
    if (axis.outer, axis.inner) != (1, 1):
        values = values[None, :, None].expand(axis.outer, -1, axis.inner).reshape(-1)
    return values.reshape([-1 if d == axis.dim % like.dim() else 1 for d in range(like.dim())])


def _products(left: Tensor, right: Tensor) -> Tensor:
    batch, groups = left.shape[:2]
    flat = torch.bmm(left.flatten(0, 1).transpose(1, 2), right.flatten(0, 1))
    return flat.reshape(batch, groups, *flat.shape[1:])


def _grams(call: SiteCall, x: Tensor, grad: Tensor, weight_shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """D Dᵀ and U Uᵀ [B, groups, T, T] of all samples."""
    geometry = call.geometry
    plain = geometry is None or (call.axis.outer, call.axis.inner) != (1, 1)
    if plain or all(k == 1 for k in weight_shape[2:]):
        left, right = factors(call, x, grad, weight_shape)
        if left.shape[2] == 1:  # rank one: the squared norms themselves, without a product
            return squares(left).unsqueeze(-1), squares(right).unsqueeze(-1)
        return left @ left.transpose(-1, -2), right @ right.transpose(-1, -2)
    assert geometry is not None
    batch, groups = x.shape[0], geometry.groups
    left = wide(grad).reshape(batch, groups, -1, math.prod(grad.shape[2:]))
    pixels = wide(x).reshape(batch, groups, -1, math.prod(x.shape[2:]))
    gram = pixels.transpose(-1, -2) @ pixels
    shifted = _shifted_sums(gram.reshape(batch * groups, *x.shape[2:], *x.shape[2:]), geometry, weight_shape[2:])
    count = left.shape[-1]
    return left.transpose(-1, -2) @ left, shifted.reshape(batch, groups, count, count)


def _shifted_sums(gram: Tensor, geometry: ConvGeometry, kernel: tuple[int, ...]) -> Tensor:
    """Σ over taps of the pixels' gram matrix [B, *map, *map], both sides moved by the tap: [B, *out, *out]."""
    rank = len(kernel)
    both = [p for padding in reversed((*geometry.padding, *geometry.padding)) for p in (padding, padding)]
    gram = F.pad(gram, both)
    sizes = [
        (gram.shape[1 + d] - geometry.dilation[d] * (kernel[d] - 1) - 1) // geometry.stride[d] + 1 for d in range(rank)
    ]
    total: Tensor | None = None
    for tap in itertools.product(*map(range, kernel)):
        where = [
            slice(at * dilation, at * dilation + (size - 1) * stride + 1, stride)
            for at, dilation, size, stride in zip(tap, geometry.dilation, sizes, geometry.stride, strict=True)
        ]
        part = gram[(slice(None), *where, *where)]
        total = part.clone() if total is None else total.add_(part)
    assert total is not None
    return total


def _gram_norms(a: Tensor, b: Tensor) -> Tensor:
    if a.shape[-1] == 1:
        return (a * b).flatten(1).sum(1)
    tiny = _LONGEST * torch.finfo(a.dtype).tiny
    left, right = (gram.diagonal(dim1=-2, dim2=-1).clamp_min(0) + tiny for gram in (a, b))
    largest = (left.sqrt() * right.sqrt()).sum(-1).square()
    sums = (a * b).sum((-1, -2)).clamp_min(0) + _SLACK * torch.finfo(a.dtype).eps * largest
    return sums.sum(1)


# More terms than any sum of squares here has.
_LONGEST = float(1 << 24)


def squares(x: Tensor) -> Tensor:
    """Sums of squares over the last dimension, never too small: what underflows is made up for.

    Inputs of 1e-23 have squares of zero, but with output gradients of 1e19 a gradient that is not.
    """
    return x.square().sum(-1) + x.shape[-1] * torch.finfo(x.dtype).tiny


def _direct_norms(left: Tensor, right: Tensor) -> Tensor:
    grads = _products(left, right)
    slack = (_DIRECT_SLACK * torch.finfo(grads.dtype).eps) ** 2
    bound = left.square().sum((2, 3)) * right.square().sum((2, 3))
    return (grads.square().sum((2, 3)) + slack * bound).sum(1)


def _chunks(call: SiteCall, x: Tensor, grad: Tensor, weight_shape: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """The batch in pieces whose unfolded inputs and products stay small."""
    dim = call.axis.dim % x.dim()
    batch = x.shape[dim] // (call.axis.outer * call.axis.inner)
    count = places(weight_shape, tuple(grad.shape), batch)
    widest = max(count * math.prod(weight_shape[1:]), math.prod(weight_shape))
    step = max(1, _CHUNK_BYTES // max(4 * widest, 1))
    whole = call.axis.outer == 1 and call.output_axis.outer == 1
    if step >= batch or not whole:
        yield x, grad
        return
    for start in range(0, batch, step):
        size = min(step, batch - start)
        yield (
            x.narrow(dim, start * call.axis.inner, size * call.axis.inner),
            grad.narrow(call.output_axis.dim, start * call.output_axis.inner, size * call.output_axis.inner),
        )


def _unfold(x: Tensor, geometry: ConvGeometry, kernel: tuple[int, ...]) -> Tensor:
    """[B, T, taps, C] of images [B, C, *spatial]; whole pixels are copied, which lie densely in channels-last.

    On the CPU the next call writes over the result: see `scratch`.
    """
    rows = x.movedim(1, -1).contiguous()
    if any(geometry.padding):
        rows = F.pad(rows, [0, 0, *(p for padding in reversed(geometry.padding) for p in (padding, padding))])
    strides = rows.stride()[1:-1]
    sizes = [
        (size - dilation * (k - 1) - 1) // stride + 1
        for size, k, stride, dilation in zip(rows.shape[1:-1], kernel, geometry.stride, geometry.dilation, strict=True)
    ]
    steps = [s * stride for s, stride in zip(strides, geometry.stride, strict=True)]
    taps = [s * dilation for s, dilation in zip(strides, geometry.dilation, strict=True)]
    shape = (rows.shape[0], *sizes, *kernel, rows.shape[-1])
    view = rows.as_strided(shape, (rows.stride(0), *steps, *taps, rows.stride(-1)))
    size = (rows.shape[0], math.prod(sizes), math.prod(kernel), rows.shape[-1])
    if rows.device.type != "cpu" or rows.dtype != torch.float32:
        return view.reshape(size)
    return scratch("unfolded", *shape).copy_(view).view(size)


def trimmed(geometry: ConvGeometry, map_shape: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[slice, ...] | None:
    """The taps of a kernel that ever meet a pixel, and not only padding; None if all do, or it is not worth it.

    A 3×3 kernel on a 1×1 map has one: the others multiply zeros, forward and backward, and their gradient is zero.
    """
    slices = []
    for size, k, stride, padding, dilation in zip(
        map_shape, kernel, geometry.stride, geometry.padding, geometry.dilation, strict=True
    ):
        outputs = (size + 2 * padding - dilation * (k - 1) - 1) // stride + 1
        alive = [
            tap for tap in range(k) if any(0 <= o * stride - padding + tap * dilation < size for o in range(outputs))
        ]
        if not alive:
            return None
        first, last = alive[0], alive[-1] + 1
        left = padding - first * dilation
        if left < 0 or (size + 2 * left - dilation * (last - first - 1) - 1) // stride + 1 != outputs:
            return None
        slices.append(slice(first, last))
    whole = all(part == slice(0, k) for part, k in zip(slices, kernel, strict=True))
    return None if whole else tuple(slices)
