"""cut_joint and free_saved_inputs: forward, backward, and what may be freed between them."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from dpquant_compile.errors import GraphInvariantError
from dpquant_compile.passes.private.check_joint import check_cut, signature_of
from dpquant_compile.passes.private.cut_joint import backward_of, cut_joint, forward_of
from dpquant_compile.passes.private.joint_facts import facts_of
from dpquant_compile.passes.private.tag_forward import tag_forward
from dpquant_compile.passes.runner import PassRecord, called_programs, run_passes

Joint = Callable[..., fx.GraphModule]
Inputs = Callable[..., list[Tensor]]


def test_the_record_shows_both_programs(joint: Joint) -> None:
    log: list[PassRecord] = []
    gm = run_passes(joint(), (tag_forward, partial(cut_joint, recompute=False)), origin="trace_joint", log=log)
    programs = called_programs(log[-1].after)
    assert list(programs) == ["private_forward", "private_backward"] and "weighted_grad" in log[-1].before
    lines = [line for line in programs["private_backward"].splitlines() if "torch.ops." in line]
    assert_expected_inline(
        "\n".join(line.split("torch.ops.")[1].split("(")[0] for line in lines),
        """\
dpquant.round_operand.default
dpquant.private_grad_input.default
aten.full.default
aten.le.Scalar
aten.where.self
aten.mul.Tensor
aten.mul.Tensor
aten.expand.default
aten.clone.default
dpquant.weighted_grad.default
aten.sum.dim_IntList
aten.mul.Tensor
aten.isnan.default
aten.sum.default""",
    )
    assert facts_of(gm).parameters == ("weight", "scale")


@pytest.mark.parametrize("recompute", [False, True])
def test_results_are_the_same_bits(recompute: bool, joint: Joint, joint_inputs: Inputs) -> None:
    gm = tag_forward(joint()).graph_module
    expected = [gm(*joint_inputs(low)) for low in (False, True)]
    traced = signature_of(gm)
    cut = cut_joint(gm, recompute=recompute).graph_module
    check_cut(cut, traced=traced)
    for low, results in zip((False, True), expected, strict=True):
        assert all(map(torch.equal, cut(*joint_inputs(low)), results))


def test_the_programs_carry_no_facts_of_their_own(joint: Joint) -> None:
    """They are part of the key of Inductor's cache, which must not change from run to run."""
    cut = cut_joint(tag_forward(joint()).graph_module, recompute=True).graph_module
    assert "private" not in forward_of(cut).meta and "private" not in backward_of(cut).meta


def test_a_backward_that_loses_a_sum_is_caught(joint: Joint) -> None:
    gm = tag_forward(joint()).graph_module
    traced = signature_of(gm)
    cut = cut_joint(gm, recompute=False).graph_module
    output = backward_of(cut).graph.output_node()
    output.args = (tuple(output.args[0])[1:],)  # type: ignore[arg-type]
    with pytest.raises(GraphInvariantError, match="do not give the outputs"):
        check_cut(cut, traced=traced)
