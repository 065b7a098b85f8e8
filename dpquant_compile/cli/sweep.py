"""`dpquant sweep`: a grid of runs in parallel processes."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from dpquant_compile.cli.command import DONE, FAILED, Command
from dpquant_compile.cli.train import add_place, check_data, count, document, lost_steps, run_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpquant_compile.cli.output import Output
    from dpquant_compile.lab import RunConfig, RunResult, SweepEvent

__all__ = ["COMMAND"]

_GRID = """
A grid file is TOML or JSON. `base` holds fields that all runs share, named as the options of `dpquant train` with
underscores; each table of `grids` is a product over its lists:

  [base]
  task = "cnn-digits"

  [[grids]]
  scheduler = ["pls", "static"]
  budget = [0.5, 0.75]
  seed = [0, 1, 2]

  [[grids]]
  budget = 0

Runs that are done are skipped, and runs that were stopped go on, so the same command finishes a sweep. With
`reproducible = true` runs of one seed have the same batches and noise, for paired comparisons on public data."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = f"{parser.description}\n{_GRID}"
    parser.add_argument("grid", type=Path, metavar="GRID", help="a file, .toml or .json")
    add_place(parser)
    parser.add_argument("--workers", type=count, default=1, metavar="N", help="runs at a time; default: %(default)s")
    parser.add_argument("--threads", type=count, default=1, metavar="N", help="of each run; default: %(default)s")
    parser.add_argument("--data", metavar="FOLDER", help="folder with the data, for all runs")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and do nothing")


def _run(args: argparse.Namespace, output: "Output") -> int:
    from dpquant_compile.lab.sweep import expand, read_grid, sweep

    configs = expand(read_grid(args.grid))
    if args.data is not None:
        configs = [dataclasses.replace(config, data=args.data) for config in configs]
    for config in configs:
        check_data(config)
    if args.dry_run:
        _list(configs, args.out, output)
        return DONE
    events: list[SweepEvent] = []

    def tell(event: "SweepEvent") -> None:
        events.append(event)
        time = "" if event.status == "skipped" else f" in {event.seconds:.0f} s"
        output.note(f"{len(events)} of {len(configs)}: {event.config.key} {event.status}{time}")
        if event.message:
            output.note(f"  {event.message}")

    try:
        results = sweep(configs, args.out, workers=args.workers, threads=args.threads, on_done=tell)
    except KeyboardInterrupt:
        note = "The sweep goes on after the last whole epoch of each run when the same command is given again."
        output.note(f"{note}{lost_steps(configs)}")
        raise
    failed = [event for event in events if event.status == "failed"]
    _show(results, events, args.out, output)
    return FAILED if failed else DONE


def _list(configs: "Sequence[RunConfig]", out: Path, output: "Output") -> None:
    from dpquant_compile.cli.output import table

    states = {config.key: run_state(out / config.key) for config in configs}
    document = {
        "runs": [
            {"key": config.key, "folder": out / config.key, "state": states[config.key], "config": config.to_json()}
            for config in configs
        ]
    }
    todo = sum(state != "done" for state in states.values())
    rows = list(states.items())
    output.result(document, table(("run", "state"), rows, title=f"{len(configs)} runs, {todo} to do"))


def _show(results: "Sequence[RunResult]", events: "Sequence[SweepEvent]", out: Path, output: "Output") -> None:
    from dpquant_compile.cli.output import share, table
    from dpquant_compile.lab.cells import show_number

    known = {result.key: result for result in results}
    runs, rows = [], []
    for event in events:
        key = event.config.key
        result = known.get(key)
        values = {} if result is None else {"result": document(result, event.folder)}
        runs.append({"key": key, "folder": event.folder, "status": event.status, "message": event.message, **values})
        figures = (
            ("–", "–", "–")
            if result is None
            else (share(result.accuracy), share(result.accuracy_low), show_number(result.epsilon, 3))
        )
        rows.append((key, event.status, *figures))
    counts = {status: sum(event.status == status for event in events) for status in ("done", "skipped", "failed")}
    title = f"{len(events)} runs in {out}: " + ", ".join(f"{n} {status}" for status, n in counts.items())
    shown = [table(("run", "status", "accuracy", "low", "ε"), rows, title=title, right=("accuracy", "low", "ε"))]
    failures = [(event.config.key, event.message.strip()) for event in events if event.status == "failed"]
    if failures:
        shown.append(table(("failed", "message"), failures))
    output.result({"runs": runs, **counts}, *shown)


COMMAND = Command(
    "sweep",
    "train every run of a grid in parallel processes, skipping what is done",
    (
        "dpquant sweep grid.toml --dry-run",
        "dpquant sweep grid.toml --out out/runs --workers 2 --data data",
        "dpquant sweep grid.toml --out out/runs --json > runs.json",
    ),
    _add_arguments,
    _run,
)
