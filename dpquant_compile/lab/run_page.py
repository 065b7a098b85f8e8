"""The section of a report on one run: its epochs, its spends, its schedule, and how to repeat it."""

import dataclasses
import json
import math
import shlex
from collections.abc import Sequence
from html import escape

from dpquant_compile.lab.cells import Cell, Table, html_table, show_delta, show_number
from dpquant_compile.lab.charts import Line, line_chart, marker, schedule_strip, stacked_bar, swatch
from dpquant_compile.lab.config import RunConfig
from dpquant_compile.lab.results import RunResult

__all__ = ["command", "legend", "run_section"]

# Part of every command, even where they are the defaults.
_SAID = ("seed", "budget", "scheduler")


def command(config: RunConfig) -> str:
    """The command line of a run, which repeats it if it is reproducible; without the data's folder."""
    words = ["dpquant", "train", config.task]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in ("task", "data") or value is None or (value == field.default and field.name not in _SAID):
            continue
        words.append(f"--{field.name.replace('_', '-')}")
        if value is not True:
            words.append(repr(value) if isinstance(value, float) else str(value))
    return shlex.join(words)


def legend(names: Sequence[tuple[str, str]]) -> str:
    """A line of markers with their names; each marker is SVG content around the origin."""
    items = "".join(
        f'<li><svg class="sign" viewBox="-10 -7 20 14" aria-hidden="true">{sign}</svg>{escape(name)}</li>'
        for name, sign in names
    )
    return f'<ul class="legend">{items}</ul>'


def run_section(run: RunResult, level: int = 3, *, times: bool = False) -> str:
    """All about one run, with headings of this level. It contains no ids, so that a page may hold many.

    `times` shows how long it took: see `write_report`.
    """
    heading = f"h{level}"
    return "".join(
        (
            f'<p class="key"><code>{escape(run.key)}</code></p>',
            _figures(run, times),
            f"<{heading}>By epoch</{heading}>",
            _by_epoch(run, times),
            f"<{heading}>Schedule</{heading}>",
            _schedule(run),
            f"<{heading}>Time</{heading}>{_time(run)}" if times else "",
            _configuration(run),
        )
    )


def _figures(run: RunResult, times: bool) -> str:
    low, total = len(run.epochs[-1].policy) if run.epochs else 0, len(run.sites)
    spent = f"at δ = {show_delta(run.delta)}" if run.epsilon is not None else "not private: a control"
    if run.epsilon is not None:
        known = run.config.reproducible
        spent += ", as long as nobody knows the seed" if known else ", with noise from the operating system's entropy"
    others = "" if run.config.high == "float32" else f" and the others in {run.config.high}"
    where = f"the model evaluated with {low} of {total} sites in {run.config.precision}{others}, as in the last epoch"
    figures = [
        (
            "accuracy, full precision",
            f"{show_number(100 * run.accuracy)} %",
            "the model evaluated with all sites in float32",
        ),
        ("accuracy, low precision", f"{show_number(100 * run.accuracy_low)} %", where),
        ("ε", show_number(run.epsilon, 3), spent),
    ]
    if times:
        taken = math.fsum(run.seconds.values())
        figures.append(("time", f"{show_number(taken, 1)} s", f"{len(run.epochs)} epochs"))
    items = "".join(
        f'<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class="hint">{escape(hint)}</dd></div>'
        for name, value, hint in figures
    )
    return f'<dl class="figures">{items}</dl>'


def _by_epoch(run: RunResult, times: bool) -> str:
    names = ("full precision", "low precision")
    lines = [
        Line(name, [(row.epoch, 100 * getattr(row, field)) for row in run.epochs])
        for name, field in zip(names, ("accuracy", "accuracy_low"), strict=True)
    ]
    accuracy = line_chart(f"Accuracy by epoch of {run.key}", lines, "accuracy (%)")
    spent = [Line("ε", [(row.epoch, row.epsilon) for row in run.epochs])]
    epsilon = line_chart(f"ε by epoch of {run.key}", spent, f"ε at δ = {show_delta(run.delta)}", from_zero=True)
    charts = []
    if accuracy:
        signs = [(name, marker(colour)) for colour, name in enumerate(names)]
        charts.append(f"<figure>{accuracy}<figcaption>Accuracy on test data.{legend(signs)}</figcaption></figure>")
    if epsilon:
        charts.append(f"<figure>{epsilon}<figcaption>ε spent so far. {escape(_purposes(run))}</figcaption></figure>")
    accuracies = ("accuracy, full precision (%)", "accuracy, low precision (%)")
    table = Table(
        header=("epoch", *accuracies, "ε", "sites in low precision", *(["seconds"] if times else [])),
        body=tuple(
            (
                Cell(str(row.epoch)),
                Cell(show_number(100 * row.accuracy)),
                Cell(show_number(100 * row.accuracy_low)),
                Cell(show_number(row.epsilon, 3)),
                Cell(str(len(row.policy))),
                *([Cell(show_number(row.seconds, 1))] if times else []),
            )
            for row in run.epochs
        ),
        labels=1,
    )
    numbers = f"<details><summary>Numbers by epoch</summary>{html_table(table, 'Numbers by epoch')}</details>"
    return f'<div class="charts">{"".join(charts)}</div>{numbers}'


