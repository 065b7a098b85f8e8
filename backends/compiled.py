"""The compiled backend: the reference arithmetic with its quantizer compiled to one loop by Inductor, on any device.

Rounding a tensor in plain torch takes some thirty passes over memory; compiled, it takes two. The numbers are those of
the reference, bit for bit. The quantizer is traced once with symbolic sizes and compiled outside Dynamo, so a new
shape, a new site or a new policy compiles nothing. On GPUs Inductor makes Triton of it, told to round as the reference
does (`_NUMERICS`); that has never run on hardware.
"""

import math
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import standalone_compile
from torch._inductor.cpp_builder import get_cpp_compiler
from torch.fx.experimental.proxy_tensor import make_fx

from dpquant_compile.backends.reference.emulated import EmulatedSite
from dpquant_compile.backends.registry import Kernel, SiteCall, register_kernel
from dpquant_compile.numerics.integers import GROUP, round_int4
from dpquant_compile.numerics.operand_spec import OperandSpec
from dpquant_compile.numerics.quantize import from_samples, quantize_values, to_samples, view_dim
from dpquant_compile.numerics.random_bits import random_bits, sample_keys
from dpquant_compile.sites import BatchAxis

__all__ = ["quantize_compiled"]

_LOCK = threading.Lock()


def quantize_compiled(
    x: Tensor, spec: OperandSpec, key: Tensor, samples: Tensor, axis: BatchAxis | None, dim: int
) -> Tensor:
    """`quantize_values`, compiled. Sizes 0 and 1, which Inductor would specialise on, go to the reference."""
    view = to_samples(x.detach(), axis)
    count = view.shape[0]
    size = view.numel() // max(count, 1)
    if x.dtype != torch.float32 or size < 2 or count == 0 or not _compilable(spec):
        return quantize_values(x, spec, key, samples, axis, dim)
    keys = sample_keys(key, samples)
    if spec.scale == "sample":
        rows = view.reshape(count, size)
        result = _run(spec, rows, _numbers(rows[0]), *keys).reshape(view.shape)
        return from_samples(result, axis, x.shape)
    # Groups [B, groups, 16] of a channel's elements, padded by zeros, which change no maximum.
    channels = view.movedim(view_dim(x, axis, dim, spec.of), 1)
    length = math.prod(channels.shape[2:])
    if length < GROUP or size < 2 * GROUP:
        return quantize_values(x, spec, key, samples, axis, dim)
    numbers = _numbers(view[0]).movedim(view_dim(x, axis, dim, spec.of) - 1, 0)
    groups, places = (_grouped(part, length) for part in (channels, numbers[None]))
    result = _run(spec, groups, places[0], *keys).reshape(*channels.shape[:2], -1)[..., :length].reshape(channels.shape)
    return from_samples(result.movedim(1, view_dim(x, axis, dim, spec.of)), axis, x.shape)


def _compilable(spec: OperandSpec) -> bool:
    """One scale per sample, or int4's groups; what another format means by a channel is its own."""
    return spec.scale == "sample" or (spec.scale == "channel" and spec.of.round is round_int4)


def _numbers(sample: Tensor) -> Tensor:
    """What a sample's elements draw their bits by."""
    return torch.arange(sample.numel(), dtype=torch.int32, device=sample.device).reshape(sample.shape)


def _grouped(channels: Tensor, length: int) -> Tensor:
    rows = F.pad(channels.reshape(*channels.shape[:2], length), (0, -length % GROUP))
    return rows.reshape(channels.shape[0], -1, GROUP)


def _run(spec: OperandSpec, rows: Tensor, numbers: Tensor, k0: Tensor, k1: Tensor) -> Tensor:
    batched = rows.shape[0] > 1
    with _LOCK:
        program = _compile(spec, batched, rows.device)
    return program((rows if batched else rows[0]).contiguous(), numbers.contiguous(), k0, k1)


@lru_cache(maxsize=64)
def _compile(spec: OperandSpec, batched: bool, device: torch.device) -> Callable[..., Tensor]:
    """The quantizer of [B, elements], or of [B, groups, 16] if scales are finer; without B where that is one."""

    def quantize_rows(x: Tensor, numbers: Tensor, k0: Tensor, k1: Tensor) -> Tensor:
        rows, bits = x if batched else x[None], None
        if spec.rounding == "stochastic":
            each = [-1, *(1 for _ in rows.shape[1:])]
            bits = random_bits(k0.reshape(each), k1.reshape(each), numbers[None])
        q, unit = spec.of.rounded(rows, bits, 1, spec.scale)
        return q * unit if batched else (q * unit)[0]

    count, shape = 4 if batched else 1, (64,) if spec.scale == "sample" else (48, GROUP)
    x = torch.zeros((count, *shape) if batched else shape, device=device)
    numbers, keys = _numbers(x[0] if batched else x), torch.zeros(count, dtype=torch.int32, device=device)
    more = [numbers, keys, keys.clone()]
    with torch.no_grad():
        graph = make_fx(quantize_rows, tracing_mode="symbolic")(x, *more)
        # Inductor decides by the sizes of the example whether a loop is worth several threads; these are small.
        options = {"config_patches": {"cpp.dynamic_threads": True} if device.type == "cpu" else _NUMERICS}
        program: Any = standalone_compile(graph, [x, *more], dynamic_shapes="from_graph", options=options)

    def run(*inputs: Tensor) -> Tensor:
        with torch.no_grad():
            result = program(*inputs)
        tensor: Tensor = result[0] if isinstance(result, list | tuple) else result
        return tensor

    return run


def _supports(call: SiteCall, device: torch.device) -> str | None:
    if not any(_compilable(spec) for spec in call.recipe.operands):
        return "formats with block scales are rounded in plain torch"
    return _missing_compiler() if device.type == "cpu" else _missing_generator(device.type)


# Of Triton's code: no fused multiplications and additions, divisions that are rounded, and denormals that stay.
_NUMERICS = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}


@lru_cache(maxsize=8)
def _missing_generator(device: str) -> str | None:
    """Why Inductor cannot generate code for a device that is not the CPU."""
    # These import all generators of code.
    from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration
    from torch._inductor.utils import is_gpu
    from torch.utils._triton import has_triton

    init_backend_registration()
    if get_scheduling_for_device(device) is None:
        return f"Inductor knows no device {device}"
    try:
        found = not is_gpu(device) or has_triton()
    except ImportError:  # it remembers that there was one
        found = False
    return None if found else f"Inductor needs Triton for {device}, and finds none"


@lru_cache(maxsize=1)
def _missing_compiler() -> str | None:
    try:
        get_cpp_compiler()
    except Exception as error:  # Inductor's own error type is private
        return f"no C++ compiler: {error}"
    return None


COMPILED = register_kernel(
    Kernel(
        backend="compiled",
        arithmetic=EmulatedSite(quantize_compiled),
        supports=_supports,
        native=False,
        reference="reference",
        priority=10,
        note="rounding compiled by Inductor, products in full precision",
        dtypes=(torch.float32,),
    )
)
