"""The int8 backend: each product is, bit for bit, exact arithmetic on the reference's codes, for any geometry."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import dpquant_compile as dpq
from dpquant_compile.backends.cpu_int8 import build as native
from dpquant_compile.backends.cpu_int8 import kernel as cpu_int8
from dpquant_compile.backends.cpu_int8.codes import Codes, codes_of
from dpquant_compile.backends.cpu_int8.conv_tables import backward_table, forward_table
from dpquant_compile.backends.cpu_int8.sized_call import Sizes, sized_call, sizes_of, table_of
from dpquant_compile.backends.cpu_int8.weights import packing
from dpquant_compile.backends.ops.site import axis_list, site_arguments, site_call
from dpquant_compile.backends.registry import Operand, Shapes, Streams, choose_kernel
from dpquant_compile.numerics.operand_spec import OperandSpec
from dpquant_compile.numerics.random_bits import site_keys
from dpquant_compile.sites import BatchAxis
from tests.support.int8_cases import (
    KEYS,
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
from tests.support.private import clipped_sums, made_private

KERNEL: Any = cpu_int8.CPU_INT8.arithmetic
pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))


def check(case: Case) -> None:
    """All products of one call, bit for bit, and both ways to its norms."""
    squares = check_products(case, cpu_int8._SHORT)
    shapes, call, (x, grad, _) = case.shapes, case.call, case.operands()
    sizes, sized = sizes_of(shapes, call), sized_call(shapes, call)
    source = table_of(shapes, call, sizes).source
    for way in ("gram", "direct"):
        found = torch.empty(shapes.batch, dtype=torch.float64)
        native.load()(
            f"norms_{way}", sizes.problem(sized.x_codes, sized.grad_codes), x.codes, grad.codes, source, found
        )
        assert torch.equal(found, squares), way


@settings(max_examples=120, deadline=None)
@given(convs())
def test_any_convolution_is_exact(case: Case) -> None:
    check(case)


@settings(max_examples=60, deadline=None)
@given(linears())
def test_any_linear_is_exact(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("batch", [6, 8])
def test_tiles_across_samples_are_exact(batch: int) -> None:
    """On small maps a tile takes one pixel of several samples; the last tile may not be full."""
    case = conv_case("luq_fp4", batch, 20, 18, (2, 3), (3, 3), (1, 1), (1, 1), (1, 1), 1, 3, True)
    plan, rows = sized_call(case.shapes, case.call), native.load().rows
    for product in (plan.forward, plan.backward):
        assert product.table.across(batch, rows) and not product.table.across(1, rows)
    check(case)


@pytest.mark.parametrize("fmt", ["luq_fp4", "int8.nearest", "int4.channel", "int4.nearest.channel", "int4.block"])
@pytest.mark.parametrize("channels", [3, 40, 600])
def test_layouts_are_rounded_alike(channels: int, fmt: str) -> None:
    check_layouts(fmt, channels)


@pytest.mark.parametrize("fmt", NAMES)
def test_the_extremes_do_not_overflow(fmt: str) -> None:
    """All codes at their largest, alike and opposed: no 16-bit sum may wrap, at any depth."""
    for sign in (1.0, -1.0):
        check(extreme(fmt, sign))


@pytest.mark.parametrize(("fmt", "width"), [("luq_fp4", 600_000), ("int8.nearest", 200_000)])
def test_long_contractions_are_split(fmt: str, width: int) -> None:
    case = linear_case(fmt, (2, width), BatchAxis(0), 3, 0)
    case = Case(case.call, case.shapes, torch.ones(2, width), torch.ones(3, width), case.grad, case.streams)
    x, _, packed = case.operands()
    y = KERNEL.product(x, packed, None, case.shapes, case.call, case.streams)
    # 2^18 products of 64 · 64 pass 2^30, and with the zero point 2^31; of 127 · 127, 2^17 do.
    assert torch.allclose(y, torch.full((2, 3), float(width)), rtol=2**-14, atol=0)


@pytest.mark.parametrize("fmt", ["luq_fp4", "int8.nearest", MIXED[1]])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sample_that_is_not_finite_stays_alone(bad: float, fmt: str) -> None:
    check_a_sample_that_is_not_finite(fmt, bad)


@pytest.mark.parametrize("fmt", NAMES)
def test_samples_do_not_see_each_other(fmt: str) -> None:
    check_samples_do_not_see_each_other(fmt)


@pytest.mark.parametrize("fmt", ["luq_fp4", "int8", MIXED[1], MIXED[2]])
def test_threads_change_nothing(fmt: str) -> None:
    case = conv_case(fmt, 5, 20, 40, (9, 9), (3, 3), (1, 1), (1, 1), (1, 1), 1, 6)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            x, grad, packed = case.operands()
            parts = (case.shapes, case.call, case.streams)
            total = KERNEL.weighted_grad(x, grad, torch.linspace(0.2, 1, 5), *parts)
            norms = KERNEL.sample_norms(x, grad, case.shapes, "", case.call, case.streams)
            found.append((KERNEL.product(x, packed, None, *parts), total, norms))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


_OLDER = [
    pytest.param("scalar", ("-mno-avx", "-mno-avx2"), id="scalar", marks=pytest.mark.heavy),
    pytest.param("AVX2", ("-march=haswell",), id="AVX2"),
]


@pytest.mark.skipif(not native.load().name.startswith("AVX"), reason="these are older instructions of x86-64")
@pytest.mark.parametrize(("name", "target"), _OLDER)
def test_kernels_for_older_processors_agree(
    name: str, target: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What other CPUs would run, down to the plain C++ loops."""
    older = native.Library(native.build(target))
    assert older.name == name
    monkeypatch.setattr(native, "load", lambda: older)
    for cached in (sized_call, packing):
        cached.cache_clear()  # they know the sizes of this machine's tiles
    try:
        check(conv_case("luq_fp4", 3, 20, 18, (7, 6), (3, 3), (2, 1), (1, 1), (1, 1), 1, 7))
        check(conv_case("luq_fp4", 5, 16, 40, (9, 9), (3, 3), (1, 1), (1, 1), (1, 1), 2, 7))
        check(linear_case("uniform4", (3, 4, 21), BatchAxis(0), 9, 8))
        for fmt in ("int8.nearest", *MIXED):
            check(conv_case(fmt, 3, 20, 18, (7, 6), (3, 3), (2, 1), (1, 1), (1, 1), 1, 7))
            check(extreme(fmt, 1.0))
            check(extreme(fmt, -1.0))
    finally:
        for cached in (sized_call, packing):
            cached.cache_clear()


