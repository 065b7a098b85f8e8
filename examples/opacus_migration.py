"""From Opacus in five lines: the same training before and after, run in one script and compared.

    python examples/opacus_migration.py [--epochs 5] [--inner inductor]

What to notice
- The five lines, printed as the difference between the two functions below.
- ε is the same to the last digit: same sampling, same noise, same accountant. Low precision costs no privacy.
- The accuracies of both. The noise is drawn by other generators, so they differ by chance as well.
- The warnings, if any, are stock Opacus'.

Half of the layers are low, the same ones throughout. To choose them anew for every epoch by private measurements
takes two more lines, `dpq.Scheduler` and its `step()`: see plain_loop.py.
"""

import argparse
import difflib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import opacus
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq

TEST_SIZE, DELTA = 360, 1e-4


def before(model: nn.Module, data: TensorDataset, epochs: int, inner: str) -> tuple[nn.Module, float]:
    """Stock Opacus."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    criterion: Any = nn.CrossEntropyLoss()
    engine = opacus.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model.train(),
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=256),
        noise_multiplier=1.3,
        max_grad_norm=1.0,
    )
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=64, optimizer=optimizer) as loader:
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
    return model, engine.get_epsilon(DELTA)


def after(model: nn.Module, data: TensorDataset, epochs: int, inner: str) -> tuple[nn.Module, float]:
    """Half of the sites in four bits."""
    model = dpq.compile(model, budget=0.5, inner=inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    criterion: Any = nn.CrossEntropyLoss()
    engine = dpq.PrivacyEngine()
    model, optimizer, criterion, loader = engine.make_private(
        module=model.train(),
        optimizer=optimizer,
        criterion=criterion,
        data_loader=DataLoader(data, batch_size=256),
        noise_multiplier=1.3,
        max_grad_norm=1.0,
        max_physical_batch_size=64,
    )
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    return model, engine.get_epsilon(DELTA)


def changed_lines(first: Callable[..., Any], second: Callable[..., Any]) -> list[str]:
    """What differs between two functions below their docstrings, indentation apart: "- " goes, "+ " comes."""
    old, new = ([line.strip() for line in inspect.getsource(f).splitlines()[2:]] for f in (first, second))
    return [line for line in difflib.ndiff(old, new) if line[:2] in ("- ", "+ ")]


def build() -> nn.Module:
    """Four sites, the same parameters at every call; nothing in place, which Opacus' hooks do not bear."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test images, scaled to [0, 1], with their labels."""
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_SIZE], order[TEST_SIZE:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """The share of right answers, in full precision: that is what eval() runs."""
    x, y = data.tensors
    model.eval()
    with torch.no_grad():
        right: Tensor = model(x).argmax(1) == y
    return right.float().mean().item()


def main() -> None:
    """Show the lines, run both, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training data (default: 5)")
    parser.add_argument("--inner", default="inductor", help="inductor, aot_eager or eager (default: inductor)")
    args = parser.parse_args()

    lines = changed_lines(before, after)
    print(f"What changes ({sum(line.startswith('+') for line in lines)} lines):")
    print(textwrap.indent("\n".join(lines), "  "), flush=True)

    train, test = digits()
    spent = []
    print(f"\n{'':<16}  {'epsilon':>18}  {'test accuracy':>13}")
    for name, run in (("before: Opacus", before), ("after: half low", after)):
        model, epsilon = run(build(), train, args.epochs, args.inner)
        spent.append(epsilon)
        print(f"{name:<16}  {epsilon:>18.15f}  {accuracy(model, test):>13.1%}", flush=True)
    print(f"\nThe two epsilons are {'equal' if spent[0] == spent[1] else 'NOT equal'} at delta {DELTA:g}.")


if __name__ == "__main__":
    main()
