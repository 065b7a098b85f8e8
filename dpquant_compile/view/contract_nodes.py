"""The part of an fx graph that is drawn: the nodes through which activations flow, and the edges between them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from dpquant_compile.sites import Site, SiteTable

__all__ = ["INTERNAL_INPUTS", "Kind", "ViewEdge", "ViewNode", "contract"]

Kind = Literal["site", "op", "input", "output"]

INTERNAL_INPUTS = frozenset({"dpq_policy", "dpq_keys", "dpq_samples"})

# The role of an fx node: drawn; passed through (its readers join its source); or left out, as a plain number or shape
# ("scalar"), or as a parameter or something computed from parameters alone ("param").
_Role = Literal["show", "pass", "scalar", "param"]

_TENSOR_ATTRIBUTES = frozenset({"T", "H", "mT", "mH", "data", "real", "imag"})
_SCALAR_METHODS = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "item", "tolist", "storage_offset", "element_size",
     "is_contiguous", "is_floating_point", "get_device"}
)  # fmt: skip
_SCALAR_FUNCTION = re.compile(r"_assert(_\w+)?|_check(_\w+)?|sym_\w+|is_\w+|numel|isinstance|len")
_SCALAR_MODULES = frozenset({"_operator", "builtins", "math"})
_LIFTED = re.compile(r"_(parameters|buffers)_")  # parameters that Dynamo turned into inputs
_DYNAMO_INPUT = re.compile(r"^[Ll]_(\w+)_$")  # its name for the argument "x" is L_x_

_LONG_NAMES = {
    "scaled_dot_product_attention": "attention",
    "multiheadattention": "attention",
    "truediv": "div",
    "iadd": "add",
    "imul": "mul",
    "isub": "sub",
    "getitem": "slice",
}


@dataclass(frozen=True)
class ViewNode:
    """One box of the drawing.

    `site` is the site's name, `scope` the module that the node belongs to ("layer1.0", "" for the top), `op` the
    operation in full, `skipped` why a conv or linear is not a site. Shapes and FLOPs are None until known.
    """

    id: str
    label: str
    kind: Kind
    op: str
    site: str | None = None
    scope: str = ""
    shape: tuple[int, ...] | None = None
    flops: int | None = None
    source: str | None = None
    origin: str | None = None
    skipped: str | None = None


@dataclass(frozen=True)
class ViewEdge:
    """A tensor that flows from one node to another.

    `skip` marks a shortcut, which bypasses nodes of the longest path: a residual edge, the merging edge of a projection
    shortcut, a dense connection.
    """

    source: str
    target: str
    skip: bool = False


def contract(gm: fx.GraphModule, sites: SiteTable) -> tuple[tuple[ViewNode, ...], tuple[ViewEdge, ...]]:
    """The visible nodes of a graph in its order, and the tensor flow between them.

    Hidden: parameters and what is computed from them alone, shape and integer arithmetic, assertions, the inputs
    that the compiler adds. Picking one of several outputs (`chunk(...)[0]`) is no node: its edges are joined.
    """
    modules = dict(gm.named_modules())
    roles: dict[fx.Node, _Role] = {}
    flows: dict[fx.Node, tuple[fx.Node, ...]] = {}  # the visible nodes whose tensors a node reads
    for node in gm.graph.nodes:
        roles[node] = "show" if _site(node, sites) else _role(node, roles)
        found: list[fx.Node] = []
        for read in node.all_input_nodes:
            found += [read] if roles[read] == "show" else flows[read] if roles[read] == "pass" else ()
        flows[node] = tuple(dict.fromkeys(found))
    shown = [node for node in gm.graph.nodes if roles[node] == "show"]
    pairs = [(source.name, node.name) for node in shown for source in flows[node]]
    nodes = tuple(_view_node(node, sites, modules) for node in shown)
    skips = _shortcuts(nodes, pairs)
    return nodes, tuple(ViewEdge(*pair, skip=pair in skips) for pair in pairs)


def _role(node: fx.Node, roles: Mapping[fx.Node, _Role]) -> _Role:
    reads = {roles[read] for read in node.all_input_nodes}
    name = _target_name(node)
    if node.op == "output":
        return "show"
    if node.op == "get_attr":
        return "param"
    if node.op == "placeholder":
        example = node.meta.get("val", node.meta.get("example_value"))
        if name in INTERNAL_INPUTS or isinstance(example, int | torch.SymInt):
            return "scalar"
        return "param" if _LIFTED.search(name) else "show"
    if "param" in reads and reads <= {"param", "scalar"}:
        return "param"
    if node.op == "call_method":
        return "scalar" if name in _SCALAR_METHODS else "show"
    if node.op == "call_function":
        if node.target is getattr:
            return "show" if node.args[1] in _TENSOR_ATTRIBUTES else "scalar"
        if name == "getitem" and reads & {"show", "pass"} and isinstance(node.args[1], int):
            return "pass"
        if _SCALAR_FUNCTION.fullmatch(name):
            return "scalar"
        if getattr(node.target, "__module__", None) in _SCALAR_MODULES and reads <= {"scalar"}:
            return "scalar"
    return "show"


def _site(node: fx.Node, sites: SiteTable) -> Site | None:
    """The table's entry for a node's site (with shapes, once they are known), if it has one."""
    mark = node.meta.get("site")
    return sites[mark.name] if isinstance(mark, Site) and mark.name in sites.names else None


def _target_name(node: fx.Node) -> str:
    """The bare name of a node's operation: "conv2d" for `aten.conv2d.default`, `F.conv2d` and `dpquant::conv2d`."""
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.rpartition("::")[2]
    return str(getattr(target, "__name__", target))


