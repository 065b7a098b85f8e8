"""`time_private_step`: one private training step of a network on this machine, by Opacus and by this library."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import opacus
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpquant_compile.api import compile as compile_model
from dpquant_compile.backends.cpu_int8 import build as native
from dpquant_compile.lab.models import DigitsNet, ResNet18, seeded
from dpquant_compile.lab.opacus_run import quiet_opacus
from dpquant_compile.numerics.recipe import DEFAULT_RECIPE
from dpquant_compile.privacy.engine import PrivacyEngine

__all__ = ["RESNET18", "SMALL", "StepTime", "StepTimes", "Workload", "time_private_step"]

CLASSES = 10
OPACUS_EVERY = 3  # its step takes seconds, and three of them say enough


@dataclass(frozen=True)
class Workload:
    """A network, one batch for it, and how often each contestant takes a step."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of the batch
    rounds: int = 9
    inner: str = "inductor"

    def __str__(self) -> str:
        return f"{self.name}, a batch of {self.shape[0]} images of {self.shape[-2]}×{self.shape[-1]}"


RESNET18 = Workload("ResNet18 with GroupNorm", ResNet18, (32, 3, 64, 64))
SMALL = Workload("a small CNN", DigitsNet, (8, 1, 8, 8), rounds=1, inner="aot_eager")  # only shows that all of it works


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of a step: the median over the rounds, and half of their range."""

    name: str
    milliseconds: float
    spread: float
    private: bool = True


@dataclass(frozen=True)
class StepTimes:
    """The steps of one comparison. `emulated` says why low precision is not native here; None if it is."""

    workload: str
    machine: str
    threads: int
    emulated: str | None
    rows: tuple[StepTime, ...]

    @property
    def unsteady(self) -> bool:
        """Whether rounds differed so much that other work on the machine, and not the steps, made the times."""
        return any(row.spread > row.milliseconds / 4 for row in self.rows)

    def of(self, name: str) -> StepTime:
        """The row of this name."""
        return next(row for row in self.rows if row.name == name)

    def ratio(self, name: str, to: str = "Opacus") -> float:
        """How many times as fast the step `name` is as the step `to`."""
        return self.of(to).milliseconds / self.of(name).milliseconds


Step = Callable[[], None]


def time_private_step(workload: Workload = RESNET18) -> StepTimes:
    """Time whole training steps: forward, backward, clipping, noise and the optimizer's update.

    Contestants take turns, so that other work on the machine hits all of them. Opacus runs in its default mode, which
    is its fastest for such networks (benchmarks/dp_step.py has the others). All sites are low in int8 and four bits.
    The data are random numbers: time does not depend on them.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(workload.shape, generator=generator)
    y = torch.randint(0, CLASSES, workload.shape[:1], generator=generator)
    engines: list[PrivacyEngine] = []
    with quiet_opacus():
        steps = {"Opacus": _opacus(workload, x, y)}
        ours = _private(workload, x, y, DEFAULT_RECIPE, engines)
        steps["float32"], steps[DEFAULT_RECIPE] = ours("none"), ours("all")  # one program
        steps["int8"] = _private(workload, x, y, "int8", engines)("all")
        steps["not private"] = _plain(workload, x, y)
        taken = _take_turns(steps, workload.rounds)
    for engine in engines:
        engine.close()
    order = ("Opacus", "float32", "int8", DEFAULT_RECIPE, "not private")
    rows = tuple(
        StepTime(name, statistics.median(taken[name]), _half_range(taken[name]), name != "not private")
        for name in order
    )
    return StepTimes(str(workload), _machine(), torch.get_num_threads(), native.unavailable(), rows)


def _take_turns(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each step, in turns, after one that is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-1, rounds):
        for name, step in steps.items():
            if name == "Opacus" and turn % OPACUS_EVERY and turn >= 0:
                continue
            begun = time.perf_counter()
            step()
            if turn >= 0:
                taken[name].append(1e3 * (time.perf_counter() - begun))
    return taken


def _opacus(workload: Workload, x: Tensor, y: Tensor) -> Step:
    model = seeded(workload.build, 0)
    made = opacus.PrivacyEngine(accountant="rdp").make_private(module=model.train(), **_common(model, x, y))
    return _loop_body(made[0], made[1], nn.CrossEntropyLoss(), x, y)


def _private(
    workload: Workload, x: Tensor, y: Tensor, recipe: str, engines: list[PrivacyEngine]
) -> Callable[[str], Step]:
    """A step of this library under a policy; one program serves all policies."""
    model = compile_model(seeded(workload.build, 0), budget=0, recipe=recipe, inner=workload.inner)
    engines.append(engine := PrivacyEngine(accountant="rdp"))
    parts: Any = engine.make_private(
        module=model.train(),
        criterion=nn.CrossEntropyLoss(),
        max_physical_batch_size=len(x),
        **_common(model, x, y),
    )
    module, optimizer, criterion = parts[:3]
    body = _loop_body(module, optimizer, criterion, x, y)
    body()  # compiles

    def under(policy: str) -> Step:
        def step() -> None:
            module.set_policy(policy)
            body()

        return step

    return under


def _plain(workload: Workload, x: Tensor, y: Tensor) -> Step:
    model = seeded(workload.build, 0)
    return _loop_body(model, torch.optim.SGD(model.parameters(), lr=1e-3), nn.CrossEntropyLoss(), x, y)


def _common(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    """What both engines take."""
    return {
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3),
        "data_loader": DataLoader(TensorDataset(x, y), batch_size=len(x)),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "poisson_sampling": False,
    }


def _loop_body(model: Any, optimizer: Any, criterion: Any, x: Tensor, y: Tensor) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return step


def _half_range(values: list[float]) -> float:
    return (max(values) - min(values)) / 2


def _machine() -> str:
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "this machine")
