"""Private training on several processes: throughput, communication and memory, with whole parameters and in shards.

    python benchmarks/ddp.py                  # ResNet18 with GroupNorm, 32×32, on 1 and 2 processes
    python benchmarks/ddp.py --memory         # one run each: peak memory alone, which needs no quiet machine
    python benchmarks/ddp.py --smoke          # a small CNN, under a minute

Every process has one thread. All numbers of processes work on the same logical batches, so each process of two has half
of the samples. Runs of all kinds alternate; a run is a set of processes of its own, which warms up before it is timed.
Figures are medians over the runs, with half the range. "waiting" is the time until the slowest process has come as far,
"moving" the time that sums take from there, and gathered parameters. Both are of the last rank. "MB a step" are the
tensors of each collective: over a ring an all-reduce moves them twice, a reduce-scatter and a gather once. Gloo's
reduce-scatter is an all-reduce, so shards move half as much again there. "peak" is the most memory that one process had
resident after the warm-up, of which "base" it had before the model was made (Linux).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile import torchvision_compat

CLASSES = 10


def build(name: str, size: int) -> nn.Module:
    """The model, with the same weights on every process."""
    torch.manual_seed(0)
    if name == "small":
        layers = (nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten())
        return nn.Sequential(*layers, nn.Linear(16 * size**2, CLASSES))
    model: nn.Module = getattr(torchvision_compat.models(), name)(
        num_classes=CLASSES, norm_layer=lambda width: nn.GroupNorm(min(32, width), width)
    )
    return model


def work(args: argparse.Namespace) -> dict[str, float]:
    """Train on this process, and give its figures for the steps after the warm-up."""
    torch.set_num_threads(1)
    several = "RANK" in os.environ
    if several:
        dist.init_process_group("gloo")
    base = resident("VmRSS")
    steps = args.warm + args.steps
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(args.batch * steps, 3, args.size, args.size, generator=generator)
    y = torch.randint(0, CLASSES, (len(x),), generator=generator)
    model = dpq.compile(build(args.model, args.size), budget=args.budget, inner=args.inner)
    if args.shard:
        for block in model.children():
            if any(True for _ in block.parameters()):
                fully_shard(block)
        fully_shard(model)
    sgd = partial(torch.optim.SGD, lr=1e-3)
    optimizers: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": sgd, "adamw": torch.optim.AdamW}
    engine = dpq.PrivacyEngine(accountant="rdp")
    model, optimizer, criterion, loader = engine.make_private(
        module=model.train(),
        optimizer=optimizers[args.optimizer](model.parameters()),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=args.batch, generator=generator),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=args.physical,
    )
    done, samples, started = 0, 0, time.perf_counter()
    traffic = engine.run.world.traffic
    before = (traffic.waiting, traffic.moving, traffic.bytes)
    for images, labels in loader:
        micro = engine.session.micro
        optimizer.zero_grad()
        criterion(model(images), labels).backward()
        optimizer.step()
        samples += len(images)
        if micro is not None and micro.last:
            done += 1
        if done == args.warm and micro is not None and micro.last:
            samples, started = 0, time.perf_counter()
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
            before = (traffic.waiting, traffic.moving, traffic.bytes)
        if done == steps and micro is not None and micro.last:
            break
    seconds = time.perf_counter() - started
    figures = {
        "seconds": seconds,
        "samples": float(samples),
        "waiting": (traffic.waiting - before[0]) / seconds,
        "moving": (traffic.moving - before[1]) / seconds,
        "megabytes": (traffic.bytes - before[2]) / args.steps / 1e6,
        "peak": resident("VmHWM"),
        "base": base,
    }
    if several:
        counted, most = torch.tensor([samples]), torch.tensor([figures["peak"], figures["base"]])
        dist.all_reduce(counted)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        figures["samples"], figures["peak"], figures["base"] = float(counted[0]), float(most[0]), float(most[1])
        dist.destroy_process_group()
    return figures


def resident(kind: str) -> float:
    """Memory of this process in MB: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(kind))


