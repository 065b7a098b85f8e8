"""Masks: where a ReLU let a gradient through, worked out again in backward instead of read off its saved output.

The output of a ReLU is the input of the next site. A low-precision site keeps that as codes, and nobody needs the
float32 numbers any more but ReLU's own backward, which asks where they were positive. That can be told from what
backward holds anyway: the maps that normalisation keeps. Inductor does it in loops that read those maps already.
"""

from collections.abc import Iterator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from dpquant_compile.private.savings import sites_reading, users_of

__all__ = ["MASK", "RELU", "depends_on_gradients", "only_sites_read", "recompute_masks"]

_ATEN = torch.ops.aten
RELU, MASK = _ATEN.relu.default, _ATEN.le.Scalar

# What is cheap to do again, element by element.
_POINTWISE = frozenset((_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor, _ATEN.view.default))
_FEW = 3  # maps that a mask may be made of: along a chain of skip connections every block would add one


def recompute_masks(gm: fx.GraphModule) -> None:
    """Make the masks of ReLUs whose output is a site's input of other maps than that output, where backward has them.

    Requires: the joint graph of a private program, equal nodes merged. The cut must not merge them again.
    """
    masks = {m.args[0]: m for m in gm.graph.find_nodes(op="call_function", target=MASK) if m.args[1] == 0}
    backward = depends_on_gradients(gm.graph)
    made_of: dict[fx.Node, set[fx.Node]] = {}
    for relu in gm.graph.find_nodes(op="call_function", target=RELU):
        if relu not in masks or not only_sites_read(relu, backward):
            continue
        (before,) = relu.all_input_nodes
        maps = set(_maps(before, relu.meta["val"].numel(), made_of))
        if len(maps) <= _FEW and all(_is_held(node, backward) for node in maps):
            made_of[relu] = maps
            with gm.graph.inserting_before(masks[relu]):
                masks[relu].replace_input_with(relu, _copy(gm.graph, before, maps, {}))
    gm.recompile()


def depends_on_gradients(graph: fx.Graph) -> set[fx.Node]:
    """What depends on the gradients of the outputs."""
    found = {node for node in graph.find_nodes(op="placeholder") if "tangents" in str(node.target)}
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def only_sites_read(node: fx.Node, backward: set[fx.Node]) -> bool:
    """Whether this is the input of a site, and nothing else reads it in backward."""
    readers = [sites_reading(user, own) for user, own in users_of(node) if user in backward]
    return bool(readers) and all(readers)


def _is_held(node: fx.Node, backward: set[fx.Node]) -> bool:
    """Whether backward needs this map in any case: itself, or something that is made of it element by element."""

    def needed(node: fx.Node) -> bool:
        return any(user in backward and not sites_reading(user, node) for user in node.users)

    made = (user for user in node.users if user.target in _POINTWISE)
    return needed(node) or any(needed(user) for user in made)


def _maps(node: fx.Node, size: int, made_of: dict[fx.Node, set[fx.Node]]) -> Iterator[fx.Node]:
    """The maps at the far ends of the operations before `node`. What is smaller is a statistic, or a parameter."""
    if node.meta["val"].numel() < size:
        return
    if node in made_of:
        yield from made_of[node]
    elif node.target in _POINTWISE:
        for source in node.all_input_nodes:
            yield from _maps(source, size, made_of)
    else:
        yield node


def _copy(graph: fx.Graph, node: fx.Node, maps: set[fx.Node], known: dict[fx.Node, fx.Node]) -> fx.Node:
    """The operations from `maps` to `node` once more, marked as backward's own."""
    if node in maps or (node.target not in _POINTWISE and node.target is not RELU):
        return node
    if node not in known:
        copied = graph.node_copy(node, lambda source: _copy(graph, source, maps, known))
        copied.meta = {**node.meta, "recompute": CheckpointPolicy.MUST_RECOMPUTE}
        known[node] = copied
    return known[node]
