"""Losses reach the program as the gradient of a sum over samples, from the criterion alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile.errors import PrivacySpecError, PrivateTrainingError
from dpquant_compile.privacy.clipping.program import PrivateProgram
from tests.support.private_loops import CLASSES, FEATURES, Net, made, sums_of, train

BOUND = 0.5


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(32, FEATURES, generator=generator)[:size], torch.arange(32)[:size] % CLASSES


@pytest.fixture
def tangents(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The gradients of outputs that programs were given."""
    seen: list[Tensor] = []
    run = PrivateProgram.run_backward

    def watched(self: Any, saved: Any, given: list[Tensor]) -> Any:
        seen.extend(grad.clone() for grad in given)
        return run(self, saved, given)

    monkeypatch.setattr(PrivateProgram, "run_backward", watched)
    return seen


# The size of a batch


@pytest.mark.parametrize("reduction", ["mean", "sum", "batchmean"])
def test_a_samples_gradient_has_the_same_bits_in_batches_of_all_sizes(reduction: str, tangents: list[Tensor]) -> None:
    loss: Any = nn.CrossEntropyLoss(reduction=reduction)
    if reduction == "batchmean":
        loss = nn.CrossEntropyLoss()
        loss.reduction = "batchmean"
    run = made(criterion=loss, n=64, batch=32, max_physical_batch_size=32, policy="all")
    run.criterion.verify = False
    for size in range(1, 33):
        x, y = batch(size)
        run.criterion(run.model(x), y).backward()
        run.engine.session.drop_sums()
    assert len(tangents) == 32
    for size, given in enumerate(tangents, 1):
        assert torch.equal(given[:size], tangents[-1][:size]), f"{size} samples"


def build() -> nn.Module:
    """Deep enough for a last bit to grow; the last layer is in full precision."""
    layers: list[nn.Module] = []
    for i in range(6):
        layers += [nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int4", "int8", "luq", "bfloat16"])
def test_one_more_sample_leaves_the_others_gradients_as_they_are(recipe: str) -> None:
    torch.manual_seed(0)
    numerics: dict[str, Any] = {"high": recipe} if recipe == "bfloat16" else {"recipe": recipe}
    model = dpq.compile(build(), budget=0.5, inner="eager", **numerics).train()
    engine = dpq.PrivacyEngine(accountant="rdp")
    model, _, criterion, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(torch.zeros(192, 1)), batch_size=48),
        noise_multiplier=0.0,
        max_grad_norm=BOUND,
        max_physical_batch_size=48,
        noise_generator=torch.Generator().manual_seed(7),
    )
    model.set_policy("none" if recipe == "bfloat16" else [site.name for site in model.sites][:-1])

    def clipped(x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
        model.sample_ids = ids
        criterion(model(x), y).backward()
        sums = torch.cat([total.double().flatten() for total in sums_of(model).values()])
        engine.session.drop_sums()
        return sums

    for seed, size in enumerate((20, 27, 38, 46)):
        generator = torch.Generator().manual_seed(1000 + seed)
        x = torch.randn(size + 1, 3, 12, 12, generator=generator)
        y, ids = torch.randint(0, 10, (size + 1,), generator=generator), torch.arange(size + 1)
        whole, rest, one = (clipped(x[rows], y[rows], ids[rows]) for rows in (ids, ids[:-1], ids[-1:]))
        assert float((whole - rest - one).norm()) <= 2e-6 * BOUND


def test_a_mean_that_the_loop_takes_is_refused_in_low_precision() -> None:
    def private(budget: float, high: str = "float32", **options: Any) -> dpq.PrivacyEngine:
        engine = dpq.PrivacyEngine(accountant="rdp")
        model = dpq.compile(Net(), budget=budget, high=high, inner="eager").train()
        engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(*batch(32)), batch_size=8),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            **options,
        )
        return engine

    for options in ({}, {"criterion": nn.CrossEntropyLoss(reduction="none")}):
        with pytest.raises(PrivacySpecError, match=r"last bit.*Fix: give the loss to make_private as criterion="):
            private(1, **options)
        with pytest.raises(PrivacySpecError, match="last bit"):
            private(0, "bfloat16", **options)  # a last bit can decide how it is rounded there too
        private(1, loss_reduction="sum", **options)
    engine = private(0)
    x, y = batch(8)
    model = engine.session.model
    F.cross_entropy(model(x), y).backward()
    engine.session.drop_sums()
    model.set_policy("all")
    with pytest.raises(PrivateTrainingError, match="last bit"):
        model(x)


