"""inline_regions: a checkpointed region is part of the graph, with the same results."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from dpquant_compile.passes.canonical.inline_regions import inline_regions
from dpquant_compile.passes.canonical.mark_sites import collect_sites
from dpquant_compile.passes.capture import capture_dynamo
from tests.support.models import after, canonical, gradients, program, seeded, traced
from tests.support.private import assert_close, clipped_sums, made_private, reference_sums


class Checkpointed(nn.Module):
    """Two layers, the second in a region `inside` the region of the first; [B, 4]."""

    def __init__(self, reentrant: bool = False, inside: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.reentrant, self.inside = reentrant, inside

    def tail(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x))

    def whole(self, x: Tensor) -> Tensor:
        y = torch.sin(self.first(x))
        return checkpoint(self.tail, y, use_reentrant=self.reentrant) if self.inside else self.tail(y)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.whole, x * 2, use_reentrant=self.reentrant)


def captured(model: nn.Module) -> fx.GraphModule:
    return capture_dynamo(model, (torch.randn(3, 4),), {})[0]


def test_golden() -> None:
    assert_expected_inline(
        program(after(captured(Checkpointed()), inline_regions)),
        """\
def forward(self, x):
    arg0, = fx_pytree.tree_flatten_spec(([x], {}), self._in_spec)
    l_x_ = arg0
    mul = l_x_ * 2
    l__self___first_weight = self.first.weight
    l__self___first_bias = self.first.bias
    l__self___second_weight = self.second.weight
    l__self___second_bias = self.second.bias
    linear = torch._C._nn.linear(mul, l__self___first_weight, l__self___first_bias)
    y = torch.sin(linear)
    linear_1 = torch._C._nn.linear(y, l__self___second_weight, l__self___second_bias)
    tanh = torch.tanh(linear_1)
    return pytree.tree_unflatten([tanh], self._out_spec)""",
    )


def test_a_graph_without_regions_is_left_alone() -> None:
    gm = traced(nn.Linear(4, 4))
    code = gm.code
    assert not inline_regions(gm).modified and gm.code == code


@pytest.mark.parametrize("reentrant", [False, True])
def test_results_and_sites_are_those_of_the_model(reentrant: bool) -> None:
    model, x = seeded(lambda: Checkpointed(reentrant, inside=not reentrant)), torch.randn(3, 4, requires_grad=True)
    assert any("checkpoint" in str(node.target) for node in captured(model).graph.nodes)
    gm, parameters = canonical(model, x, dynamo=True), list(model.parameters())
    assert not any("checkpoint" in str(node.target) for node in gm.graph.nodes)
    assert collect_sites(gm).names == ("first", "second")
    expected = gradients(lambda x: model.tail(torch.sin(model.first(x * 2))), [x], parameters)
    torch.testing.assert_close(gradients(gm, [x], parameters), expected, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_private_gradients_are_those_without_checkpointing(reentrant: bool) -> None:
    model, x = seeded(lambda: Checkpointed(reentrant)), torch.randn(4, 4)
    compiled, _, _ = made_private(model, 5, inner="eager", backend="reference")
    compiled.capture(x)
    compiled.set_policy("all")
    plain = seeded(lambda: Checkpointed(reentrant))
    plain.forward = lambda x: plain.tail(torch.sin(plain.first(x * 2)))  # type: ignore[method-assign]
    assert_close(clipped_sums(compiled, [x]), reference_sums(plain, [x], policy="all"))
