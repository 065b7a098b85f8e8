"""Which way to a site's per-sample norms is the quicker, and does the cost model choose it?

    python benchmarks/norm_ways.py --json benchmarks/results/norm_ways.json
    python benchmarks/norm_ways.py --smoke

For the sites of ResNet18, a WideResNet and a transformer, in int8 and in float32: the time by gram matrices and the
time by gradients that are squared and thrown away, interleaved, medians; which of them the cost model takes; and what
that costs over the better one. The constants of the model (`_GRAM_COST`, `_SHIFT_COST` in backends/cpu_int8.py and
backends/reference/per_sample.py) are those for which the last column, added up, is smallest: `--fit` tries others.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dpquant_compile.backends.cpu_int8 import build as native
from dpquant_compile.backends.cpu_int8 import kernel as cpu_int8
from dpquant_compile.backends.cpu_int8.sized_call import sized_call, sizes_of
from dpquant_compile.backends.ops.site import output_shape
from dpquant_compile.backends.reference import per_sample
from dpquant_compile.backends.reference.clipped_site import FULL_SITE
from dpquant_compile.backends.registry import Operand, Shapes, SiteCall, Streams
from dpquant_compile.numerics.random_bits import site_keys
from dpquant_compile.numerics.recipe import Recipe
from dpquant_compile.sites import BatchAxis, ConvGeometry

# Channels, features, size of the map, kernel, stride; a linear has a sequence for a map.
CONVS = [
    (64, 64, 16, 3, 1),
    (64, 64, 8, 3, 1),
    (64, 128, 8, 3, 2),
    (128, 128, 8, 3, 1),
    (128, 128, 4, 3, 1),
    (256, 256, 4, 3, 1),
    (256, 512, 4, 3, 2),
    (512, 512, 2, 3, 1),
    (64, 128, 16, 1, 2),
    (16, 64, 32, 3, 1),
    (64, 64, 32, 3, 1),
    (128, 128, 16, 3, 1),
    (256, 256, 8, 3, 1),
]
LINEARS = [(384, 384, 128), (384, 1536, 128), (768, 768, 128), (768, 3072, 128), (512, 10, 1), (64, 64, 512)]
WAYS = ("gram", "direct")


def calls(batch: int) -> list[tuple[str, SiteCall, Shapes]]:
    """The sites, as kernels are called for them."""
    found = []
    for channels, features, size, kernel, stride in CONVS:
        geometry = ConvGeometry((stride,) * 2, (kernel // 2,) * 2, (1, 1), 1)
        x, weight = (batch, channels, size, size), (features, channels, kernel, kernel)
        call = SiteCall("conv2d", Recipe(), BatchAxis(0), BatchAxis(0), geometry, 0, 0)
        name = f"conv {channels}→{features}, {size}×{size}, kernel {kernel}, stride {stride}"
        found.append((name, call, Shapes(x, weight, output_shape(x, weight, geometry), batch)))
    for channels, features, length in LINEARS:
        call = SiteCall("linear", Recipe(), BatchAxis(0), BatchAxis(0), None, 0, 0)
        shapes = Shapes((batch, length, channels), (features, channels), (batch, length, features), batch)
        found.append((f"linear {channels}→{features}, {length} places", call, shapes))
    return found


def runners(call: SiteCall, shapes: Shapes) -> dict[tuple[str, str], Callable[[], Tensor]]:
    """By arithmetic and way, what computes the norms."""
    layout = torch.channels_last if call.geometry is not None else torch.contiguous_format
    x, grad = (torch.randn(shape).contiguous(memory_format=layout) for shape in (shapes.x, shapes.y))
    streams = Streams(site_keys(0, 0, ("site",)), torch.arange(shapes.batch))
    kernel: Any = cpu_int8.CPU_INT8.arithmetic
    xs, grads = kernel.operand(x, "input", call, streams), kernel.operand(grad, "grad_output", call, streams)

    def in_int8(way: str) -> Tensor:
        with patch.object(cpu_int8, "norm_method", lambda *_: way):
            norms: Tensor = kernel.sample_norms(xs, grads, shapes, "", call, streams)
        return norms

    def in_float32(way: str) -> Tensor:
        return FULL_SITE.sample_norms(Operand(x, x), Operand(grad, grad), shapes, way, call, streams)

    made = {("int8", way): partial(in_int8, way) for way in WAYS}
    return {**made, **{("float32", way): partial(in_float32, way) for way in WAYS}}


def chosen(arithmetic: str, call: SiteCall, shapes: Shapes) -> str:
    """What the cost model takes; where float32 keeps gradients for the weighted sum, they are had directly."""
    if arithmetic == "int8":
        sized = sized_call(shapes, call)
        return cpu_int8.norm_method(sized.sizes, sized.x_codes, sized.grad_codes)
    sizes = sizes_of(shapes, call)
    method = per_sample.choose_method(shapes.weight, 1, sizes.pixels, sizes.in_pixels, shapes.batch)
    return "gram" if method == "gram" else "direct"


def measure(batch: int, turns: int, smoke: bool) -> list[dict[str, Any]]:
    """A row for each site and arithmetic."""
    rows = []
    for name, call, shapes in calls(batch)[:: 6 if smoke else 1]:
        ways = runners(call, shapes)
        seconds: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
        for turn in range(turns + 1):
            for key, run in ways.items():
                begun = time.perf_counter()
                run()
                if turn:
                    seconds[key].append(time.perf_counter() - begun)
        for arithmetic in ("int8", "float32"):
            times = {way: 1e3 * statistics.median(seconds[arithmetic, way]) for way in WAYS}
            way = chosen(arithmetic, call, shapes)
            rows.append(
                dict(site=name, arithmetic=arithmetic, **times, chosen=way, over=times[way] - min(times.values()))
            )
    return rows


def fit(rows: list[dict[str, Any]], batch: int) -> dict[str, tuple[float, float, float]]:
    """For each arithmetic the constants that lose the fewest milliseconds on these rows."""
    best: dict[str, tuple[float, float, float]] = {}
    sites = {name: (call, shapes) for name, call, shapes in calls(batch)}
    modules = {"int8": cpu_int8, "float32": per_sample}
    for (arithmetic, module), gram, shift in itertools.product(
        modules.items(), (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
    ):
        with patch.object(module, "_GRAM_COST", gram), patch.object(module, "_SHIFT_COST", shift):
            own = [row for row in rows if row["arithmetic"] == arithmetic]
            lost = sum(row[chosen(arithmetic, *sites[row["site"]])] - min(row["gram"], row["direct"]) for row in own)
        if arithmetic not in best or lost < best[arithmetic][0]:
            best[arithmetic] = (lost, gram, shift)
    return best


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--fit", action="store_true", help="look for better constants")
    parser.add_argument("--smoke", action="store_true", help="a few sites, a small batch, two turns")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    args = parser.parse_args()
    if reason := native.unavailable():
        raise SystemExit(f"nothing to measure: {reason}")
    torch.set_num_threads(args.threads)
    batch = 4 if args.smoke else args.batch
    rows = measure(batch, 2 if args.smoke else args.turns, args.smoke)
    print(f"{native.load().name}, {args.threads} threads, batch {batch}; milliseconds")
    print(f"{'site':<44} {'in':<8} {'gram':>8} {'direct':>8}  {'chosen':<7} {'over the better':>16}")
    for row in rows:
        print(
            f"{row['site']:<44} {row['arithmetic']:<8} {row['gram']:>8.2f} {row['direct']:>8.2f}  "
            f"{row['chosen']:<7} {row['over']:>16.2f}"
        )
    for arithmetic in ("int8", "float32"):
        own = [row for row in rows if row["arithmetic"] == arithmetic]
        least = sum(min(row["gram"], row["direct"]) for row in own)
        print(f"{arithmetic}: {sum(row['over'] for row in own):.1f} ms over the best possible, {least:.1f}")
    if args.fit:
        for arithmetic, (lost, gram, shift) in fit(rows, batch).items():
            print(f"{arithmetic}: the least would be {lost:.1f} ms, with _GRAM_COST {gram:g} and _SHIFT_COST {shift:g}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(dict(kernels=native.load().name, batch=batch, rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
