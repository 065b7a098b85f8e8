"""`write_report`: the results of runs as one HTML page that works without a network."""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree

from dpquant_compile.errors import LabError
from dpquant_compile.lab.cells import (
    Cell,
    Table,
    comparison_table,
    group_table,
    headline_table,
    html_table,
    markdown_table,
    show_epsilon,
    show_number,
    show_percent,
    show_settings,
)
from dpquant_compile.lab.charts import budget_chart, marker, shapes, stacked_bar, swatch
from dpquant_compile.lab.results import RunResult
from dpquant_compile.lab.run_page import legend, run_section
from dpquant_compile.lab.tables import EVALUATIONS, Panel, Row, compare, fronts, panels, series_name, summarise, varying
from dpquant_compile.privacy.accounting.statement import UNIT, claim_for
from dpquant_compile.view.template import fill_template, read_resource

__all__ = ["TIMES_WARNING", "markdown_table", "summarise", "write_report"]

_HERE = "dpquant_compile.lab"
TIMES_WARNING = (
    "Times depend on the data that was drawn and are not covered by ε: publish them only where the data is public."
)
_EVALUATED = {"accuracy": "evaluated in full precision", "accuracy_low": "evaluated in low precision"}
_FRONTS = {
    "static": "Pareto front of static subsets",
    "scheduled": "Pareto front of the schedulers",
    "best static": "Pareto front of single static runs",
}


