"""insert_switches, specialize, lift_tensors and split_blocks: from a marked graph to what runs."""

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from dpquant_compile import pipeline
from dpquant_compile.backends.ops.specialised_site import low_precision_site
from dpquant_compile.errors import CaptureError
from dpquant_compile.link_table import LinkTable
from dpquant_compile.numerics.random_bits import site_keys
from dpquant_compile.passes.canonical.mark_sites import collect_sites
from dpquant_compile.passes.fx_utils import read_attribute
from dpquant_compile.passes.precision.insert_switches import insert_switches
from dpquant_compile.passes.precision.specialize import specialize
from dpquant_compile.passes.precision.split_blocks import block_key, lift_tensors, split_blocks
from tests.support.models import (
    Attention,
    GroupNormNet,
    Hooked,
    TextNet,
    TimeFirst,
    canonical,
    gradients,
    program,
    seeded,
    tracked,
)

RECIPE = "luq_fp4/none/reference"
SWITCH = torch.ops.dpquant.site.default


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.fc = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).mean((2, 3)))


def linked(gm: fx.GraphModule) -> tuple[LinkTable, dict[str, int]]:
    names = collect_sites(gm).names
    table = LinkTable(len(names))
    table.keys = site_keys(0, 0, names)
    return table, {name: row for row, name in enumerate(names)}


def switched(gm: fx.GraphModule) -> tuple[fx.GraphModule, LinkTable]:
    table, rows = linked(gm)
    return pipeline.rewritten(gm, table, rows, RECIPE, []), table


def special(gm: fx.GraphModule, *policy: str) -> fx.GraphModule:
    table, rows = linked(gm)
    return pipeline.specialised(gm, table, frozenset(policy), rows, RECIPE, [])


MODELS: dict[str, tuple[Any, Any]] = {
    "tiny": (Tiny, lambda: torch.randn(3, 1, 4, 4)),
    "cnn": (GroupNormNet, lambda: torch.randn(3, 3, 8, 8)),
    "text": (TextNet, lambda: torch.arange(12).view(3, 4) % 11),
    "time": (TimeFirst, lambda: torch.randn(3, 5, 4)),
}


def prepared(name: str) -> tuple[nn.Module, fx.GraphModule, Tensor]:
    make, inputs = MODELS[name]
    model = seeded(make)
    x = inputs()
    return model, tracked(model, x), x


def test_switch_golden() -> None:
    gm, _ = switched(canonical(seeded(Tiny)))
    assert_expected_inline(
        program(gm),
        """\
def forward(self, x : torch.Tensor) -> torch.Tensor:
    _dpq_policy = self._dpq.policy
    _dpq_keys = self._dpq.keys
    _dpq_samples = self._dpq.samples
    conv_weight = self.conv.weight
    conv_bias = self.conv.bias
    conv2d = torch.ops.dpquant.site.default(x, conv_weight, conv_bias, _dpq_policy, _dpq_keys, _dpq_samples,
        op = 'conv2d', site = 0, call = 0, geometry = [1, 1, 1, 1, 1, 1, 1], axes = [0, 1, 1, 0, 1, 1], recipe
        = 'luq_fp4/none/reference')
    mean = conv2d.mean((2, 3))
    fc_weight = self.fc.weight
    fc_bias = self.fc.bias
    linear = torch.ops.dpquant.site.default(mean, fc_weight, fc_bias, _dpq_policy, _dpq_keys, _dpq_samples, op
        = 'linear', site = 1, call = 0, geometry = [], axes = [0, 1, 1, 0, 1, 1], recipe =
        'luq_fp4/none/reference')
    return linear""",
    )


