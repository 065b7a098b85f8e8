"""Whether a model trains privately like a loop over samples of the plain model, with the same random numbers."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from tests.support.nn_walk import Case
from tests.support.private import SECRET, assert_close, factors, secret_bits

__all__ = ["check_against_loop", "check_training", "model_of"]

BATCH, BOUND = 3, 0.5


class Between(nn.Module):
    """Modules beside each other between two trained layers."""

    def __init__(self, inner: Sequence[nn.Module], front: nn.Module, back: nn.Module, flat: bool = True) -> None:
        super().__init__()
        self.front, self.inner, self.back, self.flat = front, nn.ModuleList(inner), back, flat

    def forward(self, x: Tensor) -> Any:
        y = self.front(x)
        if not self.flat:
            return self.inner[0](y)
        return self.back(torch.cat([inner(y).flatten(1) for inner in self.inner], 1))


class _DrawnAsTraced(TorchDispatchMode):
    """Draws as the operators do into which a private program decomposes random ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.rrelu_with_noise.default:
            x, noise, lower, upper = args[:4]
            drawn = torch.empty_like(x).uniform_(lower, upper)
            noise.copy_(torch.where(x <= 0, drawn, 1.0))
            return torch.where(x <= 0, x * drawn, x)
        if func is torch.ops.aten.exponential_.default:
            return args[0].copy_(torch._refs.exponential(args[0]))  # type: ignore[attr-defined]
        return func(*args, **(kwargs or {}))


def model_of(cases: Sequence[Case]) -> tuple[nn.Module, Tensor]:
    """A model of some cases of one kind, in train(), and a batch for it."""
    case = cases[0]
    torch.manual_seed(0)
    x = torch.randint(case.tokens, (BATCH, *case.shape)) if case.tokens else torch.randn(BATCH, *case.shape)
    front = nn.Identity() if case.tokens else nn.Linear(case.shape[-1], case.shape[-1])
    if case.loss is not None:
        return front, x
    inner = [case.build() for case in cases]
    if case.refused:
        return Between(inner, front, nn.Identity(), flat=False).train(), x
    width = sum(module(front(x)).flatten(1).shape[1] for module in inner)
    return Between(inner, front, nn.Linear(width, 2)).train(), x


def check_training(cases: Sequence[Case]) -> None:
    """One private backward of a model of these cases gives the clipped sum of a loop over samples."""
    model, x = model_of(cases)
    (loss,) = {case.loss for case in cases}
    criterion = cases[0].build() if loss is not None else None
    check_against_loop(model, [x], criterion=criterion, arguments=loss, drawn=cases[0].drawn)


def check_against_loop(
    model: nn.Module,
    inputs: Sequence[Tensor],
    *,
    criterion: Any = None,
    arguments: Any = None,
    drawn: bool = False,
    bound: float = BOUND,
    tolerance: float = 2e-5,
) -> dpq.CompiledModule:
    """Compare one private backward with plain autograd, one sample at a time; returns the compiled model.

    The loss is a fixed random weight for each output, or a criterion of what `arguments` makes of outputs and classes.
    Where the model draws random numbers, each gradient is taken of the whole batch with the draws of the private run,
    from the outputs of one sample.
    """
    plain, size = copy.deepcopy(model), len(inputs[0])
    compiled = dpq.compile(model, budget=0, backend="reference", inner="eager").train()
    engine = dpq.PrivacyEngine(accountant="rdp")
    extra: dict[str, Any] = {"loss_reduction": "sum"} if criterion is None else {"criterion": criterion}
    compiled, _, *rest = engine.make_private(
        module=compiled,
        optimizer=torch.optim.SGD([p for p in compiled.parameters() if p.requires_grad], lr=0.0),
        data_loader=DataLoader(TensorDataset(torch.zeros(4 * size, 1)), batch_size=size),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        max_physical_batch_size=size,
        noise_generator=torch.Generator().manual_seed(SECRET),
        **extra,
    )
    classes = torch.arange(size) % 4
    output = compiled(*inputs)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(5))
    loss = (output * weights).sum() if criterion is None else rest[0](*arguments(output, classes))
    loss.backward()
    assert engine.session is not None and (engine.session.draws_random or not drawn)
    held = ((name, getattr(p, "summed_grad", None)) for name, p in compiled.named_parameters())
    sums = {name: value.clone() for name, value in held if value is not None}
    trained = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    totals = {name: torch.zeros_like(p) for name, p in trained.items()}
    for i in range(size):
        one = slice(i, i + 1)
        if drawn:
            with secret_bits().random_operators(0, 1, torch.device("cpu")), _DrawnAsTraced():
                output = plain(*inputs)[one]
        else:
            output = plain(*(x[one] for x in inputs))
        loss = (output * weights[one]).sum() if criterion is None else criterion(*arguments(output, classes[one]))
        grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        own = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(trained.items(), grads, strict=True)}
        for name, factor in factors(own, bound, "flat").items():
            totals[name] += factor * own[name]
    assert any(total.any() for total in totals.values()), "a loss without gradients shows nothing"
    assert_close(sums, totals, tolerance)
    return compiled
