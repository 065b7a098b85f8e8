"""LUQ-FP4 in Triton: quantize and pack, unpack, multiply packed matrices; and which kernel a GPU would run.

    packed, unit = quantize_pack(x, key, samples)          # two codes to a byte, as numerics/packing.py has them
    values = unpack_dequantize(packed, unit, x.shape[-1])
    y = matmul_packed(packed, unit, packed_weight, unit_weight)

Numerics: all three give the bits of the reference, `round_luq_fp4` with the counter of `numerics/random_bits.py` (a
NaN is a NaN of any payload). They use only integer operations and float32 operations that IEEE 754 rounds exactly, and
no result depends on whether subnormals are flushed, except a product of `matmul_packed` that is itself subnormal.

Triton is an optional extra. Importing this module does not import it; the first call does, and raises `KernelError`
where it is missing. Tensors in main memory are for Triton's interpreter only, which is slow and for tests.

Nothing here has run on a GPU. The tests compare the kernels with the reference in the interpreter, and compile them
for compute capability 8.0, 9.0 and 10.0; see `NEVER_RUN`.
"""

# The annotations of kernels name `tl`, which is there only once triton is imported.
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpquant_compile.errors import KernelError
from dpquant_compile.numerics.random_bits import sample_keys

if TYPE_CHECKING:
    import triton.language as tl

__all__ = ["NEVER_RUN", "GpuKernel", "gpu_kernel_for", "matmul_packed", "quantize_pack", "unpack_dequantize"]

NEVER_RUN = "never run on a GPU: results on hardware are unchecked, and the speed is unknown"

# Untuned.
_BLOCK = 1024  # bytes of packed codes, or elements, to a program
_TILE = 64  # rows and columns of the product to a program
_STEP = 64  # bytes of depth that it takes at a time
# A product of two codes is at most 2^12 and a byte holds two codes: int32 sums over a span stay within 2^30.
_SPAN = 1 << 17
# Bytes of a packed sample. Counters and offsets within a sample are int32, and the last block reaches beyond its end.
_LARGEST_SAMPLE = 1 << 29


