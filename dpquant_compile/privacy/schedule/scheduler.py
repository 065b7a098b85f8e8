"""`Scheduler`: chooses which sites run in low precision in the next epoch, from private measurements."""

import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.utils._pytree import tree_map

from dpquant_compile.errors import PrivacySpecError, PrivateTrainingError, listing
from dpquant_compile.policy import Policy
from dpquant_compile.privacy.accounting.accountants import composed_epsilon
from dpquant_compile.privacy.accounting.epsilon import Entry, gathered
from dpquant_compile.privacy.distributed.world import World
from dpquant_compile.privacy.engine import PrivacyEngine
from dpquant_compile.privacy.schedule.estimators import ADJACENCIES, Estimator, Setting, default_batches, make_estimator
from dpquant_compile.privacy.schedule.history import EpochRecord, History
from dpquant_compile.privacy.schedule.probe import Batch, draw_batch, unpack_batch
from dpquant_compile.privacy.schedule.selection import NORMALISATIONS, draw, lowest, probabilities

__all__ = ["MODES", "Chooser", "Scheduler"]

MODES = ("dpquant", "pls", "static", "greedy")


class Chooser(Protocol):
    """A user's own `mode` of a scheduler: called once per epoch; it must not read the data."""

    def choose(self, epoch: int, sites: Sequence[str], k: int) -> Iterable[str]:
        """The sites of epoch `epoch`, which counts from 0."""


@dataclass
class _State:
    """The state that a resumed run needs."""

    epoch: int = 0
    scores: dict[str, float] = field(default_factory=dict)
    analyses: int = 0


