"""`train_by_opacus`: a run of a task in stock Opacus, beside which one of ours can be judged."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import opacus
import torch
from torch import nn
from torch.utils.data import DataLoader

from dpquant_compile.errors import LabError
from dpquant_compile.lab.config import RunConfig
from dpquant_compile.lab.models import seeded
from dpquant_compile.lab.tasks import get_task
from dpquant_compile.lab.train import learning_rate

__all__ = ["OpacusRun", "quiet_opacus", "train_by_opacus"]


@dataclass(frozen=True)
class OpacusRun:
    """Accuracy on test data and ε of a run in Opacus, and its wall time with evaluation left out."""

    accuracy: float
    epsilon: float
    seconds: float


def train_by_opacus(config: RunConfig) -> OpacusRun:
    """Train the task of `config` by Opacus in float32: same start, batches in expectation, noise and accountant.

    Requires SGD and a noise multiplier. What is ours alone (recipe, budget, schedule) has no effect. Noise and batches
    follow from torch's generator, as Opacus has it by default.
    """
    config = config.resolved()
    if config.optimizer != "sgd" or config.noise_multiplier is None:
        raise LabError("a run in Opacus takes optimizer='sgd' and a noise_multiplier. Fix: give both")
    assert config.epochs is not None and config.delta is not None  # tasks say both
    task, folder = get_task(config.task), None
    split = task.data(folder)
    model: Any = seeded(lambda: task.model(folder), config.seed)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=learning_rate(config, 0))
    criterion = nn.CrossEntropyLoss()
    begun = time.perf_counter()
    with quiet_opacus():
        engine = opacus.PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model.train(),
            optimizer=optimizer,
            data_loader=DataLoader(split.train, batch_size=config.batch_size),
            noise_multiplier=config.noise_multiplier,
            max_grad_norm=config.max_grad_norm,
        )
        for epoch in range(config.epochs):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, epoch)
            for x, y in loader:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
    seconds = time.perf_counter() - begun
    with torch.no_grad():
        right = int((model.eval()(split.test_x).argmax(1) == split.test_y).sum())
    return OpacusRun(right / len(split.test_y), engine.get_epsilon(config.delta), seconds)


@contextmanager
def quiet_opacus() -> Iterator[None]:
    """Without two warnings of Opacus that are about every run: how noise is drawn, and how its hooks fire."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Secure RNG turned off")
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        yield
