"""Pass: replace every site by the operator that looks its precision up when it runs."""

import torch
from torch import fx

from dpquant_compile.backends.ops.site import static_arguments
from dpquant_compile.backends.registry import SiteCall
from dpquant_compile.numerics.recipe import Recipe
from dpquant_compile.passes.runner import PassResult
from dpquant_compile.sites import BatchAxis

__all__ = ["LINK_TABLE", "axes_of", "call_at", "insert_switches", "link_table"]

# The name under which the graph modules hold the table of policy, keys and sample ids.
LINK_TABLE = "_dpq"


def insert_switches(gm: fx.GraphModule, *, rows: dict[str, int], recipe: str) -> PassResult:
    """Turn site nodes into `dpquant::site` calls that read row `rows[site name]` of the link table.

        y = F.conv2d(x, w, b, (1, 1), (0, 0), (1, 1), 1)
        →  y = torch.ops.dpquant.site(x, w, b, _dpq.policy, _dpq.keys, _dpq.samples, op="conv2d", site=3, …)

    Sites without a row stay as they are. Requires: `mark_sites`; `track_batch` for batches that are not dimension 0.
    Ensures: every site with a row is a switch. Numerics: changed where the policy says so, when it says so.
    """
    nodes = [node for node in gm.graph.nodes if "site" in node.meta and node.meta["site"].name in rows]
    if not nodes:
        return PassResult(gm, False)
    policy, keys, samples = link_table(gm.graph, "policy", "keys", "samples")
    for node in nodes:
        x, weight, bias = node.args[:3]
        call = call_at(node, rows[node.meta["site"].name], recipe)
        node.target = torch.ops.dpquant.site.default
        node.args, node.kwargs = (x, weight, bias, policy, keys, samples), static_arguments(call)
        node.meta["origin"] = "insert_switches"
    return PassResult(gm, True)


def link_table(graph: fx.Graph, *names: str) -> list[fx.Node]:
    """Nodes that hold parts of the link table: inputs named dpq_policy and so on if the graph has them, else reads."""
    given = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    if f"dpq_{names[0]}" in given:
        return [given[f"dpq_{name}"] for name in names]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        return [graph.get_attr(f"{LINK_TABLE}.{name}") for name in names]


def axes_of(node: fx.Node) -> tuple[BatchAxis, BatchAxis]:
    """The batch axes of a site's input and output; dimension 0 until `track_batch` has seen an input."""
    return node.meta.get("axis", BatchAxis(0)), node.meta.get("output_axis", BatchAxis(0))


def call_at(node: fx.Node, row: int, recipe: str) -> SiteCall:
    """The call of a site, for a node that is still `F.convNd` or `F.linear`; `row` is the site's in the link table."""
    site, (axis, output_axis) = node.meta["site"], axes_of(node)
    return SiteCall(site.op, Recipe.parse(recipe), axis, output_axis, site.geometry, row, node.meta["call"])
