"""Let the gradient of max pooling be gathered by pixel, in one operator."""

from typing import Any

import torch
from torch import fx
from torch._inductor import inductor_prims

from dpquant_compile.backends.ops.max_pool import can_gather
from dpquant_compile.backends.site_args import call_operator, site_args
from dpquant_compile.passes.runner import PassResult

__all__ = ["gather_pool_grads"]

_ATEN = torch.ops.aten
_INDICES = inductor_prims._low_memory_max_pool_offsets_to_indices
_GRAD = torch.ops.dpquant.max_pool_grad.default


def gather_pool_grads(gm: fx.GraphModule) -> PassResult:
    """Replace the scatter that Inductor's decomposition of a pooling's backward is, for maps on the CPU.

        i = offsets_to_indices(taps, kernel, size, stride, padding, [1, 1])
        s = scatter_add(zeros(B·C, H·W), 1, i.view(B·C, …), grad.view(B·C, …)); dx = s.view(B, C, H, W)
      →
        dx = max_pool_grad(grad, taps, size, kernel, stride, padding)

    Requires: `run_inductor_passes`. Ensures: `dx` lies by pixel, and copies that made it so are gone.
    Numerics: unchanged bit for bit: a pixel's terms are added in the same order.
    """
    modified = False
    for scatter in gm.graph.find_nodes(op="call_function", target=_ATEN.scatter_add.default):
        if (found := _pooled(scatter)) is None:
            continue
        result, arguments = found
        with gm.graph.inserting_before(result):
            dx = call_operator(gm.graph, _GRAD, **arguments)
        for copy in [user for user in result.users if _lays_by_pixel(user)]:
            copy.replace_all_uses_with(dx)
        result.replace_all_uses_with(dx)
        modified = True
    if modified:
        gm.graph.eliminate_dead_code()
    return PassResult(gm, modified)


def _pooled(scatter: fx.Node) -> tuple[fx.Node, dict[str, Any]] | None:
    """The gradient of a map that this scatter makes, and the arguments of the operator that makes it instead."""
    zeros, dim, index, source = scatter.args
    indices, grad = _unlaid(index), _unlaid(source)
    views = [user for user in scatter.users if user.target is _ATEN.view.default]
    if indices.target is not _INDICES or dim != 1 or len(views) != 1 or len(scatter.users) != 1:
        return None
    taps, kernel, size, stride, padding, dilation = indices.args
    assert isinstance(taps, fx.Node)
    shape, given = tuple(views[0].meta["val"].shape), grad.meta["val"]
    whole = (*given.shape[:2], *site_args(indices).input_size) if given.dim() == 4 else None
    if any(d != 1 for d in dilation) or not _is_zero(zeros) or shape != whole:  # type: ignore[union-attr]
        return None
    if given.shape != taps.meta["val"].shape or not can_gather(given, taps.meta["val"], kernel):  # type: ignore[arg-type]
        return None
    words = {"size": size, "kernel": kernel, "stride": stride, "padding": padding}
    return views[0], {"grad": grad, "taps": taps, **words}


def _unlaid(node: Any) -> fx.Node:
    """What a node shows in another shape or layout."""
    while node.target in (_ATEN.view.default, _ATEN.clone.default):
        node = node.args[0]
    found: fx.Node = node
    return found


def _is_zero(node: Any) -> bool:
    return bool(node.target is _ATEN.full.default and node.args[1] == 0)


def _lays_by_pixel(node: fx.Node) -> bool:
    return node.target is _ATEN.clone.default and node.kwargs.get("memory_format") == torch.channels_last
