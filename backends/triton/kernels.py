"""The Triton kernels: rounding to int8 codes, products of codes, and per-sample weight gradients of codes.

Tensors are samples by pixels by channels. A table [pixels, taps] says which pixel of the other map a tap meets, -1 for
none, so that one loop serves every rank, stride, padding and dilation of a conv, forward and backward; see
`backends/cpu_int8/conv_tables.py`. Nothing is summed over samples but in `weighted`.

Rounding gives the codes of `numerics/rounding.py`, `numerics/integers.py` and `numerics/random_bits.py`, bit for bit.
It uses integers, and float32 operations that IEEE 754 rounds exactly: `div_rn`, since `/` is an approximation on GPUs,
and no contraction of a · b + c, which `launch` turns off. `floor` and `ceil` flush subnormal numbers on GPUs, which
changes no code: what is rounded down becomes 0 either way, what is rounded up at least 1. Magnitudes are compared as
bit patterns, which order like the numbers, with infinity and then NaN on top. Codes are legal whatever a sample holds:
those of one that is not finite are zeros, and its unit is NaN.

Never run on hardware. This file imports triton; `launch.load` imports this file.
"""

# The annotations of kernels are read as text.
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

__all__ = ["gradients", "largest", "norms", "product", "quantize", "weighted"]

_INFINITE = tl.constexpr(0x7F800000)
_TINY = tl.constexpr(0x00800000)  # the smallest normal number
_FOLD = tl.constexpr(0xD6E8FEB86659FD93)
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_A = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_B = tl.constexpr(0x94D049BB133111EB)
_MUL_A = tl.constexpr(0x7FEB352D)
_MUL_B = tl.constexpr(0x846CA68B)
_ROUND = tl.constexpr(12582912.0)  # 1.5 · 2^23: added to a number of less than 2^22 it rounds, ties to even
_GROUP = tl.constexpr(16)  # `integers.GROUP`

# Formats, by their number in `cpu_int8.codes`, and what shares a scale.
_LUQ, _UNIFORM4, _INT4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_SAMPLE, _CHANNEL, _CHANNELS, _BLOCK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


def _jit(function: Callable[..., Any]) -> Any:
    return triton.jit(function)


# Rounding


@_jit
def _mix64(x: tl.tensor) -> tl.tensor:
    x = tl.mul(x ^ (x >> 30), _MIX_A, sanitize_overflow=False)
    x = tl.mul(x ^ (x >> 27), _MIX_B, sanitize_overflow=False)
    return x ^ (x >> 31)


@_jit
def _mix32(x: tl.tensor) -> tl.tensor:
    x = tl.mul(x ^ (x >> 16), _MUL_A, sanitize_overflow=False)
    x = tl.mul(x ^ (x >> 15), _MUL_B, sanitize_overflow=False)
    return x ^ (x >> 16)


@_jit
def _random_bits(
    key: tl.tensor, call: tl.tensor, sample: tl.tensor, index: tl.tensor, folds: tl.constexpr
) -> tl.tensor:
    """`random_bits` of a sample's elements, in unsigned integers, whose shifts are logical as they are."""
    key = key.to(tl.uint64, bitcast=True)
    if folds:
        key = _mix64(tl.add(key ^ _FOLD, call, sanitize_overflow=False))
    number = tl.mul(sample.to(tl.uint64, bitcast=True) + 1, _GAMMA, sanitize_overflow=False)
    mixed = _mix64(tl.add(key, number, sanitize_overflow=False))
    first = _mix32(index.to(tl.uint32, bitcast=True) ^ mixed.to(tl.uint32))
    return _mix32(tl.add(first, (mixed >> 32).to(tl.uint32), sanitize_overflow=False))


@_jit
def _uniform(bits: tl.tensor) -> tl.tensor:
    return ((bits >> 8) | 1).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@_jit
def _coarse(size: tl.tensor, steps: tl.tensor) -> tl.tensor:
    """`integers._unit`."""
    up = tl.maximum(tl.div_rn(size, steps), 1.1754943508222875e-38).to(tl.int32, bitcast=True) + 0xFF
    most = tl.div_rn(steps * 0.0 + 3.4028234663852886e38, steps).to(tl.int32, bitcast=True)
    return (tl.minimum(up, most) & -256).to(tl.float32, bitcast=True)


