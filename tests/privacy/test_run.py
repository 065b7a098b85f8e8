"""The state of a step: every transition from every state, and what holds of all that is ever released."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile.errors import PrivateTrainingError
from dpquant_compile.policy import Policy
from dpquant_compile.privacy.data.poisson_loader import MicroBatch
from dpquant_compile.privacy.run import Forward, Pinned, Run, Step

SIGMA = 1.0
BOUND = 0.5
SITES = ("conv1", "conv2")
NONE, SOME = Policy((), SITES), Policy(("conv1",), SITES)
DATA = TensorDataset(torch.zeros(16, 3))
PINNED = Pinned(7, NONE, ("train",), "a fingerprint")
FIRST = MicroBatch(torch.arange(2), first=True, last=False)
REST = MicroBatch(torch.arange(2, 4), first=False, last=True)


class State(NamedTuple):
    """A state as the table has it."""

    micro: str  # none, first or rest
    spent: bool  # whether the micro-batch has had its backward
    paid: bool
    forward: bool  # whether one is open
    sum: str  # empty, growing or released
    whole: bool = True  # whether the sum lacks nothing of the micro-batches before

    def __str__(self) -> str:
        flags = ["spent" * self.spent, "paid" * self.paid, "forward" * self.forward]
        words = [self.micro, *flags, self.sum, "lacking" * (not self.whole)]
        return "-".join(word for word in words if word)


IDLE = State("none", False, False, False, "empty")


def state_of(step: Step) -> State:
    micro = "none" if step.micro is None else "first" if step.micro.first else "rest"
    total = "empty" if step.empty else "growing" if step.growing else "released"
    spent = step._spent and micro != "none"
    return State(micro, spent, step.paid is not None, step._open is not None, total, step._whole)


class Driver:
    """A step with the last forward that was made, and one that a later forward replaced."""

    def __init__(self) -> None:
        self.step = Step(BOUND)
        self.stale = self.step.forward(PINNED, 2)
        self.forward = self.step.forward(PINNED, 2)
        self.step.end()

    def do(self, name: str) -> None:
        step = self.step
        if name in ("forward", "forward, other policy"):
            policy = NONE if name == "forward" else SOME
            self.forward = step.forward(PINNED._replace(policy=policy), 2)
            return
        calls: dict[str, Callable[[], None]] = {
            "pay": lambda: step.pay(SIGMA),
            "hand_out first": lambda: step.hand_out(FIRST),
            "hand_out next": lambda: step.hand_out(REST),
            "backward": lambda: step.backward(self.forward),
            "backward, stale": lambda: step.backward(self.stale),
            "release": lambda: step.release(SIGMA),
            "release, other noise": lambda: step.release(2 * SIGMA),
            "drop": step.drop,
            "end": step.end,
            "set_bound": lambda: step.set_bound(2 * BOUND),
        }
        calls[name]()


class Transition(NamedTuple):
    """When a transition is refused, and with which words; else what it changes."""

    refused: tuple[tuple[Callable[[State], bool], str], ...]
    effect: Callable[[State], State]


def unpaid(s: State) -> bool:
    return not s.paid


def lacks_samples(s: State) -> bool:
    return s.sum == "growing" and (s.micro == "first" or (s.micro == "rest" and not (s.spent and s.whole)))


TABLE: dict[str, Transition] = {
    "pay": Transition((), lambda s: s._replace(paid=True)),
    "set_bound": Transition((), lambda s: s),
    "hand_out first": Transition(
        ((unpaid, "a batch was drawn that no spend of the ledger pays for"),),
        lambda s: State("first", False, s.paid, False, "empty"),
    ),
    "hand_out next": Transition(
        ((lambda s: s.micro != "first", "continues a logical batch that is complete, or never began"),),
        lambda s: State("rest", False, s.paid, False, s.sum, s.whole and s.spent),
    ),
    "forward": Transition((), lambda s: s._replace(forward=True)),
    "forward, other policy": Transition(
        ((lambda s: s.sum == "growing", "the policy changed between two micro-batches"),),
        lambda s: s._replace(forward=True),
    ),
    "backward": Transition(
        (
            (lambda s: not s.forward, "not the model's last one, or that has had its backward"),
            (lambda s: s.spent, "a second backward for one micro-batch of the loader"),
            (lambda s: s.micro == "none" and s.sum == "growing", "batches that did not come from the loader"),
        ),
        lambda s: State(s.micro, s.micro != "none", s.paid and s.micro != "none", False, "growing", s.whole),
    ),
    "backward, stale": Transition(((lambda s: True, "not the model's last one"),), lambda s: s),
    "release": Transition(
        (
            (unpaid, "a sum of clipped gradients is about to leave that no spend of the ledger pays for"),
            (lacks_samples, "lacks micro-batches of its logical batch"),
        ),
        lambda s: s._replace(paid=False, forward=False, sum="empty" if s.sum == "empty" else "released"),
    ),
    "release, other noise": Transition(
        (
            (unpaid, "that no spend of the ledger pays for"),
            (lambda s: s.paid, "noise_multiplier is 2 now, but this batch was accounted for with 1"),
        ),
        lambda s: s,
    ),
    "drop": Transition(
        (), lambda s: s._replace(sum="empty", whole=s.whole and not (s.sum == "growing" and s.micro != "none"))
    ),
    "end": Transition((), lambda s: IDLE),
}


def reachable() -> dict[State, tuple[str, ...]]:
    """Every state that the table leads to, with the shortest way there."""
    found: dict[State, tuple[str, ...]] = {IDLE: ()}
    queue = [IDLE]
    for state in queue:
        for name, transition in TABLE.items():
            after = transition.effect(state)
            if not any(applies(state) for applies, _ in transition.refused) and after not in found:
                found[after] = (*found[state], name)
                queue.append(after)
    return found


PATHS = reachable()


def fields(step: Step) -> list[Any]:
    return list(vars(step).values())


def possible(s: State) -> bool:
    """Whether a state can be: paid or not, with an open forward or without, but not every sum fits every place."""
    if s.micro == "none":
        return s.whole and not s.spent
    if s.micro == "first":
        return (s.spent, s.sum, s.whole) in ((False, "empty", True), (True, "growing", True), (True, "empty", False))
    if s.sum == "growing":
        return s.whole or s.spent
    released = s.spent and s.whole
    return released if s.sum == "released" else released or not s.whole


def test_the_table_has_every_state() -> None:
    flags, sums = (False, True), ("empty", "growing", "released")
    every = itertools.product(("none", "first", "rest"), flags, flags, flags, sums, flags)
    assert set(PATHS) == {state for state in itertools.starmap(State, every) if possible(state)}


@pytest.mark.parametrize("state", PATHS, ids=str)
def test_every_transition_from(state: State) -> None:
    for name, transition in TABLE.items():
        driver = Driver()
        for before in PATHS[state]:
            driver.do(before)
        assert state_of(driver.step) == state
        held = fields(driver.step)
        words = next((words for applies, words in transition.refused if applies(state)), None)
        if words is None:
            driver.do(name)
            assert state_of(driver.step) == transition.effect(state), name
        else:
            with pytest.raises(PrivateTrainingError, match=words):
                driver.do(name)
            assert all(a is b for a, b in zip(fields(driver.step), held, strict=True)), name


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("step", "parameters, or model.step,"),
        ("policy", "the policy"),
        ("modes", r"train\(\) or requires_grad"),
        ("contents", "the contents of parameters"),
    ],
)
def test_a_change_between_micro_batches_is_named(field: str, words: str) -> None:
    step = Step(BOUND)
    step.backward(step.forward(PINNED, 2))
    other = {"step": 8, "policy": SOME, "modes": ("eval",), "contents": "another"}
    with pytest.raises(PrivateTrainingError, match=f"^{words} changed between two micro-batches"):
        step.forward(PINNED._replace(**{field: other[field]}), 2)
    step.forward(PINNED, 2)


def test_a_batch_is_divided_from_its_first_micro_batch_to_its_last() -> None:
    step = Step(BOUND)
    assert not step.divided
    step.pay(SIGMA)
    for micro in (FIRST, replace(FIRST, first=False), REST):
        step.hand_out(micro)
        assert step.divided
    step.hand_out(replace(REST, first=True))
    assert not step.divided
    step.end()
    assert not step.divided


def test_the_bound_of_a_sum_is_that_of_the_forward_that_begins_it() -> None:
    step = Step(BOUND)
    step.pay(SIGMA)
    step.hand_out(FIRST)
    forward = step.forward(PINNED, 2)
    step.set_bound(3.0)
    step.backward(forward)
    step.hand_out(REST)
    forward = step.forward(PINNED, 2)
    assert forward.bound == step.sum_bound == BOUND and step.next_bound == 3.0
    step.backward(forward)
    step.release(SIGMA)
    assert step.sum_bound == BOUND, "noise is for the bound that the sum was clipped to"
    step.drop()
    assert step.forward(PINNED, 2).bound == 3.0
    step.pay(SIGMA)
    step.release(SIGMA)
    assert step.sum_bound == 3.0, "noise alone is for the bound of now"


class Sample(NamedTuple):
    """A micro-batch as the model of the guarantee sees it."""

    number: int
    batch: int | None  # None for samples given by hand
    bound: float
    pinned: Pinned


POLICIES, BOUNDS = st.sampled_from([NONE, SOME]), st.sampled_from([BOUND, 3.0])


class Guarantee(RuleBasedStateMachine):
    """Drives a step in any order, keeps sums as a session does, and checks all that ever leaves."""

    make: type[Step] = Step

    def __init__(self) -> None:
        super().__init__()
        self.step = self.make(BOUND)
        self.numbers = itertools.count()
        self.micro: int | None = None  # the number of the micro-batch that the loop has
        self.batch: int | None = None
        self.forwards: list[tuple[Forward, Sample]] = []
        self.sum: list[Sample] = []
        self.payment: tuple[int, float] | None = None  # the one that is unused: when, and for which noise
        self.paid_before: dict[int, int] = {}  # by batch: the payment that was there when it was handed out
        self.used: set[int] = set()
        self.released: set[int] = set()
        self.drawn: list[int] = []  # the micro-batches of this logical batch
        self.complete = False

    def attempt(self, change: Callable[[], Any]) -> Any:
        """What a transition gives, or None if it is refused: then nothing has changed."""
        held = fields(self.step)
        try:
            return change() or True
        except PrivateTrainingError:
            assert all(a is b for a, b in zip(fields(self.step), held, strict=True))
            return None

    @rule(sigma=st.sampled_from([SIGMA, 2 * SIGMA]))
    def pay(self, sigma: float) -> None:
        self.step.pay(sigma)
        self.payment = next(self.numbers), sigma

    @rule(first=st.booleans(), last=st.booleans())
    def hand_out(self, first: bool, last: bool) -> None:
        if self.attempt(lambda: self.step.hand_out(MicroBatch(FIRST.ids, first, last))):
            self.micro = next(self.numbers)
            if first:
                self.batch, self.sum, self.drawn = self.micro, [], []
                assert self.payment is not None, "data is about to be read that nothing pays for"
                self.paid_before[self.batch] = self.payment[0]
            assert self.batch is not None, "a micro-batch without a logical batch"
            self.drawn.append(self.micro)
            self.complete = last

    @rule(policy=POLICIES, bound=BOUNDS)
    def forward(self, policy: Policy, bound: float) -> None:
        """A forward, and a schedule that sets the bound of the next sum right after it."""
        pinned = PINNED._replace(policy=policy)
        if forward := self.attempt(lambda: self.step.forward(pinned, 2)):
            number = next(self.numbers) if self.micro is None else self.micro
            self.forwards.append((forward, Sample(number, self.batch, forward.bound, pinned)))
        self.step.set_bound(bound)

    @rule(back=st.sampled_from([1, 1, 1, 2]))
    def backward(self, back: int) -> None:
        if len(self.forwards) >= back:
            forward, sample = self.forwards[-back]
            growing = self.step.growing
            if self.attempt(lambda: self.step.backward(forward)):
                self.sum = [*(self.sum if growing else ()), sample]
                if sample.batch is None:
                    self.payment = None  # it does not cover what was not there

    @rule(same=st.sampled_from([True, True, False]), fails=st.booleans())
    def release(self, same: bool, fails: bool) -> None:
        sigma = SIGMA if self.payment is None or not same else self.payment[1]
        if not self.attempt(lambda: self.step.release(sigma)):
            return
        assert self.payment is not None and self.payment[0] not in self.used, "a sum leaves that nothing pays for"
        assert self.payment[1] == sigma, "paid for with other noise"
        self.used.add(self.payment[0])
        self.payment = None
        leaving = [] if self.step.empty else self.sum
        numbers = [sample.number for sample in leaving]
        assert len(set(numbers)) == len(numbers), "samples count twice"
        assert not self.released & set(numbers), "samples are released twice"
        if leaving and leaving[0].batch is not None:
            assert self.complete and numbers == self.drawn, "samples of the batch are not in its sum"
        assert len({(sample.batch, sample.pinned) for sample in leaving}) <= 1
        assert all(sample.bound == self.step.sum_bound for sample in leaving), "noise is for another bound"
        assert self.step.by_hand == (bool(leaving) and leaving[0].batch is None), "the wrong q is charged"
        assert all(sample.batch is None or sample.batch in self.paid_before for sample in leaving)
        if not fails:
            self.released |= set(numbers)
            self.step.drop()

    @rule(first=st.booleans(), last=st.booleans(), policy=POLICIES, bound=BOUNDS)
    def train(self, first: bool, last: bool, policy: Policy, bound: float) -> None:
        """A micro-batch as a loop has it, so that most sequences get to a release."""
        if first:
            self.pay(SIGMA)
        self.hand_out(first, last)
        self.forward(policy, bound)
        self.backward(1)

    @rule(ends=st.booleans())
    def leave(self, ends: bool) -> None:
        if not ends:
            self.step.drop()
            return
        self.step.end()
        self.micro = self.batch = self.payment = None

    @invariant()
    def agrees(self) -> None:
        assert (self.step.micro is None) == (self.micro is None)
        assert self.step.paid == (None if self.payment is None else self.payment[1])
        assert self.step.empty or self.sum


TestGuarantee = Guarantee.TestCase
TestGuarantee.settings = settings(max_examples=100, stateful_step_count=30, deadline=None, derandomize=True)


class _Unpaid(Step):
    def release(self, noise_multiplier: float) -> None:
        self._paid = noise_multiplier
        super().release(noise_multiplier)


class _PaidOnce(Step):
    def release(self, noise_multiplier: float) -> None:
        super().release(noise_multiplier)
        self._paid = noise_multiplier


class _ReadFirst(Step):
    def hand_out(self, micro: MicroBatch) -> None:
        held, self._paid = self._paid, SIGMA
        super().hand_out(micro)
        self._paid = held


class _PaidByTheLoader(Step):
    def backward(self, forward: Forward) -> None:
        held = self._paid
        super().backward(forward)
        self._paid = held


class _TwiceInASum(Step):
    def check_backward(self, forward: Forward) -> None:
        self._spent = False
        super().check_backward(forward)


class _BoundOfNow(Step):
    def release(self, noise_multiplier: float) -> None:
        super().release(noise_multiplier)
        self._sum_bound = self._next_bound


class _Unpinned(Step):
    def forward(self, pinned: Pinned, rows: int) -> Forward:
        self._pinned = pinned
        return super().forward(pinned, rows)


class _KeptForTheNext(Step):
    def hand_out(self, micro: MicroBatch) -> None:
        held = self._sum
        super().hand_out(micro)
        self._sum = held


class _SkipsSome(Step):
    def release(self, noise_multiplier: float) -> None:
        self._whole = self._spent = True
        super().release(noise_multiplier)


class _ForgetsThatSomeAreLost(Step):
    def drop(self) -> None:
        held = self._whole
        super().drop()
        self._whole = held


class _LeavesEarly(Step):
    @property
    def incomplete(self) -> bool:
        return False

    def hand_out(self, micro: MicroBatch) -> None:
        super().hand_out(replace(micro, first=micro.first or self.micro is None))


FAULTS = (
    *(_Unpaid, _PaidOnce, _ReadFirst, _PaidByTheLoader, _TwiceInASum, _BoundOfNow, _Unpinned, _KeptForTheNext),
    *(_SkipsSome, _ForgetsThatSomeAreLost, _LeavesEarly),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_faulty_step_is_found(fault: type[Step]) -> None:
    class Faulty(Guarantee):
        make = fault

    # Without shrinking: that there is a counterexample is enough.
    quick = settings(TestGuarantee.settings, max_examples=400, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Faulty, settings=quick)


# In a run


def parts(engine: dpq.PrivacyEngine, **options: Any) -> tuple[Any, ...]:
    model = dpq.compile(nn.Linear(3, 2), budget=0, backend="reference", inner="eager")
    given: dict[str, Any] = {
        "module": model.train(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(DATA, batch_size=4),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "loss_reduction": "sum",
    }
    made: tuple[Any, ...] = engine.make_private(**{**given, **options})
    return made


@pytest.fixture
def engine() -> Iterator[dpq.PrivacyEngine]:
    with dpq.PrivacyEngine(accountant="rdp") as engine:
        yield engine


def test_a_run_is_a_record(engine: dpq.PrivacyEngine) -> None:
    model, optimizer, loader = parts(engine)
    run = engine.run
    assert isinstance(run, Run) and run.session is engine.session and run.step is run.session.step
    assert (run.session.model, run.optimizer, run.loader) == (model, optimizer, loader)
    assert (run.sample_rate, run.noise_multiplier, run.loss_reduction, run.criterion) == (0.25, 1.0, "sum", None)
    assert run.physical == run.session.physical >= (run.default_physical or 0) > 0 and run.world.size == 1
    with pytest.raises(FrozenInstanceError):
        run.sample_rate = 0.1  # type: ignore[misc]
    assert replace(run, sample_rate=0.1).sample_rate == 0.1


def test_batches_that_nothing_drew_have_no_rate(engine: dpq.PrivacyEngine) -> None:
    parts(engine, poisson_sampling=False)
    assert engine.run.sample_rate == 1.0


def test_a_step_that_is_refused_is_not_charged(engine: dpq.PrivacyEngine) -> None:
    """An optimizer of an earlier make_private, of the same model or of another one."""
    model, old, _ = parts(engine)
    model(torch.randn(2, 3)).sum().backward()
    parts(engine)
    with pytest.raises(PrivateTrainingError, match="earlier make_private"):
        old.step()
    parts(engine, module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(PrivateTrainingError, match="this optimizer belongs to an earlier make_private"):
        old.step()
    assert not engine.ledger.entries


class More(torch.utils.data.Sampler[list[int]]):
    """A batch sampler that gives more batches than it says."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1], [2, 3])


