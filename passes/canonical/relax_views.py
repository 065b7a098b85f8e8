"""Pass: make operators that read the layout of memory give the user's result for every layout."""

from typing import Any

import torch
from torch import fx

from dpquant_compile.passes.fx_utils import node_source, op_name
from dpquant_compile.passes.runner import PassResult

__all__ = ["relax_views"]

# With sizes: a reshape gives the same elements, and copies only where the memory asks for it.
_SIZED = {"view", "view_copy", "_unsafe_view"}
# These need or take apart the layout itself, which is row-major in a copy that is.
_ROW_MAJOR = {"view_as_complex", "as_strided", "as_strided_copy", "stride"}


def relax_views(gm: fx.GraphModule) -> PassResult:
    """Let views hold in programs whose sites lay their results out in another way than the user's model.

        y = x.view(8, -1)          →   y = x.reshape(8, -1)
        y = x.view_as(z)           →   y = x.reshape(z.shape)
        y = x.view(torch.int32)    →   c = x.contiguous(); y = c.view(torch.int32)

    Convolutions of private programs give channels-last results, on which `x.view(x.size(0), -1)` fails. A view that
    fails in the user's model has failed in `track_batch`, which runs the graph on the user's layouts.
    Requires: `functionalize`, so that no view is written through; `track_batch`.
    Ensures: no operator on a value of a site reads its strides. Numerics: unchanged.
    """
    modified = False
    for node in list(gm.graph.nodes):
        if node.op not in ("call_function", "call_method") or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        name = _name(node)
        if name == "view_as":
            with gm.graph.inserting_before(node):
                size = _derived(gm.graph.call_method("size", (node.args[1],)), node)
            _become(node, "reshape", node.args[0], size)
        elif name in _SIZED and _dtype(node) is None:
            _become(node, "reshape", *node.args, **node.kwargs)
        elif name in _SIZED or (name in _ROW_MAJOR and node.args[0].meta.get("contiguous")):
            source = node.args[0]
            with gm.graph.inserting_before(node):
                copy = _derived(gm.graph.call_method("contiguous", (source,)), node)
            copy.meta |= {key: source.meta[key] for key in ("shape", "batch_axis", "contiguous") if key in source.meta}
            node.replace_input_with(source, copy)
        else:
            continue
        modified = True
    return PassResult(gm, modified)


def _name(node: fx.Node) -> str:
    target = node.target
    return target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else op_name(node)


def _dtype(node: fx.Node) -> Any:
    """The type that `x.view(dtype)` reads the memory as; None for a view with sizes."""
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dtype")
    read = isinstance(given, fx.Node) and given.target is getattr and given.args[1] == "dtype"
    return given if read or isinstance(given, torch.dtype) else None


def _become(node: fx.Node, method: str, *args: Any, **kwargs: Any) -> None:
    node.op, node.target, node.args, node.kwargs = "call_method", method, args, kwargs
    if "size" in kwargs:  # the name that `view` gives it
        node.kwargs = {"shape": kwargs["size"]}


def _derived(made: fx.Node, node: fx.Node) -> fx.Node:
    made.meta |= {"source": node_source(node), "nn_module_stack": node.meta.get("nn_module_stack")}
    return made