@_jit
def _whole(t: tl.tensor, bits: tl.tensor, nearest: tl.constexpr) -> tl.tensor:
    """`rounding.to_integer`, as int32; |t| is at most 127."""
    if nearest:
        return (t + _ROUND).to(tl.int32, bitcast=True) - 0x4B400000
    floor = tl.floor(t)
    return floor.to(tl.int32) + (_uniform(bits) < t - floor).to(tl.int32)


@_jit
def _level(x: tl.tensor, step: tl.tensor, most: tl.tensor, bits: tl.tensor, nearest: tl.constexpr) -> tl.tensor:
    """`integers._rounded`, as int32."""
    t = x * tl.div_rn(step * 0.0 + 1.0, step)
    return _whole(tl.minimum(tl.maximum(t, -most), most), bits, nearest)


@_jit
def _block_error(q: tl.tensor, multiplier: tl.tensor, numbers: tl.tensor, groups: tl.constexpr) -> tl.tensor:
    """`integers._block_sum` of the squared errors [groups, 16]: halves are added, then halves of these."""
    off = q.to(tl.float32) * multiplier - numbers
    error = off * off
    error = tl.sum(tl.reshape(error, (groups, 2, 8)), axis=1)
    error = tl.sum(tl.reshape(error, (groups, 2, 4)), axis=1)
    error = tl.sum(tl.reshape(error, (groups, 2, 2)), axis=1)
    return tl.sum(error, axis=1)[:, None]