def run(args: argparse.Namespace, processes: int, sharded: bool) -> dict[str, float]:
    """The figures of the last rank of some processes of their own."""
    shown = ("model", "inner", "optimizer", "size", "batch", "physical", "budget", "warm", "steps")
    options = [part for name in shown for part in (f"--{name}", str(getattr(args, name)))]
    command = [sys.executable]
    if processes > 1 or sharded:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command += [__file__, "--child", *options, *(["--shard"] if sharded else [])]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    figures: dict[str, float] = json.loads(lines[-1])
    return figures


def report(name: str, runs: list[dict[str, float]], base: float) -> tuple[float, dict[str, Any]]:
    """Print one line; its throughput and the figures for the file come back."""
    rates = [one["samples"] / one["seconds"] for one in runs]
    rate, spread = statistics.median(rates), (max(rates) - min(rates)) / 2
    kinds = ("waiting", "moving", "megabytes", "peak", "base")
    middle = {kind: statistics.median(one[kind] for one in runs) for kind in kinds}
    print(
        f"{name:<20} {rate:>8.1f} ± {spread:<5.1f} samples/s  {rate / (base or rate):>5.2f}×   communication: "
        f"{middle['moving']:>6.1%} moving {middle['megabytes']:.1f} MB a step, {middle['waiting']:>6.1%} waiting   "
        f"memory: {middle['peak']:.0f} MB peak, {middle['base']:.0f} MB base",
        flush=True,
    )
    return rate, {"samples_per_second": rate, "spread": spread, "runs": len(runs), **middle}


def main() -> None:
    """Measure each number of processes in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18", help="of torchvision, or small")
    parser.add_argument("--inner", default="inductor", help="eager is for memory: times say nothing then")
    parser.add_argument("--optimizer", default="adamw", choices=["sgd", "adamw"])
    parser.add_argument("--forms", default="whole,sharded", help="whole, sharded, or both with a comma between them")
    parser.add_argument("--size", type=int, default=32, help="of the images")
    parser.add_argument("--batch", type=int, default=256, help="expected logical batch of all processes")
    parser.add_argument("--physical", type=int, default=64, help="micro-batch of a process")
    parser.add_argument("--budget", type=int, default=0, help="sites in low precision")
    parser.add_argument("--warm", type=int, default=1, help="steps before the clock runs")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processes", default="1,2", help="numbers of processes, with commas between them")
    parser.add_argument("--threads", type=int, default=1, choices=[1], help="of each process")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--memory", action="store_true", help="one short run of each kind")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--shard", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke:
        args.model, args.size, args.batch, args.physical, args.steps, args.repeats = "small", 8, 16, 8, 3, 1
        args.inner = "eager"
    if args.memory:
        args.steps, args.repeats = min(args.steps, 2), 1
    if args.child:
        warnings.filterwarnings("ignore", message="Secure RNG turned off")
        figures = work(args)
        if os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1):
            print(json.dumps(figures))
        return
    numbers = [int(number) for number in args.processes.split(",")]
    kinds = [(number, form == "sharded") for number in numbers for form in args.forms.split(",")]
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(args.repeats):
        for number, sharded in kinds:
            name = f"{number} process{'es' * (number > 1)}{', sharded' * sharded}"
            runs[name].append(run(args, number, sharded))
    sizes = f"{args.optimizer}, logical batch {args.batch}, micro-batch {args.physical}, one thread each"
    print(f"{args.model} {args.size}×{args.size}, {sizes}")
    base, results = 0.0, {}
    for name, each in runs.items():
        rate, results[name] = report(name, each, base)
        base = base or rate
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, **vars_of(args), **results}, indent=1))


def vars_of(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of a run, for the file."""
    names = ("model", "inner", "optimizer", "size", "batch", "physical", "budget", "steps")
    return {name: getattr(args, name) for name in names}


if __name__ == "__main__":
    main()
