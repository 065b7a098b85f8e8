"""`PrivateOptimizer`: Opacus' optimizer over sums that the compiled program has clipped already."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor
from torch.optim import Optimizer

from dpquant_compile.errors import PrivacySpecError, PrivateTrainingError
from dpquant_compile.privacy.accelerate_guard import PreparedForAccelerate, check_accumulation
from dpquant_compile.privacy.clipping.bounds import is_number
from dpquant_compile.privacy.clipping.runtime import Session
from dpquant_compile.privacy.distributed.shards import local_part, own_values
from dpquant_compile.privacy.distributed.world import World, call_roll, wide_sums
from dpquant_compile.privacy.lightning_guard import check_closure
from dpquant_compile.privacy.mechanism.gaussian import GaussianStream, Part

__all__ = ["Account", "PrivateOptimizer", "add_part"]


class Account(Protocol):
    """What an optimizer needs of the account of a run; each method may refuse by raising."""

    def settle(self) -> None:
        """See to it that the release that is about to be made is paid for."""

    def note(self, values: list[Tensor]) -> None:
        """Take note of noised sums that are about to be used."""


class PrivateOptimizer(PreparedForAccelerate, DPOptimizer):  # type: ignore[misc]  # Opacus has no types
    """Wraps any torch optimizer: noise, the public divisor, accounting, and the steps of logical batches.

    A step within a logical batch does nothing; the one at its end spends privacy, adds noise once, divides by the
    expected batch size, which is public, and lets the wrapped optimizer step.

    Guarantee: what it releases is the sum of clipped gradients of a logical batch plus Gaussian noise of standard
    deviation noise_multiplier · `session.sensitivity`, which is the most that one sample adds to the sum. `add_noise`
    alone does so: the account has a payment before noise is drawn, and knows the noised values before anything uses
    them. The sum itself must stay secret.

    On several processes each draws the noise of its part of the values, in secure mode from a key that no other process
    has. Before anything uses a sum, the processes have compared where their noise comes from and shown which part each
    has noised: every value got noise once, from one of them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        session: Session,
        noise: GaussianStream,
        noise_multiplier: float,
        expected_batch_size: int,
        loss_reduction: str,
        account: Account,
        secure_mode: bool = False,
        world: World | None = None,
    ) -> None:
        if not is_number(noise_multiplier) or not math.isfinite(noise_multiplier) or noise_multiplier < 0:
            raise PrivacySpecError(f"noise_multiplier={noise_multiplier!r}: give a finite number, zero or more")
        self.session = session
        self.noise = noise
        self.world = world or World()
        self._left: dict[str, tuple[Tensor, int]] = {}  # gradients after the last step, and their versions
        self._account = account
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=session.clipping.sensitivity,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            secure_mode=secure_mode,
        )

    @property
    def grad_samples(self) -> list[Tensor]:
        raise PrivateTrainingError(
            "there are no per-sample gradients to look at: the compiled program clips and sums them without making "
            "them. "
            "Their clipped sum is parameter.summed_grad"
        )

    @property
    def accumulated_iterations(self) -> int:
        return 1  # micro-batches are parts of one logical batch, whatever their number

    @property
    def max_grad_norm(self) -> float:
        """The most that one sample adds to the sum; schedules may set it between steps."""
        return self.session.step.next_bound

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        if not is_number(value) or not math.isfinite(value) or value <= 0:
            raise PrivacySpecError(f"max_grad_norm={value!r}: give a finite number greater than zero")
        self.session.step.set_bound(float(value))

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Refuse what Opacus' BatchMemoryManager does."""
        raise PrivateTrainingError(
            "the loader that make_private returned cuts batches into micro-batches itself, and the optimizer knows "
            "which "
            "step is the last. Fix: give max_physical_batch_size to make_private, and leave BatchMemoryManager out"
        )

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last `step` did nothing, since its micro-batch was not the last of its logical batch."""
        return bool(self._is_last_step_skipped)

    @property
    def optimizer(self) -> "PrivateOptimizer":
        """Itself: accelerate looks here for the optimizer of a learning-rate scheduler."""
        return self

    def clip_and_accumulate(self) -> None:
        """Nothing: backward has done it."""

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Whether the wrapped optimizer shall step; if so, gradients are there, with noise."""
        if self.session.step.incomplete:
            self._is_last_step_skipped = True
            return False
        self.add_noise()
        self.scale_grad()
        if self.step_hook:
            self.step_hook(self)
        self._is_last_step_skipped = False
        return True

    def add_noise(self) -> None:
        """Account for a release, and set every gradient to its clipped sum over all processes plus noise.

        Sums are added up here, once per logical batch: before its last backward none is final. Each process adds the
        noise of its own part of the values to its own sums. `step` calls this; a call by hand is a release like any
        other, and is charged.
        """
        self._check_parameters()
        for name, grad in self._gradients():
            if not self._ours(name, grad):
                self.session.checks.refuse(local_part(grad).count_nonzero() > 0, partial(_stray, name))
        # Before any noise is drawn: an exception must not leave a noised gradient behind that nobody has paid for.
        self._settle()
        sums = self.session.take_sums(self.noise_multiplier)
        call_roll(self.world, self.session, self._facts())
        if self.world.size > 1 and self.session.step.by_hand:  # on all processes, as the roll has shown
            raise PrivateTrainingError(
                f"batches that did not come from the loader, on {self.world.size} processes: a sample that two of them "
                "have counts twice, and the noise is for once. Fix: take batches from the loader that make_private "
                "returned, or train on one process"
            )
        used = [n for n, p in self.session.stored.items() if p.requires_grad and self.session.uses(n)]
        parameters = [self.session.stored[name] for name in used]
        std = self.noise_multiplier * self.session.sensitivity
        wide = wide_sums(self.session, sums, used)
        grads = self._added_up(wide, std) if self.session.shards is None else self._scattered(wide, std, parameters)
        noised = [grad.to(p.dtype) for p, grad in zip(parameters, grads, strict=True)]
        self._account.note(noised if self.session.shards is None else [self.session.shards.printed(noised)])
        for parameter, grad in zip(parameters, noised, strict=True):
            parameter.grad = grad
        self.world.count_step()
        self.session.drop_sums()  # a second step must not release the same sum again

    def _added_up(self, sums: Sequence[Tensor], std: float) -> list[Tensor]:
        """The sums over all processes, with noise, on each."""
        part = Part.of(sum(total.numel() for total in sums), self.world.rank, self.world.size)
        noisy = add_part(self.noise, sums, std, part)
        return self.world.sum_parts(noisy, part.start, part.stop, part.whole)

    def _scattered(self, sums: Sequence[Tensor], std: float, like: Sequence[Tensor]) -> list[Tensor]:
        """The same in shards: the values of each process with the noise that they have in `_added_up`."""
        shards = self.session.shards
        assert shards is not None
        cuts = [own_values(total.shape, self.world.rank, self.world.size) for total in sums]
        starts = [0, *itertools.accumulate(total.numel() for total in sums)]
        places = [(start + first, start + last) for start, (first, last) in zip(starts[:-1], cuts, strict=True)]
        drawn = self.noise.normals_at(places, starts[-1], std)
        noise = [one.to(total.device, total.dtype) for one, total in zip(drawn, sums, strict=True)]
        own = shards.scatter(sums, noise, cuts)
        return [shards.like(stored, one) for stored, one in zip(like, own, strict=True)]

    def _settle(self) -> None:
        self.session.check_attached()
        self._account.settle()

    def _facts(self) -> dict[str, Any]:
        """What must be the same on all processes for their sums to be one release; a process alone has none."""
        if self.world.size == 1:
            return {}
        model = self.session.internals.original
        return {
            "processes": self.world.size,
            "noise": self.noise.place,
            "model.step": self.session.model.step,
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.session.sensitivity,
            "batches from the loader": not self.session.step.by_hand,
            "policy": sorted(self.session.model.policy),
            "parameters": self.session.printed_parameters(),
            "shards written to": self.session.shards is not None and self.session.shards.changed,
            **{f"train() of {name or 'the model'!r}": module.training for name, module in model.named_modules()},
            **{f"requires_grad of {name!r}": parameter.requires_grad for name, parameter in model.named_parameters()},
        }

    def _check_parameters(self) -> None:
        """Refuse parameters that the wrapped optimizer would step and the session does not clip."""
        known = {id(parameter) for parameter in self.session.stored.values()}
        for group in self.original_optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in known:
                    raise PrivateTrainingError(
                        f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that was frozen, or not "
                        "there, "
                        "when make_private was called, so its gradients are not clipped. Fix: call make_private again "
                        "after unfreezing or adding parameters"
                    )
                if id(parameter) not in known and parameter.grad is not None:
                    raise PrivateTrainingError(
                        f"the optimizer holds parameter {self._name(parameter)}, which is not trained privately but "
                        "has a gradient from before: the step would use it as it is, neither clipped nor noised. Fix: "
                        "parameter.grad = None, or optimizer.zero_grad(), after freezing it"
                    )

    def _name(self, parameter: Tensor) -> str:
        named = self.session.model.named_parameters()
        return next((repr(name) for name, own in named if own is parameter), f"of shape {tuple(parameter.shape)}")

    def _ours(self, name: str, grad: Tensor) -> bool:
        """Whether a gradient is the last step's as it was left: autograd adds to one that is there."""
        return grad is self._left.get(name, (None, 0))[0] and grad._version == self._left[name][1]

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients that parameters have, also those that autograd has left in whole ones of shards."""
        for name, stored in self.session.stored.items():
            for parameter in dict.fromkeys((stored, self.session.parameters[name])):
                if parameter.grad is not None:
                    yield name, parameter.grad

    def scale_grad(self) -> None:
        """Divide by the expected batch size where the loss is a mean."""
        if self.loss_reduction == "mean":
            grads = [p.grad for p in self.session.stored.values() if p.grad is not None]
            torch._foreach_div_(grads, float(self.expected_batch_size))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; the sums of a logical batch that is under way stay."""
        step = self.session.step
        if not (step.begun or step.incomplete):
            self.session.drop_sums()
        self.original_optimizer.zero_grad(set_to_none)
        if self.session.shards is not None:  # autograd leaves gradients in whole parameters, which only we can clear
            for whole in self.session.parameters.values():
                whole.grad = None
        # Gradients that are gone need no watching; their memory is free for the next ones.
        held = self.session.stored
        self._left = {name: left for name, left in self._left.items() if held[name].grad is left[0]}

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """As Opacus' optimizers step. A trainer that would take other steps than the plain loop is refused."""
        check_accumulation()
        if closure is not None:
            check_closure(closure, self)
            with torch.enable_grad():
                closure()
        if not self.pre_step():
            return None
        self._note_gradients()  # if the wrapped optimizer raises, they are still known as ours
        result = self.original_optimizer.step()
        self._note_gradients()
        self.session.gather()
        return result

    def _note_gradients(self) -> None:
        grads = ((name, parameter.grad) for name, parameter in self.session.stored.items())
        self._left = {name: (grad, grad._version) for name, grad in grads if grad is not None}

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PrivateTrainingError(
            "a private optimizer can be neither copied nor pickled: it belongs to its model, engine and account. Fix: "
            "optimizer.state_dict(), or engine.save_checkpoint(...) for the whole run"
        )


