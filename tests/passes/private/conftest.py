"""A small joint graph, as `trace_joint` makes them: one site behind a ReLU, its gradient clipped and added up."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dpquant_compile.passes.private.joint_facts import INPUT, JointFacts, keep_facts

STATIC = ("linear", 0, 0, [], [0, 1, 1, 0, 1, 1], "luq_fp4/none/reference")
SIZE = (3, 8)


def _body(
    a: Tensor, b: Tensor, weight: Tensor, policy: Tensor, keys: Tensor, samples: Tensor, bounds: Tensor,
    tangents: Tensor, *, held: bool, relu: bool,
) -> list[Tensor]:  # fmt: skip
    ops, table = torch.ops.dpquant, (policy, keys, samples)
    before = a * b if held else a @ b.T @ b
    y = torch.relu(before) if relu else before
    packed = ops.packed_weight(weight, *table, *STATIC)
    operand = ops.round_operand(y, *table, "input", *STATIC)
    out = ops.private_site(y, *operand, weight, packed, None, *table, *STATIC)
    grad = ops.round_operand(tangents, *table, "grad_output", *STATIC)
    back = ops.private_grad_input(tangents, *grad, weight, packed, *table, list(SIZE), *STATIC)
    if relu:
        zero = torch.full([], 0.0)
        back = torch.where(torch.ops.aten.le.Scalar(y, 0), zero, back)
    if held:
        back = back * a * b  # backward reads both maps
    factors = bounds.expand(SIZE[0]).clone()
    clipped = ops.weighted_grad(y, *operand, tangents, *grad, weight, factors, *table, *STATIC)
    return [out, clipped, back.sum(0) * bounds, bounds.isnan().sum()]


@pytest.fixture
def joint_inputs() -> Callable[..., list[Tensor]]:
    """Inputs of such a graph, with the site at a `Precision`; True is low, False is full."""

    def make(precision: int = True) -> list[Tensor]:
        g = torch.Generator().manual_seed(0)
        a, b, weight = (torch.randn(size, generator=g) for size in (SIZE, SIZE, (2, SIZE[1])))
        table = (torch.tensor([precision]), torch.randint(2**40, (1, 8), generator=g), torch.arange(SIZE[0]))
        return [a, b, weight, *table, torch.tensor([0.5]), torch.randn(SIZE[0], 2, generator=g)]

    return make


@pytest.fixture
def joint(joint_inputs: Callable[..., list[Tensor]]) -> Callable[..., fx.GraphModule]:
    """Traces the graph. `held`: backward holds the maps that the ReLU is made of; `relu`: whether there is one."""

    def trace(held: bool = True, relu: bool = True) -> fx.GraphModule:
        def run(
            a: Tensor, b: Tensor, weight: Tensor, policy: Tensor, keys: Tensor, samples: Tensor, bounds: Tensor,
            tangents: Tensor,
        ) -> list[Tensor]:  # fmt: skip
            return _body(a, b, weight, policy, keys, samples, bounds, tangents, held=held, relu=relu)

        with FakeTensorMode() as mode:
            fake: list[Any] = [mode.from_tensor(value, static_shapes=True) for value in joint_inputs()]
            gm: fx.GraphModule = make_fx(run, tracing_mode="real")(*fake)
        for node in gm.graph.find_nodes(op="placeholder"):
            node.meta[INPUT] = str(node.target).removesuffix("_1")
            if "tangents" not in str(node.target):
                node.meta[INPUT] = str(node.target).rpartition("_")[0]
        keep_facts(gm, JointFacts(("weight", "scale"), 1, (True,)))
        return gm

    return trace
