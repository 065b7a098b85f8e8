"""Compute once what a joint graph computes twice."""

from torch import fx
from torch._functorch.compile_utils import fx_graph_cse

from dpquant_compile.passes.fx_utils import draws_seeded
from dpquant_compile.passes.runner import PassResult

__all__ = ["merge_equal_nodes"]


def merge_equal_nodes(gm: fx.GraphModule) -> PassResult:
    """Merge nodes with equal operator and arguments.

        a = exp(x); b = exp(x); y = a + b   →   a = exp(x); y = a + a

    Requires: a functional joint graph. Ensures: no two nodes are equal. A graph that draws random numbers stays
    unchanged, since two equal calls of a random operator are two draws. Numerics: unchanged bit for bit.
    """
    if any(draws_seeded(node) for node in gm.graph.nodes):
        return PassResult(gm, False)
    merged = fx_graph_cse(gm.graph)
    if len(merged.nodes) == len(gm.graph.nodes):
        return PassResult(gm, False)
    gm.graph = merged
    return PassResult(gm, True)
