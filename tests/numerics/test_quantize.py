"""The reference quantizer: special numbers, one sample at a time, the same when compiled, typed errors.

The numerics of each format are in test_formats.py.
"""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dpquant_compile.errors import FormatError, NonFiniteError
from dpquant_compile.numerics.formats import Format, get_format
from dpquant_compile.numerics.operand_spec import OperandSpec
from dpquant_compile.numerics.quantize import from_samples, quantize, quantize_parts, quantize_values, to_samples
from dpquant_compile.numerics.random_bits import random_bits, sample_keys
from dpquant_compile.sites import BatchAxis
from tests.support.quantizers import (
    FORMATS,
    KEY,
    NEAREST,
    STOCHASTIC,
    every_spec,
    every_stochastic,
    levels_of,
    normal,
    parts,
    same_bits,
)

TINY = 2.0**-126


# Special numbers


@every_spec
def test_zeros(name: str) -> None:
    x = torch.tensor([[0.0, -0.0, 0.0], [-0.0, -0.0, -0.0], [1.0, -0.0, 0.0]])
    for seed in range(20):
        y = quantize(x, name, seed)
        zero = torch.zeros(3)
        assert same_bits(y[0], zero) and same_bits(y[1], zero) and same_bits(y[2, 1:], zero[1:])
        assert y[2, 0].item() == pytest.approx(1.0, rel=2**-15) or name.startswith("fp4_e2m1")


@every_stochastic
@pytest.mark.parametrize("pattern", [0, -1, 1 << 8, 0x7FFFFF])
def test_extreme_bits(name: str, pattern: int) -> None:
    """The random numbers next to 0 and 1 move neither zero nor the largest, nor lift what is as good as zero."""
    spec = OperandSpec.parse(name)
    x = torch.tensor([[0.0, spec.of.grid[-1] / 4, -1e-20, 1e-37] + [0.0] * 12])  # a unit that is a power of two
    q, unit = spec.of.rounded(x, torch.full(x.shape, pattern, dtype=torch.int32), 1, spec.scale)
    assert same_bits(q[:, [0, 2, 3]], torch.zeros(1, 3))
    torch.testing.assert_close((q * unit)[0, 1], x[0, 1])


@every_spec
def test_subnormals_count_as_zero(name: str) -> None:
    x = torch.tensor([[1e-40, -1e-45, TINY / 2], [1.0, 1e-40, -1e-40]])
    for seed in range(20):
        y = quantize(x, name, seed)
        assert same_bits(y[0], torch.zeros(3)) and same_bits(y[1, 1:], torch.zeros(2))


@every_stochastic
@pytest.mark.parametrize("size", [TINY, 1.9 * TINY, 2.0**-121, 2.0**-115, 2.0**-105, 1e-30])
def test_tiny_scales(name: str, size: float) -> None:
    """Down to the smallest normal number: finite, on the grid, unbiased, and no subnormal is ever produced."""
    x = torch.tensor([1.0, -1.0, 0.6, 0.3]) * size
    q, unit = parts(x.expand(2000, -1), name)
    values = (q * unit).double()
    assert torch.isin(q, levels_of(name)).all() and torch.isfinite(values).all()
    assert torch.all((values == 0) | (values.abs() >= TINY))
    kept = torch.where(x.abs() >= TINY, x, 0.0).double()
    error = values.mean(dim=0) - kept
    rare = 4e-5 if name.startswith("int") else 1e-6  # units of 16 bits: the largest hardly ever leaves its level
    assert torch.all(error.abs() <= 5 * values.std(dim=0) / 2000**0.5 + rare * kept.abs())


@every_spec
def test_results_do_not_depend_on_flush_to_zero(name: str) -> None:
    x = torch.stack([normal(64) * 10.0**power for power in (-44, -40, -38, -37, -36, -34, -32, 0, 30)])
    x[-1, :8] = 1e-40
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the mode belongs to the thread
    try:
        kept = parts(x, name)
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU cannot flush subnormals")
        flushed = parts(x, name)
        flushed_values = flushed[0] * flushed[1]
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    assert same_bits(kept[0], flushed[0]) and same_bits(kept[1], flushed[1])
    assert same_bits(kept[0] * kept[1], flushed_values)


@every_spec
def test_huge_numbers_stay_finite(name: str) -> None:
    largest = torch.finfo(torch.float32).max
    for seed in range(20):
        y = quantize(torch.tensor([[largest, -largest / 2, 1.0], [1e38, -2e38, 1e30]]), name, seed)
        assert torch.isfinite(y).all() and (y[0, 0] > largest / 2)


