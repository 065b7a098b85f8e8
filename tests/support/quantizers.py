"""What the tests of formats and quantizers share: names, keys, and rounding with known bits."""

import pytest
import torch
from torch import Tensor

from dpquant_compile.numerics.operand_spec import OperandSpec
from dpquant_compile.numerics.quantize import quantize_parts, to_samples
from dpquant_compile.numerics.random_bits import site_keys
from dpquant_compile.sites import BatchAxis

FORMATS = ("luq_fp4", "fp8_e5m2", "uniform4", "fp4_e2m1", "fp4_e2m1_nv", "fp8_e4m3", "int8", "int4")
# Every format in every granularity, rounded stochastically; and to nearest.
STOCHASTIC = (*FORMATS, "int4.channel", "int4.block")
NEAREST = tuple(f"{name}.nearest" for name in STOCHASTIC)
PLAIN = BatchAxis(0)
KEY = site_keys(11, 0, ["test"])[0, 0]
every_format = pytest.mark.parametrize("name", FORMATS)
every_stochastic = pytest.mark.parametrize("name", STOCHASTIC)
every_spec = pytest.mark.parametrize("name", STOCHASTIC + NEAREST)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def parts(x: Tensor, name: str, axis: BatchAxis | None = PLAIN, block_dim: int = -1) -> tuple[Tensor, Tensor]:
    samples = torch.arange(len(to_samples(x, axis)))
    return quantize_parts(x, name, KEY, samples, axis, block_dim)


def levels_of(name: str) -> Tensor:
    """All levels of a format, of both its grids if it has two."""
    fmt = OperandSpec.parse(name).of
    return torch.tensor(sorted({*fmt.grid, *(fmt.unsigned or ())}))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
