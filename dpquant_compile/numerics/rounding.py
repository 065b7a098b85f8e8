"""Rounding to floating-point grids and to `uniform4`: one pure function per number format.

Contract of every function `(x, bits, block_dim) -> (q, unit)`
    x          float32 `[B, ...rest]`, one sample per slice of dimension 0
    bits       int32 of the same shape, 32 uniform random bits per element: stochastic rounding; None: to the nearest
               level, ties to even
    block_dim  the dimension of `x` (not 0) along which block formats lay their blocks; others ignore it
    q          float32 of the same shape, on the format's unit grid; zeros are +0
    unit       float32, broadcasts against `q`; the quantized value is `q * unit`

Numerics, the same for all formats
- Stochastic rounding is unbiased: E[q * unit] = x for finite x, to float32 accuracy (the random threshold has 23 or 24
  bits); where levels above x would be no float32, as integers and MX blocks have at the end of its range, x becomes the
  largest level. Rounding to nearest is deterministic, and has a bias by design.
- Nothing is reduced over dimension 0: a sample is rounded without regard to the others.
- A sample that holds NaN or infinity gets `unit` NaN and `q` 0: all its values are NaN, and the codes stay legal.
- Results do not depend on the thread's flush-to-zero mode. Inputs under the smallest normal float32 count as zero,
  and `unit` is kept so large that the smallest level times `unit` is a normal number. For samples so tiny that
  this floor acts (largest magnitude under 2^-120 for LUQ), rounding is still unbiased, only no longer scale-invariant.
- Only operations that IEEE 754 rounds exactly, so eager and Inductor agree bit for bit.

All are traceable with a symbolic batch size: no branch depends on data.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "MX_BLOCK",
    "NV_BLOCK",
    "block_max",
    "clean",
    "poison",
    "round_fp4_e2m1",
    "round_fp4_e2m1_nv",
    "round_fp8_e4m3",
    "round_fp8_e5m2",
    "round_luq_fp4",
    "round_uniform4",
    "sample_max",
    "spread_blocks",
    "tiny",
    "to_integer",
]

MX_BLOCK = 32
NV_BLOCK = 16


def round_luq_fp4(x: Tensor, bits: Tensor | None, block_dim: int) -> tuple[Tensor, Tensor]:
    """LUQ-FP4: 0 and ±2^0 … ±2^6 times `unit` = max|x| / 64 of each sample.

    From 1 up, to one of the two neighbouring powers of two; under 1, to 1 with probability v, else to 0.
    """
    x, s, ok = clean(x)
    unit = (s * 2.0**-6).clamp(min=tiny())
    # No clamp to 64: the unit is exact, and division by one unit is monotone, so |x| / unit <= s / unit <= 64.
    return _round_binary(x / unit, bits, mantissa=0, min_exp=0), poison(unit, ok)


def round_fp8_e5m2(x: Tensor, bits: Tensor | None, block_dim: int) -> tuple[Tensor, Tensor]:
    """FP8 E5M2, largest level 57344 = max|x| of each sample; levels under 2^-14 are the multiples of 2^-16."""
    x, s, ok = clean(x)
    unit = (s / 57344.0).clamp(min=tiny() * 2.0**16)
    t = (x / unit).clamp(-57344.0, 57344.0)  # the rounding of `unit` can lift the maximum by an ulp
    return _round_binary(t, bits, mantissa=2, min_exp=-14), poison(unit, ok)


def round_fp8_e4m3(x: Tensor, bits: Tensor | None, block_dim: int) -> tuple[Tensor, Tensor]:
    """FP8 E4M3, largest level 448 = max|x| of each sample; levels under 2^-6 are the multiples of 2^-9."""
    x, s, ok = clean(x)
    unit = (s / 448.0).clamp(min=tiny() * 2.0**9)
    t = (x / unit).clamp(-448.0, 448.0)  # the rounding of `unit` can lift the maximum by an ulp
    return _round_binary(t, bits, mantissa=3, min_exp=-6), poison(unit, ok)


def round_uniform4(x: Tensor, bits: Tensor | None, block_dim: int) -> tuple[Tensor, Tensor]:
    """Sixteen equal steps -8 … 7, without an offset: zero stays exactly zero.

    `unit` is the smallest for which both ends of the sample fit, max(max(x) / 7, -min(x) / 8).
    """
    high, low = sample_max(x), sample_max(-x)
    ok = (high < torch.inf) & (low < torch.inf)
    unit = torch.where(ok, torch.maximum(high / 7.0, low / 8.0), 0.0).clamp(min=tiny())
    x = torch.where(ok & (x.abs() >= tiny()), x, 0.0)
    t = (x / unit).clamp(-8.0, 7.0)  # the rounding of `unit` can lift the maximum by an ulp
    return to_integer(t, bits), poison(unit, ok)


def round_fp4_e2m1(x: Tensor, bits: Tensor | None, block_dim: int) -> tuple[Tensor, Tensor]:
    """FP4 E2M1 in MX blocks: 0, ±.5, ±1, ±1.5, ±2, ±3, ±4, ±6 times a power of two for each 32 elements.

    The scale is 2^ceil(log2(amax / 6)): the exponent is rounded *up*, so that no element lies above the largest level
    and rounding stays unbiased. The OCP rule, 2^(floor(log2(amax)) - 2), clips elements between 6 and 8 scales.
    Scales lie in 2^-125 … 2^126, inside the range of E8M0. Blocks whose scale is 2^126 have levels above the largest
    float32; there magnitudes saturate at 3 · 2^126, the only numbers here that are not rounded without bias.
    """
    x, _, ok = clean(x)
    amax = block_max(x.abs(), block_dim, MX_BLOCK)
    # amax = m · 2^e: the exponent is e - 2 for m <= 1.5, else e - 1. The addend carries exactly for m > 1.5.
    exponent = ((amax.view(torch.int32) + 0x3FFFFF) & 0x7F800000) - (2 << 23)
    scale = exponent.clamp(min=2 << 23).view(torch.float32)
    limit = torch.where(scale >= 2.0**126, 3.0, 6.0)
    unit = spread_blocks(scale, block_dim, MX_BLOCK, x.shape[block_dim])
    limit = spread_blocks(limit, block_dim, MX_BLOCK, x.shape[block_dim])
    t = torch.minimum(torch.maximum(x / unit, -limit), limit)
    return _round_binary(t, bits, mantissa=1, min_exp=0), poison(unit, ok)


def round_fp4_e2m1_nv(x: Tensor, bits: Tensor | None, block_dim: int) -> tuple[Tensor, Tensor]:
    """FP4 E2M1 in NV blocks: E2M1 levels times an E4M3 scale for each 16 elements, times a float32 scale per sample.

    The sample's scale is amax / (6 · 448). A block's scale is rounded *up* to an E4M3 number, at least the smallest
    subnormal 2^-9, so that no element lies above the largest level and rounding stays unbiased.
    """
    x, s, ok = clean(x)
    sample_scale = (s / 2688.0).clamp(min=tiny() * 2.0**10)
    ratio = block_max(x.abs(), block_dim, NV_BLOCK) / (sample_scale * 6.0)
    normal = ((ratio.view(torch.int32) + 0xFFFFF) & ~0xFFFFF).view(torch.float32)
    subnormal = (ratio * 512.0).ceil() / 512.0
    block_scale = torch.where(ratio >= 2.0**-6, normal, subnormal).clamp(2.0**-9, 448.0)
    unit = spread_blocks(block_scale * sample_scale, block_dim, NV_BLOCK, x.shape[block_dim])
    t = (x / unit).clamp(-6.0, 6.0)  # the rounding of the scales can lift a block's maximum by an ulp or two
    return _round_binary(t, bits, mantissa=1, min_exp=0), poison(unit, ok)


def to_integer(t: Tensor, bits: Tensor | None) -> Tensor:
    """`t` as whole numbers, in float32 with +0 zeros: to nearest, or stochastically by `bits`."""
    if bits is None:
        return t.round().to(torch.int32).to(torch.float32)
    # Not floor(t + u): that sum rounds, and could move a number that lies on the grid.
    floor = t.floor()
    q = floor.to(torch.int32) + (_uniform(bits) < t - floor).to(torch.int32)
    return q.to(torch.float32)


def tiny() -> float:
    """The smallest normal float32. Not a global: under dynamic shapes Dynamo makes global floats *inputs* of type
    float64 of the program, which keeps Inductor from vectorizing it."""
    return 2.0**-126


def sample_max(x: Tensor) -> Tensor:
    """The largest element of each sample, `[B, 1, ..., 1]`; NaN where there is one, 0 for samples without elements."""
    rest = tuple(range(1, x.dim()))
    if not rest:
        return x
    if any(size == 0 for size in x.shape[1:]):
        return x.new_zeros([x.shape[0], *(1 for _ in rest)])
    return x.amax(dim=rest, keepdim=True)


def clean(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`x` with subnormals, and samples that are not finite, set to zero; its max|x| by sample; which are finite."""
    s = sample_max(x.abs())
    ok = s < torch.inf  # false for NaN too
    return torch.where(ok & (x.abs() >= tiny()), x, 0.0), torch.where(ok & (s >= tiny()), s, 0.0), ok


