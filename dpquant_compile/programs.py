"""Programs: captured graphs with their switches in, one per mode and kind of input, and what runs them."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from dpquant_compile import pipeline
from dpquant_compile.backends.aot import AotGraph, Recorder, lower
from dpquant_compile.dispatch import LinkTable
from dpquant_compile.errors import CaptureError, NotCapturedError
from dpquant_compile.passes.capture import capture_dynamo, capture_fx
from dpquant_compile.passes.infra import PassRecord
from dpquant_compile.passes.insert_switches import axes_of
from dpquant_compile.passes.mark_sites import collect_sites, declared_sites
from dpquant_compile.sites import SiteTable
from dpquant_compile.spec import CompileSpec

__all__ = ["Program", "Programs", "mark_batch_dynamic"]

Link = Callable[[SiteTable], tuple[LinkTable, dict[str, int]]]


@dataclass(frozen=True)
class Program:
    """One graph that is ready to run.

    base       canonical graph with shapes and batch axes, from which variants are made
    switched   the same with a switch at each site
    call       runs `switched`, compiled as the spec asks
    rows       row of each site's name in the link table
    any_batch  whether it holds for all batch sizes, or only for the one it was captured with
    example    arguments of the first call, without their data
    """

    base: fx.GraphModule
    switched: fx.GraphModule
    call: Callable[..., Any]
    rows: dict[str, int]
    any_batch: bool
    example: tuple[Any, Any]


class Programs:
    """Captures a model lazily: one program per (modes of its modules, kind of input).

    `link` is told the table of sites that a graph was found to have, and answers with the link table to read and
    the row of each site.
    """

    def __init__(self, original: nn.Module, spec: CompileSpec, link: Link) -> None:
        self.original = original
        self.spec = spec
        self.log: list[PassRecord] = []
        self.recorder = Recorder()
        self._link = link
        self._programs: dict[tuple[Hashable, ...], Program] = {}
        self._traced: dict[Hashable, fx.GraphModule | CaptureError] = {}
        self.latest: Program | None = None

    @property
    def graphs(self) -> tuple[AotGraph, ...]:
        """The forward and backward graphs compiled so far."""
        return tuple(self.recorder.graphs)

    def known_sites(self) -> SiteTable:
        """The sites as far as they can be known now: from the last graph, a trace, or the modules alone."""
        gm = self.latest.base if self.latest is not None else self._trace()
        return declared_sites(self.original) if isinstance(gm, CaptureError) else collect_sites(gm)

    def readable(self) -> fx.GraphModule:
        """The canonical graph to read and to specialise."""
        if self.latest is not None:
            return self.latest.base
        gm = self._trace()
        if isinstance(gm, CaptureError):
            raise NotCapturedError(
                f"the graph of this model is not known yet. {gm}, so Dynamo captures it at the first forward: call the "
                "model on one batch, or pass example_inputs= to compile()"
            )
        return gm

    def get(self, args: Sequence[Any], kwargs: Mapping[str, Any], batch: int) -> Program:
        """The program for this call, captured and prepared if it is the first of its kind."""
        mode = self._mode()
        kind = (mode, _signature(args, kwargs, batch))
        program = self._programs.get(kind) or self._programs.get((*kind, batch))
        if program is None:
            program = self._prepare(mode, args, kwargs)
            self._programs[kind if program.any_batch else (*kind, batch)] = program
        self.latest = program
        return program

    def _mode(self) -> tuple[bool, ...]:
        # Per module, since a frozen BatchNorm is in eval() while the rest trains.
        return tuple(module.training for module in self.original.modules())

    def _trace(self) -> fx.GraphModule | CaptureError:
        mode = self._mode()
        if mode not in self._traced:
            gm = capture_fx(self.original)
            self._traced[mode] = gm if isinstance(gm, CaptureError) else pipeline.canonical(gm, self.log)
        return self._traced[mode]

    def _prepare(self, mode: Hashable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Program:
        gm, any_batch = self._trace(), True
        traced = not isinstance(gm, CaptureError)
        if isinstance(gm, CaptureError):
            captured, any_batch = capture_dynamo(self.original, args, kwargs)
            gm = pipeline.canonical(captured, self.log)
        gm = pipeline.tracked(gm, args, kwargs, any_batch, self.log)
        for key, program in self._programs.items() if traced else ():
            if key[0] == mode and _axes(program.base) == _axes(gm):
                return program  # the same program serves this shape as well
        table, rows = self._link(collect_sites(gm))
        switched = pipeline.rewritten(gm, table, rows, str(self.spec.recipe), self.log)
        example = tree_map(_without_data, (tuple(args), dict(kwargs)))
        return Program(gm, switched, self.compile(switched), rows, any_batch, example)

    def compile(self, gm: fx.GraphModule) -> Callable[..., Any]:
        """What runs `gm`: the graph itself, or torch.compile of it by way of AOTAutograd."""
        if self.spec.inner == "eager":
            return gm
        compiled: Callable[..., Any] = torch.compile(gm, backend=lower(self.spec.inner, self.recorder), fullgraph=True)
        return compiled


def mark_batch_dynamic(args: Sequence[Any], kwargs: Mapping[str, Any], batch: int) -> None:
    """Tell Dynamo that dimension 0 varies, so that a Poisson batch of another size compiles nothing."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch:
            torch._dynamo.maybe_mark_dynamic(leaf, 0)


def _without_data(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


def _signature(args: Sequence[Any], kwargs: Mapping[str, Any], batch: int) -> Hashable:
    leaves, spec = tree_flatten((tuple(args), dict(kwargs)))

    def describe() -> Iterator[Hashable]:
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                batched = leaf.dim() > 0 and leaf.shape[0] == batch
                yield (leaf.dtype, leaf.device.type, batched, tuple(leaf.shape[1:] if batched else leaf.shape))
            else:
                yield leaf if isinstance(leaf, Hashable) else repr(leaf)

    return (spec, tuple(describe()))


def _axes(gm: fx.GraphModule) -> tuple[Any, ...]:
    return tuple((node.name, axes_of(node)) for node in gm.graph.nodes if "site" in node.meta)
