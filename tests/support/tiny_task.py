"""A task that compiles nothing and trains in a blink; for tests that train."""

from functools import cache
from pathlib import Path

from torch import nn

from dpquant_compile.lab.data import Split, digits
from dpquant_compile.lab.tasks import Task, register_task


def tiny_data(folder: Path | None) -> Split:
    whole = digits(folder)
    return Split(whole.train_x[:120], whole.train_y[:120], whole.test_x[:60], whole.test_y[:60])


def tiny_model(folder: Path | None) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 64, 16),
        nn.ReLU(),
        nn.Linear(16, 10),
    )


@cache
def tiny_task() -> str:
    """Its name; a process registers it once."""
    defaults = dict(lr=0.5, lr_adam=0.01, batch_size=40, epochs=4, physical=24, n_sample=2, delta=1e-3)
    task = Task("tiny", "for tests", tiny_model, tiny_data, "nothing", defaults, inner="eager")
    return register_task(task).name
