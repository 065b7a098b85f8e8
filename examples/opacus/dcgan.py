"""A generator of images whose discriminator trains privately, with Opacus or with this library: the loop is the same.

    python examples/opacus/dcgan.py [--engine opacus] [--data folder] [--epochs 40] [--out pictures.pt]

Only the discriminator sees real images, so it alone trains privately. The generator learns from what the private
optimizer released, which costs no more privacy (post-processing). Four things must hold for that.

What to notice
- `with_opacus` and `with_dpquant` differ in five lines, which are numbered. All the rest serves both.
- A record of the private model `Critic` is a real image *and* the generated image beside it. One forward and one
  backward clip both gradients as one, so the noise covers the pair, and generated images cost nothing more.
- Each generated image depends on its own random numbers alone: the generator normalises by group. With BatchNorm, each
  would depend on how many there are, so a real image more would change them all.
- The generator's steps do not read real batches, nor their sizes, which are private. They come after each release, on
  a fixed number of images.
- The generator learns from `judge`, a copy of the released discriminator. Its gradients thus reach neither the private
  model nor, with Opacus, the hooks in it.

`--data` is a folder with the training files of MNIST or Fashion-MNIST, by default that of Debian's package
dataset-fashion-mnist. Without it: scikit-learn's digits, enlarged to 28 by 28 pixels.
"""

import argparse
import copy
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
CLIP, DELTA, LATENT = 1.0, 1e-5, 32


class Generator(nn.Module):
    """Random numbers [B, 32] to images [B, 1, 28, 28]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.start = nn.Linear(LATENT, 2 * width * 7 * 7)
        self.grow = nn.Sequential(
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
            nn.Tanh(),
        )

    def forward(self, noise: Tensor) -> Tensor:
        y: Tensor = self.grow(self.start(noise).view(-1, 2 * self.width, 7, 7))  # Poisson batches may be empty
        return y


class Discriminator(nn.Module):
    """Images [B, 1, 28, 28] to how real they look, [B, 1]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 4, stride=2, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 4, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.fc = nn.Linear(2 * width * 7 * 7, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.conv1(x), 0.2)
        x = F.leaky_relu(self.norm(self.conv2(x)), 0.2)
        y: Tensor = self.fc(x.flatten(1))
        return y


class Critic(nn.Module):
    """The private model: a record is a real image and a generated one; gives [B, 2]."""

    def __init__(self, discriminator: nn.Module) -> None:
        super().__init__()
        self.discriminator = discriminator

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        return torch.cat((self.discriminator(real), self.discriminator(fake)), 1)


REAL, FAKE = torch.tensor([1.0, 0.0])


def targets(count: int) -> Tensor:
    """What the critic shall say of pairs of a real and a generated image."""
    return torch.stack((REAL, FAKE)).expand(count, 2)


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


def data(folder: Path | None) -> TensorDataset:
    """Training images, [N, 1, 28, 28], from -1 to 1."""
    if folder is not None:
        raw = gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())
        pixels = torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=16).view(-1, 1, 28, 28)
        return TensorDataset(pixels.float().div(127.5).sub(1))
    small = torch.tensor(load_digits().images, dtype=torch.float32).div(8).sub(1)[:, None]
    return TensorDataset(F.interpolate(small, size=28, mode="bilinear"))


@torch.no_grad()
def follow(judge: nn.Module, released: nn.Module) -> bool:
    """Give `judge` the released parameters; whether they are new. Within a batch that is cut in parts they are not."""
    pairs = list(zip(judge.parameters(), released.parameters(), strict=True))
    new = any(not torch.equal(mine, theirs) for mine, theirs in pairs)
    for mine, theirs in pairs:
        mine.copy_(theirs)
    return new


def main() -> None:
    """Train, and print what was spent after each epoch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--engine", choices=("dpquant", "opacus"), default="dpquant")
    parser.add_argument(
        "--data", type=Path, default=DEBIAN if DEBIAN.is_dir() else None, help="a folder of MNIST's form"
    )
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64, help="expected size of a Poisson batch")
    parser.add_argument("--physical", type=int, default=64, help="how many pairs fit into memory")
    parser.add_argument("--sigma", type=float, default=0.7, help="noise multiplier")
    parser.add_argument("--inner", choices=("inductor", "aot_eager", "eager"), default="inductor")
    parser.add_argument("--out", type=Path, help="write 64 generated images to this file, a tensor")
    parser.add_argument("--smoke", action="store_true", help="a run of seconds, on few images")
    options = parser.parse_args()
    torch.manual_seed(0)
    train, width = data(options.data), 16
    if options.smoke:
        options.epochs, options.batch, options.physical, options.inner = 2, 16, 16, "eager"
        train, width = TensorDataset(*train[:64]), 4

    generator, discriminator = Generator(width), Discriminator(width)
    judge = copy.deepcopy(discriminator).requires_grad_(False)
    critic = Critic(discriminator)
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    loader = DataLoader(train, batch_size=options.batch)
    make = with_opacus if options.engine == "opacus" else with_dpquant
    engine, critic, optimizer, criterion, loader = make(critic, optimizer, criterion, loader, options)

    for epoch in range(1, options.epochs + 1):
        critic.train()
        for (real,) in loader:
            # A record: a real image, and a generated one that takes no gradient.
            fake = generator(torch.randn(len(real), LATENT)).detach()
            optimizer.zero_grad()
            criterion(critic(real, fake), targets(len(real))).backward()
            optimizer.step()
            if not follow(judge, discriminator):
                continue
            # Post-processing of what was released: no real image, no size of a real batch.
            verdict = judge(generator(torch.randn(options.batch, LATENT)))
            optimizer_g.zero_grad()
            loss_g = F.binary_cross_entropy_with_logits(verdict, REAL.expand_as(verdict))
            loss_g.backward()
            optimizer_g.step()
        spent = engine.get_epsilon(DELTA)
        print(f"epoch {epoch}: the generator's loss {loss_g.item():.3f}; epsilon {spent:.4f} at delta {DELTA:g}")

    if options.out is not None:
        torch.save(generator(torch.randn(64, LATENT)).detach(), options.out)
        print(f"64 generated images are in {options.out}")


if __name__ == "__main__":
    main()
