"""merge_equal_nodes: what a graph computes twice it computes once, unless that is a random draw."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from dpquant_compile.passes.private.merge_equal_nodes import merge_equal_nodes


def twice(x: Tensor) -> list[Tensor]:
    return [x.exp() * x.exp().sin()]


def drawn(x: Tensor) -> list[Tensor]:
    return [torch.bernoulli(x) + torch.bernoulli(x), x.exp() + x.exp()]


def once(x: Tensor) -> list[Tensor]:
    return [x.exp() + x.sin()]


X = torch.linspace(0.1, 0.9, 6)


def test_equal_nodes_become_one() -> None:
    gm, modified = merge_equal_nodes(make_fx(twice)(X))
    assert modified
    assert_expected_inline(
        str(gm.graph).strip(),
        """\
graph():
    %x_1 : [num_users=1] = placeholder[target=x_1]
    %exp : [num_users=2] = call_function[target=torch.ops.aten.exp.default](args = (%x_1,), kwargs = {})
    %sin : [num_users=1] = call_function[target=torch.ops.aten.sin.default](args = (%exp,), kwargs = {})
    %mul : [num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%exp, %sin), kwargs = {})
    return [mul]""",
    )


def test_a_graph_without_equal_nodes_and_one_with_draws_stay() -> None:
    for function in (once, drawn):
        gm: fx.GraphModule = make_fx(function)(X)
        before = str(gm.graph)
        result = merge_equal_nodes(gm)
        assert result.graph_module is gm and not result.modified and str(gm.graph) == before


def test_numbers_are_the_same_bits() -> None:
    gm = merge_equal_nodes(make_fx(twice)(X)).graph_module
    assert torch.equal(gm(X)[0], twice(X)[0])


@pytest.mark.parametrize(("dropout", "merged"), [((), True), ((0.0,), True), ((0.5,), False)])
def test_attention_is_a_draw_only_with_dropout(dropout: tuple[float, ...], merged: bool) -> None:
    graph = fx.Graph()
    q = graph.placeholder("q")
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    graph.output([graph.call_function(attend, (q, q, q, *dropout)) for _ in range(2)])
    assert merge_equal_nodes(fx.GraphModule({}, graph)).modified == merged
