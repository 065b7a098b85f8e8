"""Batch rules of users: what they may claim, what the checker finds, and what a run that relies on one says."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile.errors import IsolationError, RegistryError
from dpquant_compile.passes.batch import own_rules
from tests.support.nn_training import check_against_loop

B = 4
LIBRARY = torch.library.Library("dpquant_tests", "FRAGMENT")


def define(name: str, function: Callable[..., Tensor]) -> Any:
    """An operator that is differentiated by the function's own derivative."""
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    LIBRARY.impl(name, _autograd(name, function), "Autograd")
    LIBRARY.impl(name, torch.empty_like, "Meta")
    return getattr(torch.ops.dpquant_tests, name)


def _autograd(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            with torch._C._AutoDispatchBelowAutograd():
                return getattr(torch.ops.dpquant_tests, name)(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(function(x), x, grad)

    return Function.apply


def keeps(call: Any) -> Any:
    """The samples stay where they are."""
    return call.axis_of(call.args[0])


def first(call: Any) -> Any:
    """The samples are rows of dimension 0, and stay there."""
    axis = call.axis_of(call.args[0])
    return axis if axis.dim == 0 else "dimension 0 must be the batch"


def _sometimes(x: Tensor) -> Tensor:
    """Mixes only where a value is large."""
    return torch.where(x.amax() > 100, x - x.mean(0), x)


def _ties(x: Tensor) -> Tensor:
    """Mixes only where two samples are equal."""
    same = (x.unsqueeze(0) == x.unsqueeze(1)).flatten(2).all(2).sum(1)
    return x * same.view(-1, *[1] * (x.dim() - 1))


class MixesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(0, keepdim=True)


def by_place(x: Tensor) -> Tensor:
    return x * torch.arange(x.shape[0]).view(-1, *[1] * (x.dim() - 1))


WRONG: dict[str, tuple[Callable[[Tensor], Tensor], Any, str]] = {
    "mean": (lambda x: x - x.mean(0, keepdim=True), keeps, "wrong: with samples in dim 0"),
    "a_little": (lambda x: x + 1e-9 * x.mean(0, keepdim=True), first, "wrong"),
    "last_dimension": (lambda x: x.softmax(-1), keeps, "wrong: with samples in dim 2"),
    "sometimes": (_sometimes, first, "wrong"),
    "ties": (_ties, first, "wrong"),
    "by_place": (by_place, first, "depend on its place"),
    "large_batches": (lambda x: x if len(x) <= B else x - x.mean(0), first, "depend on how many samples"),
    "counted": (lambda x: x / len(x), first, "depend on how many samples"),
    "drawn": (torch.rand_like, first, "other results each time"),
    "parity": (lambda x: x * (1 + len(x) % 2), first, "depend on how many samples"),
    "alone": (lambda x: x if len(x) > 1 else 2 * x, first, "depend on how many samples"),
    "leaks_nan": (lambda x: x + 0 * x.sum(0), first, "the value inf of sample 0 changes the output"),
    "flipped": (lambda x: x.flip(0), first, "wrong"),
    "neighbours": (lambda x: x + torch.cat([x[1:], x[:1]]), first, "wrong"),
}


@pytest.fixture(autouse=True)
def rules() -> Iterator[None]:
    """Rules that a test registers are gone after it."""
    before = dict(own_rules._RULES)
    yield
    own_rules._RULES.clear()
    own_rules._RULES.update(before)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_found(name: str) -> None:
    function, rule, said = WRONG[name]
    op = define(f"wrong_{name}", function)
    dpq.register_batch_rule(op, rule)
    with pytest.raises(IsolationError, match=said):
        dpq.check_batch_rule(op, (torch.randn(B, 3, 5),))


def test_a_backward_that_mixes_is_found() -> None:
    LIBRARY.define("wrong_backward(Tensor x) -> Tensor")
    LIBRARY.impl("wrong_backward", torch.clone, "CompositeExplicitAutograd")
    LIBRARY.impl("wrong_backward", MixesBackward.apply, "Autograd")
    dpq.register_batch_rule(torch.ops.dpquant_tests.wrong_backward, first)
    with pytest.raises(IsolationError, match="changes the gradients of argument 0 of other samples"):
        dpq.check_batch_rule(torch.ops.dpquant_tests.wrong_backward, (torch.randn(B, 3),))


RIGHT: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "elementwise": (lambda x: torch.tanh(x) * x, keeps),
    "rows": (lambda x: x - x.mean(-1, keepdim=True), first),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_rule_passes(name: str) -> None:
    function, rule = RIGHT[name]
    op = define(f"right_{name}", function)
    dpq.register_batch_rule(op, rule)
    assert dpq.check_batch_rule(op, (torch.randn(B, 3, 6),)) >= 1


class ScalesRows(torch.autograd.Function):
    """x · w, with a gradient of w that may depend on the whole batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, mixes: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.mixes = mixes
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        own = (grad * x).flatten(0, -2).sum(0)
        return grad * w, own * x.abs().amax() if ctx.mixes else own, None


@pytest.mark.parametrize("mixes", [False, True])
def test_the_gradient_of_an_argument_without_samples_is_the_sum_over_them(mixes: bool) -> None:
    name = f"product_{'mixed' if mixes else 'right'}"
    LIBRARY.define(f"{name}(Tensor x, Tensor w) -> Tensor")
    LIBRARY.impl(name, torch.mul, "CompositeExplicitAutograd")
    LIBRARY.impl(name, lambda x, w: ScalesRows.apply(x, w, mixes), "Autograd")
    op = getattr(torch.ops.dpquant_tests, name)

    def rule(call: Any) -> Any:
        x, w = call.args
        axis = call.axis_of(x)
        return axis if call.axis_of(w) is None and axis.dim < x.dim() - 1 else "samples lie in the weight"

    dpq.register_batch_rule(op, rule)
    given = torch.randn(B, 3, 8), torch.randn(8)
    if not mixes:
        assert dpq.check_batch_rule(op, given) == 4  # rows of two sizes, places in a row, and pairs of rows
        return
    with pytest.raises(IsolationError, match="the gradient of argument 1 is not the sum"):
        dpq.check_batch_rule(op, given)


def test_a_rule_that_gives_up_everywhere_is_not_checked() -> None:
    op = define("gives_up", torch.tanh)
    dpq.register_batch_rule(op, lambda call: "never")
    with pytest.raises(IsolationError, match="gives up on these arguments"):
        dpq.check_batch_rule(op, (torch.randn(B, 3),))


def test_registries_refuse_duplicates_and_operators_with_rules() -> None:
    op = define("twice", torch.tanh)
    dpq.register_batch_rule(op, keeps)
    with pytest.raises(RegistryError, match="dpquant_tests::twice has a batch rule already"):
        dpq.register_batch_rule(op, keeps)
    for known in (torch.ops.aten.cat, torch.ops.aten.add.Tensor, torch.ops.dpquant.site):
        with pytest.raises(RegistryError, match="of this library already"):
            dpq.register_batch_rule(known, keeps)
    with pytest.raises(RegistryError, match="is no operator"):
        dpq.register_batch_rule(torch.tanh, keeps)  # type: ignore[arg-type]
    with pytest.raises(RegistryError, match="has no batch rule"):
        dpq.check_batch_rule(torch.ops.aten.cat, (torch.randn(B, 3),))
    LIBRARY.define("writes(Tensor(a!) x) -> ()")
    with pytest.raises(RegistryError, match="writes into its arguments"):
        dpq.register_batch_rule(torch.ops.dpquant_tests.writes, keeps)


# In a model


@torch.library.custom_op("dpquant_tests::scaled", mutates_args=())
def scaled(x: Tensor, factors: Tensor) -> Tensor:
    return x * factors.sin()


@scaled.register_fake
def _(x: Tensor, factors: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, grad: Tensor) -> Any:
    (factors,) = ctx.saved_tensors
    return grad * factors.sin(), None


scaled.register_autograd(_backward, setup_context=_save)


class Scaling(nn.Module):
    """An operator of the user between two linears."""

    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("factors", factors)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = scaled(self.a(x), self.factors)
        result: Tensor = self.b(y)
        return result


@torch.library.custom_op("dpquant_tests::weighted", mutates_args=())
def weighted(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.sin()


@weighted.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save_both(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_both(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return grad * weight.sin(), (grad * x).flatten(0, -2).sum(0) * weight.cos()


weighted.register_autograd(_backward_both, setup_context=_save_both)


class Weighted(Scaling):
    """The operator has a parameter that is trained."""

    def __init__(self) -> None:
        super().__init__(torch.ones(6))
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(weighted(self.a(x), self.weight))
        return result


def private(model: nn.Module) -> Any:
    engine = dpq.PrivacyEngine(accountant="rdp")
    made, optimizer, loader = engine.make_private(
        module=dpq.compile(model, budget=0, inner="eager").train(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(16, 6)), batch_size=B),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        loss_reduction="sum",
    )
    return engine, made, optimizer, loader


def step(model: nn.Module) -> dpq.PrivacyEngine:
    engine, made, optimizer, loader = private(model)
    for (x,) in loader:
        made(x).sum().backward()
        optimizer.step()
    result: dpq.PrivacyEngine = engine
    return result


def test_without_a_rule_the_operator_is_refused_and_the_function_is_named() -> None:
    with pytest.raises(IsolationError, match=r"scaled.*dpquant_compile\.register_batch_rule"):
        step(Scaling(torch.ones(6)))


def test_with_a_rule_it_trains_and_the_statement_says_whose_rule_it_is() -> None:
    dpq.register_batch_rule(scaled, keeps)
    check_against_loop(Scaling(torch.ones(6)), [torch.randn(B, 6)])
    engine = step(Scaling(torch.ones(6)))
    (said,) = (caveat for caveat in engine.ledger.caveats if "register_batch_rule" in caveat)
    assert "dpquant_tests::scaled" in said and said in engine.ledger.statement(1e-5)


@pytest.mark.parametrize("shape", [(B, 6), (B, 3, 6)])
def test_a_parameter_of_the_operator_is_trained(shape: tuple[int, ...]) -> None:
    dpq.register_batch_rule(weighted, keeps)
    check_against_loop(Weighted(), [torch.randn(*shape)])


def test_runs_without_the_operator_have_no_caveat() -> None:
    dpq.register_batch_rule(scaled, keeps)
    assert not [caveat for caveat in step(nn.Linear(6, 3)).ledger.caveats if "register_batch_rule" in caveat]


def test_a_constant_with_a_row_for_each_sample_is_refused() -> None:
    dpq.register_batch_rule(scaled, keeps)

    class ByPlace(Scaling):
        def forward(self, x: Tensor) -> Tensor:
            rows = torch.arange(x.shape[0]).view(-1, 1) * self.factors
            result: Tensor = self.b(scaled(self.a(x), rows))
            return result

    with pytest.raises(IsolationError, match="a constant has a row of its own"):
        step(ByPlace(torch.ones(6)))


@pytest.mark.parametrize("claim", ["the rows are sorted", None])
def test_where_the_rule_gives_up_the_model_is_refused(claim: str | None) -> None:
    dpq.register_batch_rule(scaled, lambda call: claim)
    with pytest.raises(IsolationError, match=claim or "found no samples"):
        step(Scaling(torch.ones(6)))
