"""`PrivacyEngine`: Opacus' engine, with per-sample clipping inside the compiled program."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import opacus
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpquant_compile.errors import IsolationError, PrivacySpecError, PrivateTrainingError
from dpquant_compile.privacy import checkpoint, validate
from dpquant_compile.privacy.accounting.ledger import Ledger
from dpquant_compile.privacy.accounting.payments import Payments
from dpquant_compile.privacy.accounting.replay_check import Releases, fingerprint
from dpquant_compile.privacy.clipping.bounds import Clipping
from dpquant_compile.privacy.clipping.runtime import Session
from dpquant_compile.privacy.data.criterion import PrivateCriterion
from dpquant_compile.privacy.data.poisson_loader import (
    Hooks,
    PoissonLoader,
    PrivateLoader,
    SharedUniform,
    private_loader,
    secure_uniform,
)
from dpquant_compile.privacy.distributed.world import World, copy_ledger, described
from dpquant_compile.privacy.hooks import refuse_hooks
from dpquant_compile.privacy.mechanism.gaussian import GaussianStream
from dpquant_compile.privacy.mechanism.optimizer import PrivateOptimizer
from dpquant_compile.privacy.mechanism.secret_bits import SecretBits

__all__ = ["Made", "PrivacyEngine"]

_BITS = b"dpquant bits v1"  # what the key of random bits is derived for


@dataclass(frozen=True)
class Made:
    """The private objects of one run, and the noise it began with; `criterion` is None if none was given.

    `default_physical` is None if max_physical_batch_size was given; else the default of one process alone: schedulers
    count in it, since ε must not hang on the number of processes.
    """

    session: Session
    optimizer: PrivateOptimizer
    loader: PrivateLoader
    noise: GaussianStream
    criterion: PrivateCriterion | None
    noise_multiplier: float
    world: World
    default_physical: int | None = None

    @property
    def sample_rate(self) -> float:
        """The q of a batch of the loader: only a Poisson draw makes a sample's presence a matter of chance."""
        return self.loader.sample_rate if isinstance(self.loader, PoissonLoader) else 1.0


