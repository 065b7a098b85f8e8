"""`torch.compile(model, backend="dpquant", options={"budget": …})`: the same rewrite, inside Dynamo.

Dynamo finds this function by the entry point group `torch_dynamo_backends`; users need not import this package.
"""

import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dpquant_compile import pipeline
from dpquant_compile.backends.graph_compile import AotGraph, Recorder, lower
from dpquant_compile.errors import CaptureError, CompileSpecError, listing
from dpquant_compile.explain import Explanation, explain, kernels_of
from dpquant_compile.link_table import Dispatcher
from dpquant_compile.passes.batch.track_batch import hint, symbolic_batch
from dpquant_compile.passes.canonical.mark_sites import collect_sites
from dpquant_compile.passes.fx_utils import graph_module_over, node_source
from dpquant_compile.passes.runner import PassRecord
from dpquant_compile.policy import Policy, draw_policy, resolve_budget
from dpquant_compile.sites import SiteTable, select_sites
from dpquant_compile.spec import CompileSpec

__all__ = ["CompiledHandle", "dpquant", "sessions"]

_OPTIONS = (
    "budget",
    "format",
    "backend",
    "sites",
    "quantize_outputs",
    "recipe",
    "high",
    "seed",
    "quantize_eval",
    "inner",
)
_STATE = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
_LIVE: "weakref.WeakValueDictionary[int, CompiledHandle]" = weakref.WeakValueDictionary()


class CompiledHandle:
    """Sites and policy of one model, or of one part of it between graph breaks, under one `torch.compile` call.

    When Dynamo compiles the same sites again, for another batch size or mode, the new program joins the handle and
    shares its policy and step. Dynamo runs one program for several models of one class that are compiled with the same
    options, so they share a handle too: give each its own `options` dict to separate them.
    """

    def __init__(self, options: Any, spec: CompileSpec, sites: SiteTable, device: torch.device) -> None:
        names = sites.names
        self.options = options
        self.spec = spec
        self.sites = sites
        self.device = device
        self.log: list[PassRecord] = []
        self.recorder = Recorder()
        first = draw_policy(resolve_budget(spec.budget, names), names, spec.seed)
        self.dispatcher = Dispatcher(names, spec.seed, first, spec.recipe.other)
        self.graphs: list[fx.GraphModule] = []
        self.dtypes: dict[str, torch.dtype] = {}

    @property
    def policy(self) -> Policy:
        return self.dispatcher.policy

    def set_policy(self, policy: "str | Iterable[str]") -> Policy:
        """Choose the sites to run in low precision from the next call on."""
        return self.dispatcher.set_policy(policy)

    @property
    def compiled_graphs(self) -> tuple[AotGraph, ...]:
        return tuple(self.recorder.graphs)

    def explain(self) -> Explanation:
        latest = self.graphs[-1] if self.graphs else None
        kernel_for = kernels_of(self.spec, self.device, self.dtypes, latest)
        return explain(self.sites, self.policy, self.spec, self.device, True, kernel_for, self.dtypes)


def sessions() -> tuple[CompiledHandle, ...]:
    """A handle of each model that the torch.compile backend has compiled and that is still alive, oldest first."""
    return tuple(_LIVE[number] for number in sorted(_LIVE.keys()))


def _handle(options: Any, spec: CompileSpec, sites: SiteTable, device: torch.device) -> CompiledHandle:
    for handle in sessions():
        if handle.options is options and handle.sites.names == sites.names:
            return handle
    handle = CompiledHandle(options, spec, sites, device)
    _LIVE[max(_LIVE.keys(), default=0) + 1] = handle
    return handle


