"""`Entry` and `Record`: what was spent, by which run, and how it is gathered and checked; and `Headroom`.

Opacus keeps its history in the order of spending. A run with an analysis every other epoch has dozens of short pieces,
and the PRV accountant convolves them one by one (58 pieces: 26 s). Composition does not depend on the order, so equal
mechanisms are gathered first: two pieces, about a second, and the same ε.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from dpquant_compile.errors import PrivacySpecError

__all__ = [
    "Entry",
    "Headroom",
    "History",
    "Record",
    "Target",
    "appended",
    "between",
    "check_count",
    "check_delta",
    "check_number",
    "check_target",
    "gathered",
    "total_steps",
]

MECHANISM = "subsampled_gaussian"

# (σ, q, steps) of different mechanisms: the form of `IAccountant.history`.
History = tuple[tuple[float, float, int], ...]

Target = tuple[float | None, float | None]  # (ε, δ), or None twice


@dataclass(frozen=True)
class Entry:
    """Consecutive equal spends: `steps` releases of a Poisson-subsampled Gaussian mechanism."""

    purpose: str  # "training", "analysis", or another word
    mechanism: str  # only "subsampled_gaussian" is supported
    q: float  # probability that a sample is in the batch, 0 < q <= 1
    sigma: float  # standard deviation of the noise over the true sensitivity; 0 means no privacy
    steps: int  # >= 1

    def __post_init__(self) -> None:
        purpose: Any = self.purpose
        if not (isinstance(purpose, str) and purpose):
            raise PrivacySpecError(f"purpose must be a word such as 'training' or 'analysis', not {self.purpose!r}.")
        if self.mechanism != MECHANISM:
            raise PrivacySpecError(
                f"mechanism {self.mechanism!r} cannot be accounted for: the only one known is {MECHANISM!r}. "
                "A release by another mechanism needs its own accounting beside this ledger."
            )
        q, sigma = check_number("q", self.q), check_number("sigma", self.sigma)
        if not 0 < q <= 1:
            raise PrivacySpecError(f"q must be a sampling rate above 0 and at most 1, not {self.q!r}.")
        if not 0 <= sigma < math.inf:
            raise PrivacySpecError(f"sigma must be a finite noise multiplier of at least 0, not {self.sigma!r}.")
        object.__setattr__(self, "q", q)  # plain floats: NumPy's and torch's would not survive JSON or weights_only
        object.__setattr__(self, "sigma", sigma)
        object.__setattr__(self, "steps", check_count("steps", self.steps))

    def same_spend(self, other: "Entry") -> bool:
        """Whether both consist of the same single spend, in any number."""
        return self == replace(other, steps=self.steps)


def check_number(name: str, value: Any) -> float:
    """`value` as a float, or an error that names it."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise PrivacySpecError(f"{name} must be a number, not {value!r}.") from None


def check_count(name: str, value: Any, least: int = 1) -> int:
    """`value` as an int, or an error that names it if it is not an integer or is below `least`."""
    try:
        count = operator.index(value)
    except TypeError:
        count = least - 1
    if isinstance(value, bool) or count < least:
        raise PrivacySpecError(f"{name} must be a whole number of at least {least}, not {value!r}.")
    return count


def appended(entries: tuple[Entry, ...], entry: Entry) -> tuple[Entry, ...]:
    """`entries` followed by `entry`; equal neighbours are merged."""
    if entries and entries[-1].same_spend(entry):
        return (*entries[:-1], replace(entry, steps=entries[-1].steps + entry.steps))
    return (*entries, entry)


def total_steps(entries: Iterable[Entry]) -> int:
    """How many single spends the entries stand for."""
    return sum(entry.steps for entry in entries)


def between(entries: Iterable[Entry], start: int, end: int) -> tuple[Entry, ...]:
    """The single spends start, …, end - 1, as entries."""
    found: list[Entry] = []
    at = 0
    for entry in entries:
        steps = min(at + entry.steps, end) - max(at, start)
        if steps > 0:
            found.append(replace(entry, steps=steps))
        at += entry.steps
    return tuple(found)