@every_spec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_stays_in_its_sample(name: str, bad: float) -> None:
    x = normal(5, 3, 40)
    clean = quantize(x, name, seed=3)
    x[2, 1, 7] = bad
    dirty = quantize(x, name, seed=3)
    assert dirty[2].isnan().all()
    assert same_bits(dirty[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    q, unit = parts(x, name)
    assert torch.all(q[2] == 0), "codes of the poisoned sample must stay legal"
    assert unit.expand_as(q)[2].isnan().all() and not unit.expand_as(q)[[0, 1, 3, 4]].isnan().any()


# Samples


AXES = {
    "first": ((6, 8, 20), BatchAxis(0)),
    "middle": ((8, 6, 20), BatchAxis(1)),
    "last": ((8, 20, 6), BatchAxis(2)),
    "inner": ((6 * 8, 20), BatchAxis(0, inner=8)),
    "outer": ((8 * 6, 20), BatchAxis(0, outer=8)),
    "both": ((5, 2 * 6 * 4, 20), BatchAxis(1, outer=2, inner=4)),
    "negative": ((8, 6, 20), BatchAxis(-2)),
}


@pytest.mark.parametrize("case", list(AXES))
def test_sample_view_round_trip(case: str) -> None:
    shape, axis = AXES[case]
    x = torch.arange(math.prod(shape)).reshape(shape)
    view = to_samples(x, axis)
    assert view.shape[0] == 6 and 1 not in view.shape
    assert torch.equal(from_samples(view, axis, x.shape), x)


def test_sample_view_layouts() -> None:
    x = torch.arange(24).reshape(6, 4)
    assert torch.equal(to_samples(x, BatchAxis(0, inner=2)), x.reshape(3, 2, 4))
    assert torch.equal(to_samples(x, BatchAxis(0, outer=2)), x.reshape(2, 3, 4).transpose(0, 1))
    assert torch.equal(to_samples(x, BatchAxis(1)), x.t())
    assert torch.equal(to_samples(x, None), x[None]) and torch.equal(from_samples(x[None], None, x.shape), x)


@every_spec
@pytest.mark.parametrize("case", list(AXES))
def test_samples_are_isolated(name: str, case: str) -> None:
    """An outlier, a NaN or an infinity in one sample leaves all others as they are, bit for bit."""
    shape, axis = AXES[case]
    block_dim = 0 if case == "last" else -1
    x = normal(*shape)
    before = to_samples(quantize_values(x, name, KEY, torch.arange(6), axis, block_dim), axis)
    for outlier in (1e6, math.nan, math.inf):
        changed = to_samples(x, axis).clone(memory_format=torch.contiguous_format)
        changed[3].view(-1)[5] = outlier
        moved = from_samples(changed, axis, x.shape)
        after = to_samples(quantize_values(moved, name, KEY, torch.arange(6), axis, block_dim), axis)
        others = [0, 1, 2, 4, 5]
        assert same_bits(after[others], before[others])
        assert not same_bits(after[3], before[3])


@every_spec
@pytest.mark.parametrize("case", ["middle", "inner", "both"])
def test_layout_does_not_change_the_result(name: str, case: str) -> None:
    """The same samples in another place of the tensor: the same numbers, if blocks run along the same elements."""
    shape, axis = AXES[case]
    x = normal(*shape)
    folded = to_samples(quantize_values(x, name, KEY, torch.arange(6), axis), axis)
    plain = quantize_values(to_samples(x, axis).contiguous(), name, KEY, torch.arange(6), BatchAxis(0))
    assert same_bits(folded, plain)


def test_memory_format_does_not_change_the_result() -> None:
    x = normal(3, 4, 5, 6)
    assert same_bits(quantize(x.contiguous(memory_format=torch.channels_last)), quantize(x))


@every_spec
def test_batch_split_does_not_change_the_result(name: str) -> None:
    x = normal(7, 50)
    whole = quantize(x, name, seed=5)
    assert same_bits(quantize(x[:6], name, seed=5), whole[:6])
    tail = [quantize(x[i : i + 1], name, seed=5, samples=[i]) for i in range(7)]
    assert same_bits(torch.cat(tail), whole)
    order = torch.tensor([3, 1, 6, 0, 5, 2, 4])
    assert same_bits(quantize(x[order], name, seed=5, samples=order), whole[order])


@every_stochastic
def test_seeds(name: str) -> None:
    x = normal(4, 2000)
    one, again, other = quantize(x, name, 1), quantize(x, name, 1), quantize(x, name, 2)
    assert same_bits(one, again) and not same_bits(one, other)
    a, b = (one - x).double().flatten(), (other - x).double().flatten()
    assert ((a * b).mean() / (a.std() * b.std())).abs() * len(a) ** 0.5 < 4.5


def test_one_scale_for_the_whole_tensor() -> None:
    x = torch.tensor([[64.0, 1.0], [0.25, 0.0]])
    assert set(quantize(x, sample_dim=None).flatten().tolist()) <= {64.0, 1.0, 0.0}
    assert quantize(x, sample_dim=0)[1, 0] == 0.25
    assert torch.equal(quantize(x.t(), sample_dim=1), quantize(x, sample_dim=0).t())


def test_elements_are_numbered_inside_the_sample() -> None:
    """The bits that other backends must reproduce: sample id, then flat index in the sample view."""
    seen = {}

    def spy(x: Tensor, bits: Tensor, block_dim: int) -> tuple[Tensor, Tensor]:
        seen["bits"] = bits
        return get_format("luq_fp4").round(x, bits, block_dim)

    fmt = Format("spy", bits=4, grid=get_format("luq_fp4").grid, round=spy)
    quantize_parts(normal(3, 4, 5), fmt, KEY, torch.tensor([7, 8, 9, 2]), BatchAxis(1))
    k0, k1 = sample_keys(KEY, torch.tensor([7, 8, 9, 2]))
    index = torch.arange(15, dtype=torch.int32)
    assert torch.equal(seen["bits"].reshape(4, 15), random_bits(k0[:, None], k1[:, None], index))


# Compiled


Program = Callable[..., tuple[Tensor, ...]]


def _all_roundings(x: Tensor, bits: Tensor) -> tuple[Tensor, ...]:
    """q and unit of every format and granularity, stochastic and to nearest."""
    specs = [OperandSpec.parse(name) for name in (*STOCHASTIC, *NEAREST)]
    rounded = [s.of.rounded(x, bits if s.rounding == "stochastic" else None, 1, s.scale) for s in specs]
    return tuple(part for both in rounded for part in both)


def _whole_quantizer(x: Tensor, key: Tensor, samples: Tensor) -> tuple[Tensor, ...]:
    """From the key to the values. Of one format only: Inductor takes three times as long for all in one program."""
    return (quantize_values(x, "luq_fp4", key, samples, BatchAxis(0)),)


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[Program, Program]]:
    """Programs with symbolic sizes, compiled once for the whole file."""
    torch._dynamo.reset()
    yield {f: torch.compile(f, dynamic=True, fullgraph=True) for f in (_all_roundings, _whole_quantizer)}
    torch._dynamo.reset()


def _hard_cases(batch: int) -> Tensor:
    x = normal(batch, 35, 3)
    x[0] *= 1e-37
    x[1, 0, 0] = math.nan
    x[2] = 0
    x[3, :4] = 1e-40
    x[4, 3] = -0.0
    x[5, 2, 2] = -math.inf
    x[6] *= 1e37
    return x


def _assert_same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> None:
    for number, (a, b) in enumerate(zip(one, other, strict=True)):
        nan = b.isnan()  # which of the many NaNs it is says nothing
        assert torch.equal(a.isnan(), nan), number
        assert same_bits(torch.where(nan, 0.0, a), torch.where(nan, 0.0, b)), number


@pytest.mark.heavy
@pytest.mark.parametrize("batch", [8, 13])
def test_compiled_equals_eager_bit_for_bit(compiled: dict[Program, Program], batch: int) -> None:
    x, samples = _hard_cases(batch), torch.arange(batch) + 1000
    bits = torch.randint(-(1 << 31), 1 << 31, x.shape).to(torch.int32)
    _assert_same(compiled[_all_roundings](x, bits), _all_roundings(x, bits))
    _assert_same(compiled[_whole_quantizer](x, KEY, samples), _whole_quantizer(x, KEY, samples))


@every_spec
def test_traces_with_a_symbolic_batch(name: str) -> None:
    def values(x: Tensor, key: Tensor, samples: Tensor) -> tuple[Tensor, ...]:
        return (quantize_values(x, name, key, samples, BatchAxis(0), 1),)

    graph = make_fx(values, tracing_mode="symbolic")(_hard_cases(8), KEY, torch.arange(8))
    x = _hard_cases(11)
    _assert_same(graph(x, KEY, torch.arange(11)), values(x, KEY, torch.arange(11)))


# The public function


@every_spec
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    x = normal(4, 33).to(dtype)
    y = quantize(x, name)
    assert y.dtype == dtype and torch.equal(y, quantize(x.float(), name).to(dtype))


@every_spec
def test_half_does_not_overflow(name: str) -> None:
    for seed in range(20):
        assert torch.isfinite(quantize(torch.full((1, 4), 65504.0, dtype=torch.float16), name, seed)).all()


@every_spec
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,), (2, 0, 3), (3, 2, 0)])
def test_empty(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) > 1:
        assert quantize(torch.empty(shape), name).shape == shape
    assert quantize(torch.empty(shape), name, sample_dim=None).shape == shape


