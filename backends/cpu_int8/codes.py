"""How operands are coded as bytes for int8 products: which specs can be, and by which quantizer of the C++."""

from dataclasses import dataclass

from dpquant_compile.numerics.operand_spec import OperandSpec
from dpquant_compile.numerics.recipe import Recipe

__all__ = ["Codes", "codes_of", "why_not"]


@dataclass(frozen=True)
class Codes:
    """The bytes of one operand.

    number    of the format in the C++
    zero      the zero point of the bytes
    largest   the largest of code plus zero point
    highest   the largest magnitude of a code
    nearest   whether rounding is to nearest
    grouped   None: one scale per sample; else whether groups are blocks, not channels
    """

    number: int
    zero: int
    largest: int
    highest: int
    nearest: bool
    grouped: bool | None


# By format: its number, the zero point, and the largest and smallest code with one scale per sample.
_FORMATS = {
    "luq_fp4": (0, 64, 64, -64),
    "uniform4": (1, 8, 7, -8),
    "int4": (2, 64, 15, -7),
    "int8": (3, 128, 127, -127),
}
# The same for int4 in groups, by scale: level times multiplier, see numerics/integers.py.
_GROUPED = {"channel": (2, 64, 120, -56), "block": (2, 128, 120, -112)}


def codes_of(spec: OperandSpec) -> Codes | None:
    """The bytes of an operand; None if it cannot be held in bytes that multiply exactly."""
    if spec.format not in _FORMATS or (spec.format == "luq_fp4" and spec.rounding == "nearest"):
        return None
    number, zero, high, low = _GROUPED.get(spec.scale, _FORMATS[spec.format])
    grouped = None if spec.scale == "sample" else spec.scale == "block"
    return Codes(number, zero, zero + high, max(high, -low), spec.rounding == "nearest", grouped)


def why_not(recipe: Recipe) -> str | None:
    """Why the operands of a recipe cannot be bytes; None if they can."""
    for spec in dict.fromkeys(recipe.operands):
        if codes_of(spec) is None:
            return f"computes {', '.join(_FORMATS)} in int8, not {spec}"
    return "has no Hadamard transform" if recipe.hadamard else None
