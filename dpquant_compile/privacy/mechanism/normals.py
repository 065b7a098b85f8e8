"""Normals from a key: the keystream of AES-256 in counter mode, turned into normals by the Box–Muller transform.

A C++ loop does both where the CPU encrypts by instructions (`cpp/`). Elsewhere `cryptography` encrypts, and the loop,
or torch without a C++ compiler, transforms. Each operation rounds once, so all ways give the same bits.
"""

import platform
from functools import lru_cache
from pathlib import Path

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from dpquant_compile.backends import native_library
from dpquant_compile.backends.native_library import NativeLibrary

__all__ = ["BLOCKS", "GROUP", "box_muller", "draw_normals", "draw_reference"]

GROUP = 32  # normals that are made together
BLOCKS = 12  # of the keystream, for a group

_SOURCES = Path(__file__).parent / "cpp"
# Compilers prefer half of AVX512's registers where their model of the CPU is older than the CPU.
_WIDE = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()

_BLOCK = 16  # bytes of one AES block
_COUNTERS = 1 << 128  # values of the cipher's counter
_LANES = GROUP // 2  # pairs of a group

# Groups per run of the ways in two steps: the keystream stays in the cache between cipher and transform.
_RUN = 1 << 12

# The plaintext for the keystream: the same zeros each time, few enough to stay in the nearest cache.
_ZEROS = memoryview(bytes(1 << 16))

# Older versions of cryptography require this much space behind the result, and write nothing there.
_SLACK = _BLOCK - 1

# Groups that the C++ loop is compared on with torch before it is used.
_PROBED = 256

_HALF_ROOT = 0x3F3504F3  # the bits of the square root of 1/2
_BELOW_ONE = 1 - 2.0**-24
_LN_2 = (0.693359375, -2.12194440e-4)  # the first has few bits, so that its multiples are exact

# From the highest power down: the logarithm after Cephes' logf; sine and cosine of an eighth of the circle.
_LOG = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)
_SINE = (-4.602177e-3, 7.9680227e-2, -6.459635e-1, 1.5707964)
_COSINE = (9.072072e-4, -2.0861726e-2, 2.5366944e-1, -1.2337005, 1.0)


def draw_normals(key: bytes, counter: int, std: float, out: Tensor) -> None:
    """Fill `out` with normals of standard deviation `std`, a group from `BLOCKS` values of the counter after another.

    Requires: `out` is dense, float32, on the CPU, of whole groups.

    Numerics: a radius has 48 bits, for the tail: it reaches 8.2σ, where 24 bits would end at 5.8σ. Added halves keep
    radius and angle away from zero. The clamp keeps u below 1, to which it rounds once in 2^25 pairs. So no normal is
    zero, and none leaves its coordinate without noise.
    """
    _draw(_library(), key, counter % _COUNTERS, std, out)


def draw_reference(key: bytes, counter: int, std: float, out: Tensor) -> None:
    """What `draw_normals` does, without the C++ loop."""
    _draw(None, key, counter % _COUNTERS, std, out)


def _draw(library: NativeLibrary | None, key: bytes, first: int, std: float, out: Tensor) -> None:
    groups = out.numel() // GROUP
    if library is not None and library.text("cipher"):
        library("normals", key, first.to_bytes(_BLOCK, "big"), groups, float(std), out)
        return
    scratch = bytearray(min(groups, _RUN) * BLOCKS * _BLOCK + _SLACK)
    for done in range(0, groups, _RUN):
        count = min(_RUN, groups - done)
        _encrypt(key, (first + BLOCKS * done) % _COUNTERS, memoryview(scratch)[: count * BLOCKS * _BLOCK + _SLACK])
        words = torch.frombuffer(scratch, dtype=torch.int32, count=3 * _LANES * count)
        part = out[GROUP * done : GROUP * (done + count)]
        if library is not None:
            library("transform", words, count, float(std), part)
        else:
            part.copy_(box_muller(words, std))


@lru_cache(maxsize=1)
def _library() -> NativeLibrary | None:
    """The C++ loop; None where there is none, or where it does not give the numbers of torch.

    Guarantee: a compiler that erred, or a file that something else has replaced, never makes the noise of a run.
    """
    try:
        library = NativeLibrary(native_library.build(_SOURCES, ("-march=native", *_WIDE), what="noise kernel"))
        own, torchs = (torch.empty(_PROBED * GROUP, dtype=torch.float32, device="cpu") for _ in range(2))
        for source, out in ((library, own), (None, torchs)):
            _draw(source, bytes(range(32)), _COUNTERS - BLOCKS, 0.75, out)  # the counter wraps in the second group
    except Exception:  # no compiler, no OpenMP, an odd platform: torch gives the same numbers
        return None
    return library if torch.equal(own, torchs) else None


def _encrypt(key: bytes, counter: int, room: memoryview) -> None:
    """The keystream from a value of the counter on, into all of `room` but its slack."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(counter.to_bytes(_BLOCK, "big"))).encryptor()
    size = len(room) - _SLACK
    for start in range(0, size, len(_ZEROS)):
        count = min(len(_ZEROS), size - start)
        encryptor.update_into(_ZEROS[:count], room[start : start + count + _SLACK])


def box_muller(words: Tensor, std: float) -> Tensor:
    """The normals of int32 words, flat: of each group all cosines and then all sines. `cpp/normals.cpp` is the same."""
    high, low, angle = words.view(-1, 3, _LANES).unbind(1)
    u = _upper(high) * 2.0**-24 + (_upper(low) + 0.5) * 2.0**-48
    # By float64, since torch may compute the root of a float32 by a library that is off by one bit.
    radius = _minus_two_log(u.clamp(max=_BELOW_ONE)).double().sqrt().float()
    # An eighth of the circle to either side, in units of quarters.
    t = (((angle << 2) >> 2).float() + 0.5) * 2.0**-30
    y = t * t
    sine, cosine = t * _polynomial(_SINE, y), _polynomial(_COSINE, y)
    # The quarter: the upper bit turns the cosine's sign, the next one swaps the two.
    cosine = torch.where(angle < 0, -cosine, cosine)
    swap = (angle & 0x40000000) != 0
    first, second = torch.where(swap, sine, cosine), torch.where(swap, cosine, sine)
    return (torch.stack([radius * first, radius * second], 1) * std).view(-1)


def _upper(words: Tensor) -> Tensor:
    return ((words >> 8) & 0xFFFFFF).float()


def _minus_two_log(u: Tensor) -> Tensor:
    apart = u.view(torch.int32) - _HALF_ROOT
    e = (apart >> 23).float()
    f = ((apart & 0x7FFFFF) + _HALF_ROOT).view(torch.float32) - 1
    z = f * f
    p = _polynomial(_LOG, f) * f * z + e * _LN_2[1] + z * -0.5
    return ((f + p) + e * _LN_2[0]) * -2


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    first, *rest = coefficients
    value = torch.full_like(x, first)
    for coefficient in rest:
        value = value * x + coefficient
    return value
