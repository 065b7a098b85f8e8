"""Calls of a site for kernels that multiply codes as int8, and what must hold of every product of one, bit for bit."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from dpquant_compile.backends.cpu_int8.sized_call import shapes_of
from dpquant_compile.backends.ops.site import axis_list, site_call
from dpquant_compile.backends.reference.emulated import key_of
from dpquant_compile.backends.reference.per_sample import as_weight
from dpquant_compile.backends.registry import Operand, Shapes, SiteCall, Streams, choose_kernel
from dpquant_compile.numerics import integers
from dpquant_compile.numerics.operand_spec import OperandSpec
from dpquant_compile.numerics.quantize import from_samples, quantize_parts, to_samples
from dpquant_compile.numerics.random_bits import site_keys
from dpquant_compile.sites import BatchAxis

KEYS = site_keys(3, 1, ("site",))
# One format for all operands, in every rounding and granularity, and recipes that mix them.
FOUR_BIT = ("luq_fp4", "uniform4", "uniform4.nearest", "int4", "int4.nearest", "int4.channel", "int4.nearest.block")
MIXED = ("int4.nearest,int4.nearest,luq_fp4", "int4.nearest.channel,int4.nearest.block,int4.channel")
MIXED += ("int4.block,int4.nearest.channel,int4.nearest.channel", "int4.nearest.channel,int8.nearest,luq_fp4")
NAMES = (*FOUR_BIT, "int8", "int8.nearest", *MIXED)
CONVS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


@dataclass(frozen=True)
class Case:
    """One call, its operands, and the reference's codes and units of them."""

    call: SiteCall
    shapes: Shapes
    x: Tensor
    weight: Tensor
    grad: Tensor
    streams: Streams

    @property
    def kernel(self) -> Any:
        """The arithmetic of the backend that the recipe asks for."""
        return choose_kernel(self.call, self.x.device).kernel.arithmetic

    def parts(self, name: str) -> tuple[Tensor, Tensor]:
        """Codes as float64, in the shape of the tensor, and units [B]: a sample's codes have one unit."""
        if name == "weight":
            spec, only = self.call.recipe.weight, torch.zeros(1, dtype=torch.int64)
            rows = self.weight.flatten(1)
            dim = 0 if spec.scale == "channel" else 1
            q, unit = one_unit(spec, rows[None], *quantize_parts(rows, spec, self.streams.keys[0, 1], only, None, dim))
            return q[0].reshape(self.weight.shape), unit
        value, role, axis = {
            "x": (self.x, "input", self.call.axis),
            "grad": (self.grad, "grad_output", self.call.output_axis),
        }[name]
        key, dim = key_of(role, self.call, self.streams), -1 if self.call.geometry is None else 1
        spec = self.call.recipe.of(role)
        found = quantize_parts(value, spec, key, self.streams.samples, axis, dim)
        q, unit = one_unit(spec, to_samples(value, axis), *found)
        return from_samples(q, axis, value.shape), unit

    def operands(self) -> tuple[Operand, Operand, Tensor]:
        """Input, output gradient and weight as the kernel keeps them."""
        x = self.kernel.operand(self.x, "input", self.call, self.streams)
        grad = self.kernel.operand(self.grad, "grad_output", self.call, self.streams)
        return x, grad, self.kernel.packed(self.weight, self.call, self.streams)

    def sample_grads(self) -> Tensor:
        """G of the codes, exact, [B, *weight]."""
        (x, _), (grad, _), (w, _) = self.parts("x"), self.parts("grad"), self.parts("weight")
        xs, grads = to_samples(x, self.call.axis), to_samples(grad, self.call.output_axis)
        g = self.call.geometry
        if g is None:
            k, n = x.shape[-1], w.shape[0]
            return torch.einsum("bpn,bpk->bnk", grads.reshape(len(grads), -1, n), xs.reshape(len(xs), -1, k))
        own = (g.stride, g.padding, g.dilation, False, [0] * len(g.stride), g.groups, [False, True, False])
        return torch.stack(
            [
                torch.ops.aten.convolution_backward(d[None], v[None], w, [0], *own)[1]
                for v, d in zip(xs, grads, strict=True)
            ]
        )


