"""Numbers as text, and tables of them, for the page and for Markdown."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from dpquant_compile.lab.tables import NOT_USED, Comparison, Difference, Row, Stat, show_value, varying

__all__ = [
    "Cell",
    "Table",
    "comparison_table",
    "headline_table",
    "html_table",
    "markdown_table",
    "show_delta",
    "show_epsilon",
    "show_number",
    "show_percent",
    "show_settings",
]

MISSING = "–"
# Columns that stay even where all groups agree: the table is unreadable without them.
_KEPT = ("budget", "scheduler")
_COLUMNS = ("task", "privacy", "recipe", "format", "high", "budget", "scheduler", "estimator", "optimizer")


def show_number(value: float | None, digits: int = 2, *, signed: bool = False) -> str:
    """A number with `digits` decimals, a true minus sign and ∞; a dash for None and NaN."""
    if value is None or math.isnan(value):
        return MISSING
    text = f"{value:{'+' if signed else ''}.{digits}f}"
    return text.replace("-", "−").replace("inf", "∞")


def show_percent(stat: Stat, *, of: int | None = None) -> str:
    """Mean ± standard deviation of fractions, in per cent; no ± for one run; names `of` if some runs have no number."""
    if stat.mean is None:
        return MISSING
    text = show_number(100 * stat.mean)
    if stat.std is not None:
        text += f" ± {show_number(100 * stat.std)}"
    return text if of is None or of == stat.n else f"{text} ({stat.n} of {of} runs)"


def show_epsilon(stat: Stat) -> str:
    """One ε if all runs agree to three decimals, else the range: ε is computed, and has no standard deviation."""
    if not stat.values:
        return MISSING
    low, high = show_number(min(stat.values), 3), show_number(max(stat.values), 3)
    return low if low == high else f"{low} to {high}"


def show_delta(delta: float) -> str:
    """A δ in short form: 1e-5."""
    return f"{delta:g}".replace("e-0", "e-")


def show_setting(field: str, value: Any) -> str:
    """A setting as text; the budget in per cent."""
    return f"{100 * value:.4g} %" if field == "budget" else show_value(value)


def show_settings(settings: Mapping[str, Any], fields: Sequence[str]) -> str:
    """Settings in one line: "task cnn-digits, recipe int4", without unused ones."""
    return ", ".join(f"{f} {show_setting(f, settings[f])}" for f in fields if settings[f] != NOT_USED)


@dataclass(frozen=True)
class Cell:
    """Text, and for the page: `share` of a bar behind it, and raw HTML after it."""

    text: str
    share: float | None = None
    html: str = ""


@dataclass(frozen=True)
class Table:
    """A table whose first `labels` columns are names and the others numbers; `common` holds for all rows."""

    header: tuple[str, ...]
    body: tuple[tuple[Cell, ...], ...]
    labels: int
    common: str = ""
    tasks: tuple[str, ...] = ()  # of each row, for the page's filter


def group_table(rows: Sequence[Row], columns: Mapping[str, Callable[[int], Cell]]) -> Table:
    """The settings of each row, then the columns, each by the row's index; settings that all rows share in `common`."""
    names = [*_COLUMNS, *(field for field in varying(rows) if field not in _COLUMNS)]
    # A usual column with dashes is shown too: it says which rows do not use the field.
    differing = [f for f in names if f in _KEPT or len({row.settings[f] for row in rows}) > 1]
    settings = [tuple(Cell(show_setting(f, row.settings[f])) for f in differing) for row in rows]
    return Table(
        header=(*differing, *columns),
        body=tuple((*cells, *(column(i) for column in columns.values())) for i, cells in enumerate(settings)),
        labels=len(differing),
        common=show_settings(rows[0].settings, [f for f in names if f not in differing]) if rows else "",
        tasks=tuple(row.settings["task"] for row in rows),
    )


