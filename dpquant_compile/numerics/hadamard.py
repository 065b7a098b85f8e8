"""A Hadamard transform along the places of a sample: outliers are spread over their neighbours before rounding.

A weight gradient is Gᵢ = Dᵢᵀ Uᵢ, a sum over the T places of a sample. For an orthogonal H, Gᵢ = (H Dᵢ)ᵀ (H Uᵢ): the
transform changes what is rounded, and not what is computed.

Guarantee: rows of one sample are mixed with each other and never with another sample's. The signs are constants.
"""

import torch
from torch import Tensor

__all__ = ["transform_places"]

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
