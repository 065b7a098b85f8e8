"""Train a small CNN privately, with three quarters of its layers in FP4, chosen anew for every epoch.

    python examples/demo.py [--epochs 12] [--out out/demo] [--backend auto]

The data are the 1,797 handwritten digits that come with scikit-learn. Training is DP-SGD: Poisson batches, per-sample
clipping, Gaussian noise. Every second epoch a private analysis measures which layers bear FP4 badly, and the scheduler
avoids those. The files it writes are accuracy.png, schedule.png, graph.html and graph.svg.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq

BATCH_SIZE = 256
TEST_SIZE = 360
NOISE_MULTIPLIER, CLIP, DELTA = 1.3, 1.0, 1e-4


class Block(nn.Module):
    """Two 3×3 convolutions with GroupNorm and a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class DigitsNet(nn.Module):
    """Eight sites: six convolutions and two linear layers. GroupNorm, since BatchNorm would mix samples."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.block1 = Block(16)
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.block2 = Block(32)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block1(F.relu(self.stem(x)))
        x = self.block2(F.relu(self.down(x)))
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


@dataclass(frozen=True)
class Digits:
    """Images scaled to [0, 1] and labels, split at random into training and test."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    @classmethod
    def load(cls, generator: torch.Generator) -> "Digits":
        data = load_digits()
        x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
        y = torch.tensor(data.target)
        order = torch.randperm(len(x), generator=generator)
        test, train = order[:TEST_SIZE], order[TEST_SIZE:]
        return cls(x[train], y[train], x[test], y[test])

    def loader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Batches for the engine to make Poisson batches of."""
        return DataLoader(TensorDataset(self.train_x, self.train_y), batch_size=BATCH_SIZE)


@dataclass(frozen=True)
class Epoch:
    """A row of the table."""

    number: int
    policy: str
    epsilon: float
    test_accuracy: float
    seconds: float

    def __str__(self) -> str:
        numbers = f"{self.epsilon:>10.2f}  {self.test_accuracy:>13.1%}  {self.seconds:>7.1f}"
        return f"{self.number:>5}  {self.policy:<12}  {numbers}"


HEADING = f"{'epoch':>5}  {'policy':<12}  {'epsilon':>10}  {'test accuracy':>13}  {'seconds':>7}"


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of right answers in full precision, which is what `eval()` runs."""
    model.eval()
    with torch.no_grad():
        right: Tensor = model(x).argmax(1) == y
    return right.float().mean().item()


def plot(rows: Sequence[Epoch], path: Path) -> None:
    """Test accuracy by epoch."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([row.number for row in rows], [100 * row.test_accuracy for row in rows], marker="o")
    axes.axhline(10, color="grey", linestyle=":", label="chance")
    axes.set(xlabel="epoch", ylabel="test accuracy in full precision (%)", ylim=(0, 101))
    axes.set_title(f"Digits, 3/4 of the sites in FP4, ε = {rows[-1].epsilon:.1f}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Compile, train, print the table, write the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training data (default: 12)")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the files (default: out/demo)")
    parser.add_argument("--backend", default="auto", help="backend of dpq.compile (default: auto)")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error("--epochs must be at least 1")
    args.out.mkdir(parents=True, exist_ok=True)

    started = time.perf_counter()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    digits = Digits.load(generator)
    model = dpq.compile(DigitsNet(), budget=0.75, format="luq_fp4", backend=args.backend, seed=0)
    engine = dpq.PrivacyEngine()
    model, optimizer, criterion, loader = engine.make_private(
        module=model.train(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5),
        criterion=nn.CrossEntropyLoss(),
        data_loader=digits.loader(),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP,
        max_physical_batch_size=64,
    )
    scheduler = dpq.Scheduler(engine, epochs=args.epochs, n_sample=4)
    print(f"\nFor the first epoch: {model.explain()}")

    rows = []
    print(f"\n{HEADING}", flush=True)
    for number in range(1, args.epochs + 1):
        tick = time.perf_counter()
        policy = str(model.policy)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        test = accuracy(model, digits.test_x, digits.test_y)
        seconds = time.perf_counter() - tick
        rows.append(Epoch(number, policy, engine.get_epsilon(DELTA), test, seconds))
        print(rows[-1], flush=True)
        scheduler.step()

    plot(rows, args.out / "accuracy.png")
    model.draw(args.out / "graph.svg")
    model.save_html(args.out / "graph.html", schedule=[record.policy for record in scheduler.history])
    scheduler.history.heat_map(args.out / "schedule.png")
    print(f"\n{engine.ledger.statement(DELTA)}")
    spent = f"epsilon {engine.get_epsilon(DELTA):.2f} at delta {DELTA:g}, one image more or less"
    print(f"\nFinal test accuracy in full precision: {rows[-1].test_accuracy:.1%} (chance: 10%), {spent}")
    files = "accuracy.png, schedule.png, graph.svg and graph.html"
    print(f"Took {time.perf_counter() - started:.0f} s. Wrote {files} to {args.out}")


if __name__ == "__main__":
    main()
