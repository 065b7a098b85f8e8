"""Summaries of runs: means over seeds, differences from static subsets, Pareto fronts.

Every number of a report comes from here, so that the page, the documents and the tests read the same ones.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dpquant_compile.errors import LabError
from dpquant_compile.lab.results import RunResult

__all__ = [
    "ANALYSIS",
    "EVALUATIONS",
    "NOT_USED",
    "Comparison",
    "Difference",
    "Evaluation",
    "Panel",
    "Row",
    "Stat",
    "compare",
    "fronts",
    "non_dominated",
    "panels",
    "series_name",
    "show_value",
    "summarise",
    "varying",
]

Evaluation = Literal["accuracy", "accuracy_low"]
EVALUATIONS: tuple[Evaluation, ...] = ("accuracy", "accuracy_low")

# Fields that distinguish repetitions of one experiment (seed, random subset), and the location of its data.
_REPEATED = frozenset({"seed", "static_seed", "data"})
# Fields that only a schedule with analyses reads.
ANALYSIS = (
    "estimator", "beta", "ema", "normalise", "n_interval", "n_sample", "sigma_measure", "clip_measure", "repetitions",
)  # fmt: skip
# Fields that never depend on the task.
_NO_TASK_SETS = ("task", "reproducible")
# The value of a field that a run does not read.
NOT_USED = "–"

_SCHEDULERS = ("static", "pls", "greedy", "dpquant")  # in the order of how much a schedule knows
_FIRST = ("task", "privacy", "recipe", "format", "high", "optimizer")
_LAST = ("budget", "scheduler", *ANALYSIS)


@dataclass(frozen=True)
class Stat:
    """Mean and sample standard deviation of the numbers among `values`; None and NaN are left out.

    `mean` is None without a number, `std` None with fewer than two.
    """

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Stat":
        """From values that may be missing."""
        return cls(tuple(float(v) for v in values if v is not None and not math.isnan(v)))

    @property
    def n(self) -> int:
        """How many numbers there are."""
        return len(self.values)

    @property
    def mean(self) -> float | None:
        """The mean."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """The sample standard deviation, by n − 1."""
        return statistics.stdev(self.values) if self.n > 1 else None

    @property
    def error(self) -> float | None:
        """The standard error of the mean."""
        return None if self.std is None else self.std / math.sqrt(self.n)


@dataclass(frozen=True)
class Row:
    """Runs that differ only in the seed and, for static subsets, in the subset.

    `settings` holds the fields of their configuration, with `NOT_USED` for those that such a run does not read.
    """

    settings: Mapping[str, Any]
    runs: tuple[RunResult, ...]

    @property
    def n(self) -> int:
        """The number of runs."""
        return len(self.runs)

    @property
    def seeds(self) -> int:
        """The number of different seeds; fewer than runs where several subsets share one."""
        return len({run.config.seed for run in self.runs})

    @property
    def accuracy(self) -> Stat:
        """On the test set, in full precision."""
        return Stat.of(run.accuracy for run in self.runs)

    @property
    def accuracy_low(self) -> Stat:
        """On the test set, with the last epoch's sites in low precision."""
        return Stat.of(run.accuracy_low for run in self.runs)

    @property
    def epsilon(self) -> Stat:
        """The total ε; without values if the runs are not private."""
        return Stat.of(run.epsilon for run in self.runs)

    def epsilon_of(self, purpose: str) -> Stat:
        """The ε of one purpose on its own. Those of several purposes do not add up."""
        return Stat.of(run.epsilons.get(purpose) for run in self.runs)

    @property
    def seconds(self) -> Stat:
        """Of whole runs."""
        return Stat.of(math.fsum(run.seconds.values()) for run in self.runs)

    def seconds_of(self, stage: str) -> Stat:
        """Of one stage: training, analysis, evaluation, compiling."""
        return Stat.of(run.seconds.get(stage) for run in self.runs)


