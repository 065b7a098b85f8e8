"""Checks of a device come together, before a sum leaves: what each refuses on the CPU it refuses there."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile.errors import PrivateTrainingError
from dpquant_compile.privacy.device_checks import DeviceChecks
from tests.support.pretend_device import NAME, PretendDevice, notes_of


def test_the_cpu_is_asked_at_once() -> None:
    checks = DeviceChecks()
    checks.refuse(torch.tensor(False), lambda: "no")
    with pytest.raises(PrivateTrainingError, match="changed"):
        checks.refuse(torch.tensor(True), lambda: "it changed")
    checks.settle()


def halve(model: Any, **_: Any) -> None:
    model.original[2].weight.data.mul_(0.5)


def write_frozen(model: Any, **_: Any) -> None:
    model.original[0].weight.data[0, 0] += 1e-3


def scale(factor: dict[str, float], **_: Any) -> None:
    factor["of the loss"] = 2.0


def stray(model: Any, **_: Any) -> None:
    model.original[2].bias.grad = torch.ones_like(model.original[2].bias)


CHANGES = {"nothing": lambda **_: None, "parameter": halve, "frozen": write_frozen, "loss": scale, "gradient": stray}


def told(device: PretendDevice) -> dict[str, tuple[str, str, bool, bool]]:
    """For each change between the first micro-batch's backward and the second's: the error, where it came, whether the
    weights were left as they were, and whether sums are left for another try."""
    found = {}
    for name, change in CHANGES.items():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).to(NAME)
        model = dpq.compile(net, budget=0, backend="reference", inner="eager").train()
        model.original[0].weight.requires_grad_(False)
        data = TensorDataset(torch.randn(6, 4), torch.randint(3, (6,)))
        model, optimizer, criterion, loader = dpq.PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(data, batch_size=6),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            max_physical_batch_size=4,
        )
        factor, error, where = {"of the loss": 1.0}, "", ""
        before = torch.zeros(0)
        try:
            for number, (x, y) in enumerate(loader):
                where = "forward or backward"
                (criterion(model(x.to(NAME)), y.to(NAME)) * factor["of the loss"]).backward()
                if number == 0:
                    change(model=model, factor=factor)
                before = torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
                where = "step"
                optimizer.step()
        except PrivateTrainingError as raised:
            error = str(raised)
        after = torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
        left = any(p.summed_grad is not None for p in model.parameters() if p.requires_grad)
        found[name] = (error, where, torch.equal(before, after), left)
    return found


@pytest.mark.slow
def test_a_device_is_asked_before_a_sum_leaves() -> None:
    found = notes_of(__name__, "told")
    expected = {
        "parameter": "parameters were changed",
        "frozen": "'0.weight' of the model changed since make_private",
        "loss": "the loss was multiplied by 2.0",
        "gradient": "'2.bias' has a gradient that did not come through",
    }
    assert found.pop("nothing")[:3] == ["", "step", False]
    for name, words in expected.items():
        error, where, unchanged, left = found[name]
        assert words in error, name
        assert where == "step" and unchanged and not left, name  # it was refused before anything used it