def _stray(name: str) -> str:
    return (
        f"parameter {name!r} has a gradient that did not come through the private program, so it was not "
        "clipped: the model was in eval(), or a loss reaches the parameter around it, as a penalty on weights "
        "does. Fix: model.train() before the loop, and after an evaluation; weight_decay= of the optimizer for "
        "a penalty; parameters only inside the model's forward(); optimizer.zero_grad() before the first step"
    )


def add_part(noise: GaussianStream, sums: Sequence[Tensor], std: float, part: Part) -> list[Tensor]:
    """The sums, with noise added to a part of their values, counted over all sums in order; `sums` do not change."""
    cuts, start = [], 0
    for index, total in enumerate(sums):
        first, last = (min(max(edge - start, 0), total.numel()) for edge in (part.start, part.stop))
        if first < last:
            cuts.append((index, slice(first, last)))
        start += total.numel()
    own = [sums[i] if cut == slice(0, sums[i].numel()) else sums[i].reshape(-1)[cut] for i, cut in cuts]
    noisy = list(sums)
    for (i, cut), drawn, values in zip(cuts, noise.normal_like(own, std, part), own, strict=True):
        drawn.add_(values)
        if drawn.numel() < sums[i].numel():  # at the edges of the part
            flat = sums[i].reshape(-1)
            drawn = torch.cat([flat[: cut.start], drawn, flat[cut.stop :]]).view(sums[i].shape)
        noisy[i] = drawn
    return noisy
