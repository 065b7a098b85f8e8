"""Invariants of a private program: the runner checks them on the output of every pass."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dpquant_compile.errors import GraphInvariantError
from dpquant_compile.passes.fx_utils import dependents
from dpquant_compile.passes.private.cut_joint import backward_of, forward_of
from dpquant_compile.passes.private.joint_facts import INPUT, facts_of, outputs_of
from dpquant_compile.passes.private.recompute_relu_masks import depends_on_gradients
from dpquant_compile.passes.private.tag_forward import TAG, needed_by_forward

__all__ = [
    "Signature",
    "check_clipping",
    "check_cut",
    "check_forward",
    "check_operands",
    "check_outputs",
    "check_tags",
    "signature_of",
]

Signature = tuple[tuple[Any, ...], ...]


def signature_of(gm: fx.GraphModule) -> Signature:
    """Shape and dtype of each output of a joint graph as it was traced."""
    return _signature(outputs_of(gm))


def check_outputs(gm: fx.GraphModule, *, traced: Signature) -> None:
    """Refuse outputs that differ in number, order, shape or dtype from the traced ones.

    Forward may have more of them, between the model's own and the sums.
    """
    facts, found = facts_of(gm), _signature(outputs_of(gm))
    own, sums = len(facts.differentiable), len(facts.parameters) + 1
    if len(found) != facts.forward_outputs + sums or found[:own] != traced[:own] or found[-sums:] != traced[-sums:]:
        raise GraphInvariantError(
            f"the outputs of a private program changed: {len(found)} outputs, of which {facts.forward_outputs} are "
            f"forward's, where {len(traced)} were traced"
        )


def check_forward(gm: fx.GraphModule) -> None:
    """Refuse a forward output that depends on gradients: a clipped sum must not leave the program that way."""
    backward = depends_on_gradients(gm.graph)
    for node in outputs_of(gm)[: facts_of(gm).forward_outputs]:
        if node in backward:
            raise GraphInvariantError(f"forward's output {node.name!r} depends on the gradients of the outputs")


def check_clipping(gm: fx.GraphModule) -> None:
    """Refuse a sum of gradients that does not depend on the clipping bounds: it would not be clipped."""
    _check_sums(outputs_of(gm)[facts_of(gm).forward_outputs : -1], gm.graph, dependents(gm.graph, _bounds(gm.graph)))


def check_operands(gm: fx.GraphModule) -> None:
    """Refuse an operand that is rounded twice."""
    known: set[str] = set()
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.dpquant.round_operand.default):
        if str(node.args) in known:
            raise GraphInvariantError(f"node {node.name!r} rounds an operand that another node has rounded already")
        known.add(str(node.args))


def check_tags(gm: fx.GraphModule) -> None:
    """Refuse tags that are wrong: a node that forward needs has none, or a node of backward has one."""
    key, value = TAG
    for node in needed_by_forward(gm):
        if node.meta.get(key) != value:
            raise GraphInvariantError(f"forward needs node {node.name!r}, which is not tagged as forward's")
    for node in depends_on_gradients(gm.graph):
        if node.meta.get(key) == value:
            raise GraphInvariantError(f"node {node.name!r} depends on gradients and is tagged as forward's")


def check_cut(gm: fx.GraphModule, *, traced: Signature) -> None:
    """Refuse programs whose outputs differ from the joint graph's, or a forward that takes gradients."""
    facts, forward, backward = facts_of(gm), forward_of(gm), backward_of(gm)
    own, sums = len(facts.differentiable), len(facts.parameters) + 1
    if _signature(outputs_of(forward)[:own]) != traced[:own] or _signature(outputs_of(backward)) != traced[-sums:]:
        raise GraphInvariantError("forward and backward do not give the outputs of the joint graph")
    if depends_on_gradients(forward.graph):
        raise GraphInvariantError("the forward program is given the gradients of the outputs")
    # Backward may receive the bounds as a value that forward has computed from them.
    made = dependents(forward.graph, _bounds(forward.graph))
    saved = zip(backward.graph.find_nodes(op="placeholder"), outputs_of(forward)[facts.forward_outputs :], strict=False)
    given = {placeholder for placeholder, value in saved if value in made}
    _check_sums(outputs_of(backward)[:-1], backward.graph, dependents(backward.graph, given))


def _bounds(graph: fx.Graph) -> set[fx.Node]:
    return {node for node in graph.find_nodes(op="placeholder") if node.meta.get(INPUT) == "bounds"}


def _check_sums(sums: Sequence[Any], graph: fx.Graph, clipped: set[fx.Node]) -> None:
    gradients = depends_on_gradients(graph)
    for node in sums:
        if node in gradients and node not in clipped:
            raise GraphInvariantError(f"the sum {node.name!r} does not depend on the clipping bounds")


def _signature(nodes: Sequence[Any]) -> Signature:
    values = (node.meta.get("val") if isinstance(node, fx.Node) else node for node in nodes)
    return tuple((tuple(v.shape), v.dtype) if isinstance(v, Tensor) else (v,) for v in values)
