"""Pass: cut a specialised graph into the repeated blocks of the model, each a function of tensors only."""

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from torch import fx, nn
from torch.fx.passes.split_module import split_module

from dpquant_compile.backends.ops.specialised_site import low_precision_site, sealed_conv
from dpquant_compile.backends.site_args import site_args
from dpquant_compile.errors import CaptureError
from dpquant_compile.passes.canonical.canonicalize import CONVS
from dpquant_compile.passes.fx_utils import clean_path, graph_module_over
from dpquant_compile.passes.precision.insert_switches import LINK_TABLE

__all__ = ["block_key", "lift_tensors", "split_blocks"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def lift_tensors(gm: fx.GraphModule, shape_of: Callable[[str], tuple[int, ...]]) -> tuple[fx.GraphModule, list[str]]:
    """Make every tensor that the graph reads an input, after the user's inputs.

        w = self.conv1.weight; y = f(x, w)   →   def forward(x, conv1_weight): y = f(x, conv1_weight)

    A low-precision site reads only its own row of keys, "_dpq.keys[3]", and calls itself site 0; so two blocks that
    differ in their tensors alone have the same code. Returns the graph, whose inputs and outputs are flat, and the
    names of the tensors in order. `shape_of` gives a tensor's shape by name.
    """
    graph, names = fx.Graph(), []
    values: dict[fx.Node, fx.Node] = {}
    rows: dict[int, fx.Node] = {}

    def tensor(name: str, label: str) -> fx.Node:
        new = graph.placeholder("t_" + label.replace(".", "_"))  # a layer may be called "0"
        new.meta["shape"] = shape_of(name)
        names.append(name)
        return new

    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values[node] = graph.placeholder(node.name)
            values[node].meta = dict(node.meta)
    shared: dict[str, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            raise CaptureError(
                f"precompile() needs a graph of plain operations, but module {node.target!r} is kept whole (it has "
                "hooks, or fx cannot trace it). The model runs without variants."
            )
        if node.op == "get_attr" and node.target != f"{LINK_TABLE}.keys":
            name = str(node.target)
            shared[name] = values[node] = shared[name] if name in shared else tensor(name, name)
        elif node.target is low_precision_site and (row := site_args(node).site) not in rows:
            rows[row] = tensor(f"{LINK_TABLE}.keys[{row}]", f"dpq_keys_{row}")
    for node in gm.graph.nodes:
        if node in values or node.op == "get_attr":
            continue
        if node.target is low_precision_site:
            given = vars(site_args(node))
            lifted = {name: values.get(arg) if isinstance(arg, fx.Node) else arg for name, arg in given.items()}
            lifted |= {"keys": rows[given["site"]], "site": 0}
            named = {name: lifted.pop(name) for name in node.kwargs}
            values[node] = graph.call_function(low_precision_site, tuple(lifted.values()), named)
            values[node].meta = dict(node.meta)
        else:
            values[node] = graph.node_copy(node, lambda n: values[n])
            if node.target in CONVS:
                values[node].target = sealed_conv  # the same conv, without guards on the batch size
    return graph_module_over(nn.Module(), graph, "Lifted"), names


def split_blocks(gm: fx.GraphModule, model: nn.Module) -> fx.GraphModule:
    """Cut a lifted graph into runs of nodes that belong to one block of `model`; returns the graph of blocks."""
    blocks = _blocks(model)
    part, last = -1, object()
    parts: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        block = _block_of(node, blocks)
        if block != last:
            part, last = part + 1, block
        parts[node] = part
    return split_module(gm, gm, lambda node: parts[node])


def block_key(block: fx.GraphModule) -> str:
    """A name for what a block computes and on which shapes: equal for blocks that differ in nothing but names."""
    index = {node: f"v{i}" for i, node in enumerate(block.graph.nodes)}
    lines = []
    for node in block.graph.nodes:
        target = node.op if node.op in ("placeholder", "output") else f"{node.op} {node.target}"
        arguments: Any = fx.map_arg((node.args, dict(node.kwargs)), lambda n: cast(Any, _Name(index[n])))
        shape = node.meta.get("shape", "")
        lines.append(f"{index[node]} = {target} {arguments if node.op != 'placeholder' else ''} {shape}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


class _Name:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def _blocks(model: nn.Module) -> set[str]:
    """The outermost modules, other than plain containers, whose class occurs more than once and that hold others."""
    holders = [(name, m) for name, m in model.named_modules() if name and any(True for _ in m.children())]
    counts = Counter(type(m) for _, m in holders if not isinstance(m, _CONTAINERS))
    chosen: list[str] = []
    for name, module in holders:
        repeated = counts[type(module)] > 1
        if repeated and not any(name.startswith(f"{outer}.") for outer in chosen):
            chosen.append(name)
    return set(chosen)


def _block_of(node: fx.Node, blocks: set[str]) -> str | None:
    stack = node.meta.get("nn_module_stack") or {}
    for entry in stack.values():
        path = str(entry[0] if isinstance(entry, tuple) else entry)
        if clean_path(path) in blocks:
            return clean_path(path)
    return None
