"""tag_forward: what forward's outputs need is marked as forward's."""

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from dpquant_compile.errors import GraphInvariantError
from dpquant_compile.passes.private.check_joint import check_clipping, check_tags
from dpquant_compile.passes.private.tag_forward import tag_forward

Joint = Callable[..., fx.GraphModule]


def test_nodes_of_forward_are_tagged(joint: Joint) -> None:
    gm, modified = tag_forward(joint())
    assert modified
    check_tags(gm)
    tagged = [node.name for node in gm.graph.nodes if node.meta.get("partitioner_tag") == "is_forward"]
    assert_expected_inline(
        " ".join(tagged),
        """mul relu packed_weight round_operand getitem getitem_1 private_site""",
    )


def test_a_graph_that_is_tagged_stays(joint: Joint) -> None:
    gm = tag_forward(joint()).graph_module
    before = str(gm.graph)
    result = tag_forward(gm)
    assert result.graph_module is gm and not result.modified and str(gm.graph) == before


def test_results_are_the_same_bits(joint: Joint, joint_inputs: Callable[..., list[Tensor]]) -> None:
    gm = joint()
    expected = gm(*joint_inputs())
    assert all(map(torch.equal, tag_forward(gm).graph_module(*joint_inputs()), expected))


def test_a_missing_and_a_false_tag_are_caught(joint: Joint) -> None:
    gm = joint()
    with pytest.raises(GraphInvariantError, match="not tagged"):
        check_tags(gm)
    tag_forward(gm)
    gm.graph.output_node().args[0][1].meta["partitioner_tag"] = "is_forward"  # type: ignore[index,union-attr]
    with pytest.raises(GraphInvariantError, match="depends on gradients"):
        check_tags(gm)


def test_a_sum_that_is_not_clipped_is_caught(joint: Joint) -> None:
    gm = joint()
    check_clipping(gm)
    outputs = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    unclipped = next(node for node in gm.graph.nodes if node.target is torch.ops.aten.sum.dim_IntList)
    gm.graph.output_node().args = ([*outputs[:2], unclipped, outputs[3]],)
    with pytest.raises(GraphInvariantError, match="does not depend on the clipping bounds"):
        check_clipping(gm)
