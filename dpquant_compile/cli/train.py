"""`dpquant train`: one run of a task in its own folder; a second call continues it."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpquant_compile.cli.command import DONE, Command, InputError, RunFailedError
from dpquant_compile.errors import DPQuantError, LabError, PrivacyBudgetError, PrivacySpecError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpquant_compile.cli.output import Output
    from dpquant_compile.lab import EpochRow, RunConfig, RunResult

__all__ = ["COMMAND", "OPTIONS", "Option", "add_place", "check_data", "count", "document", "lost_steps", "run_state"]


@dataclass(frozen=True)
class Option:
    """A field of `RunConfig` on the command line; `RunConfig` itself checks its values."""

    field: str
    kind: type
    help: str
    group: str = "the run"


# Every field but `task`, which is the argument. A test compares this list with RunConfig.
OPTIONS = (
    Option("seed", int, "of weights and schedule; with --reproducible, of batches, noise and rounding too; default: 0"),
    Option("epochs", int, "default: the task's"),
    Option("batch_size", int, "expected size of a Poisson batch; default: the task's"),
    Option("physical", int, "samples that are computed at a time; default: the task's"),
    Option("optimizer", str, "sgd (default), adam or adamw"),
    Option("lr", float, "learning rate; default: the task's"),
    Option("lr_decay", str, "none, linear or cosine; default: the task's"),
    Option("data", str, "folder with the data; see `dpquant tasks`"),
    Option(
        "recipe",
        str,
        "int4 (default), int4_w8, int8, luq, nvfp4, fp8, paper, or operands as Recipe.parse reads them",
        "low precision",
    ),
    Option("format", str, "one number format for all operands, such as luq_fp4, in place of a recipe", "low precision"),
    Option("high", str, "what sites run in that are not low: float32 (default), bfloat16 or int8", "low precision"),
    Option("budget", float, "share of the sites in low precision; 0 is full precision; default: 0.75", "low precision"),
    Option("quantize_outputs", str, "none (default), flow or all", "low precision"),
    Option("privacy", str, "dp (default); as controls that are not private, clip (no noise) or none", "privacy"),
    Option("noise_multiplier", float, "σ of training; default: the task's", "privacy"),
    Option(
        "target_epsilon",
        float,
        "choose σ so that training and analyses together keep this ε; beside --noise-multiplier it is a limit instead, "
        "and a run that reaches it ends there with an error",
        "privacy",
    ),
    Option("delta", float, "default: the task's", "privacy"),
    Option(
        "reproducible",
        bool,
        "batches, noise and rounding follow from the seed, and ε holds only as long as nobody knows it; by default "
        "they come from the operating system's entropy",
        "privacy",
    ),
    Option("max_grad_norm", float, "what gradients are clipped to; default: the task's", "privacy"),
    Option("scheduler", str, "dpquant (default), pls, static or greedy", "schedule"),
    Option("estimator", str, "per_sample (default) or paper", "schedule"),
    Option("static_seed", int, "which subset, for the scheduler static; default: the seed", "schedule"),
    Option("beta", float, "how strongly low scores are preferred", "schedule"),
    Option("ema", float, "weight of a new measurement", "schedule"),
    Option("normalise", str, "minmax or rank", "schedule"),
    Option("n_interval", int, "epochs between two analyses", "schedule"),
    Option("n_sample", float, "physical batches that an analysis draws", "schedule"),
    Option("sigma_measure", float, "noise multiplier of an analysis", "schedule"),
    Option("clip_measure", float, "what measurements are clipped to", "schedule"),
    Option("repetitions", int, "updates that the estimator paper averages over", "schedule"),
)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", metavar="TASK", help="its name; `dpquant tasks` lists them")
    add_place(parser)
    parser.add_argument("--threads", type=count, metavar="N", help="of the CPU; default: torch's choice")
    groups: dict[str, Any] = {}
    for option in OPTIONS:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        _add_option(groups[option.group], option)


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add the option for the folder that holds the run folders."""
    home = Path("out/runs")
    parser.add_argument(
        "--out", type=Path, default=home, metavar="FOLDER", help="of the run folders; default: %(default)s"
    )


def _add_option(group: Any, option: Option) -> None:
    name = f"--{option.field.replace('_', '-')}"
    if option.kind is bool:
        group.add_argument(name, action="store_true", default=argparse.SUPPRESS, help=option.help)
        return
    metavar = "FOLDER" if option.field == "data" else {int: "N", float: "X", str: "WORD"}[option.kind]
    group.add_argument(name, type=option.kind, default=argparse.SUPPRESS, metavar=metavar, help=option.help)


