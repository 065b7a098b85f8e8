"""A scheduler of one's own, and layers that are switched together.

    python examples/own_scheduler.py [--epochs 6] [--inner inductor]

What to notice
- `Turns` is a mode of our own: an object with `choose(epoch, sites, k)`. It gives every site its turn in FP4, and keeps
  the last layer out of it. It never sees the data, so it costs no privacy: the ledger has training alone.
- It is a function of the epoch, without state of its own, so that a resumed run chooses what it would have chosen.
- `policies=` groups sites that are switched together, here the two convolutions of a block. Any mode then chooses among
  groups. With the mode "dpquant" the groups are measured privately, and the ledger has analyses as well.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq

DELTA = 1e-4


class Turns:
    """Every site has its turn: epoch by epoch the next k of the list, round and round, without those in `never`."""

    def __init__(self, never: Sequence[str] = ()) -> None:
        self.never = frozenset(never)

    def choose(self, epoch: int, sites: Sequence[str], k: int) -> list[str]:
        """The sites of epoch `epoch`, which counts from 0."""
        names = [name for name in sites if name not in self.never]
        return [names[(epoch * k + i) % len(names)] for i in range(min(k, len(names)))]


class Block(nn.Module):
    """Two convolutions with GroupNorm and a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def build() -> nn.Module:
    """Six sites: "0", both convolutions of the blocks "1" and "2", and "5"."""
    torch.manual_seed(0)
    stem, head = nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.Linear(16 * 4 * 4, 10)
    return nn.Sequential(stem, Block(16), Block(16), nn.ReLU(), nn.Flatten(), head)


GROUPS = {
    "stem": ["0"],
    "first block": ["1.conv1", "1.conv2"],
    "second block": ["2.conv1", "2.conv2"],
    "head": ["5"],
}


def run(title: str, data: TensorDataset, epochs: int, inner: str, schedule: Callable[..., dpq.Scheduler]) -> None:
    """A private run; prints the policy of each epoch, and what was spent on what."""
    print(f"\n{title}")
    model = dpq.compile(build(), budget=2, inner=inner)
    engine = dpq.PrivacyEngine()
    model, optimizer, criterion, loader = engine.make_private(
        module=model.train(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=512),
        noise_multiplier=1.3,
        max_grad_norm=1.0,
        max_physical_batch_size=128,
    )
    scheduler = schedule(engine, epochs=epochs)
    for epoch in range(epochs):
        print(f"  epoch {epoch}: {', '.join(sorted(model.policy))}", flush=True)
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        scheduler.step()
    if scheduler.mode == "dpquant":
        chances = ", ".join(f"{name} {chance:.2f}" for name, chance in scheduler.probabilities.items())
        print(f"  chance to be drawn first in the next epoch: {chances}")
    parts = ", ".join(f"{purpose} {epsilon:.3f}" for purpose, epsilon in engine.ledger.epsilons(DELTA).items())
    print(f"  epsilon {engine.get_epsilon(DELTA):.3f}, by purpose: {parts}")


def main() -> None:
    """Three runs: turns by site, turns by group, and groups that are measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6, help="passes over the training data (default: 6)")
    parser.add_argument("--inner", default="inductor", help="inductor, aot_eager or eager (default: inductor)")
    args = parser.parse_args()

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))

    by_site = partial(dpq.Scheduler, mode=Turns(never=["5"]))
    by_group = partial(dpq.Scheduler, mode=Turns(never=["head"]), policies=GROUPS, k=1)
    measured = partial(dpq.Scheduler, mode="dpquant", policies=GROUPS, k=1)
    run("Turns by site, never the last layer", data, args.epochs, args.inner, by_site)
    run("Turns by group, never the head", data, args.epochs, args.inner, by_group)
    run("Groups that are measured, one at a time", data, args.epochs, args.inner, measured)


if __name__ == "__main__":
    main()
