"""`dpquant recipes`: what can be trained by name, and the data that it needs."""

import argparse
from typing import TYPE_CHECKING

from dpquant_compile.cli.command import DONE, Command

if TYPE_CHECKING:
    from dpquant_compile.cli.output import Output

__all__ = ["COMMAND"]

_WHERE = (
    "Data are looked for in the folder that --data names. What is not there is fetched: by torchvision into that "
    "folder, or without one into ~/.cache/dpquant; by Hugging Face into its own cache."
)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--small", action="store_true", help="only those that take minutes on two cores")


def _run(args: argparse.Namespace, output: "Output") -> int:
    from dpquant_compile import lab
    from dpquant_compile.cli.output import table

    found = [lab.get_recipe(name) for name in lab.recipe_names()]
    chosen = [recipe for recipe in found if recipe.small or not args.small]
    document = {
        "recipes": [
            {
                "name": recipe.name,
                "summary": recipe.summary,
                "task": recipe.task,
                "small": recipe.small,
                "data": recipe.needs,
                "defaults": dict(recipe.defaults),
            }
            for recipe in chosen
        ],
        "where": _WHERE,
    }
    rows = [(recipe.name, recipe.summary, recipe.needs) for recipe in chosen]
    output.result(document, table(("recipe", "what", "data"), rows), "", _WHERE)
    return DONE


COMMAND = Command(
    "recipes",
    "list the recipes, and the data that they need",
    ("dpquant recipes", "dpquant recipes --small --json"),
    _add_arguments,
    _run,
)
