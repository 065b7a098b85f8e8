"""Formats: their specs and registry; their rounding is unbiased, on the grid and scale-invariant, with exact scales."""

import math
from collections.abc import Iterator
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import Tensor

from dpquant_compile.errors import FormatError, RegistryError
from dpquant_compile.numerics import formats
from dpquant_compile.numerics.formats import Format, format_names, get_format, register_format
from dpquant_compile.numerics.operand_spec import OperandSpec
from dpquant_compile.numerics.quantize import from_samples, quantize, quantize_values, to_samples
from dpquant_compile.sites import BatchAxis
from tests.support.quantizers import FORMATS, KEY, every_format, every_stochastic, levels_of, normal, parts, same_bits

LARGEST = {"luq_fp4": 64.0, "fp8_e5m2": 57344.0, "uniform4": 7.0, "fp4_e2m1": 6.0, "fp4_e2m1_nv": 6.0}
LARGEST |= {"fp8_e4m3": 448.0, "int8": 127.0, "int4": 7.0}


def round_ternary(x: Tensor, bits: Tensor, block_dim: int) -> tuple[Tensor, Tensor]:
    return x.sign(), x.abs().mean(dim=tuple(range(1, x.dim())), keepdim=True)


@pytest.fixture(autouse=True)
def unchanged_registry() -> Iterator[None]:
    before = dict(formats._FORMATS)
    yield
    formats._FORMATS.clear()
    formats._FORMATS.update(before)


def test_built_in_names_and_bits() -> None:
    assert format_names()[: len(FORMATS)] == FORMATS
    assert [get_format(name).bits for name in FORMATS] == [4, 8, 4, 4, 4, 8, 8, 4]
    assert [get_format(name).block for name in FORMATS] == [None, None, None, 32, 16, None, None, None]
    assert [get_format(name).packable for name in FORMATS] == [True, False, True, True, True, False, False, False]
    assert all(str(get_format(name)) == name and "\n" not in get_format(name).describe for name in FORMATS)


def test_built_in_grids() -> None:
    assert get_format("luq_fp4").grid == (-64, -32, -16, -8, -4, -2, -1, 0, 1, 2, 4, 8, 16, 32, 64)
    assert get_format("uniform4").grid == tuple(range(-8, 8))
    e2m1 = (-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6)
    assert get_format("fp4_e2m1").grid == get_format("fp4_e2m1_nv").grid == e2m1
    assert [get_format(name).symmetric for name in FORMATS] == [True, True, False, True, True, True, True, True]


def test_e5m2_grid_is_torchs() -> None:
    patterns = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e5m2).to(torch.float32)
    expected = patterns[patterns.isfinite()].unique()
    assert torch.equal(torch.tensor(get_format("fp8_e5m2").grid), expected)


def test_e4m3_grid_is_torchs() -> None:
    patterns = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    expected = patterns[patterns.isfinite()].unique()
    assert torch.equal(torch.tensor(get_format("fp8_e4m3").grid), expected)


def test_nearest_is_torchs_cast() -> None:
    """Where torch has the format itself: the same numbers, ties included, subnormals too."""
    x = torch.cat([normal(20000) * 10 ** normal(20000, seed=1), torch.arange(0, 448, 0.125)]).clamp(-448, 448)
    x = torch.cat([torch.tensor([448.0]), x])[None]
    assert torch.equal(quantize(x, "fp8_e4m3.nearest"), x.to(torch.float8_e4m3fn).float())


def test_a_users_format_is_one_call() -> None:
    fmt = register_format(Format("ternary", bits=4, grid=(-1.0, 0.0, 1.0), round=round_ternary, describe="-1, 0, 1"))
    assert get_format("ternary") is fmt and format_names()[-1] == "ternary"
    x = torch.tensor([[1.0, -3.0], [0.0, 4.0]])
    assert torch.equal(quantize(x, "ternary"), torch.tensor([[2.0, -2.0], [0.0, 2.0]]))


