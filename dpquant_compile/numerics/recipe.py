"""`Recipe`: the numerics of a quantized site, operand by operand, and the registry of named recipes."""

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import Any, Literal, get_args

from dpquant_compile.errors import CompileSpecError, RegistryError, listing
from dpquant_compile.numerics.operand_spec import OperandSpec, operand_spec

__all__ = ["DEFAULT_RECIPE", "HIGH", "Outputs", "Precision", "Recipe", "get_recipe", "recipe_names", "register_recipe"]

Outputs = Literal["none", "flow", "all"]

HIGH = ("float32", "bfloat16", "int8")  # what sites that are not low may run in
_TRANSFORMS = ("hadamard", "rotated")  # the words of `str(recipe)` behind the operands


class Precision(IntEnum):
    """How a site runs now: an entry of the link table's `policy`. All but FULL are true."""

    FULL = 0  # as the model is
    LOW = 1  # by the recipe
    HIGH = 2  # by the recipe's `high`, where that is a recipe
    BFLOAT16 = 3  # as the model is, but with output and input gradient from operands rounded to bfloat16

    @property
    def by_recipe(self) -> bool:
        """Whether a recipe rounds the operands, and clipping takes them so; else it takes them as they are."""
        return self in (Precision.LOW, Precision.HIGH)


@dataclass(frozen=True)
class Recipe:
    """How a site rounds the operands of its three products, low or not, and which kernels may compute them.

    input, weight, grad_output   format, rounding and scale of each operand: an `OperandSpec`, or its text
    outputs    "none": products leave in full precision; "flow": the results of forward and dgrad are rounded, like
               input and output gradient; "all": the weight gradient of each sample as well, like the output gradient
    hadamard   whether the operands of a linear's weight gradient are rounded after a Hadamard transform along the
               places of a sample, which spreads outliers; see `numerics/hadamard.py`
    rotated    whether input and weight of a linear are rounded after a Hadamard transform along its features, which
               spreads features that are much larger than others; needs `outputs="none"`
    backend    "auto", or the name of one family of kernels
    high       what a site runs in while the policy does not have it in low precision: "float32", as the model is;
               "bfloat16", where output and input gradient come of operands rounded to it, and all else is as with
               "float32"; or the recipe "int8"

    `str(recipe)` ("int4.nearest.channel,int4.nearest.block,int4.channel+rotated/none/auto"; a single word where all
    operands are alike) stands in the graph, and `Recipe.parse` reads it back.
    """

    input: OperandSpec = OperandSpec("int4", "nearest", "channel")  # noqa: RUF009  (frozen)
    weight: OperandSpec = OperandSpec("int4", "nearest", "block")  # noqa: RUF009
    grad_output: OperandSpec = OperandSpec("int4", "stochastic", "channel")  # noqa: RUF009
    outputs: Outputs = "none"
    hadamard: bool = False
    rotated: bool = True
    backend: str = "auto"
    high: str = "float32"

    def __post_init__(self) -> None:
        for role in ("input", "weight", "grad_output"):
            object.__setattr__(self, role, operand_spec(getattr(self, role)))
        if self.outputs not in get_args(Outputs):
            choices = ", ".join(map(repr, get_args(Outputs)))
            raise CompileSpecError(f"quantize_outputs={self.outputs!r} is none of {choices}")
        backend: Any = self.backend
        if not isinstance(backend, str) or not backend or "/" in backend:  # it is part of str(self)
            raise CompileSpecError(f"backend={self.backend!r} is no name of a backend")
        for name in _TRANSFORMS:
            if not isinstance(getattr(self, name), bool):
                raise CompileSpecError(f"{name}={getattr(self, name)!r} is not True or False")
        if self.rotated and self.outputs != "none":
            raise CompileSpecError(
                f"quantize_outputs={self.outputs!r}: results of rotated operands would be rounded before they are "
                "rotated back. Use quantize_outputs='none', or a recipe with rotated=False"
            )
        if self.high not in HIGH:
            raise CompileSpecError(f"high={self.high!r} is none of {', '.join(map(repr, HIGH))}")

    @staticmethod
    def of_format(format: "str | OperandSpec", outputs: Outputs = "none") -> "Recipe":
        """One format for all operands."""
        spec = operand_spec(format)
        return Recipe(spec, spec, spec, outputs=outputs, rotated=False)

    @property
    def operands(self) -> tuple[OperandSpec, OperandSpec, OperandSpec]:
        """Input, weight and output gradient."""
        return self.input, self.weight, self.grad_output

    def of(self, role: str) -> OperandSpec:
        """How a tensor of that role is rounded; see `numerics.random_bits.ROLES`."""
        return {"input": self.input, "output": self.input, "weight": self.weight}.get(role, self.grad_output)

    @property
    def numbers(self) -> str:
        """The operands in one word, without outputs and backend."""
        alike = len(set(self.operands)) == 1
        transforms = "".join(f"+{name}" for name in _TRANSFORMS if getattr(self, name))
        return (str(self.input) if alike else ",".join(map(str, self.operands))) + transforms

    @property
    def other(self) -> Precision:
        """The precision of sites that the policy does not have in low precision."""
        return {"float32": Precision.FULL, "bfloat16": Precision.BFLOAT16}.get(self.high, Precision.HIGH)

    def running(self, precision: int) -> "Recipe | None":
        """The recipe that a site runs by at this precision; None where it rounds nothing by a recipe."""
        return self if precision == Precision.LOW else _high(self) if precision == Precision.HIGH else None

    @property
    def name(self) -> str:
        """The name under which it is registered, for whatever backend; else its operands and outputs.

        A recipe that is registered with full precision outside lends its name whatever `high` is; one that is
        registered with another `high` means that one alone.
        """
        for high in (self.high, "float32"):
            for name, known in _RECIPES.items():
                if known.high == high and replace(known, backend=self.backend, high=self.high) == self:
                    return name
        # One format for all operands may have the name of a recipe, and must not pass for it.
        words = f"{self.input.spelt}, all operands" if self.numbers in _RECIPES else self.numbers
        return words if self.outputs == "none" else f"{words}/{self.outputs}"

    @property
    def in_words(self) -> str:
        """Each operand with its role, for reports: "input int8.nearest; weight …; output gradient …"."""
        words = zip(("input", "weight", "output gradient"), self.operands, strict=True)
        return "; ".join(f"{role} {operand}" for role, operand in words)

    @property
    def others(self) -> str:
        """What sites that are not low run in: "full precision", or `high`."""
        return "full precision" if self.other == Precision.FULL else self.high

    @property
    def label(self) -> str:
        """How drawings call it: FP4, INT8, …; "INT4/FP4" where operands differ."""
        return "/".join(dict.fromkeys(spec.of.label for spec in self.operands))

    def __str__(self) -> str:
        return f"{self.numbers}/{self.outputs}/{self.backend}" + ("" if self.high == "float32" else f"/{self.high}")

    @staticmethod
    def parse(text: str) -> "Recipe":
        """The recipe that prints as `text`; what stands behind the operands may be left out."""
        given: Any = text
        if not isinstance(given, str):
            raise CompileSpecError(f"{text!r} is no recipe: write a text, such as 'int4.nearest,int4.nearest,luq_fp4'")
        return _parse(text)


