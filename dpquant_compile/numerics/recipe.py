"""`Recipe`: the numerics of a quantized site, in one short printable name."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast, get_args

from dpquant_compile.errors import CompileSpecError
from dpquant_compile.numerics.formats import get_format

__all__ = ["Outputs", "Recipe"]

Outputs = Literal["none", "flow", "all"]


@dataclass(frozen=True)
class Recipe:
    """What a quantized site does, and which kernels may do it.

    format    name of the number format
    outputs   "none": products leave in full precision; "flow": the results of forward and dgrad are quantized;
              "all": the weight gradient of each sample as well, as in the paper's simulation
    backend   "auto", or the name of one family of kernels

    `str(recipe)` ("luq_fp4/none/auto") stands in the graph, and `Recipe.parse` reads it back.
    """

    format: str = "luq_fp4"
    outputs: Outputs = "none"
    backend: str = "auto"

    def __post_init__(self) -> None:
        get_format(self.format)
        if self.outputs not in get_args(Outputs):
            choices = ", ".join(map(repr, get_args(Outputs)))
            raise CompileSpecError(f"quantize_outputs={self.outputs!r} is none of {choices}")

    def __str__(self) -> str:
        return f"{self.format}/{self.outputs}/{self.backend}"

    @staticmethod
    def parse(text: str) -> "Recipe":
        return _parse(text)


@lru_cache(maxsize=256)
def _parse(text: str) -> Recipe:
    name, outputs, backend = text.split("/")
    return Recipe(name, cast(Outputs, outputs), backend)