def test_an_unregistered_format_can_be_passed_itself() -> None:
    fmt = Format("ternary", bits=4, grid=(-1.0, 0.0, 1.0), round=round_ternary)
    assert get_format(fmt) is fmt and "ternary" not in format_names()
    assert torch.equal(quantize(torch.tensor([[2.0, 2.0]]), fmt), torch.tensor([[2.0, 2.0]]))


def test_a_grid_may_be_any_numbers() -> None:
    tuples = Format("ternary", bits=4, grid=(-1.0, 0.0, 1.0), round=round_ternary)
    lists = Format("ternary", 4, [-1, 0, 1], round_ternary, roundings=["stochastic"])  # type: ignore[arg-type]
    assert lists == tuples and hash(lists) == hash(tuples) and lists.symmetric


def test_what_is_no_format_is_not_registered() -> None:
    for wrong in (5, "int8", None):
        with pytest.raises(RegistryError, match="is no Format: give dpq"):
            register_format(wrong)  # type: ignore[arg-type]


def test_duplicates_are_refused() -> None:
    with pytest.raises(RegistryError, match="'luq_fp4' is already registered"):
        register_format(get_format("luq_fp4"))


def test_failed_look_up_lists_the_choices() -> None:
    with pytest.raises(FormatError, match=r"'fp3'.*luq_fp4, fp8_e5m2, uniform4, fp4_e2m1, fp4_e2m1_nv"):
        get_format("fp3")


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        get_format("luq_fp4").bits = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "two words"}, "name"),
        ({"name": ""}, "name"),
        ({"name": 3}, "name=3"),
        ({"bits": 5}, "bits=5"),
        ({"block": 0}, "block=0"),
        ({"block": "16"}, "block='16'"),
        ({"round": None}, "round"),
        ({"grid": None}, "grid=None, must be numbers"),
        ({"grid": ("a", 0.0)}, "must be numbers"),
        ({"grid": (1.0, 0.0)}, "ascend"),
        ({"grid": (-0.0, 0.0)}, "ascend"),
        ({"grid": (1.0, 2.0)}, "lacks 0.0"),
        ({"grid": (0.0, float("inf"))}, "not finite"),
        ({"grid": tuple(map(float, range(17)))}, "17 levels"),
        ({"unsigned": (1.0, 2.0)}, "unsigned lacks 0.0"),
        ({"roundings": ("up",)}, "roundings"),
        ({"roundings": ()}, "roundings"),
        ({"roundings": 5}, "roundings"),
        ({"scales": ("tensor",)}, "scales"),
    ],
)
def test_validation(changes: dict[str, object], message: str) -> None:
    spec: dict[str, object] = {"name": "mine", "bits": 4, "grid": (-1.0, 0.0, 1.0), "round": round_ternary} | changes
    with pytest.raises(FormatError, match=message):
        Format(**spec)  # type: ignore[arg-type]


# Rounding


@every_format
def test_unbiased_between_and_under_the_levels(name: str) -> None:
    """z-test of the mean over 4000 draws at a random point of every interval of the grid, both signs.

    The first element fixes the scale so that the unit is 1; every row is a sample of its own, with its own bits.
    """
    draws = 4000
    levels = torch.tensor(get_format(name).grid)
    inner = levels[:-1] + torch.rand(len(levels) - 1, generator=torch.Generator().manual_seed(1)) * levels.diff()
    under = torch.tensor([0.01, 0.3, -0.1]) * levels[levels > 0][0]
    for points in torch.cat([inner, under]).split(13):  # with the largest, inside one block of 16
        row = torch.cat([torch.tensor([LARGEST[name], -0.001]), points])  # a negative number: the signed grid
        q, unit = parts(row.expand(draws, -1), name)
        values = (q * unit).double()[:, 2:]
        assert torch.all(values.std(dim=0) > 0)
        # The probability of each outcome is known, so the variance is exact, also where few draws leave the mode.
        upper = levels[torch.searchsorted(levels, points).clamp(max=len(levels) - 1)].double()
        lower = levels[torch.searchsorted(levels, points) - 1].double()
        sd = ((upper - points) * (points - lower) / draws).sqrt()
        z = (values.mean(dim=0) - points.double()) / sd
        assert z.abs().max() < 5, (name, points[z.abs().argmax()])


