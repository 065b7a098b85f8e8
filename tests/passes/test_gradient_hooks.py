"""Hooks that only ask for gradients are taken away for capture; hooks that do anything else are not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpquant_compile.errors import CaptureError
from dpquant_compile.passes.canonical.mark_sites import collect_sites
from dpquant_compile.passes.capture import capture_dynamo
from dpquant_compile.passes.gradient_hooks import asks_for_gradients, without_gradient_requests
from tests.support.models import canonical


def asks(module: nn.Module, given: Any, result: Tensor) -> None:
    result.requires_grad_(True)


def changes(module: nn.Module, given: Any, result: Tensor) -> Tensor:
    return result.requires_grad_(True)


def takes_away(module: nn.Module, given: Any, result: Tensor) -> None:
    result.requires_grad_(False)


def looks(module: nn.Module, given: Any, result: Tensor) -> None:
    given.requires_grad_(True)


@pytest.mark.parametrize("other", [changes, takes_away, looks, print, nn.ReLU()])
def test_only_their_very_code_is_taken(other: Any) -> None:
    assert asks_for_gradients(asks) and not asks_for_gradients(other)


@pytest.mark.parametrize("dynamo", [False, True])
def test_a_layer_with_such_a_hook_is_a_site_and_keeps_it(dynamo: bool) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 3)
    model[0].requires_grad_(False).register_forward_hook(asks)
    model[2].register_forward_hook(asks)
    gm = canonical(model, x, dynamo=dynamo)
    assert collect_sites(gm).names == ("0", "2")
    assert all(list(model[i]._forward_hooks.values()) == [asks] for i in (0, 2))
    torch.testing.assert_close(gm(x), model(x))


def test_others_stay_while_these_are_away() -> None:
    model = nn.Linear(2, 2)
    model.register_forward_hook(asks)
    model.register_forward_hook(takes_away)
    with without_gradient_requests(model):
        assert list(model._forward_hooks.values()) == [takes_away]
    assert list(model._forward_hooks.values()) == [asks, takes_away]


class Encoder(nn.Module):
    """As encoders of sound in transformers: `_requires_grad` makes forward() ask for gradients of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self._requires_grad = True

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        if self._requires_grad and self.training:
            x.requires_grad = True
        return self.linear(x)


def test_an_encoder_that_asks_in_forward_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Encoder(), torch.randn(2, 3)
    with pytest.raises(CaptureError, match="requires_grad"):
        capture_dynamo(model, (x,), {})  # of another package, where the name may mean anything
    monkeypatch.setattr(Encoder, "__module__", "transformers.models.sound")
    gm, _ = capture_dynamo(model, (x,), {})
    torch.testing.assert_close(gm(x), model(x))
    assert model._requires_grad
    with without_gradient_requests(model):
        assert not model._requires_grad
