"""What a graph keeps as one call is not proved: a backward, a hook or a branch on gradients may hide in it."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile.errors import CaptureError, DPQuantError, IsolationError
from dpquant_compile.passes.batch.opaque_code import opaque_code
from dpquant_compile.privacy.clipping.trace_joint import refuse_custom_backwards

B = 4


class Of(nn.Module):
    """A function between two linears."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.function = nn.Linear(4, 4), nn.Linear(4, 3), function
        self.register_buffer("ones", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return self.b(self.function(self, self.a(x)))


def private(model: nn.Module, inner: str = "eager") -> dpq.CompiledModule:
    compiled = dpq.compile(model, budget=0, backend="reference", inner=inner).train()
    engine = dpq.PrivacyEngine(accountant="rdp")
    made, _, _ = engine.make_private(
        module=compiled,
        optimizer=torch.optim.SGD(compiled.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(torch.zeros(4 * B, 1)), batch_size=B),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        max_physical_batch_size=B,
        loss_reduction="sum",
        noise_generator=torch.Generator().manual_seed(77),
    )
    assert isinstance(made, dpq.CompiledModule)
    return made


def one_step(model: nn.Module, inner: str = "eager") -> Tensor:
    """The outputs of one private forward, after its backward."""
    made = private(model, inner)
    output = made(torch.randn(B, 4, generator=torch.Generator().manual_seed(1)))
    assert isinstance(output, Tensor)
    output.sum().backward()
    return output.detach()


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.sum(0, keepdim=True).expand_as(grad) * 1.0  # each sample gets all samples' gradients


@torch.fx.wrap
def wrapped(x: Tensor) -> Tensor:
    return _Shared.apply(x)


@torch.fx.wrap
@torch.no_grad()
def decorated(x: Tensor) -> Tensor:
    return x * 1.0


@torch.fx.wrap
def hooked(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: grad.sum(0, keepdim=True).expand_as(grad) * 1.0)
    return x * 1.0


@torch.fx.wrap
def scaled(x: Tensor) -> Tensor:
    return x * (x.detach().abs().max() if torch.is_grad_enabled() else 1.0)


@torch.fx.wrap
def noised(x: Tensor) -> Tensor:
    return x * (torch.rand(4) if torch.is_grad_enabled() else 1.0)


def allowed(x: Tensor) -> Tensor:
    return _Shared.apply(x)


torch.compiler.allow_in_graph(allowed)


def _untraceable(s: Of, x: Tensor) -> Tensor:
    return allowed(x) if x.shape[1] + x.sum() is not None and x.dim() > 1 else x  # for Dynamo


OPAQUE: dict[str, Callable[[Of, Tensor], Any]] = {
    "wrapped": lambda s, x: wrapped(x),
    "decorated": lambda s, x: decorated(x),
    "hooked": lambda s, x: hooked(x),
    "scaled": lambda s, x: scaled(x),
    "noised": lambda s, x: noised(x),
    "allowed": _untraceable,
    "allowed in a checkpoint": lambda s, x: checkpoint(_untraceable, s, x, use_reentrant=False),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_opaque_functions_are_refused(name: str) -> None:
    function = name.split()[0]
    with pytest.raises(IsolationError, match=rf"node '\w+' \(test_opaque_code.py:\d+: .*{function}\(\).*Fix: write it"):
        one_step(Of(OPAQUE[name]))


def test_opaque_functions_are_refused_by_inductor_programs_too() -> None:
    with pytest.raises(IsolationError, match=r"wrapped\(\) stays one call"):
        one_step(Of(OPAQUE["wrapped"]), inner="inductor")


def test_a_bound_apply_is_no_function_of_torch() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(_Shared.apply, (x,)))
    assert [reason for _, reason in opaque_code(fx.GraphModule(nn.Module(), graph))]


def test_hooks_on_tensors_are_refused() -> None:
    def hooks(s: Of, x: Tensor) -> Tensor:
        x.register_hook(lambda grad: grad - grad.mean(0))
        return x

    with pytest.raises(DPQuantError, match="register_hook"):
        one_step(Of(hooks))


class _Whole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Shared.apply(x)


def test_a_module_that_stays_whole_is_refused() -> None:
    class Leafy(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, _Whole) or super().is_leaf_module(m, module_qualified_name)

    model = nn.Sequential(nn.Linear(4, 4), _Whole(), nn.Linear(4, 3))
    traced = fx.GraphModule(model, Leafy().trace(model))
    with pytest.raises(IsolationError, match="_Whole stays one call"):
        one_step(traced)


def test_custom_backwards_in_the_traced_program_are_refused() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    refuse_custom_backwards([F.relu(x) * 2])
    with pytest.raises(IsolationError, match="_SharedBackward"):
        refuse_custom_backwards([F.relu(_Shared.apply(x)) * 2])


def _in_checkpoint(s: Of, x: Tensor) -> Tensor:
    return checkpoint(lambda y: F.gelu(y) * 2, x, use_reentrant=False)


PROVED: dict[str, Callable[[Of, Tensor], Any]] = {
    "operators": lambda s, x: F.max_pool1d(F.layer_norm(torch.add(x, 1).relu(), (4,)), 1) ** 2,
    "checkpoint": _in_checkpoint,
    "attention": lambda s, x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0],
    "einsum": lambda s, x: torch.einsum("bi,ij->bj", x, s.a.weight),
}


