"""The reference quantizer: a tensor, a format, a counter key → values on the format's grid.

Every other code path of a format is tested against `quantize_parts`. It works in *sample view*, `[B, ...rest]`, with
one slice of dimension 0 per sample; the random bits of an element are numbered by its flat index in `rest`, so
they depend on the sample's id and not on its place in the batch, the batch size or the memory layout.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from dpquant_compile.errors import FormatError, NonFiniteError, listing
from dpquant_compile.numerics.formats import Format
from dpquant_compile.numerics.operand_spec import OperandSpec, rounding_of
from dpquant_compile.numerics.random_bits import random_bits, sample_keys, site_keys
from dpquant_compile.sites import BatchAxis

__all__ = ["from_samples", "quantize", "quantize_parts", "quantize_values", "to_samples", "view_dim"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def to_samples(x: Tensor, axis: BatchAxis | None) -> Tensor:
    """`x` as `[B, ...rest]`, without a copy where strides allow; `axis` None makes the whole tensor one sample.

    `rest` is the other dimensions in their order, with `outer` and `inner` in the place of a folded batch dimension:

        [N, C, H, W], BatchAxis(0)           → [N, C, H, W]
        [T, B, K],    BatchAxis(1)           → [B, T, K]
        [B*T, K],     BatchAxis(0, inner=T)  → [B, T, K]
    """
    if axis is None:
        return x[None]
    dim = _sample_dim(x, axis)
    outer, inner = axis.outer, axis.inner
    if outer == 1 and inner == 1:
        return x.movedim(dim, 0)
    if x.shape[dim] % (outer * inner) != 0:
        raise FormatError(f"dimension {dim} of size {x.shape[dim]} does not hold whole samples of {axis}")
    sizes = [outer, x.shape[dim] // (outer * inner), inner]
    split = x.reshape([*x.shape[:dim], *sizes, *x.shape[dim + 1 :]]).movedim(dim + 1, 0)
    # Without dimensions of size one, so that a plain batch and a folded one have the rank that kernels expect.
    if inner == 1:
        split = split.squeeze(dim + 2)
    return split.squeeze(dim + 1) if outer == 1 else split


def from_samples(y: Tensor, axis: BatchAxis | None, like_shape: Sequence[int]) -> Tensor:
    """The inverse of `to_samples` for a tensor of shape `like_shape`."""
    if axis is None:
        return y[0]
    dim = axis.dim % len(like_shape)
    if axis.outer == 1 and axis.inner == 1:
        return y.movedim(0, dim)
    at = dim + (axis.outer != 1)  # behind `outer`, where that dimension exists
    return y.movedim(0, at).reshape(list(like_shape))


def quantize_parts(
    x: Tensor, numbers: str | Format | OperandSpec, key: Tensor, samples: Tensor, axis: BatchAxis | None, dim: int = -1
) -> tuple[Tensor, Tensor]:
    """Round `x` to the grid of a format: `(q, unit)` in sample view, the values being `q * unit`.

    Requires: `key` an int64 scalar, `samples` the int64 ids `[B]` of the samples (one id when `axis` is None), both on
    the device of `x`; `dim` a dimension of `x`, not the samples', counted from either end: the channels, along which
    blocks lie. Formats with one scale per sample do not look at it.
    Ensures: `q` float32 on `fmt.grid` (or `fmt.unsigned`), with +0 zeros; `unit` float32 and broadcastable; what a
    sample becomes is a function of its elements, its id and the key alone, and of its elements alone if rounding is to
    nearest; a sample that is not finite has `unit` NaN, so all its values are NaN. Traceable with a symbolic batch
    size. No gradient flows through.
    """
    fmt, rounding, scale = rounding_of(numbers)
    place = -1 if scale == "sample" else view_dim(x, axis, dim, fmt)
    view = to_samples(x.detach().to(torch.float32), axis)
    if samples.dim() != 1 or samples.shape[0] != view.shape[0]:
        raise FormatError(f"samples has shape {list(samples.shape)}, the tensor holds {view.shape[0]} samples")
    bits = None
    if rounding == "stochastic":
        k0, k1 = sample_keys(key, samples)
        rest = view.shape[1:]
        each = [-1, *(1 for _ in rest)] if view.dim() > 1 else [-1]
        index = torch.arange(rest.numel(), dtype=torch.int32, device=x.device).reshape([1, *rest])
        bits = random_bits(k0.reshape(each), k1.reshape(each), index)
    if view.dim() == 1 and scale != "sample":  # a scalar: a block of one
        q, unit = fmt.rounded(view[:, None], None if bits is None else bits[:, None], -1, scale)
        return q[:, 0], unit[:, 0]
    return fmt.rounded(view, bits, place, scale)


def quantize_values(
    x: Tensor, numbers: str | Format | OperandSpec, key: Tensor, samples: Tensor, axis: BatchAxis | None, dim: int = -1
) -> Tensor:
    """The quantized values, of the shape and dtype of `x`; arguments and guarantees as in `quantize_parts`.

    Rounding works in float32. The values are then cast to the dtype of `x`; a level above the largest number of float16
    or bfloat16 becomes that number, never infinity.
    """
    q, unit = quantize_parts(x, numbers, key, samples, axis, dim)
    y = from_samples(q * unit, axis, x.shape)
    if x.dtype in (torch.float16, torch.bfloat16):
        largest = torch.finfo(x.dtype).max
        y = y.clamp(-largest, largest)
    return y.to(x.dtype)


def quantize(
    x: Tensor,
    format: str | Format | OperandSpec = "luq_fp4",
    seed: int = 0,
    sample_dim: int | None = 0,
    *,
    samples: Tensor | Sequence[int] | None = None,
    block_dim: int = -1,
    on_nonfinite: Literal["propagate", "raise"] = "propagate",
) -> Tensor:
    """Round `x` to the grid of `format`: same shape and dtype, values on the grid.

    `format` is a format's name, after which rounding and scale may stand: "luq_fp4" rounds stochastically, without
    bias; "int4.nearest.channel" to nearest, with scales inside the channels of a sample. `sample_dim` is the dimension
    that runs over the samples, each of which has its own scale; None gives the whole tensor one scale, as for weights.
    `samples` are the ids that the random bits of the samples are drawn by (default 0, 1, 2, …). The same seed and ids
    give the same result; different seeds give independent ones. No sample depends on another. `block_dim` is the
    dimension of the channels, along which block formats lay their blocks.

    A sample with NaN or infinity becomes NaN throughout; `on_nonfinite="raise"` raises `NonFiniteError` instead.
    """
    rounding_of(format)  # whatever else is wrong, an unknown name is told first
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise FormatError(f"seed={seed!r} is not an int")
    _check_tensor(x, sample_dim, on_nonfinite)
    axis = None if sample_dim is None else BatchAxis(sample_dim % x.dim())
    count = 1 if axis is None else x.shape[axis.dim]
    if samples is None:
        ids = torch.arange(count, device=x.device)
    else:
        ids = torch.as_tensor(samples, device=x.device)
        if ids.shape != (count,) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise FormatError(f"samples must be {count} integer ids, one per sample, not {ids.dtype} {list(ids.shape)}")
        ids = ids.to(torch.int64)
    if on_nonfinite == "raise":
        _check_finite(x, axis, ids)
    key = site_keys(seed, 0, ("quantize",))[0, 0].to(x.device)
    return quantize_values(x, format, key, ids, axis, block_dim)


def _check_tensor(x: Tensor, sample_dim: int | None, on_nonfinite: str) -> None:
    if not isinstance(x, Tensor):
        raise FormatError(f"x must be a torch.Tensor, not {type(x).__name__}")
    if x.dtype not in _DTYPES:
        names = listing([str(dtype).removeprefix("torch.") for dtype in _DTYPES])
        raise FormatError(f"x has dtype {x.dtype}, which cannot be quantized: convert it to one of {names}")
    if sample_dim is not None and (isinstance(sample_dim, bool) or not isinstance(sample_dim, int)):
        raise FormatError(f"sample_dim={sample_dim!r} is not an int, nor None for one scale over the whole tensor")
    if sample_dim is not None and not -x.dim() <= sample_dim < x.dim():
        raise FormatError(
            f"sample_dim={sample_dim} is not a dimension of x, shape {list(x.shape)}: "
            "name one, or None for one scale over the whole tensor"
        )
    if on_nonfinite not in ("propagate", "raise"):
        raise FormatError(f"on_nonfinite={on_nonfinite!r}, must be 'propagate' or 'raise'")


def _check_finite(x: Tensor, axis: BatchAxis | None, ids: Tensor) -> None:
    bad = ~to_samples(x.detach(), axis).isfinite()
    if bad.any():
        hit = bad.reshape(bad.shape[0], -1).any(dim=1)
        which = "x" if axis is None else f"sample(s) {listing([str(i) for i in ids[hit].tolist()], 8)} of x"
        raise NonFiniteError(
            f"{which}: {int(bad.sum())} element(s) are NaN or infinite. Mend the input, or pass "
            "on_nonfinite='propagate' to get NaN for the whole sample"
        )


def _sample_dim(x: Tensor, axis: BatchAxis) -> int:
    if not -x.dim() <= axis.dim < x.dim():
        raise FormatError(f"axis {axis} is not a dimension of a tensor of shape {list(x.shape)}")
    return axis.dim % x.dim()


def view_dim(x: Tensor, axis: BatchAxis | None, block_dim: int, fmt: Format) -> int:
    """`block_dim` of `x` as a dimension of its sample view."""
    if x.dim() == 0:
        return -1
    if not -x.dim() <= block_dim < x.dim():
        raise FormatError(f"block_dim={block_dim} is not a dimension of a tensor of shape {list(x.shape)}")
    dim = block_dim % x.dim()
    if axis is None:
        return dim + 1
    sample_dim = _sample_dim(x, axis)
    if dim == sample_dim:
        raise FormatError(
            f"block_dim={block_dim} is the sample dimension: a block of {fmt} would mix samples. Choose another "
            "dimension, or reshape x so that each sample has one"
        )
    # Dimensions before the samples' move up by one; behind it, each of outer and inner that is kept takes a place.
    return dim + 1 if dim < sample_dim else dim + (axis.outer != 1) + (axis.inner != 1)
