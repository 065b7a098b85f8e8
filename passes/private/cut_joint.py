"""Cut a joint graph into the program that runs in forward and the one that runs in backward."""

import operator

from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

from dpquant_compile.passes.fx_utils import draws_seeded
from dpquant_compile.passes.private.joint_facts import facts_of, keep_facts, outputs_of
from dpquant_compile.passes.runner import PassResult

__all__ = ["backward_of", "cut_joint", "forward_of"]

_FORWARD, _BACKWARD = "private_forward", "private_backward"


def cut_joint(gm: fx.GraphModule, *, recompute: bool) -> PassResult:
    """Cut the graph in two: the first `forward_outputs` outputs are forward's, the rest is backward's.

        joint(primals, tangents)   →   outputs, *saved = private_forward(*primals)
                                       sums, left_out = private_backward(*saved, *tangents)

    With `recompute` it is the min-cut, which recomputes in backward what Inductor can fuse; an interpreted graph gains
    nothing by that. The plain cut would draw random numbers again in backward, so a graph that draws them always gets
    the min-cut.

    Requires: `tag_forward`. Ensures: `forward_of` and `backward_of` give the two programs. The result calls both, and
    has the inputs and outputs of the joint graph, without outputs that only pass from forward to backward.
    Numerics: unchanged except for the order in which Inductor fuses.
    """
    facts = facts_of(gm)
    least = recompute or any(draws_seeded(node) for node in gm.graph.nodes)
    cut = min_cut_rematerialization_partition if least else default_partition
    placeholders = gm.graph.find_nodes(op="placeholder")
    # Merging equal nodes again would undo `recompute_relu_masks`.
    with functorch_config.patch(cse=False):
        forward, backward = cut(gm, (), num_fwd_outputs=facts.forward_outputs, static_lifetime_input_indices=None)
    for part in (forward, backward):
        keep_facts(part, None)
    joined = _joined(gm, placeholders, forward, backward, facts.forward_outputs)
    keep_facts(joined, facts)
    return PassResult(joined, True)


def forward_of(gm: fx.GraphModule) -> fx.GraphModule:
    """The forward program of a joint graph that was cut."""
    found = gm.get_submodule(_FORWARD)
    assert isinstance(found, fx.GraphModule)
    return found


def backward_of(gm: fx.GraphModule) -> fx.GraphModule:
    """The backward program of a joint graph that was cut."""
    found = gm.get_submodule(_BACKWARD)
    assert isinstance(found, fx.GraphModule)
    return found


def _joined(
    gm: fx.GraphModule, placeholders: list[fx.Node], forward: fx.GraphModule, backward: fx.GraphModule, count: int
) -> fx.GraphModule:
    """A graph that calls both programs, one after the other."""
    graph = fx.Graph()
    inputs = {}
    for node in placeholders:
        inputs[node.name] = graph.placeholder(node.name)
        inputs[node.name].meta = {"val": node.meta["val"]}
    given = [str(node.target) for node in forward.graph.find_nodes(op="placeholder")]
    first = graph.call_module(_FORWARD, tuple(inputs[name] for name in given))
    values = [graph.call_function(operator.getitem, (first, place)) for place in range(len(outputs_of(forward)))]
    needed = backward.graph.find_nodes(op="placeholder")
    saved = len(values) - count
    tangents = [inputs[str(node.target)] for node in needed[saved:]]
    second = graph.call_module(_BACKWARD, (*values[count:], *tangents))
    sums = [graph.call_function(operator.getitem, (second, place)) for place in range(len(outputs_of(backward)))]
    graph.output([*values[:count], *sums])
    root = nn.Module()
    root.add_module(_FORWARD, forward)
    root.add_module(_BACKWARD, backward)
    return fx.GraphModule(root, graph, class_name="Cut")
