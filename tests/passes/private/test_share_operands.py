"""share_operands: an operand that several products read is rounded once."""

import operator

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from dpquant_compile.errors import GraphInvariantError
from dpquant_compile.passes.private.check_joint import check_operands
from dpquant_compile.passes.private.share_operands import share_operands

STATIC = ("linear", 0, 0, [], [0, 1, 1, 0, 1, 1], "luq_fp4/none/reference")


def rounds(*roles: str) -> fx.GraphModule:
    """Rounds its input once for each role, and returns the codes."""
    graph = fx.Graph()
    x, policy, keys, samples = (graph.placeholder(name) for name in ("x", "policy", "keys", "samples"))
    target = torch.ops.dpquant.round_operand.default
    calls = [graph.call_function(target, (x, policy, keys, samples, role, *STATIC)) for role in roles]
    graph.output([graph.call_function(operator.getitem, (call, 0)) for call in calls])
    return fx.GraphModule(torch.nn.Module(), graph)


def inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(2**40, (1, 8), generator=generator)
    return torch.randn(3, 4, generator=generator), torch.tensor([True]), keys, torch.arange(3)


def test_equal_roundings_become_one() -> None:
    gm, modified = share_operands(rounds("grad_output", "input", "grad_output"))
    assert modified
    gm.recompile()
    lines = [line.split(";")[0].replace(", ".join(map(repr, STATIC)), "...") for line in gm.code.splitlines()]
    assert_expected_inline(
        "\n".join(line.strip() for line in lines if line.strip()),
        """\
def forward(self, x, policy, keys, samples):
round_operand_default = torch.ops.dpquant.round_operand.default(x, policy, keys, samples, 'grad_output', ...)
round_operand_default_1 = torch.ops.dpquant.round_operand.default(x, policy, keys, samples, 'input', ...)
getitem = round_operand_default[0]
getitem_1 = round_operand_default_1[0]
getitem_2 = round_operand_default[0]
return [getitem, getitem_1, getitem_2]""",
    )


def test_different_roundings_stay() -> None:
    gm = rounds("grad_output", "input")
    before = str(gm.graph)
    result = share_operands(gm)
    assert result.graph_module is gm and not result.modified and str(gm.graph) == before


def test_codes_are_the_same_bits() -> None:
    gm = rounds("grad_output", "grad_output")
    expected = gm(*inputs())
    shared = share_operands(gm).graph_module
    shared.recompile()
    assert all(map(torch.equal, shared(*inputs()), expected)) and expected[0].any()


def test_an_operand_that_is_rounded_twice_is_caught() -> None:
    check_operands(rounds("grad_output", "input"))
    with pytest.raises(GraphInvariantError, match="rounds an operand"):
        check_operands(rounds("input", "input"))
