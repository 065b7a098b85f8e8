"""A residual network on small colour images, with Opacus or with this library: the loop is the same.

    python examples/opacus/cifar10.py [--engine opacus] [--data folder] [--epochs 20]

What to notice
- `with_opacus` and `with_dpquant` differ in five lines, which are numbered. All the rest serves both: optimizer,
  learning-rate schedule, loop.
- The network normalises by group. BatchNorm mixes samples, and both engines refuse it; `ModuleValidator.fix(model)` and
  `dpq.replace_batch_norm(model)` put GroupNorm in its place.

`--data` is a folder with CIFAR-10 in its binary form (`data_batch_1.bin` and so on). Without it: images that the script
makes, whose class is the direction and colour of their stripes.
"""

import argparse
from pathlib import Path
from typing import Any

import opacus
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq

CLIP, DELTA = 1.0, 1e-5


class Block(nn.Module):
    """Two convolutions around a shortcut, which is a convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        z: Tensor = (self.norm2(self.conv2(y)) + self.shortcut(x)).relu()
        return z


class ResNet(nn.Module):
    """A stem, three stages of residual blocks, and a classifier; images [B, 3, 32, 32] to 10 classes."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        sizes = [(width, 1), (2 * width, 2), (4 * width, 2)]
        stages, inputs = [], width
        for outputs, stride in sizes:
            for place in range(blocks):
                stages.append(Block(inputs, outputs, 1 if place else stride))
                inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stages(self.stem(x)))
        y: Tensor = self.fc(x.view(x.size(0), -1))
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


def data(folder: Path | None, count: int) -> tuple[TensorDataset, TensorDataset]:
    """Training and test images, [N, 3, 32, 32], with labels; `count` of them where they are made here."""
    if folder is not None:
        return _binary(sorted(folder.glob("data_batch_*.bin"))), _binary([folder / "test_batch.bin"])
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (count,), generator=generator)
    angle = labels % 5 * torch.pi / 5
    place = torch.linspace(-1, 1, 32)
    slope = angle.cos()[:, None, None] * place[:, None] + angle.sin()[:, None, None] * place
    shift = 6 * torch.rand(count, 1, 1, generator=generator)
    stripes = torch.sin(9 * slope + shift)[:, None]
    colour = torch.where(labels[:, None] < 5, torch.tensor([1.0, 0.3, 0.3]), torch.tensor([0.3, 0.3, 1.0]))
    images = stripes * colour[:, :, None, None] + 0.5 * torch.randn(count, 3, 32, 32, generator=generator)
    cut = 4 * count // 5
    return TensorDataset(images[:cut], labels[:cut]), TensorDataset(images[cut:], labels[cut:])


def _binary(files: list[Path]) -> TensorDataset:
    """Images and labels from files in CIFAR-10's binary form: a byte of the label, then 3072 of pixels."""
    rows = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).view(-1, 3073)
    return TensorDataset(rows[:, 1:].reshape(-1, 3, 32, 32).float().div(127.5).sub(1), rows[:, 0].long())


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
    parser.add_argument("--data", type=Path, default=None, help="a folder with CIFAR-10's binary files")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=128, help="expected size of a Poisson batch")
    parser.add_argument("--physical", type=int, default=64, help="how many images fit into memory")
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--sigma", type=float, default=1.0, help="noise multiplier")
    parser.add_argument("--inner", choices=("inductor", "aot_eager", "eager"), default="inductor")
    parser.add_argument("--smoke", action="store_true", help="a run of seconds, on few images")
    options = parser.parse_args()
    width, blocks, count = 16, 2, 5000
    if options.smoke:
        options.epochs, options.batch, options.physical, options.inner = 2, 16, 16, "eager"
        width, blocks, count = 4, 1, 80
    torch.manual_seed(0)
    train, test = data(options.data, count)

    model = ResNet(width, blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(train, batch_size=options.batch)
    make = with_opacus if options.engine == "opacus" else with_dpquant
    engine, model, optimizer, criterion, loader = make(model, optimizer, criterion, loader, options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)

    for epoch in range(1, options.epochs + 1):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            optimizer.step()
        schedule.step()
        spent = engine.get_epsilon(DELTA)
        print(f"epoch {epoch}: test {accuracy(model, test):.1%}; epsilon {spent:.4f} at delta {DELTA:g}")


if __name__ == "__main__":
    main()
