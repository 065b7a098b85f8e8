"""`find_repeats`: stretches of a sequence that come several times in a row."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Repeat", "find_repeats"]


@dataclass(frozen=True)
class Repeat:
    """`count` equal stretches of `period` tokens, one after the other, from place `start` on."""

    start: int
    period: int
    count: int

    @property
    def edges(self) -> tuple[int, ...]:
        """Where each of them begins, and where the last one ends."""
        return tuple(self.start + self.period * number for number in range(self.count + 1))


def find_repeats(
    tokens: Sequence[Hashable], live: Sequence[int], *, at_least: int, smallest: int
) -> tuple[Repeat, ...]:
    """Stretches of at least `smallest` tokens that come at least `at_least` times in a row; none overlap.

    The run that saves most is taken first, then those before and after it. A run may be longer than its stretches; they
    are put where `live`, which has a number for the place before each token and for the end, adds up to the least over
    their edges.
    """
    known: dict[Hashable, int] = {}
    numbers = torch.tensor([known.setdefault(token, len(known)) for token in tokens], dtype=torch.int64)
    found: list[Repeat] = []
    left = [(0, len(tokens))]
    while left:
        start, end = left.pop()
        run = _longest_run(numbers[start:end], at_least, smallest)
        if run is None:
            continue
        first, period, length = run
        count = length // period
        places = range(start + first, start + first + length - count * period + 1)
        best = min((Repeat(place, period, count) for place in places), key=lambda r: sum(live[e] for e in r.edges))
        found.append(best)
        left += [(start, best.edges[0]), (best.edges[-1], end)]
    return tuple(sorted(found, key=lambda repeat: repeat.start))


def _longest_run(numbers: Tensor, at_least: int, smallest: int) -> tuple[int, int, int] | None:
    """Start, period and length of the periodic run that saves most tokens."""
    best, most = None, 0
    for period in range(smallest, len(numbers) // at_least + 1):
        differs = (numbers[period:] != numbers[:-period]).nonzero().flatten()
        edges = torch.cat([torch.tensor([-1]), differs, torch.tensor([len(numbers) - period])])
        equal = edges.diff() - 1  # how many places in a row equal the one a period later
        longest = int(equal.max())
        count = (longest + period) // period
        if count >= at_least and (count - 1) * period > most:
            most = (count - 1) * period
            best = (int(edges[equal.argmax()]) + 1, period, longest + period)
    return best
