"""Recipes: what they are made of, their printed form, the registry, and both sides of the switch."""

from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

import dpquant_compile as dpq
from dpquant_compile.errors import CompileSpecError, FormatError, RegistryError
from dpquant_compile.numerics import recipe as recipes
from dpquant_compile.numerics.operand_spec import OperandSpec
from dpquant_compile.numerics.recipe import HIGH, Precision, Recipe, get_recipe, recipe_names, register_recipe
from dpquant_compile.spec import CompileSpec


@pytest.fixture(autouse=True)
def unchanged_registry() -> Iterator[None]:
    before = dict(recipes._RECIPES)
    yield
    recipes._RECIPES.clear()
    recipes._RECIPES.update(before)


# Operands


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("luq_fp4", OperandSpec("luq_fp4", "stochastic", "sample")),
        ("int4.nearest.channel", OperandSpec("int4", "nearest", "channel")),
        ("int4.block", OperandSpec("int4", "stochastic", "block")),
        ("int8.nearest", OperandSpec("int8", "nearest")),
        ("fp4_e2m1_nv.nearest", OperandSpec("fp4_e2m1_nv", "nearest", "block")),
    ],
)
def test_an_operand_prints_as_it_is_written(text: str, spec: OperandSpec) -> None:
    assert OperandSpec.parse(text) == spec and str(spec) == text


