"""The joint graph of a private model: gradients are those of autograd, and random numbers belong to one sample each."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpquant_compile.errors import IsolationError, PerSampleGradientError
from dpquant_compile.privacy.clipping import joint_graph
from tests.support.heavy import few
from tests.support.private import assert_close, clipped_sums, made_private, reference_sums


@pytest.mark.parametrize("inner", few(["eager", "inductor"], "eager"))
def test_two_draws_stay_two_draws(inner: str) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.fc(x)
            return h + torch.randn_like(h) - torch.randn_like(h)

    model, _, _ = made_private(Noisy(), 3, backend="reference", inner=inner)
    x = torch.randn(3, 4)
    assert (model(x) - model.fc(x)).abs().max() > 0.1


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


@pytest.mark.parametrize(
    "body", [lambda net, x: net.fc(x) @ (net.weight + 1), lambda net, x: net.fc(x @ (net.weight + 1))]
)
def test_gradients_that_vmap_would_hold_are_limited(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a parameter that is used once; a layer with a rule of its own holds none."""
    monkeypatch.setattr(joint_graph, "_LARGEST", 4 * 3 * 16)
    x = torch.randn(3, 4)
    made_private(Net(body), 3)[0](x)
    compiled, _, _ = made_private(Net(body), 4)
    with pytest.raises(PerSampleGradientError, match=r"'weight'.*matmul.*batch of 4.*max_physical_batch_size"):
        compiled(x)


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


@pytest.mark.parametrize("inner", few(["eager", "inductor"], "eager"))
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
