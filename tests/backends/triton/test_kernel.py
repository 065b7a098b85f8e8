"""The Triton family in Triton's interpreter: each product is, bit for bit, exact arithmetic on the reference's codes,
and private steps train as with `cpu_int8`. Nothing here has run on hardware."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import dpquant_compile as dpq
from dpquant_compile.backends.cpu_int8 import build as native
from dpquant_compile.backends.registry import Operand, choose_kernel
from dpquant_compile.backends.triton import kernel as triton_kernel
from dpquant_compile.backends.triton.kernel import TRITON
from dpquant_compile.explain import explain, kernels_of
from dpquant_compile.numerics.recipe import Recipe
from dpquant_compile.sites import BatchAxis
from dpquant_compile.spec import CompileSpec
from tests.support.heavy import few
from tests.support.int8_cases import (
    MIXED,
    NAMES,
    Case,
    check_a_sample_that_is_not_finite,
    check_layouts,
    check_products,
    check_samples_do_not_see_each_other,
    conv_case,
    convs,
    extreme,
    linear_case,
    linears,
    transposed,
)
from tests.support.private import assert_close, clipped_sums, made_private, reference_sums

pytestmark = pytest.mark.slow  # the interpreter takes milliseconds for each program of a kernel

DEFAULT = Recipe(rotated=False).numbers  # kernels get operands that are rotated already
RECIPES = ("luq_fp4", "int8.nearest", DEFAULT)


def check(case: Case) -> None:
    """All products of one call and their norms, bit for bit; weighted sums to float32's rounding."""
    squares = check_products(case)
    x, grad, _ = case.operands()
    norms = case.kernel.sample_norms(x, grad, case.shapes, "", case.call, case.streams)
    assert torch.equal(norms, squares * (x.unit.double() * grad.unit.double()).square())


@pytest.mark.heavy
@settings(max_examples=30)
@given(convs("triton"))
def test_any_convolution_is_exact(case: Case) -> None:
    check(case)


