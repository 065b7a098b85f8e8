"""A private run: `Run`, the record of what it is made of, and `Step`, the state of its current logical batch."""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from dpquant_compile.errors import PrivateTrainingError
from dpquant_compile.policy import Policy

if TYPE_CHECKING:
    from dpquant_compile.privacy.clipping.bounds import Clipping
    from dpquant_compile.privacy.clipping.runtime import Session
    from dpquant_compile.privacy.data.criterion import PrivateCriterion
    from dpquant_compile.privacy.data.poisson_loader import MicroBatch, PrivateLoader, SharedUniform
    from dpquant_compile.privacy.distributed.world import World
    from dpquant_compile.privacy.mechanism.gaussian import GaussianStream
    from dpquant_compile.privacy.mechanism.optimizer import PrivateOptimizer

__all__ = ["Pinned", "Run", "Step"]


@dataclass(frozen=True)
class Run:
    """What one `make_private` has made: its parts, and the settings that it began with.

    step                the state of the current logical batch; session, loader and optimizer call its transitions
    criterion           None if none was given
    shared_uniform      the secure randomness of sampling that several processes have in common, if there is one
    sample_rate         the q of a batch of the loader: 1 unless batches are Poisson draws
    noise_multiplier    at the beginning; `optimizer.noise_multiplier` may follow a schedule
    physical            the batch size that programs are compiled for
    default_physical    None if max_physical_batch_size was given; else the default of one process alone: schedulers
                        count in it, since ε must not depend on the number of processes

    Guarantee: a setting that a payment depends on (sample rate, processes, clipping) is fixed for the whole run.
    """

    step: "Step"
    session: "Session"
    optimizer: "PrivateOptimizer"
    loader: "PrivateLoader"
    criterion: "PrivateCriterion | None"
    noise: "GaussianStream"
    world: "World"
    shared_uniform: "SharedUniform | None"
    clipping: "Clipping"
    loss_reduction: str
    sample_rate: float
    noise_multiplier: float
    physical: int
    default_physical: int | None

    def end_epoch(self) -> None:
        """End the loop over the loader if its last batch has had its step: trainers never ask for one more."""
        if self.step.paid is None:
            self.loader.finish()


class Pinned(NamedTuple):
    """What all micro-batches of a logical batch must have in common.

    contents  of the parameters, which may be written in ways that leave no trace in `step`, see `Contents`; None for a
              batch that is not `Step.divided`
    """

    step: int
    policy: Policy
    modes: Hashable
    contents: object


# Of the fields of `Pinned`.
_NAMES = ("parameters, or model.step,", "the policy", "train() or requires_grad", "the contents of parameters")


@dataclass(frozen=True, eq=False)
class Forward:
    """A training forward: a ticket for one backward, which clips each sample's gradient to `bound`.

    `pinned` must hold until then.
    """

    bound: float
    pinned: Pinned


class _Sum(Enum):
    EMPTY = "no sample is in it"
    GROWING = "samples are in it that no step has used"
    RELEASED = "a step is using it, or failed to"


