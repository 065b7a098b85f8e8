"""Group normalisation of channels-last maps as one operator, with a map that is added and a ReLU where they follow.

Inductor's loops along the pixels of such a map take ten times as long. The reference is
`reference/group_norm.py`, which all other maps go through. A sample's statistics and gradients come from it alone.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dpquant_compile.backends.cpu_int8 import build
from dpquant_compile.backends.ops.private_site import define_fake, define_operator
from dpquant_compile.backends.reference.group_norm import lies_by_pixel
from dpquant_compile.backends.site_args import grads_in_order, named_args
from dpquant_compile.errors import KernelError

__all__ = ["can_normalise"]

_WIDTH = 16  # channels that the C++ takes at once: `WIDTH` of norms.cpp


def can_normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether there is a kernel for this map. Weight and bias must be constants to autograd, as parameters are."""
    affine = [value for value in (weight, bias) if value is not None]
    return (
        lies_by_pixel(x)
        and x.device.type == "cpu"
        and x.shape[1] % _WIDTH == 0
        and x.numel() > 0
        and all(value.dtype == torch.float32 for value in (x, *affine))
        and not any(value.requires_grad for value in affine)
        and build.unavailable() is None
    )


@define_operator(
    "group_norm",
    "(Tensor x, Tensor? other, Tensor? weight, Tensor? bias, int groups, float eps, bool relu)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def group_norm(
    x: Tensor,
    other: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`F.group_norm` of a map that lies by pixel, plus `other`, and the positive part of that with `relu`.

    Then mean and reciprocal deviation of each group [B, groups]; and with `relu` a bit for each element, in the order
    of memory: 0 where the sum is zero or less, 1 elsewhere, NaN too.
    """
    y, mean, rstd, bits = _results(x, groups, relu)
    # Held by name until the loop has run: it gets addresses alone, and some of these are copies.
    laid, other = _laid(x, x), None if other is None else _laid(other, x)
    weight, bias = (None if value is None else value.contiguous() for value in (weight, bias))
    places = (_place(value) for value in (laid, other, weight, bias))
    build.load()("norm", _shape(x, groups), *places, _number(eps), int(relu), _place(y), mean, rstd, bits)
    return y, mean, rstd, bits


@define_operator(
    "group_norm_grad",
    "(Tensor grad, Tensor? bits, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, bool other)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def group_norm_grad(
    grad: Tensor,
    bits: Tensor | None,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    other: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of `x`; for each row those of weight and bias [B, C]; and with `other` that of what was added.

    `grad` is the gradient of the result, of which `bits` say where it was positive, if there was a ReLU.
    """
    if grad.shape != x.shape or grad.dtype != x.dtype:  # the kernel would read other samples' memory
        raise KernelError(f"a gradient {grad.dtype} {list(grad.shape)} of a norm's {x.dtype} {list(x.shape)}")
    dx, to_weight, to_bias, to_other = _grads(x, other)
    weight = None if weight is None else weight.contiguous()
    laid_grad, laid_x = _laid(grad, x), _laid(x, x)
    sources = (_place(laid_grad), bits, _place(laid_x), mean, rstd, weight)
    results = _place(dx), to_weight, to_bias, _place(to_other) if other else None
    build.load()("norm_grad", _shape(x, mean.shape[1]), *sources, int(bits is not None), *results)
    return dx, to_weight, to_bias, to_other


@define_fake("group_norm")
def _fake_norm(
    x: Tensor, other: Any, weight: Any, bias: Any, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _results(x, groups, relu)


@define_fake("group_norm_grad")
def _fake_grad(
    grad: Tensor, bits: Any, x: Tensor, mean: Tensor, rstd: Tensor, weight: Any, other: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _grads(x, other)


def _results(x: Tensor, groups: int, relu: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty(x.shape[0], groups) for _ in range(2))
    bits = torch.empty(x.numel() // 8 if relu else 0, dtype=torch.uint8, device=x.device)
    return _like(x), mean, rstd, bits


def _grads(x: Tensor, other: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    to_weight, to_bias = (x.new_empty(x.shape[:2]) for _ in range(2))
    return _like(x), to_weight, to_bias, _like(x) if other else x.new_empty(0)


def _layout(x: Tensor) -> torch.memory_format:
    return torch.channels_last if x.dim() == 4 else torch.channels_last_3d


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=_layout(x))


def _laid(value: Tensor, x: Tensor) -> Tensor:
    if value.shape != x.shape or value.dtype != torch.float32:
        raise KernelError(f"a norm of {x.dtype} {list(x.shape)} cannot take {value.dtype} {list(value.shape)}")
    return value.contiguous(memory_format=_layout(x))


def _place(value: Tensor | None) -> int | None:
    return None if value is None else value.data_ptr()


@lru_cache(maxsize=4096)
def _shape_of(shape: tuple[int, ...], groups: int) -> build.Numbers:
    batch, channels, *spatial = shape
    return build.numbers(batch, torch.Size(spatial).numel(), channels, groups)


def _shape(x: Tensor, groups: int) -> build.Numbers:
    if x.shape[1] % _WIDTH or x.shape[1] % groups:
        raise KernelError(f"a norm of {x.shape[1]} channels in {groups} groups: no kernel for that")
    return _shape_of(tuple(x.shape), groups)


@lru_cache(maxsize=64)
def _number(value: float) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor([value], dtype=torch.float64)


_NORM = torch.ops.dpquant.group_norm.default


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    given = named_args(_NORM, inputs)
    _, mean, rstd, _ = output
    ctx.save_for_backward(given.x, mean, rstd, given.weight)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    # What is traced is the norm alone; `fuse_norms` adds the rest afterwards. Weight and bias are constants.
    x, mean, rstd, weight = ctx.saved_tensors
    dx = torch.ops.dpquant.group_norm_grad(grad, None, x, mean, rstd, weight, False)[0]
    return grads_in_order(_NORM, x=dx)


_LIBRARY = torch.library.Library("dpquant", "FRAGMENT")
torch.library.register_autograd("dpquant::group_norm", _backward, setup_context=_save, lib=_LIBRARY)
