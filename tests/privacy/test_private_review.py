"""Faults that reviewers found in private training, each with the way it showed."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import dpquant_compile as dpq
from dpquant_compile.errors import IsolationError, PrivacySpecError, PrivateTrainingError
from tests.support.private import assert_close, clipped_sums, made_private, reference_sums


class Net(nn.Module):
    """A linear layer and more parameters; `body` says what forward does with them."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.fc = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.kernel = nn.Parameter(torch.randn(8, 1, 3))
        self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True).eval()

    def train(self, mode: bool = True) -> "Net":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def engine_and_parts(**options: Any) -> tuple[dpq.PrivacyEngine, Any, Any, Any, Any]:
    torch.manual_seed(0)
    model = dpq.compile(nn.Linear(4, 3), budget=0, backend="reference").train()
    engine = dpq.PrivacyEngine(accountant="rdp", **options.pop("engine", {}))
    data = TensorDataset(torch.randn(40, 4), torch.randint(3, (40,)))
    loader = options.pop("loader", None) or DataLoader(data, batch_size=8)
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=loader,
        **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, "max_physical_batch_size": 16, **options},
    )
    return engine, *made


def no_grad_layer(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = net.fc(x)
    return F.linear(h, net.weight)


def no_grad_scale(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = net.weight.norm()
    return F.linear(net.fc(x), net.weight / scale)


BODIES = {
    "no_grad layer": no_grad_layer,
    "no_grad scale": no_grad_scale,
    "running statistics": lambda net, x: net.norm(net.fc(x)[:, :, None])[:, :, 0],
    "comparison": lambda net, x: torch.where(net.fc(x) > net.weight[0], net.fc(x), 0.5 * x),
    "conv of a view": lambda net, x: F.conv1d(net.fc(x)[:, None], net.kernel[:4], padding="same").mean(2),
    "detached": lambda net, x: F.linear(net.fc(x), net.weight * net.weight.detach()),
}


@pytest.mark.parametrize("name", BODIES)
def test_gradients_are_autograds(name: str) -> None:
    model, x = Net(BODIES[name]), torch.randn(5, 4)
    compiled, _, _ = made_private(model, 6)
    assert_close(clipped_sums(compiled, [x]), reference_sums(model, [x]))


def test_a_random_draw_of_a_parameter_is_refused() -> None:
    compiled, _, _ = made_private(Net(lambda net, x: F.linear(net.fc(x), F.dropout(net.weight, 0.5))), 4)
    with pytest.raises(IsolationError, match=r"dropout.*random numbers.*share.*Fix: draw a row for each sample"):
        compiled(torch.randn(4, 4))


@pytest.mark.parametrize(
    "draw",
    [
        lambda y: y * torch.rand(1, 1).sign(),
        lambda y: y * torch.empty([1] * y.ndim).bernoulli_(0.5).div_(0.5),  # stochastic depth by batch
        lambda y: y + torch.randn(4),
        lambda y: y + torch.rand(len(y)).mean(),
        lambda y: y + torch.rand(len(y), 4)[0],
    ],
    ids=["a number", "stochastic depth", "a row", "a mean", "one sample's"],
)
def test_random_numbers_that_samples_share_are_refused(draw: Any) -> None:
    """They are drawn anew in each micro-batch: a record more moves others to another one, and so to another draw."""
    compiled, _, _ = made_private(Net(lambda net, x: draw(net.fc(x))), 4)
    with pytest.raises(IsolationError, match=r"random|batch"):
        compiled(torch.randn(4, 4))


@pytest.mark.parametrize(
    "draw",
    [
        lambda y: y * torch.rand(len(y), 1),
        lambda y: y + torch.randn_like(y),
        lambda y: y * torch.empty(len(y), 1).bernoulli_(0.5),
        lambda y: F.dropout(y, 0.5),
    ],
    ids=["rows", "like", "stochastic depth by row", "dropout"],
)
def test_random_numbers_of_each_sample_are_taken(draw: Any) -> None:
    compiled, _, _ = made_private(Net(lambda net, x: draw(net.fc(x))), 4)
    assert clipped_sums(compiled, [torch.randn(4, 4)])


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_dropout_has_one_mask(inner: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Dropout(0.5))
    compiled, _, _ = made_private(model, 4, bound=1e6, inner=inner)
    out = compiled(torch.eye(8)[:4])
    out.sum().backward()
    # A row of the weight's gradient counts the samples in which its unit was kept.
    kept = (out.detach() != 0).float() * 2
    torch.testing.assert_close(model[0].weight.summed_grad[:, :4], kept.t())


@pytest.mark.parametrize(
    "body",
    [
        lambda net, x: torch.native_group_norm(net.fc(x), None, None, 1, x.shape[0] * 4, 1, 1, 1e-5)[0],
        lambda net, x: net.fc(x).scatter(1, torch.zeros(1, 2, dtype=torch.int64), 0.0),
    ],
    ids=["group norm over the batch", "scatter into one row"],
)
def test_mixing_is_refused(body: Any) -> None:
    compiled, _, _ = made_private(Net(body), 4)
    with pytest.raises(IsolationError):
        compiled(torch.randn(4, 4))


def test_an_input_made_of_the_batch_is_refused() -> None:
    class Context(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, context: Tensor) -> Tensor:
            return self.fc(x) + context

    compiled, _, _ = made_private(Context(), 5)
    x = torch.randn(5, 4)
    with pytest.raises(PrivateTrainingError, match=r"'context'.*without a row per sample"):
        compiled(x, x.mean(0))


def test_bounds_go_by_parameter() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(3))
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    compiled, _, _ = made_private(Unused(), 4, clipping="per_layer", bound=[100.0, 0.1, 0.01])
    (10 * compiled(10 * torch.randn(1, 4))).sum().backward()
    norms = [float(p.summed_grad.norm()) for p in (compiled.a.weight, compiled.b.weight)]
    assert norms == pytest.approx([0.1, 0.01], rel=1e-4)


def test_an_old_optimizer_cannot_release_new_sums() -> None:
    _, model, old, _, _ = engine_and_parts()
    data = DataLoader(TensorDataset(torch.randn(40, 4), torch.randint(3, (40,))), batch_size=8)
    dpq.PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=data,
        noise_multiplier=1.0,
        max_grad_norm=1000.0,
    )
    model(torch.randn(4, 4)).sum().backward()
    with pytest.raises(PrivateTrainingError, match="earlier make_private"):
        old.step()