def summarise(runs: Sequence[RunResult]) -> list[Row]:
    """The runs in groups whose configurations differ only in the seed, in a stable order.

    A run counts once, however often it is given. So do runs that differ only in fields that they do not read, such as
    two of one seed in full precision with different formats: the first by name counts. Two results of one run that
    differ raise LabError, since one of them must be wrong or out of date.
    """
    if not runs:
        raise LabError("there is no finished run to report. Fix: give folders that hold a result.json, or ones above")
    named: dict[str, RunResult] = {}
    for run in runs:
        known = named.setdefault(run.key, run)
        if repr((known.accuracy, known.accuracy_low)) != repr((run.accuracy, run.accuracy_low)):  # NaN equals NaN here
            raise LabError(
                f"{run.key}: two results of one run differ (accuracy {known.accuracy} and {run.accuracy}). "
                "Fix: report on one of the two folders"
            )
    groups: dict[tuple[tuple[str, Any], ...], dict[tuple[int, int], RunResult]] = {}
    for run in sorted(named.values(), key=lambda run: run.key):
        settings, seed, subset = _settings(run), run.config.seed, run.config.static_seed
        drawn = seed if subset is None or settings["scheduler"] == NOT_USED else subset
        groups.setdefault(tuple(settings.items()), {}).setdefault((seed, drawn), run)
    rows = [Row(dict(key), tuple(group[place] for place in sorted(group))) for key, group in groups.items()]
    return sorted(rows, key=_order)


def varying(rows: Sequence[Row]) -> list[str]:
    """The fields in which the rows differ, in the order to show them.

    A row that does not read a field does not differ in it; a field that differs only between tasks is left out.
    """
    fields = [*_FIRST, *(f for f in rows[0].settings if f not in _FIRST + _LAST), *_LAST] if rows else []
    seen: dict[str, dict[str, set[Any]]] = {field: {} for field in fields}
    for row in rows:
        for field in fields:
            of = "" if field in _NO_TASK_SETS else row.settings["task"]
            seen[field].setdefault(of, set()).add(row.settings[field])
    return [field for field, found in seen.items() if any(len(values - {NOT_USED}) > 1 for values in found.values())]


def _settings(run: RunResult) -> dict[str, Any]:
    values = {name: value for name, value in run.config.to_json().items() if name not in _REPEATED}
    if values["privacy"] != "dp":
        values |= dict.fromkeys(("noise_multiplier", "target_epsilon", "delta"), NOT_USED)
    if values["privacy"] == "none":
        values["max_grad_norm"] = NOT_USED
    if not 0 < values["budget"] < 1:
        values["scheduler"] = NOT_USED  # there is nothing to choose
    if values["budget"] == 0:
        values |= dict.fromkeys(("recipe", "format", "quantize_outputs"), NOT_USED)
    elif values["format"] is None:
        values["format"] = NOT_USED
    else:
        values["recipe"] = NOT_USED  # one format for all operands
    if values["high"] == "float32" or values["budget"] == 1:
        values["high"] = NOT_USED  # full precision, or no site that is not low
    if values["scheduler"] not in ("dpquant", "greedy"):
        values |= dict.fromkeys(ANALYSIS, NOT_USED)
    return values


def _order(row: Row) -> list[tuple[float, str]]:
    def place(field: str, value: Any) -> tuple[float, str]:
        if field == "scheduler":
            return (float(_SCHEDULERS.index(value)) if value in _SCHEDULERS else -1.0, "")
        if isinstance(value, int | float):
            return (float(value), "")
        return (-math.inf, "" if value in (None, NOT_USED) else str(value))

    others = [field for field in row.settings if field not in _FIRST + _LAST]
    return [place(field, row.settings[field]) for field in (*_FIRST, *others, *_LAST)]


def series_name(row: Row, rows: Sequence[Row]) -> str:
    """A name that distinguishes a row's schedule in `rows`: "dpquant, paper", or "dpquant, per_sample, beta 4"."""
    scheduler, budget = row.settings["scheduler"], row.settings["budget"]
    if scheduler == NOT_USED:
        return "all sites" if budget else "full precision" if _is_full(row) else f"all sites in {row.settings['high']}"
    fields = [f for f in varying(rows) if f in ANALYSIS and f != "estimator" and row.settings[f] != NOT_USED]
    estimator = [row.settings["estimator"]] if row.settings["estimator"] != NOT_USED else []
    return ", ".join([scheduler, *estimator, *(f"{f} {show_value(row.settings[f])}" for f in fields)])


def _is_full(row: Row) -> bool:
    return bool(row.settings["budget"] == 0 and row.settings["high"] == NOT_USED)


def show_value(value: Any) -> str:
    """The value of a setting as text; None means the default of the task or the scheduler."""
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _context(row: Row) -> dict[str, Any]:
    """All settings that are equal in a comparison of schedules: every one except those of the schedule."""
    return {k: v for k, v in row.settings.items() if k not in ("scheduler", *ANALYSIS)}


@dataclass(frozen=True)
class Difference:
    """How far one group's accuracy lies above that of static subsets, as a fraction of all test samples.

    `mean` is the difference of the means, `stds` the same in standard deviations of the static runs. `paired` holds
    the difference for each seed that both have (from the mean of the static runs of that seed).
    """

    mean: float | None
    stds: float | None
    paired: Stat


