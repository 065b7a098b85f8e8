"""Estimators: how much a policy would hurt, measured on a probe batch, with a bound on what one sample can change.

An estimator gives a vector with one number per policy, and states its sensitivity. The scheduler adds noise of `sigma`
times the sensitivity, so that `sigma` is the true noise multiplier, and divides by a public number.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dpquant_compile.errors import PrivacySpecError
from dpquant_compile.privacy.clipping.bounds import is_number
from dpquant_compile.privacy.clipping.runtime import Session
from dpquant_compile.privacy.data.criterion import PrivateCriterion
from dpquant_compile.privacy.data.poisson_loader import MicroBatch
from dpquant_compile.privacy.distributed.world import World, call_roll, wide_sums
from dpquant_compile.privacy.mechanism.optimizer import PrivateOptimizer
from dpquant_compile.privacy.schedule.probe import Batch, Probe

__all__ = [
    "ADJACENCIES",
    "ESTIMATORS",
    "Estimator",
    "Paper",
    "PerSample",
    "Setting",
    "default_batches",
    "make_estimator",
]

ADJACENCIES = ("add_remove", "replace_one")

_TURNS = 1 << 16  # more than an analysis has repetitions
_GROUP_SIZE = 16  # samples that share one rounding of the weights, on average


@dataclass(frozen=True)
class Setting:
    """The setting of an analysis.

    number     of the analysis among all releases of the run: unique, and so are its random bits
    expected   expected size of its probe batch
    """

    session: Session
    optimizer: PrivateOptimizer
    criterion: PrivateCriterion
    number: int
    expected: float
    world: World = field(default_factory=World)

    def step(self, turn: int) -> int:
        """The step number for the random bits of a repetition of this analysis; training counts up from 0."""
        return -1 - (self.number * _TURNS + turn)

    def group_of(self, ids: Tensor) -> Tensor:
        """The random rounding group of each sample: samples of a group share one rounding of the weights."""
        groups = max(1, round(self.expected / _GROUP_SIZE))
        return self.session.bits.sample_ids(self.step(-1), ids) % groups


class Estimator(Protocol):
    """What a scheduler needs of an estimator; any object with these members will do.

    With several processes, `measure` runs on rank 0 alone, on the whole probe batch. With an attribute
    `sharded = True` it runs on all of them, each on its own samples, and must itself add up over `setting.world`,
    before it clips anything that it does not clip sample by sample.

    An attribute `expected_samples` is the default size of the probe batch; without it, that is one physical batch.
    """

    sigma: float

    def sensitivity(self, adjacency: str) -> float:
        """The largest change of `measure` between neighbouring probe batches, as the norm of a vector."""

    def measure(self, setting: Setting, policies: Sequence[frozenset[str]], batches: Iterable[Batch]) -> Tensor:
        """A number per policy; higher means more harm. Not private: it must not leave the scheduler."""

    def divisor(self, setting: Setting) -> float:
        """A public number by which the noised vector is divided."""


def _check(adjacency: str) -> None:
    if adjacency not in ADJACENCIES:
        raise PrivacySpecError(f"adjacency={adjacency!r}: choose one of {', '.join(ADJACENCIES)}")


@dataclass(frozen=True)
class PerSample:
    """Forward only, at fixed weights: each sample's vector of loss differences, clipped to `clip`, summed.

    Guarantee: the sensitivity is `clip` when a sample is added or removed. The weights are private already, and no
    sample affects another's vector.
    """

    sharded: ClassVar[bool] = True
    expected_samples: ClassVar[int] = 512
    clip: float = 0.1
    sigma: float = 8.0
    repetitions: int = 1

    def sensitivity(self, adjacency: str = "add_remove") -> float:
        """`clip`, or twice that if one sample is replaced by another."""
        _check(adjacency)
        return self.clip if adjacency == "add_remove" else 2 * self.clip

    def measure(self, setting: Setting, policies: Sequence[frozenset[str]], batches: Iterable[Batch]) -> Tensor:
        """Σᵢ clip(dᵢ), where dᵢ are the loss differences of sample i; differences that are not finite count as zero."""
        total = torch.zeros(len(policies), dtype=torch.float64)
        losses = setting.criterion.per_sample
        probes = [Probe(setting.session, losses, setting.step(turn)) for turn in range(self.repetitions)]
        for batch in batches:
            vectors = torch.zeros(len(batch.ids), len(policies), dtype=torch.float64)
            for probe in probes:
                vectors += probe.differences(batch, policies).double() / self.repetitions
            norms = vectors.norm(dim=1, keepdim=True)
            scale = (self.clip / norms.clamp_min(1e-300)).clamp(max=1.0)
            total += torch.where(norms.isfinite(), vectors.nan_to_num(0.0, 0.0, 0.0) * scale, 0.0).sum(0)
        return setting.world.sum([total])[0]

    def divisor(self, setting: Setting) -> float:
        """The expected size of the probe batch: the result is a mean difference of losses."""
        return max(setting.expected, 1.0)


@dataclass(frozen=True)
class Paper:
    """Algorithm 1 as written: a DP-SGD update on the probe batch under each policy, and the loss after it.

    Guarantee: one sample affects the whole vector, which is clipped as a whole. Two neighbouring batches may give
    vectors on opposite sides of the ball, so the sensitivity is twice `clip`, and not `clip` as published.
    """

    sharded: ClassVar[bool] = True
    clip: float = 0.01
    sigma: float = 0.5
    repetitions: int = 2

    def sensitivity(self, adjacency: str = "add_remove") -> float:
        """2 · `clip`: the diameter of the ball to which the vector is clipped."""
        _check(adjacency)
        return 2 * self.clip

    def measure(self, setting: Setting, policies: Sequence[frozenset[str]], batches: Iterable[Batch]) -> Tensor:
        """Mean loss after an update under each policy, minus that in full precision, clipped as a vector."""
        held = list(batches)
        if not int(setting.world.sum([torch.tensor(len(held))])[0]):
            return torch.zeros(len(policies), dtype=torch.float64)
        base = self._mean(setting, frozenset(), held)
        vector = torch.tensor([self._mean(setting, policy, held) - base for policy in policies], dtype=torch.float64)
        if not bool(vector.isfinite().all()):
            return torch.zeros(len(policies), dtype=torch.float64)
        return vector * min(1.0, self.clip / max(float(vector.norm()), 1e-300))

    def divisor(self, setting: Setting) -> float:
        """1: the result is already a difference of mean losses."""
        return 1.0

    def _mean(self, setting: Setting, policy: frozenset[str], batches: Sequence[Batch]) -> float:
        runs = (self._loss(setting, policy, batches, turn) for turn in range(self.repetitions))
        return sum(runs) / self.repetitions

    def _loss(self, setting: Setting, policy: frozenset[str], batches: Sequence[Batch], turn: int) -> float:
        session, optimizer = setting.session, setting.optimizer
        model, wrapped = session.model, optimizer.original_optimizer
        tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
        kept = [tensor.detach().clone() for tensor in tensors]
        modes = {module: module.training for module in model.modules()}
        state = copy.deepcopy(wrapped.state_dict())
        was = (model.step, model.policy, model.training)
        model.train()
        model.set_policy(policy)
        model.step = setting.step(turn)
        try:
            with session.rehearsal(optimizer.noise_multiplier):
                for number, batch in enumerate(batches):
                    last = number + 1 == len(batches)
                    session.announce(MicroBatch(batch.ids, first=number == 0, last=last))
                    with torch.enable_grad():
                        setting.criterion(model(*batch.args, **batch.kwargs), batch.target).backward()
                self._update(setting, turn)
                session.gather()
                loss = self._evaluate(setting, batches)
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, kept, strict=True):
                    tensor.copy_(value)
                    tensor.grad = None
            wrapped.load_state_dict(state)
            model.train(was[2])
            for module, training in modes.items():  # layers may be in different modes
                module.training = training
            model.set_policy(was[1])
            model.step = was[0]
        session.gather()  # not in `finally`: a process that raises meets no other
        return loss

    def _update(self, setting: Setting, turn: int) -> None:
        """One step of the user's optimizer on the clipped and noised mean gradient.

        The noise makes the update like one of training. It protects nothing: the result does not leave this class.
        """
        session, optimizer = setting.session, setting.optimizer
        generator = torch.Generator().manual_seed(hash((setting.number, turn)) & 0x7FFF_FFFF)
        sums = session.take_sums(optimizer.noise_multiplier)
        std = optimizer.noise_multiplier * session.sensitivity
        call_roll(setting.world, session, {"analysis": (setting.number, turn)})
        names = [name for name, p in session.stored.items() if p.requires_grad and session.uses(name)]
        for name, total in zip(names, setting.world.sum(wide_sums(session, sums, names)), strict=True):
            parameter = session.stored[name]
            grad = std * torch.randn(parameter.shape, generator=generator).to(total.device) + total
            divisor = max(setting.expected, 1.0) if optimizer.loss_reduction == "mean" else 1.0
            mean = (grad / divisor).to(parameter.dtype)
            parameter.grad = mean if session.shards is None else session.shards.cut(parameter, mean)
        optimizer.original_optimizer.step()

    def _evaluate(self, setting: Setting, batches: Sequence[Batch]) -> float:
        model = setting.session.model
        model.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in batches:
                losses = setting.criterion.per_sample(model(*batch.args, **batch.kwargs), batch.target)
                total, count = total + float(losses.sum()), count + len(losses)
        (both,) = setting.world.sum([torch.tensor([total, float(count)], dtype=torch.float64)])
        return float(both[0]) / max(float(both[1]), 1.0)


# By the names that the scheduler, `plan` and the command line take.
ESTIMATORS: dict[str, type[PerSample] | type[Paper]] = {"per_sample": PerSample, "paper": Paper}


def default_batches(estimator: Any, physical: int) -> float:
    """Physical batches that an analysis draws in expectation unless `n_sample` is given; at least one.

    `estimator` is an object or its class. The scheduler draws by this number, and `plan` counts by it.
    """
    samples = getattr(estimator, "expected_samples", None)
    return 1.0 if samples is None else max(1.0, float(round(samples / physical)))


def make_estimator(kind: Any, **given: Any) -> Any:
    """An estimator by name, with the given settings and the defaults of its kind for the rest."""
    if not isinstance(kind, str):
        if any(value is not None for value in given.values()):
            raise PrivacySpecError(
                "an estimator object brings its settings with it. Fix: leave out those of the scheduler"
            )
        return kind
    if kind not in ESTIMATORS:
        names = ", ".join(map(repr, ESTIMATORS))
        raise PrivacySpecError(f"estimator={kind!r}: choose {names}, or an object with the same methods")
    made = ESTIMATORS[kind](**{name: value for name, value in given.items() if value is not None})
    for name in ("clip", "sigma", "repetitions"):
        value = getattr(made, name)
        if not is_number(value) or not 0 < value < math.inf or (name == "repetitions" and value != int(value)):
            raise PrivacySpecError(f"{name}={value!r} of the analysis must be a number greater than zero")
    return made
