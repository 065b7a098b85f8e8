"""expand_attention: attention as linears and dot products, bit for bit."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

import dpquant_compile as dpq
from dpquant_compile import pipeline
from dpquant_compile.errors import CaptureError
from dpquant_compile.passes.canonical.expand_attention import expand_attention
from dpquant_compile.passes.canonical.mark_sites import collect_sites
from dpquant_compile.passes.runner import PassResult
from dpquant_compile.sites import SiteTable
from dpquant_compile.torch_compile import _prepare
from tests.support.models import Attention, GroupNormNet, after, canonical, gradients, program, seeded, traced

KINDS = ("self", "cross", "kv", "kdim")
B, L, S, H = 3, 4, 5, 2


def inputs(kind: str, batch_first: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    widths = (8, 6, 10) if kind == "kdim" else (8, 8, 8)
    lengths = (L, L, L) if kind == "self" else (L, S, S)
    made = [torch.randn(B, n, w, generator=generator) for n, w in zip(lengths, widths, strict=True)]
    return [(x if batch_first else x.transpose(0, 1).contiguous()).requires_grad_() for x in made]


def masks(kind: str, name: str) -> tuple[Tensor | None, Tensor | None]:
    """A key padding mask and an attention mask."""
    source = L if kind == "self" else S
    padding = torch.zeros(B, source, dtype=torch.bool)
    padding[0, -1] = padding[2, -2:] = True
    causal = torch.ones(L, source, dtype=torch.bool).triu(1)
    per_head = torch.zeros(B * H, L, source, dtype=torch.bool)
    per_head[1, :, 1] = True
    additive = torch.linspace(-1, 1, L * source).view(L, source)
    found = {
        "none": (None, None),
        "padding": (padding, None),
        "mask": (None, causal),
        "additive": (None, additive),
        "per head": (None, per_head),
        "both": (padding, causal),
        "float both": (torch.zeros(B, source).masked_fill(padding, -1e4), additive),
    }
    return found[name]


def same_bits(model: Attention, args: list[Any], graph: Any = None) -> None:
    graph = after(traced(model), expand_attention) if graph is None else graph
    assert not any(n.op == "call_module" for n in graph.graph.nodes)
    parameters = list(model.parameters())
    tensors = [a for a in args if a is not None]

    def call(function: Any) -> Any:
        return lambda *given: function(*given, *args[len(given) :])

    expected = gradients(call(model), tensors[:3], parameters)
    torch.testing.assert_close(gradients(call(graph), tensors[:3], parameters), expected, rtol=0, atol=0)


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "fused"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "time first"])
@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_as_torch_with_every_mask(kind: str, batch_first: bool, need_weights: bool) -> None:
    model = seeded(lambda: Attention(kind, need_weights, batch_first=batch_first))
    for name in ("none", "padding", "mask", "additive", "per head", "both", "float both"):
        same_bits(model, [*inputs(kind, batch_first), *masks(kind, name)])


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "fused"])
@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"bias": False}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_with_appended_keys(kind: str, options: dict[str, bool], need_weights: bool) -> None:
    model = seeded(lambda: Attention(kind, need_weights, **options))
    for name in ("none", "padding", "both", "per head"):
        same_bits(model, [*inputs(kind, False), *masks(kind, name)])


def test_same_bits_with_everything_at_once() -> None:
    options = {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True}
    for kind, need_weights, average in itertools.product(KINDS, (True, False), (True, False)):
        model = seeded(lambda k=kind, n=need_weights, a=average: Attention(k, n, a, **options))
        same_bits(model, [*inputs(kind, True), *masks(kind, "both")])


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "fused"])
def test_same_dropout(need_weights: bool) -> None:
    model = seeded(lambda: Attention("self", need_weights, dropout=0.5))
    graph, (x, *_) = after(traced(model), expand_attention), inputs("self", False)
    results = []
    for function in (model, graph):
        torch.manual_seed(3)
        results.append(function(x, x, x))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    model.eval()
    graph = after(traced(model), expand_attention)
    torch.testing.assert_close(graph(x, x, x), model(x, x, x), rtol=0, atol=0)


def test_causal_hint() -> None:
    class Causal(nn.Module):
        def __init__(self, need_weights: bool) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
            self.need_weights = need_weights

        def forward(self, x: Tensor, mask: Tensor) -> Any:
            return self.attn(x, x, x, need_weights=self.need_weights, attn_mask=mask, is_causal=True)

    x = inputs("self", True)[0]
    mask = torch.ones(L, L, dtype=torch.bool).triu(1)
    for need_weights in (True, False):
        model = seeded(lambda n=need_weights: Causal(n))
        graph = after(traced(model), expand_attention)
        torch.testing.assert_close(graph(x, mask), model(x, mask), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_dynamo_expands_to_the_same_sites(kind: str) -> None:
    model, args = seeded(lambda: Attention(kind, batch_first=True)), inputs(kind, True)
    by_fx, by_dynamo = canonical(model), canonical(model, *args, dynamo=True)
    assert collect_sites(by_fx).names == collect_sites(by_dynamo).names
    torch.testing.assert_close(by_dynamo(*args), model(*args), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("self", ["attn.in_proj", "attn.out_proj"]),
        ("cross", ["attn.in_proj.q", "attn.in_proj.kv", "attn.out_proj"]),
        ("kv", ["attn.in_proj.q", "attn.in_proj.k", "attn.in_proj.v", "attn.out_proj"]),
        ("kdim", ["attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj"]),
    ],
)
def test_each_projection_is_a_site(kind: str, names: list[str]) -> None:
    table = collect_sites(canonical(seeded(lambda: Attention(kind))))
    assert list(table.names) == names and not table.skipped
    assert {site.module_types for site in table} == {("MultiheadAttention",)}


def test_golden() -> None:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x, x, x, need_weights=False)[0]

    assert_expected_inline(
        program(after(traced(Tiny()), expand_attention)),
        """\