@_jit
def largest(
    x: tl.tensor,
    sizes: tl.tensor,
    count: tl.tensor,
    inner: tl.tensor,
    by_sample: tl.tensor,
    by_outer: tl.tensor,
    by_inner: tl.tensor,
    blocks: tl.tensor,
    block: tl.constexpr,
) -> None:
    """`sizes[sample]` = the largest bit patterns of |x|, of elements without a sign and of those with one.

    Requires zeros there. A sample has `count` elements, rows of `inner` of them by steps of `by_inner`.
    """
    program = tl.program_id(0)
    sample = (program // blocks).to(tl.int64)
    at = (program % blocks) * block + tl.arange(0, block)
    place = (at // inner).to(tl.int64) * by_outer + (at % inner).to(tl.int64) * by_inner
    bits = tl.load(x + sample * by_sample + place, mask=at < count, other=0.0).to(tl.int32, bitcast=True)
    tl.atomic_max(sizes + 2 * sample, tl.max(tl.where(bits >= 0, bits, 0), axis=0))
    tl.atomic_max(sizes + 2 * sample + 1, tl.max(tl.where(bits < 0, bits & 0x7FFFFFFF, 0), axis=0))


@_jit
def quantize(
    x: tl.tensor,
    sizes: tl.tensor,
    key: tl.tensor,
    samples: tl.tensor,
    codes: tl.tensor,
    unit: tl.tensor,
    call: tl.tensor,
    pixels: tl.tensor,
    channels: tl.tensor,
    by_sample: tl.tensor,
    by_pixel: tl.tensor,
    by_channel: tl.tensor,
    number_pixel: tl.tensor,
    number_channel: tl.tensor,
    lie_pixel: tl.tensor,
    lie_channel: tl.tensor,
    together: tl.tensor,
    count: tl.tensor,
    blocks: tl.tensor,
    fmt: tl.constexpr,
    nearest: tl.constexpr,
    scale: tl.constexpr,
    folds: tl.constexpr,
    groups: tl.constexpr,
    slots: tl.constexpr,
) -> None:
    """`groups` of the `count` groups of one sample, as a tile of groups by `slots` for their elements.

    A group is 16 pixels of a channel (_CHANNEL), all pixels of `together` channels (_CHANNELS), 16 channels of a pixel
    (_BLOCK), or any 16 elements where the sample has one scale. `sizes` are those of `largest`.
    """
    program = tl.program_id(0)
    sample = (program // blocks).to(tl.int64)
    group = ((program % blocks) * groups + tl.arange(0, groups))[:, None]
    slot = tl.arange(0, slots)[None, :]
    if scale == _CHANNEL:
        channel = group % channels + slot * 0
        pixel = (group // channels) * _GROUP + slot
    elif scale == _CHANNELS:
        channel = group * together + slot // pixels
        pixel = slot % pixels + group * 0
    elif scale == _BLOCK:
        across = (channels + _GROUP - 1) // _GROUP
        channel = (group % across) * _GROUP + slot
        pixel = group // across + slot * 0
    else:
        element = group * _GROUP + slot
        channel = element % channels
        pixel = element // channels
    inside = (group < count) & (pixel < pixels) & (channel < channels)
    if scale == _CHANNELS:
        inside &= slot < together * pixels

    top, bottom = tl.load(sizes + 2 * sample), tl.load(sizes + 2 * sample + 1)
    pattern = tl.maximum(top, bottom)
    finite = pattern < _INFINITE
    size = tl.where(finite & (pattern >= _TINY), pattern, 0).to(tl.float32, bitcast=True)
    place = pixel.to(tl.int64) * by_pixel + channel.to(tl.int64) * by_channel
    given = tl.load(x + sample * by_sample + place, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    value = tl.where(finite & ((given & 0x7FFFFFFF) >= _TINY), given, 0).to(tl.float32, bitcast=True)
    if nearest:
        bits = given.to(tl.uint32, bitcast=True)  # not read
    else:
        index = pixel * number_pixel + channel * number_channel
        number = tl.load(samples + sample) if folds else sample  # a weight is its only sample, of the id 0
        bits = _random_bits(tl.load(key), call, number, index, folds)

    if fmt == _LUQ:
        step = tl.maximum(size * 0.015625, 1.1754943508222875e-38)
        v = tl.div_rn(tl.abs(value), step)
        # From 1 up, random bits carry into the exponent. Under 1: one, with probability v, or zero.
        carried = ((v.to(tl.int32, bitcast=True) + (bits & 0x7FFFFF).to(tl.int32)) >> 23) - 127
        code = tl.where(v >= 1.0, 1 << tl.maximum(carried, 0), (_uniform(bits) < v).to(tl.int32))
        code = tl.where(value < 0, -code, code)
    elif fmt == _UNIFORM4:
        high = tl.where(finite, top, 0).to(tl.float32, bitcast=True)
        low = tl.where(finite, bottom, 0).to(tl.float32, bitcast=True)
        step = tl.maximum(tl.maximum(tl.div_rn(high, 7.0), low * 0.125), 1.1754943508222875e-38)
        code = _whole(tl.minimum(tl.maximum(tl.div_rn(value, step), -8.0), 7.0), bits, nearest)
    elif fmt == _INT4:
        signed = finite & (bottom >= _TINY)
        most = tl.where(signed, 7.0, 15.0)
        if scale == _SAMPLE:
            step = _coarse(size, most)
            code = _level(value, step, most, bits, nearest)
        else:
            parts = tl.where(signed, 16.0 if scale == _BLOCK else 8.0, 8.0)
            step = _coarse(size, most * parts)
            part = tl.ceil(tl.div_rn(tl.max(tl.abs(value), axis=1)[:, None], step * most))
            part = tl.minimum(tl.maximum(part, 1.0), parts)
            code = _level(value, step * part, most, bits, nearest)
            if nearest and scale == _BLOCK:
                # Of the multiplier and the one below it, the one whose levels are nearest.
                numbers = value * tl.div_rn(step * 0.0 + 1.0, step)
                less = tl.maximum(part - 1.0, 1.0)
                other = _level(value, step * less, most, bits, nearest)
                better = _block_error(other, less, numbers, groups) < _block_error(code, part, numbers, groups)
                code = tl.where(better, other, code)
                part = tl.where(better, less, part)
            code = code * part.to(tl.int32)
    else:
        step = _coarse(size, size * 0.0 + 127.0)
        code = _level(value, step, size * 0.0 + 127.0, bits, nearest)

    known = tl.where(finite, step.to(tl.int32, bitcast=True), 0x7FC00000).to(tl.float32, bitcast=True)
    tl.store(unit + sample, known, mask=program % blocks == 0)
    lies = sample * pixels * channels + pixel.to(tl.int64) * lie_pixel + channel.to(tl.int64) * lie_channel
    tl.store(codes + lies, code.to(tl.int8), mask=inside)


# Products


@_jit
def _part(
    rows: tl.tensor,
    weight: tl.tensor,
    table: tl.tensor,
    pixel: tl.tensor,
    column: tl.tensor,
    step: tl.tensor,
    live: tl.tensor,
    channels: tl.tensor,
    terms: tl.tensor,
    columns: tl.tensor,
    taps: tl.tensor,
    w_tap: tl.tensor,
    w_column: tl.tensor,
    own: tl.constexpr,
    thin: tl.constexpr,
    depth: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The operands of one step of a product: `depth` terms of a tap, or with `thin` of all taps in a row."""
    k = tl.arange(0, depth)
    if thin:
        tap = (step * depth + k) // terms
        term = (step * depth + k) % terms
        inside = tap < taps
        met = live[:, None] & inside[None, :]
        source = tl.load(table + (pixel * taps)[:, None] + tap[None, :], mask=met, other=-1)
        left = tl.load(rows[:, None] + source * channels + term[None, :], mask=source >= 0, other=0)
    else:
        steps = tl.cdiv(terms, depth)
        tap = step // steps
        term = (step % steps) * depth + k
        inside = term < terms
        source = pixel if own else tl.load(table + pixel * taps + tap, mask=live, other=-1)
        met = (live & (source >= 0))[:, None] & inside[None, :]
        left = tl.load(rows[:, None] + (source * channels)[:, None] + term[None, :], mask=met, other=0)
    places = weight + (tap * w_tap + term)[:, None] + (column * w_column)[None, :]
    right = tl.load(places, mask=inside[:, None] & (column < columns)[None, :], other=0)
    return left, right


@_jit
def product(
    codes: tl.tensor,
    unit: tl.tensor,
    weight: tl.tensor,
    weight_unit: tl.tensor,
    bias: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    pixels: tl.tensor,
    in_pixels: tl.tensor,
    channels: tl.tensor,
    terms: tl.tensor,
    columns: tl.tensor,
    taps: tl.tensor,
    w_tap: tl.tensor,
    w_column: tl.tensor,
    w_group: tl.tensor,
    across: tl.tensor,
    own: tl.constexpr,
    thin: tl.constexpr,
    biased: tl.constexpr,
    span: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    """A tile of out[sample][pixel][column] = Σ codes · weight over taps and terms, times both units, plus bias.

    own    a row meets the pixel of its own number: a linear
    span   steps after which int32 sums are added to ones in int64; 0 where they all fit
    """
    program, group = tl.program_id(0), tl.program_id(1)
    row = (program // across) * tall + tl.arange(0, tall)
    column = (program % across) * wide + tl.arange(0, wide)
    live = row < rows
    sample, pixel = row // pixels, row % pixels
    start = codes + sample.to(tl.int64) * in_pixels * channels + group * terms
    own_weight = weight + group.to(tl.int64) * w_group
    steps = tl.cdiv(taps * terms, depth) if thin else taps * tl.cdiv(terms, depth)
    if span == 0:
        total = tl.full((tall, wide), 0, tl.int32)
        for step in range(steps):
            left, right = _part(
                start, own_weight, table, pixel, column, step, live, channels, terms, columns, taps, w_tap, w_column,
                own, thin, depth,
            )  # fmt: skip
            total = tl.dot(left, right, total, out_dtype=tl.int32)
    else:
        total = tl.full((tall, wide), 0, tl.int64)
        for first in range(0, steps, span):
            part = tl.full((tall, wide), 0, tl.int32)
            for step in range(first, tl.minimum(first + span, steps)):
                left, right = _part(
                    start, own_weight, table, pixel, column, step, live, channels, terms, columns, taps, w_tap,
                    w_column, own, thin, depth,
                )  # fmt: skip
                part = tl.dot(left, right, part, out_dtype=tl.int32)
            total += part.to(tl.int64)
    scale = tl.load(unit + sample, mask=live, other=0.0) * tl.load(weight_unit)
    result = total.to(tl.float32) * scale[:, None]
    if biased:
        result += tl.load(bias + group * columns + column, mask=column < columns, other=0.0)[None, :]
    to = out + row.to(tl.int64)[:, None] * (columns * tl.num_programs(1)) + (group * columns + column)[None, :]
    tl.store(to, result, mask=live[:, None] & (column < columns)[None, :])


# Per-sample weight gradients


@_jit
def _gradient(
    x: tl.tensor,
    grad: tl.tensor,
    table: tl.tensor,
    sample: tl.tensor,
    group: tl.tensor,
    row: tl.tensor,
    tap: tl.tensor,
    term: tl.tensor,
    inside: tl.tensor,
    pixels: tl.tensor,
    in_pixels: tl.tensor,
    rows: tl.tensor,
    terms: tl.tensor,
    taps: tl.tensor,
    own: tl.constexpr,
    thin: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
    depth: tl.constexpr,
) -> tl.tensor:
    """A tile of the codes' gradient of one sample, G[row][tap][term] = Σ over pixels of grad · x, exact in int32.

    `tap` and `term` are those of each column; all taps are one, but where the layer is `thin`.
    """
    features, channels = rows * tl.num_programs(1), terms * tl.num_programs(1)
    lefts = grad + sample * pixels * features + group * rows
    rights = x + sample * in_pixels * channels + group * terms
    total = tl.full((tall, wide), 0, tl.int32)
    for start in range(0, pixels, depth):
        pixel = start + tl.arange(0, depth)
        live = pixel < pixels
        left = tl.load(
            lefts + (pixel * features)[None, :] + row[:, None], mask=live[None, :] & (row < rows)[:, None], other=0
        )
        met = live[:, None] & inside[None, :]
        if own:
            right = tl.load(rights + (pixel * channels)[:, None] + term[None, :], mask=met, other=0)
        elif thin:
            source = tl.load(table + (pixel * taps)[:, None] + tap[None, :], mask=met, other=-1)
            right = tl.load(rights + source * channels + term[None, :], mask=source >= 0, other=0)
        else:
            source = tl.load(table + pixel * taps + tap, mask=live, other=-1)
            right = tl.load(
                rights + (source * channels)[:, None] + term[None, :],
                mask=(source >= 0)[:, None] & inside[None, :],
                other=0,
            )
        total = tl.dot(left, right, total, out_dtype=tl.int32)
    return total


@_jit
def _columns(
    block: tl.tensor, terms: tl.tensor, taps: tl.tensor, thin: tl.constexpr, wide: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The tap and the term of each column of a block, and which columns there are."""
    if thin:
        column = block * wide + tl.arange(0, wide)
        tap = column // terms
        term = column % terms
        inside = column < taps * terms
    else:
        blocks = tl.cdiv(terms, wide)
        tap = block // blocks
        term = (block % blocks) * wide + tl.arange(0, wide)
        inside = term < terms
    return tap, term, inside


@_jit
def norms(
    x: tl.tensor,
    grad: tl.tensor,
    table: tl.tensor,
    found: tl.tensor,
    pixels: tl.tensor,
    in_pixels: tl.tensor,
    rows: tl.tensor,
    terms: tl.tensor,
    taps: tl.tensor,
    across: tl.tensor,
    tiles: tl.tensor,
    own: tl.constexpr,
    thin: tl.constexpr,
    halves: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    """Add Σ G² of a tile to `found[sample]`, exact in int64; with `halves`, of the squares' upper and lower 32 bits."""
    program, group = tl.program_id(0), tl.program_id(1)
    sample = (program // tiles).to(tl.int64)
    tile = program % tiles
    row = (tile // across) * tall + tl.arange(0, tall)
    tap, term, inside = _columns(tile % across, terms, taps, thin, wide)
    total = _gradient(
        x, grad, table, sample, group, row, tap, term, inside, pixels, in_pixels, rows, terms, taps, own, thin, tall,
        wide, depth,
    )  # fmt: skip
    squares = total.to(tl.int64) * total.to(tl.int64)
    if halves:
        tl.atomic_add(found + 2 * sample, tl.sum(tl.sum(squares >> 32, axis=1), axis=0))
        tl.atomic_add(found + 2 * sample + 1, tl.sum(tl.sum(squares & 0xFFFFFFFF, axis=1), axis=0))
    else:
        tl.atomic_add(found + sample, tl.sum(tl.sum(squares, axis=1), axis=0))


@_jit
def weighted(
    x: tl.tensor,
    grad: tl.tensor,
    table: tl.tensor,
    x_unit: tl.tensor,
    grad_unit: tl.tensor,
    factors: tl.tensor,
    out: tl.tensor,
    batch: tl.tensor,
    share: tl.tensor,
    pixels: tl.tensor,
    in_pixels: tl.tensor,
    rows: tl.tensor,
    terms: tl.tensor,
    taps: tl.tensor,
    across: tl.tensor,
    own: tl.constexpr,
    thin: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    """A tile of out[part][row][tap][term] = Σ factor · units · G over the `share` samples of a part, in their order.

    Samples whose factor times units is NaN are left out: their codes are whole numbers, and count zero times. So are
    those where float32 cannot hold it: a gradient of a finite norm is zero there, and infinity times it would be NaN.
    """
    program, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = (program // across) * tall + tl.arange(0, tall)
    tap, term, inside = _columns(program % across, terms, taps, thin, wide)
    sums = tl.full((tall, wide), 0.0, tl.float32)
    for number in range(part * share, tl.minimum((part + 1) * share, batch)):
        sample = tl.full((), 0, tl.int64) + number
        # In doubles: a factor times one unit may lie where float32 has few digits, or none.
        factor = tl.load(factors + sample).to(tl.float64) * tl.load(x_unit + sample).to(tl.float64)
        factor = factor * tl.load(grad_unit + sample).to(tl.float64)
        factor = tl.where(tl.abs(factor) <= 3.4028234663852886e38, factor, 0.0).to(tl.float32)
        total = _gradient(
            x, grad, table, sample, group, row, tap, term, inside, pixels, in_pixels, rows, terms, taps, own, thin,
            tall, wide, depth,
        )  # fmt: skip
        sums += total.to(tl.float32) * factor
    features = rows * tl.num_programs(1)
    to = (part.to(tl.int64) * features + group * rows + row)[:, None] * (taps * terms) + (tap * terms + term)[None, :]
    tl.store(out + to, sums, mask=(row < rows)[:, None] & inside[None, :])


@_jit
def gradients(
    x: tl.tensor,
    grad: tl.tensor,
    table: tl.tensor,
    x_unit: tl.tensor,
    grad_unit: tl.tensor,
    out: tl.tensor,
    pixels: tl.tensor,
    in_pixels: tl.tensor,
    rows: tl.tensor,
    terms: tl.tensor,
    taps: tl.tensor,
    across: tl.tensor,
    tiles: tl.tensor,
    own: tl.constexpr,
    thin: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    """A tile of out[sample][row][tap][term] = units · G."""
    program, group = tl.program_id(0), tl.program_id(1)
    sample = (program // tiles).to(tl.int64)
    tile = program % tiles
    row = (tile // across) * tall + tl.arange(0, tall)
    tap, term, inside = _columns(tile % across, terms, taps, thin, wide)
    total = _gradient(
        x, grad, table, sample, group, row, tap, term, inside, pixels, in_pixels, rows, terms, taps, own, thin, tall,
        wide, depth,
    )  # fmt: skip
    values = total.to(tl.float32) * (tl.load(x_unit + sample) * tl.load(grad_unit + sample))
    features = rows * tl.num_programs(1)
    to = (sample * features + group * rows + row)[:, None] * (taps * terms) + (tap * terms + term)[None, :]
    tl.store(out + to, values, mask=(row < rows)[:, None] & inside[None, :])
