"""A small model made private with a real loader, its training loop, and its clipped sums by hand."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from tests.support import models
from tests.support.private import coarsest
from tests.support.reused import as_new

FEATURES, CLASSES = 6, 3


class Net(nn.Module):
    """A small net for the loops; [B, 6] to 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 8)
        self.norm = nn.LayerNorm(8)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.norm(self.body(x))))


class Run(NamedTuple):
    """What a training loop works with."""

    model: Any
    optimizer: Any
    criterion: Any
    loader: Any
    engine: dpq.PrivacyEngine


def dataset(n: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(n, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (n,), generator=generator))


def plain_loader(data: Any = None, batch: int = 6, seed: int = 0) -> DataLoader[Any]:
    """The Poisson sampler draws from the loader's generator, so its seed fixes the batches."""
    return DataLoader(
        dataset(24) if data is None else data, batch_size=batch, generator=torch.Generator().manual_seed(seed)
    )


def compiled_net(model: nn.Module | None = None, **options: Any) -> dpq.CompiledModule:
    def compiled(original: nn.Module) -> dpq.CompiledModule:
        return dpq.compile(original, budget=0, **{"backend": "reference", **coarsest(options)}).train()

    if model is not None:
        return compiled(model)
    return as_new(("loops", repr(sorted(options.items()))), lambda: models.seeded(Net).train(), compiled)


def made(
    model: nn.Module | None = None,
    *,
    data: TensorDataset | None = None,
    n: int = 24,
    batch: int = 6,
    sampler: int = 0,
    noise: int = 0,
    optimizer: Callable[[Any], Any] = lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    criterion: Any = None,
    compile_options: dict[str, Any] | None = None,
    policy: Any = "none",
    engine: dpq.PrivacyEngine | None = None,
    **options: Any,
) -> Run:
    """A model made private with a real loader; `sampler` and `noise` are the seeds of both."""
    compiled = compiled_net(model, **(compile_options or {}))
    engine = engine or dpq.PrivacyEngine(accountant="rdp")
    if not engine.secure_mode:
        options = {"noise_generator": torch.Generator().manual_seed(noise), **options}
    private = engine.make_private(
        module=compiled,
        optimizer=optimizer(compiled.parameters()),
        criterion=criterion or nn.CrossEntropyLoss(),
        data_loader=plain_loader(dataset(n) if data is None else data, batch, sampler),
        **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options},
    )
    compiled.set_policy(policy)
    return Run(*private, engine)


def train(run: Run, epochs: int = 1) -> int:
    """The loop of the contract; returns the number of micro-batches."""
    count = 0
    for _ in range(epochs):
        for x, y in run.loader:
            run.optimizer.zero_grad()
            run.criterion(run.model(x), y).backward()
            run.optimizer.step()
            count += 1
    return count


def sums_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.summed_grad.clone() for n, p in model.named_parameters() if p.summed_grad is not None}


def logical_sums(run: Run, epochs: int = 1) -> list[dict[str, Tensor]]:
    """The clipped sums of every logical batch, as they lie in the parameters just before its step."""
    found = []
    for _ in range(epochs):
        for x, y in run.loader:
            run.optimizer.zero_grad()
            run.criterion(run.model(x), y).backward()
            if run.engine.session.micro.last:  # type: ignore[union-attr]
                found.append(sums_of(run.model))
            run.optimizer.step()
    return found


def by_hand(model: nn.Module, samples: Any, criterion: nn.Module, bound: float = 1.0) -> dict[str, Tensor]:
    """Σ of clipped gradients by plain autograd, one sample at a time; parameters without a gradient have zeros."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    totals = {name: torch.zeros_like(p) for name, p in trainable.items()}
    for x, y in samples:
        loss = criterion(model(x[None]), y[None]).sum()
        grads = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
        own = {n: g for n, g in zip(trainable, grads, strict=True) if g is not None}
        norm = float(torch.stack([g.norm() for g in own.values()]).norm())
        for name, grad in own.items():
            totals[name] += grad * min(1.0, bound / max(norm, 1e-30))
    return totals


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def still(parameters: Any) -> torch.optim.Optimizer:
    """Steps that change nothing, so that two runs see the same parameters to the last bit."""
    return torch.optim.SGD(parameters, lr=0.0)
