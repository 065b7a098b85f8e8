"""`dpquant report`: a page and tables that summarise runs."""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpquant_compile.cli.command import DONE, Command, InputError
from dpquant_compile.cli.models import capture
from dpquant_compile.errors import DPQuantError

if TYPE_CHECKING:
    from dpquant_compile.cli.output import Output
    from dpquant_compile.lab import RunResult
    from dpquant_compile.lab.tables import Row

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders that hold some")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="the page; default: %(default)s"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write a line for each run, too")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write tables of means over seeds, too")
    parser.add_argument("--title", metavar="TEXT", help="of the page")
    parser.add_argument(
        "--times",
        action="store_true",
        help="show how long runs took, everywhere; not covered by ε, so for runs on public data only",
    )
    graph = parser.add_mutually_exclusive_group()
    graph.add_argument("--graph", metavar="TASK", help="whose graph to show; default: the task of the first run")
    graph.add_argument("--no-graph", action="store_true", help="leave the graph out, which is slow for large models")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="where that task finds local weights")


def _run(args: argparse.Namespace, output: "Output") -> int:
    from dpquant_compile.lab import find_runs
    from dpquant_compile.lab.cells import markdown_table
    from dpquant_compile.lab.report import TIMES_WARNING, write_report
    from dpquant_compile.lab.tables import compare, summarise

    files = {"report": args.output, "csv": args.csv, "markdown": args.markdown}
    wanted = {name: path for name, path in files.items() if path is not None}
    _check_files(wanted)
    runs = find_runs(args.runs)
    rows = summarise(runs)
    graph = None if args.no_graph else _graph(args, runs, output)
    for path in wanted.values():
        path.parent.mkdir(parents=True, exist_ok=True)
    write_report(runs, args.output, title=args.title, graph=graph, times=args.times)
    if args.csv is not None:
        _write_csv(runs, args.csv, args.times)
    if args.markdown is not None:
        compared = compare(rows)
        parts = [markdown_table(rows, times=args.times), *([markdown_table(compared)] if compared else [])]
        args.markdown.write_text("\n".join(parts), encoding="utf-8")
    if args.times and any(run.epsilon is not None for run in runs):
        output.note(TIMES_WARNING)
    _show(rows, wanted, output, args.times)
    return DONE


def _check_files(wanted: dict[str, Path]) -> None:
    """Refuse paths that cannot be written, before anything is written."""
    for path in wanted.values():
        if path.is_dir():
            raise InputError(f"{path} is a folder. Fix: name a file, such as {path / 'report.html'}")
    if len({path.resolve() for path in wanted.values()}) < len(wanted):
        raise InputError(f"one file for two things: {', '.join(map(str, wanted.values()))}. Fix: name different files")


def _graph(args: argparse.Namespace, runs: "Sequence[RunResult]", output: "Output") -> str | None:
    """The drawing of the model; for a single run, with the sites of its last epoch coloured.

    If the model is not available, perhaps without a network, there is none, unless it was requested.
    """
    name = args.graph or runs[0].config.task
    try:
        model = capture(name, data=args.data)
        if len(runs) == 1 and args.graph is None:
            model.set_policy(runs[0].schedule[-1])
        return model.graph_view().to_svg()
    except DPQuantError as error:
        if args.graph is not None:
            raise
        output.note(f"The page has no graph of {name}: {error}")
        return None


def _write_csv(runs: "Sequence[RunResult]", path: Path, times: bool) -> None:
    """A line for each run: its configuration and its results."""
    purposes = sorted({purpose for run in runs for purpose in run.epsilons})
    stages = sorted({stage for run in runs for stage in run.seconds}) if times else []
    lines: list[dict[str, Any]] = []
    for run in runs:
        config = {name: value for name, value in run.config.to_json().items() if name != "data"}
        measured = {
            "accuracy": run.accuracy,
            "accuracy_low": run.accuracy_low,
            "epsilon": run.epsilon,
            "delta": run.delta,
        }
        spent = {f"epsilon_{purpose}": run.epsilons.get(purpose) for purpose in purposes}
        taken = {f"seconds_{stage}": run.seconds.get(stage) for stage in stages}
        lines.append({"key": run.key, **config, **measured, **spent, **taken})
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def _show(rows: "Sequence[Row]", written: dict[str, Path], output: "Output", times: bool) -> None:
    from dpquant_compile.cli.output import table
    from dpquant_compile.lab.cells import headline_table

    groups, count = headline_table(rows, times=times), sum(row.n for row in rows)
    title = f"{count} {'run' if count == 1 else 'runs'}" + (f": {groups.common}" if groups.common else "")
    texts = [[cell.text for cell in cells] for cells in groups.body]
    shown = table(groups.header, texts, title=title, right=groups.header[groups.labels :])
    document = {"runs": count, "groups": [_group(row, times) for row in rows], "files": written}
    output.result(document, shown, *(f"{name}: {path}" for name, path in written.items()))


def _group(row: "Row", times: bool) -> dict[str, Any]:
    """Mean and standard deviation over the runs of a group, with their common settings."""
    figures = {"accuracy": row.accuracy, "accuracy_low": row.accuracy_low, "epsilon": row.epsilon}
    if times:
        figures["seconds"] = row.seconds
    return {
        "settings": dict(row.settings),
        "runs": row.n,
        "seeds": row.seeds,
        **{name: {"mean": stat.mean, "std": stat.std} for name, stat in figures.items()},
    }


COMMAND = Command(
    "report",
    "make a page, and tables, of finished runs",
    (
        "dpquant report out/runs -o report.html",
        "dpquant report out/runs/cnn-digits-* -o digits.html --title Digits",
        "dpquant report out/runs --csv runs.csv --markdown tables.md --no-graph",
    ),
    _add_arguments,
    _run,
)