class Step:
    """The state of the current logical batch. Its methods are the only way to change it; an illegal change raises.

    ```text
                                     ┌──── hand_out (next micro-batch) ──────┐
                                     ▼                                       │
    idle ─ pay ► paid ─ hand_out ► drawn ─ forward ► forward ─ backward ► backward ─ release ► released
     ▲            ▲                                                                               │
     │            └────────────────────────── pay (next logical batch) ───────────────────────────┤
     └──────────────────────── end (from every state: the loop is left) ──────────────────────────┘

    by hand:  idle ─ forward ► forward ─ backward ► backward ─ pay ─ release ► released ─ drop ► idle
    ```

    - A refused change raises `PrivateTrainingError` and leaves the state as it was.
    - A forward replaces the one before, whose backward is then refused. Evaluation, `torch.no_grad()` and analyses that
      run forward only do not come here.
    - A batch may be released without a backward: that is noise alone. A second release of one batch is paid for again.
      A sum that lacks some micro-batches of its batch cannot leave.
    - A batch may be left without a release: the payment for the next one replaces its own, and the first micro-batch of
      the next one empties the sum. So do `end`, which ends the payment too, and `drop`, at any time.
    - A release that fails on its way can be paid for and made again, or the next backward begins a new sum.

    Guarantee: every sum that leaves has been paid for, with the noise that it gets, and a payment serves one release.

    - From the loader: the payment comes before the loop reads the batch, and each micro-batch is in one sum, once.
    - By hand: the payment comes after the samples, since only then it is known that nothing drew them (`by_hand`, for
      which q = 1), and before noise is drawn. One from before does not cover them. A sum has one backward.
    - All that is in a sum was computed with the same weights, policy and modes, and clipped to one bound, `sum_bound`.
    """

    def __init__(self, bound: float) -> None:
        """`bound` is the most that one sample adds to a sum."""
        self._next_bound = self._sum_bound = bound
        self._micro: MicroBatch | None = None
        self._paid: float | None = None
        self._open: Forward | None = None  # the last forward, until its backward
        self._spent = False  # whether this micro-batch has had its backward
        self._whole = True  # whether those before it have had theirs, and nothing that was in the sum is lost
        self._sum = _Sum.EMPTY
        self._pinned: Pinned | None = None
        self._rows: int | None = None

    # What it is at

    @property
    def micro(self) -> "MicroBatch | None":
        """The micro-batch of the loader that the loop works on; None outside of the loop."""
        return self._micro

    @property
    def begun(self) -> bool:
        """Whether earlier micro-batches belong to the same logical batch."""
        return self._micro is not None and not self._micro.first

    @property
    def incomplete(self) -> bool:
        """Whether more micro-batches follow in the same logical batch."""
        return self._micro is not None and not self._micro.last

    @property
    def divided(self) -> bool:
        """Whether samples of the logical batch are in more than one micro-batch."""
        return self._micro is not None and self._micro.divided and (self.begun or self.incomplete)

    @property
    def paid(self) -> float | None:
        """The noise multiplier that the next release is paid for with; None if it is not."""
        return self._paid

    @property
    def empty(self) -> bool:
        """Whether no sample is in the sum."""
        return self._sum is _Sum.EMPTY

    @property
    def growing(self) -> bool:
        """Whether samples are in the sum that no step has used."""
        return self._sum is _Sum.GROWING

    @property
    def by_hand(self) -> bool:
        """Whether samples are in the sum that the loader did not draw."""
        return self._micro is None and not self.empty

    @property
    def rows(self) -> int | None:
        """How many samples the last training forward had."""
        return self._rows

    @property
    def next_bound(self) -> float:
        """The bound of the next sum. That of a sum is fixed by the forward that begins it."""
        return self._next_bound

    @property
    def sum_bound(self) -> float:
        """The most that one sample has added to the sum."""
        return self._sum_bound

    @property
    def _counted(self) -> bool:
        """Whether the samples of this micro-batch are in the sum; trivially so if it has none."""
        return self._spent or self._micro is None or len(self._micro.ids) == 0

    # Transitions

    def set_bound(self, bound: float) -> None:
        """Choose the bound of the next sum; one that is under way keeps its own."""
        self._next_bound = bound

    def pay(self, noise_multiplier: float) -> None:
        """Take a payment that the ledger has on record, for one release with this noise."""
        self._paid = noise_multiplier

    def hand_out(self, micro: "MicroBatch") -> None:
        """Begin a micro-batch of the loader; the first of a logical batch empties the sum."""
        if micro.first and self._paid is None:
            raise PrivateTrainingError(
                "a batch was drawn that no spend of the ledger pays for: the batch sampler gives more batches than its "
                "len() says. Fix: let len() of the batch sampler be the number of its batches"
            )
        if not micro.first and not self.incomplete:
            raise PrivateTrainingError(
                "a micro-batch continues a logical batch that is complete, or never began: its samples would be in a "
                "sum that was not drawn with them. Fix: take batches from the loader that make_private returned"
            )
        whole = micro.first or (self._whole and self._counted)
        if micro.first:
            self.drop()
        self._micro, self._open, self._spent, self._whole = micro, None, False, whole

    def end(self) -> None:
        """Leave the loop: a payment that was not used is lost, and so is a sum that no step has used."""
        self._micro = self._paid = self._open = None
        self._whole = True
        self.drop()

    def forward(self, pinned: Pinned, rows: int) -> Forward:
        """Begin a training forward of `rows` samples; what comes back allows one backward.

        Refuses other weights, policy or modes than those of micro-batches that are in the sum. Where a batch is cut
        depends on who is in it: a record more would move others to another side of the change.
        """
        if self.growing and pinned != self._pinned:
            assert self._pinned is not None
            what = next(name for name, a, b in zip(_NAMES, self._pinned, pinned, strict=True) if a != b)
            raise PrivateTrainingError(
                f"{what} changed between two micro-batches of one logical batch. Which samples are in which of them "
                "depends on the others, so the change would carry from sample to sample. Fix: step only the optimizer "
                "that make_private returned; make other changes after its step at the end of the logical batch, or "
                "between epochs"
            )
        self._pinned, self._rows = pinned, rows
        self._open = Forward(self._sum_bound if self.growing else self._next_bound, pinned)
        return self._open

    def forward_empty(self, rows: int) -> None:
        """Begin a training forward of `rows` made-up rows: nothing of it enters the sum, so nothing is pinned."""
        self._rows, self._open = rows, None

    def check_backward(self, forward: Forward) -> None:
        """Refuse a backward that would let a sample count twice."""
        if forward is not self._open:
            raise PrivateTrainingError(
                "this backward goes through a forward that is not the model's last one, or that has had its backward. "
                "Each sample's gradient is clipped as a whole, so a micro-batch has one forward and one backward. Fix: "
                "one call of the model per batch from the loader; run others, for metrics, under torch.no_grad()"
            )
        if self._spent and self._micro is not None:
            raise PrivateTrainingError(
                "a second backward for one micro-batch of the loader: its samples would count twice. Fix: one forward "
                "and one backward for each batch that the loader yields"
            )
        if self._micro is None and self.growing:
            raise PrivateTrainingError(
                "a second backward before optimizer.step(), on batches that did not come from the loader: a sample "
                "that is in both counts twice, and is paid for once. Fix: one backward for each step; the loader that "
                "make_private returned cuts large batches to max_physical_batch_size by itself"
            )

    def backward(self, forward: Forward) -> None:
        """Add a forward's samples to the sum, or begin a new one with them if it is not `growing`."""
        self.check_backward(forward)
        self._open, self._spent = None, True
        if self._micro is None:
            self._paid = None
        self._sum, self._sum_bound = _Sum.GROWING, forward.bound

    def release(self, noise_multiplier: float) -> None:
        """Use the payment up: the sum may leave, with this noise. Without samples, noise alone is for `next_bound`."""
        if self._paid is None:
            raise PrivateTrainingError(
                "a sum of clipped gradients is about to leave that no spend of the ledger pays for. Fix: "
                "optimizer.step(), which accounts for what it releases"
            )
        if self._paid != noise_multiplier:
            raise PrivateTrainingError(
                f"noise_multiplier is {noise_multiplier:g} now, but this batch was accounted for with {self._paid:g}. "
                "Fix: change it between batches, after optimizer.step()"
            )
        if self.growing and (self.incomplete or not (self._whole and self._counted)):
            raise PrivateTrainingError(
                "a sum is about to leave that lacks micro-batches of its logical batch. Which samples share a "
                "micro-batch depends on who is in the batch, so a record more could move many others into or out of "
                "the sum. Fix: one backward in train() for every micro-batch that the loader yields, so model.train() "
                "after an evaluation, and the step after the last; skip none by its loss, since samples without a "
                "finite gradient are left out one by one"
            )
        self._paid = self._open = None
        if self.empty:
            self._sum_bound = self._next_bound
        else:
            self._sum = _Sum.RELEASED

    def drop(self) -> None:
        """Empty the sum: its samples were released, or no step will use them."""
        if self.growing and self._micro is not None:
            self._whole = False
        self._sum = _Sum.EMPTY