@every_spec
def test_scalars_and_vectors(name: str) -> None:
    assert quantize(torch.tensor(4.0), name, sample_dim=None).item() == pytest.approx(4.0, rel=2**-15)
    assert quantize(normal(70), name, sample_dim=None).shape == (70,)
    if OperandSpec.parse(name).scale == "sample":
        torch.testing.assert_close(quantize(torch.tensor([1.0, -3.0]), name)[0], torch.tensor(1.0), rtol=2**-15, atol=0)


@pytest.mark.parametrize("name", NEAREST)
def test_nearest_needs_no_bits_and_is_the_nearest(name: str) -> None:
    """The same for every seed and id, and no level is closer; a scale that is too small would show as clipping."""
    x = torch.cat([normal(5, 40, 3), normal(2, 40, 3).abs()])
    one = quantize(x, name, seed=1)
    assert same_bits(one, quantize(x, name, seed=2, samples=torch.arange(7) + 5))
    q, unit = parts(x, name)
    fmt = OperandSpec.parse(name).of
    for i in range(7):
        grid = fmt.unsigned if fmt.unsigned is not None and bool((x[i] >= 0).all()) else fmt.grid
        t = (x[i] / unit.expand_as(q)[i]).double()
        distance = (t[..., None] - torch.tensor(grid, dtype=torch.float64)).abs().amin(-1)
        assert torch.all((t - q[i].double()).abs() <= distance + 1e-4)