def count(text: str) -> int:
    """A whole number from 1 up, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _run(args: argparse.Namespace, output: "Output") -> int:
    from dpquant_compile import lab

    given = {option.field: getattr(args, option.field) for option in OPTIONS if hasattr(args, option.field)}
    config = lab.RunConfig.from_json({"task": args.task, **given}).resolved()
    check_data(config)
    folder = args.out / config.key
    state = run_state(folder)
    output.note(f"{config.key}: {_STATES[state]}{lost_steps([config]) if state == 'begun' else ''}")
    try:
        with _progress(config, output) as progress:
            result = lab.train(config, folder, progress=progress, threads=args.threads)
    except KeyboardInterrupt:
        note = "The run goes on after its last whole epoch when the same command is given again."
        output.note(f"{note}{lost_steps([config])}")
        raise
    except (LabError, PrivacySpecError):
        raise  # the request itself is invalid
    except PrivacyBudgetError as error:
        if run_state(folder) == "new":
            raise  # no noise is enough
        raise RunFailedError(
            f"{config.key} ends before its last epoch: {error} The model after the last whole epoch is in "
            f"{folder / 'checkpoint.pt'}"
        ) from error
    except (DPQuantError, OSError) as error:
        raise RunFailedError(f"{config.key}: {error}") from error
    _show(result, folder, output)
    return DONE


def check_data(config: "RunConfig") -> None:
    """Refuse a data folder that does not exist."""
    if config.data is not None and not Path(config.data).is_dir():
        raise InputError(f"data={config.data!r} is no folder. Fix: --data FOLDER, see `dpquant tasks`")


_STATES = {
    "done": "done before",
    "begun": "going on from its last checkpoint.",
    "again": "starting again; its ledger holds an earlier attempt, which is counted",
    "new": "starting",
}


def lost_steps(configs: "Sequence[RunConfig]") -> str:
    """The cost of continuing such runs, as sentences with a leading space; empty if there is none."""
    charged = [config for config in configs if config.privacy == "dp" and not config.reproducible]
    if not charged:
        return ""
    text = " Steps since then are made again with new randomness, and count again in ε."
    if any(config.target_epsilon is not None for config in charged):
        text += " So a run with --target-epsilon may reach it before its last epoch, and end there with an error."
    return text


def run_state(folder: Path) -> str:
    """The state of a run folder: "done", "begun", "again" (spent, and lost) or "new"."""
    files = {"result.json": "done", "checkpoint.pt": "begun", "ledger.json": "again"}
    return next((state for name, state in files.items() if (folder / name).exists()), "new")


@contextmanager
def _progress(config: "RunConfig", output: "Output") -> "Iterator[Callable[[EpochRow], None]]":
    """Print a line for each epoch, above a bar if standard error is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dpquant_compile.cli.output import share
    from dpquant_compile.lab.cells import show_number

    columns = (TextColumn("epochs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    line = "{:>6}  {:>9}  {:>9}  {:>8}  {:>8}  {}".format
    with Progress(*columns, console=output.log, transient=True, disable=not output.log.is_terminal) as bar:
        task = bar.add_task("epochs", total=config.epochs)

        def show(row: "EpochRow") -> None:
            if bar.tasks[0].completed == 0:
                output.log.print(line("epoch", "accuracy", "low", "ε", "seconds", "sites in low precision"))
            figures = (
                share(row.accuracy),
                share(row.accuracy_low),
                show_number(row.epsilon, 3),
                show_number(row.seconds, 1),
            )
            output.log.print(line(row.epoch, *figures, len(row.policy)))
            bar.update(task, completed=row.epoch)

        yield show


def document(result: "RunResult", folder: Path) -> dict[str, Any]:
    """A run's result for `--json`, with the useful files of its folder."""
    from dpquant_compile.lab.results import MODEL

    return {**result.to_json(), "folder": folder, "model": folder / MODEL}


def _show(result: "RunResult", folder: Path, output: "Output") -> None:
    from dpquant_compile.cli.output import share, table
    from dpquant_compile.lab.cells import show_number

    rows = [
        ("accuracy on test data", share(result.accuracy)),
        ("the same in low precision", share(result.accuracy_low)),
        ("sites in low precision", f"{len(result.schedule[-1]) if result.schedule else 0} of {len(result.sites)}"),
    ]
    if result.epsilon is None:
        rows.append(("privacy", "none: a control"))
    else:
        rows.append((f"ε at δ = {result.delta:g}", show_number(result.epsilon, 3)))
        rows += [(f"  {purpose} by itself", show_number(value, 3)) for purpose, value in result.epsilons.items()]
        if result.config.reproducible:
            rows.append(("it holds if", "nobody knows the seed. For real data: without --reproducible"))
        else:
            rows.append(("noise, batches, rounding", "from the operating system's entropy"))
    rows += [(f"seconds of {stage}", show_number(value, 1)) for stage, value in result.seconds.items()]
    found = document(result, folder)
    rows += [("folder", str(folder)), ("model, a state_dict", str(found["model"]))]
    output.result(found, table(("", ""), rows, title=result.key))


COMMAND = Command(
    "train",
    "train a task privately, or go on with a run that was stopped",
    (
        "dpquant train cnn-digits",
        "dpquant train cnn-digits --budget 0.9 --scheduler static --seed 3 --out out/runs",
        "dpquant train cnn-digits --seed 3 --reproducible",
        "dpquant train cnn-gtsrb-small --data data --target-epsilon 8 --optimizer adam --json",
        "dpquant train resnet18-cifar10 --estimator paper --quantize-outputs all",
    ),
    _add_arguments,
    _run,
    removed={"--secure-mode": " --secure-mode is the default now: leave it out. Its opposite is --reproducible."},
)
