"""Helpers on fx graphs: graph modules over the user's own modules, copies, names and source lines of nodes."""

import inspect
import os
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
import torch.fx._pytree as fx_pytree
from torch import fx
from torch._ops import OpOverload

from dpquant_compile.backends.site_args import signature_of

__all__ = [
    "bind_inputs",
    "clean_path",
    "copy_graph",
    "dependents",
    "draws_random",
    "draws_seeded",
    "graph_module_over",
    "is_known_operator",
    "node_source",
    "op_name",
    "package_of",
    "read_attribute",
    "user_frames",
]

# torch, and this folder under both of its names.
_OTHER_CODE = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.path.realpath(__file__)) + os.sep,
)


def graph_module_over(root: torch.nn.Module, graph: fx.Graph, name: str = "Graph") -> fx.GraphModule:
    """A GraphModule whose code runs over `root`'s own children, parameters and buffers.

    `fx.GraphModule` copies the leaves it needs, and a copy becomes stale when `load_state_dict(assign=True)` or `.to()`
    replaces a tensor. Here the modules, and the dicts of the top-level tensors, are the user's own.
    """
    gm = fx.GraphModule(torch.nn.Module(), fx.Graph(), class_name=name)
    gm.__dict__["_modules"] = dict(root._modules)
    gm.__dict__["_parameters"] = root._parameters
    gm.__dict__["_buffers"] = root._buffers
    gm.training = root.training
    gm.graph = graph
    return gm


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of `graph` that shares its signature: copying the signature by fx would raise a warning."""
    new = fx.Graph(tracer_cls=graph._tracer_cls)
    result: Any = new.graph_copy(graph, {}, return_output_node=True)
    if result is not None:
        value, output = result
        new.output(value, type_expr=getattr(output, "type", None)).meta = dict(output.meta)
    new._codegen = graph._codegen
    return new


def node_source(node: fx.Node) -> str | None:
    """The line of the user's code that made `node`, as "file.py:12: y = self.conv(x)"; None if unknown."""
    if "source" in node.meta:
        source: str | None = node.meta["source"]
        return source
    frames = user_frames(node)
    if not frames:
        return None
    head, _, code = frames[-1].partition("\n")
    path, _, rest = head.partition('", line ')
    return f"{os.path.basename(path)}:{rest.split(',')[0]}: {code.strip().splitlines()[0] if code.strip() else '?'}"


def user_frames(node: fx.Node) -> list[str]:
    """The frames of a node's stack trace that are neither torch's nor this library's, outermost first."""
    frames = [part.rstrip() for part in (node.stack_trace or "").split('File "')[1:]]
    return [frame for frame in frames if not frame.startswith(_OTHER_CODE)]


def bind_inputs(gm: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call of `gm`, one per placeholder, defaults filled in."""
    info = getattr(gm.graph._codegen, "pytree_info", None)
    if info is not None:
        flat: list[Any] = fx_pytree.tree_flatten_spec((list(args), dict(kwargs)), info.in_spec)
        return flat
    # fx has one placeholder for *args and one for **kwargs, like the bound arguments.
    bound = inspect.signature(gm.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return list(bound.arguments.values())


def clean_path(path: str) -> str:
    """A module's path as the user writes it, from the notation of fx or of Dynamo."""
    path = re.sub(r"^L\['[^']*'\]", "", path)  # Dynamo starts from forward()'s name for self
    for old, new in (("._modules['", "."), ("['", "."), ("']", ""), ("[", "."), ("]", "")):
        path = path.replace(old, new)
    return path.replace("__dict__._modules.", "").removeprefix(".")  # as Dynamo sees what a __getattr__ forwards to


def op_name(node: fx.Node) -> str:
    """A short name of a node's operation, for counting and for printing."""
    if node.op == "call_module":
        owner = node.graph.owning_module
        target = owner.get_submodule(str(node.target)) if owner is not None else None
        return type(target).__name__
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", node.target))
    return str(node.target) if node.op == "call_method" else node.op


def read_attribute(root: Any, target: Any) -> Any:
    """The value behind a dotted name, such as the target of a get_attr node."""
    for atom in str(target).split("."):
        root = getattr(root, atom)
    return root


def dependents(graph: fx.Graph, sources: Set[fx.Node]) -> set[fx.Node]:
    """`sources`, and all nodes that depend on them."""
    found = set(sources)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def package_of(target: Any) -> str:
    """The top-level package in which a class or a function is defined; empty if unknown."""
    return str(getattr(target, "__module__", None) or "").split(".")[0]


def is_known_operator(func: Any) -> bool:
    """Whether an operator is PyTorch's, whose tags say whether it draws random numbers, or this library's."""
    return getattr(func, "namespace", None) in ("aten", "prims", "dpquant")


_DRAWING = (
    *"dropout rand bernoulli normal_ uniform_ multinomial rrelu poisson binomial exponential_ cauchy_".split(),
    *"geometric_ gumbel gamma_ dirichlet stochastic_depth fractional_max_pool".split(),
)
_DRAWS = {"normal", "_standard_gamma"}  # `normalize` draws nothing


def draws_random(node: fx.Node) -> bool:
    """Whether a node of a captured graph, of torch functions and methods, draws random numbers."""
    if isinstance(node.target, OpOverload) and not is_known_operator(node.target):
        return True  # nothing rules it out for an operator of another library
    name = op_name(node)
    if name == "dropout" and _is_off(node):
        return False
    return name in _DRAWS or any(word in name for word in _DRAWING)


def _is_off(dropout: fx.Node) -> bool:
    """Whether a call of `F.dropout` returns its input."""
    given = dict(zip(("input", "p", "training"), dropout.args, strict=False)) | dropout.kwargs
    p = given.get("p")
    return (isinstance(p, int | float) and p == 0) or given.get("training") is False


def draws_seeded(node: fx.Node) -> bool:
    """Whether a node of a graph of ATen operators draws random numbers."""
    if isinstance(node.target, OpOverload) and not is_known_operator(node.target):
        return True  # its author may have left out the tag
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    given = signature_of(node.target).bind(node.args, node.kwargs)
    return given.get("dropout_p") != 0  # attention draws for its dropout alone
