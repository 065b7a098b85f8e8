"""The compiled quantizer is the reference, bit for bit, on any threads."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dpquant_compile as dpq
from dpquant_compile.backends import compiled
from dpquant_compile.backends.compiled import quantize_compiled
from dpquant_compile.backends.ops.site import axis_list, site_call
from dpquant_compile.numerics import formats
from dpquant_compile.numerics.formats import Format, format_names, get_format, register_format
from dpquant_compile.numerics.operand_spec import OperandSpec
from dpquant_compile.numerics.quantize import quantize_values
from dpquant_compile.numerics.random_bits import site_keys
from dpquant_compile.numerics.recipe import Recipe
from dpquant_compile.sites import BatchAxis
from tests.support.heavy import few
from tests.support.models import GroupNormNet, seeded

PLAIN = [name for name in format_names() if get_format(name).block is None]
PLAIN += ["luq_fp4.nearest", "int8.nearest", "int4.nearest", "int4.channel", "int4.nearest.channel"]


KEY = site_keys(11, 2, ("site",))[0, 0]


SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-38, 1e-45, -1e-40, 3e38, -3e38, 2.0**-126, 0.5, 64.0, 1e-20])
NONFINITE = st.sampled_from([math.nan, math.inf, -math.inf])


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, BatchAxis | None]:
    """A tensor of some shape, plain, batch in dimension 1, folded, or a weight, sprinkled with special values."""
    batch = draw(st.integers(0, 5))
    rest = draw(st.lists(st.integers(1, 7), max_size=3))
    kind = draw(st.sampled_from(["plain", "second", "inner", "outer", "both", "weight"]))
    outer, inner = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shape, axis = [batch, *rest], BatchAxis(0)
    if kind == "second":
        shape, axis = [draw(st.integers(1, 4)), batch, *rest], BatchAxis(1)
    elif kind in ("inner", "outer", "both"):
        axis = BatchAxis(0, outer if kind != "inner" else 1, inner if kind != "outer" else 1)
        shape = [axis.outer * batch * axis.inner, *rest]
    elif kind == "weight":
        shape, axis = [batch + 1, *rest], None
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    x = x * 10.0 ** draw(st.integers(-30, 30))
    for _ in range(draw(st.integers(0, 4))):
        if x.numel():
            value = draw(SPECIAL if draw(st.integers(0, 3)) else NONFINITE)
            x.view(-1)[draw(st.integers(0, x.numel() - 1))] = value
    if draw(st.booleans()) and x.dim() > 1:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    return x, axis


@pytest.mark.parametrize("fmt", few(PLAIN, "int4.nearest.channel", "int8", "luq_fp4"))
@given(batch=batches(), first=st.integers(0, 2**40))
@settings(max_examples=40, deadline=None)
def test_the_compiled_quantizer_is_the_reference_bit_for_bit(
    fmt: str, batch: tuple[Tensor, BatchAxis | None], first: int
) -> None:
    x, axis = batch
    count = 1 if axis is None else x.shape[axis.dim] // (axis.outer * axis.inner)
    ids = torch.arange(first, first + count)
    # Channels may be any dimension but the samples'.
    dim = -1 if axis is None or axis.dim != x.dim() - 1 else 0
    if x.dim() == 1 and axis is not None:
        fmt = fmt.replace(".channel", "")
    wanted = quantize_values(x, fmt, KEY, ids, axis, dim)
    got = quantize_compiled(x, OperandSpec.parse(fmt), KEY, ids, axis, dim)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    assert torch.equal(got.isnan(), wanted.isnan())
    # Zeros count with their sign, so compare the bit patterns.
    assert torch.equal(got.nan_to_num().view(torch.int32), wanted.nan_to_num().view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("fmt", PLAIN)
def test_other_dtypes_are_the_reference_too(fmt: str, dtype: torch.dtype) -> None:
    x, ids = torch.randn(3, 33).to(dtype), torch.arange(3)
    got = quantize_compiled(x, OperandSpec.parse(fmt), KEY, ids, BatchAxis(0), -1)
    assert got.dtype == dtype and torch.equal(got, quantize_values(x, fmt, KEY, ids, BatchAxis(0)))


@pytest.mark.parametrize("outputs", ["none", "flow", "all"])
def test_whole_sites_agree_bit_for_bit(outputs: str) -> None:
    # The same products of the same rounded numbers: everything else is equal, so the results are.
    x = torch.randn(5, 3, 8, 8)
    grads = []
    for backend in ("compiled", "reference"):
        options = {"backend": backend, "inner": "eager", "quantize_outputs": outputs}
        model = dpq.compile(seeded(GroupNormNet), 1.0, **options)
        model(x).square().sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        assert torch.equal(ours, theirs)


def test_threads_change_nothing() -> None:
    x, ids = torch.randn(7, 5000), torch.arange(7)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(quantize_compiled(x, OperandSpec("luq_fp4"), KEY, ids, BatchAxis(0), -1))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_channels_of_other_formats_are_left_to_the_reference() -> None:
    """What shares a scale is a format's own business, and the groups of sixteen are int4's."""

    def round_signs(x: Tensor, bits: Tensor | None, block_dim: int, scale: str = "sample") -> tuple[Tensor, Tensor]:
        others = [d for d in range(1, x.dim()) if scale == "sample" or d != block_dim % x.dim()]
        return x.sign(), x.abs().mean(others, keepdim=True)

    register_format(Format("signs", bits=4, grid=(-1.0, 0.0, 1.0), round=round_signs, scales=("sample", "channel")))
    try:
        x, ids, spec = torch.randn(4, 3, 8, 8), torch.arange(4), OperandSpec("signs", scale="channel")
        wanted = quantize_values(x, spec, KEY, ids, BatchAxis(0), 1)
        assert torch.equal(quantize_compiled(x, spec, KEY, ids, BatchAxis(0), 1), wanted)
    finally:
        formats._FORMATS.pop("signs")


def test_other_devices_are_for_inductor_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    call = site_call("linear", 0, 0, str(Recipe()), axis_list(BatchAxis(0), BatchAxis(0)))
    monkeypatch.setattr(compiled, "_missing_generator", compiled._missing_generator.__wrapped__)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    assert "Inductor needs Triton for cuda" in str(compiled.COMPILED.supports(call, torch.device("cuda")))
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    assert compiled.COMPILED.supports(call, torch.device("cuda")) is None
    assert compiled.COMPILED.supports(call, torch.device("meta")) == "Inductor knows no device meta"
