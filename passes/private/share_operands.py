"""Round an operand of a site once, however many products read it."""

from typing import Any

import torch
from torch import fx

from dpquant_compile.passes.runner import PassResult

__all__ = ["share_operands"]


def share_operands(gm: fx.GraphModule) -> PassResult:
    """Keep the first of equal roundings: input gradient and weight gradient both round the output gradient.

        a = round_operand(g, …); b = round_operand(g, …); f(a); h(b)   →   a = round_operand(g, …); f(a); h(a)

    Requires: a joint graph of ATen operators. Ensures: no two `dpquant::round_operand` have equal arguments.
    Numerics: unchanged bit for bit. Random bits depend on seed, step, site, role and sample, not on the call.
    """
    known: dict[Any, fx.Node] = {}
    modified = False
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.dpquant.round_operand.default):
        first = known.setdefault(str((node.args, node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)
            modified = True
    return PassResult(gm, modified)