def test_specialize_golden() -> None:
    assert_expected_inline(
        program(special(canonical(seeded(Tiny)), "fc")),
        """\
def forward(self, x : torch.Tensor) -> torch.Tensor:
    _dpq_keys = self._dpq.keys
    _dpq_samples = self._dpq.samples
    conv_weight = self.conv.weight
    conv_bias = self.conv.bias
    conv2d = torch.conv2d(x, conv_weight, conv_bias, (1, 1), (1, 1), (1, 1), 1)
    mean = conv2d.mean((2, 3))
    fc_weight = self.fc.weight
    fc_bias = self.fc.bias
    linear = dpquant_compile_backends_ops_specialised_site_low_precision_site(mean, fc_weight, fc_bias,
        _dpq_keys, _dpq_samples, op = 'linear', site = 1, call = 0, geometry = [], axes = [0, 1, 1, 0, 1, 1],
        recipe = 'luq_fp4/none/reference')
    return linear""",
    )


@pytest.mark.parametrize("name", MODELS)
def test_every_site_has_a_switch(name: str) -> None:
    _, gm, _ = prepared(name)
    expected = [(n.meta["site"].name, n.meta["call"]) for n in gm.graph.nodes if "site" in n.meta]
    graph, _ = switched(gm)
    names = collect_sites(gm).names
    found = [(names[n.kwargs["site"]], n.kwargs["call"]) for n in graph.graph.nodes if n.target is SWITCH]
    assert found == expected
    assert sum(n.target is SWITCH for n in gm.graph.nodes) == 0, "the base graph is left as it was"


@pytest.mark.parametrize("name", MODELS)
def test_switches_that_are_off_change_nothing(name: str) -> None:
    model, gm, x = prepared(name)
    graph, _ = switched(gm)
    parameters = list(model.parameters())
    torch.testing.assert_close(gradients(graph, [x], parameters), gradients(model, [x], parameters))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("half", [False, True], ids=["all", "half"])
def test_special_and_switched_graphs_agree_bit_for_bit(name: str, half: bool) -> None:
    model, gm, x = prepared(name)
    graph, table = switched(gm)
    names = collect_sites(gm).names
    chosen = names[::2] if half else names
    table.policy = torch.tensor([n in chosen for n in names])
    parameters = list(model.parameters())
    expected = gradients(graph, [x], parameters)
    found = gradients(special(gm, *chosen), [x], parameters)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not torch.equal(expected[0], model(x)), "low precision does something"


def test_special_and_switched_graphs_agree_in_full_precision() -> None:
    model = seeded(TimeFirst)
    x = torch.randn(30, 50, 4)
    gm = tracked(model, x)
    parameters = list(model.parameters())
    expected = gradients(switched(gm)[0], [x], parameters)
    torch.testing.assert_close(gradients(special(gm), [x], parameters), expected, rtol=0, atol=0)


def test_sites_without_a_row_stay() -> None:
    gm = canonical(seeded(Tiny))
    result = insert_switches(gm, rows={}, recipe=RECIPE)
    assert result.modified is False and not any(n.target is SWITCH for n in gm.graph.nodes)
    unknown = insert_switches(gm, rows={"other": 0}, recipe=RECIPE)
    assert unknown.modified is False


def test_an_empty_policy_leaves_the_graph() -> None:
    gm = canonical(seeded(Tiny))
    code = gm.code
    assert specialize(gm, policy=frozenset(), rows={}, recipe=RECIPE).modified is False
    gm.recompile()
    assert gm.code == code


def test_only_the_policy_is_specialised() -> None:
    graph = special(canonical(seeded(GroupNormNet)), "stem", "blocks.1.conv2")
    low = [n.meta["site"].name for n in graph.graph.nodes if n.target is low_precision_site]
    assert low == ["stem", "blocks.1.conv2"]


def test_switches_know_the_axes() -> None:
    _, gm, _ = prepared("time")
    graph, _ = switched(gm)
    axes = [list(n.kwargs["axes"]) for n in graph.graph.nodes if n.target is SWITCH]
    assert axes == [[0, 1, 1] * 2, [1, 1, 1] * 2, [0, 1, 5] * 2, [0, 5, 1] * 2]


# Blocks


