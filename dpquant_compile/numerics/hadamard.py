"""Hadamard transforms: outliers are spread over their neighbours before rounding.

`transform_places` goes along the places of a sample. A weight gradient is Gᵢ = Dᵢᵀ Uᵢ, a sum over the T places of a
sample. For an orthogonal H, Gᵢ = (H Dᵢ)ᵀ (H Uᵢ).

`rotate_features` goes along the features of one place. A linear is y = W u, a sum over its K features. For an
orthogonal H that is its own inverse, y = (W H) (H u), the input's gradient is H (W H)ᵀ dy, and Gᵢ = (Dᵢᵀ (Uᵢ H)) H.

Both change what is rounded, and not what is computed.

Guarantee: rows of one sample are mixed with each other and never with another sample's; features with those of their
own place alone. All coefficients are constants.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Room", "Rotation", "rotate_features", "rotation_block", "transform_places"]

# One fixed random vector of signs, as in published FP4 training recipes.
_SIGNS = (1, -1, 1, 1, -1, -1, 1, -1, 1, 1, 1, -1, -1, 1, -1, -1)


def transform_places(rows: Tensor) -> Tensor:
    """`rows` [B, T, K] times an orthogonal matrix along T: blocks of 16, then of 8, 4, 2 and 1 for what is left."""
    parts, start, length, block = [], 0, rows.shape[1], len(_SIGNS)
    while start < length:
        while block > length - start:
            block //= 2
        count = (length - start) // block * block
        piece = rows[:, start : start + count].unflatten(1, (-1, block))
        parts.append(torch.einsum("ij,bnjk->bnik", _matrix(block).to(rows), piece).flatten(1, 2))
        start += count
    return torch.cat(parts, 1) if parts else rows


def _matrix(size: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    orthogonal: Tensor = matrix * torch.tensor(_SIGNS[:size], dtype=torch.float64) / size**0.5
    return orthogonal


# Powers of four, so that the factor 1/√size is a power of two and rounds nothing.
_BLOCKS = (64, 16)


def rotation_block(features: int) -> int:
    """How many neighbouring features are rotated together; 0 where no block divides their number: they stay."""
    return next((block for block in _BLOCKS if features and features % block == 0), 0)


# Where a result may lie: in memory of its own, in that of the tensor that is rotated, or lent until the next rotation.
Room = Literal["new", "same", "lent"]
Rotation = Callable[[Tensor, Room], Tensor]


def rotate_features(x: Tensor, room: Room = "new") -> Tensor:
    """`x` [..., K] times the symmetric Hadamard matrix of each block of features; its own inverse but for rounding.

    `room` is a leave to write elsewhere than into new memory, for those that can; here it makes no difference.

    Numerics: neighbours first, then numbers 2, 4, … apart: (a, b) → (a + b, a − b), each rounded; in the end all is
    multiplied by a power of two. Whatever computes it faster keeps this order, and so gives the same bits.
    """
    block = rotation_block(x.shape[-1])
    if not block:
        return x
    rows, step = x.reshape(*x.shape[:-1], x.shape[-1] // block, block), 1
    while step < block:
        a, b = rows.unflatten(-1, (block // (2 * step), 2, step)).unbind(-2)
        rows = torch.stack((a + b, a - b), -2).flatten(-3)
        step *= 2
    rotated: Tensor = (rows * block**-0.5).reshape(x.shape)
    return rotated
