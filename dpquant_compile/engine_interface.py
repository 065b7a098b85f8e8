"""Interface between CompiledModule and PrivacyEngine."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.utils._expanded_weights import ExpandedWeight

from dpquant_compile.errors import PrivateTrainingError
from dpquant_compile.link_table import LinkTable
from dpquant_compile.numerics.random_bits import RandomBits
from dpquant_compile.programs import Programs
from dpquant_compile.spec import CompileSpec

__all__ = ["Internals", "Runner", "Storage", "refuse_grad_samplers"]


class Runner(Protocol):
    """Runs the training forwards of a model: a private session."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A training forward."""

    def ways(self) -> tuple[tuple[str, str, str], ...]:
        """For `explain()`: each trainable parameter, its uses, and how its per-sample gradients are computed."""


class Storage(Protocol):
    """Keeps the parameters of a model in another form than its programs read: shards, on several processes."""

    @property
    def stored(self) -> Iterable[Tensor]:
        """The parameters as they are kept, which the model has at rest."""

    def refresh(self) -> None:
        """Take over what something else than a private step has changed."""

    def in_place(self) -> AbstractContextManager[None]:
        """Within it the model has its parameters as programs read them, as of the last step or `refresh`."""


@dataclass(frozen=True)
class Internals:
    """What a privacy engine uses of a model: the model, its captured programs, and the link table of a batch.

    `begin(batch, ids, bits)` updates the link table for a training forward on `batch` samples with these ids, which
    draws its random bits from `bits`.
    `precompiled` says whether `precompile` was asked for variants that training alone would run: a session runs none.
    """

    original: nn.Module
    programs: Programs
    spec: CompileSpec
    begin: Callable[[int, Tensor, RandomBits], LinkTable]
    precompiled: bool


def refuse_grad_samplers(model: nn.Module) -> None:
    """Raise if another library waits for per-sample gradients: its hooks are on modules, which programs do not call."""
    named = model.named_parameters()
    hooked = next((n for n, p in named if isinstance(p, ExpandedWeight) or hasattr(p, "grad_sample")), None)
    if hooked is not None:
        raise PrivateTrainingError(
            f"parameter {hooked!r} was prepared for per-sample gradients by another engine (opacus.PrivacyEngine or "
            "GradSampleModule), whose hooks a compiled program does not call: it would train without clipping, or not "
            "at all. Fix: use dpquant_compile.PrivacyEngine, which is an opacus.PrivacyEngine, with a model that no "
            "other engine has taken"
        )