def test_no_gradient_flows() -> None:
    x = normal(2, 3).requires_grad_()
    assert not quantize(x).requires_grad


def test_input_is_not_changed() -> None:
    x = _hard_cases(8)
    before = x.clone()
    for name in FORMATS:
        quantize(x, name)
    assert same_bits(x, before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(torch.ones(2, 2, dtype=torch.int64)), "x has dtype torch.int64.*convert"),
        (lambda: quantize(torch.ones(2, 2, dtype=torch.bool)), "torch.bool"),
        (lambda: quantize(torch.ones(2, 2, dtype=torch.complex64)), "torch.complex64"),
        (lambda: quantize([1.0]), "must be a torch.Tensor, not list"),  # type: ignore[arg-type]
        (lambda: quantize(torch.ones(2, 2), "fp3"), "no format is named 'fp3'"),
        (lambda: quantize(torch.ones(2, 2), sample_dim=2), "sample_dim=2"),
        (lambda: quantize(torch.ones(2, 2), sample_dim=-3), "sample_dim=-3"),
        (lambda: quantize(torch.tensor(1.0)), "sample_dim=0.*None"),
        (lambda: quantize(torch.ones(2, 2), samples=[1]), "samples must be 2 integer ids"),
        (lambda: quantize(torch.ones(2, 2), samples=torch.tensor([0.0, 1.0])), "samples must be 2 integer ids"),
        (lambda: quantize(torch.ones(2, 2), "fp4_e2m1", block_dim=0), "block_dim=0 is the sample dimension"),
        (lambda: quantize(torch.ones(2), "fp4_e2m1"), "block_dim=-1 is the sample dimension"),
        (lambda: quantize(torch.ones(2), 5), "5 is no format: give a name"),  # type: ignore[arg-type]
        (lambda: quantize(torch.ones(2, 2), "fp4_e2m1", block_dim=2), "block_dim=2 is not a dimension"),
        (lambda: quantize(torch.ones(2, 2), on_nonfinite="ignore"), "on_nonfinite='ignore'"),  # type: ignore[arg-type]
        (lambda: parts(torch.ones(7, 2), "luq_fp4", BatchAxis(0, inner=2)), "does not hold whole samples"),
        (lambda: quantize_parts(torch.ones(2, 2), "luq_fp4", KEY, torch.arange(1), BatchAxis(0)), "samples has shape"),
        (lambda: parts(torch.ones(2, 2), "luq_fp4", BatchAxis(2)), "not a dimension"),
    ],
)
def test_typed_errors(call: Callable[[], object], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        call()


def test_nonfinite_can_raise() -> None:
    x = torch.ones(3, 4)
    assert torch.equal(quantize(x, on_nonfinite="raise"), quantize(x))
    x[1, 2], x[1, 3] = math.nan, math.inf
    with pytest.raises(NonFiniteError, match=r"sample\(s\) 21 of x: 2 element\(s\)"):
        quantize(x, on_nonfinite="raise", samples=[20, 21, 22])
    with pytest.raises(NonFiniteError, match="x: 2 element"):
        quantize(x, sample_dim=None, on_nonfinite="raise")
