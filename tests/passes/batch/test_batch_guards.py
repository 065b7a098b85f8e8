"""batch_guards: what a capture says of other batch sizes. Decisions of the model bind it, those of operators do not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpquant_compile as dpq
from dpquant_compile.passes.capture import capture_dynamo

X = torch.linspace(-1, 1, 12).view(3, 4)


class Called(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        return self.function(self.fc(x), *others)


def threshold(y: Tensor) -> Tensor:
    return y.relu() if y.shape[0] < 16 else y


def divisible(y: Tensor) -> Tensor:
    return y.relu() if y.shape[0] % 3 == 0 else y


def one_size(y: Tensor) -> Tensor:
    return y.relu() if y.shape[0] == 300 else y


def one_product(y: Tensor) -> Tensor:
    return y.relu() if 4 * y.shape[0] == 1200 else y


def counted(y: Tensor) -> Tensor:
    for i in range(y.shape[0]):
        y = y + i
    return y


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (threshold, "return y.relu() if y.shape[0] < 16 else y"),
        (divisible, "return y.relu() if y.shape[0] % 3 == 0 else y"),
        (one_size, "return y.relu() if y.shape[0] == 300 else y"),
        (one_product, "return y.relu() if 4 * y.shape[0] == 1200 else y"),
        (counted, "for i in range(y.shape[0]):"),
    ],
    ids=["threshold", "divisible", "one size", "one product", "counted"],
)
def test_a_decision_of_the_model_binds_the_graph_and_is_named(function: Any, line: str) -> None:
    _, guards = capture_dynamo(Called(function), (X,), {})
    assert guards.bound is not None and line in guards.bound and "test_batch_guards.py:" in guards.bound


def merged(y: Tensor) -> Tensor:
    return y.transpose(0, 1).reshape(-1, 2).sum() + y


def two_batches(y: Tensor, mask: Tensor) -> Tensor:
    heads = y.view(y.shape[0], 2, 2) * mask[:, :1, None]
    return heads.reshape(mask.shape[0], -1) if mask.shape[0] == y.shape[0] else y


@pytest.mark.parametrize("function", [merged, two_batches])
def test_decisions_of_operators_and_equal_batches_do_not_bind_it(function: Any) -> None:
    others = (torch.ones(3, 4),) if function is two_batches else ()
    gm, guards = capture_dynamo(Called(function).eval(), (X, *others), {})
    assert guards.bound is None
    model, wide = Called(function), torch.randn(17, 4)
    gm = capture_dynamo(model, (X, *others), {})[0]
    more = (torch.ones(17, 4),) if others else ()
    torch.testing.assert_close(gm(wide, *more), model(wide, *more))


def test_an_input_of_another_size_is_no_batch() -> None:
    _, guards = capture_dynamo(Called(lambda y, row: y + row), (X, torch.ones(1, 4)), {})
    assert guards.bound is None
    _, guards = capture_dynamo(Called(lambda y: y), (torch.ones(1, 4),), {})
    assert guards.bound is not None, "Dynamo specialises on one sample"


def test_sizes_at_which_an_operator_decides_otherwise_are_given() -> None:
    _, guards = capture_dynamo(Called(merged), (X,), {})
    assert 2 in guards.doubtful


def parts(y: Tensor) -> Tensor:
    with torch.no_grad():  # which torch.fx does not capture
        y = y * 2
    return torch.cat([part + i for i, part in enumerate(torch.split(y, 100))])


def clamped(y: Tensor) -> Tensor:
    with torch.no_grad():
        y = y * 2
    return y if y[:100].shape[0] == y.shape[0] else y.relu()


@pytest.mark.parametrize("function", [parts, clamped])
def test_a_decision_at_a_size_that_is_too_large_to_try_binds_the_graph(function: Any) -> None:
    model = Called(function).eval()
    compiled, wide = dpq.compile(model, budget=0, inner="eager").eval(), torch.randn(130, 4)
    torch.testing.assert_close(compiled(X), model(X))
    torch.testing.assert_close(compiled(wide), model(wide))


def test_a_guard_with_a_remainder_by_zero_does_not_hold() -> None:
    def thirds(y: Tensor) -> Tensor:
        return torch.cat(torch.chunk(y, 3)) * 2

    _, guards = capture_dynamo(Called(thirds), (X,), {})
    assert guards.bound is not None or guards.doubtful
