"""Pass: find every conv and linear, and mark it as a site or record why it is none."""

import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from dpquant_compile.errors import listing
from dpquant_compile.passes.canonical.canonicalize import CONVS
from dpquant_compile.passes.canonical.functionalize import mutated_input, root_of
from dpquant_compile.passes.canonical.inline_modules import has_hooks
from dpquant_compile.passes.canonical.rewrite_products import stored_weight
from dpquant_compile.passes.capture import SITE_MODULES, TRANSPOSED_MODULES
from dpquant_compile.passes.fx_utils import clean_path, node_source, op_name, package_of
from dpquant_compile.passes.runner import PassResult
from dpquant_compile.sites import ConvGeometry, Site, SiteTable, Skipped, renumber

__all__ = ["collect_sites", "declared_sites", "mark_sites"]

_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_PRODUCTS = {"matmul", "mm", "addmm", "bmm", "baddbmm", "einsum", "bilinear", "addbmm", "tensordot"}
_RECURRENT = (nn.RNNBase, nn.RNNCellBase, nn.Bilinear)


def mark_sites(gm: fx.GraphModule) -> PassResult:
    """Set node.meta["site"] on each conv and linear, and node.meta["skipped"] on what only looks like one.

        conv2d = F.conv2d(x, self.conv1.weight, …)   # meta["site"] = Site("conv1", "conv2d", …), meta["call"] = 0

    A layer that is called several times is one site; meta["call"] counts its calls. A site takes activations of the
    batch and a weight that does not depend on the batch: only then may the weight share one scale. Inputs of the graph
    are the batch, except those with meta["state"], the name of a parameter or buffer that Dynamo made an input.
    Requires: `canonicalize`, `rewrite_products`. Ensures: nodes and edges are untouched (modified=False).
    Numerics: unchanged.
    """
    batch = _reached_from_inputs(gm.graph)
    found: dict[str, Site] = {}
    calls: dict[str, int] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and (node.target in CONVS or node.target is F.linear):
            reason = _why_not(gm, node, batch)
            site = _describe(gm, node, found)
            if reason is not None:
                node.meta["skipped"] = Skipped(site.name, site.op, reason, site.source)
                continue
            found.setdefault(site.name, replace(site, index=len(found)))
            node.meta["call"] = calls.get(site.name, 0)
            calls[site.name] = node.meta["call"] + 1
            site = replace(found[site.name], nodes=(*found[site.name].nodes, node.name))
            found[site.name] = site
        elif (skipped := _near_miss(gm, node, batch)) is not None:
            node.meta["skipped"] = skipped
    owner = {name: site for site in found.values() for name in site.nodes}
    for node in gm.graph.nodes:
        if node.name in owner:
            node.meta["site"] = owner[node.name]
    return PassResult(gm, False)


def collect_sites(gm: fx.GraphModule) -> SiteTable:
    """The table of a marked graph."""
    sites = {n.meta["site"].name: n.meta["site"] for n in gm.graph.nodes if "site" in n.meta}
    return SiteTable(renumber(sites.values()), tuple(n.meta["skipped"] for n in gm.graph.nodes if "skipped" in n.meta))


def declared_sites(model: nn.Module) -> SiteTable:
    """The sites that a model's modules declare, for models whose graph is known only at the first forward."""

    def walk() -> Iterator[Site]:
        inside: tuple[str, ...] = ()
        for name, module in model.named_modules():
            if isinstance(module, nn.MultiheadAttention):
                inside += (f"{name}.",)
                for part in ("in_proj", "out_proj"):
                    path = f"{name}.{part}".removeprefix(".")
                    yield Site(path, "linear", 0, module_types=_class_names(type(module)))
            elif isinstance(module, SITE_MODULES) and not name.startswith(inside or ("\0",)):
                shape = tuple(module.weight.shape)
                op = "linear" if isinstance(module, nn.Linear) else f"conv{len(shape) - 2}d"
                kinds = _class_names(type(module))
                yield Site(name, op, 0, f"{name}.weight", weight_shape=shape, module_types=kinds)
            elif _is_turned_linear(module):
                yield Site(name, "linear", 0, f"{name}.weight", transposed=True, weight_shape=module.weight.t().shape)

    return SiteTable(renumber(walk()))


def _is_turned_linear(module: nn.Module) -> bool:
    """Whether this is a `Conv1D` of Hugging Face's transformers: a linear with a weight [in, out]."""
    kind, weight = type(module), getattr(module, "weight", None)
    ours = kind.__name__ == "Conv1D" and package_of(kind) == "transformers"
    return ours and isinstance(weight, torch.Tensor) and weight.dim() == 2


