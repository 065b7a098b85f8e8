"""Recompute the mask of a ReLU in backward, instead of reading it from the ReLU's saved output.

The output of a ReLU is the input of the next site. A low-precision site keeps it as codes. Then only the ReLU's own
backward needs the float32 numbers: it tests where they were positive. The maps that normalisation saves for backward
show that too, and Inductor recomputes the mask in loops that already read those maps.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from dpquant_compile.passes.fx_utils import dependents
from dpquant_compile.passes.private.free_saved_inputs import sites_reading, users_of
from dpquant_compile.passes.runner import PassResult

__all__ = ["depends_on_gradients", "masks_of", "recompute_relu_masks"]

_ATEN = torch.ops.aten
_RELU, _MASK = _ATEN.relu.default, _ATEN.le.Scalar

# Operations that are cheap to repeat, element by element.
_POINTWISE = frozenset((_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor, _ATEN.view.default))
_FEW = 3  # most maps that a mask may depend on: along a chain of skip connections every block would add one
_SHORT = 24  # most operations from those maps to the mask: a norm has four or five


def recompute_relu_masks(gm: fx.GraphModule) -> PassResult:
    """Compute a ReLU's mask from maps that backward holds, where the ReLU's output is the input of a site.

        y = relu(a * b); site(y); …; mask = y <= 0   →   y = relu(a * b); site(y); …; mask = (a * b) <= 0

    Requires: `merge_equal_nodes`; the cut must not merge again. Ensures: such a mask does not read the ReLU's output.
    Numerics: unchanged bit for bit: the same operations on the same maps, and relu(x) <= 0 where x <= 0.
    """
    backward = depends_on_gradients(gm.graph)
    chains: dict[fx.Node, Chain] = {}
    masks = {mask.args[0]: mask for mask in masks_of(gm.graph, backward)}
    for relu in gm.graph.find_nodes(op="call_function", target=_RELU):
        if relu in masks and (chain := _chain(relu, chains)) and all(_is_held(node, backward) for node in chain.maps):
            chains[relu] = chain
            with gm.graph.inserting_before(masks[relu]):
                masks[relu].replace_input_with(relu, _copied(gm.graph, relu, chain))
    return PassResult(gm, bool(chains))


def masks_of(graph: fx.Graph, backward: set[fx.Node]) -> list[fx.Node]:
    """The masks of ReLUs whose output is the input of a site, if only backward reads the mask: a model may itself
    compare such an output with zero, and equal nodes are merged."""
    return [
        mask
        for mask in graph.find_nodes(op="call_function", target=_MASK)
        if mask.args[1] == 0
        and mask.args[0].target is _RELU
        and _only_sites_read(mask.args[0], backward)
        and all(user in backward for user in mask.users)
    ]


def depends_on_gradients(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on the gradients of the outputs."""
    return dependents(graph, {node for node in graph.find_nodes(op="placeholder") if "tangents" in str(node.target)})


def _only_sites_read(node: fx.Node, backward: set[fx.Node]) -> bool:
    """Whether this is the input of a site, and nothing else reads it in backward."""
    readers = [sites_reading(user, own) for user, own in users_of(node) if user in backward]
    return bool(readers) and all(readers)


def _is_held(node: fx.Node, backward: set[fx.Node]) -> bool:
    """Whether backward needs this map anyway: the map itself, or something computed from it element by element."""

    def needed(node: fx.Node) -> bool:
        return any(user in backward and not sites_reading(user, node) for user in node.users)

    made = (user for user in node.users if user.target in _POINTWISE)
    return needed(node) or any(needed(user) for user in made)


@dataclass(frozen=True)
class Chain:
    """How a ReLU's input is computed: the maps it depends on, and the operations between, in order."""

    maps: frozenset[fx.Node]
    operations: tuple[fx.Node, ...]


def _chain(relu: fx.Node, known: Mapping[fx.Node, Chain]) -> Chain | None:
    """How to recompute a ReLU's input; None if that costs too much. ReLUs in `known` are recomputed on the way."""
    size, maps, operations = relu.meta["val"].numel(), set(), set()
    waiting = list(relu.all_input_nodes)
    while waiting:
        node = waiting.pop()
        value = node.meta.get("val")
        if node in operations or not isinstance(value, Tensor) or value.numel() < size:
            continue  # a smaller tensor is a statistic or a parameter
        if node.target in _POINTWISE or node in known:
            operations.add(node)
            waiting += node.all_input_nodes
        else:
            maps.add(node)
        if len(maps) > _FEW or len(operations) > _SHORT:
            return None
    return Chain(frozenset(maps), tuple(node for node in relu.graph.nodes if node in operations))


def _copied(graph: fx.Graph, relu: fx.Node, chain: Chain) -> fx.Node:
    """A second copy of the ReLU's input, marked as part of backward."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in chain.operations:
        copies[node] = graph.node_copy(node, lambda source: copies.get(source, source))
        copies[node].meta = {**node.meta, "recompute": CheckpointPolicy.MUST_RECOMPUTE}
    (before,) = relu.all_input_nodes
    return copies.get(before, before)