def test_a_batch_that_was_not_paid_for_does_not_reach_the_loop(engine: dpq.PrivacyEngine) -> None:
    data = DataLoader(DATA, batch_sampler=More())
    model, optimizer, loader = parts(engine, data_loader=data, poisson_sampling=False, max_physical_batch_size=4)
    batches = iter(loader)
    (x,) = next(batches)
    model(x).sum().backward()
    optimizer.step()
    with pytest.raises(PrivateTrainingError, match="a batch was drawn that no spend of the ledger pays for"):
        next(batches)
    assert engine.session.micro is None and sum(entry.steps for entry in engine.ledger.entries) == 1


def test_a_release_that_failed_is_paid_for_again(engine: dpq.PrivacyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, _ = parts(engine)
    model(torch.randn(2, 3)).sum().backward()

    def interrupted(*values: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(optimizer.noise, "normal_like", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    optimizer.step()
    assert [(entry.q, entry.steps) for entry in engine.ledger.entries] == [(1.0, 2)]
    assert engine.session.step.empty and all(p.summed_grad is None for p in model.parameters())


def test_an_analysis_leaves_no_trace_in_the_step(engine: dpq.PrivacyEngine) -> None:
    model, _, _ = parts(engine, max_physical_batch_size=4)
    session = engine.session
    with session.rehearsal(SIGMA):
        session.announce(MicroBatch(torch.arange(2), first=True, last=True))
        model(torch.full((2, 3), torch.nan)).sum().backward()
        assert session.dropped == 2 and any(total is not None for total in session.take_sums(SIGMA).values())
        with pytest.raises(PrivateTrainingError, match="no spend of the ledger pays for"):
            session.take_sums(SIGMA)
    assert state_of(session.step) == IDLE and session.dropped == 0 and not engine.ledger.entries
