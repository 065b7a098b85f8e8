"""`PrivacyEngine`: Opacus' engine, with per-sample clipping inside the compiled program."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import opacus
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpquant_compile.errors import (
    DistributedError,
    IsolationError,
    PerSampleGradientError,
    PrivacySpecError,
    PrivateTrainingError,
)
from dpquant_compile.privacy import checkpoint, validate
from dpquant_compile.privacy.accounting.accountants import check_accountant
from dpquant_compile.privacy.accounting.ledger import Ledger
from dpquant_compile.privacy.accounting.payments import Payments
from dpquant_compile.privacy.accounting.replay_check import Releases
from dpquant_compile.privacy.clipping.bounds import Clipping
from dpquant_compile.privacy.clipping.runtime import Session
from dpquant_compile.privacy.data.poisson_loader import (
    Hooks,
    PrivateLoader,
    SharedUniform,
    private_loader,
    secure_uniform,
)
from dpquant_compile.privacy.distributed.shards import Shards
from dpquant_compile.privacy.distributed.world import World, copy_ledger, described
from dpquant_compile.privacy.hooks import refuse_hooks
from dpquant_compile.privacy.mechanism.gaussian import GaussianStream
from dpquant_compile.privacy.mechanism.optimizer import PrivateOptimizer
from dpquant_compile.privacy.mechanism.secret_bits import SecretBits
from dpquant_compile.privacy.run import Run, Step

__all__ = ["PrivacyEngine"]

_BITS = b"dpquant bits v1"  # label from which the key of random bits is derived
_MARK = b"dpquant mark v1"  # label of what shows whether two processes have the same key


class PrivacyEngine(opacus.PrivacyEngine):  # type: ignore[misc]  # Opacus has no types
    """Makes a compiled model, its optimizer, loss and data loader private.

    It is an `opacus.PrivacyEngine`: accountants, Poisson sampling and optimizers are Opacus'. Clipping of per-sample
    gradients is not: one forward and one backward of the compiled program clip them. Checkpoints have a format of their
    own.

    `secure_mode=True` draws noise, Poisson samples and rounding bits by AES-256 from the operating system's entropy.
    Such a run cannot be repeated, and a resumed one continues with new randomness.

    Guarantee: nothing that depends on the data leaves a run unless the ledger has a spend for it. `spend` records one
    before data is read; `release` refuses values that no spend pays for. These must stay secret: batches, sums before
    noise, the keys of noise and random bits, and losses on training data.

    With a `ledger_path` the engine owns that file exclusively until `close()`, garbage collection or the end of the
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
        """`ledger_path` stores the ledger on disk, before every spend; with a target, spends above it are refused."""
        check_accountant(accountant)
        with warnings.catch_warnings():
            # Opacus' secure mode needs a package that can no longer be installed; this engine has its own.
            warnings.filterwarnings("ignore", message="Secure RNG turned off")
            super().__init__(accountant=accountant, secure_mode=False)
        self.secure_mode = secure_mode
        self.dataset: Any = None
        self._world = World.current()  # rank 0 has the ledger's file; the others have a copy
        self._on_disk = ledger_path is not None
        path = ledger_path if self._world.first else None
        self.ledger = Ledger(accountant, path, target_epsilon, target_delta)
        self.ledger.standing = validate.caveats(secure_mode)
        self._payments = Payments(self.ledger)
        self.scheduler: Any = None
        self.planned_epochs: int | None = None  # the epochs that the noise was chosen for
        self._run: Run | None = None

    def close(self) -> None:
        """Release the ledger's file for other engines. ε and the statement stay readable; spending is refused."""
        self.ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def accountant(self) -> Any:
        """Opacus' accountant with everything that the ledger holds; change the ledger, not this."""
        return self.ledger.opacus_accountant

    @accountant.setter
    def accountant(self, value: Any) -> None:
        """Ignored: Opacus sets an accountant in its constructor, and the ledger has its own."""

    @property
    def run(self) -> Run:
        """The run that the last `make_private` made."""
        if self._run is None:
            raise PrivacySpecError("this engine has no model yet: call make_private first")
        return self._run

    @property
    def session(self) -> Session:
        """The private session of the model."""
        return self.run.session

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
        """Private versions of module, optimizer, criterion and loader, in this order; no criterion if none is given.

        module                   the result of `dpquant_compile.compile`; another nn.Module is compiled with budget 0.
                                 By `fully_shard`, each process keeps shards of it, and steps those
        criterion                a loss with a `reduction`; see `PrivateCriterion`
        max_physical_batch_size  the loader cuts each Poisson batch into micro-batches of at most this size, and the
                                 program is compiled for it; None: large enough for whole batches. All batches have the
                                 same number of micro-batches, some of which may be empty: see `PrivateLoader`
        loss_reduction           "mean" or "sum"; None: that of the criterion, or "mean". A mean that the loop takes by
                                 itself, without a criterion or of its "none", is for full precision alone
        clipping                 "flat", "per_layer" (one bound per parameter, or one number for all) or "automatic"
        noise_generator          noise and rounding are reproducible from this generator's next number; not in secure
                                 mode
        constant_inputs          arguments of forward() without a row per sample (a mask of positions, a flag), by name,
                                 with the value that every call gives; undeclared ones are refused. Arguments of the
                                 criterion's call are named "criterion.<name>"
        varying_shapes           whether rows of inputs may change their size from call to call; the statement says so.
                                 Not for batches that are padded to their longest sample: pad to a fixed length

        The rest is as in Opacus.
        """
        self.ledger.check_open()
        validate.refuse_unknown(unknown)
        if not batch_first:
            raise PrivacySpecError("batch_first=False: dimension 0 of a compiled model's inputs is always the batch")
        if self.secure_mode and noise_generator is not None:
            raise PrivacySpecError(
                "noise_generator= makes the noise repeatable, and secure_mode=True forbids that. Fix: leave one out"
            )
        world = World.current()
        validate.check_world(world, poisson_sampling)
        model = validate.compiled_module(module, world)
        validate.refuse_variants(model)
        parameters = validate.trainable(model, optimizer)
        bounds = Clipping.build(clipping, max_grad_norm, list(parameters))
        step = Step(bounds.sensitivity)
        reduction, wrapped = validate.reduction_of(criterion, loss_reduction, model, step)
        given = max_physical_batch_size
        default = validate.whole_batch if poisson_sampling else validate.roomy
        physical = default(data_loader, world.size) if given is None else given
        session = Session(
            model,
            parameters,
            bounds,
            physical,
            validate.divided_by_loop(wrapped, reduction, model),
            step=step,
            gradient=None if wrapped is None else wrapped.gradient,
            constant_inputs=validate.pin_criterion(wrapped, constant_inputs or {}, varying_shapes),
            varying_shapes=varying_shapes,
            shards=model.storage if isinstance(model.storage, Shards) else None,
        )
        hooks = _RunHooks(self, session)
        secure = self.secure_mode and poisson_sampling
        shared = SharedUniform() if secure and world.size > 1 else None
        # The loader comes before the noise: where both are seeded by torch's generator, it draws first.
        loader = private_loader(
            data_loader,
            max_physical_batch_size=physical,
            poisson_sampling=poisson_sampling,
            listener=session.announce,
            hooks=hooks,
            sampler_bits=(shared or secure_uniform) if secure else None,
            distributed=world.size > 1,
            rand_on_empty=rand_on_empty,
        )
        self._check_dataset(loader)
        noise = GaussianStream.secure() if self.secure_mode else GaussianStream.from_generator(noise_generator)
        refuse_hooks(model)
        private = PrivateOptimizer(
            optimizer.original_optimizer if isinstance(optimizer, PrivateOptimizer) else optimizer,
            session=session,
            noise=noise,
            noise_multiplier=noise_multiplier,
            expected_batch_size=loader.expected_batch_size,
            loss_reduction=reduction,
            account=hooks,
            secure_mode=self.secure_mode,
            world=world,
        )
        self.ledger.standing = validate.caveats(self.secure_mode, poisson_sampling, varying_shapes)
        session.attach(SecretBits(noise.derived_key(_BITS), world.rank))
        self._run = Run(
            step=step,
            session=session,
            optimizer=private,
            loader=loader,
            criterion=wrapped,
            noise=noise,
            world=world,
            shared_uniform=shared,
            clipping=bounds,
            loss_reduction=reduction,
            # Only Poisson sampling makes the presence of a sample random.
            sample_rate=loader.sample_rate if poisson_sampling else 1.0,
            noise_multiplier=noise_multiplier,
            physical=physical,
            default_physical=validate.roomy(data_loader) if given is None else None,
        )
        self.planned_epochs = None
        self._join()
        with model.whole_parameters():
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

        The target becomes the ledger's: a spend above it is refused. This does not plan for a scheduler's analyses, and
        a scheduler warns of that: with one, take the noise multiplier from `dpquant_compile.plan`.
        """
        if self.ledger.entries:
            warnings.warn(
                "this engine has spent privacy already, which target_epsilon does not count. Fix: use a new "
                "PrivacyEngine for each run",
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
        """Start a run of several processes: check that settings are equal, and copy model and ledger of rank 0."""
        world, model = self.run.world, self.run.session.model
        if world.size == 1:
            return
        if self._on_disk and world.size != self._world.size:
            raise PrivacySpecError(
                "this engine was made before torch.distributed.init_process_group(), so every process has opened the "
                "ledger's file, which only rank 0 may do. Fix: call init_process_group first"
            )
        settings = {**checkpoint.config_of(self), "dataset": described(self.dataset), "policy": sorted(model.policy)}
        world.agree("in make_private", settings)
        shards = self.run.session.shards
        apart = set() if shards is None else set(map(id, shards.stored))  # of each process' own
        world.copy_first([*(p for p in model.parameters() if id(p) not in apart), *model.buffers()])
        self._share_keys()
        model.step = world.on_first("the step of the model, at make_private", lambda: model.step)
        copy_ledger(world, self.ledger)

    def _share_keys(self) -> None:
        """Make the secrets of the processes those of one run, after each change of the noise's key.

        Seeded noise is that of rank 0 on all processes. In secure mode each has a key of its own, which never leaves
        it. The key of rounding, random operators and probes is derived from rank 0's, and is the same on all.

        Guarantee: keys of secure noise differ between processes, also if their machines began with the same entropy.
        """
        run, world = self.run, self.run.world
        state = world.on_first("the seed of the noise", run.noise.state_dict)
        if not world.first and not run.noise.is_secure:
            run.noise.load_state_dict(state)
        marks = world.gathered(run.noise.derived_key(_MARK))
        if run.noise.is_secure and len(set(marks)) < world.size:
            raise DistributedError(
                "two processes got the same key for their noise from the operating system, as copies of one virtual "
                "machine do. Fix: start their machines so that each has entropy of its own"
            )
        key = world.on_first("the key of random bits", lambda: run.noise.derived_key(_BITS))
        run.session.take_bits(SecretBits(key, world.rank))

    def agree(self, when: str) -> None:
        """Raise `DistributedError` on every process unless all have the same policy, scores, ledger and parameters."""
        run = self.run
        if run.world.size == 1:
            return
        facts = {
            "policy": sorted(run.session.model.policy),
            "ledger": [f"{e.steps} {e.purpose} q={e.q!r} sigma={e.sigma!r}" for e in self.ledger.entries],
            "parameters": run.session.printed_parameters(),
            "scores": None if self.scheduler is None else self.scheduler.scores,
        }
        run.world.agree(when, facts)

    def get_epsilon(self, delta: float) -> float:
        """ε of all that was spent, training and analyses, at `delta`."""
        return self.ledger.epsilon(delta)

    def spend(self, purpose: str, *, q: float, sigma: float) -> None:
        """Record a release before its data is read."""
        self._payments.spend(self.run.world, self.renew, purpose, q=q, sigma=sigma)

    def renew(self) -> None:
        """Switch to unused randomness, on all processes, for a run that no longer repeats a recorded one.

        The same noise on another sum would reveal the difference of the two sums, and repeated batches would not be the
        independent draws that the accountant assumes.
        """
        run = self.run
        run.loader.check_not_ahead()
        run.noise.renew()
        seed = run.world.on_first("a new seed", lambda: int.from_bytes(os.urandom(8), "big") >> 1)
        if run.loader.generator is not None:
            run.loader.generator.manual_seed(seed)
        self._share_keys()

    def release(self, values: Sequence[Tensor]) -> None:
        """Record noised values before they are used; a resumed run must repeat those that were recorded before."""
        self._payments.note(values)

    @property
    def releases(self) -> Releases:
        """Fingerprints of releases, stored beside the ledger's file if it has one; those of rank 0 are used."""
        return self._payments.releases

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, in tensors and plain types: see `checkpoint`."""
        return checkpoint.state_of(self)

    def load_state_dict(self, state: Mapping[str, Any], *, replay: bool = True) -> None:
        """Continue from `state_dict()`. Call it after `make_private`, and after making the scheduler if there is one.

        With `replay` the run repeats the steps since the checkpoint bit for bit, and is not charged for them again.
        Without it, noise is new and every step is charged: for a run that continues differently.
        """
        checkpoint.load_into(self, state, replay and not self.secure_mode)
        self._share_keys()
        with self.session.model.whole_parameters():
            self.session.constants.take_loaded(state["model"])

    def save_checkpoint(self, *, path: Any, checkpoint_dict: dict[str, Any] | None = None, **ignored: Any) -> None:
        """Write `state_dict()` atomically, with the entries of `checkpoint_dict` beside it.

        One process writes a file. Several write a folder, which all of them must see, and all must call this.
        """
        checkpoint.save(self, path, checkpoint_dict or {})

    def load_checkpoint(self, *, path: Any, replay: bool = True, **ignored: Any) -> dict[str, Any]:
        """Read what `save_checkpoint` wrote, on any number of processes; returns the entries of `checkpoint_dict`.

        See `load_state_dict` for `replay`. On another number of processes sums differ in their last bits, so nothing is
        repeated: if there may have been releases since the checkpoint, noise is new, and everything in the ledger on
        disk counts. Without a ledger on disk, releases after the checkpoint are not counted; the statement says so.
        """
        state = checkpoint.read(path)
        self.load_state_dict(state.pop("dpquant"), replay=replay)
        return state

    def validate(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> None:
        """Refuse a model that is known to mix samples; the proof is made at the first training forward."""
        validate.refuse_layers(module)

    def is_compatible(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> bool:
        """Whether `validate` would pass."""
        try:
            self.validate(module=module)
        except (IsolationError, PerSampleGradientError):
            return False
        return True

    def _check_dataset(self, loader: PrivateLoader) -> None:
        if self.dataset is not None and self.dataset is not loader.dataset:
            warnings.warn(
                "this engine has accounted for another dataset. Fix: use a new PrivacyEngine, if the data differs",
                stacklevel=3,
            )
        self.dataset = loader.dataset


class _RunHooks(Hooks):
    """Called by the loader and the optimizer of one run; charges its steps to the ledger of its engine.

    Guarantee: a step is charged with the current noise multiplier, and with q = 1 where a sum holds samples that were
    not drawn by sampling. Only the newest run of an engine can spend, since the account uses its sampling rate.
    """

    def __init__(self, engine: PrivacyEngine, session: Session) -> None:
        self._engine = engine
        self._session = session

    def begin_epoch(self) -> None:
        """Forget what was given by hand before, and make all processes draw the same batches."""
        run = self._newest()
        run.session.announce(None)
        if run.shared_uniform is not None:
            run.shared_uniform.take_key(run.world.on_first("the batches of an epoch", lambda: os.urandom(32)))
        elif run.world.size > 1 and run.loader.generator is not None:
            state = run.world.on_first("the batches of an epoch", run.loader.generator.get_state)
            run.loader.generator.set_state(state)

    def pay(self) -> None:
        """Account for a training step before its data is read."""
        run = self._newest()
        sigma = run.optimizer.noise_multiplier
        self._engine.spend("training", q=1.0 if run.step.by_hand else run.sample_rate, sigma=sigma)
        run.step.pay(sigma)

    def end_epoch(self) -> None:
        """Check that all processes agree."""
        self._engine.agree("at the end of an epoch")

    def settle(self) -> None:
        """Account for the step that is about to add noise, if its batch was given by hand or had a step already."""
        if self._session.draws_random:
            self._engine.ledger.add_caveat(validate.DRAWS_RANDOM)
        if own := self._session.own_rules:
            self._engine.ledger.add_caveat(validate.own_rules(own))
        if self._session.step.paid is None:
            self.pay()

    def note(self, values: Sequence[Tensor]) -> None:
        """Record noised sums that are about to be used."""
        self._engine._payments.note_step(self._engine.run.world, values)

    def _newest(self) -> Run:
        """The engine's run; raises unless these hooks belong to it."""
        run = self._engine.run
        if run.session is not self._session:
            raise PrivateTrainingError(
                "this loader or optimizer belongs to an earlier make_private, but steps are charged with the sampling "
                "rate of the last one. Fix: use the loader and the optimizer that the last make_private returned"
            )
        return run
