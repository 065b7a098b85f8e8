"""The runner of passes: it must catch passes that do not do what they say."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dpquant_compile import pipeline
from dpquant_compile.errors import GraphInvariantError
from dpquant_compile.link_table import LinkTable
from dpquant_compile.passes.canonical.mark_sites import collect_sites
from dpquant_compile.passes.fx_utils import bind_inputs, graph_module_over, node_source, op_name
from dpquant_compile.passes.precision.insert_switches import insert_switches
from dpquant_compile.passes.runner import (
    PassRecord,
    PassResult,
    run_passes,
)
from tests.support.models import GroupNormNet, canonical, seeded, traced

RECIPE = "luq_fp4/none/reference"


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        return torch.relu(self.fc(x)) * scale


def swap_relu(gm: fx.GraphModule, *, recompile: bool, modified: bool) -> PassResult:
    for node in gm.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.tanh
    if recompile:
        gm.recompile()
    return PassResult(gm, modified)


def use_before_definition(gm: fx.GraphModule) -> PassResult:
    nodes = list(gm.graph.nodes)
    nodes[1].append(nodes[-2])
    return PassResult(gm, True)


def read_nothing(gm: fx.GraphModule) -> PassResult:
    with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.op == "output")):
        gm.graph.create_node("get_attr", "no.such.tensor")
    return PassResult(gm, True)


def run(gm: fx.GraphModule, *passes: Any, **options: Any) -> tuple[fx.GraphModule, list[PassRecord]]:
    log: list[PassRecord] = []
    return run_passes(gm, passes, origin="test", log=log, **options), log


def test_an_honest_pass_is_recorded() -> None:
    gm, (record,) = run(traced(Tiny()), partial(swap_relu, recompile=False, modified=True))
    assert (record.name, record.origin, record.modified) == ("swap_relu", "test", True)
    assert record.ops == {"relu": -1, "tanh": 1}
    assert "torch.relu" in record.before and "torch.tanh" in record.after and record.after == gm.code
    printed = str(record)
    assert printed.startswith("# test → swap_relu (") and "relu -1, tanh +1" in printed and "# before" in printed


def test_each_record_names_the_pass_before_it() -> None:
    same = partial(swap_relu, recompile=False, modified=True)
    _, log = run(traced(Tiny()), same, same)
    assert [record.origin for record in log] == ["test", "swap_relu"]
    assert "no op count changed" in str(log[1])


def test_new_nodes_are_stamped() -> None:
    def add_relu(gm: fx.GraphModule) -> PassResult:
        output = gm.graph.output_node()
        with gm.graph.inserting_before(output):
            output.args = (gm.graph.call_function(F.relu, output.args),)
        return PassResult(gm, True)

    gm, _ = run(traced(Tiny()), add_relu)
    assert [n.meta["origin"] for n in gm.graph.nodes if n.target is F.relu] == ["add_relu"]


def test_a_change_that_is_denied_is_caught() -> None:
    with pytest.raises(GraphInvariantError, match="pass swap_relu changed the graph but reported modified=False"):
        run(traced(Tiny()), partial(swap_relu, recompile=True, modified=False))


def test_a_change_that_is_denied_and_not_compiled_is_caught() -> None:
    with pytest.raises(GraphInvariantError, match="modified=False"):
        run(traced(Tiny()), partial(swap_relu, recompile=False, modified=False))


@pytest.mark.parametrize("faulty", [use_before_definition, read_nothing])
def test_an_invalid_graph_is_a_typed_error(faulty: Any) -> None:
    with pytest.raises(GraphInvariantError, match=faulty.__name__):
        run(traced(Tiny()), faulty)


def test_invariants_see_the_output_of_each_pass() -> None:
    def no_tanh(gm: fx.GraphModule) -> None:
        if any(n.target is torch.tanh for n in gm.graph.nodes):
            raise GraphInvariantError("tanh")

    with pytest.raises(GraphInvariantError, match="tanh"):
        run(traced(Tiny()), partial(swap_relu, recompile=False, modified=True), invariants=[no_tanh])


def leave_one_out(gm: fx.GraphModule, *, rows: dict[str, int], recipe: str) -> PassResult:
    return insert_switches(gm, rows={name: row for name, row in rows.items() if name != "fc"}, recipe=recipe)


def forget_site(gm: fx.GraphModule, *, rows: dict[str, int], recipe: str) -> PassResult:
    for node in gm.graph.nodes:
        if node.meta.get("site") is not None and node.meta["site"].name == "fc":
            del node.meta["site"]
    return insert_switches(gm, rows=rows, recipe=recipe)


@pytest.mark.parametrize("faulty", [leave_one_out, forget_site])
def test_a_dropped_switch_is_caught(faulty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gm = canonical(seeded(GroupNormNet))
    rows = {name: row for row, name in enumerate(collect_sites(gm).names)}
    monkeypatch.setattr(pipeline, "SWITCHING_PASSES", (faulty,))
    with pytest.raises(GraphInvariantError, match="site 'fc'"):
        pipeline.rewritten(gm, LinkTable(len(rows)), rows, RECIPE, [])


def test_trace_goes_to_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    step = partial(swap_relu, recompile=False, modified=True)
    monkeypatch.setenv("DPQUANT_TRACE", "0")
    run(traced(Tiny()), step)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("DPQUANT_TRACE", "1")
    run(traced(Tiny()), step)
    printed = capsys.readouterr()
    assert printed.out == "" and "→ swap_relu" in printed.err


def test_arguments_are_bound_by_name_and_default() -> None:
    gm, x = traced(Tiny()), torch.ones(2, 4)
    assert bind_inputs(gm, (x,), {}) == [x, 2.0]
    assert bind_inputs(gm, (), {"scale": 3.0, "x": x}) == [x, 3.0]
    with pytest.raises(TypeError):
        bind_inputs(gm, (x,), {"other": 1})


def test_a_graph_module_shares_the_models_tensors() -> None:
    model = Tiny()
    gm = graph_module_over(model, traced(model).graph, "Mine")
    assert gm.get_submodule("fc") is model.fc and gm._get_name() == "Mine"
    model.fc.weight = nn.Parameter(torch.zeros(4, 4))
    model.fc.bias = nn.Parameter(torch.zeros(4))
    assert gm(torch.ones(2, 4)).abs().sum() == 0


def test_names_and_sources() -> None:
    gm = traced(Tiny())
    assert [op_name(n) for n in gm.graph.nodes] == ["placeholder", "placeholder", "Linear", "relu", "mul", "output"]
    relu = next(n for n in gm.graph.nodes if n.target is torch.relu)
    assert str(node_source(relu)).startswith("test_runner.py:")
    bare = fx.Graph().placeholder("x")
    assert node_source(bare) is None
