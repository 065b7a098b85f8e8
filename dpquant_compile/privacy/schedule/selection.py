"""Algorithm 2 of the paper: from scores to the policies of an epoch. Post-processing: it never reads data."""

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from dpquant_compile.errors import PrivacySpecError

__all__ = ["NORMALISATIONS", "draw", "lowest", "normalised", "probabilities"]

NORMALISATIONS = ("minmax", "rank")


def normalised(scores: Sequence[float], how: str = "minmax") -> list[float]:
    """Scores in [0, 1]: (v − min)/(max − min) as published, or by rank (ties share one); equal scores give zeros."""
    if how not in NORMALISATIONS:
        raise PrivacySpecError(f"normalise={how!r}: choose one of {', '.join(NORMALISATIONS)}")
    values = list(scores) if how == "minmax" else _ranks(scores)
    low, high = min(values), max(values)
    if not high > low:
        return [0.0] * len(values)
    return [(value - low) / (high - low) for value in values]


def _ranks(scores: Sequence[float]) -> list[float]:
    ordered = sorted(scores)
    return [(ordered.index(s) + len(ordered) - 1 - ordered[::-1].index(s)) / 2 for s in scores]


def probabilities(scores: Sequence[float], beta: float, how: str = "minmax") -> list[float]:
    """π = softmax(−β v) of normalised scores: the distribution of the first draw. β may be infinite."""
    if math.isinf(beta):
        least = [score == min(scores) for score in scores]
        return [float(low) / sum(least) for low in least]
    logits: Tensor = -beta * torch.tensor(normalised(scores, how), dtype=torch.float64)
    chances: list[float] = torch.softmax(logits, 0).tolist()
    return chances


def draw(chances: Sequence[float], count: int, rng: random.Random) -> list[int]:
    """Draw `count` numbers one by one without replacement, with probabilities proportional to `chances`."""
    left, chosen = list(range(len(chances))), []
    for _ in range(count):
        weights = [chances[i] for i in left]
        if not sum(weights) > 0:  # all remaining weights have underflowed
            weights = [1.0] * len(left)
        pick = rng.choices(range(len(left)), weights)[0]
        chosen.append(left.pop(pick))
    return chosen


def lowest(scores: Sequence[float], count: int, rng: random.Random) -> list[int]:
    """The indices of the `count` lowest scores, ties in random order: `draw` for β → ∞."""
    order = sorted(range(len(scores)), key=lambda i: (scores[i], rng.random()))
    return order[:count]
