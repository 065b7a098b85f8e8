"""Uses: the places where parameters meet the batch, whose per-sample gradients clipping needs.

A node of the graph either has rows, one or more per sample, or it is constant: computed from parameters and buffers
alone. A *use* is a node with rows that takes a constant made of trainable parameters. Autograd computes gradients back
to the output of a use. At the use the gradient is split by sample. From the constant back to its parameters it is a
linear map, the same for all samples.
"""

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from dpquant_compile.errors import PerSampleGradientError
from dpquant_compile.passes.canonical.canonicalize import CONVS
from dpquant_compile.passes.canonical.functionalize import mutated_input
from dpquant_compile.passes.canonical.rewrite_products import stored_weight
from dpquant_compile.passes.fx_utils import node_source, op_name, read_attribute
from dpquant_compile.sites import BatchAxis

__all__ = ["Use", "Uses", "axis_of", "find_uses", "named_arguments", "refuse_whole_modules"]

# Methods and functions that only select or move elements; a gradient keeps its norm on the way back through them.
_VIEWS = (
    "view reshape transpose permute t getitem slice narrow select chunk split split_with_sizes unbind flatten "
    "unflatten squeeze unsqueeze contiguous movedim swapaxes swapdims tensor_split view_as reshape_as"
).split()

_DETACHED = ("detach", "detach_")
_COPIES = ("to", "contiguous", "clone")


@dataclass(frozen=True)
class Use:
    """One node that takes a constant.

    node      the node with rows
    constant  the node that gives the constant
    slots     names of the arguments that receive the constant
    params    trainable parameters from which the constant is made
    whole     whether the constant is a parameter, the transpose of one, or rows of one that are looked up
    turned    whether it is the transpose
    indices   the node that says which rows, the same for all samples, as for positions; None if it is no look-up
    """

    node: fx.Node
    constant: fx.Node
    slots: tuple[str, ...]
    params: tuple[str, ...]
    whole: bool
    turned: bool
    indices: fx.Node | None

    def __str__(self) -> str:
        return f"{op_name(self.node)} ({node_source(self.node) or self.node.name})"


@dataclass(frozen=True)
class Uses:
    """All uses of a graph's trainable parameters.

    names       the canonical name of each parameter's get_attr target; tied weights share one
    made_of     the parameters to which each constant passes a gradient; none where no gradient flows
    separate    parameters whose uses read disjoint elements, so that their squared norms add up
    """

    uses: tuple[Use, ...]
    names: Mapping[str, str]
    made_of: Mapping[fx.Node, tuple[str, ...]]
    separate: frozenset[str]

    def of(self, name: str) -> list[Use]:
        return [use for use in self.uses if name in use.params]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The trainable parameters that the graph uses, in the model's order."""
        used = {name for use in self.uses for name in use.params}
        return tuple(name for name in dict.fromkeys(self.names.values()) if name in used)


def axis_of(node: fx.Node) -> BatchAxis | None:
    """Position of the rows of a node; None for a constant."""
    axis: BatchAxis | None = node.meta.get("batch_axis") or node.meta.get("expanded_batch")
    return axis


def find_uses(gm: fx.GraphModule, trainable: Mapping[int, str]) -> Uses:
    """The uses of trainable parameters, given by id and name.

    Requires: `verify_isolation` has passed the graph. Raises `PerSampleGradientError`, naming the parameter, where a
    gradient cannot be split by sample.
    """
    names = _canonical_names(gm, trainable)
    made_of: dict[fx.Node, tuple[str, ...]] = {}
    uses: list[Use] = []
    reached = _reached(gm)
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            made_of[node] = (names[str(node.target)],) if str(node.target) in names else ()
            continue
        constants = [source for source in node.all_input_nodes if made_of.get(source)]
        if node.op == "output":
            _refuse_output(constants, made_of)
            continue
        if mutated_input(node) is not None and constants:
            raise PerSampleGradientError(
                f"parameter {made_of[constants[0]][0]!r} is written in forward ({node_source(node) or node.name}); a "
                "private gradient needs parameters that only the optimizer changes"
            )
        if node not in reached or op_name(node) in _DETACHED:
            made_of[node] = ()
            continue
        if axis_of(node) is None:
            made_of[node] = tuple(dict.fromkeys(name for source in constants for name in made_of[source]))
            continue
        for source in constants:
            uses.append(_use(node, source, made_of[source]))
    by_name = {name: [use for use in uses if name in use.params] for name in set(names.values())}
    separate = frozenset(name for name, own in by_name.items() if _apart(gm, own, name))
    return Uses(tuple(uses), names, made_of, separate)