@every_stochastic
def test_unbiased_over_seeds_and_elements(name: str) -> None:
    """Gaussian data, and the public function: sums of the error, plain and weighted, are zero within their spread."""
    x = normal(4, 100)
    errors = torch.stack([quantize(x, name, seed=seed) - x for seed in range(400)]).double()
    for weight in (torch.ones_like(x), x, x.sign(), normal(4, 100, seed=1)):
        total = (errors * weight).sum(dim=2)
        assert (total.mean(dim=0) / (total.std(dim=0) / 20)).abs().max() < 4.5


@every_stochastic
def test_on_the_grid(name: str) -> None:
    x = normal(8, 5, 70) * 10 ** normal(8, 5, 70, seed=1)
    q, unit = parts(x, name)
    assert q.dtype == unit.dtype == torch.float32
    assert torch.isin(q, levels_of(name)).all()
    assert same_bits((q * unit).expand_as(q), quantize_values(x, name, KEY, torch.arange(8), BatchAxis(0)))
    assert torch.all(unit > 0) and not torch.any(q.signbit() & (q == 0))
    assert len(q.unique()) > (80 if name.startswith(("fp8", "int8")) else 10)


@every_stochastic
def test_rounds_to_a_neighbour(name: str) -> None:
    x = normal(4, 96)
    q, unit = parts(x, name)
    levels, t = torch.tensor(OperandSpec.parse(name).of.grid), x / unit
    at = torch.searchsorted(levels, t).clamp(1, len(levels) - 1)
    assert torch.all((q == levels[at]) | (q == levels[at - 1]))