def forward(self, x : torch.Tensor) -> torch.Tensor:
    attn_in_proj_weight = self.attn.in_proj_weight
    attn_in_proj_bias = self.attn.in_proj_bias
    attn_out_proj_weight = self.attn.out_proj.weight
    attn_out_proj_bias = self.attn.out_proj.bias
    transpose = x.transpose(1, 0)
    size = transpose.size(0)
    size_1 = transpose.size(1)
    linear = torch._C._nn.linear(transpose, attn_in_proj_weight, attn_in_proj_bias)
    unflatten = linear.unflatten(-1, (3, 4))
    unsqueeze = unflatten.unsqueeze(0)
    transpose_1 = unsqueeze.transpose(0, -2)
    squeeze = transpose_1.squeeze(-2)
    contiguous = squeeze.contiguous()
    getitem_1 = contiguous[0]
    getitem_2 = contiguous[1]
    getitem_3 = contiguous[2]
    size_2 = getitem_1.size(0)
    mul = size_1 * 2
    view = getitem_1.view(size_2, mul, 2)
    transpose_2 = view.transpose(0, 1)
    size_3 = getitem_2.size(0)
    mul_1 = size_1 * 2
    view_1 = getitem_2.view(size_3, mul_1, 2)
    transpose_3 = view_1.transpose(0, 1)
    size_4 = getitem_3.size(0)
    mul_2 = size_1 * 2
    view_2 = getitem_3.view(size_4, mul_2, 2)
    transpose_4 = view_2.transpose(0, 1)
    size_5 = transpose_3.size(1)
    size_6 = transpose_2.size(1)
    view_3 = transpose_2.view(size_1, 2, size_6, 2)
    size_7 = transpose_3.size(1)
    view_4 = transpose_3.view(size_1, 2, size_7, 2)
    size_8 = transpose_4.size(1)
    view_5 = transpose_4.view(size_1, 2, size_8, 2)
    scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention(view_3, view_4, view_5, None,
        0.0, False)
    permute = scaled_dot_product_attention.permute(2, 0, 1, 3)
    mul_3 = size_1 * size
    reshape = permute.reshape(mul_3, 4)
    linear_1 = torch._C._nn.linear(reshape, attn_out_proj_weight, attn_out_proj_bias)
    size_9 = linear_1.size(1)
    view_6 = linear_1.view(size, size_1, size_9)
    transpose_5 = view_6.transpose(1, 0)
    return transpose_5""",
    )


def test_a_graph_without_attention_is_left_alone() -> None:
    gm = traced(seeded(GroupNormNet))
    code = gm.code
    result = expand_attention(gm)
    assert isinstance(result, PassResult) and result.modified is False
    assert result.graph_module is gm and gm.code == code


def test_static_keys_stay_whole_with_a_reason() -> None:
    class Static(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.o = nn.Parameter(torch.randn(12, 4)), nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor, k: Tensor) -> Tensor:
            return F.multi_head_attention_forward(
                x, x, x, 4, 2, self.w, None, None, None, False, 0.0, self.o, None, static_k=k, static_v=k
            )[0]

    table = collect_sites(canonical(Static()))
    assert [skip.reason for skip in table.skipped] == ["attention with static keys or values is not expanded"]


def test_hooks_of_attention_go_on_being_called() -> None:
    model, seen = seeded(lambda: Attention(batch_first=True)), []
    model.attn.register_forward_hook(lambda module, args, out: seen.append(1))
    canonical(model)(*inputs("self", True))
    assert seen == [1]


def test_attention_that_is_the_whole_model() -> None:
    model, args = nn.MultiheadAttention(8, 2, batch_first=True), inputs("self", True)
    found = collect_sites(canonical(model, *args, dynamo=True))
    assert found.names == ("in_proj.q", "in_proj.k", "in_proj.v", "out_proj")


class Both(nn.Module):
    """Attention, and a conv whose padding depends on the shape of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 3, padding="same")

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.attn(x, x, x)[0].transpose(1, 2))


def inside_torch_compile(model: nn.Module, x: Tensor) -> SiteTable:
    """The sites as the torch.compile backend sees them: parameters are inputs of the graph."""
    found: list[SiteTable] = []

    def look(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        found.append(collect_sites(pipeline.canonical(_prepare(gm), [])))
        return gm.forward

    torch.compile(model, backend=look)(x)
    return found[0]


def test_names_inside_torch_compile() -> None:
    names = inside_torch_compile(Both(), inputs("self", True)[0]).names
    assert names[:2] == ("attn.in_proj", "attn.out_proj")


def test_same_padding_inside_torch_compile() -> None:
    assert "conv" in inside_torch_compile(Both(), inputs("self", True)[0]).names


def test_sequence_first_attention_is_refused() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x, x, x, need_weights=False)[0]

    with pytest.raises(CaptureError, match=r"attn.in_proj.*batch_first=True"):
        dpq.compile(Encoder(), budget=1, backend="reference")(torch.randn(5, 3, 8))