@pytest.mark.parametrize("name", PROVED)
def test_operators_of_torch_are_proved(name: str) -> None:
    assert one_step(Of(PROVED[name])).shape == (B, 3)


def test_stochastic_depth_of_torchvision_is_proved() -> None:
    from dpquant_compile import torchvision_compat

    torchvision_compat.models()
    from torchvision.ops import StochasticDepth

    model = nn.Sequential(nn.Linear(4, 4), StochasticDepth(0.5, "row"), nn.Linear(4, 3)).train()
    assert one_step(model).shape == (B, 3)


# Randomness that a capture would freeze


class _Skipping(nn.Module):
    """Leaves a layer out by chance."""

    def __init__(self, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.a, self.b, self.draw = nn.Linear(4, 4), nn.Linear(4, 3), draw
        self.python, self.numpy = random.Random(0), np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(y if self.draw(self) < 0 else y.relu())  # never below 0: no run shows the branch


GENERATOR = random.Random(3)
DRAWS: dict[str, Callable[[Any], float]] = {
    "python": lambda s: random.random(),
    "numpy": lambda s: float(np.random.rand()),
    "python, own": lambda s: s.python.random(),
    "numpy, own": lambda s: float(s.numpy.random()),
    "python, global": lambda s: GENERATOR.random(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_randomness_of_python_and_numpy_is_refused(name: str) -> None:
    model = _Skipping(DRAWS[name])

    def states() -> Any:
        return random.getstate(), np.random.get_state()[1].tolist(), model.python.getstate(), GENERATOR.getstate()

    before = states()
    with pytest.raises(CaptureError):
        one_step(model)
    assert states() == before, "a capture draws nothing"


# State that forward() writes


class _Holder:
    def __init__(self) -> None:
        self.tensor, self.value, self.history = torch.zeros(4), None, []


OUTSIDE = torch.zeros(4)
KEPT: list[Any] = []


class _Writing(nn.Module):
    def __init__(self, write: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.write, self.holder, self.previous = nn.Linear(4, 3), write, _Holder(), torch.zeros(4)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x.mean(0))
        return self.a(x + self.previous + self.holder.tensor + OUTSIDE)


def _assigns(s: Any, mean: Tensor) -> None:
    s.previous = mean


def _assigns_aside(s: Any, mean: Tensor) -> None:
    s.holder.value = mean


WRITES: dict[str, tuple[Callable[[Any, Tensor], None], str]] = {
    "attribute": (_assigns, "previous"),
    "attribute of an object": (_assigns_aside, "value"),
    "tensor of an object": (lambda s, mean: s.holder.tensor.copy_(mean), r"reaches.*holder_tensor"),
    "tensor of an object through data": (lambda s, mean: s.holder.tensor.data.copy_(mean), r"reaches.*holder_tensor"),
    "global tensor": (lambda s, mean: OUTSIDE.copy_(mean), r"reaches.*OUTSIDE"),
    "list": (lambda s, mean: s.seen.append(mean), "seen"),
    "list of an object": (lambda s, mean: s.holder.history.append(mean), "history"),
    "global list": (lambda s, mean: KEPT.append(mean), "KEPT"),
}


@pytest.mark.parametrize("name", WRITES)
def test_state_that_forward_writes_is_refused_and_not_kept(name: str) -> None:
    write, words = WRITES[name]
    model = _Writing(write)
    with pytest.raises(DPQuantError, match=words):
        one_step(model)
    assert not model.previous.any() and not model.holder.tensor.any() and not OUTSIDE.any()
    assert model.holder.value is None and model.holder.history == [] and model.seen == [] and KEPT == []


def test_the_line_of_an_assignment_is_named() -> None:
    class Assigning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.previous = nn.Linear(4, 3), torch.zeros(3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x) + self.previous
            self.previous = y.detach().mean(0)
            return y

    with pytest.raises(IsolationError, match=r"self.previous \(test_opaque_code.py:\d+: self.previous = y.*Fix: "):
        one_step(Assigning())


def test_writes_outside_of_private_training_are_left_to_the_model() -> None:
    model = _Writing(lambda s, mean: s.holder.tensor.copy_(mean))
    compiled = dpq.compile(model, budget=0, backend="reference", inner="eager").train()
    x = torch.randn(B, 4)
    compiled(x)
    torch.testing.assert_close(model.holder.tensor, x.mean(0))


# Operators of others


@torch.library.custom_op("opaque_test::drawn", mutates_args=())
def drawn(n: int) -> Tensor:
    return torch.rand(n)


@drawn.register_fake
def _(n: int) -> Tensor:
    return torch.empty(n)


@torch.library.custom_op("opaque_test::drawn_like", mutates_args=())
def drawn_like(x: Tensor) -> Tensor:
    return torch.rand_like(x)


@drawn_like.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_operators_of_others_are_no_constants() -> None:
    for function in (
        lambda s, x: x * torch.ops.opaque_test.drawn(4),
        lambda s, x: x * torch.ops.opaque_test.drawn_like(s.ones),
        lambda s, x: torch.ops.opaque_test.drawn_like(x),
    ):
        with pytest.raises(IsolationError, match=r"opaque_test.*no rule.*Fix: "):
            one_step(Of(function))
