"""The numerics of a site, against a plain re-implementation of DESIGN's "Numerics", and the isolation of samples."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dpquant_compile.backends.ops.site import axis_list, geometry_list
from dpquant_compile.backends.ops.specialised_site import low_precision_site
from dpquant_compile.numerics import rounding
from dpquant_compile.numerics.formats import format_names
from dpquant_compile.numerics.quantize import quantize_values
from dpquant_compile.numerics.random_bits import ROLES, fold, site_keys
from dpquant_compile.sites import BatchAxis, ConvGeometry
from tests.support.heavy import few

SITE, CALL, SEED, STEP = 1, 2, 7, 3
NAMES = ("first", "tested", "last")
BATCH = 4
FORMATS = format_names()


@dataclass(frozen=True)
class Layer:
    """One kind of site: shapes for a batch of `BATCH`, and where its samples lie."""

    op: str
    x: tuple[int, ...]
    weight: tuple[int, ...]
    geometry: ConvGeometry | None = None
    axis: BatchAxis = BatchAxis(0)

    @property
    def features(self) -> int:
        return -1 if self.geometry is None else 1

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.geometry is None:
            return F.linear(x, weight, bias)
        g = self.geometry
        return getattr(F, self.op)(x, weight, bias, g.stride, g.padding, g.dilation, g.groups)

    def split(self, x: Tensor) -> list[Tensor]:
        """The samples of a batch, each still a batch that `apply` takes."""
        dim, outer, inner = self.axis.dim, self.axis.outer, self.axis.inner
        count = x.shape[dim] // (outer * inner)
        index = torch.arange(x.shape[dim]).reshape(outer, count, inner)
        return [x.index_select(dim, index[:, i].reshape(-1)) for i in range(count)]


def conv(op: str, x: Any, weight: Any, *, s: Any, p: Any, d: Any, g: int = 1, **more: Any) -> Layer:
    return Layer(op, x, weight, ConvGeometry(s, p, d, g), **more)


LAYERS = {
    "conv1d": conv("conv1d", (4, 3, 9), (5, 3, 3), s=(2,), p=(1,), d=(1,)),
    "conv2d": conv("conv2d", (4, 3, 6, 5), (4, 3, 3, 3), s=(1, 1), p=(1, 1), d=(1, 1)),
    "strided": conv("conv2d", (4, 3, 9, 8), (4, 3, 3, 2), s=(2, 3), p=(2, 0), d=(2, 1)),
    "grouped": conv("conv2d", (4, 4, 5, 5), (6, 2, 3, 3), s=(1, 1), p=(0, 1), d=(1, 1), g=2),
    "depthwise": conv("conv2d", (4, 4, 5, 5), (8, 1, 3, 3), s=(1, 1), p=(1, 1), d=(1, 1), g=4),
    "conv3d": conv("conv3d", (4, 2, 3, 4, 4), (3, 2, 2, 3, 1), s=(1, 1, 2), p=(1, 0, 0), d=(1, 1, 1)),
    "conv_folded": conv("conv2d", (8, 2, 4, 4), (3, 2, 3, 3), s=(1, 1), p=(0, 0), d=(1, 1), axis=BatchAxis(0, 1, 2)),
    "linear": Layer("linear", (4, 40), (5, 40)),
    "linear3d": Layer("linear", (4, 3, 6), (5, 6)),
    "time_first": Layer("linear", (3, 4, 6), (5, 6), axis=BatchAxis(1)),
    "folded": Layer("linear", (12, 6), (5, 6), axis=BatchAxis(0, inner=3)),
    "swapped": Layer("linear", (12, 6), (5, 6), axis=BatchAxis(0, outer=3)),
    "both": Layer("linear", (24, 6), (5, 6), axis=BatchAxis(0, outer=3, inner=2)),
}
CONV_BOTH = conv("conv2d", (24, 2, 4, 4), (3, 2, 3, 3), s=(1, 1), p=(0, 0), d=(1, 1), axis=BatchAxis(0, 3, 2))


def data(layer: Layer, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, weight, bias and output gradient; the samples differ in scale by orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(layer.x, generator=generator)
    weight = torch.randn(layer.weight, generator=generator)
    bias = torch.randn(layer.weight[0], generator=generator)
    grad = torch.randn(layer.apply(x, weight).shape, generator=generator)
    for sample, part in enumerate(layer.split(torch.arange(x.numel()).reshape(x.shape))):
        x.view(-1)[part.reshape(-1)] *= 10.0**sample
    return x, weight, bias, grad


def run(layer: Layer, fmt: str, outputs: str, tensors: tuple[Tensor, ...], *, seed: int = SEED, on: bool = True) -> Any:
    """Output, and the gradients of input, weight and bias, by the operator."""
    x, weight, bias, grad = tensors
    x, weight, bias = (t.detach().clone().requires_grad_() for t in (x, weight, bias))
    axes, geometry = axis_list(layer.axis, layer.axis), geometry_list(layer.geometry)
    policy = torch.tensor([False, on, False])
    static = (layer.op, SITE, CALL, geometry, axes, f"{fmt}/{outputs}/reference")
    y = torch.ops.dpquant.site(x, weight, bias, policy, site_keys(seed, STEP, NAMES), torch.arange(64), *static)
    return y.detach(), *torch.autograd.grad(y, (x, weight, bias), grad)


def expected(layer: Layer, fmt: str, outputs: str, tensors: tuple[Tensor, ...], *, seed: int = SEED) -> Any:
    """The same from the text of DESIGN: round both operands of each product, then torch's autograd on them."""
    x, weight, bias, grad = tensors
    keys = dict(zip(ROLES, site_keys(seed, STEP, NAMES)[SITE], strict=True))
    count = len(layer.split(x))

    def rounded(value: Tensor, role: str) -> Tensor:
        return quantize_values(value, fmt, fold(keys[role], CALL), torch.arange(count), layer.axis, layer.features)

    qx, qgrad = rounded(x, "input"), rounded(grad, "grad_output")
    # Blocks of a weight lie along its rows, and so do those of its gradient.
    only = torch.zeros(1, dtype=torch.int64)
    qweight = quantize_values(weight.flatten(1), fmt, keys["weight"], only, None, 1).reshape(weight.shape)
    qx, qweight = qx.requires_grad_(), qweight.requires_grad_()
    y = layer.apply(qx, qweight)
    dx, dw = torch.autograd.grad(y, (qx, qweight), qgrad)
    axis = [d for d in range(grad.dim()) if d != layer.features % grad.dim()]
    y = y.detach() + (bias if layer.geometry is None else bias.view(-1, *[1] * (grad.dim() - 2)))
    if outputs != "none":
        y, dx = rounded(y, "output"), rounded(dx, "grad_input")
    if outputs == "all":
        dw = torch.zeros_like(weight)
        for i, (xi, gi) in enumerate(zip(layer.split(qx.detach()), layer.split(qgrad), strict=True)):
            (each,) = torch.autograd.grad(layer.apply(xi, qweight), qweight, gi)
            key, ids = fold(keys["grad_weight"], CALL), torch.tensor([i])
            dw += quantize_values(each[None].flatten(2), fmt, key, ids, BatchAxis(0), 2).reshape(weight.shape)
    return y, dx, dw, grad.sum(axis)


