"""Faults that a review of the int8 backend found: nothing that cancels, overflows or underflows gets past clipping."""

import copy

import pytest
import torch
import torch.nn.functional as F
from private import clipped_sums, made_private
from torch import Tensor, nn

import dpquant_compile as dpq
from dpquant_compile.backends.cpu_int8 import build as native
from dpquant_compile.backends.cpu_int8 import kernel as cpu_int8
from dpquant_compile.backends.cpu_int8.sized_call import FORMATS, Sizes, sizes_of, table_of
from dpquant_compile.backends.ops.site import axis_list, site_call
from dpquant_compile.backends.registry import Operand, Shapes, Streams
from dpquant_compile.numerics.random_bits import site_keys
from dpquant_compile.sites import BatchAxis

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

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
    problem, source = sizes.problem(FORMATS["luq_fp4"]), table_of(shapes, CALL, sizes).source
    found = torch.empty(1, dtype=torch.float64)
    for way in ("gram", "direct"):
        codes = [torch.cat([(v + 64).to(torch.uint8).flatten(), torch.zeros(64, dtype=torch.uint8)]) for v in (x, grad)]
        native.load()(f"norms_{way}", problem, *codes, source, found)
        assert float(found) == float(exact.square().sum()), way


def test_gram_is_not_taken_where_its_sums_could_overflow() -> None:
    small = Sizes(8, 64, 128, 64, 128, 1, 9)
    assert cpu_int8.norm_method(small) == "gram"
    large = Sizes(8, 1 << 12, 1 << 15, 1 << 12, 1 << 15, 1, 1)
    assert large.features * large.channels * (4096 * large.pixels) ** 2 >= 2**63
    assert cpu_int8.norm_method(large) == "direct"


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


def test_a_weight_in_two_geometries_is_two_sites() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, 3, 3) / 6)

        def forward(self, x: Tensor) -> Tensor:
            near = F.conv2d(x, self.weight, padding=1)
            return (
                near
                + F.conv2d(x, self.weight, padding=2, dilation=2)
                + F.conv2d(x[:, :, 1:], self.weight, padding=1).mean()
            )

    torch.manual_seed(0)
    plain = Twice()
    model = dpq.compile(plain, budget=0, backend="reference", inner="eager").train()
    x = torch.randn(3, 4, 6, 6)
    torch.testing.assert_close(model(x), plain(x))
    assert len(model.sites) == 2 and {site.geometry.dilation for site in model.sites if site.geometry} == {
        (1, 1),
        (2, 2),
    }


def test_one_weight_packed_for_two_geometries() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, 3, 3) / 6)

        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(x, self.weight, padding=1) + F.conv2d(x, self.weight, padding=2, dilation=2)

    sums = []
    for backend in ("reference", "cpu_int8"):
        torch.manual_seed(0)
        model, _, _ = made_private(Twice(), 3, policy="all", backend=backend, inner="eager")
        sums.append(clipped_sums(model, [torch.randn(3, 4, 6, 6, generator=torch.Generator().manual_seed(1))]))
    torch.testing.assert_close(sums[0]["weight"], sums[1]["weight"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_two_draws_stay_two_draws(inner: str) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.fc(x)
            return h + torch.randn_like(h) - torch.randn_like(h)

    model, _, _ = made_private(Noisy(), 3, backend="reference", inner=inner)
    x = torch.randn(3, 4)
    assert (model(x) - model.fc(x)).abs().max() > 0.1


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
