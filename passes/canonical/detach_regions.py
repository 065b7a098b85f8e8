"""Pass: replace regions without gradients by `detach()` on the values that leave them."""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from dpquant_compile.errors import CaptureError
from dpquant_compile.passes.canonical.functionalize import mutated_input, root_of
from dpquant_compile.passes.fx_utils import node_source
from dpquant_compile.passes.runner import PassResult

__all__ = ["detach_regions"]


def detach_regions(gm: fx.GraphModule) -> PassResult:
    """Remove the switches of the gradient mode, and detach what was computed while gradients were off.

        _set_grad_enabled(False); c = f.cos(); _set_grad_enabled(True); q * c   →   c = f.cos(); q * c.detach()

    A switch sets the mode of the whole thread: its second half would turn gradients on inside the caller's own
    `no_grad`, and an error between the two would leave them off. So the caller's mode holds for the whole graph.
    Requires: `capture_dynamo`, or a user's graph with the values that export records. Ensures: no switch is left.
    Numerics: values and gradients are unchanged. Raises `CaptureError` where a value that needs a gradient is changed
    in place in a region: its gradient would skip the change.
    """
    switches = [node for node in gm.graph.nodes if node.target is torch._C._set_grad_enabled]
    if not switches:
        return PassResult(gm, False)
    inside: dict[fx.Node, fx.Node] = {}  # nodes that run without gradients, and the node that ends their region
    start: fx.Node | None = None
    members: list[fx.Node] = []
    for node in gm.graph.nodes:
        if node in switches or node.op == "output":
            inside |= dict.fromkeys(members, node)
            start, members = (node if node in switches and not node.args[0] else None), []
        elif start is not None and node.op not in ("placeholder", "get_attr"):
            members.append(node)
    for node in list(inside):
        _keep_write_legal(node, inside)
    for node, end in inside.items():
        for value in _tensors(node) if any(user not in inside for user in node.users) else ():
            _detach(value, end, inside)
    for node in switches:
        gm.graph.erase_node(node)
    return PassResult(gm, True)


def _tensors(node: fx.Node) -> Iterator[fx.Node]:
    """The node if it is a tensor that may need a gradient; of several tensors, the nodes that read one each."""
    value = _value(node)
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield node
    elif isinstance(value, list | tuple):
        for user in node.users:
            if user.target is operator.getitem:
                yield from _tensors(user)
    elif value is None:
        raise CaptureError(
            f"node {node.name!r} ({node_source(node) or 'source line unknown'}) runs without gradients, and its graph "
            "does not say what it gives. Fix: compile the model from which the graph was made"
        )


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _detach(node: fx.Node, end: fx.Node, inside: dict[fx.Node, fx.Node]) -> None:
    # At the end of the region, after all writes into the value.
    with node.graph.inserting_before(end):
        detached = node.graph.call_method("detach", (node,))
    detached.meta = dict(node.meta)
    node.replace_all_uses_with(detached, lambda user: user not in inside and user is not detached)


def _detach_inputs(node: fx.Node, target: fx.Node, inside: dict[fx.Node, fx.Node]) -> None:
    """Detach what a region writes into a value from before it, which is read under its own name after the region."""
    for source in node.all_input_nodes:
        value = _value(source)
        if source is not target and isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            with node.graph.inserting_before(node):
                detached = node.graph.call_method("detach", (source,))
            detached.meta = dict(source.meta)
            node.replace_input_with(source, detached)
            inside[detached] = inside[node]


def _keep_write_legal(node: fx.Node, inside: dict[fx.Node, fx.Node]) -> None:
    """Let a region write into parameters, as it may; refuse writes into values that need a gradient."""
    target = mutated_input(node)
    if target is None or target in inside:
        return
    value = _value(target)
    if isinstance(value, Tensor) and not value.requires_grad:
        _detach_inputs(node, target, inside)
        return
    if root_of(target).op == "get_attr" and all(user in inside for user in node.users):
        with node.graph.inserting_before(node):
            memory = node.graph.call_method("detach", (target,))
        memory.meta = dict(target.meta)
        node.replace_input_with(target, memory)
        return
    raise CaptureError(
        f"node {node.name!r} ({node_source(node) or 'source line unknown'}) changes {target.name!r} in place under "
        "torch.no_grad(), and its gradient would skip the change. Fix: compute a new value, x = x + (f(x) - x).detach()"
    )
