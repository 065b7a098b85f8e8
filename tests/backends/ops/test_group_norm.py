"""The operator of a group norm: that of plain torch, with what follows it, on every processor, sample by sample."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dpquant_compile.backends.cpu_int8 import build as native
from dpquant_compile.backends.ops.group_norm import can_normalise
from dpquant_compile.backends.reference.group_norm import group_norm
from dpquant_compile.errors import KernelError

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

OPS: Any = torch.ops.dpquant
SIZES = [((3, 16, 5, 4), 4), ((2, 48, 3, 3), 48), ((5, 32, 9, 8), 1), ((2, 32, 2, 3, 4), 8)]


def inputs(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """A map far from zero, one to add, weight, bias and a gradient."""
    g = torch.Generator().manual_seed(0)
    layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x, other, grad = (torch.randn(shape, generator=g).contiguous(memory_format=layout) for _ in range(3))
    weight, bias = (torch.randn(shape[1], generator=g) for _ in range(2))
    return 2 * x + 5, other, weight, bias, grad


def exact(
    x: Tensor, other: Tensor | None, weight: Tensor, bias: Tensor, groups: int, relu: bool, grad: Tensor
) -> list[Tensor]:
    """In doubles, by the reference: the result, and the gradients of x, of weight and bias by sample, of the other."""
    leaves = [value.double().detach().requires_grad_() for value in (x, x if other is None else other)]
    rows = [value.double().expand(x.shape[0], -1).detach().clone().requires_grad_() for value in (weight, bias)]
    ones = [1] * (x.dim() - 2)
    y = group_norm(leaves[0], groups) * rows[0].reshape(*rows[0].shape, *ones) + rows[1].reshape(*rows[1].shape, *ones)
    y = y if other is None else y + leaves[1]
    y = y.relu() if relu else y
    found = torch.autograd.grad(y, [leaves[0], *rows, leaves[1]], grad.double(), allow_unused=True)
    return [y, *(value for value in found if value is not None)]


@pytest.mark.parametrize(("shape", "groups"), SIZES)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_it_is_the_reference(shape: tuple[int, ...], groups: int, adds: bool, relu: bool) -> None:
    x, other, weight, bias, grad = inputs(shape)
    added = other if adds else None
    y, mean, rstd, bits = OPS.group_norm(x, added, weight, bias, groups, 1e-5, relu)
    found = OPS.group_norm_grad(grad, bits if relu else None, x, mean, rstd, weight, adds)
    expected = exact(x, added, weight, bias, groups, relu, grad)
    assert y.stride() == x.stride() and found[0].stride() == x.stride()
    for got, want in zip([y, *found[: 4 if adds else 3]], expected, strict=True):
        assert (got - want).abs().max() <= 2e-6 * want.abs().max()
    if relu:
        in_memory = y.as_strided((y.numel(),), (1,)) > 0
        assert torch.equal(in_memory, (bits[:, None] >> torch.arange(8) & 1).flatten().bool())


@pytest.mark.parametrize("shape", [(2, 16, 5, 4), (8, 32, 32, 32)])
def test_maps_in_another_layout_are_copied_first(shape: tuple[int, ...]) -> None:
    """Whose copies must live until the loop has read them."""
    x, other, weight, bias, grad = inputs(shape)
    alone = OPS.group_norm(x, None, None, None, 4, 1e-5, False)[0]
    assert torch.equal(OPS.group_norm(x.contiguous(), None, None, None, 4, 1e-5, False)[0], alone)
    rows = [value.contiguous() for value in (x, other, weight, bias, grad)]
    assert all(map(torch.equal, everything(*rows, 8), everything(x, other, weight, bias, grad, 8)))


def test_without_weight_and_bias() -> None:
    x, _, _, _, grad = inputs(SIZES[0][0])
    y, mean, rstd, _ = OPS.group_norm(x, None, None, None, 4, 1e-3, False)
    torch.testing.assert_close(y, F.group_norm(x, 4, eps=1e-3))
    dx = OPS.group_norm_grad(grad, None, x, mean, rstd, None, False)[0]
    ones = torch.ones(16)
    assert torch.equal(dx, OPS.group_norm_grad(grad, None, x, mean, rstd, ones, False)[0])


def everything(x: Tensor, other: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, groups: int) -> list[Tensor]:
    y, mean, rstd, bits = OPS.group_norm(x, other, weight, bias, groups, 1e-5, True)
    return [y, mean, rstd, *OPS.group_norm_grad(grad, bits, x, mean, rstd, weight, True)]


def test_samples_do_not_see_each_other() -> None:
    """Guarded by bits: alone, in a batch, and beside a sample that is not finite."""
    x, other, weight, bias, grad = inputs((4, 32, 3, 5))
    together = everything(x, other, weight, bias, grad, 8)
    beside = x.clone()
    beside[2, 3, 1, 1] = float("nan")
    broken = everything(beside, other, weight, bias, grad, 8)
    assert broken[0][2].isnan().any() and broken[4][2].isnan().any()
    for i in (0, 1, 3):
        part = slice(i, i + 1)
        alone = everything(x[part], other[part], weight, bias, grad[part], 8)
        for own, one, another in zip(alone, together, broken, strict=True):
            assert torch.equal(own[0], one[i]) and torch.equal(own[0], another[i])


def test_threads_change_nothing() -> None:
    x, other, weight, bias, grad = inputs((5, 32, 3, 5))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(everything(x, other, weight, bias, grad, 8))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


@pytest.fixture(params=[("-march=haswell",), pytest.param(("-mno-avx", "-mno-avx2"), marks=pytest.mark.heavy)])
def older(request: pytest.FixtureRequest) -> native.Library:
    """The kernels of older processors of x86-64."""
    if not native.load().name.startswith("AVX"):
        pytest.skip("these are older instructions of x86-64")
    return native.Library(native.build(request.param))


def test_older_processors_agree(older: native.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    case = inputs((3, 48, 5, 4))
    expected = everything(*case, 8)
    monkeypatch.setattr(native, "load", lambda: older)
    assert all(map(torch.equal, everything(*case, 8), expected))


def test_which_maps_there_is_a_kernel_for() -> None:
    x, _, weight, bias, _ = inputs((2, 16, 3, 3))
    assert can_normalise(x, weight, bias) and can_normalise(x, None, None)
    refused: list[tuple[Tensor, Tensor | None]] = [(x.contiguous(), weight), (x.double(), weight), (x[:0], weight)]
    refused += [(x[:, :8], weight[:8]), (x, weight.double()), (x, weight.clone().requires_grad_())]
    assert not any(can_normalise(value, affine, None) for value, affine in refused)


def test_other_sizes_are_refused() -> None:
    x, other, weight, bias, grad = inputs((2, 16, 3, 3))
    _, mean, rstd, _ = OPS.group_norm(x, None, weight, bias, 4, 1e-5, False)
    calls: list[Callable[[], Any]] = [
        lambda: OPS.group_norm(x, other[:1], weight, bias, 4, 1e-5, False),
        lambda: OPS.group_norm(x[:, :8], None, weight, bias, 4, 1e-5, False),
        lambda: OPS.group_norm(x, None, weight, bias, 3, 1e-5, False),
        lambda: OPS.group_norm_grad(grad[:1], None, x, mean, rstd, weight, False),
    ]
    for call in calls:
        with pytest.raises(KernelError):
            call()
