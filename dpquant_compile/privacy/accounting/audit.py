"""One-run auditing: a lower bound on epsilon from what one training run reveals about its canaries.

The method is that of Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run" (NeurIPS 2023). Many
canaries go into one run, each by its own fair coin. An auditor who sees what the run releases guesses some of the
coins. Differential privacy limits how many guesses can be right, so too many right ones refute a claimed epsilon.

A bound above the accountant's epsilon proves a fault. A bound below it proves nothing: the auditor may just be weak.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpquant_compile.errors import PrivacySpecError

__all__ = ["Audit", "epsilon_lower_bound", "one_run_audit", "p_value"]

_HALVINGS = 40


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    epsilon     with probability `confidence` over the coins and the run, the algorithm is not (ε', delta)-DP for any
                ε' below this number; 0 if nothing was found
    correct     how many of the `guesses` were right, for the number of guesses that gave the best bound
    total       the number of canaries
    """

    epsilon: float
    correct: int
    guesses: int
    total: int
    delta: float
    confidence: float

    def __str__(self) -> str:
        return (
            f"epsilon >= {self.epsilon:.3f} at delta = {self.delta:g} ({self.confidence:.0%} confidence): "
            f"{self.correct} of {self.guesses} guesses about {self.total} canaries are right"
        )


def p_value(correct: int, guesses: int, total: int, epsilon: float, delta: float) -> float:
    """The largest chance of `correct` or more right guesses out of `guesses` for any (epsilon, delta)-DP algorithm.

    Theorem 5.2 of the paper. With S ~ Binomial(guesses, e^ε / (1 + e^ε)), the accuracy of randomized response, it is

        P[S ≥ v] + 2 m δ max over i of P[v > S ≥ v − i] / i,    v = correct, m = total.
    """
    if correct == 0:
        return 1.0
    log_right, log_wrong = -math.log1p(math.exp(-epsilon)), -epsilon - math.log1p(math.exp(-epsilon))
    k = torch.arange(guesses + 1, dtype=torch.float64)
    n = torch.tensor(float(guesses), dtype=torch.float64)
    choose = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    chances = torch.exp(choose + k * log_right + (n - k) * log_wrong)
    tail = float(chances[correct:].sum())
    below = chances[:correct].flip(0).cumsum(0)  # P[v > S ≥ v − i] for i = 1, 2, …, v
    steepest = float((below / torch.arange(1, correct + 1, dtype=torch.float64)).max())
    return min(1.0, tail + 2 * total * delta * steepest)


def epsilon_lower_bound(correct: int, guesses: int, total: int, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that `correct` right guesses refute at this confidence; 0 if they refute none.

    correct     right guesses of the auditor
    guesses     all guesses; the auditor may abstain on the other canaries
    total       canaries, each of which was included by a fair coin of its own
    delta       of the claim that is tested
    confidence  the chance that the result is a valid lower bound, over the coins and the run's randomness

    The unit of privacy is one canary, added or removed. Requires that the number of guesses was fixed before the
    outcome was seen (see `one_run_audit` for several), and that nothing but the run's release went into the guesses.
    """
    if not 0 <= correct <= guesses <= total:
        raise PrivacySpecError(
            f"correct={correct}, guesses={guesses}, total={total}: must be 0 <= correct <= guesses <= total"
        )
    if not 0 <= delta <= 1 or not 0 < confidence < 1:
        raise PrivacySpecError(
            f"delta={delta!r}, confidence={confidence!r}: probabilities, and confidence inside (0, 1)"
        )
    allowed = 1 - confidence

    def refuted(epsilon: float) -> bool:
        return p_value(correct, guesses, total, epsilon, delta) < allowed

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):  # ends: for a large epsilon all guesses are right with a chance near one
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    # An (ε', δ)-DP algorithm is (ε, δ)-DP for all larger ε, so refuting `low` refutes everything below it too.
    return low


def one_run_audit(
    train: Callable[[Tensor], Tensor],
    canaries: int,
    *,
    delta: float,
    guesses: Sequence[int],
    confidence: float = 0.95,
    generator: torch.Generator | None = None,
) -> Audit:
    """Audit one training run: draw the coins, train, guess, and bound epsilon from below.

    train       given a bool tensor [canaries] of which canaries to include, trains once and returns one score per
                canary: a higher score means that the canary was more likely included. It must use the coins only for
                the training set, and compute scores only from what the run releases: the final weights or, for an
                auditor who sees every step, the noisy gradients.
    guesses     numbers of guesses to try, at most `canaries` each. For a number r, the (r + 1) // 2 highest scores are
                guessed to be in and the r // 2 lowest to be out; on the rest the auditor abstains.
    confidence  of the result. With several numbers of guesses, the best bound is taken and each of them is tested
                at confidence 1 − (1 − confidence) / len(guesses): a union bound, so that picking the best is valid.

    Choose `guesses` before the run. Few guesses give a sharp bound if the release reveals only some canaries clearly
    (large noise). A large epsilon needs many: r right guesses out of r show at most about ln(r / 3).

    A canary is one unit of privacy: in or out. A run that replaces excluded canaries by something else (a sample
    without a gradient, say) tests the same sensitivity. The rest of the data is fixed, and may be anything.
    """
    if not guesses or any(not 0 < r <= canaries for r in guesses):
        raise PrivacySpecError(f"guesses={list(guesses)}: give numbers from 1 to the number of canaries, {canaries}")
    included = torch.rand(canaries, generator=generator) < 0.5
    scores = train(included.clone())
    if scores.shape != (canaries,) or bool(scores.isnan().any()):
        raise PrivacySpecError(
            f"train returned scores of shape {tuple(scores.shape)}; give one number per canary, {canaries} in all"
        )
    order = scores.argsort(descending=True)
    each = 1 - (1 - confidence) / len(guesses)
    audits = []
    for r in guesses:
        ins, outs = (r + 1) // 2, r // 2
        correct = int(included[order[:ins]].sum()) + int((~included[order[canaries - outs :]]).sum())
        audits.append(
            Audit(
                epsilon=epsilon_lower_bound(correct, r, canaries, delta, each),
                correct=correct,
                guesses=r,
                total=canaries,
                delta=delta,
                confidence=confidence,
            )
        )
    return max(audits, key=lambda audit: audit.epsilon)
