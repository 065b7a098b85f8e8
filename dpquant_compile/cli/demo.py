"""`dpquant demo`: a private run beside float32 and Opacus, and a private step timed on this machine."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpquant_compile.cli.command import DONE, Command

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dpquant_compile.cli.output import Output
    from dpquant_compile.lab.cells import Table
    from dpquant_compile.lab.results import EpochRow

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    home = Path("out/demo")
    parser.add_argument("--out", type=Path, default=home, metavar="FOLDER", help="of the pages; default: %(default)s")
    parser.add_argument(
        "--quick", action="store_true", help="two epochs and a small network: shows that it works, and no figures"
    )


def _run(args: argparse.Namespace, output: "Output") -> int:
    from dpquant_compile.lab.demo import Demo, about_steps, accuracy_table, step_table

    begun, demo = time.perf_counter(), Demo(args.out, quick=args.quick)
    output.note("1 of 2: DP-SGD on 1,437 handwritten digits: a CNN of eight layers, six in four bits at a time.")
    low = demo.train_low(_epochs(output))
    output.note("The same in float32, then by Opacus.")
    full, opacus = demo.train_full(), demo.train_by_opacus()
    output.part("", _table(accuracy_table(low, full, opacus)), "")

    output.note(f"2 of 2: one private training step, timed on this machine: {demo.workload}.")
    if not demo.quick:
        output.note("Two programs are compiled first: about a minute on two cores, and seconds the next time.")
    steps = demo.time_steps()
    output.part("", _table(step_table(steps)), about_steps(steps), "")
    if demo.quick:
        output.note("A quick run shows that all of it works; its figures mean nothing.")

    demo.write(low, full, opacus, steps)
    pages = {name: args.out / f"{name}.html" for name in ("report", "graph")}
    document: dict[str, Any] = {
        "accuracy": {"low": low.accuracy, "low, used in low": low.accuracy_low, "float32": full.accuracy},
        "epsilon": {"low": low.epsilon, "float32": full.epsilon, "opacus": opacus.epsilon},
        "milliseconds": {row.name: row.milliseconds for row in steps.rows},
        "files": pages,
    }
    document["accuracy"]["opacus"] = opacus.accuracy
    seconds = time.perf_counter() - begun
    output.result(
        document,
        f"Took {seconds:.0f} s. Open {pages['report']} (these figures, the schedule, what ε was spent on)",
        f"and {pages['graph']} (the network as the compiler sees it).",
    )
    return DONE


def _epochs(output: "Output") -> "Callable[[EpochRow], None]":
    """Prints a line for each epoch."""
    from dpquant_compile.cli.output import share

    line = "{:>7}  {:>8}  {:>6}  {:>7}".format

    def show(row: "EpochRow") -> None:
        if row.epoch == 1:
            output.note(line("epoch", "accuracy", "ε", "seconds"))
        output.note(line(row.epoch, share(row.accuracy), f"{row.epsilon:.2f}", f"{row.seconds:.1f}"))

    return show


def _table(made: "Table") -> "RenderableType":
    from dpquant_compile.cli.output import table

    texts = [[cell.text for cell in cells] for cells in made.body]
    return table(made.header, texts, right=made.header[made.labels :])


COMMAND = Command(
    "demo",
    "train privately in four bits beside float32 and Opacus, and time a private step here",
    ("dpquant demo", "dpquant demo --quick --out out/quick", "dpquant demo --json > demo.json"),
    _add_arguments,
    _run,
)