@pytest.mark.heavy
@settings(max_examples=20)
@given(linears("triton"))
def test_any_linear_is_exact(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("fmt", few(NAMES, *RECIPES))
def test_products_are_exact_in_every_format(fmt: str) -> None:
    check(conv_case(fmt, 2, 5, 6, (5, 4), (3, 2), (2, 1), (1, 0), (1, 2), 1, 4, backend="triton"))
    check(linear_case(fmt, (3, 2, 21), BatchAxis(0), 9, 8, "triton"))


def test_groups_and_channels_beyond_a_tile_are_exact() -> None:
    check(conv_case(DEFAULT, 2, 34, 36, (3, 3), (2, 1), (1, 1), (1, 0), (1, 1), 2, 4, True, "triton"))
    check(linear_case(DEFAULT, (2, 70), BatchAxis(0), 66, 8, "triton"))


@pytest.mark.parametrize("fmt", few(NAMES, DEFAULT))
def test_the_extremes_do_not_overflow(fmt: str) -> None:
    for sign in (1.0, -1.0):
        check(extreme(fmt, sign, "triton"))


@pytest.mark.parametrize(
    ("fmt", "width"), few([("luq_fp4", 600_000), ("int8.nearest", 140_000)], ("int8.nearest", 140_000))
)
def test_long_contractions_are_split(fmt: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of 64 · 64 pass 2^31 after 2^19 products, of 127 · 127 after 133,000."""
    for name in ("_DEPTH", "_BLOCK"):
        monkeypatch.setattr(triton_kernel, name, 1 << 14)  # the interpreter takes a minute in small steps
    case = linear_case(fmt, (2, width), BatchAxis(0), 3, 0, "triton")
    case = Case(case.call, case.shapes, torch.ones(2, width), torch.ones(3, width), case.grad, case.streams)
    (qx, ux), (qw, uw) = case.parts("x"), case.parts("weight")
    x, _, packed = case.operands()
    y = case.kernel.product(x, packed, None, case.shapes, case.call, case.streams)
    assert (qx @ qw.t()).max() > 2**31 and torch.equal(y, (qx @ qw.t()).float() * (ux * uw)[:, None])


def test_norms_beyond_64_bits_are_taken_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_SUMMED", 0)
    check(conv_case(DEFAULT, 2, 3, 4, (4, 4), (3, 3), (1, 1), (1, 1), (1, 1), 1, 1, backend="triton"))


def test_maps_too_large_for_32_bits_are_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and weighted sums are then those of the numbers that the codes stand for, in float32."""
    case = conv_case(DEFAULT, 2, 3, 4, (6, 6), (3, 3), (1, 1), (1, 1), (1, 1), 1, 1, backend="triton")
    x, grad, _ = case.operands()
    rest, factors = (case.shapes, case.call, case.streams), torch.tensor([0.5, 2.0])
    exact = case.kernel.weighted_grad(x, grad, factors, *rest)
    norms = case.kernel.sample_norms(x, grad, case.shapes, "direct", case.call, case.streams)
    monkeypatch.setattr(triton_kernel, "_LONGEST", 8)
    torch.testing.assert_close(case.kernel.weighted_grad(x, grad, factors, *rest), exact)
    dense = case.kernel.sample_norms(x, grad, case.shapes, "direct", case.call, case.streams)
    assert (dense >= norms * (1 - 1e-6)).all() and torch.allclose(dense.double(), norms, rtol=1e-3)


@pytest.mark.parametrize("fmt", few(["luq_fp4", "int8.nearest", "int4.channel", "int4.block"], "int4.channel"))
@pytest.mark.parametrize("channels", [3, 40])
def test_layouts_are_rounded_alike(channels: int, fmt: str) -> None:
    check_layouts(fmt, channels, "triton")


@pytest.mark.parametrize("fmt", ["luq_fp4", DEFAULT])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sample_that_is_not_finite_stays_alone(bad: float, fmt: str) -> None:
    check_a_sample_that_is_not_finite(fmt, bad, "triton")


@pytest.mark.parametrize("fmt", few([*RECIPES, MIXED[2]], DEFAULT))
def test_samples_do_not_see_each_other(fmt: str) -> None:
    check_samples_do_not_see_each_other(fmt, "triton")


def test_terms_that_cancel_count_nothing_where_float32_cannot_hold_factor_and_units() -> None:
    case = linear_case("int8.nearest", (2, 8, 20), BatchAxis(0), 5, 0, "triton")
    case.x[:], case.grad[:, ::2], case.grad[:, 1::2] = 1.0, 1.0, -1.0
    case.x[1] *= 2e21
    case.grad[1] *= 2e21
    x, grad, _ = case.operands()
    factors = torch.tensor([1.0, 100.0])
    assert not case.kernel.weighted_grad(x, grad, factors, case.shapes, case.call, case.streams).any()


@pytest.mark.parametrize("size", [2.0**-126, 2.0**-120, 1e-30, 1e38])
@pytest.mark.parametrize("fmt", few(NAMES, *RECIPES))
def test_tiny_and_huge_numbers_are_coded_alike(fmt: str, size: float) -> None:
    """Subnormals count as zeros, and units stay normal numbers."""
    case = linear_case(fmt, (4, 33), BatchAxis(0), 2, 1, "triton")
    x = case.x.clamp(-1, 1) * size
    x[:, :3] = torch.tensor([-0.0, 1e-40, -1e-45])
    x[2] = x[2].abs()
    x[3] = 0.0
    case = Case(case.call, case.shapes, x, case.weight, case.grad, case.streams)
    q, unit = case.parts("x")
    found = case.kernel.operand(x, "input", case.call, case.streams)
    assert torch.equal(found.codes.view(x.shape).double(), q) and torch.equal(found.unit, unit)


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
@pytest.mark.parametrize("fmt", few(NAMES, *RECIPES))
def test_random_bits_and_codes_are_those_of_cpu_int8(fmt: str) -> None:
    """On sizes with many groups and several programs, for all three operands."""
    for backend in ("triton", "cpu_int8"):
        case = conv_case(fmt, 2, 40, 18, (9, 7), (3, 1), (1, 1), (1, 0), (1, 1), 1, 3, True, backend)
        x, grad, _ = case.operands()
        values, _ = case.kernel._values(Operand(x.codes, x.unit), grad, case.shapes, case.call)
        y = case.kernel.forward(case.x, case.weight, None, case.call, case.streams)
        if backend == "triton":
            expected = values.codes, y
    assert torch.equal(values.codes, expected[0]) and torch.equal(y, expected[1])


def test_an_empty_map_and_an_empty_batch_give_zeros() -> None:
    case = linear_case(DEFAULT, (2, 3, 4), BatchAxis(0), 5, 0, "triton")
    for x in (torch.zeros(2, 0, 4), torch.zeros(0, 3, 4)):
        streams = type(case.streams)(case.streams.keys, case.streams.samples[: x.shape[0]])
        y = case.kernel.forward(x, case.weight, None, case.call, streams)
        assert y.shape == (*x.shape[:2], 5)
        assert not case.kernel.grad_weight(torch.zeros(y.shape), x, case.weight, case.call, streams).any()


def test_a_transposed_weight_is_exact() -> None:
    check(transposed(linear_case(DEFAULT, (2, 3, 20), BatchAxis(0), 17, 5, "triton")))


def test_activations_are_kept_in_a_quarter() -> None:
    case = conv_case(DEFAULT, 2, 16, 4, (4, 4), (1, 1), (1, 1), (0, 0), (1, 1), 1, 9, backend="triton")
    x = case.kernel.operand(case.x, "input", case.call, case.streams)
    assert sum(part.numel() * part.element_size() for part in x) <= 0.3 * case.x.numel() * case.x.element_size()


# Private steps of whole models


class Net(nn.Module):
    """Convs on maps of 16 pixels, a linear at five places, and one at a single place if there is a head."""

    def __init__(self, head: bool) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(2, 6, 3, padding=1), nn.GroupNorm(2, 6)
        self.conv2 = nn.Conv2d(6, 5, 3, stride=1, padding=1, groups=1)
        self.mix = nn.Linear(16, 7)
        self.head = nn.Linear(7, 3) if head else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.norm(self.conv1(x)).relu()).relu()
        return self.head(self.mix(y.flatten(2)).mean(1))  # type: ignore[no-any-return]


def seeded_net(head: bool) -> Net:
    torch.manual_seed(3)
    return Net(head)


X = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(4))
OPTIONS: dict[str, dict[str, Any]] = {
    "luq_fp4": {"format": "luq_fp4"},
    "int8": {"recipe": "int8"},
    "int4": {"recipe": "int4"},
}


