"""What an analysis of the scheduler costs, against the training between two analyses; and a long schedule.

    python benchmarks/analysis_cost.py                   # ResNet18, CIFAR-10's sizes, the paper's settings
    python benchmarks/analysis_cost.py --smoke           # a small CNN, seconds

The training of two epochs is extrapolated from the median of private micro-batch steps, which are measured in turn with
the analyses. `--schedule` runs that many epochs of one optimizer step each with analyses between them, counts the
programs that were compiled on the way, and draws the heat map.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dpquant_compile as dpq
from dpquant_compile import torchvision_compat


class MadeUp(Dataset[tuple[Tensor, int]]):
    """Images of noise, made when they are asked for."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, self.size, self.size, generator=generator), index % 10


def build(name: str) -> nn.Module:
    """A model by name, with the same weights each time."""
    torch.manual_seed(0)
    if name == "small":
        layers = (nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        return nn.Sequential(*layers, nn.Linear(32, 10))
    model: nn.Module = getattr(torchvision_compat.models(), name)(
        num_classes=10, norm_layer=lambda width: nn.GroupNorm(min(32, width), width)
    )
    return model


def private(args: argparse.Namespace, count: int, batch: int) -> tuple[dpq.PrivacyEngine, Any, Any, Any, Any]:
    """The engine and what it made, for a made-up dataset."""
    inner = "eager" if args.model == "small" else "inductor"  # the smoke run's, of which times say nothing
    model = dpq.compile(build(args.model), budget=0.75, inner=inner)
    engine = dpq.PrivacyEngine(accountant="rdp")
    made = engine.make_private(
        module=model.train(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(MadeUp(count, args.size), batch_size=batch),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=args.physical,
    )
    return engine, *made


def costs(args: argparse.Namespace) -> dict[str, float]:
    """Seconds of two epochs of training and of one analysis by each estimator."""
    engine, model, optimizer, criterion, loader = private(args, args.samples, args.batch)
    batches = iter(loader)
    x, y = next(batches)
    steps: list[float] = []
    analyses: dict[str, list[float]] = {"per_sample": [], "paper": []}

    def train() -> None:
        optimizer.zero_grad()
        criterion(model(x), y).backward()

    engine.session.announce(None)  # these steps are given by hand, again and again
    train()
    for kind, times in analyses.items():
        scheduler = dpq.Scheduler(engine, mode="dpquant", estimator=kind, n_interval=1)
        for turn in range(args.repeats):
            for _ in range(3):
                start = time.perf_counter()
                train()
                steps.append(time.perf_counter() - start)
            start = time.perf_counter()
            scheduler.step()
            if turn or args.repeats == 1:  # the first one compiles the program of the evaluation
                times.append(time.perf_counter() - start)
    micro = args.samples / args.physical
    epochs = 2 * micro * statistics.median(steps)
    figures = {"two_epochs_s": epochs, "micro_batch_ms": 1e3 * statistics.median(steps), "sites": len(model.sites)}
    for kind, times in analyses.items():
        figures |= {f"{kind}_s": statistics.median(times), f"{kind}_share": statistics.median(times) / epochs}
    return figures


def schedule(args: argparse.Namespace) -> dict[str, float]:
    """Many short epochs: how many programs are compiled after the first two epochs and their analysis."""
    engine, model, optimizer, criterion, loader = private(args, args.physical, args.physical)
    scheduler = dpq.Scheduler(engine, epochs=args.schedule, mode="dpquant", n_sample=0.25)
    graphs = 0
    for epoch in range(args.schedule):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        scheduler.step()
        if epoch == 1:
            graphs = len(model.compiled_graphs)
    args.out.mkdir(parents=True, exist_ok=True)
    scheduler.history.heat_map(args.out / "schedule.png")
    return {
        "epochs": args.schedule,
        "policies": len({record.policy for record in scheduler.history}),
        "recompiles": len(model.compiled_graphs) - graphs,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--physical", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--schedule", type=int, default=60, help="epochs of the long schedule; 0 leaves it out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out/analysis_cost"))
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.smoke:
        args.model, args.size, args.samples, args.batch, args.physical = "small", 8, 256, 64, 16
        args.repeats, args.schedule = 1, 4
    torch.set_num_threads(args.threads)
    figures = costs(args)
    print(f"{args.model} {args.size}×{args.size}, {args.samples} samples, physical batch {args.physical}")
    print(f"private micro-batch           {figures['micro_batch_ms']:9.1f} ms")
    print(f"two epochs of training        {figures['two_epochs_s']:9.1f} s")
    for kind in ("per_sample", "paper"):
        print(f"analysis, {kind:<18}  {figures[f'{kind}_s']:9.1f} s   {figures[f'{kind}_share']:.1%} of two epochs")
    if args.schedule:
        figures |= schedule(args)
        print(
            f"{args.schedule} epochs, {figures['policies']} different policies, {figures['recompiles']:.0f} recompiles"
        )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