def headline_table(rows: Sequence[Row], *, times: bool = False) -> Table:
    """Per group: runs, accuracy in both evaluations, ε in total and, with `times`, seconds."""
    deltas = {run.delta for row in rows for run in row.runs if run.epsilon is not None}
    header = f"ε (δ = {show_delta(deltas.pop())})" if len(deltas) == 1 else "ε"

    def epsilon(row: Row) -> Cell:
        text = show_epsilon(row.epsilon)
        own = sorted({run.delta for run in row.runs if run.epsilon is not None})
        return Cell(text if header != "ε" or not own else f"{text} (δ = {', '.join(map(show_delta, own))})")

    columns: dict[str, Callable[[int], Cell]] = {
        "runs": lambda i: Cell(
            str(rows[i].n) if rows[i].seeds == rows[i].n else f"{rows[i].n} ({rows[i].seeds} seeds)"
        ),
        "accuracy, full precision (%)": lambda i: Cell(show_percent(rows[i].accuracy, of=rows[i].n)),
        "accuracy, low precision (%)": lambda i: Cell(show_percent(rows[i].accuracy_low, of=rows[i].n)),
        header: lambda i: epsilon(rows[i]),
    }
    if times:
        columns["seconds"] = lambda i: Cell(show_number(rows[i].seconds.mean, 1))
    return group_table(rows, columns)


def comparison_table(found: Sequence[Comparison]) -> Table:
    """Per scheduled group: how far its accuracy lies above that of static subsets, in both evaluations."""

    def means(difference: Difference) -> Cell:
        text = _points(difference.mean)
        return Cell(text if difference.stds is None else f"{text} ({show_number(difference.stds, 1, signed=True)} std)")

    def paired(difference: Difference) -> Cell:
        stat = difference.paired
        if stat.mean is None:
            return Cell(MISSING)
        error = "" if stat.error is None else f" ± {show_number(100 * stat.error)}"
        return Cell(f"{_points(stat.mean)}{error} ({stat.n} {'pair' if stat.n == 1 else 'pairs'})")

    return group_table(
        [each.row for each in found],
        {
            "runs, static runs": lambda i: Cell(f"{found[i].row.n}, {found[i].static.n}"),
            "full precision: mean − static": lambda i: means(found[i].accuracy),
            "full precision: paired": lambda i: paired(found[i].accuracy),
            "low precision: mean − static": lambda i: means(found[i].accuracy_low),
            "low precision: paired": lambda i: paired(found[i].accuracy_low),
        },
    )


def _points(fraction: float | None) -> str:
    return show_number(None if fraction is None else 100 * fraction, signed=True)


def markdown_table(rows: Sequence[Row] | Sequence[Comparison] | Table, *, times: bool = False) -> str:
    """A Markdown table of the result of `summarise` or `compare`, below a line with the settings that all rows share.

    `times` adds the wall times of runs: see `write_report`.
    """
    if isinstance(rows, Table):
        table = rows
    elif rows and isinstance(rows[0], Comparison):
        table = comparison_table([row for row in rows if isinstance(row, Comparison)])
    else:
        table = headline_table([row for row in rows if isinstance(row, Row)], times=times)
    lines = [f"In all rows: {table.common}.", ""] if table.common else []
    lines.append(_line(table.header))
    lines.append("|" + "".join("---|" if i < table.labels else "---:|" for i in range(len(table.header))))
    return "\n".join(lines + [_line([cell.text for cell in cells]) for cells in table.body]) + "\n"


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"


def html_table(table: Table, caption: str, *, name: str = "") -> str:
    """The table in a frame that scrolls sideways, also by keyboard."""
    kinds = [""] * table.labels + [_NUMBER] * (len(table.header) - table.labels)
    names = [escape(text).replace("-", "\u2011") for text in table.header]  # no line break inside 1e-5
    header = "".join(f'<th scope="col"{kind}>{name}</th>' for kind, name in zip(kinds, names, strict=True))
    body = []
    for i, cells in enumerate(table.body):
        task = f' data-task="{escape(table.tasks[i])}"' if table.tasks else ""
        texts = "".join(_html_cell(cell, column < table.labels, column == 0) for column, cell in enumerate(cells))
        body.append(f"<tr{task}>{texts}</tr>")
    common = f'<p class="common">In all rows: {escape(table.common)}.</p>' if table.common else ""
    label = f' id="{escape(name)}"' if name else ""
    return (
        f'{common}<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table{label}><caption>{escape(caption)}</caption><thead><tr>{header}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


_NUMBER = ' class="number"'


def _html_cell(cell: Cell, label: bool, first: bool) -> str:
    bar = "" if cell.share is None else f'<span class="bar"><span style="width:{100 * cell.share:.1f}%"></span></span>'
    text = f"{escape(cell.text)}{bar}{cell.html}"
    if first:
        return f'<th scope="row">{text}</th>'
    return f"<td{'' if label else _NUMBER}>{text}</td>"
