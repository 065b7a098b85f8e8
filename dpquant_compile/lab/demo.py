"""`Demo`: what this library does, in minutes: a private run beside two others, and a step timed on this machine."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from dpquant_compile.errors import LabError
from dpquant_compile.lab.cells import Cell, Table, html_table, show_delta, show_number
from dpquant_compile.lab.config import RunConfig
from dpquant_compile.lab.opacus_run import OpacusRun, train_by_opacus
from dpquant_compile.lab.private_step import RESNET18, SMALL, StepTimes, Workload, time_private_step
from dpquant_compile.lab.report import write_report
from dpquant_compile.lab.results import EpochRow, RunResult
from dpquant_compile.lab.train import Run, train
from dpquant_compile.numerics.recipe import DEFAULT_RECIPE

__all__ = ["Demo", "about_steps", "accuracy_table", "opening", "step_table"]

TASK = "cnn-digits"


@dataclass(frozen=True)
class Demo:
    """The stages of the demo, in the order in which they are to be called.

    folder   for the two pages and the two run folders; those of an earlier demo are replaced
    quick    two epochs, and a small network in place of ResNet18: this shows that all of it works, and no figures

    Raises LabError if there is no C++ compiler, without which the last stage would fail.
    """

    folder: Path
    quick: bool = False

    def __post_init__(self) -> None:
        compilers = (os.environ.get("CXX", "").split() or ["g++"])[0], "g++", "clang++"
        if not self.quick and not any(map(shutil.which, compilers)):
            raise LabError(
                "there is no C++ compiler, which torch.compile needs. Fix: install g++ or clang++, or try "
                "`dpquant demo --quick`, which needs none"
            )

    @property
    def config(self) -> RunConfig:
        """The task's settings: the default recipe on three quarters of the layers, which the schedule chooses."""
        return RunConfig(TASK, epochs=2 if self.quick else None).resolved()

    @property
    def workload(self) -> Workload:
        """The network whose step is timed."""
        return SMALL if self.quick else RESNET18

    def train_low(self, progress: Callable[[EpochRow], None]) -> RunResult:
        """Train in low precision, and write graph.html."""
        run = Run(self.config, self._empty("run"))
        try:
            for row in run.epochs():
                progress(row)
            result = run.finish()
            run.model.save_html(self.folder / "graph.html", schedule=result.schedule)
        finally:
            run.engine.close()
        return result

    def train_full(self) -> RunResult:
        """Train in float32."""
        return train(replace(self.config, budget=0.0), self._empty("full_precision"))

    def train_by_opacus(self) -> OpacusRun:
        """Train in stock Opacus."""
        return train_by_opacus(self.config)

    def time_steps(self) -> StepTimes:
        """Time one private step of a real network."""
        return time_private_step(self.workload)

    def write(self, low: RunResult, full: RunResult, opacus: OpacusRun, steps: StepTimes) -> None:
        """Write report.html, which opens with the demo's own figures."""
        write_report(
            [low, full],
            self.folder / "report.html",
            title="Private training in low precision, on this machine",
            opening=opening(low, full, opacus, steps),
            times=True,  # the data are public
        )

    def _empty(self, name: str) -> Path:
        """A folder for a run; `train` would go on with an earlier one."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.folder / name


def accuracy_table(low: RunResult, full: RunResult, opacus: OpacusRun) -> Table:
    """Accuracy and ε of the three runs."""
    scheduled = f"{low.config.precision} in {len(low.schedule[-1])} of {len(low.sites)} layers, as scheduled"
    rows = (
        ("Opacus, float32", opacus.accuracy, None, opacus.epsilon),
        ("dpquant-compile, float32", full.accuracy, None, full.epsilon),
        (f"dpquant-compile, {scheduled}", low.accuracy, low.accuracy_low, low.epsilon),
    )
    return Table(
        header=("trained by", "test accuracy", "used in four bits", f"ε (δ = {show_delta(low.delta)})"),
        body=tuple(
            (Cell(name), Cell(_percent(accuracy)), Cell(_percent(used)), Cell(show_number(epsilon)))
            for name, accuracy, used, epsilon in rows
        ),
        labels=1,
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{show_number(100 * share, 1)} %"


def step_table(steps: StepTimes) -> Table:
    """Time of the steps, and how many times as fast as Opacus each is."""
    names = {
        "Opacus": "Opacus, float32",
        "float32": "dpquant-compile, float32",
        "int8": "dpquant-compile, int8",
        DEFAULT_RECIPE: f"dpquant-compile, {DEFAULT_RECIPE}",
        "not private": "not private, float32",
    }
    longest = max(row.milliseconds for row in steps.rows)
    return Table(
        header=("one training step", "ms", "Opacus / this", "private float32 / this"),
        body=tuple(
            (
                Cell(names[row.name]),
                Cell(f"{row.milliseconds:.0f} ± {row.spread:.0f}", row.milliseconds / longest),
                Cell(f"{steps.ratio(row.name):.1f}×"),
                Cell(f"{steps.ratio(row.name, to='float32'):.2f}×"),
            )
            for row in steps.rows
        ),
        labels=1,
    )


def about_steps(steps: StepTimes) -> str:
    """What was timed, where, and whether low precision is native there."""
    threads = "1 thread" if steps.threads == 1 else f"{steps.threads} threads"
    text = (
        f"{steps.workload}, on {steps.machine}, {threads}. Forward, backward, clipping, noise and update; median ± "
        "half the range of steps taken in turn; int8 and int4 in all layers."
    )
    if steps.unsteady:
        text += " The machine was busy with other work: these times vary too much to compare. Run it again."
    if steps.emulated is not None:
        text += f" Low precision is emulated here, and no faster: {steps.emulated}."
    return text


def opening(low: RunResult, full: RunResult, opacus: OpacusRun, steps: StepTimes) -> str:
    """The demo's figures as HTML: the most important ones large, then both tables."""
    figures = (
        ("accuracy after four bits", _percent(low.accuracy), f"float32: {_percent(full.accuracy)}, at the same noise"),
        ("ε", show_number(low.epsilon), f"Opacus: {show_number(opacus.epsilon)}, without the schedule's measurements"),
        *(
            (f"private step in {name}", f"{steps.ratio(name):.0f}×", "as fast as Opacus, on this machine")
            for name in ("int8", DEFAULT_RECIPE)
            if not steps.unsteady
        ),
    )
    large = "".join(
        f'<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class="hint">{escape(hint)}</dd></div>'
        for name, value, hint in figures
    )
    one, other = "Accuracy at equal noise", "One private training step on this machine"
    about = (
        f"{len(low.epochs)} epochs on scikit-learn's handwritten digits, by the same loop, from the same weights. "
        "Noise is new in every run, so accuracies differ by a point or two by chance."
    )
    return (
        f'<dl class="figures">{large}</dl>'
        f"<h2>{one}</h2><p>{escape(about)}</p>{html_table(accuracy_table(low, full, opacus), one)}"
        f"<h2>{other}</h2><p>{escape(about_steps(steps))}</p>{html_table(step_table(steps), other)}"
        "<h2>Two of the runs in detail</h2>"
    )