@lru_cache(maxsize=256)
def _parse(text: str) -> Recipe:
    numbers, *rest = text.split("/")
    words, *transforms = numbers.split("+")
    specs = [OperandSpec.parse(word) for word in words.split(",")]
    known = [name for name in _TRANSFORMS if name in transforms]
    if len(specs) not in (1, 3) or len(rest) > 3 or transforms != known:
        raise CompileSpecError(
            f"{text!r} is no recipe: write one operand for all, or input, weight and output gradient with commas "
            "between them, such as 'int4.nearest,int4.nearest,luq_fp4'"
        )
    first, second, third = specs * 3 if len(specs) == 1 else specs
    given: dict[str, Any] = dict(zip(("outputs", "backend", "high"), rest, strict=False))
    given |= {name: name in known for name in _TRANSFORMS}
    return Recipe(first, second, third, **given)


@lru_cache(maxsize=256)
def _high(recipe: Recipe) -> Recipe | None:
    if recipe.other != Precision.HIGH:
        return None
    # With the transform if low sites have it: one program serves both, and keeps their operands in one form.
    return replace(get_recipe(recipe.high), backend=recipe.backend, hadamard=recipe.hadamard)


_RECIPES: dict[str, Recipe] = {}


def register_recipe(name: str, recipe: Recipe) -> Recipe:
    """Make a recipe known by a name, for `compile(recipe=name)`, and return it. A name that is taken is refused."""
    if not isinstance(recipe, Recipe):
        raise RegistryError(f"recipe {name!r}: {recipe!r} is no Recipe")
    given: Any = name
    if not isinstance(given, str) or not given.isidentifier():
        raise RegistryError(f"recipe {name!r}: use letters, digits and underscores for its name")
    if name in _RECIPES:
        raise RegistryError(f"recipe {name!r} is already registered: choose another name")
    _RECIPES[name] = recipe
    return recipe


def get_recipe(name_or_recipe: "str | Recipe") -> Recipe:
    """The recipe of that name. A `Recipe` is returned as it is."""
    if isinstance(name_or_recipe, Recipe):
        return name_or_recipe
    given: Any = name_or_recipe
    if not isinstance(given, str) or given not in _RECIPES:
        raise CompileSpecError(f"recipe={name_or_recipe!r} is none of {listing(recipe_names())}, nor a dpq.Recipe")
    return _RECIPES[name_or_recipe]


def recipe_names() -> tuple[str, ...]:
    """The names of all registered recipes, the default first."""
    return tuple(_RECIPES)


DEFAULT_RECIPE = "int4"
register_recipe(DEFAULT_RECIPE, Recipe())
# Weights are a few percent of the bytes, and what four bits cost most in.
register_recipe("int4_w8", Recipe.parse("int4.nearest.channel,int8.nearest,int4.channel+rotated"))
register_recipe("int8", Recipe.parse("int8.nearest+rotated"))
# As the authors of LUQ train: logarithmic levels for gradients alone.
register_recipe("luq", Recipe.parse("int4.nearest,int4.nearest,luq_fp4"))
register_recipe("nvfp4", Recipe.parse("fp4_e2m1_nv.nearest,fp4_e2m1_nv.nearest,fp4_e2m1_nv+hadamard"))
register_recipe("fp8", Recipe.parse("fp8_e4m3.nearest,fp8_e4m3.nearest,fp8_e5m2.nearest"))
register_recipe("paper", Recipe.parse("luq_fp4/all"))