def test_activations_are_kept_in_a_quarter() -> None:
    case = conv_case("luq_fp4", 8, 32, 32, (16, 16), (3, 3), (1, 1), (1, 1), (1, 1), 1, 9)
    x = KERNEL.operand(case.x, "input", case.call, case.streams)
    held = sum(part.numel() * part.element_size() for part in x)
    assert held <= 0.3 * case.x.numel() * case.x.element_size()


def test_tables_agree_with_each_other() -> None:
    """The backward table is the forward one, read the other way."""
    call = conv_case("luq_fp4", 1, 1, 1, (5, 6), (3, 2), (2, 3), (1, 0), (1, 2), 1, 0).call
    assert call.geometry is not None
    there, back = forward_table(call.geometry, (5, 6), (3, 2)), backward_table(call.geometry, (5, 6), (3, 2))
    pairs = {(p, t, int(s)) for p in range(there.pixels) for t, s in enumerate(there.source[p]) if s >= 0}
    assert pairs == {(int(s), t, p) for p in range(back.pixels) for t, s in enumerate(back.source[p]) if s >= 0}
    assert sorted(back.order.tolist()) == list(range(back.pixels))


def test_explain_says_native_or_why_not() -> None:
    model = dpq.compile(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 4)), budget=2).train()
    model(torch.randn(2, 3, 6, 6))
    assert all(row.native and "cpu_int8" in row.kernel for row in model.explain())
    for fmt in ("fp8_e5m2", "fp4_e2m1"):
        other = dpq.compile(nn.Linear(4, 4), budget=1, format=fmt).train()
        (row,) = other.explain()
        assert not row.native and "emulated" in row.kernel and f"int8, not {fmt}" in row.note
    (row,) = dpq.compile(nn.Linear(4, 4).double(), budget=1).train().explain()
    assert row.kernel == "reference (emulated)" and "its weight is torch.float64" in row.note


def test_it_is_what_auto_takes() -> None:
    call = site_call("linear", 0, 0, "luq_fp4/none/auto", [0, 1, 1, 0, 1, 1])
    assert choose_kernel(call, torch.device("cpu")).kernel.backend == "cpu_int8"


def coded(text: str) -> Codes:
    found = codes_of(OperandSpec.parse(text))
    assert found is not None
    return found


LUQ, INT8 = coded("luq_fp4"), coded("int8")
CALL = site_call("linear", 0, 0, "luq_fp4/none/cpu_int8", axis_list(BatchAxis(0), BatchAxis(0)))


def norm_of(model: dpq.CompiledModule, x: Tensor, tangent: Tensor) -> float:
    """‖f({x})‖ for one sample with that gradient of its output."""
    torch.autograd.backward([model(x)], [tangent])
    total = sum(p.summed_grad.double().square().sum() for p in model.parameters())  # type: ignore[attr-defined]
    return float(total) ** 0.5


