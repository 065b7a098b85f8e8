"""pack_relu_masks: a ReLU between sites keeps a bit for each element."""

import re
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from dpquant_compile.backends.cpu_int8 import build as native
from dpquant_compile.errors import GraphInvariantError
from dpquant_compile.numerics.recipe import Precision
from dpquant_compile.passes.private.check_joint import check_forward, check_outputs, signature_of
from dpquant_compile.passes.private.joint_facts import facts_of
from dpquant_compile.passes.private.pack_relu_masks import pack_relu_masks

Joint = Callable[..., fx.GraphModule]
Inputs = Callable[..., list[Tensor]]

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))


def test_bits_are_an_output_of_forward(joint: Joint) -> None:
    gm = joint(held=False)
    traced = signature_of(gm)
    gm, modified = pack_relu_masks(gm)
    assert modified and facts_of(gm).forward_outputs == 2
    check_outputs(gm, traced=traced)
    check_forward(gm)
    gm.recompile()
    code = [line.split(";")[0].replace("torch.ops.", "").strip() for line in gm.code.splitlines()]
    lines = [re.sub(r"(?<=\(relu, getitem).*\)", ", ...)", line) for line in code]
    wanted = ("relu.default", "bits", "relu_grad", "le.Scalar", "return")
    assert_expected_inline(
        "\n".join(line for line in lines if any(word in line for word in wanted)),
        """\
relu = aten.relu.default(mm_1)
positive_bits_default = dpquant.positive_bits.default(relu, policy_1, [0])
relu_grad_default = dpquant.relu_grad.default(relu, positive_bits_default, private_grad_input, policy_1, [0])
sum_1 = aten.sum.dim_IntList(relu_grad_default, [0])
return [private_site, positive_bits_default, weighted_grad, mul, sum_2]""",
    )


def test_a_graph_without_such_a_relu_stays(joint: Joint) -> None:
    gm = joint(relu=False)
    before = str(gm.graph)
    result = pack_relu_masks(gm)
    assert result.graph_module is gm and not result.modified and str(gm.graph) == before
    assert facts_of(gm).forward_outputs == 1


def test_results_are_the_same_bits(joint: Joint, joint_inputs: Inputs) -> None:
    gm = joint(held=False)
    precisions = (Precision.FULL, Precision.LOW, Precision.BFLOAT16)
    expected = [gm(*joint_inputs(precision)) for precision in precisions]
    changed = pack_relu_masks(gm).graph_module
    changed.recompile()
    for precision, results in zip(precisions, expected, strict=True):
        found = changed(*joint_inputs(precision))
        assert all(map(torch.equal, [found[0], *found[2:]], results))


def test_a_pass_that_loses_count_is_caught(joint: Joint) -> None:
    gm = joint()
    traced = signature_of(gm)
    outputs = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    gm.graph.output_node().args = ([outputs[0], outputs[1], *outputs[1:]],)
    with pytest.raises(GraphInvariantError, match="outputs of a private program changed"):
        check_outputs(gm, traced=traced)
    gm.graph.output_node().args = ([outputs[2], *outputs[1:]],)
    with pytest.raises(GraphInvariantError, match="depends on the gradients"):
        check_forward(gm)
