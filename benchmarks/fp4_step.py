"""Private training in low precision: whole steps by recipe and share of quantized sites, against full precision.

    python benchmarks/fp4_step.py                        # ResNet18, WideResNet-16-4 and a transformer
    python benchmarks/fp4_step.py --scaling              # how the cost grows with the batch
    python benchmarks/fp4_step.py --profile              # where the time of a step goes
    python benchmarks/fp4_step.py --smoke                # a small CNN, seconds

Times are medians over repeats that alternate between the contestants, on two threads: forward, backward and clipping in
one column, noise and the optimizer's step in the other. "int4 90 %" means nine tenths of the sites by that recipe,
drawn at random by a fixed seed; smaller shares are subsets of larger ones. "eager bfloat16" is plain training under
torch.autocast, "private bfloat16" is `high="bfloat16"` with no site low. "peaks" measures what this machine can do at
best.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile import torchvision_compat
from dpquant_compile.backends.cpu_int8 import build as native

CLASSES = 10
# Shares of low sites in per cent, by recipe; the first recipe's program also runs in full precision.
CONTEST = {"int4": (0, 50, 75, 90, 100), "int8": (90, 100), "luq_fp4": (90, 100)}


@dataclass(frozen=True)
class Config:
    """A model, the size of its images or the length of its sequences, and the physical batch."""

    model: str
    size: int
    batch: int

    def __str__(self) -> str:
        return f"{self.model}, {self.size}, batch {self.batch}"

    @property
    def inner(self) -> str:
        """What compiles it: for the smoke run, of which times say nothing, what is quick to start."""
        return "aot_eager" if self.model == "small" else "inductor"


class WideBlock(nn.Module):
    """Norm, ReLU and conv, twice, around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(16, inputs), nn.GroupNorm(16, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(x))
        y: Tensor = self.conv2(F.relu(self.norm2(self.conv1(h)))) + self.short(h if self.conv1.stride != (1, 1) else x)
        return y


def wide_resnet() -> nn.Module:
    """WideResNet-16-4 with GroupNorm."""
    widths, layers = (64, 128, 256), [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    inputs, blocks = 16, list[nn.Module]()
    for stage, width in enumerate(widths):
        for number in range(2):
            blocks.append(WideBlock(inputs, width, 2 if stage and not number else 1))
            inputs = width
    tail = (nn.GroupNorm(16, inputs), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))
    return nn.Sequential(*layers, *blocks, *tail)


