"""What the tensor cores of NVIDIA GPUs multiply, by compute capability and number format.

A pure table: it looks at no device. The int8 line is what the kernels of this folder do. The lines of FP8 and NVFP4 are
what could be done: nothing does it yet, and `explain()` says so. Nothing here has run on hardware.
"""

from dataclasses import dataclass

from dpquant_compile.backends.triton.launch import LEAST_CAPABILITY, NEVER_RUN

__all__ = ["TensorCores", "tensor_cores_for"]


@dataclass(frozen=True)
class TensorCores:
    """How tensor cores could multiply the operands of a format.

    name    "int8", "fp8", "nvfp4" or "none"
    call    what does it, or would do it
    used    whether it is what runs
    exact   whether sums are exact integers, so that results equal the reference bit for bit
    reason  one line: why this one
    status  one line: how far it has been tried
    """

    name: str
    call: str
    used: bool
    exact: bool
    reason: str
    status: str = NEVER_RUN


_INT8 = TensorCores(
    "int8",
    "backend='triton'",
    used=True,
    exact=True,
    reason="all codes are int8, and int32 sums of their products are exact",
)
_FP8 = TensorCores(
    "fp8",
    "torch._scaled_mm",
    used=False,
    exact=False,
    reason="compute capability 8.9 and up multiplies these numbers; its sums are rounded, so results would not equal "
    "the reference bit for bit",
)
_NVFP4 = TensorCores(
    "nvfp4",
    "torch._scaled_mm",
    used=False,
    exact=False,
    reason="compute capability 10.0 and up multiplies E2M1 with an E4M3 scale per 16 elements, which is this format; "
    "its sums are rounded",
)
_NONE = TensorCores(
    "none",
    "torch.matmul",
    used=True,
    exact=False,
    reason="no tensor-core kernel is foreseen for this format on this compute capability",
)
# From which compute capability on, what, and for which formats: the first that fits. LUQ is not on NVFP4's line: E2M1
# has four powers of two (0.5 to 4) and LUQ seven, so that an operand would be a sum of two, and a product four.
_LADDER: tuple[tuple[tuple[int, int], TensorCores, tuple[str, ...]], ...] = (
    (LEAST_CAPABILITY, _INT8, ("luq_fp4", "uniform4", "int4", "int8")),
    ((10, 0), _NVFP4, ("fp4_e2m1_nv",)),
    ((8, 9), _FP8, ("fp8_e4m3", "fp8_e5m2")),
)


def tensor_cores_for(capability: tuple[int, int], format: str) -> TensorCores:
    """What multiplies a format on a GPU of which `torch.cuda.get_device_capability` says this."""
    for since, found, formats in _LADDER:
        if capability >= since and format in formats:
            return found
    return _NONE
