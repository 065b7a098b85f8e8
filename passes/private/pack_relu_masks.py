"""Pack the mask of a ReLU between two sites: save one bit per element instead of a float.

For ReLUs whose mask `recompute_relu_masks` cannot compute from other maps. Between two sites the operator replaces a
loop that Inductor could hardly fuse with others.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from dpquant_compile.backends.ops.relu_bits import can_pack
from dpquant_compile.backends.site_args import call_operator, site_args
from dpquant_compile.passes.private.free_saved_inputs import sites_reading, users_of
from dpquant_compile.passes.private.joint_facts import facts_of, keep_facts, outputs_of
from dpquant_compile.passes.private.recompute_relu_masks import depends_on_gradients, masks_of
from dpquant_compile.passes.runner import PassResult

__all__ = ["is_zeroing", "pack_relu_masks"]

_ATEN, _OPS = torch.ops.aten, torch.ops.dpquant


def pack_relu_masks(gm: fx.GraphModule) -> PassResult:
    """Save bits for ReLUs whose output only sites read in backward.

        where(relu <= 0, 0, grad)   →   bits = positive_bits(relu, …); relu_grad(relu, bits, grad, …)

    Requires: `recompute_relu_masks`; a joint graph with its facts.
    Ensures: the bits are outputs, after those of forward, and counted in `forward_outputs`. Otherwise the cut would
    compute them in backward, from the numbers that they replace. Numerics: unchanged bit for bit.
    """
    packed = []
    backward = depends_on_gradients(gm.graph)
    for mask in masks_of(gm.graph, backward):
        relu: Any = mask.args[0]
        if not can_pack(relu.meta["val"]) or not all(is_zeroing(user, mask, relu) for user in mask.users):
            continue
        sites = sorted({site for user, own in users_of(relu) for site in sites_reading(user, own)})
        forward = [user for user, _ in users_of(relu) if user.target is _OPS.private_site.default]
        if sites[0] < 0 or not forward:
            continue
        packed.append(_replace(gm.graph, relu, mask, site_args(forward[0]).policy, sites))
    if not packed:
        return PassResult(gm, False)
    facts, outputs = facts_of(gm), outputs_of(gm)
    count = facts.forward_outputs
    gm.graph.output_node().args = ([*outputs[:count], *packed, *outputs[count:]],)
    keep_facts(gm, replace(facts, forward_outputs=count + len(packed)))
    return PassResult(gm, True)


def is_zeroing(node: fx.Node, mask: fx.Node, relu: fx.Node) -> bool:
    """Whether this is `where(mask, 0, gradient)`, with a gradient of the shape and dtype of the ReLU's output."""
    if node.target is not _ATEN.where.self or node.args[0] is not mask:
        return False
    zero, grad = node.args[1:]
    if not isinstance(zero, fx.Node) or zero.target is not _ATEN.full.default or zero.args[1] != 0:
        return False
    values = [n.meta["val"] for n in (relu, grad, node) if isinstance(n, fx.Node)]
    return len({(value.shape, value.dtype) for value in values}) == 1 and len(values) == 3


def _replace(graph: fx.Graph, relu: fx.Node, mask: fx.Node, policy: Any, sites: list[int]) -> fx.Node:
    with graph.inserting_after(relu):
        bits = call_operator(graph, _OPS.positive_bits.default, x=relu, policy=policy, sites=sites)
    for where in list(mask.users):
        with graph.inserting_before(where):
            grad = call_operator(
                graph, _OPS.relu_grad.default, x=relu, bits=bits, grad=where.args[2], policy=policy, sites=sites
            )
        where.replace_all_uses_with(grad)
        graph.erase_node(where)
    graph.erase_node(mask)
    return bits
