"""The gradient of max pooling of channels-last maps as one operator.

What Inductor makes of it scatters into a map that lies by channel, which then is copied into one that lies by pixel:
some five times the time. A sample's gradient comes from it alone.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dpquant_compile.backends.cpu_int8 import build
from dpquant_compile.backends.ops.private_site import define_fake, define_operator
from dpquant_compile.errors import KernelError

__all__ = ["can_gather"]


def can_gather(grad: Tensor, taps: Tensor, kernel: Sequence[int]) -> bool:
    """Whether there is a kernel for a gradient of this kind."""
    return (
        grad.dim() == 4
        and grad.device.type == "cpu"
        and grad.dtype == torch.float32
        and taps.dtype == torch.int8
        and taps.is_contiguous(memory_format=torch.channels_last)
        and kernel[0] * kernel[1] <= 127
        and build.unavailable() is None
    )


@define_operator(
    "max_pool_grad", "(Tensor grad, Tensor taps, int[] size, int[] kernel, int[] stride, int[] padding) -> Tensor"
)
def max_pool_grad(
    grad: Tensor,
    taps: Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """The gradient of a map [B, C, *size] that was pooled, `taps` saying where in its window each maximum lay.

    Taps count along the rows of a window. Numerics: a pixel's terms are added in the order of their windows.
    """
    if grad.shape != taps.shape or (grad.dtype, taps.dtype) != (torch.float32, torch.int8):
        kinds = [f"{value.dtype} {list(value.shape)}" for value in (grad, taps)]  # the kernel would read elsewhere
        raise KernelError(f"a pooled map's gradient {kinds[0]} does not fit its taps {kinds[1]}")
    out = _empty(grad, size)
    laid, taps = (value.contiguous(memory_format=torch.channels_last) for value in (grad, taps))
    shape = _shape(tuple(grad.shape), *map(tuple, (size, kernel, stride, padding)))
    build.load()("max_pool_grad", shape, laid.data_ptr(), taps.data_ptr(), out.data_ptr())
    return out


@define_fake("max_pool_grad")
def _fake_grad(grad: Tensor, size: Sequence[int], rest: object) -> Tensor:
    return _empty(grad, size)


def _empty(grad: Tensor, size: Sequence[int]) -> Tensor:
    shape = (*grad.shape[:2], *size)
    return torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)


@lru_cache(maxsize=4096)
def _shape(grad: tuple[int, ...], *sizes: tuple[int, ...]) -> build.Numbers:
    size, kernel, stride, padding = sizes
    return build.numbers(*grad[:2], *size, *grad[2:], *kernel, *stride, *padding)
