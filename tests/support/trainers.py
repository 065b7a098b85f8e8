"""What the tests of trainers share: one private run, the plain loop over it, and what a trainer must leave alike."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler
from torch.utils.data import DataLoader, Dataset

import dpquant_compile as dpq
from tests.support import models
from tests.support.private_loops import Net, Run, dataset
from tests.support.reused import as_new

DELTA = 1e-5
EPOCHS = 3


class Records(Dataset[Any]):
    """The data of `private_loops` as dicts."""

    def __init__(self, n: int) -> None:
        self.data = dataset(n)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = self.data[index]
        return {"x": x, "labels": y}


@dataclass
class Trained:
    """A run with a schedule and decaying learning rates, and what happened in it."""

    run: Run
    scheduler: dpq.Scheduler
    rates: LRScheduler
    noises: list[int]  # for each noise that was drawn, the version of a weight

    @property
    def steps(self) -> int:
        """Optimizer steps with noise, each of which changed the parameters."""
        assert self.noises == sorted(set(self.noises))
        return len(self.noises)

    def outcome(self) -> dict[str, Any]:
        """What must be the same to the last bit, however the run was trained."""
        engine = self.run.engine
        return {
            "parameters": [value.tolist() for value in self.run.model.state_dict().values()],
            "epsilon": engine.get_epsilon(DELTA),
            "ledger": [(e.purpose, e.q, e.sigma, e.steps) for e in engine.ledger.entries],
            "policies": [record.policy for record in self.scheduler.history],
            "epoch": self.scheduler.epoch,
            "rate": self.rates.get_last_lr(),
            "noise": engine.run.noise.position,
        }


def unpack_record(record: Any) -> Any:
    return (), {"x": record["x"]}, record["labels"]


def begun(physical: int | None = 3, *, records: bool = False, epochs: int = EPOCHS, n: int = 24) -> Trained:
    """The same run each time: 4 steps an epoch, each of several micro-batches of 3, or of one whole one."""
    engine = dpq.PrivacyEngine(accountant="rdp")
    options: dict[str, Any] = {"budget": 1, "backend": "reference", "inner": "eager", "format": "luq_fp4"}
    model = as_new("begun", lambda: models.seeded(Net), lambda original: dpq.compile(original, **options)).train()
    data: Any = Records(n) if records else dataset(n)
    parts = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.05),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=6, generator=torch.Generator().manual_seed(0)),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        max_physical_batch_size=physical,
        noise_generator=torch.Generator().manual_seed(0),
    )
    run = Run(*parts, engine)
    unpack: dict[str, Any] = {"unpack": unpack_record} if records else {}
    scheduler = dpq.Scheduler(engine, epochs=epochs, n_interval=1, **unpack)
    rates = ExponentialLR(run.optimizer, 0.9)
    noises: list[int] = []
    draw: Callable[..., Any] = run.optimizer.noise.normal_like
    weight = next(iter(run.model.parameters()))

    def counted(*args: Any) -> Any:
        noises.append(weight._version)
        return draw(*args)

    run.optimizer.noise.normal_like = counted
    return Trained(run, scheduler, rates, noises)


def train_plainly(trained: Trained, epochs: int = EPOCHS) -> Trained:
    """The loop of the contract, with validation in the middle and at the end of each epoch."""
    run = trained.run
    for _ in range(epochs):
        for place, batch in enumerate(run.loader):
            x, y = batch.values() if isinstance(batch, dict) else batch
            run.optimizer.zero_grad()
            run.criterion(run.model(x), y).backward()
            run.optimizer.step()
            if not run.optimizer.step_was_skipped:
                trained.rates.step()
            if place == 4:
                validate(run)
        trained.scheduler.step()
        validate(run)
    return trained


def validate(run: Run) -> float:
    """Accuracy on fixed data, in eval()."""
    x, y = dataset(7).tensors
    run.model.eval()
    with torch.no_grad():
        right = (run.model(x).argmax(1) == y).float().mean()
    run.model.train()
    return float(right)
