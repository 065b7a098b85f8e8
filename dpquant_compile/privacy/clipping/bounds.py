"""Clipping: from the norms of per-sample gradients to the factor that scales each sample."""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpquant_compile.errors import PrivacySpecError

__all__ = ["CLIPPING", "Clipping", "is_number"]

CLIPPING = ("flat", "per_layer", "automatic")

# Automatic clipping (Bu et al. 2023) divides by the norm plus this, so that a vanishing gradient is not magnified.
STABILITY = 0.01


def is_number(value: object) -> bool:
    """Whether an argument is a real number; booleans are not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class Clipping:
    """How much one sample may add to the sum of gradients.

    mode    "flat": the whole gradient is scaled down to the bound. "per_layer": the gradient of each parameter is
            scaled down to its own bound. "automatic": the whole gradient is always scaled to the bound.
    bounds  one number, or for "per_layer" one per trainable parameter

    Guarantee: a sample scaled by `factors` adds at most `sensitivity` to the sum, in the norm over all parameters.
    """

    mode: str
    bounds: tuple[float, ...]

    @staticmethod
    def build(mode: str, max_grad_norm: "float | Sequence[float]", names: Sequence[str]) -> "Clipping":
        """Check the arguments of `make_private`. A single number for "per_layer" is divided evenly."""
        if mode not in CLIPPING:
            raise PrivacySpecError(f"clipping={mode!r}: choose one of {', '.join(CLIPPING)}")
        single = not isinstance(max_grad_norm, list | tuple)
        bounds: Any = [max_grad_norm] if single else max_grad_norm
        if not all(is_number(bound) for bound in bounds):
            raise PrivacySpecError(f"max_grad_norm={max_grad_norm!r}: give a number, or a list of numbers")
        given = [float(bound) for bound in bounds]
        if not given or any(not math.isfinite(c) or c <= 0 for c in given):
            raise PrivacySpecError(f"max_grad_norm={max_grad_norm!r}: bounds must be finite and greater than zero")
        if mode != "per_layer":
            if len(given) != 1:
                raise PrivacySpecError(
                    f"max_grad_norm has {len(given)} bounds, but clipping={mode!r} has one: "
                    "give a number, or clipping='per_layer'"
                )
            return Clipping(mode, (given[0],))
        if single:
            return Clipping(mode, (given[0] / math.sqrt(max(len(names), 1)),) * len(names))
        if len(given) != len(names):
            raise PrivacySpecError(
                f"max_grad_norm has {len(given)} bounds for {len(names)} trainable parameters: give one each, in the "
                "order of model.parameters(), or a single number to be shared out"
            )
        return Clipping(mode, tuple(given))

    @property
    def sensitivity(self) -> float:
        """The largest norm that one sample can add; noise is scaled by it."""
        return math.sqrt(sum(bound * bound for bound in self.bounds))

    def factors(
        self, norms: Sequence[Tensor], bounds: Tensor, live: Tensor, places: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        """The factor of each sample for each parameter, and how many samples were left out.

        `norms` are squared norms [B], one tensor per parameter. `bounds` are this step's bounds; with one bound per
        parameter, that of parameter i is at `places[i]`. `live` distinguishes samples from padding. A sample whose
        gradient is not finite gets NaN, which tells `Piece.weighted` to leave it out.
        """
        squares = torch.stack(list(norms))
        total = squares.sum(0)
        finite = total.isfinite() & (squares >= 0).all(0)  # NaN or a negative must not count as a small norm
        if self.mode == "per_layer":
            scales = [self._scale(norm, bounds[place]) for norm, place in zip(norms, places, strict=True)]
        else:
            scales = [self._scale(total, bounds[0])] * len(norms)
        zero = torch.zeros((), dtype=total.dtype, device=total.device)
        none = torch.full((), math.nan, dtype=total.dtype, device=total.device)
        factors = [torch.where(finite, torch.where(live, scale, zero), none) for scale in scales]
        return factors, (live & ~finite).sum()

    def _scale(self, squared: Tensor, bound: Tensor) -> Tensor:
        norm = squared.sqrt()
        if self.mode == "automatic":
            return bound / (norm + STABILITY)
        return (bound / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp(max=1.0)
