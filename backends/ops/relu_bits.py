"""ReLU's backward by bits: for an output that only sites read, who keep codes of it in low precision.

`x` is the output. Where all of `sites` run by a recipe, backward is given one bit for each of its elements and `x`
itself is never read; else `bits` is empty and `x` is what backward looks at.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dpquant_compile.backends.cpu_int8 import build
from dpquant_compile.backends.ops.private_site import define_fake, define_operator
from dpquant_compile.errors import KernelError
from dpquant_compile.numerics.recipe import Precision

__all__ = ["can_pack"]


def can_pack(x: Tensor) -> bool:
    """Whether there are kernels for the bits of this tensor."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and build.unavailable() is None


@define_operator("positive_bits", "(Tensor x, Tensor policy, int[] sites) -> Tensor")
def positive_bits(x: Tensor, policy: Tensor, sites: Sequence[int]) -> Tensor:
    """A bit for each element of `x`, in the order of its memory: 0 where it is zero or less, 1 elsewhere, NaN too."""
    bits = _empty_bits(x)
    if _rounded(policy, sites):
        build.load()("positive_bits", _in_memory(x), x.numel(), bits)
    return bits


@define_operator("relu_grad", "(Tensor x, Tensor bits, Tensor grad, Tensor policy, int[] sites) -> Tensor")
def relu_grad(x: Tensor, bits: Tensor, grad: Tensor, policy: Tensor, sites: Sequence[int]) -> Tensor:
    """`grad`, zero where `x` is zero or less; laid out as `x`."""
    if grad.shape != x.shape or grad.dtype != x.dtype:  # the kernel would read other samples' memory
        raise KernelError(f"a gradient {grad.dtype} {list(grad.shape)} of a ReLU's {x.dtype} {list(x.shape)}")
    out = torch.empty_like(x)
    if not _rounded(policy, sites):
        torch.ops.aten.threshold_backward.grad_input(grad, x, 0, grad_input=out)
        return out
    laid = grad if grad.stride() == x.stride() else out.copy_(grad)
    build.load()("masked_by_bits", _in_memory(laid), x.numel(), bits, _in_memory(out))
    return out


@define_fake("positive_bits")
def _fake_bits(x: Tensor, policy: Tensor, sites: Sequence[int]) -> Tensor:
    return _empty_bits(x)


@define_fake("relu_grad")
def _fake_grad(x: Tensor, bits: Tensor, grad: Tensor, policy: Tensor, sites: Sequence[int]) -> Tensor:
    return torch.empty_like(x)


def _empty_bits(x: Tensor) -> Tensor:
    return torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device)


def _in_memory(x: Tensor) -> Tensor:
    """The elements in the order in which they lie: side by side, as those of a ReLU's output do."""
    if x.dtype != torch.float32 or not torch.ops.aten.is_non_overlapping_and_dense(x):
        raise KernelError(f"a ReLU's output is {x.dtype} with strides {list(x.stride())} for {list(x.shape)}")
    return x.as_strided((x.numel(),), (1,))


def _rounded(policy: Tensor, sites: Sequence[int]) -> bool:
    return all(Precision(int(policy[site].item())).by_recipe for site in sites)
