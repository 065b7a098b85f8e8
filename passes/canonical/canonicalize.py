"""Pass: one form for every conv and every linear."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from dpquant_compile.passes.runner import PassResult

__all__ = ["CONVS", "canonicalize"]

CONVS = (F.conv1d, F.conv2d, F.conv3d)
_CONV_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_LINEAR_NAMES = ("input", "weight", "bias")
_ATEN = {
    torch.ops.aten.conv1d.default: F.conv1d,
    torch.ops.aten.conv2d.default: F.conv2d,
    torch.ops.aten.conv3d.default: F.conv3d,
    torch.ops.aten.linear.default: F.linear,
}


def canonicalize(gm: fx.GraphModule) -> PassResult:
    """Write convs and linears as `F.convNd(x, w, b, stride, padding, dilation, groups)` and `F.linear(x, w, b)`.

        y = F.conv2d(x, w, stride=2, padding="same")   →   y = F.conv2d(x, w, None, (2, 2), (1, 1), (1, 1), 1)

    "same" padding that is not symmetric becomes an explicit `F.pad`.
    Requires: `inline_modules`. Ensures: static conv arguments are tuples of ints. Numerics: unchanged.
    """
    modified = False
    for node in list(gm.graph.nodes):
        if node.op == "call_function":
            target = _ATEN.get(node.target, node.target)
            if target in CONVS or target is F.linear:
                before = (node.target, node.args, dict(node.kwargs))
                node.target = target
                _normalise(gm, node)
                modified |= before != (node.target, node.args, dict(node.kwargs))
    return PassResult(gm, modified)


def _normalise(gm: fx.GraphModule, node: fx.Node) -> None:
    names = _LINEAR_NAMES if node.target is F.linear else _CONV_NAMES
    defaults: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    bound = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    if names is _CONV_NAMES:
        rank = CONVS.index(node.target) + 1
        for key in ("stride", "dilation"):
            bound[key] = _tuple(bound[key], rank)
        if isinstance(bound["padding"], str):
            _resolve_padding(gm, node, bound, rank)
        bound["padding"] = _tuple(bound["padding"], rank)
    node.args, node.kwargs = tuple(bound[name] for name in names), {}


def _tuple(value: Any, rank: int) -> Any:
    if isinstance(value, int):
        return (value,) * rank
    if isinstance(value, list | tuple):
        return tuple(value) * rank if len(value) == 1 else tuple(value)
    return value  # computed by the graph; mark_sites skips it with a reason


def _resolve_padding(gm: fx.GraphModule, node: fx.Node, bound: dict[str, Any], rank: int) -> None:
    """ "valid" is no padding; "same" is symmetric padding, or an `F.pad` where the kernel is even."""
    if bound["padding"] == "valid":
        bound["padding"] = 0
        return
    weight = bound["weight"]
    tensor = _weight(gm, weight)
    if tensor is None:
        return  # its kernel size is not known; mark_sites skips it with a reason
    total = [d * (k - 1) for d, k in zip(bound["dilation"], tensor.shape[2:], strict=True)]
    bound["padding"] = tuple(t // 2 for t in total)
    if any(t % 2 for t in total):
        extra = [amount for t in reversed(total) for amount in (0, t % 2)]
        with gm.graph.inserting_before(node):
            bound["input"] = gm.graph.call_function(F.pad, (bound["input"], tuple(extra)))


def _weight(gm: fx.GraphModule, node: Any) -> torch.Tensor | None:
    if isinstance(node, fx.Node) and "state" in node.meta:
        value: torch.Tensor | None = node.meta.get("example_value")
        return value
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    owner, _, attribute = str(node.target).rpartition(".")
    return torch.as_tensor(getattr(gm.get_submodule(owner), attribute))