class Scheduler:
    """Chooses each epoch's policy. Call `step()` at the end of every epoch, as with a learning-rate scheduler.

    mode           "dpquant": by private measurements; "pls": uniform draws; "static": one subset, given as `static` or
                   drawn once; "greedy": always the lowest scores; or an object with `choose(epoch, sites, k)`
    epochs         the number of epochs of the run: no analysis follows the last one, since nothing would use it
    estimator      "per_sample" (default), "paper", or an object like those in `estimators`
    k              policies drawn per epoch; by default the model's budget, or its share of the groups
    policies       groups of sites that are switched together, by name; by default each site is its own group
    n_interval     epochs between analyses
    n_sample       expected size of the probe batch, in physical batches
    repetitions, sigma_measure, clip_measure    R, σ and C of the estimator
    ema            α: weight of a new measurement in the running scores
    beta           β: how strongly low scores are preferred; infinity is mode "greedy"
    normalise      "minmax" as published, or "rank"
    adjacency      "add_remove" or "replace_one": for which the noise of an analysis is scaled
    unpack         from a batch of the loader to (args, kwargs, target); by default (input, target), or a mapping of
                   the model's arguments whose "labels" are the target
    logs           get a record of every epoch, with ε at `delta`: see docs/scheduler.md

    Guarantee: scores are released with noise, and each analysis is in the ledger before it reads data. Policies are
    post-processing of the scores.
    """

    def __init__(
        self,
        engine: PrivacyEngine,
        *,
        epochs: int | None = None,
        mode: "str | Chooser" = "dpquant",
        estimator: "str | Estimator" = "per_sample",
        k: int | None = None,
        policies: Mapping[str, Iterable[str]] | None = None,
        static: Iterable[str] | None = None,
        n_interval: int = 2,
        n_sample: float | None = None,
        repetitions: int | None = None,
        sigma_measure: float | None = None,
        clip_measure: float | None = None,
        ema: float = 0.3,
        beta: float = 10.0,
        normalise: str = "minmax",
        adjacency: str = "add_remove",
        unpack: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any], Any]] | None = None,
        logs: Sequence[Any] = (),
        delta: float = 1e-5,
        seed: int = 0,
    ) -> None:
        self.engine = engine
        self.run = engine.run
        self.world = engine.run.world
        self.mode, self.epochs, self.n_interval = mode, epochs, n_interval
        self.ema, self.beta, self.normalise, self.adjacency, self.seed = ema, beta, normalise, adjacency, seed
        self._unpack = unpack or self._default_unpack
        self._logs, self._delta = tuple(logs), delta
        self.estimator: Estimator = make_estimator(
            estimator, repetitions=repetitions, sigma=sigma_measure, clip=clip_measure
        )
        physical, size = self.run.default_physical or self.run.physical, self.run.loader.size
        self.n_sample = n_sample if n_sample is not None else default_batches(self.estimator, physical)
        self.sample_rate = min(1.0, self.n_sample / math.ceil(size / physical))
        self._check()
        self._find_sites()
        self.policies = self._named(policies)
        self.k = self._count(k, policies is not None)
        self._static = None if static is None else self._fixed(static)
        self._state = _State(scores=dict.fromkeys(self.policies, 0.0))
        self._untold: EpochRecord | None = None
        self.history = History(tuple(self.run.session.model.sites.names))
        engine.scheduler = self
        self.world.agree("in Scheduler", self.config())
        if self.world.first:
            self._warn_of_target()
        self._choose(analysed=False)

    # One epoch after the other

    @property
    def epoch(self) -> int:
        """How many epochs have ended."""
        return self._state.epoch

    @property
    def scores(self) -> dict[str, float]:
        """The running private scores by policy; higher means more harm."""
        return dict(self._state.scores)

    @property
    def probabilities(self) -> dict[str, float]:
        """The probability of each policy to be drawn first."""
        scores = list(self._state.scores.values())
        flat = self.mode in ("pls", "static") or not isinstance(self.mode, str)
        beta = 0.0 if flat else math.inf if self.mode == "greedy" else self.beta
        return dict(zip(self.policies, probabilities(scores, beta, self.normalise), strict=True))

    def step(self) -> Policy:
        """End an epoch: analyse if due, and set the policy of the next. After the last epoch nothing changes."""
        self.run.end_epoch()
        if self.run.session.micro is not None:
            raise PrivateTrainingError(
                "scheduler.step() inside the loop over the loader: an analysis costs privacy, and is meant for the end "
                "of an epoch. Fix: call it after the loop"
            )
        self._tell()
        self._state.epoch += 1
        self.history.now = tuple((e.purpose, e.q, e.sigma, e.steps) for e in self.engine.ledger.entries)
        due = self._due()
        if due:
            self._analyse()
        if self.epochs is None or self._state.epoch < self.epochs:
            self._choose(analysed=due)
        else:
            self._untold = None
        self.engine.agree(f"at the end of epoch {self._state.epoch}")
        return self.run.session.model.policy

    @property
    def _measures(self) -> bool:
        return self.mode in ("dpquant", "greedy") and 0 < self.k < len(self.policies)  # else there is no choice

    def _due(self) -> bool:
        more = self.epochs is None or self._state.epoch < self.epochs
        return self._measures and more and self._state.epoch % self.n_interval == 0

    def _choose(self, *, analysed: bool) -> None:
        chosen = self.world.on_first("the policy of an epoch", self._chosen)
        sites = sorted({site for name in chosen for site in self.policies[name]})
        policy, ledger = self.run.session.model.set_policy(sites), self.engine.ledger
        record = EpochRecord(
            epoch=self._state.epoch,
            policy=tuple(sorted(policy)),
            probabilities=self.probabilities,
            scores=self.scores,
            analysed=analysed,
            spent=tuple((e.purpose, e.q, e.sigma, e.steps) for e in ledger.entries),
        )
        self.history.add(record)
        self._untold = record

    def _tell(self) -> None:
        """Log the epoch that has just run; not when its policy is set, since a resume may follow."""
        ledger = self.engine.ledger
        if self._logs and self._untold is not None and self.world.first:
            costs = {"epsilon": ledger.epsilon(self._delta), "epsilons": ledger.epsilons(self._delta)}
            record = {**asdict(self._untold), "epoch": self._untold.epoch + 1, **costs, "delta": self._delta}
            for log in self._logs:
                log.epoch(record)

    def _chosen(self) -> list[str]:
        epoch, names = self._state.epoch, list(self.policies)
        if not isinstance(self.mode, str):
            asked = list(self.mode.choose(epoch, tuple(names), self.k))
            if unknown := [name for name in asked if name not in self.policies]:
                raise PrivacySpecError(f"choose() gave {listing(unknown)}, which the scheduler does not have")
            return asked
        if self.mode == "static" and self._static is not None:
            return self._static
        scores = list(self._state.scores.values())
        # Each epoch has its own generator, so that a resumed run draws the same as an uninterrupted one.
        rng = random.Random(f"dpquant-schedule-{self.seed}-{0 if self.mode == 'static' else epoch}")
        if self.mode == "greedy" or math.isinf(self.beta):
            return [names[i] for i in lowest(scores, self.k, rng)]
        return [names[i] for i in draw(list(self.probabilities.values()), self.k, rng)]

    def _analyse(self) -> None:
        """Measure every policy, privately, and update the running scores. The spend is recorded before data is read."""
        run = self.run
        self.engine.spend("analysis", q=self.sample_rate, sigma=self.estimator.sigma)
        expected = self.sample_rate * run.loader.size
        assert run.criterion is not None  # checked when the scheduler was made
        sharded = getattr(self.estimator, "sharded", False)
        _, number = self.engine.ledger.position  # unique to this spend, also among the engine's schedulers
        world = self.world if sharded else World()
        setting = Setting(run.session, run.optimizer, run.criterion, number, expected, world)
        policies = [frozenset(sites) for sites in self.policies.values()]
        vector = self.estimator.measure(setting, policies, self._probe(setting)) if sharded else None

        def noised() -> list[float]:
            found = self.estimator.measure(setting, policies, self._probe(setting)) if vector is None else vector
            std = self.estimator.sigma * self.estimator.sensitivity(self.adjacency)
            noisy = (found + std * run.noise.fill(len(found)).double()) / self.estimator.divisor(setting)
            self.engine.release([noisy])
            values: list[float] = noisy.tolist()
            return values

        # Noise is drawn once, on rank 0; the others count it, since all must go on at the same place in the noise.
        values = self.world.on_first("the scores of an analysis", noised)
        if not self.world.first:
            run.noise.skip(len(values))
        for name, value in zip(self.policies, values, strict=True):
            self._state.scores[name] = (1 - self.ema) * self._state.scores[name] + self.ema * value
        self._state.analyses += 1

    def _default_unpack(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        return unpack_batch(batch, self.run.session.constants.given("training"))

    def _probe(self, setting: Setting) -> Iterator[Batch]:
        """The probe batch; for an analysis on all processes, this process' share of it."""
        run, world = self.run, setting.world
        # As secret as the noise: amplification by sampling assumes that nobody can predict the draw.
        uniform = run.session.bits.uniform("probe", setting.number)
        return draw_batch(
            run.loader,
            self.sample_rate,
            uniform,
            run.physical,
            setting.group_of,
            self._unpack,
            share=lambda draw: world.share(world.on_first("the samples of an analysis", draw)),
        )

    # Checking

    def _check(self) -> None:
        if isinstance(self.mode, str) and self.mode not in MODES:
            raise PrivacySpecError(
                f"mode={self.mode!r}: choose one of {', '.join(MODES)}, or give an object with choose()"
            )
        if self.normalise not in NORMALISATIONS:
            raise PrivacySpecError(f"normalise={self.normalise!r}: choose one of {', '.join(NORMALISATIONS)}")
        if self.adjacency not in ADJACENCIES:
            raise PrivacySpecError(f"adjacency={self.adjacency!r}: choose one of {', '.join(ADJACENCIES)}")
        if not 0 < self.ema <= 1:
            raise PrivacySpecError(f"ema={self.ema!r}: the weight of a new measurement lies above 0 and up to 1")
        if math.isnan(self.beta) or self.beta < 0:
            raise PrivacySpecError(f"beta={self.beta!r}: zero (uniform) or more")
        for name, value in (("epochs", self.epochs), ("n_interval", self.n_interval)):
            if value is not None and (type(value) is not int or value < 1):
                raise PrivacySpecError(f"{name}={value!r}: give an int from 1 up")
        if not self.n_sample > 0:
            raise PrivacySpecError(f"n_sample={self.n_sample!r}: a probe batch needs some physical batches, 1 or so")
        if self.mode in ("dpquant", "greedy") and self.run.criterion is None:
            raise PrivacySpecError(
                f"mode={self.mode!r} measures losses, so the scheduler needs the loss: give criterion= to make_private"
            )

    def _find_sites(self) -> None:
        """Capture a model whose sites are known only with its graph, on zeros in the shapes of a batch.

        Guarantee: no contents of the data are read, only shapes and types of the first record, which the loader knows.
        """
        run = self.run
        if not run.session.internals.programs.provisional:
            return
        assert run.loader.collate_fn is not None
        try:
            args, kwargs, _ = self._unpack(run.loader.collate_fn([]))
            run.session.model.capture(*tree_map(_two_rows, args), **tree_map(_two_rows, kwargs))
        except Exception as error:
            raise PrivacySpecError(
                "the sites of this model are known only with its graph, and it cannot be captured on a batch of zeros: "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}. Fix: pass unpack= to "
                "Scheduler, a function from a batch to (args, kwargs, target), or example_inputs= to compile()"
            ) from error

    def _warn_of_target(self) -> None:
        """Warn if the whole run, as far as its length is known, costs more than the ledger's target.

        Only this run is counted: spends in a ledger on disk may be its own, if it is resumed.
        """
        run, ledger = self.run, self.engine.ledger
        target, delta = ledger.target_epsilon, ledger.target_delta
        epochs = self.epochs or self.engine.planned_epochs
        if target is None or delta is None or epochs is None:
            return
        # If the scheduler does not know the last epoch, an analysis may follow that one too.
        analyses = (epochs - (self.epochs is not None)) // self.n_interval if self._measures else 0
        sigma, steps = run.optimizer.noise_multiplier, epochs * run.loader.steps
        spends = [Entry("training", "subsampled_gaussian", run.sample_rate, sigma, steps)]
        if analyses:
            spends.append(Entry("analysis", "subsampled_gaussian", self.sample_rate, self.estimator.sigma, analyses))
        try:
            planned = composed_epsilon(ledger.accountant, gathered(spends), delta)
        except PrivacySpecError:
            return  # the GDP accountant cannot compose analyses with training; the first analysis raises
        if planned > target:
            warnings.warn(
                f"the planned run (epochs: {epochs}, analyses: {analyses}) costs ε = {planned:.6g} at δ = {delta:g}, "
                f"past the target {target:g}: the ledger will stop it before its end. Fix: take the noise multiplier "
                "from dpq.plan, which counts the analyses (make_private_with_epsilon counts training alone), and give "
                "it to make_private of a PrivacyEngine with this target",
                stacklevel=3,
            )

    def _named(self, policies: Mapping[str, Iterable[str]] | None) -> dict[str, tuple[str, ...]]:
        sites = self.run.session.model.sites.names
        if policies is None:
            return {name: (name,) for name in sites}
        named = {name: tuple(group) for name, group in policies.items()}
        unknown = sorted({site for group in named.values() for site in group if site not in sites})
        if unknown or not all(named.values()):
            raise PrivacySpecError(f"policies= has empty groups or names no sites: {listing(unknown) or 'empty group'}")
        return named

    def _count(self, k: int | None, grouped: bool) -> int:
        n, model = len(self.policies), self.run.session.model
        if k is None:
            k = round(model.budget * n / max(len(model.sites), 1)) if grouped else model.budget
        if type(k) is not int or not 0 <= k <= n:
            raise PrivacySpecError(f"k={k!r}: the scheduler draws 0 to {n} of its {n} policies")
        return k

    def _fixed(self, names: Iterable[str]) -> list[str]:
        chosen = list(names)
        if unknown := [name for name in chosen if name not in self.policies]:
            raise PrivacySpecError(f"static= names {listing(unknown)}, which the scheduler does not have")
        return chosen

    # Resuming

    def config(self) -> dict[str, Any]:
        """The settings that must be equal for a schedule to be resumed, in plain types."""
        mode = self.mode if isinstance(self.mode, str) else type(self.mode).__name__
        numbers = {name: getattr(self.estimator, name, None) for name in ("clip", "sigma", "repetitions")}
        own = ("epochs", "n_interval", "n_sample", "ema", "beta", "normalise", "adjacency", "seed", "k")
        return {
            "mode": mode,
            "estimator": type(self.estimator).__name__,
            "policies": {name: list(sites) for name, sites in self.policies.items()},
            **numbers,
            **{name: getattr(self, name) for name in own},
        }

    def state_dict(self) -> dict[str, Any]:
        """Epoch, running scores and history, in plain types."""
        state = self._state
        return {
            "epoch": state.epoch,
            "scores": dict(state.scores),
            "analyses": state.analyses,
            "history": self.history.state_dict(),
            "policy": sorted(self.run.session.model.policy),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        if set(state["scores"]) != set(self.policies):
            raise PrivacySpecError("the saved schedule has other policies than this scheduler: give the same policies=")
        scores = {name: float(state["scores"][name]) for name in self.policies}
        self._state = _State(int(state["epoch"]), scores, int(state["analyses"]))
        self.history.load_state_dict(state["history"])
        self._untold = self.history[-1]
        self.run.session.model.set_policy(state["policy"])


def _two_rows(value: Any) -> Any:
    """A tensor of an empty batch, with two rows of zeros."""
    return value.new_zeros((2, *value.shape[1:])) if isinstance(value, Tensor) and value.dim() > 0 else value
