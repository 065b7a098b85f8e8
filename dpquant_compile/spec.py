"""`CompileSpec`: every choice of `compile`, checked once, in one frozen record."""

import numbers
from dataclasses import dataclass
from typing import Any

from dpquant_compile.backends.registry import backend_names
from dpquant_compile.errors import CompileSpecError, listing
from dpquant_compile.numerics.recipe import Recipe

__all__ = ["INNER_COMPILERS", "CompileSpec"]

INNER_COMPILERS = ("inductor", "aot_eager", "eager")


@dataclass(frozen=True)
class CompileSpec:
    """What to quantize, how, and what runs it.

    budget           k of the n sites (int), or a fraction (float)
    recipe           format, outputs and kernels of a quantized site
    seed             of the random bits, and of the first policy
    quantize_eval    whether eval() follows the policy too; else it runs in full precision
    inner            what compiles the graph around the sites: "inductor", "aot_eager" (AOTAutograd's graphs run as
                     they are), or "eager" (the fx graph runs as it is)
    """

    budget: float
    recipe: Recipe
    seed: int = 0
    quantize_eval: bool = False
    inner: str = "inductor"

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, numbers.Integral):
            raise CompileSpecError(f"seed={self.seed!r} is not an int")
        if not isinstance(self.quantize_eval, bool):
            raise CompileSpecError(f"quantize_eval={self.quantize_eval!r} is not True or False")
        if self.inner not in INNER_COMPILERS:
            raise CompileSpecError(f"inner={self.inner!r} is none of {listing(INNER_COMPILERS)}")
        if self.recipe.backend not in backend_names():
            raise CompileSpecError(f"backend={self.recipe.backend!r} is none of {listing(backend_names())}")

    @staticmethod
    def build(
        budget: float,
        *,
        format: str | None = None,
        backend: str = "auto",
        quantize_outputs: str | None = None,
        recipe: str | None = None,
        seed: int = 0,
        quantize_eval: bool = False,
        inner: str | None = None,
    ) -> "CompileSpec":
        """A spec from the words that users type; `recipe="paper"` sets format and outputs as published."""
        chosen: dict[str, Any] = {"format": "luq_fp4", "outputs": "none"}
        if recipe == "paper":
            chosen["outputs"] = "all"
        elif recipe is not None:
            raise CompileSpecError(f"recipe={recipe!r} is none of 'paper'")
        for word, key, value in (("format", "format", format), ("quantize_outputs", "outputs", quantize_outputs)):
            if value is None:
                continue
            if recipe is not None and value != chosen[key]:
                raise CompileSpecError(
                    f"recipe={recipe!r} sets {word}={chosen[key]!r}; {word}={value!r} contradicts it"
                )
            chosen[key] = value
        if inner is None:
            inner = "eager" if backend == "reference" else "inductor"
        return CompileSpec(budget, Recipe(backend=backend, **chosen), seed, quantize_eval, inner)
