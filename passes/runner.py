"""What all passes share: building graph modules over the user's own modules, and running a list of passes.

Passes transform; the runner checks. After each pass it lints the *output* graph, checks the invariants that
the pass promises, stamps new nodes with the pass that made them, and records the program before and after.
"""

import inspect
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx._pytree as fx_pytree
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from dpquant_compile.errors import GraphInvariantError

__all__ = [
    "Invariant",
    "Pass",
    "PassRecord",
    "PassResult",
    "bind_inputs",
    "clean_path",
    "copy_graph",
    "draws_random",
    "graph_module_over",
    "node_source",
    "op_name",
    "read_attribute",
    "run_passes",
    "user_frames",
]

# torch, and this folder under both its names.
_OTHER_CODE = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.path.realpath(__file__)) + os.sep,
)

_TAGGED = ("aten::", "prims::", "dpquant::")  # operators whose tags say whether they draw random numbers
_DRAWING = (
    *"dropout rand bernoulli normal_ uniform_ multinomial rrelu poisson binomial exponential_ cauchy_".split(),
    *"geometric_ gumbel gamma_ dirichlet stochastic_depth fractional_max_pool".split(),
)
_DRAWS = {"normal", "_standard_gamma"}  # `normalize` draws nothing

Pass = Callable[[fx.GraphModule], PassResult]
Invariant = Callable[[fx.GraphModule], None]


@dataclass(frozen=True)
class PassRecord:
    """One pass over one graph: where it came from, what it changed, and both programs to read."""

    name: str
    origin: str
    modified: bool
    seconds: float
    before: str
    after: str
    ops: dict[str, int]

    def __str__(self) -> str:
        changes = ", ".join(f"{op} {delta:+d}" for op, delta in sorted(self.ops.items())) or "no op count changed"
        head = f"# {self.origin} → {self.name} ({self.seconds * 1e3:.1f} ms): {changes}"
        if not self.modified:
            return f"{head}\n# graph unchanged"
        return f"{head}\n# before\n{self.before}\n# after\n{self.after}"


def graph_module_over(root: torch.nn.Module, graph: fx.Graph, name: str = "Graph") -> fx.GraphModule:
    """A GraphModule whose code runs over `root`'s own children, parameters and buffers.

    `fx.GraphModule` copies the leaves it needs, and a copy goes stale when `load_state_dict(assign=True)` or
    `.to()` replaces a tensor. Here the modules, and the dicts that hold the top-level tensors, are the user's.
    """
    gm = fx.GraphModule(torch.nn.Module(), fx.Graph(), class_name=name)
    gm.__dict__["_modules"] = dict(root._modules)
    gm.__dict__["_parameters"] = root._parameters
    gm.__dict__["_buffers"] = root._buffers
    gm.training = root.training
    gm.graph = graph
    return gm


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of `graph` that shares its signature; the copy that fx makes of a signature warns about itself."""
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
    # fx keeps one placeholder for *args and one for **kwargs, as the bound arguments do.
    bound = inspect.signature(gm.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return list(bound.arguments.values())


def clean_path(path: str) -> str:
    """A module's path as the user writes it, from the notation of fx or of Dynamo."""
    path = re.sub(r"^L\['[^']*'\]", "", path)  # Dynamo starts from the name that forward() gives to self
    for old, new in (("._modules['", "."), ("['", "."), ("']", ""), ("[", "."), ("]", "")):
        path = path.replace(old, new)
    return path.removeprefix(".")


def op_name(node: fx.Node) -> str:
    """A short name of what a node does, for counting and for printing."""
    if node.op == "call_module":
        owner = node.graph.owning_module
        target = owner.get_submodule(str(node.target)) if owner is not None else None
        return type(target).__name__
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", node.target))
    return str(node.target) if node.op == "call_method" else node.op


def read_attribute(root: Any, target: Any) -> Any:
    """The value behind a dotted name, as the target of a get_attr node gives it."""
    for atom in str(target).split("."):
        root = getattr(root, atom)
    return root


def draws_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    name, operator = op_name(node), getattr(node.target, "_schema", None)
    if operator is not None and not operator.name.startswith(_TAGGED):
        return True  # nothing says that an operator of others does not
    return name in _DRAWS or any(word in name for word in _DRAWING)


def run_passes(
    gm: fx.GraphModule,
    passes: Sequence[Pass],
    *,
    origin: str,
    log: MutableSequence[PassRecord],
    invariants: Iterable[Invariant] = (),
) -> fx.GraphModule:
    """Run `passes` in order, check each output graph, append one `PassRecord` per pass to `log`.

    With the environment variable DPQUANT_TRACE set to anything but "0", each record is printed to stderr.
    """
    invariants = tuple(invariants)
    for transform in passes:
        name = _pass_name(transform)
        before, counts = _source(gm), _op_counts(gm)
        seen = set(gm.graph.nodes)
        start = time.perf_counter()
        result = transform(gm)
        seconds = time.perf_counter() - start
        gm = result.graph_module
        if result.modified:
            for node in gm.graph.nodes:
                if node not in seen:
                    node.meta.setdefault("origin", name)
            gm.recompile()
        elif _source(gm) != before:
            raise GraphInvariantError(f"pass {name} changed the graph but reported modified=False")
        try:
            gm.graph.lint()
        except RuntimeError as error:
            raise GraphInvariantError(f"pass {name} left a graph that is not well formed: {error}") from error
        for invariant in invariants:
            invariant(gm)
        after = _op_counts(gm)
        delta = {op: after[op] - counts[op] for op in {*after, *counts} if after[op] != counts[op]}
        record = PassRecord(name, origin, result.modified, seconds, before, _source(gm), delta)
        log.append(record)
        if os.environ.get("DPQUANT_TRACE", "0") != "0":
            print(record, file=sys.stderr)
        origin = name
    return gm


def _source(gm: fx.GraphModule) -> str:
    # Not gm.code, which lags behind the graph until recompile().
    return str(gm.graph.python_code("self").src)


def _pass_name(transform: Any) -> str:
    while hasattr(transform, "func"):
        transform = transform.func
    return str(transform.__name__)


def _op_counts(gm: fx.GraphModule) -> Counter[str]:
    return Counter(op_name(node) for node in gm.graph.nodes)
