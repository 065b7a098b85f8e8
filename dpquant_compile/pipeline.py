"""The order of the passes: from a captured graph to one that switches, or one that is specialised."""

from collections.abc import Mapping, MutableSequence, Sequence
from functools import partial
from typing import Any

from torch import fx, nn

from dpquant_compile.errors import GraphInvariantError
from dpquant_compile.passes.batch.track_batch import track_batch
from dpquant_compile.passes.canonical.canonicalize import canonicalize
from dpquant_compile.passes.canonical.expand_attention import expand_attention
from dpquant_compile.passes.canonical.functionalize import functionalize
from dpquant_compile.passes.canonical.inline_modules import inline_modules
from dpquant_compile.passes.canonical.mark_sites import mark_sites
from dpquant_compile.passes.fx_utils import copy_graph, graph_module_over
from dpquant_compile.passes.precision.insert_switches import LINK_TABLE, insert_switches
from dpquant_compile.passes.precision.specialize import specialize
from dpquant_compile.passes.runner import PassRecord, run_passes

__all__ = ["CANONICAL_PASSES", "canonical", "rewritten", "specialised", "tracked"]

CANONICAL_PASSES = (expand_attention, inline_modules, functionalize, canonicalize, mark_sites)


def canonical(gm: fx.GraphModule, log: MutableSequence[PassRecord]) -> fx.GraphModule:
    """The one form that both ways of capture end in, with its sites marked."""
    origin = next((node.meta.get("origin", "capture") for node in gm.graph.nodes), "capture")
    return run_passes(gm, CANONICAL_PASSES, origin=origin, log=log)


def tracked(
    gm: fx.GraphModule,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    any_batch: bool,
    log: MutableSequence[PassRecord],
    batch: int | None = None,
) -> fx.GraphModule:
    """The same graph, knowing its shapes and where the samples lie at every site."""
    step = partial(track_batch, args=args, kwargs=kwargs, any_batch=any_batch, batch=batch)
    return run_passes(_copied(gm), (step,), origin=log[-1].name if log else "mark_sites", log=log)


def rewritten(
    gm: fx.GraphModule, table: nn.Module, rows: dict[str, int], recipe: str, log: MutableSequence[PassRecord]
) -> fx.GraphModule:
    """The graph with a switch at each site, reading `table`."""
    step = partial(insert_switches, rows=rows, recipe=recipe)
    found = {node.meta["site"].name for node in gm.graph.nodes if "site" in node.meta}
    check = partial(_check_switches, rows={name: row for name, row in rows.items() if name in found})
    return run_passes(_linked(gm, table), (step,), origin="mark_sites", log=log, invariants=(check,))


def specialised(
    gm: fx.GraphModule,
    table: nn.Module,
    policy: frozenset[str],
    rows: dict[str, int],
    recipe: str,
    log: MutableSequence[PassRecord],
) -> fx.GraphModule:
    """The graph for one policy."""
    step = partial(specialize, policy=policy, rows=rows, recipe=recipe)
    return run_passes(_linked(gm, table), (step,), origin="mark_sites", log=log)


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    return graph_module_over(gm, copy_graph(gm.graph), gm._get_name())


def _linked(gm: fx.GraphModule, table: nn.Module) -> fx.GraphModule:
    new = _copied(gm)
    new.__dict__["_modules"][LINK_TABLE] = table
    return new


def _check_switches(gm: fx.GraphModule, *, rows: dict[str, int]) -> None:
    switches = [node for node in gm.graph.nodes if getattr(node.target, "namespace", None) == "dpquant"]
    for node in gm.graph.nodes:
        site = node.meta.get("site")
        if site is not None and site.name in rows and node not in switches:
            raise GraphInvariantError(f"site {site.name!r} (node {node.name!r}) was left without a switch")
    switched = {node.kwargs["site"] for node in switches}
    for name, row in rows.items():
        if row not in switched:
            raise GraphInvariantError(f"site {name!r} was lost: the graph has no switch for it")
