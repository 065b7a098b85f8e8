"""Clipped sums equal, sample by sample, what plain autograd and clipping by hand give."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpquant_compile as dpq
from dpquant_compile.errors import PerSampleGradientError
from dpquant_compile.privacy.clipping.joint_graph import Tracing
from tests.support import models
from tests.support.heavy import few
from tests.support.matrix_models import SPELLINGS, Spelled, TiedBothWays, TiedHead
from tests.support.per_sample_models import Adapter, ClassToken, Generic, Merged, Norms
from tests.support.private import assert_close, clipped_sums, made_private, reference_sums

SHAPES = {
    "residual": (models.GroupNormNet, lambda: torch.randn(5, 3, 8, 8)),
    "tied text": (models.TextNet, lambda: torch.randint(0, 11, (5, 6))),
    "folds": (models.TimeFirst, lambda: torch.randn(5, 3, 4)),
    "functional": (models.Functional, lambda: torch.randn(5, 2, 5, 5)),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "all"])
@pytest.mark.parametrize("name", SHAPES)
def test_models_equal_the_reference(name: str, policy: str) -> None:
    make, batch = SHAPES[name]
    model, x = models.seeded(make), batch()
    compiled, _, _ = made_private(model, 7, policy=policy)  # padded by two
    assert_close(clipped_sums(compiled, [x]), reference_sums(model, [x], policy=policy))


@pytest.mark.slow
@pytest.mark.parametrize("clipping", few(["flat", "per_layer", "automatic"], "flat", "automatic"))
@pytest.mark.parametrize("make", [Norms, ClassToken, Adapter, Generic, Merged])
def test_layers_equal_the_reference(make: type[nn.Module], clipping: str) -> None:
    shapes = {Norms: (5, 4, 6), ClassToken: (5, 3, 8, 8), Adapter: (5, 6), Generic: (5, 4), Merged: (5, 4)}
    model, x = models.seeded(make), torch.randn(shapes[make])
    compiled, _, _ = made_private(model, 5, clipping=clipping)
    expected = reference_sums(model, [x], clipping=clipping)
    assert_close(clipped_sums(compiled, [x]), expected)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_products_with_a_matrix_are_book_kept(spelling: str) -> None:
    model, x = models.seeded(lambda: Spelled(spelling)), torch.randn(5, 3, 6)
    compiled, _, _ = made_private(model, 7, policy="all", inner="eager")
    sums = clipped_sums(compiled, [x])
    assert_close(sums, reference_sums(model, [x], policy="all"))
    assert all(sums[name].is_contiguous() for name in sums)
    ways = {name: how for name, _, how in compiled.__dict__["_private"].ways()}
    assert ways[compiled.sites[0].weight] == "book-keeping"


@pytest.mark.parametrize("policy", ["none", "all"])
@pytest.mark.parametrize("make", [TiedBothWays, TiedHead, lambda: TiedHead(turned=True)])
def test_tied_tables_are_pooled_without_gradients_of_samples(make: Any, policy: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(Tracing, "_check_memory", _refuse_tables)
    model, x = models.seeded(make), torch.randint(0, 7, (5, 5))
    compiled, _, _ = made_private(model, 7, policy=policy, inner="eager")
    assert_close(clipped_sums(compiled, [x]), reference_sums(model, [x], policy=policy))
    ways = {name: how for name, _, how in compiled.__dict__["_private"].ways()}
    assert ways["table.weight"].startswith("gram over") and ways.get("places.weight", "look-up") == "look-up"


def _refuse_tables(self: Tracing, name: str, shape: Any, uses: str) -> None:
    assert "add" in uses, f"{name} is held for each sample: {uses}"  # positions are added: as large as an activation


@pytest.mark.parametrize("policy", few(["none", "all"], "all"))
@pytest.mark.parametrize("kind", list(models.conv_zoo()))
def test_convs_equal_the_reference(kind: str, policy: str) -> None:
    torch.manual_seed(0)
    model, shape = models.conv_zoo()[kind]
    x = torch.randn(shape)
    compiled, _, _ = made_private(model, 4, policy=policy)
    assert_close(clipped_sums(compiled, [x]), reference_sums(model, [x], policy=policy))


@pytest.mark.slow
@pytest.mark.parametrize("outputs", few(["flow", "all"], "all"))
@pytest.mark.parametrize("name", SHAPES)
def test_quantized_outputs_equal_the_reference(name: str, outputs: str) -> None:
    make, batch = SHAPES[name]
    model, x = models.seeded(make), batch()
    compiled, _, _ = made_private(model, 6, policy="all", quantize_outputs=outputs)
    assert_close(clipped_sums(compiled, [x]), reference_sums(model, [x], policy="all", quantize_outputs=outputs))


def test_a_layer_without_gradients_by_sample_is_named() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(4, 4, batch_first=True)
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(self.fc(x))[0]

    with pytest.raises(PerSampleGradientError, match=r"layer 'rnn' \(LSTM\).*opacus\.layers\.DPLSTM"):
        made_private(Whole(), 3)


def test_explain_names_the_way_of_each_parameter() -> None:
    compiled, _, _ = made_private(Generic(), 3)
    compiled(torch.randn(3, 4))
    text = str(compiled.explain())
    assert "vmap" in text and "mix" in text
    assert isinstance(compiled, dpq.CompiledModule)
