"""The private program of a model, pass by pass: where norms, clip factors and weighted sums are computed.

    python examples/private_program.py [--model resnet18] [--inner inductor] [--out out/private_program]

What to notice: the joint graph is traced once, rewritten by passes, and cut into forward and backward. Forward knows
nothing of clipping. Backward computes the squared norm of each sample's gradient for each parameter, the clip factors
of those, and sums that are weighted by the factors. No gradient of a single sample leaves the program.
"""

import argparse
import logging
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile import torchvision_compat
from dpquant_compile.passes.runner import called_programs

WIDTH = 118


def resnet18() -> nn.Module:
    """torchvision's, with GroupNorm: BatchNorm mixes samples."""
    model: nn.Module = torchvision_compat.models().resnet18(num_classes=10, norm_layer=lambda c: nn.GroupNorm(8, c))
    return model


def small() -> nn.Module:
    """Two convs and a linear layer."""
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 28 * 28, 10))
    return nn.Sequential(*layers)


def short(line: str) -> str:
    """A line that fits."""
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"


def main() -> None:
    """Make a model private, run one step, and read what was compiled."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=("small", "resnet18"), default="small")
    parser.add_argument("--inner", choices=("inductor", "eager"), default="eager", help="what runs the graph")
    parser.add_argument("--out", type=Path, default=Path("out/private_program"), help="folder for the page")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    logging.getLogger("dpquant_compile").setLevel(logging.ERROR)

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(10, (64,)))
    model = dpq.compile({"small": small, "resnet18": resnet18}[args.model](), budget=0.75, inner=args.inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, criterion, loader = dpq.PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=8,
    )
    x, y = next(iter(loader))
    criterion(model(x), y).backward()
    optimizer.step()

    print("== the passes")
    for record in model.trace_log():
        print(short(record.headline))
    cut = next(record for record in reversed(model.trace_log()) if called_programs(record.after))
    for name, program in called_programs(cut.after).items():
        lines = program.strip().splitlines()
        print(f"\n== {name}: {len(lines)} lines, of which these compute norms, clip factors and sums")
        named = ("squared_norms", "clip_factors", "clipped_sum", "samples_left_out")
        print("\n".join(short(line.strip()) for line in lines if line.strip().startswith(named)) or "none")
    print(f"\nWrote {model.save_html(args.out / 'private.html')}")


if __name__ == "__main__":
    main()
