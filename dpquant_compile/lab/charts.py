"""Charts of a report as inline SVG. Colours are classes `s0` to `s7` of report.css, so they follow light and dark."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from dpquant_compile.lab.cells import show_number
from dpquant_compile.lab.tables import Evaluation, Panel, Row, Stat, fronts

__all__ = [
    "Line",
    "budget_chart",
    "line_chart",
    "marker",
    "schedule_strip",
    "shapes",
    "stacked_bar",
    "swatch",
    "ticks",
]

COLOURS = 8
WIDTH, HEIGHT = 460.0, 300.0
MARKS = 30  # most markers on a line
LEFT, RIGHT, TOP, BOTTOM = 50.0, 14.0, 26.0, 42.0
_SHAPES = (
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "M-4 -4h8v8h-8z",
    "M0 -5.2l5.2 9h-10.4z",
    "M0 -5.6l5.6 5.6l-5.6 5.6l-5.6 -5.6z",
)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """About `about` round numbers that span [low, high].

    >>> ticks(0.0, 4.7)
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    """
    step = 10.0 ** math.floor(math.log10((high - low) / about))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= about)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def _text(value: float) -> str:
    return f"{value:.6g}".replace("-", "−")


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


@dataclass(frozen=True)
class _Axes:
    """Maps data to a chart. `y_ticks` bound the vertical axis; `edge` is the space beside the first and last x."""

    x_low: float
    x_high: float
    y_ticks: list[float]
    edge: float = 0.0

    def x(self, value: float) -> float:
        width = WIDTH - LEFT - RIGHT - 2 * self.edge
        share = (value - self.x_low) / (self.x_high - self.x_low) if self.x_high > self.x_low else 0.5
        return LEFT + self.edge + width * share

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)

    def draw(self, x_ticks: Sequence[tuple[float, str]], x_label: str, y_label: str) -> str:
        parts = []
        for value in self.y_ticks:
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text class="tick end" x="{LEFT - 7}" y="{y + 4:.1f}">{_text(value)}</text>')
        bottom = HEIGHT - BOTTOM
        for value, text in x_ticks:
            x = self.x(value)
            parts.append(f'<path class="grid tickmark" d="M{x:.1f} {bottom}v4"/>')
            parts.append(f'<text class="tick middle" x="{x:.1f}" y="{bottom + 17}">{escape(text)}</text>')
        parts.append(f'<text class="axis" x="4" y="13">{escape(y_label)}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text class="axis middle" x="{middle:.1f}" y="{HEIGHT - 5}">{escape(x_label)}</text>')
        return "".join(parts)


def _svg(title: str, content: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img">'
        f"<title>{escape(title)}</title>{content}</svg>"
    )


def shapes() -> str:
    """The shapes that markers refer to; a page needs them once."""
    return "".join(f'<path id="sign{i}" d="{shape}"/>' for i, shape in enumerate(_SHAPES))


def marker(colour: int, x: float = 0.0, y: float = 0.0, title: str = "") -> str:
    """The marker of a series: a colour and a shape, so that it is readable without colour."""
    tip = f"<title>{escape(title)}</title>" if title else ""
    place = f'class="mark s{colour % COLOURS}" x="{x:.1f}" y="{y:.1f}"'
    return f'<use href="#sign{colour % len(_SHAPES)}" {place}>{tip}</use>'


def swatch(colour: int) -> str:
    """The marker of a part of a stacked bar."""
    return f'<rect class="fill s{colour % COLOURS}" x="-7" y="-5" width="14" height="10"/>'


@dataclass(frozen=True)
class Line:
    """A named series of numbers by epoch; None and NaN leave a gap."""

    name: str
    points: Sequence[tuple[int, float | None]]


def line_chart(title: str, lines: Sequence[Line], y_label: str, *, from_zero: bool = False) -> str:
    """Lines by epoch; "" if there is no number to draw. Line n has colour and shape n."""
    known = [[(e, v) for e, v in line.points if v is not None and math.isfinite(v)] for line in lines]
    values = [value for points in known for _, value in points]
    if not values:
        return ""
    epochs = [epoch for points in known for epoch, _ in points]
    axes = _Axes(min(epochs), max(epochs), _range(values, 0.0 if from_zero else None), edge=12)
    whole = sorted({round(t) for t in ticks(min(epochs), max(epochs) + 0.01, 8)} & set(epochs)) or sorted(set(epochs))
    parts = [axes.draw([(e, str(e)) for e in whole], "epoch", y_label)]
    for colour, (line, points) in enumerate(zip(lines, known, strict=True)):
        places = [(axes.x(epoch), axes.y(value)) for epoch, value in points]
        if len(places) > 1:
            parts.append(f'<path class="line s{colour}" d="{_path(places)}"/>')
        apart = math.ceil(len(points) / MARKS)
        for (epoch, value), (x, y) in list(zip(points, places, strict=True))[::-apart]:
            parts.append(marker(colour, x, y, f"{line.name}, epoch {epoch}: {show_number(value, 3)}"))
    return _svg(title, "".join(parts))


def _range(values: Sequence[float], low: float | None) -> list[float]:
    """Ticks around the values, from `low` if it is given; never of zero height."""
    bottom, top = min(values) if low is None else low, max(values)
    if top - bottom < 1e-9 * max(1.0, abs(top)):
        bottom, top = (bottom - 1.0, top + 1.0) if low is None else (bottom, bottom + 1.0)
    return ticks(bottom, top)


def budget_chart(
    title: str, panel: Panel, evaluation: Evaluation, colour_of: Mapping[str, int], name_of: Callable[[Row], str]
) -> str:
    """Accuracy against budget: single runs as dots, means with standard deviations, fronts, and full precision.

    Series that share a budget stand side by side. `colour_of` gives the colour of each name that `name_of` gives.
    """
    stats: list[tuple[Row, Stat]] = [(row, getattr(row, evaluation)) for row in panel.rows]
    stats = [(row, stat) for row, stat in stats if stat.values]
    full = [value for row in panel.baseline for value in getattr(row, evaluation).values]
    if not stats:
        return ""
    spans = [v for _, stat in stats for v in (*stat.values, *_bar(stat))]
    for row in panel.baseline:
        spans += _bar(getattr(row, evaluation))
    budgets = sorted({row.settings["budget"] for row, _ in stats})
    axes = _Axes(budgets[0], budgets[-1], _range([100 * v for v in (*spans, *full)], None), edge=44)
    parts = [axes.draw([(b, f"{100 * b:.4g}") for b in budgets], "budget: sites in low precision (%)", "accuracy (%)")]
    parts += [_baseline(axes, row, getattr(row, evaluation)) for row in panel.baseline]
    for name, points in fronts(panel, evaluation).items():
        places = [(axes.x(budget), axes.y(100 * value)) for budget, value in points]
        if len(places) > 1:
            tip = f"Pareto front, {name}: " + "; ".join(f"{100 * b:.4g} %: {100 * v:.2f}" for b, v in points)
            style = name.replace(" ", "-")
            parts.append(f'<path class="front {style}" d="{_path(places)}"><title>{escape(tip)}</title></path>')
    names = sorted({name_of(row) for row, _ in stats}, key=colour_of.__getitem__)
    gaps = [axes.x(b) - axes.x(a) for a, b in itertools.pairwise(budgets)]
    pitch = min([15.0, *(0.85 * gap / len(names) for gap in gaps), 80.0 / len(names)])
    for row, stat in stats:
        here = {name_of(other) for other, _ in stats if other.settings["budget"] == row.settings["budget"]}
        beside = [name for name in names if name in here]
        shift = (beside.index(name_of(row)) - (len(beside) - 1) / 2) * pitch
        parts.append(_point(axes, row, stat, name_of(row), colour_of[name_of(row)], shift, pitch))
    return _svg(title, "".join(parts))


def _bar(stat: Stat) -> tuple[float, ...]:
    if stat.mean is None:
        return ()
    return (stat.mean - stat.std, stat.mean + stat.std) if stat.std is not None else (stat.mean,)


def _baseline(axes: _Axes, row: Row, stat: Stat) -> str:
    if stat.mean is None:
        return ""
    parts = []
    if stat.std is not None:
        top, bottom = axes.y(100 * (stat.mean + stat.std)), axes.y(100 * (stat.mean - stat.std))
        box = f'x="{LEFT}" y="{top:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{max(bottom - top, 0.5):.1f}"'
        parts.append(f'<rect class="full-band" {box}/>')
    tip = f"full precision, {row.n} {'run' if row.n == 1 else 'runs'}: {100 * stat.mean:.2f}"
    line = f"M{LEFT} {axes.y(100 * stat.mean):.1f}H{WIDTH - RIGHT}"
    parts.append(f'<path class="full-line" d="{line}"><title>{escape(tip)}</title></path>')
    return "".join(parts)


def _point(axes: _Axes, row: Row, stat: Stat, name: str, colour: int, shift: float, pitch: float) -> str:
    x, mean = axes.x(row.settings["budget"]) + shift, stat.mean or 0.0
    style = f"s{colour % COLOURS}"
    parts = []
    if stat.n > 1:
        dots = f'class="dot {style}" cx="{x + min(5.5, pitch / 2):.1f}" r="2.2"'
        parts = [f'<circle {dots} cy="{axes.y(100 * value):.1f}"/>' for value in stat.values]
    if stat.std is not None:
        top, bottom = axes.y(100 * (mean + stat.std)), axes.y(100 * (mean - stat.std))
        whisker = f"M{x:.1f} {top:.1f}V{bottom:.1f}M{x - 3:.1f} {top:.1f}h6M{x - 3:.1f} {bottom:.1f}h6"
        parts.append(f'<path class="whisker {style}" d="{whisker}"/>')
    spread = f" ± {100 * stat.std:.2f}" if stat.std is not None else ""
    tip = f"{name}, budget {100 * row.settings['budget']:.4g} %: {100 * mean:.2f}{spread}, {stat.n} runs"
    return "".join(parts) + marker(colour, x, axes.y(100 * mean), tip)


def schedule_strip(site: str, low: Sequence[bool]) -> str:
    """One row of a heat map: a cell per epoch, filled where the site was in low precision."""

    def cells(wanted: bool) -> str:
        return "".join(f"M{i}.5 0v1" for i, value in enumerate(low) if value is wanted)

    epochs = [str(i + 1) for i, value in enumerate(low) if value]
    tip = f"{site}: low precision in {'epochs ' + ', '.join(epochs) if epochs else 'no epoch'}"
    return (
        f'<svg class="strip" viewBox="0 0 {max(len(low), 1)} 1" preserveAspectRatio="none" role="img">'
        f"<title>{escape(tip)}</title>"
        f'<path class="cell-full" d="{cells(False)}"/><path class="cell-low" d="{cells(True)}"/></svg>'
    )


def stacked_bar(parts: Mapping[str, float], longest: float) -> str:
    """Parts of a whole side by side, in the colours 0, 1, … of `swatch`; a bar of `longest` fills the width."""
    total = math.fsum(parts.values())
    pieces, x = [], 0.0
    for colour, value in enumerate(parts.values()):
        width = 100 * value / longest if longest > 0 else 0.0
        pieces.append(f'<rect class="fill s{colour % COLOURS}" x="{x:.2f}" width="{width:.2f}" height="1"/>')
        x += width
    tip = ", ".join(f"{name} {value:.1f} s" for name, value in parts.items()) + f"; {total:.1f} s in all"
    return (
        f'<svg class="stack" viewBox="0 0 100 1" preserveAspectRatio="none" role="img">'
        f"<title>{escape(tip)}</title>{''.join(pieces)}</svg>"
    )
