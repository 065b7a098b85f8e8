"""`RunConfig`: everything that defines one training run, in plain values."""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

from dpquant_compile.errors import CompileSpecError, FormatError, LabError, did_you_mean, listing
from dpquant_compile.numerics.recipe import DEFAULT_RECIPE, HIGH, Outputs, Recipe, get_recipe, recipe_names
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
    recipe       how operands are rounded in low precision, by name or as `Recipe.parse` reads it
    format       one number format for all operands, in place of a recipe
    high         what sites run in that are not low: "float32", "bfloat16" or "int8"
    budget       share of the sites in low precision; 0 is none of them (all as `high` says), 1 all in every epoch
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
    recipe: str = DEFAULT_RECIPE
    format: str | None = None
    high: str = "float32"
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
        try:
            self.numerics()
        except (CompileSpecError, FormatError) as error:
            raise LabError(str(error)) from None
        for name, choices in _CHOICES.items():
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

    def numerics(self) -> Recipe:
        """The recipe of the run's sites."""
        if not isinstance(self.recipe, str):
            raise CompileSpecError(f"recipe={self.recipe!r}: write a name, or operands as Recipe.parse reads them")
        if self.format is not None:
            if self.recipe != DEFAULT_RECIPE:
                raise CompileSpecError(f"recipe={self.recipe!r} and format={self.format!r} contradict: give one")
            return Recipe.of_format(self.format, cast(Outputs, self.quantize_outputs))
        if self.recipe in recipe_names():
            recipe = get_recipe(self.recipe)
        else:
            try:
                recipe = Recipe.parse(self.recipe)
            except FormatError as error:
                raise CompileSpecError(
                    f"recipe={self.recipe!r} is none of {listing(recipe_names())}; {error}"
                ) from None
        if (recipe.backend, recipe.high) != ("auto", "float32"):
            raise CompileSpecError(f"recipe={self.recipe!r}: write high = … in a field of its own, and no backend")
        if recipe.outputs not in ("none", self.quantize_outputs) and self.quantize_outputs != "none":
            raise CompileSpecError(
                f"recipe={self.recipe!r} has outputs {recipe.outputs!r}; quantize_outputs={self.quantize_outputs!r} "
                "contradicts it"
            )
        return recipe

    @property
    def precision(self) -> str:
        """What low precision is, in one word, which may also be part of a file's name."""
        return re.sub(r"[^\w.+]", "_", self.format or self.recipe)

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
        # What a run does not use is no part of its name: so fields that came later leave the names of earlier runs.
        del full["format" if self.format is None else "recipe"]
        if self.high == "float32":
            del full["high"]
        digest = hashlib.sha256(json.dumps(full, sort_keys=True).encode()).hexdigest()[:8]
        if self.budget == 0:
            how = "full" if self.high == "float32" else f"{self.high}-high"
        elif self.budget == 1:
            how = f"{self.precision}-all"
        else:
            chosen = self.scheduler if self.scheduler != "dpquant" else f"dpquant-{self.estimator}"
            how = f"{self.precision}-{self.budget:g}-{chosen}"
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
    "high": HIGH,
}


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise LabError(f"{name}={value!r}: give a number")
    return float(value)
