"""`plan`: the least training noise with which training and all analyses together stay within a privacy budget."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from dpquant_compile.errors import PrivacyBudgetError, PrivacySpecError
from dpquant_compile.privacy.accounting.accountants import check_accountant, composed_epsilon
from dpquant_compile.privacy.accounting.epsilon import (
    Entry,
    check_count,
    check_delta,
    check_number,
    gathered,
)
from dpquant_compile.privacy.schedule.estimators import ESTIMATORS, default_batches

__all__ = ["Plan", "plan"]

PHYSICAL_BATCH = 128

GRID = 1000  # σ is searched in steps of 1 / GRID …
MAX_SIGMA = 1000  # … up to this: no training works with more


@dataclass(frozen=True)
class Plan:
    """The cost of a run: with `noise_multiplier`, training and analyses together have `epsilon`."""

    noise_multiplier: float
    epsilon: float  # of the whole run; at most target_epsilon if there is one
    epsilons: dict[str, float]  # of each purpose by itself
    target_epsilon: float | None  # None if the noise was given
    delta: float
    steps: int
    sample_rate: float
    analyses: int
    analysis_rate: float  # 0.0 without analyses; so is the next
    sigma_measure: float
    accountant: str

    @property
    def spends(self) -> tuple[tuple[str, int, float, float, float], ...]:
        """Purpose, steps, q, σ and own ε of training and, if there are any, of the analyses."""
        training = ("training", self.steps, self.sample_rate, self.noise_multiplier, self.epsilons["training"])
        if not self.analyses:
            return (training,)
        alone = self.epsilons["analysis"]
        return training, ("analysis", self.analyses, self.analysis_rate, self.sigma_measure, alone)

    def __str__(self) -> str:
        rows = [("", "steps", "q", "sigma", "epsilon")]
        rows += [(name, str(n), f"{q:.6f}", f"{sigma:.3f}", f"{e:.4f}") for name, n, q, sigma, e in self.spends]
        rows.append(("together", "", "", "", f"{self.epsilon:.4f}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        target = "" if self.target_epsilon is None else f"target {self.target_epsilon:g} at "
        return "\n".join([*table, f"{target}delta {self.delta:g}, {self.accountant}"])


def plan(
    *,
    target_epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float,
    dataset_size: int,
    batch_size: int,
    epochs: int,
    analyses: int | None = None,
    n_interval: int = 2,
    n_sample: float | None = None,
    max_physical_batch_size: int | None = None,
    sigma_measure: float | None = None,
    estimator: str | None = "per_sample",
    accountant: str = "prv",
) -> Plan:
    """The least noise multiplier, to three decimals, that keeps `epochs` epochs with their analyses in the budget.

    With `noise_multiplier` instead of `target_epsilon`, the cost of that noise.

    Training makes ceil(dataset_size / batch_size) steps an epoch, each at a sampling rate of one over that (Opacus'
    convention). An analysis follows every `n_interval` epochs except the last epoch; `analyses` overrides their
    number. Each draws `n_sample` physical batches of `max_physical_batch_size` in expectation. `estimator=None` or
    `analyses=0` plans training alone. Raises `PrivacyBudgetError` if no noise is enough.
    """
    check_accountant(accountant)
    delta = check_delta(delta)
    if (target_epsilon is None) == (noise_multiplier is None):
        raise PrivacySpecError("Give either target_epsilon, for the noise to keep it, or noise_multiplier, for its ε.")
    sigma = None if noise_multiplier is None else check_number("noise_multiplier", noise_multiplier)
    target = math.inf if target_epsilon is None else check_number("target_epsilon", target_epsilon)
    if target_epsilon is not None and not math.isfinite(target):
        raise PrivacySpecError(f"target_epsilon must be finite, not {target_epsilon!r}.")
    size, batch = check_count("dataset_size", dataset_size), check_count("batch_size", batch_size)
    rounds = check_count("epochs", epochs)
    loader = math.ceil(size / batch)
    count, probe = _analyses(
        estimator, size, batch, rounds, analyses, n_interval, n_sample, max_physical_batch_size, sigma_measure
    )
    measured = () if probe is None else (Entry("analysis", "subsampled_gaussian", *probe, count),)

    def training(sigma: float) -> Entry:
        return Entry("training", "subsampled_gaussian", 1 / loader, sigma, rounds * loader)

    def cost(kind: str, sigma: float) -> float:
        return composed_epsilon(kind, gathered((training(sigma), *measured)), delta)

    alone = composed_epsilon(accountant, gathered(measured), delta)
    if sigma is None and alone < target:
        sigma = _least_sigma(cost, accountant, target)
    if sigma is None:
        raise PrivacyBudgetError(_impossible(target, delta, rounds * loader, measured, alone))
    epsilons = {"training": composed_epsilon(accountant, gathered((training(sigma),)), delta)}
    if measured:
        epsilons["analysis"] = alone
    rate, noise = (0.0, 0.0) if probe is None else probe
    return Plan(
        noise_multiplier=sigma,
        epsilon=cost(accountant, sigma),
        epsilons=epsilons,
        target_epsilon=None if target_epsilon is None else target,
        delta=delta,
        steps=rounds * loader,
        sample_rate=1 / loader,
        analyses=count,
        analysis_rate=rate,
        sigma_measure=noise,
        accountant=accountant,
    )


def _analyses(
    estimator: str | None,
    size: int,
    batch: int,
    epochs: int,
    analyses: int | None,
    n_interval: int,
    n_sample: float | None,
    physical: int | None,
    sigma: float | None,
) -> tuple[int, tuple[float, float] | None]:
    """How many analyses there are, and the (q, σ) of one; None if there are none."""
    if estimator is not None and estimator not in ESTIMATORS:
        raise PrivacySpecError(f"estimator must be one of {', '.join(ESTIMATORS)} or None, not {estimator!r}.")
    interval = check_count("n_interval", n_interval)
    count = (epochs - 1) // interval if analyses is None else check_count("analyses", analyses, least=0)
    if estimator is None or not count:
        return 0, None
    cap = min(PHYSICAL_BATCH, batch) if physical is None else check_count("max_physical_batch_size", physical)
    kind = ESTIMATORS[estimator]
    drawn = default_batches(kind, cap) if n_sample is None else check_number("n_sample", n_sample)
    if not drawn > 0:
        raise PrivacySpecError(f"n_sample must be above 0, not {n_sample!r}: a probe batch needs samples.")
    noise = kind.sigma if sigma is None else check_number("sigma_measure", sigma)
    if not noise > 0:
        raise PrivacySpecError(f"sigma_measure must be above 0, not {noise!r}: without noise no target can be kept.")
    return count, (min(1.0, drawn / math.ceil(size / cap)), noise)


def _least_sigma(cost: Callable[[str, float], float], accountant: str, target: float) -> float | None:
    """The least σ of the grid, at most MAX_SIGMA, that costs no more than the target; None if there is none."""
    with warnings.catch_warnings():
        # The search tries noise so small that PRV fails. If that also holds for the σ it finds, the warning comes then.
        warnings.filterwarnings("ignore", message="Opacus' (PRV|RDP) accountant failed", category=RuntimeWarning)
        start = GRID
        if accountant == "prv":
            # PRV takes a second, RDP a twentieth of it, and their answers are close.
            start = _least_point(lambda point: cost("rdp", point / GRID), target, start) or start
        point = _least_point(lambda point: cost(accountant, point / GRID), target, start)
    return None if point is None else point / GRID


def _least_point(cost: Callable[[int], float], target: float, start: int) -> int | None:
    """The least point from 1 to MAX_SIGMA * GRID with cost(point) <= target, for a falling cost; None if there is none.

    The logarithm of the cost is nearly linear in that of the point, so a line through both ends of the interval finds
    the answer in a few steps. Every sixth step halves the interval, in case it is not.
    """
    low, high, point, turn = 0, MAX_SIGMA * GRID, start, 0
    known: dict[int, float] = {}
    while True:
        price = known[point] = cost(point)
        low, high = (low, point) if price <= target else (point, high)
        if low == high:
            return None  # even the largest point costs too much
        if high - low == 1 and high in known:
            return high
        turn += 1
        guess = math.isqrt(max(1, low) * high)
        if turn % 6 and 0 < price < math.inf:
            slope = -1.0  # a first guess until both ends are known: ε is inversely proportional to the noise
            if 0 < known.get(low, 0) < math.inf and known.get(high, 0) > 0:
                slope = math.log(known[high] / known[low]) / math.log(high / low)
            guess = math.ceil(min(point * (price / target) ** (-1 / slope), high))
        point = min(max(guess, low + 1), high - 1 if high in known else high)


def _impossible(target: float, delta: float, steps: int, measured: tuple[Entry, ...], alone: float) -> str:
    if not measured:
        reason, change = "", "Raise target_epsilon or delta, or train for fewer epochs or with smaller batches"
    else:
        (entry,) = measured
        reason = (
            f" The {entry.steps} analyses alone (q={entry.q:.6g}, sigma_measure={entry.sigma:g}) cost ε = {alone:.6g}."
        )
        change = (
            "Raise target_epsilon or sigma_measure, or make fewer analyses (a larger n_interval) or smaller ones (a "
            "smaller n_sample)"
        )
    return (
        f"No noise multiplier up to {MAX_SIGMA} keeps {steps} training steps within ε = {target:g} at δ = {delta:g}."
        f"{reason} {change}."
    )