@pytest.mark.parametrize("places", [320, 640])
def test_norms_of_terms_that_cancel_are_exact(places: int) -> None:
    """Gram sums of alternating terms pass 2^53 long before they cancel; what is left must be right to the last unit."""
    width = 1024
    x, grad = torch.full((1, places, width), 64), torch.full((1, places, width), 64)
    grad[:, places // 2 :] = -64
    x[:, 3, 5], x[:, 7, 9], grad[:, 11, 1] = 1, 2, 32
    exact = grad[0].double().t() @ x[0].double()
    shapes = Shapes((1, places, width), (width, width), (1, places, width), 1)
    sizes = sizes_of(shapes, CALL)
    problem, source = sizes.problem(LUQ, LUQ), table_of(shapes, CALL, sizes).source
    found = torch.empty(1, dtype=torch.float64)
    for way in ("gram", "direct"):
        codes = [torch.cat([(v + 64).to(torch.uint8).flatten(), torch.zeros(64, dtype=torch.uint8)]) for v in (x, grad)]
        native.load()(f"norms_{way}", problem, *codes, source, found)
        assert float(found) == float(exact.square().sum()), way


def test_gram_is_not_taken_where_its_sums_could_overflow() -> None:
    small = Sizes(8, 64, 128, 64, 128, 1, 9)
    assert cpu_int8.norm_method(small, LUQ, LUQ) == "gram"
    large = Sizes(8, 1 << 12, 1 << 15, 1 << 12, 1 << 15, 1, 1)
    assert large.features * large.channels * (4096 * large.pixels) ** 2 >= 2**63
    assert cpu_int8.norm_method(large, LUQ, LUQ) == "direct"
    # Larger codes overflow sooner.
    between = Sizes(8, 1 << 7, 1 << 10, 1 << 7, 1 << 10, 1, 9)
    assert cpu_int8.norm_method(between, LUQ, LUQ) == "gram" and cpu_int8.norm_method(between, INT8, INT8) == "direct"


@pytest.mark.parametrize("places", [2, 8])
@pytest.mark.parametrize(("size", "steep"), [(1e30, 1e30), (1e-30, 3.3e38), (7.7e-37, 1e38), (3e38, 1e-36)])
@pytest.mark.parametrize("signs", ["alike", "alternating"])
def test_extreme_scales_are_clipped_or_left_out(places: int, size: float, steep: float, signs: str) -> None:
    bound = 0.1
    model, _, _ = made_private(
        nn.Linear(20, 30, bias=False), 4, bound=bound, policy="all", backend="cpu_int8", inner="eager"
    )
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(1, places, 20, generator=generator) + 0.5).clamp(max=1.0) * size
    tangent = torch.full((1, places, 30), steep)
    if signs == "alternating":
        tangent[:, 1::2] *= -1
        x[:] = size
    moved = norm_of(model, x, tangent)
    assert moved <= bound * (1 + 1e-5), moved


@pytest.mark.parametrize("places", [2, 8])
@pytest.mark.parametrize("size", [1e18, 2e20, 2e21, 1e22])
def test_terms_that_cancel_stay_nothing_when_automatic_clipping_magnifies_them(places: int, size: float) -> None:
    """A gradient of nothing has the largest factor, and float32 may not hold its product with the units."""
    model, _, _ = made_private(
        nn.Linear(20, 30, bias=False), 4, clipping="automatic", policy="all", backend="cpu_int8", inner="eager"
    )
    x, tangent = torch.full((1, places, 20), size), torch.full((1, places, 30), size)
    tangent[:, 1::2] *= -1
    assert norm_of(model, x, tangent) == 0.0


def test_an_empty_map_has_a_unit() -> None:
    streams = Streams(site_keys(0, 0, ("a",)), torch.arange(2))
    operand: Operand = cpu_int8.CPU_INT8.arithmetic.operand(torch.zeros(2, 0, 4), "input", CALL, streams)
    assert operand.unit.isfinite().all()


def test_the_default_dtype_changes_nothing() -> None:
    """The C++ writes float32, whatever a tensor made without a dtype would be."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 36, 5)).float()
    x, found = torch.randn(3, 4, 6, 6), []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            compiled, _, _ = made_private(copy.deepcopy(model), 3, policy="all", backend="auto", inner="eager")
            found.append(clipped_sums(compiled, [x]))
        finally:
            torch.set_default_dtype(torch.float32)
    assert found[0] and all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("fmt", NAMES)
def test_a_transposed_weight_is_exact_and_its_sum_lies_as_the_parameter_does(fmt: str) -> None:
    case = linear_case(fmt, (4, 6, 40), BatchAxis(0), 33, 5)
    turned = transposed(case)
    check(turned)
    x, grad, packed = case.operands()
    y, same = (KERNEL.product(x, w, None, case.shapes, case.call, case.streams) for w in (packed, turned.operands()[2]))
    assert torch.equal(y, same)
    rest = site_arguments((torch.tensor([1]), KEYS, case.streams.samples), case.call)
    for weight, strides in ((case.weight, (40, 1)), (turned.weight, (1, 33))):
        total = torch.ops.dpquant.weighted_grad(
            x=case.x, codes=x.codes, unit=x.unit, grad=case.grad, grad_codes=grad.codes, grad_unit=grad.unit,
            weight=weight, factors=torch.linspace(0.2, 1, 4), **rest,
        )  # fmt: skip
        assert total.stride() == strides
        expected = KERNEL.weighted_grad(x, grad, torch.linspace(0.2, 1, 4), case.shapes, case.call, case.streams)
        assert torch.equal(total, expected)
