"""A number format of one's own: registered by one call, then known by its name everywhere.

    python examples/own_format.py [--epochs 4] [--backend auto]

The format is `square4`: 0, ±1, ±4, ±9 … ±49, the squares of 0 to 7, in units of a scale per sample. Its levels are
denser near zero than those of `uniform4`, and less so than the powers of two of `luq_fp4`.

What to notice
- A format is a grid and a rounding function, `(x, bits, block_dim) -> (q, unit)`, in plain torch. What it must keep to
  is written at the top of numerics/rounding.py; the checks below are for the two rules that matter most:
  rounding has no bias, and no sample's rounding depends on another's.
- SQNR, the power of a signal over that of its rounding error, tells formats apart without any training. Which is best
  hangs on the signal: evenly spaced levels suit the normal distribution, gradients have heavier tails.
- The kernels of a new format are the emulated ones: right numbers, no speed. `explain()` says so.
"""

import argparse
import math

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile.numerics.formats import format_names

TINY = 2.0**-126  # the smallest normal float32
TEST_SIZE, DELTA = 360, 1e-4


def round_squares(x: Tensor, bits: Tensor, block_dim: int) -> tuple[Tensor, Tensor]:
    """Stochastic rounding to 0, ±1, ±4 … ±49 times `unit` = max|x| / 49 of each sample; dimension 0 is the samples."""
    within = tuple(range(1, x.dim()))
    # amax over no dimension would be one over all of them, and so over the samples.
    largest = x.abs().amax(dim=within, keepdim=True) if within else x.abs()
    finite = largest < torch.inf  # false for NaN too
    unit = torch.where(finite, largest / 49.0, 0.0).clamp(min=TINY)
    v = (torch.where(finite & (x.abs() >= TINY), x.abs(), 0.0) / unit).clamp(max=49.0)
    root = v.sqrt().floor()
    root = torch.where(root * root > v, root - 1.0, root)  # a square root that was rounded up
    low, gap = root * root, 2.0 * root + 1.0  # the level below, and how far it is to the one above
    chance = (((bits >> 8) & 0xFFFFFF) | 1).to(torch.float32) * 2.0**-24  # uniform in (0, 1)
    q = torch.where(chance < (v - low) / gap, low + gap, low)
    q = torch.where((x < 0) & (q > 0), -q, q)  # zeros are +0
    return q, torch.where(finite, unit, torch.nan)  # a sample that is not finite becomes NaN, and only that sample


squares = tuple(float(i * i) for i in range(8))
SQUARE4 = dpq.register_format(
    dpq.Format(
        "square4",
        bits=4,
        grid=(*(-level for level in reversed(squares[1:])), *squares),
        round=round_squares,
        describe="0 and ±1, ±4 … ±49, one scale per sample",
    )
)
FORMATS = ("luq_fp4", "uniform4", "square4")


def check() -> None:
    """The two rules that matter most, on some numbers."""
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    tries = torch.stack([dpq.quantize(x, "square4", seed=seed) for seed in range(500)])
    off = (tries.mean(0) - x).abs() / (tries.std(0) / math.sqrt(len(tries)) + 1e-6)
    print(f"Bias of the mean of 500 roundings: at most {off.max():.1f} standard errors (chance alone: about 3)")
    others = torch.cat([x, 1e6 * torch.randn(3, 64)])
    alone, together = dpq.quantize(x, "square4"), dpq.quantize(others, "square4")[:1]
    print(f"A sample rounds the same in another batch: {torch.equal(alone, together)}")


def sqnr(x: Tensor, name: str) -> float:
    """Signal to quantization noise, in decibels."""
    error = dpq.quantize(x, name) - x
    return 10 * math.log10(float(x.square().sum() / error.square().sum()))


def build() -> nn.Module:
    """Three sites, the same parameters at every call."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(name: str, x: Tensor, y: Tensor, args: argparse.Namespace) -> tuple[dpq.CompiledModule, float]:
    """A private run with every site in the format; the test accuracy is that of full precision."""
    model = dpq.compile(build(), budget=1.0, format=name, backend=args.backend, inner=args.inner)
    engine = dpq.PrivacyEngine()
    data = TensorDataset(x[TEST_SIZE:], y[TEST_SIZE:])
    model, optimizer, criterion, loader = engine.make_private(
        module=model.train(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=256, generator=torch.Generator().manual_seed(1)),
        noise_multiplier=1.3,
        max_grad_norm=1.0,
        max_physical_batch_size=64,
        noise_generator=torch.Generator().manual_seed(2),  # the same noise for every format: for comparison only
    )
    for _ in range(args.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        right: Tensor = model(x[:TEST_SIZE]).argmax(1) == y[:TEST_SIZE]
    return model, right.float().mean().item()


def main() -> None:
    """Check the format, compare SQNRs, train with each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4, help="passes over the training data (default: 4)")
    parser.add_argument("--backend", default="auto", help="kernels of the sites: auto or reference (default: auto)")
    parser.add_argument("--inner", default="eager", help="inductor, aot_eager or eager (default: eager)")
    args = parser.parse_args()

    print(f"Formats now: {', '.join(format_names())}")
    check()

    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], y[order]
    normal = torch.randn(64, 1024, generator=generator)
    heavy = normal**3
    print(f"\n{'format':<10}  {'SQNR, normal':>12}  {'heavy tails':>12}  {'test accuracy':>13}")
    for name in FORMATS:
        model, right = train(name, x, y, args)
        print(f"{name:<10}  {sqnr(normal, name):>9.1f} dB  {sqnr(heavy, name):>9.1f} dB  {right:>13.1%}", flush=True)
    print(f"\n{model.train().explain()}")


if __name__ == "__main__":
    main()
