"""Rotated operands: what a kernel computes of them is what it computes of numbers that were rotated by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpquant_compile as dpq
from dpquant_compile.backends.cpu_int8 import build as native
from dpquant_compile.backends.cpu_int8 import kernel as cpu_int8
from dpquant_compile.backends.ops.site import axis_list, output_shape, site_call
from dpquant_compile.backends.ops.specialised_site import low_precision_site
from dpquant_compile.backends.registry import Shapes, SiteCall, Streams, choose_kernel
from dpquant_compile.backends.rotated_site import RotatedSite, arithmetic_of
from dpquant_compile.numerics.hadamard import rotate_features
from dpquant_compile.numerics.random_bits import site_keys
from dpquant_compile.sites import BatchAxis, ConvGeometry
from tests.support import models
from tests.support.neighbouring_batches import FEW, Replay, check_replay
from tests.support.private import clipped_sums, made_private
from tests.support.quantizers import normal

CPU = torch.device("cpu")
KEYS = site_keys(3, 1, ("site",))
BACKENDS = [
    "reference",
    "compiled",
    pytest.param("cpu_int8", marks=pytest.mark.skipif(native.unavailable() is not None, reason="no int8 kernels")),
]
INT4 = "int4.nearest.channel,int4.nearest.block,int4.channel"
RECIPES = ["int8.nearest+rotated", f"{INT4}+rotated", "luq_fp4+rotated"]
AXES = {
    "first": BatchAxis(0),
    "second": BatchAxis(1),
    "folded": BatchAxis(0, inner=3),
    "swapped": BatchAxis(0, outer=3),
}


def linear(backend: str, recipe: str, axis: str) -> SiteCall:
    return site_call("linear", 0, 0, f"{recipe}/none/{backend}", axis_list(AXES[axis], AXES[axis]))


def data(axis: str, features: int) -> tuple[Tensor, Tensor, Tensor, Shapes, Streams]:
    """Input, weight and output gradient of four samples of three places each, with a feature that is far larger."""
    shape = {"first": (4, 3), "second": (3, 4)}.get(axis, (12,))
    x, weight, grad = normal(*shape, features), normal(6, features, seed=1), normal(*shape, 6, seed=2)
    x[..., 3] *= 50
    shapes = Shapes(tuple(x.shape), tuple(weight.shape), tuple(grad.shape), 4)
    return x, weight, grad, shapes, Streams(KEYS, torch.arange(4) + 5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("axis", AXES)
def test_products_are_those_of_operands_rotated_by_hand(backend: str, recipe: str, axis: str) -> None:
    call = linear(backend, recipe, axis)
    plain = replace(call, recipe=replace(call.recipe, rotated=False))
    x, weight, grad, shapes, streams = data(axis, 192)
    bias, factors = normal(6, seed=3), torch.linspace(0.2, 1, 4)
    kernel: Any = choose_kernel(call, CPU).kernel.arithmetic
    turned_x, turned_w = rotate_features(x), rotate_features(weight)

    site = arithmetic_of(call, CPU)
    y = site.forward(x, weight, bias, call, streams)
    assert torch.equal(y, kernel.forward(turned_x, turned_w, bias, plain, streams))
    dx = site.grad_input(grad, x, weight, call, streams)
    assert torch.equal(dx, rotate_features(kernel.grad_input(grad, x, turned_w, plain, streams)))
    dw = site.grad_weight(grad, x, weight, call, streams)
    assert torch.equal(dw, rotate_features(kernel.grad_weight(grad, turned_x, weight, plain, streams)))

    xs, grads = site.operand(x, "input", call, streams), site.operand(grad, "grad_output", call, streams)
    packed = site.packed(weight, call, streams)
    own, own_grads = (
        kernel.operand(turned_x, "input", plain, streams),
        kernel.operand(grad, "grad_output", plain, streams),
    )
    own_packed = kernel.packed(turned_w, plain, streams)
    assert torch.equal(site.product(xs, packed, bias, shapes, call, streams), y)
    assert torch.equal(site.product_grad_input(grads, packed, shapes, call, streams), dx)
    assert torch.equal(kernel.product(own, own_packed, bias, shapes, plain, streams), y)
    kept = site.sample_grads(xs, grads, shapes, call, streams)
    assert torch.equal(kept, rotate_features(kernel.sample_grads(own, own_grads, shapes, plain, streams)))
    total = site.weighted_grad(xs, grads, factors, shapes, call, streams)
    assert torch.equal(total, rotate_features(kernel.weighted_grad(own, own_grads, factors, shapes, plain, streams)))
    torch.testing.assert_close(total, torch.einsum("b,bnk->nk", factors, kept), rtol=1e-4, atol=1e-3)
    left, right = site.sample_factors(xs, grads, shapes, call)
    torch.testing.assert_close(left.transpose(1, 2) @ right, kept, rtol=1e-4, atol=1e-3)
    for method in ("gram", "direct"):
        norms = site.sample_norms(xs, grads, shapes, method, call, streams).double()
        true = kept.double().flatten(1).square().sum(1)
        assert (norms >= true).all() and torch.allclose(norms, true, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounding_costs_less(backend: str) -> None:
    """What it is for: one feature that is larger than the others hides them from a scale that they share."""
    x, weight, _, _, streams = data("first", 64)
    errors = []
    for recipe in ("int8.nearest+rotated", "int8.nearest"):
        call = linear(backend, recipe, "first")
        y = arithmetic_of(call, CPU).forward(x, weight, None, call, streams)
        errors.append(float((y - x @ weight.t()).square().mean()))
    assert errors[0] < errors[1] / 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_features_that_no_block_divides_stay(backend: str) -> None:
    call = linear(backend, RECIPES[0], "first")
    x, weight, _, shapes, streams = data("first", 20)
    plain = replace(call, recipe=replace(call.recipe, rotated=False))
    kernel = choose_kernel(call, CPU).kernel.arithmetic
    expected = kernel.forward(x, weight, None, plain, streams)
    assert torch.equal(arithmetic_of(call, CPU).forward(x, weight, None, call, streams), expected)
    operand = kernel.operand(x, "input", plain, streams)
    square = replace(shapes, y=shapes.x, weight=(20, 20))
    norms = arithmetic_of(call, CPU).sample_norms(operand, operand, square, "gram", call, streams)
    own = kernel.sample_norms(operand, operand, square, "gram", plain, streams)
    assert torch.equal(norms, own)


def test_a_conv_is_not_rotated() -> None:
    geometry = [1, 1, 0, 0, 1, 1, 1]
    call = site_call("conv2d", 0, 0, f"{RECIPES[0]}/none/reference", axis_list(BatchAxis(0), BatchAxis(0)), geometry)
    assert isinstance(call.geometry, ConvGeometry) and not isinstance(arithmetic_of(call, CPU), RotatedSite)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_specialised_graph_has_the_bits_of_the_switch(recipe: str, dtype: torch.dtype) -> None:
    call = linear("reference", recipe, "first")
    x, weight, grad, shapes, streams = data("first", 64)
    x, weight, grad = x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), grad.to(dtype)
    y = low_precision_site(
        x=x, weight=weight, bias=None, keys=KEYS, samples=streams.samples, op="linear", site=0, call=0, geometry=[],
        axes=axis_list(BatchAxis(0), BatchAxis(0)), recipe=str(call.recipe),
    )  # fmt: skip
    y.backward(grad)
    site = arithmetic_of(call, CPU)
    assert y.shape == output_shape(shapes.x, shapes.weight, None)
    assert torch.equal(y, site.forward(x.detach(), weight.detach(), None, call, streams))
    assert x.grad is not None and weight.grad is not None
    assert torch.equal(x.grad, site.grad_input(grad, x.detach(), weight.detach(), call, streams))
    assert torch.equal(weight.grad, site.grad_weight(grad, x.detach(), weight.detach(), call, streams))


@pytest.mark.parametrize("shape", [(7, 48), (3, 5, 64), (2, 384), (4, 100), (0, 64), (5, 16)])
@pytest.mark.skipif(native.unavailable() is not None, reason="no int8 kernels")
def test_the_native_rotation_has_the_bits_of_the_reference(shape: tuple[int, ...]) -> None:
    x = normal(*shape) * 10.0 ** torch.randint(-30, 30, (*shape[:-1], 1), generator=torch.Generator().manual_seed(0))
    assert torch.equal(cpu_int8.rotate(x), rotate_features(x))
    turned = x.transpose(0, -1).contiguous().transpose(0, -1)  # another layout
    assert torch.equal(cpu_int8.rotate(turned), rotate_features(x))
    for value in (x, turned):
        kept = value.clone()
        for room in ("new", "lent"):
            assert torch.equal(cpu_int8.rotate(value, room), rotate_features(x)) and torch.equal(value, kept)
        assert torch.equal(cpu_int8.rotate(value.clone(), "same"), rotate_features(x))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_sample_moves_the_sums_by_at_most_the_bound(backend: str, recipe: str) -> None:
    replay = Replay(models.seeded(wide), (3, 64), recipe=dpq.Recipe.parse(f"{recipe}/none/{backend}"), backend=None,
                    inner="eager", policy="all")  # fmt: skip
    check_replay(replay, FEW)


@pytest.mark.slow
@pytest.mark.skipif(native.unavailable() is not None, reason="no int8 kernels")
def test_a_private_step_in_int8_is_close_to_the_reference() -> None:
    """Their sums differ by float32 alone: all operands of the first layer have the same codes."""
    found = []
    for backend in ("reference", "cpu_int8"):
        torch.manual_seed(0)
        recipe = dpq.Recipe.parse(f"int8.nearest+rotated/none/{backend}")
        model, _, _ = made_private(nn.Linear(64, 8), 4, policy="all", recipe=recipe, backend=None, inner="eager")
        found.append(clipped_sums(model, [normal(4, 3, 64)]))
    for one, other in zip(*(sums.values() for sums in found), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def wide() -> nn.Module:
    """Linears whose features can be rotated, one used twice, between others."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.twice, self.last = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).tanh()
            y: Tensor = self.last(self.twice(self.twice(x).tanh())).mean(1)
            return y

    return Wide()
