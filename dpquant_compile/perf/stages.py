"""Measure the stages of a private training step, for the performance model in `dpquant_compile.perf.speedup`."""

import functools
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dpquant_compile.errors import PrivacySpecError, listing
from dpquant_compile.perf.speedup import STAGES, StageTimes
from dpquant_compile.privacy.accounting.epsilon import check_count
from dpquant_compile.privacy.engine import PrivacyEngine

__all__ = ["measure_stages"]

_RANGE = "dpquant_compile.stages::"  # prefix of the names of stages in a profile
_CLIPPING = ("dpquant::sample_norms", "dpquant::sample_grads", "dpquant::sample_factors", "dpquant::embedding_products")


def measure_stages(
    step: Callable[[], object],
    engine: PrivacyEngine,
    *,
    repeats: int = 5,
    warmup: int = 2,
    device: str | None = None,
) -> StageTimes:
    """Seconds of each stage of `step`, one private training step on the CPU, measured here.

    step     runs one whole logical batch: every micro-batch forward and backward, and optimizer.step()
    engine   the engine whose model, criterion and optimizer the step uses
    repeats  how often the step runs by the clock, alternating with as many runs under torch.profiler
    warmup   steps before that: the first one compiles
    device   what to call this machine; by default its architecture and torch's number of threads

    The result is the step of median time (the quicker of two in the middle), so its stages add up to what a step takes.
    Times are the clock's, since a profiler slows a step down, most where operators are small. The profiler only divides
    backward: clip is what runs as a separate operator inside the compiled program, per-sample norms and gradients. What
    Inductor has fused with the backward (clip factors, norms of biases and norm layers) stays there. Forward is the
    model with the preparation of its inputs, and the engine's criterion; another loss is in `other`.

    Each of the `warmup` + 2 · `repeats` steps trains the model and is in the ledger: measure with an engine and data
    that are not those of a run to be released. While this runs, no other thread may train.
    """
    count, first = check_count("repeats", repeats), check_count("warmup", warmup, least=0)
    if device is None:
        threads = torch.get_num_threads()
        device = f"{platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''}"
    for _ in range(first):
        step()
    clocked: list[StageTimes] = []
    clip = backward = 0.0
    for _ in range(count):
        clocked.append(StageTimes(**_clocked(step, engine), device=device))
        found = _profiled(step, engine)
        clip, backward = clip + found[0], backward + found[1]
    middle = sorted(clocked, key=lambda times: times.total)[(count - 1) // 2]
    share = clip / backward
    return replace(middle, clip=middle.backward * share, backward=middle.backward * (1 - share))


class _Clock:
    """Charges the time that passes to the innermost open stage: none is counted twice or left out."""

    def __init__(self) -> None:
        self.seconds: dict[str, Any] = dict.fromkeys(STAGES, 0.0)
        self.seen: set[str] = set()
        self._stage, self._since = "other", time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        outer = self.switch(name)
        try:
            yield
        finally:
            self.switch(outer)

    def switch(self, stage: str) -> str:
        """Switch to `stage`; returns the stage that was open."""
        now = time.perf_counter()
        self.seconds[self._stage] += now - self._since
        self.seen.add(stage)
        outer, self._stage, self._since = self._stage, stage, now
        return outer


def _clocked(step: Callable[[], object], engine: PrivacyEngine) -> dict[str, Any]:
    """Seconds of each stage in one step, with clipping in backward."""
    clock = _Clock()
    with _parts(engine, clock.stage):
        step()
        clock.switch("other")  # charges what has passed since the last stage
    missing = [stage for stage in ("forward", "backward", "noise") if stage not in clock.seen]
    if missing:
        raise PrivacySpecError(
            f"step has no {listing(missing)} of this engine's model: a step is every micro-batch of one logical batch, "
            "forward and backward, and an optimizer.step() that is not skipped. Fix: use what this engine's "
            "make_private returned, with the model in train(), and go on to the end of the logical batch"
        )
    return clock.seconds


def _profiled(step: Callable[[], object], engine: PrivacyEngine) -> tuple[float, float]:
    """The time of clipping and of all of backward in one profiled step."""
    with (
        profile(activities=[ProfilerActivity.CPU]) as recorded,
        _parts(engine, lambda stage: record_function(_RANGE + stage)),
    ):
        step()
    rest: list[Any] = [event for event in recorded.events() if event.name == _RANGE + "backward"]
    clip, backward = 0.0, sum(event.cpu_time_total for event in rest)
    while rest:
        event = rest.pop()
        if event.name in _CLIPPING:
            clip += event.cpu_time_total
        else:
            rest += event.cpu_children
    return clip, backward


@contextmanager
def _parts(engine: PrivacyEngine, around: Callable[[str], AbstractContextManager[object]]) -> Iterator[None]:
    """Wrap the parts of a step in `around(stage)`, inside the block."""
    run = engine.run
    parts: list[tuple[Any, str, str]] = [
        (run.session, "run", "forward"),
        (torch.autograd, "backward", "backward"),  # Tensor.backward calls it too
        (run.optimizer, "add_noise", "noise"),
        (run.optimizer, "_settle", "other_optimizer"),
        (run.optimizer, "scale_grad", "scale"),
        (run.optimizer, "step", "other_optimizer"),
        (run.optimizer, "zero_grad", "other_optimizer"),
    ]
    if run.criterion is not None:
        parts.append((run.criterion, "forward", "forward"))
    with ExitStack() as stack:
        for owner, name, stage in parts:
            # Not only modules have their own: a learning rate scheduler wraps an optimizer's step.
            before = vars(owner).get(name)
            restore = (delattr, owner, name) if before is None else (setattr, owner, name, before)
            setattr(owner, name, _within(functools.partial(around, stage), getattr(owner, name)))
            stack.callback(*restore)
        yield


def _within(around: Callable[[], AbstractContextManager[object]], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with around():
            return function(*args, **kwargs)

    return run
