"""How near do the int8 products of each kind of layer come to what this machine can do?

    python benchmarks/layer_rates.py --json benchmarks/results/layer_rates.json
    python benchmarks/layer_rates.py --smoke

For the sites of ResNet18 (64×64, batch 32), WideResNet-16-4 (32×32, batch 32) and a transformer (128 tokens, batch 8):
billions of operations a second of the product forward, the gradient of the input and the weighted sum of weight
gradients, and their share of the peak, which is the rate of a product of 2048³ by the same kernels. A multiplication
and an addition are two operations; those with padding do not count. Norms, the rounding of both operands and of the
weight are in milliseconds. Medians, all parts of all layers in turn.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dpquant_compile.backends.cpu_int8 import build as native
from dpquant_compile.backends.cpu_int8 import kernel as cpu_int8
from dpquant_compile.backends.cpu_int8.sized_call import sized_call
from dpquant_compile.backends.ops.site import output_shape
from dpquant_compile.backends.registry import Shapes, SiteCall, Streams
from dpquant_compile.numerics.random_bits import site_keys
from dpquant_compile.numerics.recipe import Recipe
from dpquant_compile.sites import BatchAxis, ConvGeometry

# Channels, features, size of the map, kernel, stride; a linear has the length of its sequences for a map.
Layers = list[tuple[int, ...]]
RESNET: Layers = [
    (3, 64, 64, 7, 2),
    (64, 64, 16, 3, 1),
    (64, 128, 16, 3, 2),
    (64, 128, 16, 1, 2),
    (128, 128, 8, 3, 1),
    (128, 256, 8, 3, 2),
    (256, 256, 4, 3, 1),
    (256, 512, 4, 3, 2),
    (512, 512, 2, 3, 1),
]
WIDE: Layers = [
    (16, 64, 32, 3, 1),
    (64, 64, 32, 3, 1),
    (64, 128, 32, 3, 2),
    (128, 128, 16, 3, 1),
    (128, 256, 16, 3, 2),
    (256, 256, 8, 3, 1),
]
TRANSFORMER: Layers = [(768, 768, 128), (768, 2304, 128), (768, 3072, 128), (3072, 768, 128)]
PRODUCTS, OTHERS = ("forward", "grad_input", "weighted"), ("norms", "input", "grad_output", "weight")
Parts = dict[str, Callable[[], object]]


def layers(batch: int, given: Layers) -> list[tuple[str, SiteCall, Shapes]]:
    """Sites, as kernels are called for them."""
    found = []
    for channels, features, size, *conv in given:
        recipe, axis = Recipe.parse("int4"), BatchAxis(0)
        if not conv:
            call = SiteCall("linear", recipe, axis, axis, None, 0, 0)
            shapes = Shapes((batch, size, channels), (features, channels), (batch, size, features), batch)
            found.append((f"linear {channels}→{features}, {size} places", call, shapes))
            continue
        kernel, stride = conv
        geometry = ConvGeometry((stride,) * 2, (kernel // 2,) * 2, (1, 1), 1)
        x, weight = (batch, channels, size, size), (features, channels, kernel, kernel)
        call = SiteCall("conv2d", recipe, axis, axis, geometry, 0, 0)
        name = f"{kernel}×{kernel}{', stride 2' if stride > 1 else ''}, {channels}→{features}, {size}×{size}"
        found.append((name, call, Shapes(x, weight, output_shape(x, weight, geometry), batch)))
    return found


def parts_of(call: SiteCall, shapes: Shapes) -> Parts:
    """What a step computes of one site."""
    layout = torch.channels_last if call.geometry is not None else torch.contiguous_format
    x, grad = (torch.randn(shape).contiguous(memory_format=layout) for shape in (shapes.x, shapes.y))
    weight, x = torch.randn(shapes.weight), x.relu()
    streams, factors = Streams(site_keys(0, 0, ("site",)), torch.arange(shapes.batch)), torch.rand(shapes.batch)
    kernel: Any = cpu_int8.CPU_INT8.arithmetic
    xs, grads = kernel.operand(x, "input", call, streams), kernel.operand(grad, "grad_output", call, streams)
    packed, rest = kernel.packed(weight, call, streams), (shapes, call, streams)
    return {
        "forward": lambda: kernel.product(xs, packed, None, *rest),
        "grad_input": lambda: kernel.product_grad_input(grads, packed, *rest),
        "weighted": lambda: kernel.weighted_grad(xs, grads, factors, *rest),
        "norms": lambda: kernel.sample_norms(xs, grads, shapes, "", call, streams),
        "input": lambda: kernel.operand(x, "input", call, streams),
        "grad_output": lambda: kernel.operand(grad, "grad_output", call, streams),
        "weight": lambda: kernel.packed(weight, call, streams),
    }


def operations(call: SiteCall, shapes: Shapes) -> int:
    """Of one product, without those that meet padding."""
    sized = sized_call(shapes, call)
    met = int((sized.table.source >= 0).sum())
    return 2 * shapes.batch * met * sized.sizes.channels * sized.sizes.features


def peak(turns: int) -> float:
    """Billions of operations a second of a product of 2048³."""
    (_, call, shapes), *_ = layers(16, [(2048, 2048, 128)])
    run, best = parts_of(call, shapes)["forward"], 0.0
    for _ in range(turns):
        best = max(best, 2 * 2048**3 / seconds(run) / 1e9)
    return best


def seconds(function: Callable[[], object]) -> float:
    """The time of one call."""
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def measure(batch: int, given: Layers, turns: int) -> list[dict[str, Any]]:
    """A row for each layer."""
    sites = [(name, parts_of(call, shapes), operations(call, shapes)) for name, call, shapes in layers(batch, given)]
    times: dict[tuple[str, str], list[float]] = {(name, part): [] for name, parts, _ in sites for part in parts}
    for turn in range(turns + 1):
        for name, parts, _ in sites:
            for part, run in parts.items():
                taken = seconds(run)
                if turn:
                    times[name, part].append(taken)
    rows = []
    for name, parts, count in sites:
        middle = {part: statistics.median(times[name, part]) for part in parts}
        rates = {part: count / middle[part] / 1e9 for part in PRODUCTS}
        rows.append(dict(layer=name, mop=count / 1e6, gops=rates, ms={k: 1e3 * v for k, v in middle.items()}))
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="one layer of each model, a small batch, two turns")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    args = parser.parse_args()
    if reason := native.unavailable():
        raise SystemExit(f"nothing to measure: {reason}")
    torch.set_num_threads(args.threads)
    models: dict[str, tuple[int, Layers]] = {
        "ResNet18": (32, RESNET),
        "WideResNet-16-4": (32, WIDE),
        "transformer": (8, TRANSFORMER),
    }
    if args.smoke:
        models, args.turns = {name: (2, given[1:2]) for name, (_, given) in models.items()}, 2
    best, found = peak(args.turns), dict[str, Any]()
    print(f"{native.load().name}, {args.threads} threads; int8 peak {best:.0f} billion operations a second")
    for model, (batch, given) in models.items():
        print(f"\n{model:<30}{'Mop':>7}" + "".join(f"{part:>20}" for part in PRODUCTS) + "".join(map(_head, OTHERS)))
        found[model] = measure(batch, given, args.turns)
        for row in found[model]:
            cells = (f"{row['ms'][p]:.2f} ms {rate:>5.0f} {rate / best:>4.0%}" for p, rate in row["gops"].items())
            rest = "".join(f"{row['ms'][part]:>13.2f}" for part in OTHERS)
            print(f"{row['layer']:<30}{row['mop']:>7.0f}" + "".join(f"{cell:>20}" for cell in cells) + rest, flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        result = dict(kernels=native.load().name, threads=args.threads, peak_gops=best, models=found)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def _head(part: str) -> str:
    return f"{part:>13}"


if __name__ == "__main__":
    main()