class PrivacyEngine(opacus.PrivacyEngine):  # type: ignore[misc]  # Opacus has no types
    """Makes a compiled model, its optimizer, loss and data loader private.

    It is an `opacus.PrivacyEngine`: accountants, Poisson sampling, optimizers and checkpoints are Opacus'. What it
    replaces is how per-sample gradients are clipped: by one forward and one backward of the compiled program.

    `secure_mode=True` draws noise, Poisson samples and the bits of rounding from the operating system's entropy, by
    AES-256. Then a run cannot be repeated, and a resumed one goes on with new randomness.

    With a `ledger_path` the engine is the one owner of that file until `close()`, garbage collection or the end of the
    process. `with PrivacyEngine(…) as engine:` closes it at the end of the block.
    """

    def __init__(
        self,
        *,
        accountant: str = "prv",
        secure_mode: bool = False,
        ledger_path: str | Path | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
    ) -> None:
        """`ledger_path` keeps the ledger on disk, ahead of every spend; with a target, no spend may pass it."""
        with warnings.catch_warnings():
            # Opacus' secure mode needs a package that can no longer be installed; ours is another one.
            warnings.filterwarnings("ignore", message="Secure RNG turned off")
            super().__init__(accountant=accountant, secure_mode=False)
        self.secure_mode = secure_mode
        self.dataset: Any = None
        self._world = World.current()  # rank 0 has the ledger's file; what the others have is a copy
        self._on_disk = ledger_path is not None
        path = ledger_path if self._world.first else None
        self.ledger = Ledger(accountant, path, target_epsilon, target_delta)
        self.ledger.standing = validate.caveats(secure_mode)
        self._payments = Payments(self.ledger)
        self.scheduler: Any = None
        self.planned_epochs: int | None = None  # those that the noise was chosen for
        self._parts: Made | None = None
        self._bits: SharedUniform | None = None  # the secure randomness of sampling that processes have in common

    def close(self) -> None:
        """Let other engines open the ledger's file. ε and the statement stay readable; nothing more can be spent."""
        self.ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def accountant(self) -> Any:
        """Opacus' accountant with everything in it that the ledger holds; change the ledger, not this."""
        return self.ledger.opacus_accountant

    @accountant.setter
    def accountant(self, value: Any) -> None:
        """Opacus sets one when it begins; the ledger has its own."""

    @property
    def made(self) -> "Made":
        """What `make_private` has made."""
        if self._parts is None:
            raise PrivacySpecError("this engine has no model yet: call make_private first")
        return self._parts

    @property
    def session(self) -> Session:
        """The private session of the model."""
        return self.made.session

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        criterion: Callable[..., Any] | None = None,
        max_physical_batch_size: int | None = None,
        batch_first: bool = True,
        loss_reduction: str | None = None,
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        rand_on_empty: bool = False,
        constant_inputs: Mapping[str, Any] | None = None,
        varying_shapes: bool = False,
        **unknown: Any,
    ) -> Any:
        """Private versions of module, optimizer, criterion and loader, in this order; without a criterion three.

        module                   what `dpquant_compile.compile` gave; another nn.Module is compiled with budget 0
        criterion                a loss with a `reduction`; see `PrivateCriterion`
        max_physical_batch_size  the loader cuts each Poisson batch into micro-batches of at most this size, and the
                                 program is compiled for it; None takes what a batch hardly ever passes: the expected
                                 size and four standard deviations, of this process' share
        loss_reduction           "mean" or "sum"; None takes that of the criterion, or "mean"
        clipping                 "flat", "per_layer" (one bound per parameter, or one number for all) or "automatic"
        noise_generator          noise and rounding are reproducible from this generator's next number; not in secure
                                 mode
        constant_inputs          arguments of forward() that have no row per sample (a mask of positions, a flag), by
                                 name, with the value that every call gives; others without rows are refused. Those
                                 of the criterion's call are named "criterion.<name>"
        varying_shapes           whether rows of inputs may have other sizes from call to call; the statement says so.
                                 Not for batches that are padded to their longest sample: pad to a fixed length

        The rest is as in Opacus.
        """
        self.ledger.check_open()
        validate.refuse_unknown(unknown)
        if not batch_first:
            raise PrivacySpecError("batch_first=False: a compiled model takes dimension 0 of its inputs for the batch")
        if self.secure_mode and noise_generator is not None:
            raise PrivacySpecError(
                "noise_generator= makes the noise repeatable, which secure_mode=True is there to rule out"
            )
        world = World.current()
        validate.check_world(world, poisson_sampling)
        model = validate.compiled_module(module)
        parameters = validate.trainable(model, optimizer)
        holder: list[Session] = []
        reduction, wrapped = validate.reduction_of(criterion, loss_reduction, lambda: holder[0].rows)
        bounds = Clipping.build(clipping, max_grad_norm, list(parameters))

        secure = self.secure_mode and poisson_sampling
        self._bits = SharedUniform() if secure and world.size > 1 else None
        chosen = max_physical_batch_size
        default = validate.roomy(data_loader) if chosen is None else None
        limit = validate.roomy(data_loader, world.size) if chosen is None else chosen
        loader = private_loader(
            data_loader,
            max_physical_batch_size=limit,
            poisson_sampling=poisson_sampling,
            listener=lambda micro: holder[0].announce(micro),
            hooks=Hooks(
                lambda: self._begin(holder[0]),
                lambda: self._pay(holder[0]),
                lambda: self.agree("at the end of an epoch"),
            ),
            sampler_bits=(self._bits or secure_uniform) if secure else None,
            distributed=world.size > 1,
            rand_on_empty=rand_on_empty,
        )
        self._check_dataset(loader)
        noise = GaussianStream.secure() if self.secure_mode else GaussianStream.from_generator(noise_generator)
        session = Session(
            model,
            parameters,
            bounds,
            limit,
            wrapped.reduction != "sum" if wrapped else reduction == "mean",
            bits=SecretBits(noise.derived_key(_BITS), world.rank),
            constant_inputs=validate.pin_criterion(wrapped, constant_inputs or {}, varying_shapes),
            varying_shapes=varying_shapes,
        )
        refuse_hooks(model)
        holder.append(session)
        private = PrivateOptimizer(
            optimizer.original_optimizer if isinstance(optimizer, PrivateOptimizer) else optimizer,
            session=session,
            noise=noise,
            noise_multiplier=noise_multiplier,
            expected_batch_size=loader.expected_batch_size,
            loss_reduction=reduction,
            settle=self._settle,
            released=lambda values: self._payments.release_of_step(world, values),
            secure_mode=self.secure_mode,
            world=world,
        )
        self.ledger.standing = validate.caveats(self.secure_mode, poisson_sampling, varying_shapes)
        session.begin()
        self._parts = Made(session, private, loader, noise, wrapped, noise_multiplier, world, default)
        self.planned_epochs = None
        self._join()
        session.constants.freeze()
        return (model, private, loader) if wrapped is None else (model, private, wrapped, loader)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | Sequence[float],
        **options: Any,
    ) -> Any:
        """`make_private` with the least noise that keeps `epochs` epochs within (target_epsilon, target_delta).

        The target becomes the ledger's, so nothing may pass it. Analyses of a scheduler are not planned for here: with
        one, which warns of it, take the noise multiplier from `dpquant_compile.plan`.
        """
        if self.ledger.entries:
            warnings.warn(
                "this engine has spent privacy already, which target_epsilon does not count: give a new PrivacyEngine "
                "to each run",
                stacklevel=2,
            )
        target, steps = (target_epsilon, target_delta), epochs * len(data_loader)
        multiplier = validate.least_noise(target, 1 / len(data_loader), steps, self.accountant.mechanism())
        if self.ledger.target_epsilon is None:
            self.ledger.set_target(target_epsilon, target_delta)
        made = self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=multiplier,
            max_grad_norm=max_grad_norm,
            **options,
        )
        self.planned_epochs = epochs
        return made

    def _join(self) -> None:
        """Begin a run of several processes: the same settings, checked, and model and ledger of rank 0."""
        world, model = self.made.world, self.made.session.model
        if world.size == 1:
            return
        if self._on_disk and world.size != self._world.size:
            raise PrivacySpecError(
                "this engine was made before torch.distributed.init_process_group(), so every process has opened the "
                "ledger's file, which only rank 0 may. Fix: call init_process_group first"
            )
        settings = {**checkpoint.config_of(self), "dataset": described(self.dataset), "policy": sorted(model.policy)}
        world.agree("in make_private", settings)
        world.copy_first([*model.parameters(), *model.buffers()])
        self._share_bits()
        model.step = world.on_first("the step of the model, at make_private", lambda: model.step)
        copy_ledger(world, self.ledger)

    def _share_bits(self) -> None:
        """Let rounding, random operators and probes draw by a key that comes of the noise's; all processes by one."""
        made = self.made
        key = made.world.on_first("the key of random bits", lambda: made.noise.derived_key(_BITS))
        made.session.take_bits(SecretBits(key, made.world.rank))

    def _begin(self, session: Session) -> None:
        """Let all processes draw the same batches in the epoch that begins."""
        self._check_newest(session)
        made = self.made
        if self._bits is not None:
            self._bits.take_key(made.world.on_first("the batches of an epoch", lambda: os.urandom(32)))
        elif made.world.size > 1 and made.loader.generator is not None:
            state = made.world.on_first("the batches of an epoch", made.loader.generator.get_state)
            made.loader.generator.set_state(state)

    def agree(self, when: str) -> None:
        """Raise `DistributedError` on every process unless all have the same policy, scores, ledger and parameters."""
        made = self.made
        if made.world.size == 1:
            return
        facts = {
            "policy": sorted(made.session.model.policy),
            "ledger": [f"{e.steps} {e.purpose} q={e.q!r} sigma={e.sigma!r}" for e in self.ledger.entries],
            "parameters": fingerprint(list(made.session.model.parameters())),
            "scores": None if self.scheduler is None else self.scheduler.scores,
        }
        made.world.agree(when, facts)

    def get_epsilon(self, delta: float) -> float:
        """ε of all that was spent, training and analyses, at `delta`."""
        return self.ledger.epsilon(delta)

    def _check_newest(self, session: Session) -> None:
        """Refuse a loader of an earlier `make_private`: its batches have another sampling rate than is charged."""
        if session is not self.made.session:
            raise PrivateTrainingError(
                "this loader belongs to an earlier make_private, and batches are charged by the sampling rate of the "
                "last one. Fix: iterate over the loader that the last make_private returned"
            )

    def _pay(self, session: Session) -> None:
        """Account for a training step of this session before its data is read."""
        self._check_newest(session)
        made = self.made
        sigma = made.optimizer.noise_multiplier
        self.spend("training", q=1.0 if made.session.by_hand else made.sample_rate, sigma=sigma)
        made.session.paid = sigma

    def spend(self, purpose: str, *, q: float, sigma: float) -> None:
        """Record a release that is about to be made, before its data is read."""
        self._payments.spend(self.made.world, self.renew, purpose, q=q, sigma=sigma)

    def renew(self) -> None:
        """Take randomness that was never used, for a run that no longer repeats a recorded one; on all processes.

        The same noise on another sum would bare the difference, and batches that came again would not be the
        independent draws that the accountant counts.
        """
        made = self.made
        made.loader.check_not_ahead()
        made.noise.renew()
        seed = made.world.on_first("a new seed", lambda: int.from_bytes(os.urandom(8), "big") >> 1)
        if made.loader.generator is not None:
            made.loader.generator.manual_seed(seed)
        self._share_bits()

    def _settle(self) -> None:
        """See to it that the step that is about to add noise is accounted for, with that noise."""
        session, optimizer = self.made.session, self.made.optimizer
        if session.draws_random:
            self.ledger.add_caveat(validate.DRAWS_RANDOM)
        if session.paid is None or session.by_hand:  # batches not of the loader, or a second step for one
            self._pay(session)
        elif session.paid != optimizer.noise_multiplier:
            raise PrivateTrainingError(
                f"noise_multiplier is {optimizer.noise_multiplier:g} now, but this batch was accounted for with "
                f"{session.paid:g}. Fix: change it between batches, after optimizer.step()"
            )
        session.paid = None

    def release(self, values: Sequence[Tensor]) -> None:
        """Note noised values that are about to be used; a resumed run must repeat those that were noted before."""
        self._payments.release(values)

    @property
    def releases(self) -> Releases:
        """The fingerprints of releases, beside the ledger's file if it has one; those of rank 0 are used."""
        return self._payments.releases

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, in tensors and plain types: see `checkpoint`."""
        return checkpoint.state_of(self)

    def load_state_dict(self, state: Mapping[str, Any], *, replay: bool = True) -> None:
        """Go on from `state_dict()`; call it after `make_private`, and after making the scheduler if there is one.

        With `replay` the run goes through the steps since the checkpoint as before, bit for bit, and is not charged for
        them again. Without it noise is new, and everything counts: for a run that goes on in another way.
        """
        checkpoint.load_into(self, state, replay and not self.secure_mode)
        self._share_bits()
        self.session.constants.take_loaded(state["model"])

    def save_checkpoint(self, *, path: Any, checkpoint_dict: dict[str, Any] | None = None, **ignored: Any) -> None:
        """Write `state_dict()`, whole or not at all; `checkpoint_dict` is for what else should be in it.

        One process writes a file. Several write a folder, which all of them must see, and all must call this.
        """
        checkpoint.save(self, path, checkpoint_dict or {})

    def load_checkpoint(self, *, path: Any, replay: bool = True, **ignored: Any) -> dict[str, Any]:
        """Read what `save_checkpoint` wrote, on any number of processes; the rest of it comes back.

        See `load_state_dict` for `replay`. On another number of processes sums differ in their last bits, so nothing is
        repeated: if there may have been releases since the checkpoint, noise is new, and all counts that the ledger on
        disk has. Without one, releases after the checkpoint are not counted, as the statement then says.
        """
        state = checkpoint.read(path)
        self.load_state_dict(state.pop("dpquant"), replay=replay)
        return state

    def validate(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> None:
        """Refuse a model that is known to mix samples; the proof is made at the first training forward."""
        validate.refuse_batch_norm(module)

    def is_compatible(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> bool:
        """Whether `validate` would pass."""
        try:
            self.validate(module=module)
        except IsolationError:
            return False
        return True

    def _check_dataset(self, loader: PrivateLoader) -> None:
        if self.dataset is not None and self.dataset is not loader.dataset:
            warnings.warn(
                "this engine has accounted for another dataset; use a new PrivacyEngine unless both are the same data",
                stacklevel=3,
            )
        self.dataset = loader.dataset
