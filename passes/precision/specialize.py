"""Pass: write one policy into the graph."""

from collections.abc import Container
from dataclasses import replace

from torch import fx

from dpquant_compile.backends.ops.site import static_arguments
from dpquant_compile.backends.ops.specialised_site import bfloat16_site, low_precision_site
from dpquant_compile.numerics.recipe import Precision
from dpquant_compile.passes.precision.insert_switches import call_at, link_table
from dpquant_compile.passes.runner import PassResult

__all__ = ["specialize"]


def specialize(gm: fx.GraphModule, *, policy: Container[str], rows: dict[str, int], recipe: str) -> PassResult:
    """Turn the sites of `policy` into low-precision calls, and all others into what the recipe's `high` says.

    For "float32" those stay the plain operators they are; for "bfloat16" they become `bfloat16_site`.

        y = F.conv2d(x, w, b, …)   →   y = low_precision_site(x, w, b, _dpq.keys, _dpq.samples, op="conv2d", site=3, …)

    Requires: `mark_sites`. Ensures: the same results, bit for bit, as the switched graph under this policy in
    reference arithmetic. Numerics: changed for these sites.
    """
    low, calls = {}, {}
    for node in gm.graph.nodes:
        name = node.meta["site"].name if "site" in node.meta else None
        if name is None or name not in rows:
            continue
        call = call_at(node, rows[name], recipe)
        precision = Precision.LOW if name in policy else call.recipe.other
        running = call.running(precision)
        if running is not None:
            low[node] = running
        elif precision == Precision.BFLOAT16:
            calls[node] = replace(call, site=0, call=0)
    if not low and not calls:
        return PassResult(gm, False)
    for node, call in calls.items():
        node.target, node.args, node.kwargs = bfloat16_site, node.args[:3], static_arguments(call)
        node.meta["origin"] = "specialize"
    keys, samples = link_table(gm.graph, "keys", "samples") if low else (None, None)
    for node, call in low.items():
        x, weight, bias = node.args[:3]
        node.target = low_precision_site
        node.args, node.kwargs = (x, weight, bias, keys, samples), static_arguments(call)
        node.meta["origin"] = "specialize"
    return PassResult(gm, True)
