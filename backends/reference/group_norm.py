"""Group normalisation of channels-last maps.

torch's own decomposition views a map as groups by (channels and pixels), which a channels-last map is not: each of its
loops then strides through memory. Here the statistics of single channels come first, by loops along the memory, and the
groups' are put together from those.
"""

import torch
from torch import Tensor

from dpquant_compile.backends.reference.per_sample import wide

__all__ = ["group_norm", "lies_by_pixel", "normalised_groups"]


def lies_by_pixel(x: Tensor) -> bool:
    """Whether a map [B, C, *spatial] has the channels of a pixel side by side."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()]) and not x.is_contiguous()


def normalised_groups(x: Tensor, groups: int, eps: float) -> Tensor:
    """`F.group_norm` without its affine part, in float32 or wider."""
    x = wide(x)
    var, mean = torch.var_mean(x, list(range(2, x.dim())), correction=0)
    means, vars = (value.reshape(x.shape[0], groups, -1) for value in (mean, var))
    mean = means.mean(2, keepdim=True)
    # The variance of a group is that inside its channels, and that of the channels' means.
    var = vars.mean(2, keepdim=True) + (means - mean).square().mean(2, keepdim=True)
    shift, scale = (
        value.expand_as(means).reshape(*x.shape[:2], *[1] * (x.dim() - 2)) for value in (mean, torch.rsqrt(var + eps))
    )
    return (x - shift) * scale


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """`F.group_norm` of a channels-last map."""
    y = normalised_groups(x, num_groups, eps)
    shape = (1, -1, *[1] * (x.dim() - 2))
    if weight is not None:
        y = y * weight.reshape(shape)
    if bias is not None:
        y = y + bias.reshape(shape)
    return y.to(x.dtype)
