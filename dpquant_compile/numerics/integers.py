"""Rounding to integers: 8 bits, and 4 bits with an integer multiplier for each group of a sample.

The contract is that of `numerics/rounding.py`. What is special here:

- A unit has 16 significant bits, so that a code times its unit is exact in float32: the values of the reference are
  those of a kernel that multiplies codes as integers and units at the end, bit for bit.
- `int4` has levels -7 … 7 in a sample with negative values, and 0 … 15 in one without, as after a ReLU.
- Groups of `int4`, 16 elements or a little more, have steps of 1 … 8 units, blocks up to 16 where levels have a sign.
  The multiplier is the smallest that covers the group's largest magnitude, so nothing is clipped; for blocks that are
  rounded to nearest, it is that one or the one below it, whichever has the less squared error. Level times multiplier
  is an integer of at most 120: a byte holds it, int8 products sum it exactly, and all groups of a sample share one
  unit. Storage: 4 bits per element, 3 or 4 bits per group, 32 per sample.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dpquant_compile.numerics.rounding import block_max, clean, poison, sample_max, spread_blocks, tiny, to_integer

__all__ = ["GROUP", "round_int4", "round_int8"]

GROUP = 16  # elements of a block, and the fewest that share a multiplier
_TRIED = 2  # multipliers, for blocks that are rounded to nearest


def round_int8(x: Tensor, bits: Tensor | None, block_dim: int) -> tuple[Tensor, Tensor]:
    """The integers -127 … 127, one unit per sample."""
    x, s, ok = clean(x)
    unit = _unit(s, torch.full_like(s, 127.0))
    return _rounded(x, unit, 127.0, bits), poison(unit, ok)


def round_int4(x: Tensor, bits: Tensor | None, block_dim: int, scale: str = "sample") -> tuple[Tensor, Tensor]:
    """The integers -7 … 7, or 0 … 15, times a step.

    scale   "sample": one step for all elements; "channel": one for 16 elements of one index along `block_dim`, in the
            order of the other dimensions, or for several indices where they have fewer; "block": one for 16 elements
            along `block_dim`
    """
    x, s, ok = clean(x)
    largest = torch.where(sample_max(-x) > 0, 7.0, 15.0)
    if scale == "sample":
        unit = _unit(s, largest)
        return _rounded(x, unit, largest, bits), poison(unit, ok)
    most = torch.where(largest < 15.0, 16.0 if scale == "block" else 8.0, 8.0)  # level times multiplier fits a byte
    unit = _unit(s, largest * most)
    multiplier = (_group_max(x.abs(), block_dim, scale) / (unit * largest)).ceil()
    multiplier = torch.minimum(multiplier.clamp(min=1.0), most)
    if scale == "block" and bits is None:
        multiplier = _least_error(x, unit, largest, multiplier, block_dim)
    step = unit * multiplier
    return _rounded(x, step, largest, bits), poison(step, ok)


def _least_error(x: Tensor, unit: Tensor, largest: Tensor, multiplier: Tensor, block_dim: int) -> Tensor:
    """Of each block's multiplier and those below it, the one whose levels are nearest; the larger in a tie."""
    numbers, best, least = x * (1.0 / unit), multiplier, None
    for less in range(_TRIED):
        tried = (multiplier - less).clamp(min=1.0)
        q = _rounded(x, unit * tried, largest, None)
        error = _block_sum((q * tried - numbers).square(), block_dim)
        if least is None:
            least = error
        else:
            best, least = torch.where(error < least, tried, best), torch.minimum(error, least)
    return best


def _block_sum(x: Tensor, block_dim: int) -> Tensor:
    """The sum of each element's block. Halves are added, then halves of these: the order is part of the format."""
    last = x.movedim(block_dim, -1)
    count = -(-last.shape[-1] // GROUP)
    blocks = F.pad(last, (0, count * GROUP - last.shape[-1])).unflatten(-1, (count, GROUP))
    while blocks.shape[-1] > 1:
        half = blocks.shape[-1] // 2
        blocks = blocks[..., :half] + blocks[..., half:]
    return spread_blocks(blocks[..., 0], block_dim, GROUP, x.shape[block_dim])


def _unit(s: Tensor, steps: Tensor) -> Tensor:
    """s / steps, rounded up to 16 significant bits and to a normal number; `steps` of them are at most the largest."""
    up = ((s / steps).clamp(min=tiny()).view(torch.int32) + 0xFF) & ~0xFF
    most = (torch.full_like(s, torch.finfo(torch.float32).max) / steps).view(torch.int32) & ~0xFF
    return torch.minimum(up, most).view(torch.float32)


def _rounded(x: Tensor, step: Tensor, largest: "Tensor | float", bits: Tensor | None) -> Tensor:
    t = x * (1.0 / step)  # the reciprocal rounds, and can lift the maximum by an ulp
    t = t.clamp(-largest, largest) if isinstance(largest, float) else torch.minimum(torch.maximum(t, -largest), largest)
    return to_integer(t, bits)


def _group_max(mag: Tensor, block_dim: int, scale: str) -> Tensor:
    """The largest magnitude of each element's group."""
    dim = block_dim % mag.dim()
    if any(size == 0 for size in mag.shape[1:]):
        return mag
    if scale == "block":
        return spread_blocks(block_max(mag, dim, GROUP), dim, GROUP, mag.shape[dim])
    channels = mag.movedim(dim, 1)
    rows = channels.flatten(2) if mag.dim() > 2 else channels[..., None]
    places = rows.shape[2]
    if places >= GROUP:
        top = spread_blocks(block_max(rows, 2, GROUP), 2, GROUP, places)
    else:
        together = -(-GROUP // places)
        top = block_max(rows.amax(2, keepdim=True), 1, together)
        top = spread_blocks(top, 1, together, rows.shape[1]).expand(rows.shape)
    return top.reshape(channels.shape).movedim(1, dim)