def test_unreduced_losses_that_are_added_up_are_not_multiplied() -> None:
    x, y = batch(12)
    found = []
    for loss in (nn.CrossEntropyLoss(reduction="none"), nn.CrossEntropyLoss(reduction="sum")):
        run = made(criterion=loss, batch=12, max_physical_batch_size=12, loss_reduction="sum", policy="all")
        run.criterion(run.model(x), y).sum().backward()
        found.append(sums_of(run.model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_losses_of_other_models_have_autograds_gradients() -> None:
    """As of a generator, which learns from the plain copy of a private discriminator."""
    x, y = batch(12)
    run = made()
    outputs = x[:, :CLASSES].clone().requires_grad_()
    run.criterion(outputs, y).backward()
    own = x[:, :CLASSES].clone().requires_grad_()
    nn.CrossEntropyLoss()(own, y).backward()
    torch.testing.assert_close(outputs.grad, own.grad)


# What comes between criterion and backward


def test_a_factor_that_changes_is_refused() -> None:
    run = made(max_physical_batch_size=6)
    x, y = batch(6)
    for factor in (0.5, 0.5):
        (run.criterion(run.model(x), y) * factor).backward()
        run.engine.session.drop_sums()
    with pytest.raises(PrivateTrainingError, match=r"multiplied by 0\.25 .* by 0\.5 before the first.*Fix"):
        (run.criterion(run.model(x), y) * 0.25).backward()


def test_a_constant_factor_scales_gradients_before_they_are_clipped() -> None:
    x, y = batch(6)
    run = made(batch=6, max_physical_batch_size=6, max_grad_norm=1e6)
    run.criterion(run.model(x), y).backward()
    plain = sums_of(run.model)
    run = made(batch=6, max_physical_batch_size=6, max_grad_norm=1e6)
    (run.criterion(run.model(x), y) * 0.5).backward()
    for name, total in sums_of(run.model).items():
        torch.testing.assert_close(total, plain[name] * 0.5)


@pytest.mark.parametrize("lose", [lambda out, y: F.cross_entropy(out, y), lambda out, y: out.square().mean()])
def test_a_loss_that_is_not_the_criterions_is_refused(lose: Any) -> None:
    run = made(max_physical_batch_size=6)
    x, y = batch(6)
    run.criterion(run.model(x).detach(), y)
    with pytest.raises(
        PrivateTrainingError, match=r"does not come from the criterion.*Fix: criterion\(model\(x\), y\)"
    ):
        lose(run.model(x), y).backward()
    run.engine.session.drop_sums()
    train(run)


def test_terms_of_ones_own_may_be_added() -> None:
    run = made(max_physical_batch_size=6)
    for x, y in run.loader:
        out = run.model(x)
        (run.criterion(out, y) + 0.1 * out.square().sum()).backward()
        run.optimizer.step()


class Straight(nn.Module):
    """The right loss of each sample, whose gradient is scaled by those of others."""

    reduction = "mean"

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(out, y, reduction="none")
        scale = losses.detach().sum()
        losses = losses.detach() + (losses - losses.detach()) * scale
        return losses if self.reduction == "none" else losses.mean()


def test_a_loss_whose_gradients_mix_samples_is_refused() -> None:
    run = made(criterion=Straight(), max_physical_batch_size=6)
    x, y = batch(6)
    with pytest.raises(PrivacySpecError, match="mixes samples: some have other gradients without the rest"):
        run.criterion(run.model(x), y)