def _purposes(run: RunResult) -> str:
    if len(run.epsilons) < 2:
        return "All of it by training: no analysis was made."
    parts = ", ".join(f"{purpose} {show_number(value, 3)}" for purpose, value in run.epsilons.items())
    return f"Each purpose by itself: {parts}. They compose to {show_number(run.epsilon, 3)}, and do not add up."


def _schedule(run: RunResult) -> str:
    if not any(row.policy for row in run.epochs):
        return f"<p>Every site ran in {escape(_others(run.config))} in every epoch.</p>"
    # A schedule that draws nothing still holds probabilities, and one without measurements holds scores of zero.
    chances = run.probabilities if run.config.scheduler in ("dpquant", "pls") else {}
    scores = run.scores if "analysis" in run.epsilons else {}
    most = max((p for p in chances.values() if math.isfinite(p)), default=0.0)

    def probability(site: str) -> Cell:
        value = chances.get(site)
        share = value / most if value is not None and most > 0 and math.isfinite(value) else None
        return Cell(show_number(value, 3), share)

    rows = []
    for site in run.sites:
        low = [site in row.policy for row in run.epochs]
        strip = Cell("", html=schedule_strip(site, low))
        rows.append((Cell(site), strip, Cell(f"{sum(low)}"), probability(site), Cell(_score(scores.get(site)))))
    first, last = run.epochs[0].epoch, run.epochs[-1].epoch
    epochs = f"epochs {first} to {last}" if last > first else f"epoch {first}"
    table = Table(("site", epochs, "epochs low", "probability", "score"), tuple(rows), labels=2)
    signs = [(_others(run.config), '<path class="cell-full" d="M0 -6v12"/>')]
    recipe = run.config.numerics()
    signs.append((f"low precision ({recipe.name}: {recipe.in_words})", '<path class="cell-low" d="M0 -6v12"/>'))
    note = (
        "One cell per epoch. Probability: the chance to be drawn first, by the last scores; a dash where nothing is "
        "drawn. Score: the noised measurement of what low precision costs there, averaged over analyses; a dash where "
        "none was made."
    )
    grid = html_table(table, "Schedule: sites by epochs")
    return f'{legend(signs)}<div class="schedule">{grid}</div><p class="hint">{note}</p>'


def _others(config: RunConfig) -> str:
    """What sites ran in that were not low."""
    return "full precision" if config.high == "float32" else config.high


def _score(value: float | None) -> str:
    return show_number(value) if value is None else f"{value:.3g}".replace("-", "−")


def _time(run: RunResult) -> str:
    stages = dict(run.seconds)
    signs = [(f"{stage} {show_number(value, 1)} s", swatch(i)) for i, (stage, value) in enumerate(stages.items())]
    return f"{stacked_bar(stages, math.fsum(stages.values()))}{legend(signs)}"


def _configuration(run: RunResult) -> str:
    config = {name: value for name, value in run.config.to_json().items() if value is not None}
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    again = "repeats this run" if run.config.reproducible else "trains again with new noise, batches and rounding"
    return (
        "<details><summary>Command and configuration</summary>"
        f"<pre>{escape(command(run.config))}</pre>"
        f'<p class="hint">In another <code>--out</code> this {again}. Add <code>--data FOLDER</code> where the task '
        "reads its data from a folder.</p>"
        f"<pre>{escape(json.dumps(config, indent=1, ensure_ascii=False))}</pre>"
        f'<p class="hint">{escape(versions)}</p></details>'
    )
