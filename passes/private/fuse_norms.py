"""Make a group norm, the map that is added to it and the ReLU behind them one operator, forward and backward."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dpquant_compile.backends.site_args import call_operator, site_args
from dpquant_compile.passes.private.pack_relu_masks import is_zeroing
from dpquant_compile.passes.runner import PassResult

__all__ = ["fuse_norms"]

_ATEN, _OPS = torch.ops.aten, torch.ops.dpquant
_NORM, _GRAD = _OPS.group_norm.default, _OPS.group_norm_grad.default


def fuse_norms(gm: fx.GraphModule) -> PassResult:
    """Let a norm's operator add a map and take the positive part, and its gradient take the mask.

        y, mean, rstd, _ = group_norm(x, None, …, False); z = relu(y + other)
        g = where(z <= 0, 0, grad); dx, … = group_norm_grad(g, None, x, mean, rstd, …, False); f(g)
      →
        z, mean, rstd, bits = group_norm(x, other, …, True)
        dx, …, g = group_norm_grad(grad, bits, x, mean, rstd, …, True); f(g)

    Requires: `merge_equal_nodes`. Ensures: nothing reads the sum before such a ReLU, and its backward does not read z.
    Numerics: unchanged bit for bit: the same operations in the same order.
    """
    modified = False
    for relu in gm.graph.find_nodes(op="call_function", target=_ATEN.relu.default):
        # One after the other: the map that is added may be the result of the one before.
        if (place := _at(relu)) is not None:
            _fuse(gm.graph, place)
            modified = True
    if modified:
        gm.graph.eliminate_dead_code()
    return PassResult(gm, modified)


@dataclass(frozen=True)
class _Place:
    """A norm whose result only a ReLU reads, maybe after a sum, and the nodes of their backward."""

    relu: fx.Node
    norm: fx.Node
    other: fx.Node | None
    where: fx.Node
    grad: fx.Node


def _at(relu: fx.Node) -> _Place | None:
    before: Any = relu.args[0]
    candidates: list[tuple[Any, Any]] = [(before, None)]
    if before.target is _ATEN.add.Tensor and not before.kwargs and len(before.users) == 1:
        first, second = before.args
        candidates = [(first, second), (second, first)]
    for result, other in candidates:
        if norm := _plain_norm(result):
            if other is not None and not (isinstance(other, fx.Node) and _kind(other) == _kind(result)):
                continue
            masks = [user for user in relu.users if user.target is _ATEN.le.Scalar and user.args[1] == 0]
            wheres = [where for mask in masks for where in mask.users]
            grads = [node for node in _users(norm, 1) if node.target is _GRAD]
            if len(masks) == len(wheres) == len(grads) == 1 and is_zeroing(wheres[0], masks[0], relu):
                given = site_args(grads[0])
                if given.grad is wheres[0] and given.bits is None and given.x is site_args(norm).x:
                    return _Place(relu, norm, other, wheres[0], grads[0])
    return None


def _plain_norm(result: Any) -> fx.Node | None:
    """The norm that makes this, if nothing else is done with it, and nothing is fused to it yet."""
    if not isinstance(result, fx.Node) or result.target is not operator.getitem or len(result.users) != 1:
        return None
    norm, place = result.args
    if not isinstance(norm, fx.Node) or norm.target is not _NORM or place != 0:
        return None
    given = site_args(norm)
    same = sum(user.args[1] == 0 for user in norm.users) == 1
    return norm if same and given.other is None and not given.relu else None


def _users(norm: fx.Node, place: int) -> Iterator[fx.Node]:
    for part in norm.users:
        if part.args[1] == place:
            yield from part.users


def _kind(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape), node.meta["val"].dtype


def _fuse(graph: fx.Graph, place: _Place) -> None:
    given, back = vars(site_args(place.norm)), vars(site_args(place.grad))
    with graph.inserting_before(place.relu):
        norm = call_operator(graph, _NORM, **{**given, "other": place.other, "relu": True})
        z, mean, rstd, bits = (_part(graph, norm, i) for i in range(4))
    shared = [user for user in place.where.users if user is not place.grad]
    with graph.inserting_before(place.where):
        own = {"grad": place.where.args[2], "bits": bits, "mean": mean, "rstd": rstd, "other": bool(shared)}
        grad = call_operator(graph, _GRAD, **{**back, **own})
        if shared:
            place.where.replace_all_uses_with(_part(graph, grad, 3), delete_user_cb=lambda user: user is not place.grad)
    place.grad.replace_all_uses_with(grad)
    place.relu.replace_all_uses_with(z)
    graph.erase_node(place.grad)


def _part(graph: fx.Graph, node: fx.Node, place: int) -> fx.Node:
    part = graph.call_function(operator.getitem, (node, place))
    part.meta["val"] = node.meta["val"][place]
    return part