@dataclass(frozen=True)
class Comparison:
    """One scheduled group against the static subsets of the same setting and budget."""

    row: Row
    static: Row
    accuracy: Difference
    accuracy_low: Difference


def compare(rows: Sequence[Row]) -> list[Comparison]:
    """Each scheduled row for which there are static runs that differ only in the schedule."""
    static = {tuple(_context(row).items()): row for row in rows if row.settings["scheduler"] == "static"}
    found = []
    for row in rows:
        other = static.get(tuple(_context(row).items()))
        if other is not None and row.settings["scheduler"] not in ("static", NOT_USED):
            found.append(Comparison(row, other, *(_difference(row, other, evaluation) for evaluation in EVALUATIONS)))
    return found


def _difference(row: Row, static: Row, evaluation: Evaluation) -> Difference:
    ours: Stat = getattr(row, evaluation)
    theirs: Stat = getattr(static, evaluation)
    mean = None if ours.mean is None or theirs.mean is None else ours.mean - theirs.mean
    stds = mean / theirs.std if mean is not None and theirs.std else None
    a, b = _by_seed(row, evaluation), _by_seed(static, evaluation)
    return Difference(mean, stds, Stat(tuple(a[seed] - b[seed] for seed in sorted(a.keys() & b.keys()))))


def _by_seed(row: Row, evaluation: Evaluation) -> dict[int, float]:
    values: dict[int, list[float | None]] = {}
    for run in row.runs:
        values.setdefault(run.config.seed, []).append(getattr(run, evaluation))
    means = {seed: Stat.of(found).mean for seed, found in values.items()}
    return {seed: mean for seed, mean in means.items() if mean is not None}


@dataclass(frozen=True)
class Panel:
    """Rows that differ only in budget and schedule: one chart of accuracy against budget.

    `baseline` are the rows in full precision of the same setting.
    """

    settings: Mapping[str, Any]
    rows: tuple[Row, ...]
    baseline: tuple[Row, ...]


def panels(rows: Sequence[Row]) -> list[Panel]:
    """One panel for each setting that has runs with some sites in low precision."""

    def shared(row: Row, *without: str) -> tuple[tuple[str, Any], ...]:
        return tuple((k, v) for k, v in _context(row).items() if k not in ("budget", *without))

    found: dict[tuple[tuple[str, Any], ...], list[Row]] = {}
    for row in rows:
        if row.settings["budget"] > 0:
            found.setdefault(shared(row), []).append(row)
    unformatted = ("recipe", "format", "high", "quantize_outputs")
    full = [row for row in rows if _is_full(row)]
    return [
        Panel(
            dict(key),
            tuple(group),
            tuple(row for row in full if shared(row, *unformatted) == shared(group[0], *unformatted)),
        )
        for key, group in found.items()
    ]


def non_dominated(points: Sequence[tuple[float, float]]) -> list[int]:
    """The indices of the points that no other point equals or exceeds in both coordinates, by the first coordinate.

    >>> non_dominated([(0.5, 0.9), (0.75, 0.8), (0.75, 0.7), (0.9, 0.8)])
    [0, 3]
    """
    best, kept = -math.inf, []
    for index in sorted(range(len(points)), key=lambda i: (-points[i][0], -points[i][1], i)):
        if points[index][1] > best:
            best = points[index][1]
            kept.append(index)
    return kept[::-1]


def fronts(panel: Panel, evaluation: Evaluation) -> dict[str, list[tuple[float, float]]]:
    """The empirical Pareto fronts of a panel, as points (budget, accuracy).

    "static" and "scheduled" use means over seeds; rows with all sites in low precision belong to both. "best static"
    uses single static runs, as in the paper: the best of several by test accuracy, which nobody could have chosen in
    advance.
    """
    points: dict[str, list[tuple[float, float]]] = {"static": [], "scheduled": [], "best static": []}
    for row in panel.rows:
        stat: Stat = getattr(row, evaluation)
        if stat.mean is None:
            continue
        budget, scheduler = row.settings["budget"], row.settings["scheduler"]
        if scheduler in ("static", NOT_USED):
            points["static"].append((budget, stat.mean))
            points["best static"] += [(budget, value) for value in stat.values]
        if scheduler != "static":
            points["scheduled"].append((budget, stat.mean))
    return {name: [found[i] for i in non_dominated(found)] for name, found in points.items() if found}