def same(got: Any, wanted: Any, tolerance: float = 0.0) -> None:
    for what, a, b in zip(("output", "grad_input", "grad_weight", "grad_bias"), got, wanted, strict=True):
        assert a.shape == b.shape, what
        off, size = (a - b).abs().max().item(), b.abs().max().item()
        assert off <= tolerance * size, f"{what}: largest difference {off:.3g} of {size:.3g}"


@pytest.mark.parametrize("outputs", ["none", "flow", "all"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_site_is_autograd_on_rounded_operands(name: str, fmt: str, outputs: str) -> None:
    layer = LAYERS[name]
    tensors = data(layer)
    # For one sample of a conv1d, autograd sums in another order than the whole batch's kernel.
    tolerance = 1e-6 if name == "conv1d" and outputs == "all" else 0.0
    same(run(layer, fmt, outputs, tensors), expected(layer, fmt, outputs, tensors), tolerance)


@pytest.mark.parametrize("name", LAYERS)
def test_a_site_that_is_off_is_the_plain_operator(name: str) -> None:
    layer = LAYERS[name]
    x, weight, bias, grad = tensors = data(layer)
    x, weight, bias = (t.clone().requires_grad_() for t in (x, weight, bias))
    y = layer.apply(x, weight, bias)
    same(run(layer, "luq_fp4", "all", tensors, on=False), (y, *torch.autograd.grad(y, (x, weight, bias), grad)))


def test_a_conv_whose_batch_is_folded_on_both_sides_quantizes_its_weight_gradient() -> None:
    tensors = data(CONV_BOTH)
    same(run(CONV_BOTH, "luq_fp4", "none", tensors), expected(CONV_BOTH, "luq_fp4", "none", tensors))
    same(run(CONV_BOTH, "luq_fp4", "all", tensors), expected(CONV_BOTH, "luq_fp4", "all", tensors))


@pytest.mark.parametrize("name", ["conv2d", "depthwise", "linear", "linear3d"])
def test_all_sums_the_rounded_per_sample_gradients_of_vmap(name: str) -> None:
    layer, fmt = LAYERS[name], "luq_fp4"
    x, weight, _, grad = tensors = data(layer)
    keys = dict(zip(ROLES, site_keys(SEED, STEP, NAMES)[SITE], strict=True))
    ids = torch.arange(BATCH)
    qx = quantize_values(x, fmt, fold(keys["input"], CALL), ids, layer.axis)
    qgrad = quantize_values(grad, fmt, fold(keys["grad_output"], CALL), ids, layer.axis)

    def loss(weight: Tensor, x: Tensor, grad: Tensor) -> Tensor:
        return (layer.apply(x[None], weight)[0] * grad).sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weight, qx, qgrad)
    got = run(layer, fmt, "all", tensors)[2]
    wanted = quantize_values(each, fmt, fold(keys["grad_weight"], CALL), ids, BatchAxis(0)).sum(0)
    # vmap sums in another order, so single elements may round the other way.
    close = torch.isclose(got, wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item())
    assert close.float().mean() > 0.95
    unrounded = run(layer, fmt, "none", tensors)[2]
    assert torch.allclose(each.sum(0), unrounded, rtol=1e-4, atol=1e-4 * unrounded.abs().max().item())
    assert not torch.allclose(got, unrounded, rtol=1e-2)


def largest_z(layer: Layer, fmt: str, outputs: str, seeds: int) -> float:
    """How far the means over `seeds` lie from full precision, in standard errors: the worst element of any result."""
    tensors = data(layer)
    runs = [run(layer, fmt, outputs, tensors, seed=seed)[:3] for seed in range(seeds)]
    exact = run(layer, fmt, outputs, tensors, on=False)[:3]
    worst = 0.0
    for got, wanted in zip(zip(*runs, strict=True), exact, strict=True):
        draws = torch.stack(got).double()
        spread = draws.std(0) / math.sqrt(seeds) + 1e-6 * wanted.abs() + 1e-30
        worst = max(worst, ((draws.mean(0) - wanted) / spread).abs().max().item())
    return worst


ROUNDED = [("strided", "all"), ("linear3d", "all"), ("linear3d", "none")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "outputs"), few(ROUNDED, ("strided", "all"), ("linear3d", "none")))
@pytest.mark.parametrize("fmt", FORMATS)
def test_rounding_has_no_bias(name: str, fmt: str, outputs: str) -> None:
    # Fewer draws would not do: LUQ's rare large roundings make the tails of z heavy (5.8 at 100 draws, 3.2 at 1600).
    assert largest_z(LAYERS[name], fmt, outputs, 250) < 5