def one_unit(spec: OperandSpec, view: Tensor, q: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Levels and the steps of their groups as codes of one unit per sample, which all steps are multiples of.

    That unit is the 7 · 8th, 7 · 16th (in blocks) or 15 · 8th part of the largest magnitude, in 16 bits rounded up.
    """
    if spec.scale == "sample":
        return q.double(), unit.flatten()
    flat = torch.where(view.abs() < 2.0**-126, 0.0, view).flatten(1)
    signed = (flat < 0).any(1)
    parts = torch.where(signed, 7.0 * (16 if spec.scale == "block" else 8), 15.0 * 8)
    own = integers._unit(flat.abs().amax(1), parts)
    multipliers = unit.expand_as(q).flatten(1).double() / own[:, None].double()
    assert torch.equal(multipliers, multipliers.round()) and multipliers.min() >= 1
    return (q.flatten(1).double() * multipliers).reshape(q.shape), own


def conv_case(
    fmt: str, batch: int, channels: int, features: int, size: Any, kernel: Any, stride: Any, padding: Any,
    dilation: Any, groups: int, seed: int, channels_last: bool = False,
    backend: str = "cpu_int8",
) -> Case:  # fmt: skip
    """A convolution."""
    rank = len(size)
    geometry = [*stride, *padding, *dilation, groups]
    call = site_call(f"conv{rank}d", 0, 0, f"{fmt}/none/{backend}", axis_list(BatchAxis(0), BatchAxis(0)), geometry)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, channels, *size, generator=generator) * 10.0 ** torch.randint(
        -3, 3, (batch,), generator=generator
    ).reshape(-1, *[1] * (rank + 1))
    weight = torch.randn(features, channels // groups, *kernel, generator=generator)
    shapes = shapes_of(x, weight, call)
    grad = torch.randn(shapes.y, generator=generator).relu()
    if channels_last and rank == 2:
        x, grad = (t.contiguous(memory_format=torch.channels_last) for t in (x, grad))
    return Case(call, shapes, x, weight, grad, Streams(KEYS, torch.arange(batch) * 7 + 2))


def linear_case(
    fmt: str, shape: tuple[int, ...], axis: BatchAxis, features: int, seed: int, backend: str = "cpu_int8"
) -> Case:
    """A linear."""
    call = site_call("linear", 0, 2, f"{fmt}/none/{backend}", axis_list(axis, axis))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    weight = torch.randn(features, shape[-1], generator=generator)
    shapes = shapes_of(x, weight, call)
    grad = torch.randn(shapes.y, generator=generator)
    return Case(call, shapes, x, weight, grad, Streams(KEYS, torch.arange(shapes.batch) + 11))


def spread(values: Tensor, axis: BatchAxis, like: Tensor) -> Tensor:
    """One value per sample, in the shape of a tensor."""
    rest = to_samples(like, axis)
    return from_samples(values.reshape(-1, *[1] * (rest.dim() - 1)).expand(rest.shape), axis, like.shape)


def check_products(case: Case, short: int = 0) -> Tensor:
    """All products of one call, bit for bit; returns Σ G² of the codes' gradients.

    On maps of up to `short` pixels weighted sums are float32 products over the batch.
    """
    call, shapes, kernel = case.call, case.shapes, case.kernel
    (qx, ux), (qg, ug), (qw, uw) = case.parts("x"), case.parts("grad"), case.parts("weight")
    x, grad, packed = case.operands()
    assert torch.equal(x.unit, ux) and torch.equal(grad.unit, ug)
    numbers, _ = kernel._values(Operand(x.codes, torch.ones_like(ux)), grad, shapes, call)
    assert torch.equal(numbers.codes.double(), qx)
    bias = torch.linspace(-1, 1, shapes.weight[0])
    y = kernel.product(x, packed, bias, shapes, call, case.streams)
    g = call.geometry
    if g is None:
        exact, back, tail = qx @ qw.t(), qg @ qw, bias
    else:
        exact = CONVS[len(g.stride)](qx, qw, None, g.stride, g.padding, g.dilation, g.groups)
        own = ([0], g.stride, g.padding, g.dilation, False, [0] * len(g.stride), g.groups, [True, False, False])
        back = torch.ops.aten.convolution_backward(qg, qx, qw, *own)[0]
        tail = bias.reshape(-1, *[1] * len(g.stride))
    assert torch.equal(y, exact.float() * spread(ux * uw, call.output_axis, exact) + tail)
    dx = kernel.product_grad_input(grad, packed, shapes, call, case.streams)
    assert torch.equal(dx, back.float() * spread(ug * uw, call.axis, back))
    grads = case.sample_grads()
    unit = (ux * ug).reshape(-1, *[1] * (grads.dim() - 1))
    kept = as_weight(kernel.sample_grads(x, grad, shapes, call, case.streams), shapes.weight)
    assert torch.equal(kept, grads.float() * unit)
    squares = grads.flatten(1).square().sum(1)
    norms = kernel.sample_norms(x, grad, shapes, "gram", call, case.streams)
    true = squares * (ux.double() * ug.double()).square()
    assert (norms >= true).all()
    factors = torch.linspace(0.1, 1, shapes.batch)
    total = kernel.weighted_grad(x, grad, factors, shapes, call, case.streams)
    places = math.prod(shapes.y) // max(shapes.batch * shapes.weight[0], 1)
    scaled = grads * (factors * ux * ug).double().reshape(unit.shape)
    terms = scaled.abs().sum(0).max() if places > short else true.max().sqrt() * 64 + norms.max().sqrt()
    assert (total - scaled.sum(0)).abs().max() <= 1e-6 * terms * max(1, shapes.batch)
    return squares


@st.composite
def convs(draw: st.DrawFn, backend: str = "cpu_int8", names: tuple[str, ...] = NAMES) -> Case:
    """Any convolution of small maps."""
    rank = draw(st.sampled_from([1, 2, 2, 3]))

    def several(values: list[int]) -> tuple[int, ...]:
        return tuple(draw(st.sampled_from(values)) for _ in range(rank))

    size, kernel = several([1, 2, 3, 5, 8, 9]), several([1, 2, 3, 3])
    stride, padding, dilation = several([1, 1, 2, 3]), several([0, 1, 2]), several([1, 1, 2])
    assume(all(n + 2 * p >= d * (k - 1) + 1 for n, k, p, d in zip(size, kernel, padding, dilation, strict=True)))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    channels, features = (
        groups * draw(st.sampled_from([1, 2, 3, 5, 16, 17, 33])),
        groups * draw(st.sampled_from([1, 3, 7, 16, 19])),
    )
    fmt, batch = draw(st.sampled_from(names)), draw(st.integers(1, 4))
    return conv_case(
        fmt, batch, channels, features, size, kernel, stride, padding, dilation, groups, draw(st.integers(0, 999)),
        draw(st.booleans()), backend,
    )  # fmt: skip


@st.composite
def linears(draw: st.DrawFn, backend: str = "cpu_int8", names: tuple[str, ...] = NAMES) -> Case:
    """Any linear, its samples lying in any way."""
    lead = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    shape, axis = (*lead, draw(st.sampled_from([1, 3, 4, 17, 64]))), BatchAxis(0)
    kind = draw(st.sampled_from(["first", "second", "inner", "outer"]))
    if kind == "second":
        shape, axis = (3, *shape), BatchAxis(1)
    elif kind == "inner":
        shape, axis = (lead[0] * 4, *shape[1:]), BatchAxis(0, inner=4)
    elif kind == "outer":
        shape, axis = (lead[0] * 2, *shape[1:]), BatchAxis(0, outer=2)
    features = draw(st.sampled_from([1, 10, 16, 33]))
    return linear_case(draw(st.sampled_from(names)), shape, axis, features, draw(st.integers(0, 999)), backend)


def extreme(fmt: str, sign: float, backend: str = "cpu_int8") -> Case:
    """All codes at their largest, alike or opposed."""
    case = conv_case(fmt, 2, 64, 20, (6, 6), (3, 3), (1, 1), (1, 1), (1, 1), 1, 0, backend=backend)
    x, weight, grad = torch.ones_like(case.x), sign * torch.ones_like(case.weight), torch.ones_like(case.grad)
    return Case(case.call, case.shapes, x, weight, grad, case.streams)


def check_layouts(fmt: str, channels: int, backend: str = "cpu_int8") -> None:
    """Codes do not depend on how a tensor lies in memory: by channel, by pixel, in part of another."""
    plain = conv_case(fmt, 6, channels, 4, (5, 4), (1, 1), (1, 1), (0, 0), (1, 1), 1, 2, backend=backend)
    wider = torch.empty(6, channels + 3, 5, 4).contiguous(memory_format=torch.channels_last)
    by_column = torch.empty(6, channels, 4, 5).transpose(2, 3)
    expected = plain.kernel.operand(plain.x, "input", plain.call, plain.streams)
    for x in (plain.x.contiguous(memory_format=torch.channels_last), wider[:, 1:-2], by_column):
        found = plain.kernel.operand(x.copy_(plain.x), "input", plain.call, plain.streams)
        assert torch.equal(found.unit, expected.unit)
        assert torch.equal(found.codes[: x.numel()], expected.codes[: x.numel()])


def check_a_sample_that_is_not_finite(fmt: str, bad: float, backend: str = "cpu_int8") -> None:
    """It is NaN throughout, is left out of the weighted sum, and changes nothing of the others."""
    case = conv_case(fmt, 3, 5, 6, (6, 6), (3, 3), (1, 1), (1, 1), (1, 1), 1, 4, backend=backend)
    kernel, rest = case.kernel, (case.shapes, case.call, case.streams)
    x, _, packed = case.operands()
    before = kernel.product(x, packed, None, *rest)
    case.x[1, 2, 3, 3] = bad
    x, grad, packed = case.operands()
    y = kernel.product(x, packed, None, *rest)
    assert y[1].isnan().all() and torch.equal(y[[0, 2]], before[[0, 2]])
    norms = kernel.sample_norms(x, grad, case.shapes, "gram", case.call, case.streams)
    assert norms[1].isnan() and norms[[0, 2]].isfinite().all()
    factors = torch.where(norms.isnan(), torch.nan, 1.0).float()
    total = kernel.weighted_grad(x, grad, factors, *rest)
    assert total.isfinite().all()
    # As if it held zeros, but for the factor: nothing of it is in the sum.
    case.x[1] = 0.0
    x, grad, _ = case.operands()
    assert torch.equal(total, kernel.weighted_grad(x, grad, torch.tensor([1.0, 0.0, 1.0]), *rest))


def check_samples_do_not_see_each_other(fmt: str, backend: str = "cpu_int8") -> None:
    """Codes, products and norms of a sample are the same alone and in a batch."""
    case = conv_case(fmt, 4, 8, 9, (7, 5), (3, 3), (2, 1), (1, 1), (1, 1), 1, 5, backend=backend)
    kernel = case.kernel
    x, grad, packed = case.operands()
    together = kernel.product(x, packed, None, case.shapes, case.call, case.streams)
    norms = kernel.sample_norms(x, grad, case.shapes, "gram", case.call, case.streams)
    for i in range(4):
        streams = Streams(KEYS, case.streams.samples[i : i + 1])
        shapes = shapes_of(case.x[i : i + 1], case.weight, case.call)
        one = Case(case.call, shapes, case.x[i : i + 1], case.weight, case.grad[i : i + 1], streams)
        own_x, own_grad, own_packed = one.operands()
        assert torch.equal(kernel.product(own_x, own_packed, None, shapes, case.call, streams)[0], together[i])
        own = kernel.sample_norms(own_x, own_grad, shapes, "gram", case.call, streams)
        assert torch.equal(own[0], norms[i])


def transposed(case: Case) -> Case:
    """The same call with a weight that is the transpose of a parameter."""
    return replace(case, weight=case.weight.t().contiguous().t())