def _reached_from_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose value may depend on the batch; sizes do not count, since padding makes them public."""
    reached: set[fx.Node] = set()
    written: set[str] = set()  # parameters and buffers into which the batch was written
    for node in graph.nodes:
        given = node.op == "placeholder" and "state" not in node.meta
        dirty = node.op == "get_attr" and str(node.target) in written
        if given or dirty or (not _is_size(node) and any(source in reached for source in node.all_input_nodes)):
            reached.add(node)
            target = mutated_input(node)
            if target is not None:
                reached |= {target, root_of(target)}
                if root_of(target).op == "get_attr":
                    written.add(str(root_of(target).target))
    return reached


def _is_size(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel", "ndimension")
    if node.target is getattr:
        return len(node.args) > 1 and node.args[1] in ("shape", "dtype", "device", "ndim")
    return "sym_size" in str(node.target)


def _why_not(gm: fx.GraphModule, node: fx.Node, batch: set[fx.Node]) -> str | None:
    x, weight = node.args[:2]
    if not isinstance(x, fx.Node) or x not in batch:
        return "its input does not depend on the batch, so its gradient sums over samples before it could be quantized"
    if not isinstance(weight, fx.Node) or weight in batch:
        return "its weight depends on the batch, so one scale for the weight would mix samples"
    if isinstance(node.args[2], fx.Node) and node.args[2] in batch:
        return "its bias depends on the batch, so it is no parameter of the layer"
    if node.target in CONVS:
        for value in node.args[3:]:
            if not isinstance(value, int) and not (isinstance(value, tuple) and all(isinstance(v, int) for v in value)):
                return "stride, padding, dilation or groups are computed by the model or not symmetric"
    return None


def _describe(gm: fx.GraphModule, node: fx.Node, found: dict[str, Site]) -> Site:
    weight, transposed = stored_weight(node.args[1])
    parameter, value = _parameter(gm, weight)
    transposed = transposed and value is not None
    bias, _ = _parameter(gm, node.args[2])
    op = "linear" if node.target is F.linear else f"conv{CONVS.index(node.target) + 1}d"
    name = node.meta.get("site_hint") or _site_name(node, parameter, found)
    geometry = None
    if op != "linear" and all(isinstance(v, tuple | int) for v in node.args[3:]):
        stride, padding, dilation, groups = node.args[3:]
        geometry = ConvGeometry(stride, padding, dilation, groups)  # type: ignore[arg-type]
    known = found.get(name)
    if known is not None and (known.weight, known.transposed, known.op, known.geometry) != (
        *(parameter, transposed, op, geometry),
    ):
        name = f"{name}.{node.name}"  # one weight, used in two ways: two sites
    shape = None if value is None else tuple(value.t().shape if transposed else value.shape)
    return Site(
        name=name,
        op=op,
        index=0,
        weight=parameter,
        bias=bias,
        transposed=transposed,
        weight_shape=shape,
        geometry=geometry,
        source=node_source(node),
        module_types=_module_types(node),
    )


def _made_by(node: fx.Node) -> tuple[str, type | None]:
    """Path and class of the innermost module in which a node was made."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack or not isinstance(stack[-1], tuple):
        return "", None
    path, cls = stack[-1]
    return clean_path(str(path)), cls if isinstance(cls, type) else None


def _module_types(node: fx.Node) -> tuple[str, ...]:
    """The names of the classes, own and inherited, of the layer that made a node; none for a functional call."""
    _, cls = _made_by(node)
    if cls is None or not issubclass(cls, (*SITE_MODULES, nn.MultiheadAttention)):
        return ()
    return _class_names(cls)


def _class_names(cls: type) -> tuple[str, ...]:
    return tuple(c.__name__ for c in cls.__mro__ if issubclass(c, nn.Module) and c is not nn.Module)


def _parameter(gm: fx.GraphModule, node: Any) -> tuple[str | None, torch.Tensor | None]:
    """Name and value of the parameter or buffer that `node` reads directly; None if it computes with it."""
    if isinstance(node, fx.Node) and node.op == "placeholder" and "state" in node.meta:
        return node.meta["state"], node.meta.get("example_value")
    if isinstance(node, fx.Node) and node.op == "get_attr":
        owner, _, attribute = str(node.target).rpartition(".")
        value = getattr(gm.get_submodule(owner), attribute)
        name = None if owner == "_const" else str(node.target)  # a tensor that forward() made has no name
        return name, value if isinstance(value, torch.Tensor) else None
    return None, None