class Transformer(nn.Module):
    """Six encoder layers of BERT's width on tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(8192, 768), nn.Embedding(512, 768)
        layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, activation="gelu", batch_first=True)
        self.layers = nn.ModuleList(
            [layer] + [nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", batch_first=True) for _ in range(5)]
        )
        self.head = nn.Linear(768, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            h = layer(h)
        y: Tensor = self.head(h.mean(1))
        return y


def build(config: Config) -> nn.Module:
    """The model, with the same weights each time."""
    torch.manual_seed(0)
    if config.model == "small":
        layers = (nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten())
        return nn.Sequential(*layers, nn.Linear(16 * (config.size - 2) ** 2, CLASSES))
    if config.model == "wrn16_4":
        return wide_resnet()
    if config.model == "transformer":
        return Transformer()
    half = config.model == "half_resnet18"  # its first two stages: a third of the time to compile
    model: Any = getattr(torchvision_compat.models(), config.model.removeprefix("half_"))(
        num_classes=CLASSES, norm_layer=lambda width: nn.GroupNorm(min(32, width), width)
    )
    if half:
        model.layer3, model.layer4, model.fc = nn.Identity(), nn.Identity(), nn.Linear(128, CLASSES)
    assert isinstance(model, nn.Module)
    return model


def batch_of(config: Config) -> tuple[Tensor, Tensor]:
    """One fixed batch."""
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, CLASSES, (config.batch,), generator=generator)
    if config.model == "transformer":
        return torch.randint(0, 8192, (config.batch, config.size), generator=generator), y
    return torch.randn(config.batch, 3, config.size, config.size, generator=generator), y


Step = tuple[Callable[[], None], Callable[[], None]]


def plain(config: Config, compiled: bool, bfloat16: bool = False) -> Step:
    """Training without privacy, in float32 or under autocast: gradients, and the optimizer's step."""
    model, (x, y) = build(config), batch_of(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    call: Any = torch.compile(model, backend=config.inner) if compiled else model

    def gradients() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = F.cross_entropy(call(x), y)
        loss.backward()

    return gradients, lambda: optimizer.step()


class Private:
    """Private training, with the policy as data."""

    def __init__(self, config: Config, recipe: str = "int4", high: str = "float32") -> None:
        self.x, self.y = batch_of(config)
        numerics: dict[str, Any] = {"recipe": recipe} if recipe in dpq.recipe_names() else {"format": recipe}
        model = dpq.compile(build(config), budget=0, inner=config.inner, high=high, **numerics)
        made = dpq.PrivacyEngine(accountant="rdp").make_private(
            module=model.train(),
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(TensorDataset(self.x, self.y), batch_size=config.batch),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            max_physical_batch_size=config.batch,
        )
        self.model, self.optimizer, self.criterion = made[:3]
        self.gradients()
        self.optimizer.step()  # compiled by now

    def at(self, share: int) -> Step:
        """A step with that many per cent of the sites in low precision."""
        names = list(self.model.sites.names)
        random.Random(0).shuffle(names)
        chosen = names[: round(share / 100 * len(names))]

        def gradients() -> None:
            self.model.set_policy(chosen)
            self.gradients()

        return gradients, lambda: self.optimizer.step()

    def gradients(self) -> None:
        self.optimizer.zero_grad()
        self.criterion(self.model(self.x), self.y).backward()


def timed(function: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def measure(steps: dict[str, Step], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Times of all contestants, taken in turn."""
    times: dict[str, dict[str, list[float]]] = {name: {"gradients": [], "step": []} for name in steps}
    for turn in range(repeats + 1):
        for name, (gradients, step) in steps.items():
            taken = timed(gradients), timed(step)
            if turn:  # the first one compiles and fills caches
                times[name]["gradients"].append(taken[0])
                times[name]["step"].append(taken[1])
    return times


def report(config: Config, times: dict[str, Any]) -> dict[str, Any]:
    """Print one configuration's table; the figures come back for the file."""
    print(f"\n{config}")
    print(f"{'':<24}{'fwd+bwd+clip ms':>20}{'noise+step ms':>18}{'fp32 / this':>13}{'eager / this':>14}")
    middle = {name: statistics.median(taken["gradients"]) for name, taken in times.items()}
    figures: dict[str, Any] = {}
    for name, taken in times.items():
        cells = []
        for part in ("gradients", "step"):
            spread = (max(taken[part]) - min(taken[part])) / 2
            cells.append(f"{statistics.median(taken[part]):.1f} ± {spread:.1f}")
        to_fp32, to_eager = middle["private fp32"] / middle[name], middle["eager"] / middle[name]
        print(f"{name:<24}{cells[0]:>20}{cells[1]:>18}{to_fp32:>12.2f}×{to_eager:>13.2f}×", flush=True)
        figures[name] = {
            "gradients_ms": middle[name],
            "step_ms": statistics.median(taken["step"]),
            "all_gradients_ms": taken["gradients"],
            "speedup_to_private_fp32": to_fp32,
            "speedup_to_eager": to_eager,
        }
    return figures


def contest(config: Config, repeats: int) -> dict[str, Any]:
    """All contestants on one configuration."""
    steps = {"eager": plain(config, False), "torch.compile": plain(config, True)}
    steps |= {"eager bfloat16": plain(config, False, True), "torch.compile bfloat16": plain(config, True, True)}
    steps["private bfloat16"] = Private(config, high="bfloat16").at(0)
    for recipe, shares in CONTEST.items():
        private = Private(config, recipe)
        for share in shares:
            steps[f"private {recipe} {share} %" if share else "private fp32"] = private.at(share)
    return report(config, measure(steps, repeats))


def scaling(args: argparse.Namespace) -> dict[str, Any]:
    """The time of a step over the batch, drawn and fitted by a line."""
    points: dict[str, dict[int, float]] = {"private fp32": {}, "private int4 90 %": {}}
    for batch in args.batches:
        private = Private(Config(args.scaling_model, args.scaling_size, batch))
        times = measure({"private fp32": private.at(0), "private int4 90 %": private.at(90)}, args.repeats)
        for name, taken in times.items():
            points[name][batch] = statistics.median(taken["gradients"])
        print(
            f"batch {batch:>4}: " + ", ".join(f"{name} {own[batch]:.1f} ms" for name, own in points.items()), flush=True
        )
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, own in points.items():
        axes.plot(list(own), list(own.values()), "o-", label=name)
    axes.set(xlabel="batch", ylabel="ms", title=f"{args.scaling_model} {args.scaling_size}×{args.scaling_size}")
    axes.legend()
    args.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out / "scaling.svg")
    return points


def profiled(config: Config, share: int) -> str:
    """The operators that take most of a step."""
    gradients, step = Private(config).at(share)
    gradients()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        for _ in range(3):
            gradients()
            step()
    table: str = prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60)
    return f"{config}, int4 {share} %\n{table}"


def peaks() -> dict[str, float]:
    """What this machine does at best: float32, bfloat16 and int8 products, and copies."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    c, d = a.bfloat16(), b.bfloat16()
    source, target = torch.randn(1 << 25), torch.empty(1 << 25)
    best = {"fp32_gflops": 0.0, "bf16_gflops": 0.0, "int8_gops": 0.0, "copy_gb_s": 0.0}
    call = _int8_peak() if native.unavailable() is None else None
    for _ in range(7):
        best["fp32_gflops"] = max(best["fp32_gflops"], 2 * 2048**3 / timed(lambda: torch.mm(a, b)) / 1e6)
        best["bf16_gflops"] = max(best["bf16_gflops"], 2 * 2048**3 / timed(lambda: torch.mm(c, d)) / 1e6)
        best["copy_gb_s"] = max(best["copy_gb_s"], 8 * (1 << 25) / timed(lambda: target.copy_(source)) / 1e6)
        if call is not None:
            best["int8_gops"] = max(best["int8_gops"], 2 * 2048**3 / timed(call) / 1e6)
    return best


def _int8_peak() -> Callable[[], object]:
    model = nn.Linear(2048, 2048, bias=False)
    from dpquant_compile.backends.cpu_int8.kernel import CPU_INT8
    from dpquant_compile.backends.ops.site import site_call
    from dpquant_compile.backends.registry import Shapes, Streams
    from dpquant_compile.numerics.random_bits import site_keys

    spec = site_call("linear", 0, 0, "luq_fp4/none/cpu_int8", [0, 1, 1, 0, 1, 1])
    streams, kernel = Streams(site_keys(0, 0, ("peak",)), torch.arange(2048)), CPU_INT8.arithmetic
    x = kernel.operand(torch.randn(2048, 2048), "input", spec, streams)
    packed = kernel.packed(model.weight, spec, streams)
    shapes = Shapes((2048, 2048), (2048, 2048), (2048, 2048), 2048)
    return lambda: kernel.product(x, packed, None, shapes, spec, streams)


def main() -> None:
    """Measure what is asked for and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="append", help="model,size,batch; may be given again")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--out", type=Path, default=Path("out/fp4_step"))
    parser.add_argument("--scaling", action="store_true", help="batches from 8 to 256 instead")
    parser.add_argument("--scaling-model", default="resnet18")
    parser.add_argument("--scaling-size", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--profile", action="store_true", help="operators of full precision and of int4 instead")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.smoke:
        args.config, args.repeats, args.scaling_model, args.scaling_size = ["small,8,8"], 1, "small", 8
        args.batches = [2, 4]
    asked = args.config or ["resnet18,32,128", "resnet18,64,32", "wrn16_4,32,32", "transformer,128,8"]
    configs = [Config(name, int(size), int(batch)) for name, size, batch in (text.split(",") for text in asked)]
    results: dict[str, Any] = {"threads": args.threads, "torch": torch.__version__}
    results["instructions"] = native.unavailable() or native.load().name
    if args.profile:
        for config in configs:
            print(profiled(config, 0), profiled(config, 90), sep="\n", flush=True)
        return
    if args.scaling:
        results["scaling_ms"] = scaling(args)
    else:
        results["peaks"] = peaks()
        print(f"int8 by {results['instructions']}; " + ", ".join(f"{k} {v:.0f}" for k, v in results["peaks"].items()))
        for config in configs:
            results[str(config)] = contest(config, args.repeats)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