def _reached(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes to which outputs and writes may pass gradients: a model may detach a part of what it computes."""
    stack = [node for node in gm.graph.nodes if node.op == "output" or mutated_input(node) is not None]
    found: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(() if op_name(node) in _DETACHED else node.all_input_nodes)
    return found


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by the names of its signature, defaults filled in; by position where it has none."""
    if node.target in CONVS or node.target is F.linear:  # builtins without a signature; `canonicalize` has ordered them
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        return dict(zip(names, node.args, strict=False))
    if node.op == "call_function" and node.target is not operator.getitem:
        try:
            bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
            bound.apply_defaults()
            return dict(bound.arguments)
        except (TypeError, ValueError):
            pass
    return {**{str(i): arg for i, arg in enumerate(node.args)}, **node.kwargs}


def _use(node: fx.Node, source: fx.Node, params: tuple[str, ...]) -> Use:
    arguments = named_arguments(node)
    slots = tuple(name for name, value in arguments.items() if value is source)
    held, turned = stored_weight(source)
    looked_up = source
    while looked_up.op == "call_method" and looked_up.target in _COPIES and len(looked_up.all_input_nodes) == 1:
        looked_up = looked_up.all_input_nodes[0]
    indices = None if slots == ("weight",) else _fixed_indices(looked_up)
    if indices is not None:
        held = named_arguments(looked_up)["weight"]
    return Use(node, source, slots, params, held.op == "get_attr", turned, indices)


def _fixed_indices(constant: fx.Node) -> fx.Node | None:
    """The indices of a constant that is a plain look-up of rows of a parameter."""
    if constant.target is not F.embedding:
        return None
    given = named_arguments(constant)
    plain = not any(given[name] for name in ("max_norm", "scale_grad_by_freq")) and given["padding_idx"] is None
    indices, table = given["input"], given["weight"]
    fixed = isinstance(indices, fx.Node) and isinstance(table, fx.Node) and table.op == "get_attr"
    return indices if plain and fixed else None


def _canonical_names(gm: fx.GraphModule, trainable: Mapping[int, str]) -> dict[str, str]:
    targets = dict.fromkeys(str(node.target) for node in gm.graph.nodes if node.op == "get_attr")
    values = ((target, read_attribute(gm, target)) for target in targets)
    return {target: trainable[id(value)] for target, value in values if id(value) in trainable}


def _selection(gm: fx.GraphModule, use: Use) -> Tensor | None:
    """The indices of the elements that a chain of views selects, found by sending indices through it; else None."""
    node, chain = use.constant, list[fx.Node]()
    while node.op != "get_attr":
        name = op_name(node).removesuffix("_copy")
        sources = [source for source in node.all_input_nodes if axis_of(source) is None]
        if len(use.params) != 1 or name not in _VIEWS or len(node.all_input_nodes) != 1 or len(sources) != 1:
            return None
        chain.append(node)
        node = sources[0]
    parameter: Tensor = read_attribute(gm, str(node.target))
    numbers: Any = torch.arange(parameter.numel()).reshape(parameter.shape)
    for step in reversed(chain):
        args, kwargs = fx.map_arg((step.args, step.kwargs), partial(_constant, numbers))
        function: Callable[..., Any] = (
            getattr(args[0], str(step.target)) if step.op == "call_method" else step.target  # type: ignore[assignment]
        )
        numbers = function(*(args[1:] if step.op == "call_method" else args), **kwargs)
    return numbers.flatten() if isinstance(numbers, Tensor) else None


def _constant(value: Any, node: fx.Node) -> Any:
    return value


def _apart(gm: fx.GraphModule, uses: Sequence[Use], name: str) -> bool:
    """Whether no element of a parameter is used twice."""
    if any(use.params != (name,) or len(use.slots) != 1 for use in uses):
        return False
    if any(use.whole for use in uses):
        return len(uses) == 1
    chosen = [part for use in uses if (part := _selection(gm, use)) is not None]
    if len(chosen) < len(uses):
        return False
    numbers = torch.cat([torch.zeros(0, dtype=torch.int64), *chosen])
    return len(numbers.unique()) == len(numbers)


def refuse_whole_modules(gm: fx.GraphModule, trainable: Mapping[int, str]) -> None:
    """Raise for modules that are called as a whole: the graph does not show their inside."""
    for node in gm.graph.nodes:
        if node.op == "call_module":
            _refuse_module(gm, node, trainable)


def _refuse_module(gm: fx.GraphModule, node: fx.Node, trainable: Mapping[int, str]) -> None:
    module = gm.get_submodule(str(node.target))
    held = next((trainable[id(p)] for p in module.parameters() if id(p) in trainable), None)
    if held is not None:
        raise PerSampleGradientError(
            f"parameter {held!r} is used inside {type(module).__name__} {node.target!r}, which stays whole (it has "
            "hooks, or its products lie inside one operator), so its gradient cannot be taken apart by sample. Fix: "
            "remove the hooks, write the layer with nn.Linear and functions of torch, or freeze the parameter by "
            "requires_grad_(False)"
        )
    if next(module.buffers(), None) is not None or next(module.parameters(), None) is not None:
        raise PerSampleGradientError(
            f"module {node.target!r} ({type(module).__name__}) stays whole and holds tensors: private training needs a "
            "graph of operators. Fix: remove its hooks, or write it with functions of torch"
        )


def _refuse_output(constants: Sequence[fx.Node], made_of: Mapping[fx.Node, tuple[str, ...]]) -> None:
    if constants:
        raise PerSampleGradientError(
            f"the model returns {constants[0].name!r}, which is made of parameter {made_of[constants[0]][0]!r} alone: "
            "a loss on it has no per-sample gradient. Fix: return only what depends on the batch"
        )