def _short(op: str) -> str:
    """A label for an op: "maxpool" for MaxPool2d and max_pool2d, "relu" for relu_."""
    name = op.lower().strip("_")
    name = _LONG_NAMES.get(name, name).removeprefix("adaptive").removeprefix("_")
    return re.sub(r"_?(pool|norm|dropout|pad)(\dd)?$", r"\1", name)


def _view_node(node: fx.Node, sites: SiteTable, modules: Mapping[str, torch.nn.Module]) -> ViewNode:
    shape = node.meta.get("shape")
    source, origin = node.meta.get("source"), node.meta.get("origin")
    site = _site(node, sites)
    scope, module_path = _scope(node)
    if site is not None:
        return ViewNode(
            id=node.name,
            label=site.name,
            kind="site",
            op=site.op,
            site=site.name,
            scope=scope or _parent(site.name),
            shape=tuple(shape) if shape is not None else site.output_shape,
            flops=site.flops,
            source=source or site.source,
            origin=origin,
        )
    op = type(modules[str(node.target)]).__name__ if node.op == "call_module" else _target_name(node)
    mark = node.meta.get("site")
    names = {module_path, mark.name if isinstance(mark, Site) else None}
    skipped = next((s.reason for s in sites.skipped if s.name in names), None)
    kinds: dict[str, Kind] = {"placeholder": "input", "output": "output"}
    return ViewNode(
        id=node.name,
        label=_DYNAMO_INPUT.sub(r"\1", op) if node.op in kinds else _short(op),
        kind=kinds.get(node.op, "op"),
        op={"placeholder": "input"}.get(node.op, op),
        scope=scope,
        shape=tuple(shape) if shape is not None else None,
        source=source,
        origin=origin,
        skipped=skipped,
    )


def _scope(node: fx.Node) -> tuple[str, str | None]:
    """The module that a node belongs to, and, if the node is itself a layer, the path of that layer."""
    if node.op == "call_module":
        path = str(node.target)
        return _parent(path), path
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    if not stack or node.op in ("placeholder", "output"):
        return "", None
    path, kind = list(stack.values())[-1]
    path = re.sub(r"\['?([^'\]]*)'?\]", r".\1", str(path))  # Dynamo writes L['self'].layer1[0]
    path = ".".join(part for part in re.sub(r"^L\.\w+", "", path).split(".") if part not in ("", "_modules"))
    home = kind if isinstance(kind, str) else kind.__module__
    if home.startswith("torch.nn.modules") and "container" not in home:
        return _parent(path), path
    return path, None


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _shortcuts(nodes: Sequence[ViewNode], pairs: Sequence[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    """The edges that reach their target earlier than the longest path does. A constant is no shortcut."""
    preds: dict[str, list[str]] = {node.id: [] for node in nodes}
    for u, v in pairs:
        preds[v].append(u)
    flowing = {node.id for node in nodes if node.kind == "input" or preds[node.id]}
    depth: dict[str, int] = {}
    for name, before in preds.items():
        depth[name] = 1 + max((depth[p] for p in before), default=-1)
    return frozenset((u, v) for u, v in pairs if u in flowing and depth[v] > depth[u] + 1)
