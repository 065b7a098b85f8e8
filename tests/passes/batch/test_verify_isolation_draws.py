"""Random numbers are a sample's own only where each element or row is drawn independently of the others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile.errors import IsolationError

B = 4


class Of(nn.Module):
    """A function between two linears."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.function = nn.Linear(6, 6), nn.Linear(6, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x)))


def run(function: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor], Any]:
    """Outputs, clipped sums and session of a first private forward and backward, with draws of one fixed secret."""
    compiled = dpq.compile(Of(function), budget=0, backend="reference", inner="eager").train()
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
    output = made(x)
    output.backward(weights)
    sums = {name: parameter.summed_grad.clone() for name, parameter in made.named_parameters()}
    return output.detach(), sums, engine.session


def rows() -> Tensor:
    return torch.randn(B, 6, generator=torch.Generator().manual_seed(1))


def weights() -> Tensor:
    return torch.randn(B, 3, generator=torch.Generator().manual_seed(2))


def own(x: Tensor, n: int = 1) -> Tensor:
    return torch.empty(x.shape[0], n)


OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "rand": lambda x: x * torch.rand(x.shape[0], 1),
    "randn": lambda x: x + torch.randn(x.shape[0], 6),
    "randint": lambda x: x * torch.randint(0, 3, (x.shape[0], 1)),
    "rand_like": lambda x: x + torch.rand_like(x) + torch.randn_like(x) + torch.randint_like(x, 3),
    "normal of numbers": lambda x: x + torch.normal(0.0, 1.0, (x.shape[0], 6)),
    "fills": lambda x: x * own(x).bernoulli_(0.5) + own(x).uniform_() + own(x).normal_() + own(x).exponential_(),
    "more fills": lambda x: x * own(x).log_normal_() + own(x).cauchy_() + own(x).geometric_(0.5),
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x)),
    "bernoulli_ by sample": lambda x: x * torch.ops.aten.bernoulli_.Tensor(own(x, 6), torch.sigmoid(x)),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "argsort": lambda x: torch.gather(x, 1, torch.rand(x.shape[0], 6).argsort(1)),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "normal": lambda x: torch.normal(x, 1.0),
    "normal, both": lambda x: x + torch.normal(x.detach(), x.detach().exp()) + torch.normal(0.0, x.detach().exp()),
    "poisson": lambda x: x + torch.poisson(torch.exp(x)),
    "multinomial": lambda x: x * torch.multinomial(torch.softmax(x, 1), 1).float(),
    "multinomial, more": lambda x: torch.gather(x, 1, torch.multinomial(torch.softmax(x, 1), 6)),
    "multinomial of constants": lambda x: torch.gather(x, 1, torch.multinomial(torch.ones(x.shape[0], 6), 6)),
}


@pytest.mark.parametrize("name", OWN)
def test_independent_draws_are_the_samples_own(name: str) -> None:
    """Another sample, whose outputs weigh nothing, changes neither the others' outputs nor the sums."""
    # How much of a stream some draws take depends on values: what comes after has other draws, as random.
    changed = B - 1 if name in ("poisson", "rrelu") else 2
    x, w = rows(), weights()
    w[changed] = 0
    neighbour = x.clone()
    neighbour[changed] = 5 * x[changed] + 1
    output, sums, session = run(OWN[name], x, w)
    other, others, _ = run(OWN[name], neighbour, w)
    kept = [i for i in range(B) if i != changed]
    torch.testing.assert_close(other[kept], output[kept], rtol=1e-6, atol=1e-6)
    for parameter, total in sums.items():
        torch.testing.assert_close(others[parameter], total, rtol=1e-5, atol=1e-6)
    assert any(total.any() for total in sums.values())
    assert session.draws_random


SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    "randperm": lambda x: x * torch.randperm(x.shape[0]).float()[:, None],
    "randperm of features": lambda x: x[:, torch.randperm(6)],
    "multinomial without replacement": lambda x: (
        x * torch.multinomial(torch.ones(2 * x.shape[0]), x.shape[0], replacement=False).float()[:, None]
    ),
    "multinomial of places": lambda x: x * torch.multinomial(torch.ones(x.shape[0]), x.shape[0]).float()[:, None],
    "multinomial across": lambda x: x * torch.multinomial(torch.ones(2, x.shape[0]), x.shape[0])[0].float()[:, None],
    "multinomial over the batch": lambda x: x * torch.multinomial(torch.softmax(x, 1).t(), 1).float()[0],
    "one mask": lambda x: x * torch.rand(6),
    "one number": lambda x: x * torch.rand(1),
    "one poisson": lambda x: x * torch.poisson(torch.ones(6)),
    "one normal": lambda x: x * torch.normal(torch.ones(6), 1.0),
    "dirichlet of rows": lambda x: x * torch._sample_dirichlet(torch.ones(6, x.shape[0]))[0][:, None],
    "bernoulli_ by place": lambda x: (
        x * torch.ops.aten.bernoulli_.Tensor(own(x, x.shape[0]), torch.sigmoid(x[:, 0])).mean(1)[:, None]
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_draws_that_samples_share_are_refused(name: str) -> None:
    with pytest.raises(IsolationError, match=r"node '\w+' \(test_verify_isolation_draws.py:\d+: .*Fix: "):
        run(SHARED[name], rows(), weights())


def test_what_no_list_names_is_drawn_together() -> None:
    with pytest.raises(IsolationError, match=r"drawn together.*draw a row for each sample"):
        run(SHARED["randperm"], rows(), weights())
