"""The compiled backend: the reference arithmetic with its quantizer compiled to one vector loop by Inductor.

Rounding a tensor in plain torch takes some thirty passes over memory; compiled, it takes two. The numbers are those of
the reference, bit for bit. The quantizer is traced once with symbolic sizes and compiled outside Dynamo, so a new
shape, a new site or a new policy compiles nothing.
"""

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._inductor import standalone_compile
from torch._inductor.cpp_builder import get_cpp_compiler
from torch.fx.experimental.proxy_tensor import make_fx

from dpquant_compile.backends.reference.emulated import EmulatedSite
from dpquant_compile.backends.registry import Kernel, SiteCall, register_kernel
from dpquant_compile.numerics.formats import get_format
from dpquant_compile.numerics.quantize import from_samples, quantize_values, to_samples
from dpquant_compile.numerics.random_bits import random_bits, sample_keys
from dpquant_compile.sites import BatchAxis

__all__ = ["quantize_compiled"]

_LOCK = threading.Lock()


def quantize_compiled(
    x: Tensor, fmt: str, key: Tensor, samples: Tensor, axis: BatchAxis | None, block_dim: int
) -> Tensor:
    """`quantize_values`, compiled. Sizes 0 and 1, which Inductor would specialise on, go to the reference."""
    view = to_samples(x.detach(), axis)
    count = view.shape[0]
    size = view.numel() // max(count, 1)
    if x.dtype != torch.float32 or size < 2 or count == 0:
        return quantize_values(x, fmt, key, samples, axis, block_dim)
    rows = view.reshape(count, size) if count > 1 else view.reshape(size)
    result = _program(fmt, count > 1)(rows.contiguous(), *sample_keys(key, samples))
    return from_samples(result.reshape(view.shape), axis, x.shape)


def _program(fmt: str, batched: bool) -> Callable[..., Tensor]:
    with _LOCK:
        return _compile(fmt, batched)


@lru_cache(maxsize=64)
def _compile(fmt: str, batched: bool) -> Callable[..., Tensor]:
    rounding = get_format(fmt).round

    def quantize_rows(x: Tensor, k0: Tensor, k1: Tensor) -> Tensor:
        rows = x if batched else x[None]
        index = torch.arange(rows.shape[1], dtype=torch.int32, device=x.device)[None]
        q, unit = rounding(rows, random_bits(k0[:, None], k1[:, None], index), -1)
        return q * unit if batched else (q * unit)[0]

    count = 4 if batched else 1
    x = torch.zeros((count, 64) if batched else 64)
    keys = [torch.zeros(count, dtype=torch.int32) for _ in range(2)]
    with torch.no_grad():
        graph = make_fx(quantize_rows, tracing_mode="symbolic")(x, *keys)
        # Inductor decides by the sizes of the example whether a loop is worth several threads; these are small.
        options = {"config_patches": {"cpp.dynamic_threads": True}}
        program: Any = standalone_compile(graph, [x, *keys], dynamic_shapes="from_graph", options=options)

    def run(*inputs: Tensor) -> Tensor:
        with torch.no_grad():
            result = program(*inputs)
        tensor: Tensor = result[0] if isinstance(result, list | tuple) else result
        return tensor

    return run


def _supports(call: SiteCall, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"compiled for the CPU only, not for {device.type}"
    if get_format(call.recipe.format).block is not None:
        return "formats with block scales are rounded in plain torch"
    return _missing_compiler()


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
    )
)
