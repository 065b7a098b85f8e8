"""free_saved_inputs: which tensors backward does not read where sites are low."""

from collections.abc import Callable
from functools import partial

import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from dpquant_compile.numerics.recipe import Precision
from dpquant_compile.passes.private.cut_joint import backward_of, cut_joint, forward_of
from dpquant_compile.passes.private.free_saved_inputs import SavedInputs, free_saved_inputs
from dpquant_compile.passes.private.recompute_relu_masks import recompute_relu_masks
from dpquant_compile.passes.private.tag_forward import tag_forward
from dpquant_compile.passes.runner import run_passes

Joint = Callable[..., fx.GraphModule]
Inputs = Callable[..., list[Tensor]]

CUT = (recompute_relu_masks, tag_forward, partial(cut_joint, recompute=False))


def cut(gm: fx.GraphModule) -> fx.GraphModule:
    return run_passes(gm, CUT, origin="trace_joint", log=[])


def test_the_record_says_which_tensors(joint: Joint) -> None:
    log: list = []  # type: ignore[type-arg]
    gm = run_passes(cut(joint()), (free_saved_inputs,), origin="cut_joint", log=log)
    notes = [line for line in log[0].after.splitlines() if line.startswith("# ") and "program" not in line]
    assert_expected_inline("\n".join(notes), """""")
    ((place, rows),) = SavedInputs.of(gm).places
    saved = backward_of(gm).graph.find_nodes(op="placeholder")[place]
    assert rows == (0,) and saved.meta["val"].shape == (3, 8)


def test_a_backward_that_reads_all_stays(joint: Joint) -> None:
    gm = run_passes(joint(held=False), CUT[1:], origin="trace_joint", log=[])  # the mask reads the ReLU's output
    before = backward_of(gm).code
    result = free_saved_inputs(gm)
    assert result.graph_module is gm and not result.modified and backward_of(gm).code == before
    assert SavedInputs.of(gm).places == ()


def test_results_are_the_same_bits_without_what_was_freed(joint: Joint, joint_inputs: Inputs) -> None:
    for precision in (Precision.FULL, Precision.LOW, Precision.BFLOAT16):
        gm = free_saved_inputs(cut(joint())).graph_module
        inputs = joint_inputs(precision)
        expected = gm(*inputs)[1:]
        saved = list(forward_of(gm)(*inputs[:-1]))[1:]
        held = list(saved)
        SavedInputs.of(gm).free(saved, inputs[3])
        assert any(a is not b for a, b in zip(held, saved, strict=True)) == (precision == Precision.LOW)
        assert all(map(torch.equal, backward_of(gm)(*saved, inputs[-1]), expected))
