"""Four-bit storage: unit-grid values ↔ codes 0 … 15 ↔ two codes to a byte.

Codes of a symmetric grid are sign and magnitude: bit 3 the sign, bits 0–2 the number of the magnitude (for E2M1 and
LUQ, the exponent and mantissa bits of the format). Other grids count levels from zero modulo 16, which is two's
complement for -8 … 7.
"""

import torch
from torch import Tensor

from dpquant_compile.errors import FormatError
from dpquant_compile.numerics.formats import Format, get_format

__all__ = ["decode", "encode", "pack4", "unpack4"]


def encode(q: Tensor, fmt: str | Format) -> Tensor:
    """The uint8 codes, of the shape of `q`, for unit-grid values of a 4-bit format. A value off the grid is refused.

    In a symmetric grid -0.0 has a code of its own, 8; elsewhere it is coded as 0.
    """
    fmt = _packable(fmt)
    levels = torch.tensor(fmt.grid, dtype=torch.float32, device=q.device)
    values = q.detach().to(torch.float32).contiguous()
    place = torch.searchsorted(levels, values).clamp(max=levels.numel() - 1)
    off_grid = levels[place] != values  # true for NaN and infinity
    if off_grid.any():
        raise FormatError(
            f"{int(off_grid.sum())} value(s) are not on the grid of {fmt}, such as {values[off_grid][0].item()}: "
            "pass q of quantize_parts, in units of the scale"
        )
    number = place - fmt.grid.index(0.0)
    if fmt.symmetric:
        return (number.abs() + 8 * values.signbit().to(torch.int64)).to(torch.uint8)
    return (number % 16).to(torch.uint8)


def decode(codes: Tensor, fmt: str | Format) -> Tensor:
    """The float32 unit-grid values of uint8 codes: the inverse of `encode`, bit for bit."""
    fmt = _packable(fmt)
    _check_codes(codes)
    levels = fmt.grid
    zero = levels.index(0.0)
    upper, lower = levels[zero:], levels[:zero]
    table = [0.0] * 16
    table[: len(upper)] = upper
    if fmt.symmetric:
        table[8 : 8 + len(upper)] = [-level for level in upper]
    else:
        table[16 - len(lower) :] = lower
    return torch.tensor(table, dtype=torch.float32, device=codes.device)[codes.to(torch.int64)]


def pack4(codes: Tensor) -> Tensor:
    """Two codes to a byte along the last dimension, the first in the low nibble: uint8 `[..., ceil(n / 2)]`.

    An odd length is padded by code 0.
    """
    _check_codes(codes)
    if codes.dim() == 0:
        raise FormatError("codes is a scalar and has no dimension to pack along: pass codes[None]")
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack4(packed: Tensor, length: int) -> Tensor:
    """The inverse of `pack4`: uint8 codes `[..., length]`."""
    if packed.dtype != torch.uint8 or packed.dim() == 0:
        raise FormatError(f"packed must be uint8 with at least one dimension, not {packed.dtype} {list(packed.shape)}")
    if packed.shape[-1] != -(-length // 2):
        raise FormatError(f"length={length} takes {-(-length // 2)} bytes, packed has {packed.shape[-1]}")
    pairs = torch.stack((packed & 15, packed >> 4), dim=-1)
    return pairs.flatten(-2)[..., :length]


def _packable(fmt: str | Format) -> Format:
    fmt = get_format(fmt)
    if not fmt.packable:
        why = "has two grids" if fmt.bits == 4 else f"has {fmt.bits} bits per element"
        raise FormatError(f"{fmt} {why}; only 4-bit formats with one grid are packed")
    return fmt


def _check_codes(codes: Tensor) -> None:
    if codes.dtype != torch.uint8:
        raise FormatError(f"codes has dtype {codes.dtype}, must be uint8")
    if codes.numel() and int(codes.max()) > 15:
        raise FormatError(f"codes reach {int(codes.max())}, four bits hold 0 to 15")