def test_steps_that_no_sampling_drew_are_charged_in_full() -> None:
    engine, model, optimizer, criterion, _ = engine_and_parts()
    criterion(model(torch.randn(4, 4)), torch.zeros(4, dtype=torch.int64)).backward()
    optimizer.step()
    assert [(e.q, e.steps) for e in engine.ledger.entries] == [(1.0, 1)]
    engine, model, optimizer, criterion, loader = engine_and_parts(poisson_sampling=False)
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    assert [(e.q, e.steps) for e in engine.ledger.entries] == [(1.0, 5)]
    assert "not Poisson samples" in engine.ledger.statement(1e-5)


def test_a_gradient_from_outside_is_seen_after_a_first_step() -> None:
    _, model, optimizer, _, _ = engine_and_parts()
    optimizer.step()
    model.weight.square().sum().backward()
    with pytest.raises(PrivateTrainingError, match=r"eval\(\).*zero_grad"):
        optimizer.step()


def test_a_sampler_of_a_part_is_refused() -> None:
    data = TensorDataset(torch.randn(40, 4), torch.randint(3, (40,)))
    with pytest.raises(PrivacySpecError, match=r"SubsetRandomSampler.*Subset"):
        engine_and_parts(loader=DataLoader(data, batch_size=8, sampler=SubsetRandomSampler(range(20))))


@pytest.mark.parametrize(("samples", "batch"), [(49, 1), (98, 2), (412, 4)])
def test_the_divisor_is_not_rounded_down(samples: int, batch: int) -> None:
    data = TensorDataset(torch.randn(samples, 4), torch.randint(3, (samples,)))
    _, _, optimizer, _, _ = engine_and_parts(loader=DataLoader(data, batch_size=batch))
    assert optimizer.expected_batch_size == batch


def test_the_step_is_the_same_in_eval() -> None:
    _, model, optimizer, criterion, _ = engine_and_parts()
    criterion(model(torch.randn(4, 4)), torch.zeros(4, dtype=torch.int64)).backward()
    optimizer.step()
    step = model.step
    model.eval()
    assert model.step == step == 1


def test_a_resumed_run_that_departs_is_stopped(tmp_path: Path) -> None:
    def run(state: Any, rate: float, epochs: int, replay: bool = True) -> tuple[dpq.PrivacyEngine, Any]:
        engine, model, optimizer, criterion, loader = engine_and_parts(engine={"ledger_path": tmp_path / "ledger"})
        saved = None
        with engine:
            if state is not None:
                engine.load_state_dict(state, replay=replay)
            optimizer.param_groups[0]["lr"] = rate
            for _ in range(epochs):
                for x, y in loader:
                    optimizer.zero_grad()
                    criterion(model(x), y).backward()
                    optimizer.step()
                saved = saved or engine.state_dict()
        return engine, saved

    first, state = run(None, 0.1, 2)
    steps = sum(e.steps for e in first.ledger.entries)
    again, _ = run(state, 0.1, 1)
    assert sum(e.steps for e in again.ledger.entries) == steps  # the same releases: nothing new
    with pytest.raises(PrivateTrainingError, match=r"does not repeat.*replay=False"):
        run(state, 0.5, 1)
    other, _ = run(state, 0.5, 1, replay=False)
    assert sum(e.steps for e in other.ledger.entries) == steps + steps // 2
