"""Private programs with one policy written into them, against the one program that serves all policies.

    python benchmarks/private_variants.py                # ResNet18, 64×64, batch 32
    python benchmarks/private_variants.py --maps         # single calls: look-ups, rounding by kernel or by loops
    python benchmarks/private_variants.py --smoke        # a small CNN, seconds

The product looks a policy up while a private program runs. Here the joint graph of the same model is rewritten for one
policy before Inductor compiles it, in three ways:

    direct   no look-ups: an operator per call, which gets only the tensors that it reads and knows all else beforehand
    written  as direct, but sites in full precision are torch's operators, which Inductor can fuse with others
    fused    as written, but operands are rounded by loops that Inductor writes and can fuse

All run in one session, on the same weights and random bits. Times are medians over repeats that alternate between the
contestants: forward, backward and clipping of one micro-batch, with packed weights at hand. "link table / this" is the
median of the ratios within a repeat, by the clock and by CPU time, which other jobs on the machine change less. Sums
are compared: bit for bit where the arithmetic is the same.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from fp4_step import Config, Private, timed  # type: ignore[import-not-found]  # beside this script
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from dpquant_compile import pipeline
from dpquant_compile.backends.cpu_int8.codes import codes_of
from dpquant_compile.backends.ops.private_site import channels_last
from dpquant_compile.backends.ops.site import call_of, output_shape, site_arguments, site_call
from dpquant_compile.backends.reference import per_sample
from dpquant_compile.backends.reference.clipped_site import FULL_SITE
from dpquant_compile.backends.reference.emulated import key_of
from dpquant_compile.backends.reference.group_norm import group_norm
from dpquant_compile.backends.reference.per_sample import wide_dtype
from dpquant_compile.backends.registry import Arithmetic, Operand, Shapes, SiteCall, Streams
from dpquant_compile.backends.rotated_site import arithmetic_of
from dpquant_compile.backends.site_args import in_order, site_args
from dpquant_compile.numerics import integers
from dpquant_compile.numerics.random_bits import random_bits, sample_keys, site_keys
from dpquant_compile.numerics.recipe import Recipe, get_recipe, recipe_names
from dpquant_compile.numerics.rounding import clean, poison, sample_max
from dpquant_compile.passes.runner import PassResult
from dpquant_compile.privacy.clipping.program import PrivateProgram

WAYS = ("direct", "written", "fused")
_OPS = torch.ops.dpquant

# Operators without look-ups: what runs is fixed by `number`.

_LIBRARY = torch.library.Library("variant", "FRAGMENT")
_CALLS: list[Callable[..., Any]] = []
_FAKES: list[Any] = []


def operator(inputs: int, outputs: int) -> Any:
    """An operator of so many tensors, that calls the function of a number."""
    name = f"call_{inputs}_{outputs}"
    if not hasattr(torch.ops.variant, name):
        given = ", ".join(f"Tensor t{i}" for i in range(inputs))
        _LIBRARY.define(f"{name}({given}, int number) -> {'Tensor' if outputs == 1 else '(Tensor, Tensor)'}")
        _LIBRARY.impl(name, _run, "CPU")
        torch.library.register_fake(f"variant::{name}", _fake, lib=_LIBRARY)
    return getattr(torch.ops.variant, name).default


def _run(*given: Any) -> Any:
    *tensors, number = given
    return _CALLS[number](*tensors)


def _fake(*given: Any) -> Any:
    *_, number = given
    return fx.node.map_aggregate(_FAKES[number], lambda value: torch.empty_like(cast(Tensor, value)))


# One site under one policy


class Site:
    """One call of a dpquant operator, as a function of the tensors that it reads under the policy."""

    def __init__(self, node: fx.Node, low: frozenset[int]) -> None:
        self.given = site_args(node)
        self.call: SiteCall = call_of(vars(self.given))
        self.low = self.call.site in low
        self.kernel: Arithmetic = arithmetic_of(self.call, torch.device("cpu"))
        self.layout = channels_last(self.call.op)

    def shapes(self, x: Sequence[int]) -> Shapes:
        """The sizes of this call."""
        weight, axis = tuple(self.given.weight.meta["val"].shape), self.call.axis
        batch = x[axis.dim] // (axis.outer * axis.inner)
        return Shapes(tuple(x), weight, output_shape(tuple(x), weight, self.call.geometry), batch)

    def operands(self) -> tuple[fx.Node, ...]:
        """What clipping reads."""
        g = self.given
        return (g.codes, g.unit, g.grad_codes, g.grad_unit) if self.low else (g.x, g.grad)


def rounded(site: Site) -> tuple[Callable[..., Any], tuple[fx.Node, ...]]:
    """`round_operand`, and the tensors that it reads."""
    given, kernel, call = site.given, site.kernel, site.call
    axis = call.axis if given.role == "input" else call.output_axis
    batch = given.x.meta["val"].shape[axis.dim] // (axis.outer * axis.inner)

    def run(x: Tensor, keys: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        codes, unit = kernel.operand(x, given.role, call, Streams(keys, samples[:batch]))
        return codes, unit

    return run, (given.x, given.keys, given.samples)


def forward(site: Site) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """`private_site`, and the tensors that it reads."""
    given, call, shapes = site.given, site.call, site.shapes(site.given.x.meta["val"].shape)
    bias = () if given.bias is None else (given.bias,)

    def low(codes: Tensor, unit: Tensor, packed: Tensor, *bias: Tensor) -> Tensor:
        found = bias[0] if bias else None
        y = site.kernel.product(Operand(codes, unit), packed, found, shapes, call, None)  # type: ignore[arg-type]
        return y.contiguous(memory_format=site.layout)

    def full(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        laid = x.contiguous(memory_format=site.layout)
        y = FULL_SITE.forward(laid, weight, bias[0] if bias else None, shapes, call)
        return y.contiguous(memory_format=site.layout)

    if site.low:
        return low, (given.codes, given.unit, given.packed, *bias)
    return full, (given.x, given.weight, *bias)


def grad_input(site: Site) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """`private_grad_input`, and the tensors that it reads."""
    given, call, shapes = site.given, site.call, site.shapes(site.given.size)

    def low(codes: Tensor, unit: Tensor, packed: Tensor) -> Tensor:
        dx = site.kernel.product_grad_input(Operand(codes, unit), packed, shapes, call, None)  # type: ignore[arg-type]
        return dx.contiguous(memory_format=site.layout)

    def full(grad: Tensor, weight: Tensor) -> Tensor:
        like = torch.empty(shapes.x, dtype=weight.dtype, memory_format=site.layout)
        laid = grad.contiguous(memory_format=site.layout)
        return FULL_SITE.grad_input(laid, like, weight, shapes, call).contiguous(memory_format=site.layout)

    if site.low:
        return low, (given.grad_codes, given.grad_unit, given.packed)
    return full, (given.grad, given.weight)


def clipped(name: str, site: Site) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """Norms, per-sample gradients or the weighted sum."""
    given, call, shapes = site.given, site.call, site.shapes(site.given.x.meta["val"].shape)
    dtype, arithmetic = wide_dtype(given.weight.meta["val"]), site.kernel if site.low else FULL_SITE

    def run(*values: Tensor) -> Tensor:
        if site.low:
            x, grad, more = Operand(*values[:2]), Operand(*values[2:4]), values[4:]
        else:  # one tensor is both
            x, grad, more = Operand(values[0], values[0]), Operand(values[1], values[1]), values[2:]
        if name == "sample_norms":
            found = arithmetic.sample_norms(x, grad, shapes, given.method, call, None)  # type: ignore[arg-type]
        elif name == "sample_grads":
            found = arithmetic.sample_grads(x, grad, shapes, call, None)  # type: ignore[arg-type]
        else:
            found = arithmetic.weighted_grad(x, grad, more[0], shapes, call, None)  # type: ignore[arg-type]
        return found.to(dtype).contiguous()

    return run, (*site.operands(), *([given.factors] if name == "weighted_grad" else []))


def traced_weighted(site: Site) -> Callable[..., Tensor]:
    """`FullSite.weighted_grad` without a branch on data."""
    call, shapes = site.call, site.shapes(site.given.x.meta["val"].shape)
    taps = FULL_SITE.taps(shapes, call)

    def run(x: Tensor, grad: Tensor, factors: Tensor) -> Tensor:
        out = factors.isnan()
        x = x.masked_fill(per_sample.spread(out, call.axis, x), 0.0)
        grad = grad.masked_fill(per_sample.spread(out, call.output_axis, grad), 0.0)
        kept = factors.masked_fill(out, 0.0)
        total = per_sample.weighted_sum(taps.call, x, grad, taps.shape(shapes.weight), kept)
        return taps.whole(total, shapes.weight).contiguous()

    return run


# Rounding in torch's operators, to the bytes of cpu_int8: [batch, pixels, channels].


def fusable(site: Site) -> bool:
    """Whether `codes_by_loops` can write this rounding."""
    spec, x = site.call.recipe.of(site.given.role), site.given.x.meta["val"]
    codes, conv = codes_of(spec), site.call.geometry is not None
    if codes is None or not conv or x.dim() != 4:
        return False
    places = x.shape[2] * x.shape[3]
    return codes.grouped is None or (codes.grouped is False and (places % 16 == 0 or 16 % places == 0))


def codes_by_loops(call: SiteCall, role: str, like: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """Codes and units of maps [B, C, H, W] that lie channels-last; without the slack that kernels may read."""
    spec = call.recipe.of(role)
    codes = codes_of(spec)
    assert codes is not None
    batch, channels, height, width = like.shape

    def run(x: Tensor, keys: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        bits = None
        if spec.rounding == "stochastic":
            k0, k1 = sample_keys(key_of(role, call, Streams(keys, samples)), samples[:batch])
            numbers = torch.arange(channels * height * width, dtype=torch.int32).view(1, channels, height, width)
            bits = random_bits(k0.view(-1, 1, 1, 1), k1.view(-1, 1, 1, 1), numbers)
        if codes.grouped is None:
            q, unit = spec.of.rounded(x, bits, 1, spec.scale)
        else:
            q, unit = grouped(x, bits)
        laid = (q + codes.zero).to(torch.uint8).permute(0, 2, 3, 1)
        return laid.contiguous().view(-1), unit.reshape(batch)

    def grouped(x: Tensor, bits: Tensor | None) -> tuple[Tensor, Tensor]:
        """`integers.round_int4` by channel: level times multiplier, and the unit of a sample."""
        x, s, ok = clean(x)
        largest = torch.where(sample_max(-x) > 0, 7.0, 15.0)
        unit = integers._unit(s, largest * 8.0)
        places, rows = height * width, x.abs().permute(0, 2, 3, 1)
        if places >= 16:
            tops = rows.reshape(batch, places // 16, 16, channels).amax(2, keepdim=True).expand(-1, -1, 16, -1)
        else:
            tops = rows.reshape(batch, places, channels * places // 16, 16 // places)
            tops = tops.amax((1, 3), keepdim=True).expand(-1, places, -1, 16 // places)
        top = tops.reshape(batch, height, width, channels).permute(0, 3, 1, 2)
        multiplier = torch.minimum((top / (unit * largest)).ceil().clamp(min=1.0), torch.full_like(unit, 8.0))
        return integers._rounded(x, unit * multiplier, largest, bits) * multiplier, poison(unit, ok)

    return run


# The pass


def write_policy(gm: fx.GraphModule, *, low: frozenset[int], way: str) -> PassResult:
    """Write a policy, the rows of its low sites, into a joint graph."""
    rounds, masks = _OPS.round_operand.default, (_OPS.positive_bits.default, _OPS.relu_grad.default)
    others = (*masks, _OPS.group_norm.default, _OPS.group_norm_grad.default)  # they read no policy
    for node in list(gm.graph.nodes):
        if getattr(node.target, "namespace", None) != "dpquant" or node.target in (rounds, *others):
            continue
        site, name = Site(node, low), node.target._schema.name.removeprefix("dpquant::")
        if name == "private_site":
            function, inputs = forward(site)
        elif name == "private_grad_input":
            function, inputs = grad_input(site)
        else:
            function, inputs = clipped(name, site)
        if site.low or way == "direct":
            called(gm, node, function, inputs)
        else:
            inlined(gm, node, traced_weighted(site) if name == "weighted_grad" else function, inputs)
    gm.graph.eliminate_dead_code()
    for node in gm.graph.find_nodes(op="call_function", target=rounds):
        site = Site(node, low)
        function, inputs = rounded(site)
        if way == "fused" and fusable(site):
            inlined(gm, node, codes_by_loops(site.call, site.given.role, site.given.x.meta["val"]), inputs, keep=True)
        else:
            called(gm, node, function, inputs)
    for node in gm.graph.find_nodes(op="call_function", target=masks[1]):
        given = site_args(node)
        if not all(row in low for row in given.sites):
            inlined(gm, node, lambda x, grad: torch.where(x <= 0, 0.0, grad), (given.x, given.grad))
    gm.graph.eliminate_dead_code()
    return PassResult(gm, True)


def called(gm: fx.GraphModule, node: fx.Node, function: Callable[..., Any], inputs: Sequence[fx.Node]) -> None:
    """Put a call of `function` in the place of a node."""
    value = node.meta["val"]
    _CALLS.append(function)
    _FAKES.append(value)
    with gm.graph.inserting_before(node):
        outputs = 1 if isinstance(value, Tensor) else 2
        new = gm.graph.call_function(operator(len(inputs), outputs), (*inputs, len(_CALLS) - 1))
    new.meta["val"] = value
    node.replace_all_uses_with(new, propagate_meta=False)
    gm.graph.erase_node(node)


def inlined(
    gm: fx.GraphModule, node: fx.Node, function: Callable[..., Any], inputs: Sequence[fx.Node], keep: bool = False
) -> None:
    """Put the operators that `function` computes in the place of a node; with `keep` backward may not repeat them."""
    values = [source.meta["val"] for source in inputs]

    def fresh(name: str, *shape: int) -> Tensor:
        return torch.empty(shape)

    with values[0].fake_mode, patch.object(per_sample, "scratch", fresh), torch.no_grad():
        first = make_fx(function, tracing_mode="real")(*values)
        functional: Any = torch.func.functionalize(first, remove="mutations")
        traced = make_fx(functional, decomposition_table=select_decomp_table(), tracing_mode="real")(*values)
    traced.graph.eliminate_dead_code()
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with gm.graph.inserting_before(node):
        for source in traced.graph.nodes:
            if source.op == "get_attr":
                raise ValueError(f"{node.name} reads a constant")
            if source.op == "call_function":
                copies[source] = gm.graph.node_copy(source, lambda n: copies[n])
                if keep:
                    copies[source].meta["recompute"] = CheckpointPolicy.MUST_SAVE
    results: Any = fx.map_arg(traced.graph.output_node().args[0], lambda n: copies[n])
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results, propagate_meta=False)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]], propagate_meta=False)
            gm.graph.erase_node(user)
    gm.graph.erase_node(node)


# The contest


class Contest:
    """One session, in which the program of a policy is exchanged."""

    def __init__(self, config: Config, recipe: str) -> None:
        self.private, self.inner = Private(config, recipe), config.inner
        self.model = self.private.model
        self.session = self.model.__dict__["_private"]
        ((self.key, (self.base, self.product)),) = self.session._programs.items()

    def policy(self, share: int) -> list[str]:
        """The sites of a share, as in fp4_step.py."""
        self.private.at(share)[0]()
        return list(self.model.policy)

    def variant(self, policy: Sequence[str], way: str) -> tuple[PrivateProgram, float]:
        """The program for one policy, and the seconds that tracing and compiling it take."""
        self.model.set_policy(policy)
        inputs = self._inputs()
        rows = frozenset(self.product.spec.rows[name] for name in policy)
        step = partial(write_policy, low=rows, way=way)
        passes = "COMPILED_JOINT_PASSES" if self.inner == "inductor" else "INTERPRETED_JOINT_PASSES"
        extended = (*getattr(pipeline, passes), step)
        start = time.perf_counter()
        with patch.object(pipeline, passes, extended):
            internals = self.session.internals
            program = PrivateProgram(self.product.spec, inputs, self.inner, internals.programs.recorder, [])
        self.use(program)
        self.private.gradients()
        return program, time.perf_counter() - start

    def use(self, program: PrivateProgram) -> None:
        """Let the session run this program."""
        self.session._programs[self.key] = (self.base, program)

    def sums(self, program: PrivateProgram, policy: Sequence[str]) -> list[Tensor]:
        """The clipped sums of the batch."""
        self.use(program)
        self.model.set_policy(policy)
        self.private.gradients()
        return [p.summed_grad.detach().clone() for p in self.session.parameters.values()]

    def _inputs(self) -> Any:
        seen: list[Any] = []
        run = PrivateProgram.run_forward

        def watched(program: PrivateProgram, inputs: Any) -> Any:
            seen.append(inputs)
            return run(program, inputs)

        with patch.object(PrivateProgram, "run_forward", watched):
            self.private.gradients()
        return seen[0]

    def step(self, program: PrivateProgram, policy: Sequence[str]) -> Callable[[], None]:
        """Forward, backward and clipping by this program."""

        def run() -> None:
            self.use(program)
            self.model.set_policy(policy)
            self.private.gradients()

        return run


def contest(config: Config, recipe: str, share: int, ways: Sequence[str], repeats: int) -> dict[str, Any]:
    """All ways for one policy."""
    own = Contest(config, recipe)
    policy = own.policy(share)
    programs: dict[str, PrivateProgram] = {"link table": own.product}
    figures: dict[str, Any] = {"link table": {}}
    wanted = own.sums(own.product, policy)
    size = max(float(total.abs().max()) for total in wanted)
    for way in ways:
        programs[way], seconds = own.variant(policy, way)
        found = own.sums(programs[way], policy)
        worst = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
        equal = all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        figures[way] = {"compile_s": seconds, "equal": equal, "worst": worst / size}
    steps = {name: own.step(program, policy) for name, program in programs.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    work: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 1):
        order = list(steps) if turn % 2 else list(reversed(steps))
        for name in order:
            steps[name]()  # packs the weights that this policy needs, and fills caches
            began = time.process_time()
            taken = timed(steps[name])
            if turn:
                times[name].append(taken)
                work[name].append((time.process_time() - began) * 1e3)
    print(f"\n{config}, {recipe} {share} %: {len(policy)} of {len(own.model.sites)} sites low")
    print(f"{'':<12}{'ms':>16}{'CPU ms':>10}{'link table / this':>19}{'by CPU':>9}{'compile s':>11}  sums")
    for name in steps:
        by_clock, by_cpu = (
            statistics.median(a / b for a, b in zip(taken["link table"], taken[name], strict=True))
            for taken in (times, work)
        )
        middle, spread = statistics.median(times[name]), (max(times[name]) - min(times[name])) / 2
        measured = {"ms": middle, "cpu_ms": statistics.median(work[name]), "ratio": by_clock, "cpu_ratio": by_cpu}
        own_figures = figures[name] = figures[name] | measured | {"all_ms": times[name], "all_cpu_ms": work[name]}
        compiled, sums = "", ""
        if name != "link table":
            compiled = f"{own_figures['compile_s']:.0f}"
            sums = "equal" if own_figures["equal"] else f"off by {own_figures['worst']:.0e} of the largest"
        print(
            f"{name:<12}{f'{middle:.1f} ± {spread:.1f}':>16}{own_figures['cpu_ms']:>10.1f}{by_clock:>18.3f}×"
            f"{by_cpu:>8.3f}×{compiled:>11}  {sums}",
            flush=True,
        )
    return figures


# One map


def maps(recipe: str, repeats: int) -> list[dict[str, Any]]:
    """Maps that a loop makes and that are rounded: by our kernel, or by the loops that Inductor makes of both."""
    own = get_recipe(recipe) if recipe in recipe_names() else Recipe.of_format(recipe)
    call = site_call("conv2d", 0, 0, str(own), [0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1])
    sizes = ((64, 16), (256, 4))
    look_up(call, repeats)
    return [one_map(call, role, *size, repeats) for size in sizes for role in ("input", "grad_output")]


def look_up(call: SiteCall, repeats: int) -> None:
    """What the rounding of a map of 512 elements takes by the operator, and by the kernel alone."""
    x = torch.randn(2, 16, 4, 4).contiguous(memory_format=torch.channels_last)
    table = (torch.ones(1, dtype=torch.uint8), site_keys(0, 0, ("map",)), torch.arange(1 << 10))
    kernel, given = arithmetic_of(call, x.device), site_arguments(table, call)
    args = in_order(_OPS.round_operand.default, x=x, role="input", **given)
    streams = Streams(table[1], table[2][:2])

    def microseconds(run: Callable[[], object]) -> float:
        return float(min(timed(lambda: [run() for _ in range(100)]) for _ in range(repeats))) * 10

    looked_up = microseconds(lambda: _OPS.round_operand.default(*args))
    alone = microseconds(lambda: kernel.operand(x, "input", call, streams))
    print(f"{call.recipe.name:<8} round_operand of 512 elements: {looked_up:.1f} µs, the kernel alone {alone:.1f} µs")


def one_map(call: SiteCall, role: str, channels: int, side: int, repeats: int) -> dict[str, Any]:
    """An input, made by group normalisation and ReLU, or an output gradient, made as a norm's backward does."""
    generator = torch.Generator().manual_seed(0)
    x, other = (
        torch.randn(32, channels, side, side, generator=generator).contiguous(memory_format=torch.channels_last)
        for _ in range(2)
    )
    scale = torch.rand(channels, generator=generator) + 0.5
    streams = Streams(site_keys(0, 0, ("map",)), torch.arange(32))
    kernel = arithmetic_of(call, torch.device("cpu"))
    rounding = codes_by_loops(call, role, x)

    def made(x: Tensor, other: Tensor) -> Tensor:
        if role == "input":
            return torch.relu(group_norm(x, 32, scale, scale - 1))
        return (x - (x * other).mean((1, 2, 3), keepdim=True) * other) * scale.view(1, -1, 1, 1)

    with torch.no_grad():
        loop = torch.compile(made, dynamic=False)
        fused = torch.compile(lambda x, other: rounding(made(x, other), streams.keys, streams.samples), dynamic=False)
        y, (codes, _) = loop(x, other), fused(x, other)
        equal = torch.equal(kernel.operand(y, role, call, streams).codes[: codes.numel()], codes)
        contest = {
            "loop": lambda: loop(x, other),
            "rounding": lambda: kernel.operand(y, role, call, streams),
            "fused": lambda: fused(x, other),
        }
        best = {name: min(timed(run) for _ in range(repeats)) for name, run in contest.items()}
    print(
        f"{call.recipe.name:<8} [32, {channels}, {side}, {side}] {role:<12} loop {best['loop']:.3f} ms + rounding "
        f"{best['rounding']:.3f} ms, fused {best['fused']:.3f} ms, codes {'equal' if equal else 'differ'}",
        flush=True,
    )
    return {"channels": channels, "side": side, "role": role, "equal": equal, **best}


def main() -> None:
    """Measure what is asked for and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="resnet18,64,32", help="model,size,batch")
    parser.add_argument("--recipe", action="append", help="may be given again; int4")
    parser.add_argument(
        "--shares", type=int, nargs="+", default=[90, 100, 0], help="per cent of the sites that are low"
    )
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--maps", action="store_true", help="single calls instead of whole steps")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.smoke:
        args.config, args.repeats, args.shares = "small,8,8", 1, [50]
    name, size, batch = args.config.split(",")
    config = Config(name, int(size), int(batch))
    results: dict[str, Any] = {"threads": args.threads, "torch": torch.__version__, "config": str(config)}
    for recipe in args.recipe or ["int4"]:
        if args.maps:
            results[recipe] = maps(recipe, 10 * args.repeats)
            continue
        for share in args.shares:
            results[f"{recipe} {share} %"] = contest(config, recipe, share, args.ways, args.repeats)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
