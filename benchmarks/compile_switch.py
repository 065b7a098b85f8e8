"""What compiling and switching cost: ours against torch.compile of the same model, in one run.

    python benchmarks/compile_switch.py                  # ResNet18 at 32×32
    python benchmarks/compile_switch.py --smoke          # a small CNN, seconds

Each cold compilation runs in a process of its own with an empty Inductor cache; ours and torch.compile's alternate.
Prints medians and ratios: compile time, time per switch, recompiles over random policies and batch sizes, and a
training step of the link table against specialised variants.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpquant_compile as dpq
from dpquant_compile import torchvision_compat


class Block(nn.Module):
    """A residual block with group normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class SmallNet(nn.Module):
    """The smoke test's model."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block1, self.block2 = nn.Conv2d(3, 16, 3, padding=1), Block(16), Block(16)
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.block2(self.block1(self.stem(x))).mean((2, 3))
        return F.linear(features, self.fc.weight, self.fc.bias)


def build(name: str) -> nn.Module:
    """A model by name, with the same weights each time."""
    torch.manual_seed(0)
    return SmallNet() if name == "small" else getattr(torchvision_compat.models(), name)(num_classes=10)


def batch(size: int, count: int) -> tuple[Tensor, Tensor]:
    """Made-up images and labels."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, size, size, generator=generator)
    return x, torch.randint(0, 10, (count,), generator=generator)


def train_step(model: Callable[..., Tensor], x: Tensor, y: Tensor) -> None:
    """Forward and backward."""
    F.cross_entropy(model(x), y).backward()


def cold(kind: str, args: argparse.Namespace) -> float:
    """Seconds to compile forward and backward in a fresh process with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--child", kind, "--model", args.model, "--size", str(args.size)]
        command += ["--batch", str(args.batch), "--threads", str(args.threads)]
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return float(done.stdout.strip().splitlines()[-1])


def child(kind: str, args: argparse.Namespace) -> float:
    """What a fresh process measures."""
    model = build(args.model)
    x, y = batch(args.size, args.batch)
    start = time.perf_counter()
    if kind == "ours":
        ours = dpq.compile(model, budget=0.75)
        ours.set_policy("none")  # the quantizer's own compilation is counted apart
        compiled: Callable[..., Tensor] = ours
    else:
        compiled = torch.compile(model, dynamic=None if kind == "static" else True)
    train_step(compiled, x, y)
    return time.perf_counter() - start


def median(samples: list[float]) -> str:
    """Median and half the range."""
    spread = (max(samples) - min(samples)) / 2
    return f"{statistics.median(samples):9.3f} ± {spread:.3f}"


def switching(model: "dpq.CompiledModule", args: argparse.Namespace) -> dict[str, float]:
    """Random policies on random batch sizes, where a recompilation would be an error."""
    rng = random.Random(0)
    names, times = model.sites.names, []
    graphs = len(model.compiled_graphs)
    torch.compiler.set_stance("fail_on_recompile")
    for _ in range(args.policies):
        policy = rng.sample(names, rng.randint(0, len(names)))
        start = time.perf_counter()
        model.set_policy(policy)
        times.append(time.perf_counter() - start)
        train_step(model, *batch(args.size, rng.randint(2, args.batch)))
    torch.compiler.set_stance("default")
    return {"switch_us": statistics.median(times) * 1e6, "recompiles": len(model.compiled_graphs) - graphs}


def variants(model: "dpq.CompiledModule", args: argparse.Namespace) -> dict[str, float]:
    """A step with the link table and with a specialised variant, interleaved, for one policy of 75 %."""
    policy = random.Random(1).sample(model.sites.names, round(0.75 * len(model.sites)))
    x, y = batch(args.size, args.batch)
    model.set_policy(policy)
    start = time.perf_counter()
    model.precompile([policy], background=False).wait()
    compile_seconds = time.perf_counter() - start
    specialised: list[float] = []
    link: list[float] = []
    for _ in range(args.repeats * 5 + 1):
        for use, times in ((True, specialised), (False, link)):
            model.use_variants = use
            start = time.perf_counter()
            train_step(model, x, y)
            times.append(time.perf_counter() - start)
    model.use_variants = True
    return {
        "variant_compile_s": compile_seconds,
        "link_table_ms": statistics.median(link[1:]) * 1e3,
        "variant_ms": statistics.median(specialised[1:]) * 1e3,
    }


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3, help="cold compilations of each kind")
    parser.add_argument("--policies", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--skip-variants", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--child", choices=("ours", "static", "dynamic"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke:
        args.model, args.size, args.batch, args.repeats, args.policies, args.skip_variants = "small", 8, 8, 1, 5, True
    torch.set_num_threads(args.threads)
    if args.child:
        print(child(args.child, args))
        return
    compile_times: dict[str, list[float]] = {"ours": [], "static": [], "dynamic": []}
    for _ in range(args.repeats):
        for kind, times in compile_times.items():
            times.append(cold(kind, args))
    model = dpq.compile(build(args.model), budget=0.75)
    x, y = batch(args.size, args.batch)
    for policy in ("none", "all"):
        model.set_policy(policy)
        train_step(model, x, y)
    figures: dict[str, float] = switching(model, args)
    if not args.skip_variants:
        figures |= variants(model, args)
    ours, static, dynamic = (statistics.median(compile_times[kind]) for kind in ("ours", "static", "dynamic"))
    figures |= {"ours_s": ours, "torch_compile_s": static, "torch_compile_dynamic_s": dynamic}
    figures |= {"ratio": ours / static, "ratio_dynamic": ours / dynamic}
    print(f"{args.model} {args.size}×{args.size}, batch {args.batch}, {args.threads} threads, {len(model.sites)} sites")
    print(f"compile, ours                    {median(compile_times['ours'])} s")
    print(f"compile, torch.compile           {median(compile_times['static'])} s   ours/theirs {ours / static:.2f}")
    print(f"compile, torch.compile dynamic   {median(compile_times['dynamic'])} s   ours/theirs {ours / dynamic:.2f}")
    print(f"switch, median of {args.policies:<4}           {figures['switch_us']:9.1f} µs")
    print(f"recompiles over {args.policies} policies and batch sizes: {figures['recompiles']:.0f}")
    if not args.skip_variants:
        ratio = figures["link_table_ms"] / figures["variant_ms"]
        print(f"step, link table                 {figures['link_table_ms']:9.1f} ms")
        print(f"step, specialised variant        {figures['variant_ms']:9.1f} ms   link table/variant {ratio:.2f}")
        print(f"compile, one variant             {figures['variant_compile_s']:9.1f} s")
    if args.json:
        args.json.write_text(json.dumps({**vars(args), "json": None, **figures}, indent=1, default=str))


if __name__ == "__main__":
    main()
