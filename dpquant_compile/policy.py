"""`Policy`: which sites run in low precision now, and how large a budget of them is."""

import math
import numbers
import random
from collections.abc import Iterable, Sequence
from typing import Any

from dpquant_compile.errors import BudgetError, SiteError, listing

__all__ = ["Policy", "draw_policy", "resolve_budget", "resolve_policy"]


class Policy(frozenset[str]):
    """A frozen set of site names, together with all the names it was chosen from.

    `str(policy)` is short and stable ("none", "all", "3of5:16"): the hexadecimal digits are a bit mask over
    `universe`, lowest bit first, so it serves as test id, cache key and log line.
    """

    __slots__ = ("_universe",)
    _universe: tuple[str, ...]

    def __new__(cls, names: Iterable[str], universe: Sequence[str]) -> "Policy":
        self = super().__new__(cls, names)
        object.__setattr__(self, "_universe", tuple(universe))
        unknown = sorted(str(name) for name in self.difference(self.universe))
        if unknown:
            raise SiteError(
                f"no such site: {listing(unknown)}. The model has {len(self.universe)} sites: "
                f"{listing(self.universe)}. Use names from model.sites."
            )
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (Policy, (tuple(sorted(self)), self.universe))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Policy is frozen; make a new one")

    @property
    def universe(self) -> tuple[str, ...]:
        """All site names it was chosen from."""
        return self._universe

    @property
    def mask(self) -> tuple[bool, ...]:
        """One flag per site of `universe`, in its order."""
        return tuple(name in self for name in self.universe)

    def __str__(self) -> str:
        if not self:
            return "none"
        if len(self) == len(self.universe):
            return "all"
        bits = sum(1 << i for i, on in enumerate(self.mask) if on)
        return f"{len(self)}of{len(self.universe)}:{bits:x}"

    def __repr__(self) -> str:
        return f"Policy({self!s}: {listing([n for n in self.universe if n in self], 8)})"


def resolve_policy(policy: "str | Iterable[str]", universe: Sequence[str]) -> Policy:
    """A `Policy` from "all", "none", one site's name, or an iterable of names."""
    if isinstance(policy, str):
        if policy == "all":
            return Policy(universe, universe)
        if policy == "none":
            return Policy((), universe)
        return Policy((policy,), universe)
    if not isinstance(policy, Iterable):
        raise SiteError(f"policy={policy!r} is a {type(policy).__name__}; give site names, 'all' or 'none'")
    names = list(policy)
    if not all(isinstance(name, str) for name in names):
        raise SiteError(f"policy={names!r}: give site names as strings, 'all' or 'none'")
    return Policy(names, universe)


def resolve_budget(budget: float, universe: Sequence[str], *, provisional: bool = False, reasons: str = "") -> int:
    """The number k of sites that `budget` stands for: an int is k itself, a float a fraction of n.

    While the sites are `provisional`, known from the modules alone, a k that is too large waits for the rest.
    `reasons` says why layers are no sites, for the message.

    >>> resolve_budget(0.75, ["a", "b", "c", "d"])
    3
    """
    n = len(universe)
    have = f"The model has n = {n} sites: {listing(universe)}." if n else "The model has n = 0 sites."
    if isinstance(budget, bool) or not isinstance(budget, numbers.Real):
        raise BudgetError(
            f"budget={budget!r} is a {type(budget).__name__}; give an int from 0 to n or a fraction. {have}"
        )
    if n == 0 and budget != 0 and not provisional:
        raise BudgetError(
            f"budget={budget!r}: there is nothing to quantize. {have} A site is a conv or a linear that `sites=` "
            f"selects.{reasons}"
        )
    if isinstance(budget, numbers.Integral):
        if int(budget) < 0 or (int(budget) > n and not provisional):
            raise BudgetError(f"budget={budget!r} is not between 0 and {n}. {have}{reasons}")
        return min(int(budget), n)
    if not 0.0 <= float(budget) <= 1.0 or math.isnan(budget):
        raise BudgetError(
            f"budget={budget!r}: a float is a fraction from 0.0 to 1.0 of the sites; for a count give an int. {have}"
        )
    return math.floor(float(budget) * n + 0.5)


def draw_policy(k: int, universe: Sequence[str], seed: int) -> Policy:
    """A uniform draw of k sites without replacement, the same for the same seed and names."""
    return Policy(random.Random(f"dpquant-first-policy-{seed}").sample(list(universe), k), universe)
