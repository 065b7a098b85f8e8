"""Programs: captured graphs with their switches, one per mode and kind of input, and what runs them."""

import inspect
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from dpquant_compile import pipeline
from dpquant_compile.backends.graph_compile import AotGraph, Recorder, lower
from dpquant_compile.errors import CaptureError, NotCapturedError
from dpquant_compile.held_values import held_values
from dpquant_compile.link_table import LinkTable
from dpquant_compile.passes.batch.track_batch import batch_size, memory_order, without_hooks
from dpquant_compile.passes.canonical.mark_sites import collect_sites, declared_sites
from dpquant_compile.passes.capture import capture_dynamo, capture_fx
from dpquant_compile.passes.fx_utils import bind_inputs
from dpquant_compile.passes.generation_cache import may_cache, without_cache
from dpquant_compile.passes.precision.insert_switches import axes_of
from dpquant_compile.passes.runner import PassRecord
from dpquant_compile.passes.snapshot import Snapshot, Writes
from dpquant_compile.sites import SiteTable
from dpquant_compile.spec import CompileSpec

__all__ = ["Program", "Programs", "is_default", "mark_batch_dynamic", "site_axes"]

Link = Callable[[SiteTable], tuple[LinkTable, dict[str, int]]]


@dataclass(frozen=True)
class Program:
    """One graph that is ready to run.

    base         canonical graph with shapes and batch axes; variants and private programs are made from it
    switch       makes `switched`: the same with a switch at each site
    compile      makes `call`: what runs `switched`, compiled as the spec says
    rows         row of each site's name in the link table
    bound        why it holds only for the batch size of its capture; None if it holds for all
    example      arguments of the first call, without their data
    traced_from  the trace it was made from; programs of one trace may be shared between shapes
    attributes   `held_values` at capture: constants of the graph
    """

    base: fx.GraphModule
    switch: Callable[[], fx.GraphModule]
    compile: Callable[[fx.GraphModule], Callable[..., Any]]
    rows: dict[str, int]
    bound: str | None
    example: tuple[Any, Any]
    traced_from: Any
    attributes: Mapping[str, Any]

    @property
    def any_batch(self) -> bool:
        """Whether the graph holds for all batch sizes."""
        return self.bound is None

    @cached_property
    def switched(self) -> fx.GraphModule:
        """The program for all policies. Made on first use: private training does not run it."""
        return self.switch()

    @cached_property
    def call(self) -> Callable[..., Any]:
        """What runs `switched`."""
        return self.compile(self.switched)