def write_report(
    runs: Sequence[RunResult],
    path: Path,
    *,
    title: str | None = None,
    graph: str | None = None,
    opening: str = "",
    times: bool = False,
) -> Path:
    """Write the page to `path` and return it. `graph` is the drawing of the model, from `graph_view().to_svg()`.

    `opening` is HTML that the page begins with, above what it says about the runs. `times` shows how long runs took.
    Raises LabError without runs, or if the graph is no SVG document.

    Guarantee: without `times` the page holds settings, ε, noised scores and values derived from them, and accuracies on
    test data. Wall times depend on the batches that were drawn, and ε does not cover them.
    """
    rows = summarise(runs)
    ordered = [run for row in rows for run in row.runs]
    if title is None:
        title = ordered[0].config.task if len(ordered) == 1 else f"{len(ordered)} runs"
    body = run_section(ordered[0], level=2, times=times) if len(ordered) == 1 else _many(rows, ordered, times)
    parts = {
        "title": escape(title),
        "opening": f'<section id="opening">{opening}</section>' if opening else "",
        "lead": _lead(rows, ordered, times),
        "shapes": shapes(),
        "body": body + ("" if graph is None else _graph(graph)),
        "css": read_resource(_HERE, "report.css"),
        "script": read_resource(_HERE, "report.js"),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(fill_template(_HERE, "report.html", parts), encoding="utf-8")
    return path


def _lead(rows: Sequence[Row], runs: Sequence[RunResult], times: bool) -> str:
    private = any(run.epsilon is not None for run in runs)
    said = (" ".join(claim_for(UNIT)) if private else "", _randomness(runs), TIMES_WARNING if times and private else "")
    claim = "".join(f"<p>{text}</p>" for text in said if text)
    if len(runs) == 1:
        return f"<p>One training run.</p>{claim}"
    text = (
        f"{len(runs)} training runs in {len(rows)} groups. Runs of a group differ in the seed alone, static subsets "
        "also in which subset it is. Numbers are mean ± sample standard deviation; a group of one run has no ±."
    )
    words = (
        "A site is a convolution or a linear layer. The budget is the share of sites in low precision in an epoch; at "
        "0 % all of training is in float32, or in what the setting high says. Both accuracies are of the same trained "
        "model: evaluated with all sites in float32, and with the last epoch's sites in low precision."
    )
    tasks = sorted({run.config.task for run in runs})
    choose = ""
    if len(tasks) > 1:
        options = "".join(f"<option>{escape(name)}</option>" for name in tasks)
        choose = (
            '<p class="choose"><label for="task">Show</label> <select id="task">'
            f'<option value="">all tasks</option>{options}</select></p>'
        )
    return f"<p>{text}</p><p>{words}</p>{claim}{choose}"


def _randomness(runs: Sequence[RunResult]) -> str:
    """The source of randomness of private runs, on which their ε depends; empty if no run is private."""
    private = [run for run in runs if run.epsilon is not None]
    known = [run for run in private if run.config.reproducible]
    system = "noise, batches and rounding came from the operating system's entropy"
    seeds = (
        "noise, batches and rounding follow from the seeds, which this page shows. ε holds only as long as nobody "
        "knows the seeds, so publish this page only where the data is public."
    )
    if not private:
        return ""
    if not known:
        return f"{system[0].upper()}{system[1:]}."
    if len(known) == len(private):
        return f"These runs are reproducible: {seeds}" if len(runs) > 1 else f"This run is reproducible: {seeds}"
    return (
        f"{len(known)} of {len(private)} private runs are reproducible, as the column of that name says. In those "
        f"{seeds} In the others {system}."
    )


def _many(rows: Sequence[Row], runs: Sequence[RunResult], times: bool) -> str:
    caption = "Accuracy, ε and time by group" if times else "Accuracy and ε by group"
    table = html_table(headline_table(rows, times=times), caption, name="headline")
    sections = [("results", "Results", table)]
    if charts := _panels(rows):
        sections.append(("budget", "Accuracy against budget", charts))
    if found := compare(rows):
        text = (
            '<p class="hint">Percentage points above static subsets of the same setting and budget. In brackets, the '
            "difference of means in standard deviations of the static runs. Paired: the mean over seeds that both have "
            "(each less the mean of its seed's static runs) ± its standard error.</p>"
        )
        table = html_table(comparison_table(found), "Against static subsets", name="comparison")
        sections.append(("static", "Against static subsets", text + table))
    if private := [row for row in rows if row.epsilon.values]:
        sections.append(("privacy", "ε by purpose", _privacy(private)))
    if times:
        sections.append(("time", "Time", _times(rows)))
    sections.append(("run-section", "One run", _choice(runs, times)))
    return "".join(f'<section id="{name}"><h2>{title}</h2>{content}</section>' for name, title, content in sections)


def _panels(rows: Sequence[Row]) -> str:
    """Two charts for each setting that has more than one point to compare."""
    drawn = [panel for panel in panels(rows) if len(panel.rows) > 1]
    names = dict.fromkeys(series_name(row, rows) for panel in drawn for row in panel.rows)
    colours = {name: i for i, name in enumerate(names)}
    shown = [f for f in varying(rows) if f in (drawn[0].settings if drawn else {})]
    return "".join(_panel(panel, rows, colours, ["task", *(f for f in shown if f != "task")]) for panel in drawn)


def _panel(panel: Panel, rows: Sequence[Row], colours: Mapping[str, int], fields: Sequence[str]) -> str:
    setting = show_settings(panel.settings, fields)
    figures = []
    for evaluation in EVALUATIONS:
        title = f"Accuracy against budget, {_EVALUATED[evaluation]}: {setting}"
        chart = budget_chart(title, panel, evaluation, colours, lambda row: series_name(row, rows))
        text = _EVALUATED[evaluation]
        figures.append(f"<figure>{chart}<figcaption>{text[0].upper()}{text[1:]}.</figcaption></figure>")
    own = sorted({series_name(row, rows) for row in panel.rows}, key=colours.__getitem__)
    signs = [(name, marker(colours[name])) for name in own]
    if panel.baseline:
        signs.append(("full precision", '<path class="full-line" d="M-10 0h20"/>'))
    lines = [name for name in _FRONTS if any(len(fronts(panel, e).get(name, ())) > 1 for e in EVALUATIONS)]
    signs += [(_FRONTS[name], f'<path class="front {name.replace(" ", "-")}" d="M-10 0h20"/>') for name in lines]
    numbers = html_table(_panel_table(panel, rows), f"Accuracy against budget: {setting}")
    return (
        f'<div class="panel" data-task="{escape(panel.settings["task"])}"><h3>{escape(setting)}</h3>'
        f'<div class="charts">{"".join(figures)}</div>{legend(signs)}'
        f"<details><summary>Numbers</summary>{numbers}</details></div>"
    )


def _panel_table(panel: Panel, rows: Sequence[Row]) -> Table:
    def on_front(row: Row) -> str:
        found = []
        for evaluation, text in zip(EVALUATIONS, ("full", "low"), strict=True):
            point = (row.settings["budget"], getattr(row, evaluation).mean)
            lines = fronts(panel, evaluation)
            found += [f"{name} ({text})" for name in ("static", "scheduled") if point in lines.get(name, ())]
        return ", ".join(found) or "–"

    body = [
        (
            Cell(series_name(row, rows)),
            Cell(f"{100 * row.settings['budget']:.4g} %"),
            Cell(str(row.n)),
            Cell(show_percent(row.accuracy, of=row.n)),
            Cell(show_percent(row.accuracy_low, of=row.n)),
            Cell(on_front(row)),
        )
        for row in (*panel.baseline, *panel.rows)
    ]
    header = ("series", "budget", "runs", "accuracy, full precision (%)", "accuracy, low precision (%)", "on the front")
    return Table(header, tuple(body), labels=2)


def _privacy(rows: Sequence[Row]) -> str:
    seen = dict.fromkeys(purpose for row in rows for run in row.runs for purpose in run.epsilons)
    purposes = sorted(seen, key=lambda purpose: (purpose != "training", purpose))
    finite = [v for row in rows for v in row.epsilon.values if math.isfinite(v)]
    most = max(finite, default=0.0)

    def cell(row: Row, purpose: str | None) -> Cell:
        stat = row.epsilon if purpose is None else row.epsilon_of(purpose)
        share = stat.mean / most if stat.mean is not None and most > 0 and math.isfinite(stat.mean) else None
        return Cell(show_epsilon(stat), share)

    def column(purpose: str | None) -> Callable[[int], Cell]:
        return lambda i: cell(rows[i], purpose)

    table = group_table(rows, {**{purpose: column(purpose) for purpose in purposes}, "in all": column(None)})
    text = (
        '<p class="hint">Each purpose by itself; they compose to what a run costs in all, and do not add up. ε is that '
        "of one run: whoever sees several runs on the same data learns more than one ε says.</p>"
    )
    return text + html_table(table, "ε by purpose", name="purposes")


def _times(rows: Sequence[Row]) -> str:
    stages = list(dict.fromkeys(stage for row in rows for run in row.runs for stage in run.seconds))
    longest = max((row.seconds.mean or 0.0 for row in rows), default=0.0)

    def split(row: Row) -> Cell:
        return Cell("", html=stacked_bar({stage: row.seconds_of(stage).mean or 0.0 for stage in stages}, longest))

    def column(stage: str) -> Callable[[int], Cell]:
        return lambda i: Cell(show_number(rows[i].seconds_of(stage).mean, 1))

    columns = {stage: column(stage) for stage in stages}
    columns["in all"] = lambda i: Cell(show_number(rows[i].seconds.mean, 1))
    table = group_table(rows, {**columns, "share": lambda i: split(rows[i])})
    signs = [(stage, swatch(i)) for i, stage in enumerate(stages)]
    return (
        '<p class="hint">Mean seconds of a run. Compare runs of one machine that was doing nothing else.</p>'
        f"{legend(signs)}{html_table(table, 'Seconds by stage', name='seconds')}"
    )


def _choice(runs: Sequence[RunResult], times: bool) -> str:
    """A select box over all runs, the chosen one, and all in templates, which cost nothing until they are shown."""
    first = next((run for run in runs if run.config.scheduler == "dpquant" and 0 < run.config.budget < 1), runs[0])
    groups: dict[str, list[str]] = {}
    for run in runs:
        chosen = " selected" if run is first else ""
        option = f'<option value="{escape(run.key)}"{chosen}>{escape(run.key)}</option>'
        groups.setdefault(run.config.task, []).append(option)
    options = "".join(f'<optgroup label="{escape(task)}">{"".join(o)}</optgroup>' for task, o in groups.items())
    sections = {run.key: run_section(run, times=times) for run in runs}
    templates = "".join(f'<template data-run="{escape(key)}">{section}</template>' for key, section in sections.items())
    table = html_table(_run_table(runs, times), "All runs", name="runs")
    return (
        f'<p class="choose"><label for="run">Run</label> <select id="run">{options}</select></p>'
        f'<div id="shown" aria-live="polite">{sections[first.key]}</div>{templates}'
        f"<details><summary>All runs</summary>{table}</details>"
    )


def _run_table(runs: Sequence[RunResult], times: bool) -> Table:
    body = [
        (
            Cell("", html=f'<a href="#run={quote(run.key, safe="")}">{escape(run.key)}</a>'),
            Cell(str(run.config.seed)),
            Cell(show_number(100 * run.accuracy)),
            Cell(show_number(100 * run.accuracy_low)),
            Cell(show_number(run.epsilon, 3)),
            *([Cell(show_number(math.fsum(run.seconds.values()), 1))] if times else []),
        )
        for run in runs
    ]
    header = ("run", "seed", "accuracy, full precision (%)", "accuracy, low precision (%)", "ε")
    tasks = tuple(run.config.task for run in runs)
    return Table((*header, "seconds") if times else header, tuple(body), labels=1, tasks=tasks)


def _graph(graph: str) -> str:
    """The drawing as an image: its style cannot affect the page, and a script in it cannot run."""
    try:
        root = ElementTree.fromstring(graph)
    except ElementTree.ParseError as error:
        raise LabError(f"graph: not an SVG document ({error}). Fix: give what graph_view().to_svg() returns") from error
    if root.tag.rpartition("}")[2] != "svg":
        raise LabError(f"graph: a document of <{root.tag}>, not of <svg>. Fix: give what graph_view().to_svg() returns")
    label = root.get("aria-label") or "Graph of the model"
    data = base64.b64encode(graph.encode()).decode()
    return (
        '<section id="graph"><h2>Graph</h2><div class="scroll graph" tabindex="0" role="region" aria-label="Graph">'
        f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(label)}"></div></section>'
    )
