"""run_inductor_passes: Inductor's passes over a joint graph, with the outputs' names kept."""

import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dpquant_compile.passes.private.run_inductor_passes import run_inductor_passes


def traced(function: object) -> fx.GraphModule:
    with FakeTensorMode() as mode:
        gm: fx.GraphModule = make_fx(function, tracing_mode="real")(mode.from_tensor(X))  # type: ignore[operator]
    return gm


def reshaped(x: Tensor) -> list[Tensor]:
    return [torch.ops.aten.view.default(x.exp(), [6])]


def plain(x: Tensor) -> list[Tensor]:
    return [x.exp()]


X = torch.linspace(0.1, 0.9, 6)


def test_what_does_nothing_goes_and_the_output_keeps_its_name() -> None:
    gm = traced(reshaped)
    gm.graph.output_node().args[0][0]._rename("clipped_sum")  # type: ignore[index,union-attr]
    gm, modified = run_inductor_passes(gm)
    assert modified
    assert_expected_inline(
        str(gm.graph).strip(),
        """\
graph():
    %x_1 : [num_users=1] = placeholder[target=x_1]
    %clipped_sum : [num_users=1] = call_function[target=torch.ops.aten.exp.default](args = (%x_1,), kwargs = {})
    return [clipped_sum]""",
    )


def test_a_graph_without_such_nodes_stays() -> None:
    gm = traced(plain)
    before = str(gm.graph)
    result = run_inductor_passes(gm)
    assert not result.modified and str(result.graph_module.graph) == before


def test_numbers_are_the_same_bits() -> None:
    gm = run_inductor_passes(traced(reshaped)).graph_module
    gm.recompile()
    assert torch.equal(gm(X)[0], X.exp())
