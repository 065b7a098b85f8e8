"""The Triton kernels of `device_normals`: the keystream of ChaCha20, and the normals that are made of it.

Only this file imports Triton, which takes a second. A key comes as eight numbers of a launch and is written nowhere.
The names of the parameters say what an argument is; numbers that change from draw to draw are not specialised on, since
what is compiled for a key would keep something of it.
"""

# The annotations of kernels are read as text.
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

__all__ = ["keystream", "normals"]


def _jit(function: Callable[..., Any]) -> Any:
    return triton.jit(function)


def _secret(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """A kernel that is compiled once for all keys, and for all values of the parameters of these names."""
    key = [f"k{i}" for i in range(8)]
    return lambda function: triton.jit(function, do_not_specialize=[*key, *names])


@_jit
def _turn(x: tl.tensor, by: tl.constexpr) -> tl.tensor:
    return (x << by) | (x >> (32 - by))


@_jit
def _quarter(
    a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    a += b
    d = _turn(d ^ a, 16)
    c += d
    b = _turn(b ^ c, 12)
    a += b
    d = _turn(d ^ a, 8)
    c += d
    b = _turn(b ^ c, 7)
    return a, b, c, d


@_jit
def _same(word: tl.tensor, like: tl.tensor) -> tl.tensor:
    """One word for all lanes."""
    return tl.zeros_like(like) + word.to(tl.uint32, bitcast=True)


@_jit
def _block(
    k0: tl.tensor,
    k1: tl.tensor,
    k2: tl.tensor,
    k3: tl.tensor,
    k4: tl.tensor,
    k5: tl.tensor,
    k6: tl.tensor,
    k7: tl.tensor,
    counter: tl.tensor,
    n0: tl.tensor,
    n1: tl.tensor,
    n2: tl.tensor,
) -> tl.tensor:
    """The 16 words of the blocks at `counter` with the nonces (n0, n1, n2): RFC 8439, section 2.3."""
    zero = tl.zeros_like(counter)
    a, b, c, d = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    e, f, g, h = _same(k0, zero), _same(k1, zero), _same(k2, zero), _same(k3, zero)
    i, j, k, l = _same(k4, zero), _same(k5, zero), _same(k6, zero), _same(k7, zero)  # noqa: E741
    m, n, o, p = counter, n0, n1, n2
    x0, x1, x2, x3, x4, x5, x6, x7 = a, b, c, d, e, f, g, h
    x8, x9, x10, x11, x12, x13, x14, x15 = i, j, k, l, m, n, o, p
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    low = _side_by_side(x0 + a, x1 + b, x2 + c, x3 + d, x4 + e, x5 + f, x6 + g, x7 + h)
    high = _side_by_side(x8 + i, x9 + j, x10 + k, x11 + l, x12 + m, x13 + n, x14 + o, x15 + p)
    return _beside(low, high)


@_jit
def _beside(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """[B, w] and [B, w] → [B, 2w], a's columns first."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@_jit
def _side_by_side(
    a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, e: tl.tensor, f: tl.tensor, g: tl.tensor, h: tl.tensor
) -> tl.tensor:
    first = _beside(tl.join(a, b), tl.join(c, d))
    return _beside(first, _beside(tl.join(e, f), tl.join(g, h)))


@_secret("counter", "n0", "n1", "n2")
def keystream(
    out: tl.tensor,
    k0: tl.tensor,
    k1: tl.tensor,
    k2: tl.tensor,
    k3: tl.tensor,
    k4: tl.tensor,
    k5: tl.tensor,
    k6: tl.tensor,
    k7: tl.tensor,
    counter: tl.tensor,
    n0: tl.tensor,
    n1: tl.tensor,
    n2: tl.tensor,
    blocks: tl.tensor,
    block: tl.constexpr,
) -> None:
    """out[i] = the 16 words of the block at `counter + i` (32 bits) under one nonce: the cipher alone, to test it."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    zero = tl.zeros_like(at).to(tl.uint32, bitcast=True)
    counters = at.to(tl.uint32, bitcast=True) + counter.to(tl.uint32, bitcast=True)
    nonce = zero + n0.to(tl.uint32, bitcast=True), zero + n1.to(tl.uint32, bitcast=True), _same(n2, zero)
    words = _block(k0, k1, k2, k3, k4, k5, k6, k7, counters, nonce[0], nonce[1], nonce[2])
    places = at[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out + places, words.to(tl.int32, bitcast=True), at[:, None] < blocks)


@_jit
def _words(
    k0: tl.tensor,
    k1: tl.tensor,
    k2: tl.tensor,
    k3: tl.tensor,
    k4: tl.tensor,
    k5: tl.tensor,
    k6: tl.tensor,
    k7: tl.tensor,
    number: tl.tensor,
) -> tl.tensor:
    """The words of blocks by numbers of 64 bits: the low half is the counter, the high one the nonce's first word."""
    low = (number & 0xFFFFFFFF).to(tl.uint32)
    high = ((number >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = tl.zeros_like(low)
    return _block(k0, k1, k2, k3, k4, k5, k6, k7, low, high, zero, zero)


@_jit
def _minus_two_log(u: tl.tensor) -> tl.tensor:
    apart = u.to(tl.int32, bitcast=True) - 0x3F3504F3
    e = (apart >> 23).to(tl.float32)
    f = ((apart & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    z = f * f
    p = tl.full(u.shape, 7.0376836292e-2, tl.float32)
    p = p * f + -1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f + -1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f + -1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f + -2.4999993993e-1
    p = p * f + 3.3333331174e-1
    p = p * f * z + e * -2.12194440e-4
    p = p + z * -0.5
    return ((f + p) + e * 0.693359375) * -2.0


@_secret("first", "std")
def normals(
    out: tl.tensor,
    k0: tl.tensor,
    k1: tl.tensor,
    k2: tl.tensor,
    k3: tl.tensor,
    k4: tl.tensor,
    k5: tl.tensor,
    k6: tl.tensor,
    k7: tl.tensor,
    first: tl.tensor,
    std: tl.tensor,
    groups: tl.tensor,
    block: tl.constexpr,
) -> None:
    """out[g] = the 32 normals of group g, of the three blocks of the keystream from `first + 3 g` on, times `std`.

    The arithmetic is that of `normals.box_muller`, operation by operation. Requires: compiled without fusing
    multiplications and additions, which round once where two roundings are meant.
    """
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    number = first.to(tl.int64) + 3 * at
    high = _words(k0, k1, k2, k3, k4, k5, k6, k7, number)
    low = _words(k0, k1, k2, k3, k4, k5, k6, k7, number + 1)
    word = _words(k0, k1, k2, k3, k4, k5, k6, k7, number + 2).to(tl.int32, bitcast=True)
    upper = (high >> 8).to(tl.int32, bitcast=True).to(tl.float32)
    lower = (low >> 8).to(tl.int32, bitcast=True).to(tl.float32)
    u = upper * 5.9604644775390625e-8 + (lower + 0.5) * 3.552713678800501e-15
    radius = tl.sqrt_rn(_minus_two_log(tl.minimum(u, 0.999999940395355224609375)))
    t = (((word << 2) >> 2).to(tl.float32) + 0.5) * 9.31322574615478515625e-10
    y = t * t
    sine = t * (((y * -4.602177e-3 + 7.9680227e-2) * y + -6.459635e-1) * y + 1.5707964)
    cosine = (((y * 9.072072e-4 + -2.0861726e-2) * y + 2.5366944e-1) * y + -1.2337005) * y + 1.0
    cosine = tl.where(word < 0, -cosine, cosine)
    swap = (word & 0x40000000) != 0
    pair = _beside(radius * tl.where(swap, sine, cosine) * std, radius * tl.where(swap, cosine, sine) * std)
    places = at[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out + places, pair, at[:, None] < groups)
