"""Measured stages add up to a step, a delay shows in its stage, and measuring leaves no trace."""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile import perf
from dpquant_compile.backends.reference import per_sample
from dpquant_compile.errors import PrivacySpecError
from dpquant_compile.perf.speedup import STAGES
from tests.support import models
from tests.support.heavy import few

ROWS, PHYSICAL = 8, 4
DELAY = 0.05


class Net(nn.Module):
    """A conv whose per-sample gradients are kept, and a linear whose norms are taken by gram matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.fc = nn.Linear(4 * 6 * 6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(self.conv(x)).flatten(1))


class Run:
    """A model made private, and its step: all of one logical batch, which comes in two micro-batches."""

    def __init__(self, **options: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(ROWS, 1, 6, 6, generator=generator)
        data = TensorDataset(x, torch.randint(0, 3, (ROWS,), generator=generator))
        compiled = dpq.compile(models.seeded(Net), budget=1, **options).train()
        self.engine = dpq.PrivacyEngine(accountant="rdp")
        self.model, self.optimizer, self.criterion, self.loader = self.engine.make_private(
            module=compiled,
            optimizer=torch.optim.SGD(compiled.parameters(), lr=0.1),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(data, batch_size=ROWS),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            max_physical_batch_size=PHYSICAL,
        )
        self.taken: list[float] = []

    def step(self) -> None:
        start = time.perf_counter()
        for x, y in self.loader:
            self.optimizer.zero_grad()
            self.criterion(self.model(x), y).backward()
            self.optimizer.step()
        self.taken.append(time.perf_counter() - start)

    def patchable(self) -> list[dict[str, Any]]:
        """What measuring must leave as it was."""
        made = self.engine.run
        return [dict(vars(owner)) for owner in (made.session, made.optimizer, made.criterion)]


@pytest.fixture(scope="module")
def run() -> Run:
    run = Run(backend="reference")
    run.step()
    return run


@pytest.mark.parametrize("backend", few(["reference", "auto"], "reference"))
def test_stages_add_up_to_the_step(backend):
    run = Run(backend=backend)
    times = perf.measure_stages(run.step, run.engine, repeats=3, warmup=2)
    assert times.kind == "measured" and "CPU" in times.device
    assert len(run.taken) == 2 + 2 * 3
    assert times.total == pytest.approx(statistics.median(run.taken[2::2]), rel=0.05, abs=2e-3)
    assert all(getattr(times, stage) > 0 for stage in STAGES)
    assert (
        perf.estimate_speedup(times, 0.9, accelerator=perf.Accelerator("XPU-4", 4.0, "its maker")).kind == "projected"
    )


def delayed(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        time.sleep(DELAY)
        return function(*args, **kwargs)

    return run


@pytest.mark.parametrize(
    ("stage", "find"),
    [
        ("forward", lambda run: (run.criterion, "_checked")),
        ("forward", lambda run: (run.engine.session, "_program")),
        ("backward", lambda run: (per_sample, "weighted_sum")),
        ("backward", lambda run: (run.engine.session, "finish")),
        ("clip", lambda run: (per_sample, "sample_norms")),
        ("clip", lambda run: (per_sample, "sample_grads")),
        ("noise", lambda run: (run.optimizer.noise, "normal_like")),
        ("scale", lambda run: (torch, "_foreach_div_")),
        ("other_optimizer", lambda run: (run.optimizer, "_settle")),
        ("other_optimizer", lambda run: (run.optimizer.original_optimizer, "step")),
        ("other", lambda run: (run.engine.run.loader, "_listener")),
    ],
)
def test_delay_shows_in_its_stage(run, monkeypatch, stage, find):
    owner, name = find(run)
    monkeypatch.setattr(owner, name, delayed(getattr(owner, name)))
    times = perf.measure_stages(run.step, run.engine, repeats=1, warmup=0)
    # Clipping is a share of backward by a profile of it, the others are by the clock and cannot be less.
    assert getattr(times, stage) > DELAY * (0.5 if stage in ("clip", "backward") else 1)
    assert max(STAGES, key=lambda other: getattr(times, other)) == stage


def test_measuring_leaves_no_trace(run):
    before = run.patchable()
    perf.measure_stages(run.step, run.engine, repeats=1, warmup=0)
    assert [set(one) for one in run.patchable()] == [set(one) for one in before]
    torch.optim.lr_scheduler.StepLR(run.optimizer, 1)  # has a wrapper of its own around step
    wrapped = run.optimizer.step
    perf.measure_stages(run.step, run.engine, repeats=1, warmup=0)
    assert run.optimizer.step is wrapped


def test_failing_step_leaves_no_trace(run):
    before = run.patchable()
    count = itertools.count()

    def fails() -> None:
        if next(count):
            raise ZeroDivisionError
        run.step()

    with pytest.raises(ZeroDivisionError):
        perf.measure_stages(fails, run.engine, repeats=1, warmup=0)
    assert [set(one) for one in run.patchable()] == [set(one) for one in before]


def test_what_is_no_whole_step_is_refused(run):
    with pytest.raises(PrivacySpecError, match="step has no forward, backward, noise of this engine's model"):
        perf.measure_stages(lambda: None, run.engine, repeats=1, warmup=0)

    def part() -> None:
        batches = iter(run.loader)
        x, y = next(batches)
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()  # within the logical batch, so it does nothing

    with pytest.raises(PrivacySpecError, match=r"step has no noise .* end of the logical batch"):
        perf.measure_stages(part, run.engine, repeats=1, warmup=0)
    with pytest.raises(PrivacySpecError, match="make_private first"):
        perf.measure_stages(lambda: None, dpq.PrivacyEngine(), repeats=1, warmup=0)
    with pytest.raises(PrivacySpecError, match="repeats"):
        perf.measure_stages(run.step, run.engine, repeats=0)
