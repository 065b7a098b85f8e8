"""expand_functions: bags of words, bilinear layers and recurrent cells as operators that have rules."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpquant_compile.passes.canonical.expand_functions import expand_functions
from dpquant_compile.passes.canonical.inline_modules import inline_modules
from dpquant_compile.passes.canonical.mark_sites import collect_sites
from tests.support.models import after, canonical, program, seeded, traced
from tests.support.nn_walk import Called


def test_a_bag_golden() -> None:
    gm = after(
        traced(seeded(lambda: nn.Sequential(nn.EmbeddingBag(5, 3, mode="sum")))), inline_modules, expand_functions
    )
    assert program(gm) == (
        "def forward(self, input):\n"
        "    input_1 = input\n"
        '    _0_weight = getattr(self, "0").weight\n'
        "    embedding = torch.nn.functional.embedding(input_1, _0_weight, padding_idx = None, max_norm = None,\n"
        "        norm_type = 2.0, scale_grad_by_freq = False, sparse = False)\n"
        "    sum_1 = embedding.sum(1)\n"
        "    return sum_1"
    )


def test_other_functions_stay() -> None:
    gm = after(traced(nn.Sequential(nn.Linear(4, 3), nn.ReLU())), inline_modules)
    before = str(gm.graph)
    result = expand_functions(gm)
    assert not result.modified and str(result.graph_module.graph) == before


BAGS: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "mean": {"mode": "mean"},
    "max": {"mode": "max"},
    **{f"{mode}, padded": {"mode": mode, "padding_idx": -1} for mode in ("sum", "mean", "max")},
}


@pytest.mark.parametrize("kind", BAGS)
def test_bags_have_the_same_results_and_gradients(kind: str) -> None:
    bag = seeded(lambda: nn.EmbeddingBag(5, 3, **BAGS[kind]))
    words = torch.tensor([[0, 1, 4, 2], [4, 4, 4, 4], [3, 4, 1, 0]])
    gm = canonical(nn.Sequential(bag), words)
    assert "embedding_bag" not in str(gm.graph)
    expected, got = bag(words), gm(words)
    torch.testing.assert_close(got, expected)
    weights = torch.randn(expected.shape)
    for a, b in zip(*(torch.autograd.grad((y * weights).sum(), bag.weight) for y in (got, expected)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}], ids=str)
def test_bags_that_depend_on_what_is_in_the_batch_stay(options: dict[str, Any]) -> None:
    gm = after(traced(nn.Sequential(nn.EmbeddingBag(5, 3, **options))), inline_modules, expand_functions)
    assert "embedding_bag" in str(gm.graph)


def test_bags_of_other_lengths_stay() -> None:
    table = torch.randn(5, 3)
    model = Called(None, lambda _, x: F.embedding_bag(x.flatten(), table, torch.tensor([0, 2])))
    assert "embedding_bag" in str(after(traced(model), expand_functions).graph)


def _twice(cell: nn.Module, x: Tensor) -> Any:
    return cell(x, cell(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.RNNCell(4, 3),
        lambda: nn.RNNCell(4, 3, nonlinearity="relu"),
        lambda: nn.GRUCell(4, 3),
        lambda: nn.GRUCell(4, 3, bias=False),
        lambda: nn.LSTMCell(4, 3),
        lambda: nn.LSTMCell(4, 3, bias=False),
    ],
)
@pytest.mark.parametrize("dynamo", [False, True])
def test_cells_have_the_same_results_and_are_sites(make: Any, dynamo: bool) -> None:
    cell, x = seeded(make), torch.randn(2, 4)
    first = isinstance(cell, nn.LSTMCell)
    model = Called(cell, lambda cell, x: _twice(cell, x)[0] if first else _twice(cell, x))
    gm = canonical(model, x, dynamo=dynamo)
    torch.testing.assert_close(gm(x), model(x))
    assert {site.op for site in collect_sites(gm)} == {"linear"} and len(collect_sites(gm)) == 2


def test_bilinear_and_conv_tbc_have_the_same_results() -> None:
    a, b, weight, bias = torch.randn(2, 3, 4), torch.randn(2, 3, 5), torch.randn(6, 4, 5), torch.randn(6)
    model = Called(None, lambda _, x: F.bilinear(x, b, weight, bias))
    torch.testing.assert_close(after(traced(model), expand_functions)(a), model(a))
    kernel, offset = torch.randn(2, 4, 3), torch.randn(3)
    model = Called(None, lambda _, x: torch.conv_tbc(x, kernel, offset, 1))
    gm = after(traced(model), expand_functions)
    assert "conv_tbc" not in str(gm.graph)
    torch.testing.assert_close(gm(a), model(a))
