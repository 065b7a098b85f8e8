"""cut_regions and check_regions: one region for a stretch that a program repeats, and the same bits."""

from collections.abc import Callable, Sequence

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch._inductor import inductor_prims
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dpquant_compile.errors import GraphInvariantError
from dpquant_compile.passes.private.cut_regions import check_regions, cut_regions
from dpquant_compile.passes.private.joint_facts import INPUT
from dpquant_compile.passes.private.meaning import ROWS, ROWS_OF

SIZE, SITES = 6, 4
NAMES = ("x", "policy", "keys", "samples", *(f"{row}.weight" for row in range(SITES)))


def site(x: Tensor, weight: Tensor, table: Sequence[Tensor], row: int) -> Tensor:
    ops, static = torch.ops.dpquant, ("linear", row, 0, [], [0, 1, 1, 0, 1, 1], "luq_fp4/none/reference")
    operand = ops.round_operand(x, *table, "input", *static)
    y: Tensor = ops.private_site(x, *operand, weight, ops.packed_weight(weight, *table, *static), None, *table, *static)
    return y


def layers(x: Tensor, policy: Tensor, keys: Tensor, samples: Tensor, *weights: Tensor) -> list[Tensor]:
    """A site that nothing repeats, and three equal layers, of which the second is an output, too."""
    zero, found = torch.full([], 0.5), []
    x = site(x, weights[0], (policy, keys, samples), 0).sin()
    for row in range(1, SITES):
        x = (site(x, weights[row], (policy, keys, samples), row) + zero).tanh()
        found.append(x)
    return [found[1], x.exp()]


def drawn(x: Tensor, policy: Tensor, keys: Tensor, samples: Tensor, *weights: Tensor) -> list[Tensor]:
    for row in range(SITES):
        x = (site(x, weights[row], (policy, keys, samples), row) * torch.bernoulli(x.sigmoid())).tanh()
    return [x]


def inputs(policy: Sequence[int]) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    x, weights = torch.randn(3, SIZE, generator=g), torch.randn(SITES, SIZE, SIZE, generator=g).unbind()
    return [x, torch.tensor(policy), torch.randint(2**40, (SITES, 8), generator=g), torch.arange(3), *weights]


def traced(function: Callable[..., list[Tensor]]) -> fx.GraphModule:
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(value, static_shapes=True) for value in inputs([0] * SITES)]
        gm: fx.GraphModule = make_fx(function, tracing_mode="real")(*fake)
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), NAMES, strict=True):
        node.meta[INPUT] = name
    return gm


def cut(gm: fx.GraphModule) -> fx.GraphModule:
    return cut_regions(gm, at_least=3, smallest=5).graph_module


def test_equal_layers_become_calls_of_one_region() -> None:
    whole = traced(layers)
    gm, modified = cut_regions(whole, at_least=3, smallest=5)
    assert modified and whole is not gm
    lines = [line.split(";")[0].strip() for line in gm.code.splitlines()]
    assert_expected_inline(
        "\n".join(line for line in lines if "region" in line or "slice" in line),
        """\
slice_tensor = torch.ops.aten.slice.Tensor(arg1_1, 0, 0, 1)
slice_tensor_1 = torch.ops.aten.slice.Tensor(arg2_1, 0, 0, 1)
region_0 = self.region_0(arg0_1, slice_tensor, slice_tensor_1, arg3_1, arg4_1)
getitem = region_0[0]
slice_tensor_2 = torch.ops.aten.slice.Tensor(arg1_1, 0, 1, 2)
slice_tensor_3 = torch.ops.aten.slice.Tensor(arg2_1, 0, 1, 2)
region_1 = self.region_1(getitem, slice_tensor_2, slice_tensor_3, arg3_1, arg5_1)
getitem_1 = region_1[0]
slice_tensor_4 = torch.ops.aten.slice.Tensor(arg1_1, 0, 2, 3)
slice_tensor_5 = torch.ops.aten.slice.Tensor(arg2_1, 0, 2, 3)
region_2 = self.region_1(getitem_1, slice_tensor_4, slice_tensor_5, arg3_1, arg6_1)
getitem_2 = region_2[0]
slice_tensor_6 = torch.ops.aten.slice.Tensor(arg1_1, 0, 3, 4)
slice_tensor_7 = torch.ops.aten.slice.Tensor(arg2_1, 0, 3, 4)
region_3 = self.region_1(getitem_2, slice_tensor_6, slice_tensor_7, arg3_1, arg7_1)
getitem_3 = region_3[0]
region_4 = self.region_2(getitem_3)
getitem_4 = region_4[0]""",
    )
    assert_expected_inline(
        "\n".join(line.split(";")[0].strip() for line in gm.get_submodule("region_1").code.strip().splitlines()),
        """\
def forward(self, input_0, policy, keys, input_3, input_4):
round_operand_1 = torch.ops.dpquant.round_operand.default(input_0, policy, keys, input_3, 'input', 'linear', 0, 0, [], [0, 1, 1, 0, 1, 1], 'luq_fp4/none/reference')
getitem_2 = round_operand_1[0]
getitem_3 = round_operand_1[1]
packed_weight_1 = torch.ops.dpquant.packed_weight.default(input_4, policy, keys, input_3, 'linear', 0, 0, [], [0, 1, 1, 0, 1, 1], 'luq_fp4/none/reference')
private_site_1 = torch.ops.dpquant.private_site.default(input_0, getitem_2, getitem_3, input_4, packed_weight_1, None, policy, keys, input_3, 'linear', 0, 0, [], [0, 1, 1, 0, 1, 1], 'luq_fp4/none/reference')
full = torch.ops.aten.full.default([], 0.5, device = device(type='cpu'), pin_memory = False)
add = torch.ops.aten.add.Tensor(private_site_1, full)
tanh = torch.ops.aten.tanh.default(add)
return (tanh,)""",
    )


