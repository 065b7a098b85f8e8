"""A small CNN on images of digits, with Opacus or with this library: the loop is the same.

    python examples/opacus/mnist.py [--engine opacus] [--data folder] [--epochs 10]

What to notice
- `with_opacus` and `with_dpquant` differ in five lines, which are numbered. All the rest serves both.
- ε is the same to the last digit. The noise comes from other generators, so accuracies differ by chance as well.
- The model is as beginners write it: `F.max_pool2d`, and `x.view` before the linear layers.

`--data` is a folder with the four files of MNIST or Fashion-MNIST (`train-images-idx3-ubyte.gz` and so on), by default
that of Debian's package dataset-fashion-mnist. Without it: scikit-learn's digits, enlarged to 28 by 28 pixels.
"""

import argparse
import gzip
from pathlib import Path
from typing import Any

import opacus
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
CLIP, DELTA = 1.0, 1e-5


class SmallCNN(nn.Module):
    """Two convolutions and two linear layers; images [B, 1, 28, 28] to 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 3 * 3, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.view(x.size(0), -1)
        y: Tensor = self.fc2(F.relu(self.fc1(x)))
        return y


def with_opacus(model: nn.Module, optimizer: Any, criterion: Any, loader: Any, options: argparse.Namespace) -> Any:
    """Engine, model, optimizer, loss and loader, all private."""
    engine = opacus.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=options.sigma,
        max_grad_norm=CLIP,
    )
    return engine, model, optimizer, criterion, loader


def with_dpquant(model: nn.Module, optimizer: Any, criterion: Any, loader: Any, options: argparse.Namespace) -> Any:
    """Engine, model, optimizer, loss and loader, all private."""
    model = dpq.compile(model, budget=0.5, inner=options.inner)  # 1: half of the layers in four bits
    engine = dpq.PrivacyEngine()  # 2
    model, optimizer, criterion, loader = engine.make_private(  # 3: the loss becomes one loss per sample
        module=model,
        optimizer=optimizer,
        criterion=criterion,  # 4
        data_loader=loader,
        noise_multiplier=options.sigma,
        max_grad_norm=CLIP,
        max_physical_batch_size=options.physical,  # 5: where Opacus takes a BatchMemoryManager
    )
    return engine, model, optimizer, criterion, loader


def data(folder: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test images, [N, 1, 28, 28], with labels."""
    if folder is not None:
        return _idx(folder, "train"), _idx(folder, "t10k")
    digits = load_digits()
    small = torch.tensor(digits.images, dtype=torch.float32).div(8).sub(1)[:, None]
    images, labels = F.interpolate(small, size=28, mode="bilinear"), torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return tuple(TensorDataset(images[part], labels[part]) for part in (order[:1500], order[1500:]))  # type: ignore[return-value]


def _idx(folder: Path, part: str) -> TensorDataset:
    """Images and labels from files in the format of MNIST."""
    raw = [
        gzip.decompress((folder / f"{part}-{kind}-ubyte.gz").read_bytes()) for kind in ("images-idx3", "labels-idx1")
    ]
    pixels = torch.frombuffer(bytearray(raw[0]), dtype=torch.uint8, offset=16).view(-1, 1, 28, 28)
    labels = torch.frombuffer(bytearray(raw[1]), dtype=torch.uint8, offset=8)
    return TensorDataset(pixels.float().div(127.5).sub(1), labels.long())


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """The share of test images that are classified rightly."""
    model.eval()
    images, labels = test.tensors
    return float((model(images).argmax(1) == labels).float().mean())


def main() -> None:
    """Train, and print what was spent after each epoch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--engine", choices=("dpquant", "opacus"), default="dpquant")
    parser.add_argument(
        "--data", type=Path, default=DEBIAN if DEBIAN.is_dir() else None, help="a folder of MNIST's form"
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=128, help="expected size of a Poisson batch")
    parser.add_argument("--physical", type=int, default=64, help="how many images fit into memory")
    parser.add_argument("--lr", type=float, default=0.25)
    parser.add_argument("--sigma", type=float, default=1.0, help="noise multiplier")
    parser.add_argument("--inner", choices=("inductor", "aot_eager", "eager"), default="inductor")
    parser.add_argument("--smoke", action="store_true", help="a run of seconds, on few images")
    options = parser.parse_args()
    torch.manual_seed(0)
    train, test = data(options.data)
    if options.smoke:
        options.epochs, options.batch, options.physical, options.inner = 2, 32, 32, "eager"
        train = TensorDataset(*train[:192])

    model = SmallCNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(train, batch_size=options.batch)
    make = with_opacus if options.engine == "opacus" else with_dpquant
    engine, model, optimizer, criterion, loader = make(model, optimizer, criterion, loader, options)

    for epoch in range(1, options.epochs + 1):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            optimizer.step()
        spent = engine.get_epsilon(DELTA)
        print(f"epoch {epoch}: test {accuracy(model, test):.1%}; epsilon {spent:.4f} at delta {DELTA:g}")


if __name__ == "__main__":
    main()
