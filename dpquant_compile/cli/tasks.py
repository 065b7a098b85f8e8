"""`dpquant tasks`: what can be trained by name, and the data it needs."""

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

    found = [lab.get_task(name) for name in lab.task_names()]
    chosen = [task for task in found if task.small or not args.small]
    document = {
        "tasks": [
            {
                "name": task.name,
                "summary": task.summary,
                "kind": task.kind,
                "small": task.small,
                "data": task.needs,
                "defaults": dict(task.defaults),
            }
            for task in chosen
        ],
        "where": _WHERE,
    }
    rows = [(task.name, task.summary, task.needs) for task in chosen]
    output.result(document, table(("task", "what", "data"), rows), "", _WHERE)
    return DONE


COMMAND = Command(
    "tasks",
    "list the tasks, and the data that they need",
    ("dpquant tasks", "dpquant tasks --small --json"),
    _add_arguments,
    _run,
)
