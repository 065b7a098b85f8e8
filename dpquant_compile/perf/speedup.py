"""The performance model: how low precision changes the time of private training.

    T = T_analysis + (1 − p + p/s) · (T_train − T_overhead) + T_overhead

p is the share of the quantizable work in low precision; s is how many times faster low precision runs it. The overhead
is the time that low precision does not reduce; the paper counts noise, the optimizer's own work and everything else.

Every figure is of one of two kinds. *Measured* figures come from runs on the device that they name. *Projected* figures
are for an accelerator on which nobody ran, and name it wherever they are printed. The two are never added up.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args

from dpquant_compile.errors import PrivacySpecError, listing
from dpquant_compile.privacy.clipping.bounds import is_number

__all__ = ["STAGES", "Accelerator", "Speedup", "StageTimes", "TotalTimes", "estimate_speedup"]

Kind = Literal["measured", "projected"]

# The stages of a step, and the share of each that the paper assumes to gain by low precision.
PAPER_SHARES = {
    "forward": 1.0,
    "backward": 1.0,
    "clip": 1.0,
    "noise": 0.0,
    "scale": 1.0,
    "other_optimizer": 0.0,
    "other": 0.0,
}
STAGES = tuple(PAPER_SHARES)


def _origin(kind: str, device: str) -> str:
    return f"measured on {device}" if kind == "measured" else f"projected for {device}, not measured"


def _check_origin(owner: str, kind: object, device: object) -> None:
    if kind not in get_args(Kind):
        raise PrivacySpecError(f"{owner}.kind={kind!r}: a figure is 'measured' or 'projected'")
    _check_text(f"{owner}.device", device, "what the times were measured on, or the accelerator they are projected for")


def _check_text(name: str, value: object, meaning: str) -> None:
    if not isinstance(value, str) or not value.strip():
        raise PrivacySpecError(f"{name}={value!r}: give {meaning}, in words")


def _check_seconds(name: str, value: Any) -> None:
    if not is_number(value) or not math.isfinite(value) or value < 0:
        raise PrivacySpecError(f"{name}={value!r}: give seconds, as a finite number that is zero or more")


def _check_share(name: str, value: Any) -> None:
    if not is_number(value) or not 0 <= value <= 1:
        raise PrivacySpecError(f"{name}={value!r}: give a share from 0 to 1, not a percentage or a count")


def _check_factor(name: str, value: Any) -> None:
    if not is_number(value) or not math.isfinite(value) or value <= 0:
        raise PrivacySpecError(
            f"{name}={value!r}: give how many times faster low precision is, as a finite number above 0 (4.0 for four "
            "times; below 1 is slower)"
        )


@dataclass(frozen=True)
class Accelerator:
    """Hardware for which a figure is projected.

    name     what it is called wherever a projection is printed
    speedup  how many times faster its low precision is than the precision that was profiled
    source   where that factor comes from
    """

    name: str
    speedup: float
    source: str

    def __post_init__(self) -> None:
        _check_text("Accelerator.name", self.name, "the name that projections are printed with")
        _check_text("Accelerator.source", self.source, "where the factor comes from, such as a data sheet")
        _check_factor("Accelerator.speedup", self.speedup)


ASSUMED = Accelerator(
    "the FP4 accelerator that DPQuant assumes",
    4.0,
    "the DPQuant paper: the least of the 4× to 7.3× over FP16 that earlier work reports",
)


@dataclass(frozen=True, kw_only=True)
class _Profile:
    """Seconds of some stretch of training, all of one kind and from one device."""

    device: str
    kind: Kind = "measured"

    def __post_init__(self) -> None:
        _check_origin(type(self).__name__, self.kind, self.device)
        for name, value in self._seconds().items():
            _check_seconds(f"{type(self).__name__}.{name}", value)

    def __add__(self, other: Self) -> Self:
        """Both stretches together; PrivacySpecError unless they have the same kind and device."""
        if type(other) is not type(self):
            return NotImplemented
        if (self.kind, self.device) != (other.kind, other.device):
            raise PrivacySpecError(
                f"a profile {_origin(self.kind, self.device)} and one {_origin(other.kind, other.device)} do not add "
                "up to a figure of either. Fix: add profiles of the same kind and device, and compare others side by "
                "side"
            )
        return replace(self, **{name: value + other._seconds()[name] for name, value in self._seconds().items()})

    def _seconds(self) -> dict[str, Any]:
        return {field: value for field, value in vars(self).items() if field not in ("kind", "device")}


@dataclass(frozen=True)
class StageTimes(_Profile):
    """Seconds of each stage of a stretch of private training, such as one step.

    forward, backward     of the model and its loss
    clip                  per-sample norms and gradients, wherever they are computed
    noise, scale          drawing and adding noise; dividing by the batch size
    other_optimizer       accounting, the update itself, clearing gradients
    other                 the rest: data, loop, whatever is between the stages
    device                where the times are from
    kind                  "measured" there, or "projected" for it
    """

    forward: float
    backward: float
    clip: float
    noise: float
    scale: float
    other_optimizer: float
    other: float

    @property
    def total(self) -> float:
        """Seconds of the whole stretch."""
        return math.fsum(self._seconds().values())

    def overhead(self, shares: Mapping[str, float] | None = None) -> float:
        """Seconds that low precision does not reduce.

        `shares` gives the part of a stage that it reduces, 0 to 1; stages that are not in it are as in the paper.
        """
        given = dict(shares or {})
        unknown = sorted(set(given) - set(STAGES))
        if unknown:
            raise PrivacySpecError(f"shares names {listing(unknown)}, no stage of a step: choose of {listing(STAGES)}")
        for stage, share in given.items():
            _check_share(f"shares[{stage!r}]", share)
        return math.fsum(seconds * (1 - (PAPER_SHARES | given)[stage]) for stage, seconds in self._seconds().items())

    def __str__(self) -> str:
        rows = [f"{self.total:.4g} s {_origin(self.kind, self.device)}"]
        for stage, seconds in self._seconds().items():
            rows.append(f"{stage:<16}{seconds:>10.4g} s{seconds / max(self.total, 1e-300):>8.1%}")
        return "\n".join(rows)


@dataclass(frozen=True)
class TotalTimes(_Profile):
    """Seconds of a stretch of training, and how many of them low precision does not reduce."""

    total: float
    overhead: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overhead > self.total:
            raise PrivacySpecError(
                f"TotalTimes.overhead={self.overhead!r} is a part of total={self.total!r} and cannot be more: give "
                "total first, and both in seconds"
            )


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """The model's result for a stretch of training: `before` seconds become `after` on `device`.

    p, factor  the share of quantizable work in low precision, and how many times faster it is there
    source     where the factor comes from
    """

    before: float
    after: float
    kind: Kind
    device: str
    p: float
    factor: float
    source: str

    def __post_init__(self) -> None:
        _check_origin("Speedup", self.kind, self.device)
        for name in ("before", "after"):
            _check_seconds(f"Speedup.{name}", getattr(self, name))
            if not getattr(self, name):
                raise PrivacySpecError(f"Speedup.{name} is zero: a ratio needs a profile in which something takes time")

    @property
    def ratio(self) -> float:
        """How many times faster training is."""
        return self.before / self.after

    def __str__(self) -> str:
        claim = "by the model, from figures " if self.kind == "measured" else ""
        return (
            f"{self.ratio:.2f}× {claim}{_origin(self.kind, self.device)}: {self.before:.4g} s become {self.after:.4g} "
            f"s with {self.p:.4g} of the quantizable work at {self.factor:.4g}× the speed ({self.source})"
        )


def estimate_speedup(
    profile: StageTimes | TotalTimes,
    p: float,
    *,
    accelerator: Accelerator | None = None,
    factor: float | None = None,
    analysis: float = 0.0,
    shares: Mapping[str, float] | None = None,
) -> Speedup:
    """How many times faster training is with a share `p` of its quantizable work in low precision.

    profile      times of training in the baseline precision: by stage, or a total and its overhead
    p            0 to 1, of the work and not of the layers: a large layer counts for more than a small one
    accelerator  what to project for; a measured profile then gives a projected figure
    factor       how much faster low precision was measured to be on the profile's own device; the figure stays measured
    analysis     seconds that the scheduler's analyses add to the profiled stretch of training, on the same device
    shares       per stage, which part gains by low precision; other stages are as in the paper

    Without `accelerator` and `factor` the figure is projected for the accelerator of the paper, which is 4 times
    faster: an assumption cannot make a measured figure.

    >>> print(estimate_speedup(TotalTimes(1.0, 0.2, device="a GPU"), 0.9, accelerator=Accelerator("XPU", 4, "a guess")))
    2.17× projected for XPU, not measured: 1 s become 0.46 s with 0.9 of the quantizable work at 4× the speed (a guess)
    """
    _check_share("p", p)
    _check_seconds("analysis", analysis)
    if accelerator is not None and not isinstance(accelerator, Accelerator):
        raise PrivacySpecError(f"accelerator={accelerator!r}: give an Accelerator(name, speedup, source)")
    if isinstance(profile, StageTimes):
        overhead = profile.overhead(shares)
    elif isinstance(profile, TotalTimes):
        overhead = profile.overhead
        if shares is not None:
            raise PrivacySpecError("shares= speaks of stages, which TotalTimes does not have: give a StageTimes")
    else:
        raise PrivacySpecError(
            f"profile is a {type(profile).__name__}: give a StageTimes, or TotalTimes(total, overhead)"
        )
    kind, device, speed, source = _origin_of(profile, accelerator, factor)
    # The formula at the top of this file, in a form that is exact at p = 0.
    after = analysis + profile.total - p * (1 - 1 / speed) * (profile.total - overhead)
    return Speedup(before=profile.total, after=after, kind=kind, device=device, p=p, factor=speed, source=source)


def _origin_of(
    profile: StageTimes | TotalTimes, accelerator: Accelerator | None, factor: float | None
) -> tuple[Kind, str, float, str]:
    """Kind, device, factor and source of the figure that a profile gives."""
    if factor is None:
        chosen = accelerator or ASSUMED
        if profile.kind == "projected" and profile.device != chosen.name:
            raise PrivacySpecError(
                f"the profile is {_origin(profile.kind, profile.device)}, the factor of {chosen.speedup:g}× is of "
                f"{chosen.name}: times of one accelerator and the factor of another make a figure of neither. Fix: "
                f"give accelerator=Accelerator({profile.device!r}, …), or a measured profile"
            )
        return "projected", chosen.name, chosen.speedup, chosen.source
    _check_factor("factor", factor)
    if accelerator is not None:
        raise PrivacySpecError(
            "factor= is measured on the profile's own device, accelerator= brings its own: give one of them"
        )
    if profile.kind == "projected":
        raise PrivacySpecError(
            f"factor= is a measured figure, the profile is {_origin(profile.kind, profile.device)}. Fix: give "
            f"accelerator=Accelerator({profile.device!r}, …) instead, or a measured profile"
        )
    return "measured", profile.device, factor, "a factor measured there"