def test_the_test_of_bias_catches_rounding_down(monkeypatch: pytest.MonkeyPatch) -> None:
    fair = rounding._uniform
    monkeypatch.setattr(rounding, "_uniform", lambda bits: fair(bits).sqrt())
    assert largest_z(LAYERS["linear3d"], "uniform4", "none", 100) > 10


def spoilt(layer: Layer, tensors: tuple[Tensor, ...], value: float) -> tuple[Tensor, ...]:
    """The same batch with its third sample spoilt, in the input and in the output gradient."""
    x, weight, bias, grad = tensors
    x, grad = x.clone(), grad.clone()
    for tensor in (x, grad):
        hit = layer.split(torch.arange(tensor.numel()).reshape(tensor.shape))[2].reshape(-1)
        tensor.view(-1)[hit[:: max(1, len(hit) // 3)]] = value
    return x, weight, bias, grad


def differing_samples(layer: Layer, fmt: str, outputs: str, value: float) -> set[int]:
    tensors = data(layer)
    before = run(layer, fmt, outputs, tensors)
    after = run(layer, fmt, outputs, spoilt(layer, tensors, value))
    pairs = [zip(layer.split(a), layer.split(b), strict=True) for a, b in zip(before[:2], after[:2], strict=True)]
    return {i for samples in pairs for i, (a, b) in enumerate(samples) if not torch.equal(a, b)}


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", LAYERS)
def test_an_outlier_changes_no_other_sample(name: str, fmt: str) -> None:
    for outputs in ("none", "flow"):
        assert differing_samples(LAYERS[name], fmt, outputs, 1e6) == {2}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_not_finite_stays_in_its_sample(name: str, value: float) -> None:
    layer = LAYERS[name]
    for fmt in FORMATS:
        assert differing_samples(layer, fmt, "flow", value) == {2}
        y, dx, *_ = run(layer, fmt, "flow", spoilt(layer, data(layer), value))
        for result in (y, dx):
            assert [bool(part.isfinite().all()) for part in layer.split(result)] == [True, True, False, True]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", ["conv2d", "linear", "linear3d"])
def test_a_sample_more_in_the_batch_changes_no_rounding(name: str, fmt: str) -> None:
    layer = LAYERS[name]
    x, *_ = data(layer)
    key, more = site_keys(0, 0, NAMES)[0, 0], torch.cat([x, 1e9 * x[:1]])
    few = quantize_values(x, fmt, key, torch.arange(BATCH), layer.axis, layer.features)
    many = quantize_values(more, fmt, key, torch.arange(BATCH + 1), layer.axis, layer.features)
    assert torch.equal(few, many[:BATCH])


@pytest.mark.parametrize("name", ["conv2d", "depthwise", "linear", "folded"])
def test_the_isolation_test_catches_one_scale_for_the_whole_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def batch_wide(x: Tensor) -> Tensor:
        return x.amax().reshape([1] * x.dim()).expand([x.shape[0], *[1] * (x.dim() - 1)])

    assert differing_samples(LAYERS[name], "luq_fp4", "none", 1e6) == {2}
    monkeypatch.setattr(rounding, "sample_max", batch_wide)
    assert differing_samples(LAYERS[name], "luq_fp4", "none", 1e6) == {0, 1, 2, 3}


@pytest.mark.parametrize("outputs", ["none", "flow", "all"])
@pytest.mark.parametrize("name", ["conv2d", "conv3d", "linear", "time_first", "folded"])
def test_memory_layout_changes_no_bit_of_the_rounding(name: str, outputs: str) -> None:
    layer = LAYERS[name]
    x, weight, bias, grad = tensors = data(layer)
    strange = tuple(t.transpose(0, -1).contiguous().transpose(0, -1) for t in (x, weight))
    assert not strange[0].is_contiguous()
    for fmt in FORMATS:
        got, wanted = run(layer, fmt, outputs, (*strange, bias, grad)), run(layer, fmt, outputs, tensors)
        for a, b in zip(got, wanted, strict=True):
            # Products may sum in another order on another layout; rounding to another level would show.
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item())


@pytest.mark.parametrize("outputs", ["none", "flow", "all"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", LAYERS)
def test_the_specialised_site_is_the_switched_one_bit_for_bit(name: str, fmt: str, outputs: str) -> None:
    layer = LAYERS[name]
    x, weight, bias, grad = tensors = data(layer)
    x, weight, bias = (t.clone().requires_grad_() for t in (x, weight, bias))
    static = (geometry_list(layer.geometry), axis_list(layer.axis, layer.axis), f"{fmt}/{outputs}/reference")
    keys, samples = site_keys(SEED, STEP, NAMES), torch.arange(64)
    y = low_precision_site(x, weight, bias, keys, samples, layer.op, SITE, CALL, *static)
    same((y, *torch.autograd.grad(y, (x, weight, bias), grad)), run(layer, fmt, outputs, tensors))


def test_bits_change_with_step_site_and_call_and_weights_do_not_depend_on_the_call() -> None:
    layer = LAYERS["linear"]
    x, weight, bias, _ = data(layer)
    axes = axis_list(layer.axis, layer.axis)

    def output(step: int = 0, site: int = 0, call: int = 0, x: Tensor = x) -> Tensor:
        keys, on = site_keys(0, step, NAMES), torch.ones(3, dtype=torch.bool)
        recipe = "luq_fp4/none/reference"
        return torch.ops.dpquant.site(
            x, weight, bias, on, keys, torch.arange(9), "linear", site, call, [], axes, recipe
        )

    assert torch.equal(output(), output())
    for change in ({"step": 1}, {"site": 1}, {"call": 1}):
        assert not torch.equal(output(), output(**change))
    onehot = torch.eye(40)[:BATCH]  # on the grid: only the weight is rounded
    assert torch.equal(output(call=0, x=onehot), output(call=1, x=onehot))
    assert not torch.equal(output(step=0, x=onehot), output(step=1, x=onehot))


CONV = ConvGeometry((1, 1), (1, 1), (1, 1), 1)


def sample_inputs(op: str, on: bool, bias: bool, outputs: str, channels_last: bool = False) -> tuple[Any, ...]:
    x = torch.randn((3, 2, 5, 5) if op == "conv2d" else (3, 4, 6), requires_grad=True)
    if channels_last:
        x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn((4, 2, 3, 3) if op == "conv2d" else (5, 6), requires_grad=True)
    offset = torch.randn(weight.shape[0], requires_grad=True) if bias else None
    geometry = geometry_list(CONV if op == "conv2d" else None)
    axes = axis_list(BatchAxis(0), BatchAxis(0))
    table = (torch.tensor([not on, on]), site_keys(0, 0, ("a", "b")), torch.arange(16))
    return (x, weight, offset, *table, op, 1, 0, geometry, axes, f"luq_fp4/{outputs}/reference")


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("on", [True, False], ids=["low", "full"])
@pytest.mark.parametrize("op", ["conv2d", "linear"])
def test_opcheck_of_the_switch(op: str, on: bool, bias: bool) -> None:
    for outputs in ("none", "all"):
        torch.library.opcheck(torch.ops.dpquant.site.default, sample_inputs(op, on, bias, outputs))


def test_opcheck_of_a_channels_last_conv() -> None:
    for on in (True, False):
        args = sample_inputs("conv2d", on, True, "none", channels_last=True)
        torch.library.opcheck(torch.ops.dpquant.site.default, args)
        y = torch.ops.dpquant.site(*args)
        assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["site_grad_input", "site_grad_params"])
def test_opcheck_of_the_gradients(name: str) -> None:
    x, weight, _, *table, op, site, number, geometry, axes, recipe = sample_inputs("conv2d", True, True, "none")
    needs = (True, False) if name == "site_grad_params" else ()
    grad, x, weight = torch.randn(3, 4, 5, 5), x.detach(), weight.detach()
    args = (grad, x, weight, *table, *needs, op, site, number, geometry, axes, recipe)
    torch.library.opcheck(getattr(torch.ops.dpquant, name).default, args)