@every_format
def test_numbers_on_the_grid_stay(name: str) -> None:
    levels = torch.tensor(get_format(name).grid)
    rows = torch.zeros(-(-len(levels) // 14), 16)
    rows[:, 0], rows[:, 1] = LARGEST[name], levels[levels < 0][-1]
    rows[:, 2:] = torch.nn.functional.pad(levels, (0, len(rows) * 14 - len(levels))).view(len(rows), 14)
    for seed in range(20):
        assert torch.equal(quantize(rows * 0.25, name, seed), rows * 0.25)


@every_format
def test_scale_invariant(name: str) -> None:
    """q(λx) = λ q(x). Powers of two are exact: the same bits. Others move the last bit of λx, hardly ever a code.

    The scales of MX blocks are powers of two themselves: another λ moves the data against the grid, and it cannot hold.
    """
    x = normal(6, 64)
    q, unit = parts(x, name)
    for power in (-60, -3, 1, 40):
        scaled, scaled_unit = parts(x * 2.0**power, name)
        assert same_bits(scaled, q) and same_bits(scaled_unit, unit * 2.0**power)
    if name != "fp4_e2m1":
        scaled, scaled_unit = parts(x * 3.7, name)
        assert (scaled != q).float().mean() < 0.01
        coarse = name.startswith("int")  # units of 16 bits
        torch.testing.assert_close(scaled_unit, unit * 3.7, rtol=2**-15 if coarse else 1e-6, atol=0)


@every_stochastic
def test_variance_grows_as_the_square_of_the_largest(name: str) -> None:
    """Proposition 1: Var q(x) = Θ(‖x‖∞²) over data of one shape. Fresh data at every size; log-log slope 2."""
    sizes = [2.0**power for power in range(-8, 9, 2)]
    variances = []
    for number, size in enumerate(sizes):
        x = normal(4096, seed=number)
        q, unit = parts((x * size / x.abs().max()).expand(50, -1), name)
        variances.append((q * unit).double().var(dim=0).sum().item())
    assert _slope([math.log(size) for size in sizes], [math.log(v) for v in variances]) == pytest.approx(2.0, abs=0.1)


def test_an_outlier_raises_the_variance_of_the_others() -> None:
    """With all else fixed, elements far under the smallest level have variance |x| · unit: linear in the outlier."""
    body = torch.linspace(-1, 1, 256)
    sizes = [2.0**power for power in range(10, 17)]
    variances = []
    for size in sizes:
        q, unit = parts(torch.cat([torch.tensor([size]), body]).expand(1000, -1), "luq_fp4")
        variances.append((q * unit).double()[:, 1:].var(dim=0).sum().item())
    assert _slope([math.log(size) for size in sizes], [math.log(v) for v in variances]) == pytest.approx(1.0, abs=0.1)


def _slope(x: list[float], y: list[float]) -> float:
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def test_mx_scales_are_powers_of_two_rounded_up() -> None:
    amax = torch.tensor([6.0, 6.0001, 5.9999, 3.0, 3.1, 12.0, 1.0, 7.9, 8.0])
    x = torch.zeros(9, 33)
    x[:, 0], x[:, 32] = amax, 1.5
    _, unit = parts(x, "fp4_e2m1")
    assert unit[:, 0].tolist() == [2.0 ** math.ceil(math.log2(value / 6)) for value in amax.double().tolist()]
    assert torch.equal(unit[:, :32], unit[:, :1].expand(-1, 32)) and torch.all(unit[:, 32] == 0.25)
    assert torch.all(amax / unit[:, 0] <= 6)


def test_nv_scales_are_e4m3_rounded_up() -> None:
    x = normal(4, 160) * 10 ** (normal(4, 10, seed=1) * 1.5).repeat_interleave(16, dim=1)
    x[0, 16:32] = 0
    q, unit = parts(x, "fp4_e2m1_nv")
    assert torch.all(q[0, 16:32] == 0)
    sample_scale = x.abs().amax(dim=1, keepdim=True) / (6 * 448)
    scales = (unit / sample_scale)[:, ::16]
    patterns = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    at = (patterns[:, None, None] / scales - 1).abs().argmin(dim=0)
    torch.testing.assert_close(patterns[at], scales, rtol=1e-6, atol=0)
    wanted = x.abs().view(4, 10, 16).amax(dim=2) / (6 * sample_scale)
    assert torch.all(patterns[at] >= wanted * (1 - 1e-6)), "rounded down: the block would saturate"
    below = patterns[(at - 1).clamp(min=0)]
    assert torch.all((below < wanted * (1 + 1e-6)) | (at == 1)), "a smaller scale would do"


def test_block_dim_is_counted_in_the_original_tensor() -> None:
    x = normal(2, 64, 3)
    along = quantize(x, "fp4_e2m1", block_dim=1)
    assert torch.equal(along, quantize(x, "fp4_e2m1", block_dim=-2))
    for axis, shape in ((BatchAxis(1), (64, 2, 3)), (BatchAxis(0, inner=3), (6, 64))):
        y = normal(*shape)
        d = y.shape.index(64)
        _, unit = parts(y, "fp4_e2m1", axis, d)
        amax = from_samples(to_samples(y, axis), axis, y.shape).movedim(d, -1).unflatten(-1, (2, 32)).abs().amax(-1)
        expected = torch.exp2(torch.ceil(torch.log2(amax / 6))).repeat_interleave(32, dim=-1).movedim(-1, d)
        assert torch.equal(from_samples(unit, axis, y.shape), expected)
    _, unit = parts(x, "fp4_e2m1", None, 1)
    assert unit.shape == (1, 2, 64, 3) and torch.equal(unit[0, :, 0], unit[0, :, 31])
