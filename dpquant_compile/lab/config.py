"""`RunConfig`: everything that defines one training run, in plain values."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from dpquant_compile.errors import LabError, did_you_mean
from dpquant_compile.numerics.formats import format_names
from dpquant_compile.numerics.recipe import Outputs
from dpquant_compile.privacy.schedule.estimators import ESTIMATORS
from dpquant_compile.privacy.schedule.scheduler import MODES
from dpquant_compile.privacy.schedule.selection import NORMALISATIONS

__all__ = ["DECAYS", "OPTIMIZERS", "PRIVACY", "RunConfig"]

OPTIMIZERS = ("sgd", "adam", "adamw")
PRIVACY = ("dp", "clip", "none")
DECAYS = ("none", "linear", "cosine")

# The location of the data does not change a run.
_PLACE = frozenset({"data"})


@dataclass(frozen=True)
class RunConfig:
    """One run. Fields that are None take the task's values, or the scheduler's own defaults.

    task         its name: a model, its data, and defaults
    seed         of the weights at the start and of the schedule's draws, which are public
    budget       share of the sites in low precision; 0 is full precision throughout, 1 is all of them in every epoch
    privacy      "dp"; "clip": per-sample clipping without noise; "none": neither. The last two are controls
    target_epsilon    of training and analyses together; None uses the noise multiplier
    static_seed  which subset, for scheduler "static"; None uses the seed
    physical     max_physical_batch_size
    reproducible batches, noise and rounding depend on the seed too; otherwise on the operating system's entropy

    Guarantee: the ε of a run holds against those who know its configuration. That of a reproducible run holds only as
    long as nobody knows the seed, which determines the noise: use it for experiments on public data.
    """

    task: str
    seed: int = 0
    format: str = "luq_fp4"
    budget: float = 0.75
    scheduler: str = "dpquant"
    estimator: str = "per_sample"
    optimizer: str = "sgd"
    privacy: str = "dp"
    quantize_outputs: str = "none"
    epochs: int | None = None
    batch_size: int | None = None
    physical: int | None = None
    lr: float | None = None
    lr_decay: str | None = None
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    max_grad_norm: float | None = None
    delta: float | None = None
    beta: float | None = None
    ema: float | None = None
    normalise: str | None = None
    n_interval: int | None = None
    n_sample: float | None = None
    sigma_measure: float | None = None
    clip_measure: float | None = None
    repetitions: int | None = None
    static_seed: int | None = None
    reproducible: bool = False
    data: str | None = None

    def __post_init__(self) -> None:
        for name, choices in (("format", tuple(format_names())), *_CHOICES.items()):
            value = getattr(self, name)
            if value not in choices and not (value is None and name in ("lr_decay", "normalise")):
                raise LabError(f"{name}={value!r}: choose one of {', '.join(choices)}")
        if not 0 <= _number("budget", self.budget) <= 1:
            raise LabError(f"budget={self.budget!r}: the share of sites in low precision lies from 0 to 1")
        for name in ("epochs", "batch_size", "physical", "n_interval", "repetitions"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise LabError(f"{name}={value!r}: give an int from 1 up")
        for name in ("seed", "static_seed"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise LabError(f"{name}={value!r}: give an int from 0 up")
        if type(self.reproducible) is not bool:  # the text "false" would count as true
            raise LabError(f"reproducible={self.reproducible!r}: give true or false")
        for name in ("lr", "noise_multiplier", "target_epsilon", "max_grad_norm", "delta", "sigma_measure", "n_sample"):
            value = getattr(self, name)
            if value is not None and not 0 < _number(name, value) < math.inf:
                raise LabError(f"{name}={value!r}: give a number above 0")
        if self.privacy != "dp" and self.budget not in (0, 1) and self.scheduler in ("dpquant", "greedy"):
            raise LabError(
                f"privacy={self.privacy!r} with scheduler={self.scheduler!r}: a control that is not private makes no "
                "private analyses. Fix: scheduler='pls' or 'static'"
            )

    def resolved(self) -> "RunConfig":
        """The same with None replaced by the task's values, where it has any."""
        from dpquant_compile.lab.tasks import get_task  # tasks hold defaults of this class' fields

        defaults = dict(get_task(self.task).defaults)
        if self.optimizer != "sgd":
            defaults["lr"] = defaults.get("lr_adam", defaults["lr"])
        if self.target_epsilon is not None and self.noise_multiplier is None:
            defaults.pop("noise_multiplier")
        known = {field.name for field in dataclasses.fields(self)}
        missing = {k: v for k, v in defaults.items() if k in known and getattr(self, k) is None}
        return dataclasses.replace(self, **missing)

    @property
    def key(self) -> str:
        """A short stable name, also of the run's folder: the main settings, and a digest of the rest."""
        full = {name: value for name, value in self.resolved().to_json().items() if name not in _PLACE}
        digest = hashlib.sha256(json.dumps(full, sort_keys=True).encode()).hexdigest()[:8]
        if self.budget == 0:
            how = "full"
        elif self.budget == 1:
            how = f"{self.format}-all"
        else:
            chosen = self.scheduler if self.scheduler != "dpquant" else f"dpquant-{self.estimator}"
            how = f"{self.format}-{self.budget:g}-{chosen}"
        return f"{self.task}-{self.privacy}-{how}-s{self.seed}-{digest}"

    def to_json(self) -> dict[str, Any]:
        """Plain values by name."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RunConfig":
        """From plain values; an unknown name is refused, and the error lists the fields."""
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            meant = "".join(_REMOVED.get(name) or did_you_mean(name, known) for name in unknown)
            raise LabError(f"{', '.join(unknown)}: no such field of a run.{meant} Fields: {', '.join(known)}")
        if "task" not in values:
            raise LabError("a run needs a task: see `dpquant tasks`")
        return cls(**values)


# Fields of earlier releases, and what replaces them.
_REMOVED = {
    "recipe": " What is trained is the task now: write task = … in its place.",
    "secure_mode": " secure_mode = true is the default now: leave it out. For secure_mode = false write reproducible = "
    "true.",
}

_CHOICES: dict[str, tuple[str, ...]] = {
    "scheduler": MODES,
    "estimator": tuple(ESTIMATORS),
    "optimizer": OPTIMIZERS,
    "privacy": PRIVACY,
    "lr_decay": DECAYS,
    "normalise": tuple(NORMALISATIONS),
    "quantize_outputs": get_args(Outputs),
}


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise LabError(f"{name}={value!r}: give a number")
    return float(value)
