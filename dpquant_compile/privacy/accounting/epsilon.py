"""`Entry`, and the ε of many entries: one accountant over all of them, with every failure of an accountant reported.

Opacus keeps its history in the order of spending. A run with an analysis every other epoch has dozens of short pieces,
and the PRV accountant convolves them one by one (58 pieces: 26 s). Composition does not depend on the order, so equal
mechanisms are gathered first: two pieces, about a second, and the same ε.
"""

import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from opacus.accountants import RDPAccountant, create_accountant
from opacus.accountants.analysis import gdp, rdp

from dpquant_compile.errors import PrivacySpecError

__all__ = [
    "ACCOUNTANTS",
    "Entry",
    "Headroom",
    "History",
    "Record",
    "Target",
    "appended",
    "between",
    "check_accountant",
    "check_count",
    "check_delta",
    "check_number",
    "check_target",
    "composed_epsilon",
    "gathered",
    "opacus_accountant",
    "total_steps",
]

ACCOUNTANTS = ("prv", "rdp", "gdp")
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


def check_accountant(accountant: str) -> None:
    """Raise for a name that is not an accountant's."""
    if accountant not in ACCOUNTANTS:
        raise PrivacySpecError(f"accountant must be one of {', '.join(ACCOUNTANTS)}, not {accountant!r}.")


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


def opacus_accountant(accountant: str, history: History) -> Any:
    """Opacus' accountant of that name, filled with the history."""
    if accountant == "gdp" and len(history) > 1:
        pairs = ", ".join(f"(σ={sigma:g}, q={q:g})" for sigma, q, _ in history)
        raise PrivacySpecError(
            f"The GDP accountant composes one pair of noise multiplier and sampling rate, and here are {len(history)}: "
            f"{pairs}. Fix: use accountant='prv' or accountant='rdp'."
        )
    with warnings.catch_warnings():
        # The ledger warns once, when it is made, that GDP is experimental.
        warnings.filterwarnings("ignore", message="GDP accounting is experimental")
        filled = create_accountant(accountant)
    filled.history = list(history)
    return filled


def composed_epsilon(accountant: str, history: History, delta: float) -> float:
    """ε of the whole history at `delta`, by one accountant.

    Without spends it is 0; a mechanism without noise gives infinity. Where PRV fails, RDP replaces it, with a
    RuntimeWarning: its ε is an upper bound too, but a looser one. Where RDP fails too, ε is infinity.

    Guarantee: no number of an accountant that failed is used; ε then becomes a looser bound or infinity.
    """
    if not history:
        return 0.0
    if any(sigma == 0 for sigma, _, _ in history):
        return math.inf
    if accountant == "gdp":
        return _gdp_epsilon(history, delta)
    if accountant == "prv":
        try:
            return _prv_epsilon(history, delta)
        except Exception as error:  # after any failure the accountant's numbers must not be used
            warnings.warn(
                f"Opacus' PRV accountant failed on (σ, q, steps) = {list(history)} with {type(error).__name__}: "
                f"{error}. ε is from the RDP accountant instead, which is a valid but looser bound.",
                RuntimeWarning,
                stacklevel=2,
            )
    try:
        return _rdp_epsilon(history, delta)
    except (ArithmeticError, ValueError, Warning) as error:
        warnings.warn(
            f"Opacus' RDP accountant failed on (σ, q, steps) = {list(history)} with {type(error).__name__}: {error}. "
            "No finite ε can be stated: it is taken to be infinite.",
            RuntimeWarning,
            stacklevel=2,
        )
        return math.inf


# Losses beyond this overflow exp() in double precision.
MAX_LOSS = 700.0
# Limit on the points of the grid of privacy losses: 64 MiB per array, PRV holds about ten; takes up to a minute.
MAX_GRID = 2**23
PRV_ERROR = 0.01  # on ε, and added to the estimate. Opacus' default, written out because the grid depends on it.


@functools.lru_cache(maxsize=4096)  # a second of work each; runs that differ only in their seed repeat it
def _prv_epsilon(history: History, delta: float) -> float:
    # The grid reaches as far as the RDP bound at a much smaller δ; its mesh is as in PRVAccountant._get_domain. Check
    # its size first: the accountant would exhaust the memory before it fails.
    delta_error = delta / 1000
    reach = _rdp_epsilon(history, delta_error / 4) + 3
    if not reach < MAX_LOSS:
        raise OverflowError(f"privacy losses up to {reach:.4g} do not fit double precision")
    steps = sum(count for _, _, count in history)
    points = 2 * reach / PRV_ERROR * math.sqrt(steps * math.log(12 / delta_error) / 2)
    if points > MAX_GRID:
        raise OverflowError(f"a grid of {points:.3g} privacy losses is too large")
    # At q = 1 the lowest loss is log(1 - q) = -inf, as intended; elsewhere a division by zero is a fault.
    whole = any(q == 1 for _, q, _ in history)
    epsilon = _strictly(
        lambda: opacus_accountant("prv", history).get_epsilon(delta, eps_error=PRV_ERROR, delta_error=delta_error),
        divide="ignore" if whole else "raise",
    )
    if not math.isfinite(epsilon):
        raise FloatingPointError(f"ε came out as {epsilon}")
    return max(0.0, epsilon)


def _rdp_epsilon(history: History, delta: float) -> float:
    def epsilon() -> Any:
        spent = sum(_rdp_of_one(sigma, q) * steps for sigma, q, steps in history)
        return rdp.get_privacy_spent(orders=RDPAccountant.DEFAULT_ALPHAS, rdp=spent, delta=delta)[0]

    value = _strictly(epsilon, divide="raise")
    return math.inf if math.isnan(value) else max(0.0, value)


@functools.lru_cache(maxsize=64)
def _rdp_of_one(sigma: float, q: float) -> Any:
    """RDP of one step. `RDPAccountant` computes it again for every ε, though it does not depend on the steps."""
    return rdp.compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=RDPAccountant.DEFAULT_ALPHAS)


def _gdp_epsilon(history: History, delta: float) -> float:
    accountant = opacus_accountant("gdp", history)
    ((sigma, q, steps),) = history
    try:
        mu = gdp.compute_mu_poisson(steps=steps, noise_multiplier=sigma, sample_rate=q)
        if gdp.delta_eps_mu(eps=0, mu=mu) <= delta:
            return 0.0  # Opacus searches a root above 0, finds none, and raises
        return float(_strictly(lambda: accountant.get_epsilon(delta), divide="raise"))
    except (ArithmeticError, ValueError, Warning) as error:
        raise PrivacySpecError(
            f"The GDP accountant cannot account for σ={sigma:g}, q={q:g}, {steps} steps ({type(error).__name__}: "
            f"{error}). Fix: use accountant='prv' or accountant='rdp'."
        ) from error


def _strictly(compute: Callable[[], Any], divide: Any) -> float:
    """The result of `compute`, with floating-point faults and warnings, except one, raised as errors."""
    with np.errstate(over="raise", invalid="raise", divide=divide), warnings.catch_warnings():
        warnings.simplefilter("error")
        # RDP minimises over a fixed list of orders; at its ends ε is still a valid bound, only not the tightest. This
        # is common after a few steps and cannot be avoided here; PRV uses it only for the size of its grid.
        warnings.filterwarnings("ignore", message="Optimal order is the (smallest|largest) alpha")
        return float(compute())


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