def masked(x: Tensor, policy: Tensor, keys: Tensor, samples: Tensor, *weights: Tensor) -> list[Tensor]:
    """Layers that ask for the policy of the site before theirs, too, of which they need no key."""
    found = []
    for row in range(1, SITES):
        x = site(x, weights[row], (policy, keys, samples), row).relu()
        bits = torch.ops.dpquant.positive_bits(x, policy, [row - 1, row])
        found.append(torch.ops.dpquant.relu_grad(x, bits, x.sin(), policy, [row - 1, row]))
    return [x, *found]


@pytest.mark.parametrize("function", [layers, masked])
@pytest.mark.parametrize("policy", [[0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 1], [0, 1, 0, 0]])
def test_numbers_are_the_same_bits(policy: list[int], function: Callable[..., list[Tensor]]) -> None:
    whole = traced(function)
    gm = cut(whole)
    assert gm is not whole
    check_regions(gm, whole=whole)
    expected = whole(*inputs(policy))
    assert all(map(torch.equal, gm(*inputs(policy)), expected))


def test_a_program_without_repeats_and_one_whose_layers_draw_stay() -> None:
    for whole, at_least in ((traced(layers), 4), (traced(drawn), 3)):
        before = str(whole.graph)
        result = cut_regions(whole, at_least=at_least, smallest=5)
        assert result.graph_module is whole and not result.modified and str(whole.graph) == before


def test_layers_that_differ_in_a_shape_or_a_constant_share_no_region() -> None:
    def chain(step: Callable[[Tensor, int], Tensor]) -> Callable[..., list[Tensor]]:
        def function(x: Tensor, policy: Tensor, keys: Tensor, samples: Tensor, *weights: Tensor) -> list[Tensor]:
            for row in range(SITES):
                x = step(site(x, weights[row], (policy, keys, samples), row), row).tanh()
            return [x]

        return function

    steps: dict[str, Callable[[Tensor, int], Tensor]] = {
        "equal": lambda x, row: x * 2,
        "constant": lambda x, row: x * (row + 1),
        "shape": lambda x, row: torch.cat([x, x]),
    }
    found = {name: cut_regions(traced(chain(step)), at_least=3, smallest=5).modified for name, step in steps.items()}
    assert found == {"equal": True, "constant": False, "shape": False}


def test_a_region_with_the_rows_of_another_site_is_caught() -> None:
    whole = traced(layers)
    gm = cut(whole)
    check_regions(gm, whole=whole)
    rows = next(node for node in gm.graph.nodes if node.target is ROWS and node.args[2] == 2)
    rows.args = (rows.args[0], 0, 1, 2)
    with pytest.raises(GraphInvariantError, match="rows of different tables"):
        check_regions(gm, whole=whole)
    for node in gm.graph.nodes:
        if node.target is ROWS and node.args[2] == 2:
            node.args = (node.args[0], 0, 1, 2)
    with pytest.raises(GraphInvariantError, match="computes something else"):
        check_regions(gm, whole=whole)


def test_a_region_that_is_given_the_wrong_value_is_caught() -> None:
    whole = traced(layers)
    gm = cut(whole)
    second, third = [node for node in gm.graph.nodes if node.target == "region_1"][1:]
    assert third.args[0] is not second.args[0]
    third.args = (second.args[0], *third.args[1:])
    with pytest.raises(GraphInvariantError, match="computes something else"):
        check_regions(gm, whole=whole)


def dropout(x: Tensor, policy: Tensor, keys: Tensor, samples: Tensor, *weights: Tensor) -> list[Tensor]:
    """Layers with dropout, as Inductor draws it: from one tensor of seeds, by number."""
    seeds = inductor_prims.seeds(SITES, x.device)
    for row in range(SITES):
        kept = inductor_prims.random([3, SIZE], inductor_prims.lookup_seed(seeds, row), "rand") > 0.5
        x = (site(x, weights[row], (policy, keys, samples), row) * kept).tanh()
    return [x]


def test_each_call_of_a_region_with_dropout_has_a_seed_of_its_own() -> None:
    whole = traced(dropout)
    gm = cut(whole)
    check_regions(gm, whole=whole)
    seeds = [node for node in gm.graph.nodes if node.meta.get(ROWS_OF) == "seeds"]
    assert [node.args[2] for node in seeds] == list(range(SITES))
    seeds[1].args = (seeds[1].args[0], 0, 0, 1)
    with pytest.raises(GraphInvariantError, match="computes something else"):
        check_regions(gm, whole=whole)