def trained(head: bool, backend: str, steps: int, **options: Any) -> dict[str, Tensor]:
    """The parameters after private steps with noise, all sites low."""
    model = seeded_net(head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled, made, _ = made_private(
        model, 3, policy="all", optimizer=optimizer, noise_multiplier=1.0, backend=backend, inner="eager", **options
    )
    for _ in range(steps):
        made.zero_grad()
        compiled(X).square().sum().backward()
        made.step()
    return {name: parameter.detach().clone() for name, parameter in compiled.named_parameters()}


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
@pytest.mark.parametrize("name", OPTIONS)
def test_private_steps_are_those_of_cpu_int8_bit_for_bit(name: str) -> None:
    """With norms, clip factors, noise and optimizer: where no map is so small that `cpu_int8` sums in float32."""
    ours, theirs = (trained(False, backend, 2, **OPTIONS[name]) for backend in ("triton", "cpu_int8"))
    before = dict(seeded_net(False).named_parameters())
    for key, value in theirs.items():
        assert torch.equal(ours[key], value), key
        assert not torch.equal(value, before[key])


@pytest.mark.parametrize("name", OPTIONS)
def test_clipped_sums_are_those_of_the_reference(name: str) -> None:
    """To float32's rounding, in which the reference computes its products: one step, since rounding may amplify it."""
    model = seeded_net(True)
    compiled, _, _ = made_private(
        copy.deepcopy(model), 3, policy="all", backend="triton", inner="eager", **OPTIONS[name]
    )
    found = clipped_sums(compiled, [X])
    assert_close(found, reference_sums(model, [X], policy="all", **OPTIONS[name]))


@pytest.mark.heavy
def test_a_compiled_private_program_is_the_interpreted_one() -> None:
    """Inductor's program calls the same kernels, and its layouts are those that tracing foresaw."""
    found = []
    for inner in ("eager", "inductor"):
        model, _, _ = made_private(seeded_net(True), 3, policy="all", backend="triton", inner=inner, recipe="int4")
        found.append(clipped_sums(model, [X]))
    assert_close(found[1], found[0])


def test_training_without_privacy_is_that_of_the_reference() -> None:
    grads = []
    for backend in ("triton", "reference"):
        model = dpq.compile(seeded_net(True), budget=1.0, backend=backend, inner="eager").train()
        model(X).square().sum().backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert_close(*grads)


# The choice of the family


def test_the_interpreter_runs_only_where_it_is_asked_for() -> None:
    call = linear_case("luq_fp4", (2, 3), BatchAxis(0), 2, 0, "auto").call
    cpu = torch.device("cpu")
    assert choose_kernel(call, cpu).kernel is not TRITON
    assert "where backend='triton' asks for it" in str(TRITON.supports(call, cpu))
    asked = linear_case("luq_fp4", (2, 3), BatchAxis(0), 2, 0, "triton").call
    assert str(choose_kernel(asked, cpu)) == "triton (native)"


def test_weights_of_other_dtypes_go_to_the_reference() -> None:
    model = dpq.compile(nn.Linear(4, 4).double(), budget=1, backend="triton", inner="eager").train()
    (row,) = model.explain()
    assert row.kernel == "reference (emulated)" and "its weight is torch.float64" in row.note
    other = dpq.compile(copy.deepcopy(model.original), budget=1, backend="reference", inner="eager").train()
    x = torch.randn(2, 4, dtype=torch.float64)
    assert torch.equal(model(x), other(x))


def test_explain_says_that_it_never_ran_on_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    choose_kernel.cache_clear()
    device, model = torch.device("cuda"), dpq.compile(nn.Linear(4, 4), budget=1).train()
    for recipe, said in ((Recipe(), "triton (native)"), (Recipe.parse("fp8_e4m3.nearest"), "not used yet: fp8")):
        what = CompileSpec(1, recipe)
        text = str(explain(model.sites, model.policy, what, device, True, kernels_of(what, device, {}), {}))
        assert said in text and "never run on hardware" in text
    choose_kernel.cache_clear()