def dpquant(gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Any = None, **_: Any) -> Callable[..., Any]:
    """A Dynamo backend that makes each conv and linear of the graph a switchable site.

    `options` are the arguments of `dpquant_compile.compile`; `budget` is required. With gradients enabled the sites of
    the policy run in low precision; under `torch.no_grad()` all run in full precision, unless `quantize_eval` is set.
    A graph without convs and linears is compiled unchanged.
    """
    spec, chosen = _read(options)
    log: list[PassRecord] = []
    graph = _prepare(gm)
    graph, batch = _tracked(pipeline.canonical(graph, log), example_inputs, log)
    found = collect_sites(graph)
    if not found:
        for skip in found.skipped:
            warnings.warn(f"dpquant: {skip.name} ({skip.op}) stays in full precision: {skip.reason}", stacklevel=2)
        return lower(spec.inner, Recorder())(gm, example_inputs) if spec.inner != "eager" else gm.forward
    device = next((value.device for value in example_inputs if isinstance(value, Tensor)), torch.device("cpu"))
    handle = _handle(options, spec, select_sites(found, chosen), device)
    handle.log += log
    table = handle.dispatcher.table
    _add_inputs(graph)
    switched = pipeline.rewritten(graph, table, handle.dispatcher.rows, str(spec.recipe), log)
    handle.graphs.append(switched)
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    handle.dtypes |= {
        node.meta["state"]: value.dtype
        for node, value in zip(nodes, example_inputs, strict=True)
        if "state" in node.meta and isinstance(value, Tensor)
    }
    carriers = [i for i, node in enumerate(nodes) if "state" not in node.meta and _size(example_inputs[i]) == batch]
    weights = [i for i, value in enumerate(example_inputs) if isinstance(value, torch.nn.Parameter)]

    def begin(args: Sequence[Any]) -> tuple[Any, ...]:
        batch = hint(args[carriers[0]].shape[0])
        low = torch.is_grad_enabled() or spec.quantize_eval
        parameters = [args[i] for i in weights] if torch.is_grad_enabled() else None
        handle.dispatcher.begin(batch=batch, device=device, low=low, parameters=parameters)
        return (*args, table.policy, table.keys, table.samples)

    if spec.inner == "eager":
        return lambda *args: switched(*begin(args))
    compiled = lower(spec.inner, handle.recorder)(switched, [*example_inputs, *begin(example_inputs)[-3:]])
    return lambda *args: compiled(*begin(args))


def _read(options: Any) -> tuple[CompileSpec, Any]:
    given = dict(options or {})
    unknown = [key for key in given if key not in _OPTIONS]
    if unknown or "budget" not in given:
        wrong = f"unknown options {listing(unknown)}" if unknown else "the option 'budget' is missing"
        raise CompileSpecError(
            f"torch.compile(backend='dpquant'): {wrong}. Give options={{'budget': 0.75}}; "
            f"options are {listing(_OPTIONS)}"
        )
    chosen = given.pop("sites", None)
    return CompileSpec.build(**given), chosen


def _tracked(graph: fx.GraphModule, inputs: Sequence[Any], log: list[PassRecord]) -> tuple[fx.GraphModule, int]:
    """The graph after `track_batch`, and the size of its batch.

    Dynamo orders inputs by their first use, so the batch need not come first. Of the sizes of dimension 0 of the
    inputs, the batch is the one under which most sites can separate their samples.
    """
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    given = [value for node, value in zip(nodes, inputs, strict=True) if "state" not in node.meta]
    sizes = list(dict.fromkeys(size for size in map(_size, given) if size is not None))
    best: tuple[fx.GraphModule, int] | None = None
    failure: CaptureError | None = None
    for size in sizes:
        carriers = [node for node, value in zip(nodes, inputs, strict=True) if _size(value) == size]
        symbolic = all(symbolic_batch(node) is not None for node in carriers if "state" not in node.meta)
        try:
            tried = pipeline.tracked(graph, inputs, {}, symbolic, log, batch=size)
        except CaptureError as error:
            failure = failure or error
            continue
        if best is None or len(collect_sites(tried)) > len(collect_sites(best[0])):
            best = (tried, size)
    if best is None:
        if len(collect_sites(graph)) and failure is not None:
            raise failure
        return graph, 0
    # The batch may vary; other symbolic sizes are fixed, since a fold of the batch may depend on them.
    free = {symbolic_batch(node) for node, value in zip(nodes, inputs, strict=True) if _size(value) == best[1]}
    for value in inputs:
        if isinstance(value, torch.SymInt) and value.node.expr not in free:
            int(value)
    return best


def _size(value: Any) -> int | None:
    return hint(value.shape[0]) if isinstance(value, Tensor) and value.dim() > 0 else None


def _prepare(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph as a separate module, with names of parameters and buffers on the inputs that carry them."""
    graph = graph_module_over(gm, gm.graph, "Graph")
    for node in graph.graph.nodes:
        node.meta["origin"] = "dynamo"
        node.meta["source"] = node_source(node)
    sources = {node: _source(node) for node in graph.graph.nodes if node.op == "placeholder"}
    owners = {source.split("._")[0] for source in sources.values() if _STATE.search(source)}
    for node, source in sources.items():
        names = _STATE.findall(source)
        # Also plain attributes of the module that holds the parameters: they are constants, not part of the batch.
        attribute = next((source.removeprefix(f"{owner}.") for owner in owners if source.startswith(f"{owner}.")), None)
        if names or attribute:
            node.meta["state"] = ".".join(names) or attribute
    return graph


def _source(node: fx.Node) -> str:
    source = getattr(node.meta.get("grapharg"), "source", None)
    return str(getattr(source, "name", "") or "")


def _add_inputs(graph: fx.GraphModule) -> None:
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    for name in ("samples", "keys", "policy"):
        with graph.graph.inserting_after(last):
            graph.graph.placeholder(f"dpq_{name}")
    graph.recompile()