def test_words_of_an_operand_come_in_any_order() -> None:
    assert OperandSpec.parse("int4.channel.nearest") == OperandSpec("int4", "nearest", "channel")
    assert OperandSpec.parse("int4.stochastic.sample") == OperandSpec("int4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int5", "no format is named 'int5'"),
        ("int8.channel", "'channel' does not fit format int8. It knows stochastic, nearest, sample"),
        ("int4.nearest.nearest", "'nearest' does not fit"),
        ("int4.up", "'up' does not fit"),
        ("fp4_e2m1.sample", "'sample' does not fit"),
    ],
)
def test_an_operand_that_does_not_exist_is_refused(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        OperandSpec.parse(text)


def test_an_operand_is_checked_however_it_is_made() -> None:
    with pytest.raises(FormatError, match="rounding='up': format int4 knows stochastic, nearest"):
        OperandSpec("int4", "up")
    with pytest.raises(FormatError, match="scale='channel': format luq_fp4 knows sample"):
        OperandSpec("luq_fp4", scale="channel")
    with pytest.raises(FormatError, match="3 is neither an OperandSpec nor its text"):
        Recipe(input=3)  # type: ignore[arg-type]


# Recipes


@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.parametrize("high", HIGH)
def test_a_recipe_is_read_back_from_its_print(name: str, high: str) -> None:
    recipe = replace(get_recipe(name), high=high)
    assert Recipe.parse(str(recipe)) == recipe and recipe.name == name
    assert "\n" not in str(recipe) and " " not in str(recipe)


def test_transforms_stand_behind_the_operands() -> None:
    for text, hadamard, rotated in (
        ("+hadamard", True, False),
        ("+rotated", False, True),
        ("+hadamard+rotated", True, True),
    ):
        recipe = Recipe.parse(f"int8.nearest{text}")
        assert (recipe.hadamard, recipe.rotated) == (hadamard, rotated) and str(
            recipe
        ) == f"int8.nearest{text}/none/auto"


def test_named_recipes_are_what_they_say() -> None:
    printed = {name: str(get_recipe(name)) for name in recipe_names()}
    assert printed == {
        "int4": "int4.nearest.channel,int4.nearest.block,int4.channel+rotated/none/auto",
        "int4_w8": "int4.nearest.channel,int8.nearest,int4.channel+rotated/none/auto",
        "int8": "int8.nearest+rotated/none/auto",
        "luq": "int4.nearest,int4.nearest,luq_fp4/none/auto",
        "nvfp4": "fp4_e2m1_nv.nearest,fp4_e2m1_nv.nearest,fp4_e2m1_nv+hadamard/none/auto",
        "fp8": "fp8_e4m3.nearest,fp8_e4m3.nearest,fp8_e5m2.nearest/none/auto",
        "paper": "luq_fp4/all/auto",
    }
    assert {name: get_recipe(name).label for name in ("int4", "int8", "luq", "paper")} == {
        "int4": "INT4", "int8": "INT8", "luq": "INT4/FP4", "paper": "FP4",
    }  # fmt: skip


def test_outputs_and_weight_gradients_are_rounded_like_their_operands() -> None:
    recipe = Recipe.parse("int8,int4,luq_fp4")
    found = [str(recipe.of(role)) for role in ("input", "output", "weight", "grad_output", "grad_input", "grad_weight")]
    assert found == ["int8", "int8", "int4", "luq_fp4", "luq_fp4", "luq_fp4"]


def test_one_format_is_not_the_paper() -> None:
    """`name` goes by outputs too: the paper's simulation rounds them."""
    assert Recipe.of_format("luq_fp4").name == "luq_fp4" and Recipe.of_format("luq_fp4", "all").name == "paper"
    assert Recipe.of_format("int8.nearest", "flow").name == "int8.nearest/flow"


def test_a_format_for_all_operands_does_not_pass_for_the_recipe_of_its_name() -> None:
    assert Recipe.of_format("int4").name == "int4.stochastic.sample, all operands" != get_recipe("int4").name
    assert Recipe.of_format("int8").name == "int8.stochastic.sample, all operands"


@pytest.mark.parametrize(
    "text",
    [
        "int4,int4",
        "int4,int4,int4,int4",
        "int4+fourier",
        "int4+",
        "int4+rotated+hadamard",
        "int4+rotated+rotated",
        "int4/none/auto/int8/more",
    ],
)
def test_what_is_no_recipe_is_refused(text: str) -> None:
    with pytest.raises(CompileSpecError, match="is no recipe: write one operand for all"):
        Recipe.parse(text)


@pytest.mark.parametrize("wrong", [None, 5, ["int4"], Recipe()])
def test_what_is_no_text_is_refused(wrong: Any) -> None:
    with pytest.raises(CompileSpecError, match="is no recipe: write a text"):
        Recipe.parse(wrong)
    with pytest.raises(FormatError, match="is no format: give a name"):
        OperandSpec.parse(wrong)
    with pytest.raises(FormatError, match="give the name of a registered format"):
        OperandSpec(wrong)


def test_a_recipe_is_frozen_and_checked() -> None:
    with pytest.raises(FrozenInstanceError):
        Recipe().outputs = "all"  # type: ignore[misc]
    for wrong, message in (({"outputs": "some"}, "quantize_outputs='some'"), ({"high": "fp8"}, "high='fp8'"),
                           ({"hadamard": 1}, "hadamard=1"), ({"rotated": 1}, "rotated=1"),
                           ({"rotated": True, "outputs": "flow"}, "before they are rotated back"),
                           ({"backend": "a/b"}, "backend='a/b'"),
                           ({"backend": 3}, "backend=3")):  # fmt: skip
        with pytest.raises(CompileSpecError, match=message):
            Recipe(**wrong)  # type: ignore[arg-type]


def test_a_users_recipe_is_known_by_its_name() -> None:
    mine = dpq.register_recipe("mine", dpq.Recipe.parse("int4.nearest.channel,int8.nearest,luq_fp4"))
    assert dpq.recipe_names()[-1] == "mine" and get_recipe("mine") is mine and mine.name == "mine"
    assert CompileSpec.build(1, recipe="mine").recipe == mine
    with pytest.raises(RegistryError, match="'mine' is already registered"):
        register_recipe("mine", mine)
    for name, value, message in (("two words", mine, "letters"), ("other", "int4", "is no Recipe")):
        with pytest.raises(RegistryError, match=message):
            register_recipe(name, value)  # type: ignore[arg-type]


def test_a_recipe_lends_its_name_to_those_that_are_it() -> None:
    """`explain()` says what the other sites run in; a name that was given to that too must not hide its absence."""
    operands = Recipe.parse("int4.nearest,int8.nearest,luq_fp4")
    register_recipe("mine", replace(operands, high="int8"))
    assert replace(operands, high="int8", backend="reference").name == "mine"
    assert operands.name == "int4.nearest,int8.nearest,luq_fp4"
    register_recipe("plain", operands)
    assert operands.name == "plain" and replace(operands, high="int8").name == "mine"


def test_a_failed_look_up_lists_the_choices() -> None:
    for wrong in (3, ["int4"]):
        with pytest.raises(CompileSpecError, match="is none of int4, int4_w8"):
            get_recipe(wrong)  # type: ignore[arg-type]
        with pytest.raises(RegistryError, match="use letters"):
            register_recipe(wrong, Recipe())  # type: ignore[arg-type]
    with pytest.raises(CompileSpecError, match="recipe='int3' is none of int4, int4_w8, int8, luq, nvfp4, fp8, paper"):
        get_recipe("int3")


# Both sides of the switch


def test_precision_says_which_recipe_runs() -> None:
    plain, both = Recipe(), Recipe(high="int8")
    assert plain.running(Precision.LOW) is plain and plain.running(Precision.FULL) is None
    assert plain.other == Precision.FULL and both.other == Precision.HIGH
    high = replace(both, backend="reference").running(Precision.HIGH)
    assert high is not None and str(high) == "int8.nearest+rotated/none/reference"
    assert both.running(Precision.FULL) is None, "eval() is in full precision whatever `high` says"
    half = Recipe(high="bfloat16")
    assert half.other == Precision.BFLOAT16 and half.running(half.other) is None and half.others == "bfloat16"
    assert half.running(Precision.LOW) is half and half.name == "int4"
    assert [precision.by_recipe for precision in Precision] == [False, True, True, False]


# What users type


def test_words_of_compile_become_a_recipe() -> None:
    built = CompileSpec.build
    assert built(1).recipe == Recipe()
    assert built(1, format="luq_fp4", quantize_outputs="flow").recipe == Recipe.of_format("luq_fp4", "flow")
    flow = built(1, quantize_outputs="flow").recipe
    assert flow == Recipe(rotated=False, outputs="flow"), "rounded outputs go without rotation"
    assert built(1, recipe="paper").recipe.outputs == "all"
    assert built(1, recipe="int4", high="int8", backend="reference").recipe == Recipe(backend="reference", high="int8")
    assert built(1, recipe=Recipe(backend="reference")).inner == "eager"
    assert built(1, recipe="int8", format="int8.nearest").recipe == get_recipe("int8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"recipe": "paper", "quantize_outputs": "none"}, "recipe='paper' sets quantize_outputs='all'"),
        (
            {"recipe": "int8", "format": "luq_fp4"},
            r"recipe='int8' rounds by int8.nearest\+rotated; format='luq_fp4' contradicts",
        ),
        ({"recipe": Recipe(backend="compiled"), "backend": "reference"}, "sets backend='compiled'"),
        ({"recipe": Recipe(high="int8"), "high": "float32"}, "sets high='int8'"),
        ({"high": "float16"}, "high='float16' is none of 'float32', 'bfloat16', 'int8'"),
        ({"recipe": "best"}, "recipe='best' is none of"),
    ],
)
def test_words_that_contradict_are_refused(words: dict[str, object], message: str) -> None:
    with pytest.raises(CompileSpecError, match=message):
        CompileSpec.build(1, **words)  # type: ignore[arg-type]
