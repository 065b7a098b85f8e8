"""Frozen weights are packed once, where that is exact; what is put in the place of weights that train is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpquant_compile.errors import PrivateTrainingError
from dpquant_compile.privacy.clipping import runtime
from tests.support.private import made_private


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter; [B, 3, 6]."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned, self.weight = turned, nn.Parameter(torch.randn(6, 6), requires_grad=False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight if self.turned else nn.functional.linear(x, self.weight)
        return y + self.up(self.down(x))


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shapes that were packed, in their order."""
    found: list[str] = []
    own = runtime.pack_weight

    def counted(weight: Tensor, keys: Tensor, call: Any, precision: int) -> Tensor:
        found.append("×".join(map(str, weight.shape)))
        return own(weight, keys, call, precision)

    monkeypatch.setattr(runtime, "pack_weight", counted)
    return found


def steps(model: Any, optimizer: Any, count: int) -> None:
    for _ in range(count):
        model(torch.randn(4, 3, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def made(recipe: str, turned: bool = False) -> tuple[Any, Any]:
    model = Adapted(turned)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    words = {"format": recipe} if recipe == "luq_fp4" else {"recipe": None}
    compiled, private, _ = made_private(
        model, 4, policy="all", optimizer=optimizer, noise_multiplier=1.0, backend="auto", inner="eager", **words
    )
    return compiled, private


@pytest.mark.parametrize("turned", [False, True])
def test_a_frozen_weight_is_packed_once(turned: bool, packed: list[str]) -> None:
    steps(*made("default", turned), 3)
    assert [packed.count(shape) for shape in ("6×6", "2×6", "6×2")] == [1, 3, 3]


def test_rounding_at_random_is_drawn_anew_in_every_step(packed: list[str]) -> None:
    steps(*made("luq_fp4"), 3)
    assert packed.count("6×6") == 3


def test_a_frozen_weight_that_changes_is_refused() -> None:
    """Nothing uses what was packed of the old one; merging an adapter writes through `.data`."""
    model, optimizer = made("default")
    steps(model, optimizer, 1)
    model.weight.data.add_(1.0)
    with pytest.raises(PrivateTrainingError, match="'weight' of the model changed since make_private"):
        steps(model, optimizer, 1)


def test_only_adapters_have_gradients_and_noise() -> None:
    model, optimizer = made("default")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.randn(4, 3, 6)).sum().backward()
    held = [name for name, p in model.named_parameters() if getattr(p, "summed_grad", None) is not None]
    optimizer.step()
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert held == moved == ["down.weight", "up.weight"]


def test_a_merged_model_needs_a_new_optimizer() -> None:
    model, optimizer = made("default")
    steps(model, optimizer, 1)
    model.up = nn.Linear(2, 6, bias=False)  # what a merge does: other modules in the places of those that train
    with pytest.raises(PrivateTrainingError, match=r"'up\.weight' of the model is not the one.*call make_private"):
        model(torch.randn(4, 3, 6))


def test_a_forward_without_anything_to_train_is_refused() -> None:
    model, _ = made("default")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(PrivateTrainingError, match="no parameter that the optimizer trains has a gradient"):
        model(torch.randn(4, 3, 6))
