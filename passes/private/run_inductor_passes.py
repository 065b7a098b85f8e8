"""Inductor's own passes over a joint graph, as one recorded step."""

from torch import fx
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V

from dpquant_compile.passes.private.joint_facts import outputs_of
from dpquant_compile.passes.runner import PassResult

__all__ = ["run_inductor_passes"]


def run_inductor_passes(gm: fx.GraphModule) -> PassResult:
    """Let Inductor fold constants, remove operators without effect, and match its patterns before the cut.

        y = x * full([], 1)   →   y = x

    Requires: a joint graph of ATen operators; placeholders carry fake tensors as `meta["val"]`.
    Ensures: the same inputs and outputs, and outputs keep their names.
    Numerics: as Inductor's, which compiles the graph in any case.
    """
    before, names = str(gm.graph), [getattr(value, "name", None) for value in outputs_of(gm)]
    values = (node.meta["val"] for node in gm.graph.find_nodes(op="placeholder"))
    mode = next(value.fake_mode for value in values if hasattr(value, "fake_mode"))
    with V.set_fake_mode(mode):
        gm = joint_graph_passes(gm)
    left = {node.name for node in gm.graph.nodes}
    for node, name in zip(outputs_of(gm), names, strict=True):
        if isinstance(node, fx.Node) and node.op == "call_function" and name is not None and name not in left:
            node.name = name  # free: it belonged to a removed node
            left.add(name)
    return PassResult(gm, str(gm.graph) != before)
