"""Four-bit codes and their packing: exact round trips, the documented bit layouts, and refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpquant_compile.errors import FormatError
from dpquant_compile.numerics.formats import Format, get_format
from dpquant_compile.numerics.packing import decode, encode, pack4, unpack4
from dpquant_compile.numerics.quantize import quantize_parts
from dpquant_compile.numerics.random_bits import site_keys
from dpquant_compile.sites import BatchAxis

FOUR_BIT = ("luq_fp4", "uniform4", "fp4_e2m1", "fp4_e2m1_nv")
SHAPES = st.lists(st.integers(0, 7), min_size=1, max_size=4)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


@settings(max_examples=100, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**31))
def test_pack_round_trip(shape: list[int], seed: int) -> None:
    codes = torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack4(codes)
    assert packed.dtype == torch.uint8 and list(packed.shape) == [*shape[:-1], (shape[-1] + 1) // 2]
    assert torch.equal(unpack4(packed, shape[-1]), codes)


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(FOUR_BIT), shape=SHAPES, seed=st.integers(0, 2**31))
def test_encode_round_trip(name: str, shape: list[int], seed: int) -> None:
    levels = torch.tensor(get_format(name).grid)
    q = levels[torch.randint(0, len(levels), shape, generator=torch.Generator().manual_seed(seed))]
    codes = encode(q, name)
    assert codes.dtype == torch.uint8 and codes.shape == q.shape
    assert same_bits(decode(codes, name), q)
    assert same_bits(decode(unpack4(pack4(codes), shape[-1]), name), q)


@pytest.mark.parametrize("name", FOUR_BIT)
def test_quantized_tensors_round_trip(name: str) -> None:
    x = torch.randn(5, 3, 33)
    q, _ = quantize_parts(x, name, site_keys(0, 0, ["a"])[0, 0], torch.arange(5), BatchAxis(0))
    assert same_bits(decode(encode(q, name), name), q)
    assert same_bits(decode(encode(q.mT, name), name), q.mT.contiguous())


@pytest.mark.parametrize("name", FOUR_BIT)
def test_every_code_round_trips(name: str) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(encode(decode(codes, name), name), codes)


def test_layouts() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert decode(codes, "fp4_e2m1").tolist() == e2m1 + [-level for level in e2m1]
    assert decode(codes, "luq_fp4").tolist()[:8] == [0, 1, 2, 4, 8, 16, 32, 64]
    assert decode(codes, "uniform4").tolist() == [*range(8), *range(-8, 0)]
    assert pack4(torch.tensor([1, 2, 3], dtype=torch.uint8)).tolist() == [0x21, 0x03]


def test_negative_zero() -> None:
    zeros = torch.tensor([-0.0, 0.0])
    assert encode(zeros, "luq_fp4").tolist() == [8, 0] and same_bits(decode(encode(zeros, "luq_fp4"), "luq_fp4"), zeros)
    assert encode(zeros, "uniform4").tolist() == [0, 0]


def test_a_users_lopsided_grid() -> None:
    fmt = Format("lopsided", bits=4, grid=(-0.25, 0.0, 1.0, 10.0), round=get_format("uniform4").round)
    q = torch.tensor([-0.25, 0.0, 1.0, 10.0])
    assert encode(q, fmt).tolist() == [15, 0, 1, 2] and same_bits(decode(encode(q, fmt), fmt), q)


@pytest.mark.parametrize("value", [3.0, 65.0, -65.0, 0.999, float("nan"), float("inf"), float("-inf")])
def test_values_off_the_grid_are_refused(value: float) -> None:
    with pytest.raises(FormatError, match=r"1 value\(s\) are not on the grid of luq_fp4"):
        encode(torch.tensor([1.0, value]), "luq_fp4")


def test_eight_bit_formats_are_refused() -> None:
    with pytest.raises(FormatError, match="fp8_e5m2 has 8 bits"):
        encode(torch.zeros(2), "fp8_e5m2")
    with pytest.raises(FormatError, match="fp8_e5m2 has 8 bits"):
        decode(torch.zeros(2, dtype=torch.uint8), "fp8_e5m2")


def test_codes_out_of_range_are_refused() -> None:
    with pytest.raises(FormatError, match="codes reach 16"):
        pack4(torch.tensor([16], dtype=torch.uint8))
    with pytest.raises(FormatError, match="codes reach 99"):
        decode(torch.tensor([99], dtype=torch.uint8), "luq_fp4")
    with pytest.raises(FormatError, match="int64"):
        pack4(torch.tensor([1]))
    with pytest.raises(FormatError, match="scalar"):
        pack4(torch.tensor(1, dtype=torch.uint8))


def test_wrong_lengths_are_refused() -> None:
    packed = pack4(torch.zeros(5, dtype=torch.uint8))
    for length in (4, 7):
        with pytest.raises(FormatError, match=f"length={length}"):
            unpack4(packed, length)
    with pytest.raises(FormatError, match="uint8"):
        unpack4(torch.zeros(2), 4)


def test_a_format_with_two_grids_is_refused() -> None:
    """A nibble of 15 could be a level of either."""
    with pytest.raises(FormatError, match="int4 has two grids"):
        encode(torch.zeros(4), "int4")
