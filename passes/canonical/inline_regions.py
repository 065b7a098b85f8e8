"""Pass: write the regions of activation checkpointing as part of the graph."""

import operator

from torch import fx
from torch._ops import HigherOrderOperator

from dpquant_compile.passes.fx_utils import node_source
from dpquant_compile.passes.runner import PassResult

__all__ = ["inline_regions"]

# What `torch.utils.checkpoint` becomes in a graph of Dynamo's, with `use_reentrant` or without.
_CHECKPOINTS = ("tag_activation_checkpoint", "wrap_activation_checkpoint")


def inline_regions(gm: fx.GraphModule) -> PassResult:
    """Replace each checkpointed region by the operations inside it.

        out = tag_activation_checkpoint(wrap_body_0, x, fc_weight); y = out[0]   →   y = F.linear(x, fc_weight)

    Such a region says that its values are computed again for backward. The compiler decides that anew for the whole
    graph: in private programs by their cut, elsewhere by AOTAutograd.
    Requires: a graph of `capture_dynamo`; torch.fx traces through such a region by itself. Ensures: no checkpointed
    region is left, at any depth. Numerics: unchanged; random operators of a region draw once, as they did.
    """
    modified = False
    while regions := [node for node in gm.graph.nodes if _is_region(gm, node)]:
        for node in regions:
            _inline(gm, node)
        modified = True
    return PassResult(gm, modified)


def _is_region(gm: fx.GraphModule, node: fx.Node) -> bool:
    if not isinstance(node.target, HigherOrderOperator) or node.target.name() not in _CHECKPOINTS or not node.args:
        return False
    body = node.args[0]
    return isinstance(body, fx.Node) and body.op == "get_attr"


def _inline(gm: fx.GraphModule, node: fx.Node) -> None:
    held, *given = node.args
    assert isinstance(held, fx.Node)
    name = str(held.target)
    body = gm.get_submodule(name)
    assert isinstance(body, fx.GraphModule)
    inputs = body.graph.find_nodes(op="placeholder")
    mapping = dict(zip(inputs, given, strict=True))
    before = set(gm.graph.nodes)
    with gm.graph.inserting_before(node):
        results = gm.graph.graph_copy(body.graph, mapping)
    for new in gm.graph.nodes:
        if new not in before:
            if new.op == "get_attr":
                new.target = f"{name}.{new.target}"
            new.meta["source"] = node_source(new) or node.meta.get("source")
    assert isinstance(results, tuple | list)
    for user in list(node.users):
        assert user.target is operator.getitem and isinstance(user.args[1], int)
        value = results[user.args[1]]
        assert isinstance(value, fx.Node)
        user.replace_all_uses_with(value)
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)
    if not held.users:
        gm.graph.erase_node(held)
