"""What tensor cores multiply, and that the numbers of the formats fit the types that do it."""

import pytest
import torch

from dpquant_compile.backends.triton.capabilities import tensor_cores_for
from dpquant_compile.backends.triton.launch import NEVER_RUN
from dpquant_compile.numerics.formats import get_format


@pytest.mark.parametrize(
    ("capability", "format", "name"),
    [
        ((7, 5), "luq_fp4", "none"),
        ((8, 0), "luq_fp4", "int8"),
        ((8, 9), "int4", "int8"),
        ((10, 0), "int8", "int8"),
        ((8, 0), "fp8_e4m3", "none"),
        ((8, 9), "fp8_e4m3", "fp8"),
        ((9, 0), "fp4_e2m1_nv", "none"),
        ((10, 0), "fp4_e2m1_nv", "nvfp4"),
        ((12, 0), "fp4_e2m1", "none"),
    ],
)
def test_tensor_cores_for(capability: tuple[int, int], format: str, name: str) -> None:
    found = tensor_cores_for(capability, format)
    assert found.name == name and found.exact == (name == "int8") and found.used == (name in ("int8", "none"))
    assert found.status == NEVER_RUN and found.reason and "\n" not in found.reason + found.status


def test_luq_does_not_fit_nvfp4() -> None:
    """What keeps LUQ off the FP4 tensor cores: no scale makes all its levels E2M1 numbers."""
    luq, e2m1 = get_format("luq_fp4").grid, set(get_format("fp4_e2m1_nv").grid)
    scales = {level / other for level in luq for other in e2m1 if level > 0 and other > 0}
    assert not any({level / scale for level in luq} <= e2m1 for scale in scales)


@pytest.mark.parametrize(
    ("name", "dtype"), [("luq_fp4", torch.int8), ("uniform4", torch.int8), ("fp8_e4m3", torch.float8_e4m3fn)]
)
def test_levels_are_numbers_of_the_type_that_multiplies_them(name: str, dtype: torch.dtype) -> None:
    levels = torch.tensor(get_format(name).grid)
    assert torch.equal(levels.to(dtype).to(torch.float32), levels)
