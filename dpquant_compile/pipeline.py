"""The whole compiler in order: every list of passes, and the functions that run them.

    capture        CANONICAL_PASSES    one form for every model
    first forward  TRACKING_PASSES     shapes, and where samples lie; views that hold in every layout
    then one of    SWITCHING_PASSES    one program for all policies
                   SPECIALISING_PASSES a program for one policy
                   private training: OUTPUT_PASSES, ISOLATION_PASSES, the trace of the joint graph, then for Inductor
                   COMPILED_JOINT_PASSES, TAGGING_PASSES, COMPILED_CUT_PASSES and, with inner="regions",
                   REGION_PASSES; or for an interpreter INTERPRETED_JOINT_PASSES, TAGGING_PASSES, INTERPRETED_CUT_PASSES

Options of a pass are bound by the functions below, with `functools.partial`.
"""

from collections.abc import Callable, Mapping, MutableSequence, Sequence
from functools import partial
from typing import Any

from torch import fx, nn

from dpquant_compile.backends.graph_compile import INDUCTOR
from dpquant_compile.backends.site_args import site_args
from dpquant_compile.errors import GraphInvariantError
from dpquant_compile.passes.batch.track_batch import track_batch
from dpquant_compile.passes.batch.verify_isolation import verify_isolation
from dpquant_compile.passes.canonical.canonicalize import canonicalize
from dpquant_compile.passes.canonical.detach_regions import detach_regions
from dpquant_compile.passes.canonical.expand_attention import expand_attention
from dpquant_compile.passes.canonical.expand_functions import expand_functions
from dpquant_compile.passes.canonical.functionalize import functionalize
from dpquant_compile.passes.canonical.inline_modules import inline_modules
from dpquant_compile.passes.canonical.inline_regions import inline_regions
from dpquant_compile.passes.canonical.mark_sites import mark_sites
from dpquant_compile.passes.canonical.relax_views import relax_views
from dpquant_compile.passes.canonical.rewrite_products import rewrite_products
from dpquant_compile.passes.fx_utils import copy_graph, graph_module_over
from dpquant_compile.passes.precision.insert_switches import LINK_TABLE, insert_switches
from dpquant_compile.passes.precision.specialize import specialize
from dpquant_compile.passes.private.check_joint import (
    check_clipping,
    check_cut,
    check_forward,
    check_operands,
    check_outputs,
    check_tags,
    signature_of,
)
from dpquant_compile.passes.private.cut_joint import cut_joint
from dpquant_compile.passes.private.cut_regions import check_regions, cut_regions
from dpquant_compile.passes.private.drop_batch_loss import drop_batch_loss
from dpquant_compile.passes.private.free_saved_inputs import free_saved_inputs
from dpquant_compile.passes.private.fuse_norms import fuse_norms
from dpquant_compile.passes.private.gather_pool_grads import gather_pool_grads
from dpquant_compile.passes.private.merge_equal_nodes import merge_equal_nodes
from dpquant_compile.passes.private.pack_relu_masks import pack_relu_masks
from dpquant_compile.passes.private.recompute_relu_masks import recompute_relu_masks
from dpquant_compile.passes.private.run_inductor_passes import run_inductor_passes
from dpquant_compile.passes.private.share_operands import share_operands
from dpquant_compile.passes.private.tag_forward import tag_forward
from dpquant_compile.passes.runner import Pass, PassRecord, PassResult, run_passes

__all__ = [
    "CANONICAL_PASSES",
    "COMPILED_CUT_PASSES",
    "COMPILED_JOINT_PASSES",
    "INTERPRETED_CUT_PASSES",
    "INTERPRETED_JOINT_PASSES",
    "ISOLATION_PASSES",
    "OUTPUT_PASSES",
    "REGION_PASSES",
    "SPECIALISING_PASSES",
    "SWITCHING_PASSES",
    "TAGGING_PASSES",
    "TRACKING_PASSES",
    "canonical",
    "in_regions",
    "isolated",
    "private",
    "rewritten",
    "specialised",
    "tracked",
]

# From a captured graph, by fx or by Dynamo, to the canonical form with marked sites, from which all others start.
CANONICAL_PASSES = (
    inline_regions,
    detach_regions,
    expand_attention,
    inline_modules,
    expand_functions,
    functionalize,
    rewrite_products,
    canonicalize,
    mark_sites,
)

# Shapes, FLOPs, and which elements belong to which sample, at the first forward; then no view depends on a layout.
TRACKING_PASSES = (track_batch, relax_views)

# One program for all policies: a switch at each site.
SWITCHING_PASSES = (insert_switches,)

# A program for one policy.
SPECIALISING_PASSES = (specialize,)

# Private training: the outputs that it can use.
OUTPUT_PASSES = (drop_batch_loss,)

# Private training: the proof that no value mixes samples. It does not change the graph.
ISOLATION_PASSES = (verify_isolation,)