def quantize_pack(x: Tensor, key: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Round to LUQ-FP4, one scale per sample, and pack two codes to a byte along the last dimension.

    Requires: `x` float32 `[B, ..., K]`, one sample per slice of dimension 0 (weights: `weight[None]`); `key` an int64
    scalar and `samples` the int64 ids `[B]`, as for `quantize_parts`.
    Ensures: `(packed, unit)`, uint8 `[B, ..., ceil(K / 2)]` and float32 `[B]`, equal bit for bit to
    `pack4(encode(q, "luq_fp4"))` and `unit` of `quantize_parts(x, "luq_fp4", key, samples, BatchAxis(0))`. A sample
    that holds NaN or infinity has `unit` NaN and codes 0. No sample depends on another.
    """
    kernels = _kernels(x, key, samples)
    _check(x, "x", torch.float32, "[B, ..., K]", x.dim() >= 2)
    count, width = x.shape[0], x.shape[-1]
    _check(samples, "samples", torch.int64, f"[{count}]", list(samples.shape) == [count])
    rows, row_bytes = math.prod(x.shape[1:-1]), _ceil_div(width, 2)
    size, bytes_each = rows * width, _sample_bytes(rows * row_bytes)
    packed = x.new_empty([*x.shape[:-1], row_bytes], dtype=torch.uint8)
    unit = x.new_empty(count)
    if count == 0:
        return packed, unit
    x = x.detach().contiguous()
    k0, k1 = sample_keys(key, samples)
    largest = torch.zeros(count, dtype=torch.int32, device=x.device)
    blocks = _ceil_div(size, _BLOCK)
    _launch(kernels.row_max, count * blocks, x, largest, size, blocks, block=_BLOCK)
    blocks = max(_ceil_div(bytes_each, _BLOCK), 1)  # samples without elements have a unit as well
    arguments = (x, k0, k1, largest, packed, unit, size, row_bytes, bytes_each, blocks)
    _launch(kernels.quantize, count * blocks, *arguments, odd=width % 2, block=_BLOCK)
    return packed, unit


def unpack_dequantize(packed: Tensor, unit: Tensor, length: int) -> Tensor:
    """The values of packed codes: the inverse of `quantize_pack` but for what rounding lost.

    Requires: `packed` uint8 `[B, ..., ceil(length / 2)]`, `unit` float32 `[B]`.
    Ensures: float32 `[B, ..., length]`, equal bit for bit to `decode(unpack4(packed, length), "luq_fp4") * unit`.
    """
    kernels = _kernels(packed, unit)
    fits = packed.dim() >= 2 and length >= 0 and packed.shape[-1] == _ceil_div(length, 2)
    _check(packed, "packed", torch.uint8, f"[B, ..., {_ceil_div(length, 2)}] for length={length}", fits)
    count = packed.shape[0]
    _check(unit, "unit", torch.float32, f"[{count}]", list(unit.shape) == [count])
    bytes_each = _sample_bytes(math.prod(packed.shape[1:]))
    values = packed.new_empty([*packed.shape[:-1], length], dtype=torch.float32)
    if values.numel() == 0:
        return values
    blocks = _ceil_div(bytes_each, _BLOCK)
    sizes = (values[0].numel(), packed.shape[-1], bytes_each, blocks)
    arguments = (packed.contiguous(), unit.contiguous(), values, *sizes)
    _launch(kernels.dequantize, count * blocks, *arguments, odd=length % 2, block=_BLOCK)
    return values


def matmul_packed(a: Tensor, unit_a: Tensor, b: Tensor, unit_b: Tensor) -> Tensor:
    """`A @ B.T` of two LUQ-FP4 matrices in packed form, float32 `[M, N]`.

    Requires: `a` uint8 `[M, P]` and `b` uint8 `[N, P]`, packed along the depth K by `quantize_pack` or `pack4`, so that
    the last nibble of an odd K is 0; `unit_a` float32 `[M]` or `[1]`, `unit_b` float32 `[N]` or `[1]`.
    Ensures: element (m, n) is `float32(sum over k of qa[m, k] * qb[n, k]) * unit_a[m] * unit_b[n]`, from left to right
    in float32. The sum is an exact integer, whatever K. The units are not multiplied by each other first: that product
    can underflow where the result does not.
    """
    kernels = _kernels(a, unit_a, b, unit_b)
    _check(a, "a", torch.uint8, "[M, ceil(K / 2)]", a.dim() == 2)
    _check(b, "b", torch.uint8, f"[N, {a.shape[1]}], the depth of a", b.dim() == 2 and b.shape[1] == a.shape[1])
    (m, depth), n = a.shape, b.shape[0]
    _check(unit_a, "unit_a", torch.float32, f"[{m}] or [1]", list(unit_a.shape) in ([m], [1]))
    _check(unit_b, "unit_b", torch.float32, f"[{n}] or [1]", list(unit_b.shape) in ([n], [1]))
    out = unit_a.new_empty(m, n)
    if out.numel() == 0:
        return out
    unit_a, unit_b = unit_a.expand(m), unit_b.expand(n)
    columns = _ceil_div(n, _TILE)
    sizes = (m, n, depth, columns, unit_a.stride(0), unit_b.stride(0))
    arguments = (a.contiguous(), unit_a, b.contiguous(), unit_b, out, *sizes)
    constants = {"wide": depth > _SPAN, "span": _SPAN, "tile": _TILE, "step": _STEP}
    _launch(kernels.matmul, _ceil_div(m, _TILE) * columns, *arguments, **constants)
    return out


@dataclass(frozen=True)
class GpuKernel:
    """How the products of a quantized site would run on an NVIDIA GPU.

    name    "nvfp4", "fp8", "int8" or "emulated"
    call    the torch function that would do it
    native  False if low precision is emulated by full-precision products of rounded numbers
    exact   whether sums are exact integers, so that results equal the reference bit for bit
    reason  one line: why this one
    status  one line: how far it has been tried
    """

    name: str
    call: str
    native: bool
    exact: bool
    reason: str
    status: str = NEVER_RUN


_NVFP4 = GpuKernel(
    "nvfp4",
    "torch._scaled_mm",
    native=True,
    exact=False,
    reason="compute capability 10.0 and up multiplies E2M1 with an E4M3 scale per 16 elements, which is this format",
)
_FP8 = GpuKernel(
    "fp8",
    "torch._scaled_mm",
    native=True,
    exact=False,
    reason="all levels are E4M3 numbers and compute capability 8.9 and up multiplies those; its sums are rounded",
)
_INT8 = GpuKernel(
    "int8",
    "torch._int_mm",
    native=True,
    exact=True,
    reason="all levels are int8 and compute capability 7.5 and up multiplies those, with exact int32 sums",
)
_EMULATED = GpuKernel(
    "emulated",
    "torch.matmul",
    native=False,
    exact=False,
    reason="no tensor-core kernel is foreseen for this format on this compute capability",
)
# From which compute capability on, what, and for which formats: the first that fits. LUQ is not on NVFP4's line: E2M1
# has four powers of two (0.5 to 4) and LUQ seven, so that an operand would be a sum of two, and a product four.
_LADDER: tuple[tuple[tuple[int, int], GpuKernel, tuple[str, ...]], ...] = (
    ((10, 0), _NVFP4, ("fp4_e2m1_nv",)),
    ((8, 9), _FP8, ("luq_fp4", "uniform4")),
    ((7, 5), _INT8, ("luq_fp4", "uniform4")),
)


def gpu_kernel_for(capability: tuple[int, int], format: str = "luq_fp4", *, exact: bool = False) -> GpuKernel:
    """What the dispatcher would pick on an NVIDIA GPU, by what `torch.cuda.get_device_capability` says of it.

    `exact` leaves out the ones whose sums are rounded. A pure function: it looks at no device.
    """
    for since, kernel, formats in _LADDER:
        if capability >= since and format in formats and (kernel.exact or not exact):
            return kernel
    return _EMULATED


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _sample_bytes(count: int) -> int:
    if count > _LARGEST_SAMPLE:
        raise KernelError(f"a packed sample takes {count} bytes, these kernels go to 2^29: use backend='reference'")
    return count


def _launch(kernel: Any, programs: int, *arguments: Tensor | int, **constants: int) -> None:
    with torch.cuda.device_of(arguments[0]):  # Triton launches on the current device, whatever the tensors are on
        # No contraction of a·b + c: every path must round as the reference does.
        kernel[(programs,)](*arguments, **constants, enable_fp_fusion=False)


def _check(tensor: Tensor, name: str, dtype: torch.dtype, shape: str, fits: bool) -> None:
    if tensor.dtype != dtype or not fits:
        raise KernelError(f"{name} must be {dtype} {shape}, not {tensor.dtype} {list(tensor.shape)}")


def _kernels(*tensors: Tensor) -> SimpleNamespace:
    """The kernels, ready to launch on where `tensors` are; raises `KernelError` if they cannot be."""
    kernels = _load()
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise KernelError(f"the tensors are on several devices, {names}: move them to one")
    (device,) = devices
    if device.type != "cuda" and not kernels.interpreted:
        raise KernelError(
            f"Triton compiles for GPUs and the tensors are on {device}: move them to one, use backend='reference', or "
            "set TRITON_INTERPRET=1 before Python starts to run the kernels in Triton's interpreter, which is slow"
        )
    return kernels


@lru_cache(maxsize=1)
def _load() -> SimpleNamespace:
    global tl  # kernels look for it among the globals of their module
    try:
        import triton
        import triton.language as tl
    except ImportError as error:
        raise KernelError(
            f"the Triton kernels need the package triton, which cannot be imported ({error}): `pip install triton`, or "
            "use backend='reference'"
        ) from error
    kernels = {kernel.__name__[1:]: triton.jit(kernel) for kernel in (_row_max, _quantize, _dequantize, _matmul)}
    return SimpleNamespace(**kernels, interpreted=triton.knobs.runtime.interpret)


# Kernels: plain functions that `_load` hands to triton.jit. Magnitudes are compared as bit patterns, which order like
# the numbers, with infinity and then NaN on top; 0x7F800000 is infinity and 0x00800000 the smallest normal number.


def _row_max(x: tl.tensor, largest: tl.tensor, size: tl.tensor, blocks: tl.tensor, block: tl.constexpr) -> None:
    """`largest[sample]` = the largest bit pattern of |x|. Requires zeros there."""
    program = tl.program_id(0)
    sample = (program // blocks).to(tl.int64)
    at = (program % blocks) * block + tl.arange(0, block)
    values = tl.load(x + sample * size + at, mask=at < size, other=0.0)
    tl.atomic_max(largest + sample, tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0))


def _quantize(
    x: tl.tensor,
    k0: tl.tensor,
    k1: tl.tensor,
    largest: tl.tensor,
    packed: tl.tensor,
    unit: tl.tensor,
    size: tl.tensor,
    row_bytes: tl.tensor,
    bytes_each: tl.tensor,
    blocks: tl.tensor,
    odd: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """`block` bytes of one sample, that is twice as many elements, as a tile of pairs."""
    program = tl.program_id(0)
    sample = (program // blocks).to(tl.int64)
    byte = (program % blocks) * block + tl.arange(0, block)
    half = tl.arange(0, 2)[None, :]
    at = byte[:, None] * 2 + half
    inside = (byte < bytes_each)[:, None]
    if odd:  # every row ends in half a byte, which moves the rows behind it up by one
        at -= (byte // row_bytes)[:, None]
        inside &= (half == 0) | ((byte + 1) % row_bytes != 0)[:, None]

    top = tl.load(largest + sample)
    finite = top < 0x7F800000
    scale = tl.where(finite & (top >= 0x00800000), top, 0).to(tl.float32, bitcast=True)
    step = tl.maximum(scale * 0.015625, 2.0**-126)
    nan_or_step = tl.where(finite, step.to(tl.int32, bitcast=True), 0x7FC00000).to(tl.float32, bitcast=True)
    tl.store(unit + sample, nan_or_step, mask=program % blocks == 0)

    # `random_bits`, in uint32: its shifts are logical as they are. Products and sums wrap around, on purpose.
    bits = at.to(tl.uint32, bitcast=True) ^ tl.load(k0 + sample).to(tl.uint32, bitcast=True)
    bits = tl.mul(bits ^ (bits >> 16), 0x7FEB352D, sanitize_overflow=False)
    bits = tl.mul(bits ^ (bits >> 15), 0x846CA68B, sanitize_overflow=False)
    bits = tl.add(bits ^ (bits >> 16), tl.load(k1 + sample).to(tl.uint32, bitcast=True), sanitize_overflow=False)
    bits = tl.mul(bits ^ (bits >> 16), 0x7FEB352D, sanitize_overflow=False)
    bits = tl.mul(bits ^ (bits >> 15), 0x846CA68B, sanitize_overflow=False)
    bits = bits ^ (bits >> 16)

    pattern = tl.load(x + sample * size + at, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    magnitude = pattern & 0x7FFFFFFF
    kept = tl.where(finite & (magnitude >= 0x00800000), magnitude, 0).to(tl.float32, bitcast=True)
    # div_rn, since `/` is an approximation on GPUs.
    v = tl.div_rn(kept, step)
    # From 1 up, random bits carry into the exponent; 2^e has the code e + 1. Under 1: one, with probability v, or zero.
    carried = ((v.to(tl.int32, bitcast=True) + (bits & 0x7FFFFF).to(tl.int32)) >> 23) - 126
    uniform = ((bits >> 8) | 1).to(tl.int32).to(tl.float32) * 2.0**-24
    code = tl.where(v >= 1.0, carried, (uniform < v).to(tl.int32))
    code = tl.where((pattern < 0) & (code > 0), code | 8, code)
    low, high = tl.split(code)
    tl.store(packed + sample * bytes_each + byte, (low | (high << 4)).to(tl.uint8), mask=byte < bytes_each)


def _dequantize(
    packed: tl.tensor,
    unit: tl.tensor,
    values: tl.tensor,
    size: tl.tensor,
    row_bytes: tl.tensor,
    bytes_each: tl.tensor,
    blocks: tl.tensor,
    odd: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """`block` bytes of one sample; the tile of pairs is the one of `_quantize`."""
    program = tl.program_id(0)
    sample = (program // blocks).to(tl.int64)
    byte = (program % blocks) * block + tl.arange(0, block)
    half = tl.arange(0, 2)[None, :]
    at = byte[:, None] * 2 + half
    inside = (byte < bytes_each)[:, None]
    if odd:
        at -= (byte // row_bytes)[:, None]
        inside &= (half == 0) | ((byte + 1) % row_bytes != 0)[:, None]

    pair = tl.load(packed + sample * bytes_each + byte, mask=byte < bytes_each, other=0).to(tl.uint32)
    code = pair[:, None] >> (half * 4).to(tl.uint32)
    exponent = code & 7
    pattern = tl.where(exponent > 0, (exponent + 126) << 23, 0) | ((code & 8) << 28)
    value = pattern.to(tl.uint32).to(tl.float32, bitcast=True) * tl.load(unit + sample)
    tl.store(values + sample * size + at, value, mask=inside)


def _matmul(
    a: tl.tensor,
    unit_a: tl.tensor,
    b: tl.tensor,
    unit_b: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    depth: tl.tensor,
    columns: tl.tensor,
    stride_a: tl.tensor,
    stride_b: tl.tensor,
    wide: tl.constexpr,
    span: tl.constexpr,
    tile: tl.constexpr,
    step: tl.constexpr,
) -> None:
    """One tile of the product.

    Codes become int8, for tensor cores with exact int32 sums that every GPU has which Triton compiles for (compute
    capability 8.0). FP8 products would be exact too, but some generations keep 13 bits of their sums. A sum does not
    care for order, so the low nibbles of both operands are multiplied, then the high ones; nothing is interleaved.
    """
    program = tl.program_id(0)
    row = (program // columns) * tile + tl.arange(0, tile)
    column = (program % columns) * tile + tl.arange(0, tile)
    place = tl.arange(0, step)
    from_a = a + row.to(tl.int64)[:, None] * depth + place[None, :]
    from_b = b + column.to(tl.int64)[:, None] * depth + place[None, :]
    total = tl.full((tile, tile), 0, tl.int64 if wide else tl.int32)
    for first in range(0, depth, span):
        part = tl.full((tile, tile), 0, tl.int32)
        for start in range(first, tl.minimum(first + span, depth), step):
            inside = (start + place < depth)[None, :]
            # Beyond the edges come zeros, which are codes of zero.
            bytes_a = tl.load(from_a + start, mask=(row < m)[:, None] & inside, other=0).to(tl.int32)
            bytes_b = tl.load(from_b + start, mask=(column < n)[:, None] & inside, other=0).to(tl.int32)
            for shift in tl.static_range(0, 8, 4):
                code_a, code_b = bytes_a >> shift, bytes_b >> shift
                size_a, size_b = (1 << (code_a & 7)) >> 1, (1 << (code_b & 7)) >> 1
                int_a = tl.where((code_a & 8) > 0, -size_a, size_a).to(tl.int8)
                int_b = tl.where((code_b & 8) > 0, -size_b, size_b).to(tl.int8)
                part = tl.dot(int_a, tl.trans(int_b), part, out_dtype=tl.int32)
        total += part.to(total.dtype)
    scale_a = tl.load(unit_a + row * stride_a, mask=row < m, other=0.0)
    scale_b = tl.load(unit_b + column * stride_b, mask=column < n, other=0.0)
    scaled = total.to(tl.float32) * scale_a[:, None] * scale_b[None, :]
    to = out + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(to, scaled, mask=(row < m)[:, None] & (column < n)[None, :])
