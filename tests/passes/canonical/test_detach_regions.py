"""detach_regions: no switch of the gradient mode is left, and values and gradients stay those of the model."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from dpquant_compile.errors import CaptureError, InplaceAliasError
from dpquant_compile.passes.canonical.detach_regions import detach_regions
from dpquant_compile.passes.canonical.functionalize import functionalize
from dpquant_compile.passes.capture import capture_dynamo
from tests.support.models import after, gradients, program, seeded

X = torch.linspace(-1, 1, 12).view(3, 4)


class Partly(nn.Module):
    """Computes a factor without gradients, from its input and a parameter, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            angle = x * self.scale
            cos, (low, high) = angle.cos(), angle.chunk(2, 1)
            with torch.enable_grad():
                sin = angle.sin() * self.scale
        return self.fc(x) * cos + sin + torch.cat([high, low], 1)


def captured(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    return capture_dynamo(model, inputs, {})[0]


def test_regions_become_detached_values() -> None:
    class Tiny(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                cos = x.cos()
            return x * cos

    assert program(after(captured(Tiny(), X), detach_regions)) == (
        "def forward(self, x):\n"
        "    arg0, = fx_pytree.tree_flatten_spec(([x], {}), self._in_spec)\n"
        "    l_x_ = arg0\n"
        "    cos = l_x_.cos()\n"
        "    detach = cos.detach()\n"
        "    mul = l_x_ * detach\n"
        "    return pytree.tree_unflatten([mul], self._out_spec)"
    )


def test_a_graph_without_regions_is_unchanged() -> None:
    gm = captured(nn.Linear(4, 4), X)
    before = gm.code
    assert not detach_regions(gm).modified and gm.code == before


def test_values_and_gradients_are_those_of_the_model() -> None:
    model = seeded(Partly)
    gm = after(captured(model, X), detach_regions)
    parameters = list(model.parameters())
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    torch.testing.assert_close(gradients(gm, [x], parameters), gradients(model, [y], parameters), rtol=0, atol=0)


def test_the_mode_of_the_caller_holds_throughout() -> None:
    gm = after(captured(seeded(Partly), X), detach_regions)
    with torch.no_grad():
        assert not gm(X).requires_grad and not torch.is_grad_enabled()
    assert gm(X).requires_grad and torch.is_grad_enabled()


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_a_region_may_write_into_state(kind: str) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            value: Any = nn.Parameter(torch.zeros(4))
            self.register_parameter("kept", value) if kind == "parameter" else self.register_buffer("kept", value.data)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.kept.add_(1)
            return x * self.kept

    model = Counting()
    gm = after(captured(model, X), detach_regions)
    torch.testing.assert_close(gm(X), X)
    torch.testing.assert_close(model.kept.detach(), torch.ones(4))


@pytest.mark.parametrize("write", ["add_", "setitem", "own view"])
def test_what_a_region_writes_into_a_value_from_before_has_no_gradient(write: str) -> None:
    class Filling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.scale = nn.Linear(4, 4), nn.Parameter(torch.full((4,), 3.0))

        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            with torch.no_grad():
                if write == "add_":
                    y.add_(self.scale.sin())
                elif write == "setitem":
                    y[:, :] = self.scale
                else:
                    y.view(-1, 4).mul_(self.scale)
            return self.fc(x) + y * self.scale

    if write == "own view":  # the view's memory is read under another name
        with pytest.raises(InplaceAliasError):
            after(captured(Filling(), X), detach_regions, functionalize)
        return
    model = seeded(Filling)
    gm = after(captured(model, X), detach_regions, functionalize)
    parameters = list(model.parameters())
    torch.testing.assert_close(gradients(gm, [X], parameters), gradients(model, [X], parameters), rtol=0, atol=0)


def test_a_write_that_a_gradient_would_skip_is_refused() -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            with torch.no_grad():
                y.clamp_(min=0)
            return y

    gm = captured(Clamped(), X)
    with pytest.raises(CaptureError, match=r"y\.clamp_\(min=0\).*in place under torch.no_grad"):
        detach_regions(gm)