def lifted(gm: fx.GraphModule) -> tuple[fx.GraphModule, list[Any]]:
    def read(name: str) -> Any:
        if name.startswith("_dpq.keys["):
            row = int(name[len("_dpq.keys[") : -1])
            return gm._modules["_dpq"].keys[row : row + 1]
        return read_attribute(gm, name)

    graph, names = lift_tensors(gm, lambda name: tuple(read(name).shape))
    return graph, [read(name) for name in names]


def test_lift_golden() -> None:
    graph, _ = lifted(special(canonical(seeded(Tiny)), "fc"))
    assert_expected_inline(
        program(graph),
        """\
def forward(self, x, t__dpq_samples, t_conv_weight, t_conv_bias, t_fc_weight, t_fc_bias, t_dpq_keys_1) ->
        torch.Tensor:
    conv2d = dpquant_compile_backends_ops_specialised_site_sealed_conv(x, t_conv_weight, t_conv_bias, (1, 1),
        (1, 1), (1, 1), 1)
    mean = conv2d.mean((2, 3))
    low_precision_site = dpquant_compile_backends_ops_specialised_site_low_precision_site(mean, t_fc_weight,
        t_fc_bias, t_dpq_keys_1, t__dpq_samples, op = 'linear', site = 0, call = 0, geometry = [], axes = [0,
        1, 1, 0, 1, 1], recipe = 'luq_fp4/none/reference')
    return low_precision_site""",
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("low", [False, True], ids=["none", "all"])
def test_lifted_and_split_graphs_compute_the_same(name: str, low: bool) -> None:
    model, gm, x = prepared(name)
    gm = special(gm, *(collect_sites(gm).names if low else ()))
    graph, tensors = lifted(gm)
    assert not [n for n in graph.graph.nodes if n.op == "get_attr"]
    torch.testing.assert_close(graph(x, *tensors), gm(x), rtol=0, atol=0)
    blocks = split_blocks(graph, model)
    torch.testing.assert_close(blocks(x, *tensors), gm(x), rtol=0, atol=0)


def test_lifting_refuses_modules_that_stay_whole() -> None:
    gm = special(tracked(seeded(Hooked), torch.randn(3, 4)), "first")
    with pytest.raises(CaptureError, match=r"module 'watched' is kept whole .* runs without variants"):
        lifted(gm)


def keys(model: nn.Module, gm: fx.GraphModule, *policy: str) -> list[str]:
    graph, _ = lifted(special(gm, *policy))
    return [block_key(block) for _, block in split_blocks(graph, model).named_children()]


def test_equal_blocks_have_equal_keys() -> None:
    model, gm, _ = prepared("cnn")
    stem, first, second, head = keys(model, gm)
    assert first == second and len({stem, first, head}) == 3
    assert keys(model, gm) == [stem, first, second, head], "and the same the next time"


def test_keys_tell_policies_apart() -> None:
    model, gm, _ = prepared("cnn")
    plain = keys(model, gm)
    one = keys(model, gm, "blocks.0.conv1")
    other = keys(model, gm, "blocks.1.conv1")
    assert one[1] != plain[1] and one[2] == plain[2]
    assert one[1] == other[2], "the same choice in the same block, wherever it is"
    assert keys(model, gm, "blocks.0.conv2")[1] not in (one[1], plain[1])


def test_keys_tell_shapes_apart() -> None:
    model = seeded(GroupNormNet)
    small, large = (tracked(model, torch.randn(3, 3, n, n)) for n in (8, 16))
    assert keys(model, small)[1] != keys(model, large)[1]


def test_a_model_without_repeated_blocks_is_one_block() -> None:
    model, gm, _ = prepared("tiny")
    assert len(keys(model, gm)) == 1


def test_attention_lifts() -> None:
    model = seeded(lambda: Attention("self", False, batch_first=True))
    x = torch.randn(3, 5, 8)
    gm = special(tracked(model, x, x, x), "attn.in_proj")
    graph, tensors = lifted(gm)
    torch.testing.assert_close(graph(x, x, x, None, None, *tensors)[0], gm(x, x, x)[0], rtol=0, atol=0)
