"""Triton itself: whether it is there, on which devices its kernels run, and how they are launched.

Triton is an optional extra, and nothing here imports it before it is asked for. Tensors in main memory are for Triton's
interpreter only, which is slow and for tests.
"""

from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dpquant_compile.errors import KernelError

__all__ = ["LEAST_CAPABILITY", "NEVER_RUN", "ceil_div", "interpreted", "launch", "load", "unavailable"]

NEVER_RUN = "never run on hardware: results there are unchecked, and the speed is unknown"
LEAST_CAPABILITY = (8, 0)  # Triton 3.7 refuses int8 products for 7.5, whose tensor cores would have them


def unavailable(device: torch.device) -> str | None:
    """Why the kernels do not run on a device; None if they do."""
    missing = _missing()
    if device.type == "cpu":
        if missing is None and interpreted():
            return None
        return "for NVIDIA GPUs, not for cpu"
    if device.type != "cuda":
        return f"for NVIDIA GPUs, not for {device.type}"
    if missing is not None:
        return missing
    if torch.version.hip is not None:
        return "for NVIDIA GPUs, not for AMD's"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return (
            f"compute capability {'.'.join(map(str, capability))}: Triton multiplies int8 by tensor cores from "
            f"{'.'.join(map(str, LEAST_CAPABILITY))} on"
        )
    return None


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter. Triton's own functions are fixed when it is imported, ours when
    `load` imports them."""
    triton = import_module("triton")
    own = isinstance(import_module("triton.language").sum, triton.JITFunction)
    return bool(triton.knobs.runtime.interpret) and not own


@lru_cache(maxsize=1)
def _missing() -> str | None:
    try:
        import_module("triton")
    except ImportError as error:
        return f"needs the package triton, which cannot be imported ({error}): `pip install triton`"
    return None


@lru_cache(maxsize=1)
def load() -> Any:
    """The module of the kernels. Requires triton."""
    if (missing := _missing()) is not None:
        raise KernelError(f"backend='triton' {missing}, or use backend='auto'")
    return import_module("dpquant_compile.backends.triton.kernels")


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Tensor | int, **constants: int) -> None:
    """Run a kernel where its first argument is."""
    with torch.cuda.device_of(arguments[0]):  # Triton launches on the current device, whatever the tensors are on
        # No contraction of a·b + c: every path must round as the reference does.
        kernel[grid](*arguments, **constants, enable_fp_fusion=False)


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
