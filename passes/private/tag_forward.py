"""Mark the nodes of a joint graph that forward computes."""

from torch import fx

from dpquant_compile.passes.private.joint_facts import facts_of, outputs_of
from dpquant_compile.passes.runner import PassResult

__all__ = ["TAG", "needed_by_forward", "tag_forward"]

TAG = ("partitioner_tag", "is_forward")  # the format of torch's partitioners


def tag_forward(gm: fx.GraphModule) -> PassResult:
    """Tag the nodes that forward's outputs depend on: the plain cut would compute all of them again in backward.

        y = relu(x)   →   y = relu(x), with meta["partitioner_tag"] = "is_forward"

    Requires: a joint graph with its facts. Ensures: every node that a forward output depends on, except placeholders,
    has the tag. Numerics: unchanged; only metadata is written.
    """
    key, value = TAG
    found = [node for node in needed_by_forward(gm) if node.meta.get(key) != value]
    for node in found:
        node.meta[key] = value
    return PassResult(gm, bool(found))


def needed_by_forward(gm: fx.GraphModule) -> list[fx.Node]:
    """The nodes that forward's outputs depend on, without placeholders."""
    needed = {node for node in outputs_of(gm)[: facts_of(gm).forward_outputs] if isinstance(node, fx.Node)}
    found = []
    for node in reversed(gm.graph.nodes):
        if node in needed and node.op != "placeholder":
            found.append(node)
            needed.update(node.all_input_nodes)
    return found[::-1]
