"""recompute_relu_masks: a mask is computed of maps that backward holds."""

from collections.abc import Callable

import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from dpquant_compile.passes.private.recompute_relu_masks import recompute_relu_masks

Joint = Callable[..., fx.GraphModule]
Inputs = Callable[..., list[Tensor]]


def test_the_mask_reads_what_goes_into_the_relu(joint: Joint) -> None:
    gm, modified = recompute_relu_masks(joint(held=True))
    assert modified
    gm.recompile()
    lines = [line.split(";")[0].strip() for line in gm.code.splitlines()]
    wanted = ("relu.default", "le.Scalar", "mul.Tensor(a_1, b_1)")
    assert_expected_inline(
        "\n".join(line for line in lines if any(word in line for word in wanted)),
        """\
mul = torch.ops.aten.mul.Tensor(a_1, b_1)
relu = torch.ops.aten.relu.default(mul)
mul_4 = torch.ops.aten.mul.Tensor(a_1, b_1)
le = torch.ops.aten.le.Scalar(mul_4, 0)""",
    )


def test_a_mask_whose_maps_are_not_held_stays(joint: Joint) -> None:
    for gm in (joint(held=False), joint(relu=False)):
        before = str(gm.graph)
        result = recompute_relu_masks(gm)
        assert result.graph_module is gm and not result.modified and str(gm.graph) == before


def test_results_are_the_same_bits(joint: Joint, joint_inputs: Inputs) -> None:
    gm = joint(held=True)
    expected = [gm(*joint_inputs(low)) for low in (False, True)]
    changed = recompute_relu_masks(gm).graph_module
    changed.recompile()
    for low, results in zip((False, True), expected, strict=True):
        assert all(map(torch.equal, changed(*joint_inputs(low)), results))
