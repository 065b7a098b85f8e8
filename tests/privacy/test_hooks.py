"""Hooks and modes around a private model run outside the proved graph, so they are refused."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dpquant_compile.errors import IsolationError
from dpquant_compile.privacy.data.criterion import PrivateCriterion
from tests.support.private import clipped_sums, made_private


def standardise(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (x,) = args
    return ((x - x.mean(0)) / x.std(0),)


def centre(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output - output.mean(0)


def centre_gradient(module: nn.Module, inputs: Any, outputs: tuple[Tensor, ...]) -> None:
    return None


def scale_gradient(module: nn.Module, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(grad / grad.abs().max() for grad in outputs)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward pre-hook": lambda model: model.register_forward_pre_hook(standardise),
    "forward hook": lambda model: model.register_forward_hook(centre),
    "backward hook": lambda model: model.register_full_backward_hook(centre_gradient),
    "backward pre-hook": lambda model: model.register_full_backward_pre_hook(scale_gradient),
    "global forward pre-hook": lambda model: nn_module.register_module_forward_pre_hook(lambda m, args: None),
    "global forward hook": lambda model: nn_module.register_module_forward_hook(lambda m, args, out: None),
    "global backward hook": lambda model: nn_module.register_module_full_backward_hook(lambda m, i, o: None),
    "global backward pre-hook": lambda model: nn_module.register_module_full_backward_pre_hook(lambda m, o: None),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_on_the_root_are_refused_before_a_sum_is_made(kind: str) -> None:
    model, _, engine = made_private(nn.Linear(4, 2), 4)
    x = torch.randn(4, 4)
    handle = HOOKS[kind](model)
    try:
        with pytest.raises(IsolationError, match=rf"the {kind} .*Fix: remove it"):
            clipped_sums(model, [x])
        assert engine.session.step.empty and not engine.session._sums
    finally:
        handle.remove()
    assert clipped_sums(model, [x])  # without it nothing is in the way


@pytest.mark.parametrize("kind", ["forward pre-hook", "global forward hook"])
def test_hooks_are_refused_when_a_model_is_made_private(kind: str) -> None:
    original = nn.Linear(4, 2)
    handle = HOOKS[kind](original)
    try:
        with pytest.raises(IsolationError, match=kind):
            made_private(original, 4)
    finally:
        handle.remove()


def test_a_hook_that_comes_between_forward_and_backward_is_refused() -> None:
    model, _, engine = made_private(nn.Linear(4, 2), 4)
    loss = model(torch.randn(4, 4)).sum()
    handle = model.register_full_backward_hook(centre_gradient)
    with pytest.raises(IsolationError, match="backward hook"):
        loss.backward()
    handle.remove()
    assert engine.session.step.empty and not engine.session._sums


def test_evaluation_keeps_its_hooks() -> None:
    model, _, _ = made_private(nn.Linear(4, 2), 4)
    seen: list[int] = []
    handle = model.register_forward_hook(lambda m, args, out: seen.append(len(out)))
    model.eval()
    model(torch.randn(3, 4))
    handle.remove()
    assert seen == [3]


def test_hooks_on_the_private_criterion_are_refused() -> None:
    criterion = PrivateCriterion(nn.CrossEntropyLoss())
    handle = criterion.register_forward_hook(lambda m, args, loss: loss * args[0].abs().max())
    outputs, target = torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(IsolationError, match=r"forward hook.*whenever the criterion is called"):
        criterion(outputs, target)
    handle.remove()
    assert criterion(outputs, target) > 0


class CentringDispatch(TorchDispatchMode):
    """Mixes samples under every operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out - out.mean(0) if isinstance(out, Tensor) and out.shape == (4, 2) else out


class CentringFunction(TorchFunctionMode):
    """Mixes samples under every function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out - out.mean(0) if isinstance(out, Tensor) and out.shape == (4, 2) else out


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "CentringDispatch": CentringDispatch,
    "CentringFunction": CentringFunction,
    "saved_tensors_hooks": lambda: saved_tensors_hooks(lambda t: t - t.mean(0), lambda t: t),
    "torch.autograd.graph.saved_tensors_hooks": save_on_cpu,
}


@pytest.mark.parametrize("built", [False, True], ids=["first forward", "later forward"])
@pytest.mark.parametrize("name", MODES)
def test_modes_are_refused_and_leave_nothing_in_the_program(name: str, built: bool) -> None:
    x = torch.randn(4, 4)
    model, _, engine = made_private(nn.Linear(4, 2), 4)
    expected = clipped_sums(made_private(model.internals().original, 4)[0], [x])
    if built:
        clipped_sums(model, [x])
        engine.session.drop_sums()
    with MODES[name](), pytest.raises(IsolationError, match=rf"{name}' is active.*Fix: leave it"):
        model(x)
    assert engine.session.step.empty
    loss = model(x).sum()
    if name != "CentringFunction":  # torch leaves such a mode by itself while loss.backward() runs
        with MODES[name](), pytest.raises(IsolationError, match="is active around the private model"):
            loss.backward()
    engine.session.drop_sums()
    got = clipped_sums(model, [x])
    assert all(torch.equal(got[key], value) for key, value in expected.items())


def test_modes_around_the_criterion_are_refused() -> None:
    criterion = PrivateCriterion(nn.CrossEntropyLoss())
    with save_on_cpu(), pytest.raises(IsolationError, match="saved_tensors_hooks"):
        criterion(torch.randn(4, 3), torch.zeros(4, dtype=torch.int64))


def test_a_default_device_and_anomaly_detection_are_no_obstacle() -> None:
    x = torch.randn(4, 4)
    original = nn.Linear(4, 2)
    expected = clipped_sums(made_private(original, 4)[0], [x])
    with torch.device("cpu"), torch.autograd.set_detect_anomaly(True):
        model = made_private(original, 4)[0]
        got = clipped_sums(model, [x])
    again = clipped_sums(model, [x])
    assert all(torch.equal(got[key], value) and torch.equal(again[key], value) for key, value in expected.items())
