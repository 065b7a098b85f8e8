"""`CompileSpec`: every choice of `compile`, checked once, in one frozen record."""

import numbers
from dataclasses import dataclass, replace
from typing import Any, cast

from dpquant_compile.backends.registry import backend_names
from dpquant_compile.errors import CompileSpecError, listing
from dpquant_compile.numerics.recipe import DEFAULT_RECIPE, Recipe, get_recipe

__all__ = ["INNER_COMPILERS", "CompileSpec"]

INNER_COMPILERS = ("inductor", "regions", "aot_eager", "eager")


@dataclass(frozen=True)
class CompileSpec:
    """What to quantize, how, and what runs it.

    budget           k of the n sites (int), or a fraction (float)
    recipe           the numerics of a site in low precision and out of it, and its kernels
    seed             of the random bits, and of the first policy
    quantize_eval    whether eval() follows the policy too; else it runs in full precision
    inner            what compiles the graph around the sites: "inductor", "regions" (Inductor, which compiles once what
                     a private program repeats), "aot_eager" (AOTAutograd's graphs run as they are), or "eager" (the
                     fx graph runs as it is)
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
        recipe: str | Recipe | None = None,
        high: str | None = None,
        seed: int = 0,
        quantize_eval: bool = False,
        inner: str | None = None,
    ) -> "CompileSpec":
        """A spec from the words that users type."""
        chosen = get_recipe(DEFAULT_RECIPE if recipe is None else recipe)
        if format is not None:
            one = Recipe.of_format(format)
            if recipe is not None and chosen.operands != one.operands:
                raise CompileSpecError(
                    f"recipe={str(recipe)!r} rounds by {chosen.numbers}; format={format!r} contradicts it: give one"
                )
            chosen = one if recipe is None else chosen
        words = (("quantize_outputs", "outputs", quantize_outputs, "none"), ("backend", "backend", backend, "auto"))
        for word, key, value, plain in (*words, ("high", "high", high, "float32")):
            own = getattr(chosen, key)
            if value is None or value == own or (word == "backend" and value == "auto"):
                continue
            if own != plain:
                raise CompileSpecError(f"recipe={str(recipe)!r} sets {word}={own!r}; {word}={value!r} contradicts it")
            turn = {"rotated": False} if key == "outputs" else {}  # rotated results cannot be rounded, see `Recipe`
            chosen = replace(chosen, **cast(dict[str, Any], {key: value, **turn}))
        if inner is None:
            inner = "eager" if chosen.backend == "reference" else "inductor"
        return CompileSpec(budget, chosen, seed, quantize_eval, inner)