# Rewrites of the private joint graph that `trace_joint` makes, for Inductor to compile.
COMPILED_JOINT_PASSES = (
    share_operands,
    run_inductor_passes,
    merge_equal_nodes,
    gather_pool_grads,
    fuse_norms,
    recompute_relu_masks,
    pack_relu_masks,
)

# The same for an interpreted graph, for which masks save no memory.
INTERPRETED_JOINT_PASSES = (share_operands, merge_equal_nodes)

# Marks what forward computes, for the cut.
TAGGING_PASSES = (tag_forward,)

# From the joint graph to forward and backward, and what may be freed between them.
COMPILED_CUT_PASSES = (partial(cut_joint, recompute=True), free_saved_inputs)
INTERPRETED_CUT_PASSES = (partial(cut_joint, recompute=False), free_saved_inputs)

# Over each of the two programs, with inner="regions". Fewer repeats, or smaller ones, would save little.
REGION_PASSES = (partial(cut_regions, at_least=3, smallest=16),)


def canonical(gm: fx.GraphModule, log: MutableSequence[PassRecord]) -> fx.GraphModule:
    """The canonical form, in which both ways of capture end, with marked sites."""
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
    """The same graph with shapes, and with the position of the samples at every site."""
    track, *rest = TRACKING_PASSES
    bound = partial(track, args=args, kwargs=kwargs, any_batch=any_batch, batch=batch)
    return run_passes(_copied(gm), (bound, *rest), origin=log[-1].name if log else "mark_sites", log=log)


def rewritten(
    gm: fx.GraphModule, table: nn.Module, rows: dict[str, int], recipe: str, log: MutableSequence[PassRecord]
) -> fx.GraphModule:
    """The graph with a switch at each site, reading `table`."""
    passes = _bound(SWITCHING_PASSES, rows=rows, recipe=recipe)
    found = {node.meta["site"].name for node in gm.graph.nodes if "site" in node.meta}
    check = partial(_check_switches, rows={name: row for name, row in rows.items() if name in found})
    return run_passes(_linked(gm, table), passes, origin="mark_sites", log=log, invariants=(check,))


def specialised(
    gm: fx.GraphModule,
    table: nn.Module,
    policy: frozenset[str],
    rows: dict[str, int],
    recipe: str,
    log: MutableSequence[PassRecord],
) -> fx.GraphModule:
    """The graph for one policy."""
    passes = _bound(SPECIALISING_PASSES, policy=policy, rows=rows, recipe=recipe)
    return run_passes(_linked(gm, table), passes, origin="mark_sites", log=log)


def isolated(
    gm: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any], log: MutableSequence[PassRecord]
) -> fx.GraphModule:
    """A tracked graph of which it is proved that no value mixes samples; raises `IsolationError` otherwise.

    It is the same graph, unless the model computes a loss of the whole batch: see `drop_batch_loss`.
    """
    passes = (*OUTPUT_PASSES, *_bound(ISOLATION_PASSES, args=args, kwargs=kwargs))
    return run_passes(gm, passes, origin="relax_views", log=log)


def private(gm: fx.GraphModule, trace: Pass, inner: str, log: MutableSequence[PassRecord]) -> fx.GraphModule:
    """The forward and backward programs of private training, from a graph that `isolated` has proved.

    `trace` is the pass that makes the joint graph; it is an argument, since it belongs to the privacy package.
    """
    compiled = inner in INDUCTOR
    joint = run_passes(gm, (trace,), origin="verify_isolation", log=log)
    traced = signature_of(joint)
    sound = (partial(check_outputs, traced=traced), check_forward, check_clipping)
    passes: tuple[Pass, ...] = COMPILED_JOINT_PASSES if compiled else INTERPRETED_JOINT_PASSES
    joint = run_passes(joint, passes, origin=log[-1].name, log=log, invariants=(*sound, check_operands))
    joint = run_passes(joint, TAGGING_PASSES, origin=log[-1].name, log=log, invariants=(*sound, check_tags))
    passes = COMPILED_CUT_PASSES if compiled else INTERPRETED_CUT_PASSES
    check = partial(check_cut, traced=traced)
    return run_passes(joint, passes, origin=log[-1].name, log=log, invariants=(check,))


def in_regions(parts: Sequence[fx.GraphModule], log: MutableSequence[PassRecord]) -> list[fx.GraphModule]:
    """Forward and backward programs as Inductor compiles them, with one region for what a program repeats."""
    origin = log[-1].name
    return [
        run_passes(part, REGION_PASSES, origin=origin, log=log, invariants=(partial(check_regions, whole=part),))
        for part in parts
    ]


def _bound(passes: Sequence[Callable[..., PassResult]], **options: Any) -> tuple[Pass, ...]:
    return tuple(partial(step, **options) for step in passes)


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
    switched = {site_args(node).site for node in switches}
    for name, row in rows.items():
        if row not in switched:
            raise GraphInvariantError(f"site {name!r} was lost: the graph has no switch for it")