def _site_name(node: fx.Node, parameter: str | None, found: dict[str, Site]) -> str:
    path, cls = _made_by(node)
    if path and cls is not None and issubclass(cls, SITE_MODULES):
        return path  # the layer's own name, even if its weight is tied to another's, or computed
    if parameter is not None:
        return parameter.removesuffix(".weight")
    # Not the node's name: it counts over the whole graph, and so differs between train() and eval().
    scope, op = (
        f"{path}." if path else "",
        "linear" if node.target is F.linear else f"conv{CONVS.index(node.target) + 1}d",
    )
    taken = [name for name in found if name == f"{scope}{op}" or name.startswith(f"{scope}{op}_")]
    return f"{scope}{op}_{len(taken)}" if taken else f"{scope}{op}"


def _near_miss(gm: fx.GraphModule, node: fx.Node, batch: set[fx.Node]) -> Skipped | None:
    """What could be mistaken for a conv or linear: transposed convs, recurrent layers, products with a parameter."""
    name, reason = node.name, None
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        name = str(node.target)
        if isinstance(module, TRANSPOSED_MODULES):
            reason = "transposed convolution is not supported in low precision"
        elif any(isinstance(child, (*SITE_MODULES, nn.MultiheadAttention)) for child in module.modules()):
            inside = [n for n, child in module.named_modules() if isinstance(child, SITE_MODULES) and n]
            held = f"; inside it: {listing(inside, 12)}" if inside else ""
            why = "has hooks, which a compiled site would not call" if has_hooks(module) else "cannot be traced by fx"
            reason = f"{type(module).__name__} {why}, so it stays whole{held}"
        elif isinstance(module, _RECURRENT):
            reason = f"{type(module).__name__} keeps its products inside one operator; write it with nn.Linear"
    elif isinstance(node.target, torch._ops.HigherOrderOperator) and _holds_products(gm, node):
        reason = "its convs and linears run inside a region (torch.cond, or the like) that is kept whole"
    elif node.op == "call_function" and node.target in _TRANSPOSED:
        reason = "transposed convolution is not supported in low precision"
        name = (_parameter(gm, node.args[1])[0] or name).removesuffix(".weight")
    elif "grouped_mm" in op_name(node):
        reason = (
            "it sorts the tokens of all samples by expert, so samples cannot be told apart; private training needs "
            'model.set_experts_implementation("batched_mm")'
        )
    elif node.target is F.multi_head_attention_forward:
        reason = "attention with static keys or values is not expanded"
    elif op_name(node).removesuffix("_") in _PRODUCTS or node.target is operator.matmul:
        fixed = [s for s in node.all_input_nodes if s not in batch and _reads_parameter(s)]
        chosen = next((of for s in node.all_input_nodes if (of := _chosen_by(gm, s, batch))), None)
        if chosen is not None:
            name, reason = (
                chosen,
                "its weight is chosen by the batch, as the experts of a mixture are: it has no one scale",
            )
        if fixed and any(s in batch for s in node.all_input_nodes):
            reason = (
                f"this {op_name(node)} with a parameter is no product of the batch with one matrix; write it as "
                "F.linear or nn.Linear to quantize it"
            )
    return None if reason is None else Skipped(name, op_name(node), reason, node_source(node))


def _chosen_by(gm: fx.GraphModule, node: fx.Node, batch: set[fx.Node]) -> str | None:
    """The parameter of which a value is parts, if the batch says which; None for other values."""
    held = node.args[0] if node in batch and node.target is operator.getitem else None
    return None if held in batch else _parameter(gm, held)[0]


def _holds_products(gm: fx.GraphModule, node: fx.Node) -> bool:
    bodies = [
        gm.get_submodule(str(arg.target))
        for arg in node.all_input_nodes
        if arg.op == "get_attr" and _is_module(gm, arg)
    ]
    return any(
        inner.target in CONVS or inner.target is F.linear
        for body in bodies
        if isinstance(body, fx.GraphModule)
        for inner in body.graph.nodes
    )


def _is_module(gm: fx.GraphModule, node: fx.Node) -> bool:
    owner, _, name = str(node.target).rpartition(".")
    return name in gm.get_submodule(owner)._modules


def _reads_parameter(node: fx.Node) -> bool:
    return (
        node.op == "get_attr"
        or "state" in node.meta
        or any(_reads_parameter(source) for source in node.all_input_nodes)
    )