def poison(unit: Tensor, ok: Tensor) -> Tensor:
    """`unit`, NaN for the samples that were not finite."""
    return torch.where(ok, unit, torch.nan)


def _uniform(bits: Tensor) -> Tensor:
    """Uniform on the odd multiples of 2^-24 in (0, 1).

    These are the midpoints of 2^23 equal cells: `u < p` is off by at most 2^-24 from probability p, never true for
    p = 0, and never decided by a subnormal p. All are exact in float32.
    """
    return (((bits >> 8) & 0xFFFFFF) | 1).to(torch.float32) * 2.0**-24


def _round_binary(t: Tensor, bits: Tensor | None, *, mantissa: int, min_exp: int) -> Tensor:
    """Rounding to binary floating point: `mantissa` bits, normal numbers from 2^min_exp, zeros +0.

    Normal numbers: random bits added to the part of the bit pattern that is cut off carry into the kept part with
    exactly the probability that makes the result unbiased. To nearest, half of that part is added; a tie carries if the
    last kept bit is odd. Under 2^min_exp the levels are equidistant.

    Works on bit patterns throughout, sign included: compilers may drop the sign of a float zero, and Inductor moves
    every reinterpretation through memory.
    """
    pattern = t.view(torch.int32)
    sign = pattern & -(1 << 31)
    cut = (1 << (23 - mantissa)) - 1
    added = (cut >> 1) + ((pattern >> (23 - mantissa)) & 1) if bits is None else bits & cut
    normal = (pattern + added) & ~cut
    v = t.abs() * 2.0 ** (mantissa - min_exp)  # in steps of the equidistant levels
    if mantissa == 0:  # a single step, to nothing or to 2^min_exp
        up = v > 0.5 if bits is None else _uniform(bits) < v
        subnormal = torch.where(up, sign | ((127 + min_exp) << 23), 0)
    else:
        number = to_integer(v.clamp(max=2.0**mantissa), bits) * 2.0 ** (min_exp - mantissa)  # within int32
        magnitude = number.view(torch.int32)
        subnormal = torch.where(magnitude == 0, 0, magnitude | sign)
    return torch.where(v >= 2.0**mantissa, normal, subnormal).view(torch.float32)


def block_max(mag: Tensor, block_dim: int, length: int) -> Tensor:
    """Maximum of each block of `length` along `block_dim`, `[B, ...others, blocks]`; the last one padded by zeros."""
    last = mag.movedim(block_dim, -1)
    count = -(-last.shape[-1] // length)
    padded = F.pad(last, (0, count * length - last.shape[-1]))
    return padded.reshape([*last.shape[:-1], count, length]).amax(dim=-1)


def spread_blocks(by_block: Tensor, block_dim: int, length: int, size: int) -> Tensor:
    """The inverse view of `block_max`: each block's number for each of its elements, `block_dim` back in place."""
    by_element = by_block.unsqueeze(-1).expand(*by_block.shape, length).flatten(-2)[..., :size]
    return by_element.movedim(-1, block_dim)