@dataclass(frozen=True)
class Record:
    """What was spent, and by which run: run i made the spends from its start up to the start of the next run."""

    entries: tuple[Entry, ...] = ()
    runs: tuple[tuple[int, str], ...] = ()  # (first spend, name), by first spend

    def with_spend(self, entry: Entry, run: str) -> "Record":
        going_on = bool(self.runs) and self.runs[-1][1] == run
        runs = self.runs if going_on else (*self.runs, (total_steps(self.entries), run))
        return Record(appended(self.entries, entry), runs)

    def first(self, steps: int) -> "Record":
        """The record as it was after `steps` single spends."""
        runs = tuple((start, run) for start, run in self.runs if start < steps)
        return Record(between(self.entries, 0, steps), runs)

    def begins_with(self, other: "Record") -> bool:
        """Whether the first spends are those of `other`, made by the same runs."""
        return self.first(total_steps(other.entries)) == other

    def spends_of(self, run: str) -> tuple[Entry, ...]:
        spends: tuple[Entry, ...] = ()
        bounds = [*(start for start, _ in self.runs), total_steps(self.entries)]
        for (start, name), end in zip(self.runs, bounds[1:], strict=True):
            if name == run:
                for entry in between(self.entries, start, end):
                    spends = appended(spends, entry)
        return spends

    def as_plain(self) -> dict[str, Any]:
        return {"entries": [asdict(entry) for entry in self.entries], "runs": [[s, run] for s, run in self.runs]}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Record":
        """The record that `as_plain` described; ValueError, KeyError or TypeError for anything else."""
        entries: tuple[Entry, ...] = ()
        for fields in plain["entries"]:
            entries = appended(entries, Entry(**fields))
        runs = tuple((start, run) for start, run in plain["runs"])
        starts = [start for start, _ in runs]
        named = all(type(start) is int and isinstance(run, str) for start, run in runs)
        if not named or starts != sorted(set(starts)) or bool(runs) != bool(entries):
            raise ValueError(f"runs {plain['runs']!r}")
        if runs and not starts[0] == 0 <= starts[-1] < total_steps(entries):
            raise ValueError(f"runs {plain['runs']!r} of {total_steps(entries)} spends")
        return cls(entries, runs)


def gathered(entries: Iterable[Entry]) -> History:
    """The entries as an accountant needs them: each (σ, q) once, in order of first spend."""
    counts: dict[tuple[float, float], int] = {}
    for entry in entries:
        counts[entry.sigma, entry.q] = counts.get((entry.sigma, entry.q), 0) + entry.steps
    return tuple((sigma, q, steps) for (sigma, q), steps in counts.items())


def check_delta(delta: float, name: str = "delta") -> float:
    """`delta` as a float, or an error if it is not a probability between 0 and 1."""
    number = check_number(name, delta)
    if not 0 < number < 1:
        raise PrivacySpecError(
            f"{name} must lie between 0 and 1, both excluded, not {delta!r}; less than one over the size of the "
            "dataset is usual."
        )
    return number


def check_target(epsilon: float | None, delta: float | None) -> Target:
    """A target as floats, or None twice; an error if only one is given or one is out of its domain."""
    if (epsilon is None) != (delta is None):
        raise PrivacySpecError(f"A target needs target_epsilon and target_delta, not {epsilon!r} and {delta!r}.")
    if epsilon is None or delta is None:
        return None, None
    number = check_number("target_epsilon", epsilon)
    if not 0 < number < math.inf:
        raise PrivacySpecError(f"target_epsilon must be a number above 0, not {epsilon!r}.")
    return number, check_delta(delta, "target_delta")


class Headroom:
    """How many more equal spends fit under a target.

    `fits(n)` says, slowly, whether n of them fit; once false, it must stay false as n grows. It is called for growing n
    only as far as needed, and by bisection after the first failure, so that a training loop of thousands of steps calls
    it about twenty times. The answers of `allows` are still exact.
    """

    FIRST = 64  # the first n; small, since many steps with little noise are costly to account for

    def __init__(self, fits: Callable[[int], bool]) -> None:
        self._fits = fits
        self._taken = 0
        self._most = 0  # this many fit
        self._fewest: int | None = None  # this many do not

    def allows(self, steps: int) -> bool:
        """Whether `steps` more fit after those taken."""
        wanted = self._taken + steps
        while wanted > self._most:
            if self._fewest is None:
                trial = max(wanted, 2 * self._most, self.FIRST)
            elif wanted >= self._fewest:
                return False
            else:
                trial = max(wanted, (self._most + self._fewest) // 2)
            if self._fits(trial):
                self._most = trial
            else:
                self._fewest = trial
        return True

    def take(self, steps: int) -> None:
        """Count `steps` as taken."""
        self._taken += steps