class Programs:
    """Captures a model lazily: one program per (modes of its modules, kind of input).

    `link` takes the sites that a graph has, and returns the link table to read and the row of each site.
    """

    def __init__(self, original: nn.Module, spec: CompileSpec, link: Link) -> None:
        self.original = original
        self.spec = spec
        self.log: deque[PassRecord] = deque(maxlen=256)
        self.recorder = Recorder()
        self._link = link
        self._signature = inspect.signature(original.forward)
        self._programs: dict[tuple[Hashable, ...], Program] = {}
        self._traced: dict[Hashable, fx.GraphModule | CaptureError] = {}
        self._traced_with: dict[Hashable, Mapping[str, Any]] = {}
        self._latest: dict[Hashable, Program] = {}
        self.last_trained: Program | None = None
        # What a privacy engine has compiled from these programs; the next `make_private` of the same model reuses it.
        self.private: dict[Hashable, Any] = {}
        self.was_provisional = self.provisional

    @property
    def graphs(self) -> tuple[AotGraph, ...]:
        """The forward and backward graphs compiled so far."""
        return tuple(self.recorder.graphs)

    @property
    def provisional(self) -> bool:
        """Whether the sites are only those that the modules declare, until Dynamo has captured the model."""
        return not self.captured and isinstance(self._trace(), CaptureError)

    def known_sites(self) -> SiteTable:
        """The sites as far as they are known: from the last graph, a trace, or the modules alone."""
        gm = self.latest.base if self.latest is not None else self._trace()
        return declared_sites(self.original) if isinstance(gm, CaptureError) else collect_sites(gm)

    def readable(self) -> fx.GraphModule:
        """The canonical graph, for reading and specialising."""
        if self.latest is not None:
            return self.latest.base
        gm = self._trace()
        if isinstance(gm, CaptureError):
            raise NotCapturedError(
                f"the graph of this model is not known yet. {gm}, so Dynamo captures it at the first forward. Fix: "
                "call the model on one batch, or pass example_inputs= to compile()"
            )
        return gm

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def get(self, args: Sequence[Any], kwargs: Mapping[str, Any], batch: int) -> Program:
        """The program for this call, captured and prepared if it is the first of its kind."""
        mode, frozen = self.setting()
        kind = (mode, frozen, _signature(args, kwargs, batch))
        program = self._programs.get(kind) or self._programs.get((*kind, batch))
        if program is None:
            program = self._prepare(kind[:2], args, kwargs)
            self._programs[kind if program.any_batch else (*kind, batch)] = program
        self._latest[mode] = program
        if self.original.training:
            self.last_trained = program
        return program

    def may_cache(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call may return a cache for generation, which no graph can hold."""
        try:
            arguments: Mapping[str, Any] = self._signature.bind(*args, **kwargs).arguments
        except TypeError:
            arguments = kwargs
        return may_cache(self.original, arguments)

    def setting(self) -> tuple[Hashable, Hashable]:
        """Modes and adapters of all modules, and which parameters are frozen: each combination has its own programs."""
        # Dynamo guards on the pattern of frozen parameters, and gives up after a few recompilations.
        return self._mode(), hash(tuple(parameter.requires_grad for parameter in self.original.parameters()))

    @property
    def latest(self) -> Program | None:
        """The last program that ran in the current mode."""
        return self._latest.get(self._mode())

    @property
    def captured(self) -> bool:
        """Whether any program has been made."""
        return bool(self._programs)

    def _mode(self) -> tuple[Hashable, ...]:
        # Per module, since a frozen BatchNorm is in eval() while the rest trains; with its id, since a layer may be
        # replaced. Programs keep their modules alive, so no id is reused.
        return tuple((id(module), module.training, _adapters(module)) for module in self.original.modules())

    def clear(self) -> None:
        """Discard all graphs; the next forward captures the model again."""
        self._programs.clear()
        self._traced.clear()
        self._traced_with.clear()
        self._latest.clear()
        self.private.clear()
        self.last_trained = None

    def normalise(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call without optional arguments that equal their defaults."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            return tuple(args), dict(kwargs)  # the model's own forward raises the error
        given, parameters = dict(bound.arguments), self._signature.parameters
        for name in reversed(list(given)):
            p = parameters[name]
            if p.default is p.empty or not is_default(given[name], p.default):
                break
            del bound.arguments[name]
        defaults = {name: p.default for name, p in parameters.items()}
        extra = {n: v for n, v in bound.kwargs.items() if not is_default(v, defaults.get(n, _NONE))}
        return bound.args, extra

    def _trace(self, given: tuple[str, ...] = ()) -> fx.GraphModule | CaptureError:
        kind = (self._mode(), given)
        if kind not in self._traced:
            gm = capture_fx(self.original, given)
            self._traced_with[kind] = held_values(self.original)
            self._traced[kind] = gm if isinstance(gm, CaptureError) else pipeline.canonical(gm, self.log)
        return self._traced[kind]

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        """The optional arguments that a call gives."""
        try:
            bound = self._signature.bind(*args, **kwargs).arguments
        except TypeError:
            return ()
        return tuple(n for n in bound if self._signature.parameters[n].default is not inspect.Parameter.empty)

    def _prepare(self, kind: tuple[Hashable, ...], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Program:
        # In eval() torch's fast path runs an encoder layer as one operator, which has no sites.
        quick = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return self._prepared(kind, args, kwargs)
        finally:
            torch.backends.mha.set_fastpath_enabled(quick)

    def _prepared(self, kind: tuple[Hashable, ...], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Program:
        given = self._given(args, kwargs)
        gm, traced = self._trace(given), False
        bound: str | None = None
        attributes = self._traced_with[self._mode(), given]
        if not isinstance(gm, CaptureError):
            wrong = _disagreement(self.original, gm, args, kwargs)
            traced = wrong is None
            gm = gm if wrong is None else CaptureError(wrong)
        source = gm
        if isinstance(gm, CaptureError):
            attributes = held_values(self.original)
            call = _at_least_two((args, kwargs), batch_size(args, kwargs))
            captured, guards = capture_dynamo(self.original, *call)
            bound = guards.bound or self._wrong_elsewhere(captured, call, guards.doubtful)
            gm = pipeline.canonical(captured, self.log)
        try:
            gm = pipeline.tracked(gm, args, kwargs, bound is None, self.log)
        except CaptureError as error:
            if bound is not None:
                raise
            bound = str(error)  # the model contains its batch size as a number
            gm = pipeline.tracked(gm, args, kwargs, False, self.log)
        for key, program in self._programs.items() if traced and bound is None else ():
            alike = _axes(program.base) == _axes(gm) and _rows(program.base) == _rows(gm)
            if key[:2] == kind and program.traced_from is source and alike:
                return program  # the same program serves this shape as well
        table, rows = self._link(collect_sites(gm))
        switch = partial(pipeline.rewritten, gm, table, rows, str(self.spec.recipe), self.log)
        example = tree_map(_without_data, (tuple(args), dict(kwargs)))
        return Program(gm, switch, self.compile, rows, bound, example, source, attributes)

    def _wrong_elsewhere(self, gm: fx.GraphModule, call: tuple[Any, Any], sizes: Sequence[int]) -> str | None:
        """Why a graph does not, or may not, represent the model on batches of other sizes.

        The rows of the call are repeated: at each size some operator decides otherwise than in the capture. A size that
        is too large to try, and that batches may have, counts as one where the graph is wrong.
        """
        for size in sizes:
            if size > _LARGEST:
                continue
            if size > _TRIED:
                return f"forward() may do something else on a batch of {size}, which is too large to try"
            args, kwargs = _resized(call, size)
            if (wrong := _disagreement(self.original, gm, args, kwargs)) is not None:
                return f"{wrong}, with a batch of {size}"
        return None

    def compile(self, gm: fx.GraphModule) -> Callable[..., Any]:
        """What runs `gm`: the graph itself, or torch.compile of it by way of AOTAutograd."""
        if self.spec.inner == "eager":
            return gm
        compiled: Callable[..., Any] = torch.compile(gm, backend=lower(self.spec.inner, self.recorder), fullgraph=True)
        return compiled


def _adapters(module: nn.Module) -> Hashable:
    """What a layer of peft adds to its base layer, by which its forward() branches; None for other modules."""
    if not hasattr(type(module), "merged_adapters"):
        return None
    layer: Any = module
    scaling = getattr(layer, "scaling", None)
    scales = tuple(scaling.items()) if isinstance(scaling, Mapping) else ()
    return tuple(layer.merged_adapters), tuple(layer.active_adapters), bool(layer.disable_adapters), scales


_NONE = object()
_TRIED = 64  # the largest batch on which a capture is compared with the model
_LARGEST = 2048  # no micro-batch is larger than this; operators decide there by what an index holds


def is_default(value: Any, default: Any) -> bool:
    """Whether an argument is its default: the same object, or an equal plain value of the same type."""
    return value is default or (
        type(value) is type(default) and isinstance(value, bool | int | float | str) and value == default
    )


def _disagreement(model: nn.Module, gm: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why a trace does not represent the model on this call; None if both give the same result.

    A trace takes each branch once. A branch that depends on more than the modules' modes (an isinstance, a random
    number, an argument that was not given) shows here, and then Dynamo captures the model instead. All state is
    restored.
    """
    try:
        bind_inputs(gm, args, kwargs)
    except TypeError:
        return "the call gives arguments that the trace does not take"
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    results: list[list[Any]] = []
    with torch.no_grad(), without_hooks(model), without_cache(model):
        before = Snapshot(model)
        for run in (model.forward, gm.forward):
            writes = Writes()
            with torch.random.fork_rng(devices=[]), writes:
                try:
                    copied, named = tree_map(_cloned, (tuple(args), dict(kwargs)))  # a model may write into its inputs
                    results.append(tree_leaves(run(*copied, **named)))
                except Exception as error:  # of the model or of the trace
                    results.append([type(error)])
            writes.undo()  # a tensor outside of the model must not keep values of this batch
            for buffer, value in kept:
                buffer.copy_(value)
            drew = before.restore().drew
            if drew is not None:
                return f"forward() draws from {drew}, which a trace would do only once"
    if not isinstance(results[0][0] if results[0] else None, Tensor):
        return None  # the model itself fails on this call, or returns no tensor: users should see its own error
    same = len(results[0]) == len(results[1]) and all(map(_equal, *results))
    return None if same else "the trace computes something else than the model on this call"


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b)
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def mark_batch_dynamic(args: Sequence[Any], kwargs: Mapping[str, Any], batch: int) -> None:
    """Tell Dynamo that dimension 0 varies, so that another size of Poisson batch needs no compilation."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch:
            torch._dynamo.maybe_mark_dynamic(leaf, 0)


def _at_least_two(call: tuple[Any, Any], batch: int) -> tuple[Any, Any]:
    """The call with a batch that Dynamo does not treat as a constant; only shapes matter."""
    return call if batch >= 2 else _resized(call, 2)


def _resized(call: tuple[Any, Any], size: int) -> tuple[Any, Any]:
    """The call with another number of samples: its rows again and again, or zeros if it has none."""
    batch = batch_size(*call)

    def resized(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != batch:
            return value
        rows = torch.arange(size, device=value.device) % max(batch, 1)
        return value.detach()[rows] if batch else value.new_zeros((size, *value.shape[1:]))

    changed: tuple[Any, Any] = tree_map(resized, call)
    return changed


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _without_data(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


def _signature(args: Sequence[Any], kwargs: Mapping[str, Any], batch: int) -> Hashable:
    leaves, spec = tree_flatten((tuple(args), dict(kwargs)))

    def describe() -> Iterator[Hashable]:
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                batched = leaf.dim() > 0 and leaf.shape[0] == batch
                # With the order of dimensions in memory, since views that hold for one may fail for another.
                order = () if leaf.is_contiguous() else memory_order(leaf)
                yield (leaf.dtype, leaf.device.type, batched, tuple(leaf.shape[1:] if batched else leaf.shape), order)
            else:
                # With its type, since 1, 1.0 and True are equal and may take different branches.
                yield (type(leaf), leaf if isinstance(leaf, Hashable) else repr(leaf))

    return (spec, tuple(describe()))


def _rows(gm: fx.GraphModule) -> list[Any]:
    """For each argument, which of its leaves have a row per sample."""
    return [node.meta["batch_leaves"] for node in gm.graph.nodes if node.op == "placeholder"]


def _axes(gm: fx.GraphModule) -> list[Any]:
    """The position of the samples in every tensor; where rows are flattened, it depends on their sizes."""
    return [node.meta.get("batch_axis") for node in gm.graph.nodes]


def site_axes(gm: fx.GraphModule) -> tuple[Any, ...]:
    """The position of the samples at every site of a graph."""
    return tuple((node.name, axes_of(node)) for node in gm.graph.nodes if "site" in node.meta)
