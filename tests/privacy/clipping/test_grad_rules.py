"""Clipped sums equal, sample by sample, what plain autograd and clipping by hand give."""

import pytest
import torch
from torch import Tensor, nn

import dpquant_compile as dpq
from dpquant_compile.errors import PerSampleGradientError
from tests.support import models
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
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize("make", [Norms, ClassToken, Adapter, Generic, Merged])
def test_layers_equal_the_reference(make: type[nn.Module], clipping: str) -> None:
    shapes = {Norms: (5, 4, 6), ClassToken: (5, 3, 8, 8), Adapter: (5, 6), Generic: (5, 4), Merged: (5, 4)}
    model, x = models.seeded(make), torch.randn(shapes[make])
    compiled, _, _ = made_private(model, 5, clipping=clipping)
    expected = reference_sums(model, [x], clipping=clipping)
    assert_close(clipped_sums(compiled, [x]), expected)


@pytest.mark.parametrize("policy", ["none", "all"])
@pytest.mark.parametrize("kind", list(models.conv_zoo()))
def test_convs_equal_the_reference(kind: str, policy: str) -> None:
    torch.manual_seed(0)
    model, shape = models.conv_zoo()[kind]
    x = torch.randn(shape)
    compiled, _, _ = made_private(model, 4, policy=policy)
    assert_close(clipped_sums(compiled, [x]), reference_sums(model, [x], policy=policy))


@pytest.mark.slow
@pytest.mark.parametrize("outputs", ["flow", "all"])
@pytest.mark.parametrize("name", SHAPES)
def test_quantized_outputs_equal_the_reference(name: str, outputs: str) -> None:
    make, batch = SHAPES[name]
    model, x = models.seeded(make), batch()
    compiled, _, _ = made_private(model, 6, policy="all", quantize_outputs=outputs)
    assert_close(clipped_sums(compiled, [x]), reference_sums(model, [x], policy="all", quantize_outputs=outputs))


def test_a_parameter_without_a_rule_is_named() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(4, 4, batch_first=True)
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(self.fc(x))[0]

    compiled, _, _ = made_private(Whole(), 3)
    with pytest.raises(PerSampleGradientError, match=r"rnn\.weight_ih_l0.*requires_grad_\(False\)"):
        compiled(torch.randn(3, 2, 4))


def test_explain_names_the_way_of_each_parameter() -> None:
    compiled, _, _ = made_private(Generic(), 3)
    compiled(torch.randn(3, 4))
    text = str(compiled.explain())
    assert "vmap" in text and "mix" in text
    assert isinstance(compiled, dpq.CompiledModule)
