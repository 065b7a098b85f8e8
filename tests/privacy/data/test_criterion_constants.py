"""What a private loss reads beside its samples is fixed at make_private."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile.errors import PrivacySpecError, PrivateTrainingError
from dpquant_compile.privacy.data.criterion import PrivateCriterion

CLASSES = 3


def frequencies(y: Tensor) -> Tensor:
    return 1 / (1 + torch.bincount(y, minlength=CLASSES)).float()


def trained(
    criterion: Any,
    call: Callable[[Any, Tensor, Tensor], Tensor] = lambda c, out, y: c(out, y),
    before: Callable[[Any, Tensor], None] = lambda c, y: None,
    epochs: int = 1,
    **private: Any,
) -> None:
    """Some steps of private training, on tiny data."""
    torch.manual_seed(0)
    model = dpq.compile(nn.Sequential(nn.Linear(4, CLASSES)), budget=0, backend="reference", inner="eager").train()
    data = TensorDataset(torch.randn(32, 4), torch.randint(CLASSES, (32,)))
    model, optimizer, loss, loader = dpq.PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=criterion,
        data_loader=DataLoader(data, batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **private,
    )
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            before(criterion, y)
            call(loss, model(x), y).backward()
            optimizer.step()


def test_class_weights_of_the_batch_are_refused() -> None:
    with pytest.raises(PrivateTrainingError, match=r"'weight' of the criterion.*constant_inputs=\{'criterion.weight'"):
        trained(F.cross_entropy, lambda c, out, y: c(out, y, weight=frequencies(y)))


def test_a_declared_argument_is_taken_and_must_stay() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0])
    declared = {"constant_inputs": {"criterion.weight": weight}}
    trained(F.cross_entropy, lambda c, out, y: c(out, y, weight=weight), **declared)
    with pytest.raises(PrivateTrainingError, match=r"'weight' of the criterion has another value"):
        trained(F.cross_entropy, lambda c, out, y: c(out, y, weight=frequencies(y)), **declared)
    with pytest.raises(PrivateTrainingError, match=r"'weight' of the criterion is left out"):
        trained(F.cross_entropy, **declared)


def test_numbers_are_refused_unless_at_their_default_or_declared() -> None:
    trained(F.cross_entropy, lambda c, out, y: c(out, y, ignore_index=-100))
    with pytest.raises(PrivateTrainingError, match=r"'label_smoothing' of the criterion is a float without a row"):
        trained(F.cross_entropy, lambda c, out, y: c(out, y, label_smoothing=0.1))
    trained(
        F.cross_entropy,
        lambda c, out, y: c(out, y, label_smoothing=0.1),
        constant_inputs={"criterion.label_smoothing": 0.1},
    )


def test_declarations_that_nobody_takes_are_refused() -> None:
    with pytest.raises(PrivacySpecError, match=r"'criterion.wieght'.*criterion\.weight"):
        trained(F.cross_entropy, constant_inputs={"criterion.wieght": 1.0})
    model = nn.Sequential(nn.Linear(4, 2))
    with pytest.raises(PrivacySpecError, match=r"'criterion.weight'.*no criterion"):
        dpq.PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            constant_inputs={"criterion.weight": 1.0},
        )


def set_weight(criterion: Any, y: Tensor) -> None:
    criterion.weight = frequencies(y)


def write_weight(criterion: Any, y: Tensor) -> None:
    criterion.weight.data.copy_(frequencies(y))


def set_smoothing(criterion: Any, y: Tensor) -> None:
    criterion.label_smoothing = float(y.float().mean()) / 4


@pytest.mark.parametrize(
    ("before", "name"),
    [(set_weight, "weight"), (write_weight, "weight"), (set_smoothing, "label_smoothing")],
)
def test_attributes_and_buffers_made_of_the_batch_are_refused(before: Any, name: str) -> None:
    with pytest.raises(PrivateTrainingError, match=f"'{name}' of the criterion changed since make_private.*Fix"):
        trained(nn.CrossEntropyLoss(weight=torch.ones(CLASSES)), before=before)


class Centred(nn.Module):
    """Keeps a running mean of outputs, as DINO does, from its call number `start` on."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.reduction = "mean"
        self.start = start
        self.register_buffer("centre", torch.zeros(CLASSES))
        self.calls = [0]

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(out - self.centre, y, reduction="none")
        self.calls[0] += 1
        if self.calls[0] > self.start:
            self.centre.mul_(0.9).add_(out.detach().mean(0))
        return losses


@pytest.mark.parametrize("start", [0, 3])
def test_a_loss_that_writes_into_its_state_is_refused_before_its_backward(start: int) -> None:
    with pytest.raises(PrivateTrainingError, match=r"'(calls\[0\]|centre)' of the criterion changed"):
        trained(PrivateCriterion(Centred(start), verify=False))


SCALE = 1.0


def scaled(out: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(out * SCALE, y, reduction=reduction)


def test_a_global_that_the_loss_reads_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    trained(scaled)
    with pytest.raises(PrivateTrainingError, match=r"global variable '.*SCALE'.*of the criterion changed"):
        trained(scaled, before=lambda _, y: monkeypatch.setattr(f"{__name__}.SCALE", float(y.float().mean())))


class MixesLater(nn.Module):
    """Mixes samples once the weights have moved; it holds nothing that changes."""

    reduction = "mean"

    def __init__(self) -> None:
        super().__init__()
        self.limit = 3

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(out, y, reduction="none")
        return losses + out.mean() if out.abs().amax() > self.limit else losses


def test_parts_are_compared_now_and_then() -> None:
    criterion = PrivateCriterion(MixesLater())
    small, large, y = torch.zeros(4, CLASSES), torch.ones(4, CLASSES), torch.zeros(4, dtype=torch.int64)
    large[::2] *= 9
    for values in (small, large, large):
        criterion(values, y)
    with pytest.raises(PrivacySpecError, match="mixes samples"):
        criterion(large, y)


def test_targets_keep_dtype_and_shape() -> None:
    def one_hot_later(criterion: Any, out: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        return criterion(out, F.one_hot(y, CLASSES).float() if len(calls) > 1 else y)

    calls: list[int] = []
    with pytest.raises(PrivateTrainingError, match=r"input 'target' of the criterion has (dtype|rows)"):
        trained(nn.CrossEntropyLoss(), one_hot_later, epochs=2)


def test_evaluation_is_free() -> None:
    criterion = PrivateCriterion(F.cross_entropy)
    criterion.pin({})
    y = torch.zeros(4, dtype=torch.int64)
    criterion(torch.zeros(4, CLASSES, requires_grad=True), y)
    with torch.no_grad():
        criterion(torch.zeros(4, 7), y, label_smoothing=0.1)


def test_lists_with_an_entry_per_sample_are_rows() -> None:
    def loss(out: Tensor, targets: list[Tensor], reduction: str = "none") -> Tensor:
        return torch.stack([(o - t.mean()).square().sum() for o, t in zip(out, targets, strict=True)])

    criterion = PrivateCriterion(loss, reduction="mean")
    criterion.pin({})
    for size in (3, 2, 1, 4):
        criterion(torch.ones(size, 2, requires_grad=True), [torch.ones(i + 1) for i in range(size)])
