"""A private run on a device that is not the CPU: the host waits for it nowhere in forward and backward.

The device is pretended, see `tests/support/pretend_device.py`, so a run takes a process of its own.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from tests.support.heavy import HEAVY
from tests.support.pretend_device import NAME, PretendDevice, notes_of

pytestmark = pytest.mark.slow


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 36, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )


def runs(device: PretendDevice, physical: int, settings: dict[str, Any]) -> dict[str, Any]:
    return {**run(device, NAME, physical, settings), "near": run(device, "cpu", physical, settings)}


def run(device: PretendDevice, where: str, physical: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Six steps of 12 samples under policies that change: what the host waited for from the fifth on, and the weights.

    A frozen layer stands for what must not change. The criterion is compared with itself in calls 1, 4 and 16, which
    reads losses; `physical` is such that none of them is counted here.
    """
    model = dpq.compile(network().to(where), budget=1.0, backend="reference", inner="eager", **settings)
    model.train()
    model.original[1].weight.requires_grad_(False)
    engine = dpq.PrivacyEngine(accountant="rdp")
    data = TensorDataset(torch.randn(12, 1, 6, 6), torch.randint(3, (12,)))
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer, criterion, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(trained, lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=12),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=physical,
        noise_generator=torch.Generator().manual_seed(1),
    )
    found: dict[str, Any] = {"micro": [], "step": [], "operators": 0}
    for epoch in range(6):
        model.set_policy("all" if epoch % 2 else ["0"])
        for x, y in loader:
            x, y = x.to(where), y.to(where)
            device.waits.clear()
            device.operators = 0
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            waits = list(device.waits)
            device.waits.clear()
            optimizer.step()
            if epoch > 3:
                found["operators"] += device.operators
                found["micro"] += waits
                found["step"] += device.waits
    found["dropped"] = engine.session.dropped if engine.session else None
    found["weights"] = [p.detach().cpu().tolist() for p in model.parameters()]
    return found


@pytest.mark.parametrize(
    ("physical", "settings"),
    [(7, {}), pytest.param(12, {"format": "luq_fp4"}, marks=HEAVY), pytest.param(12, {"recipe": "int8"}, marks=HEAVY)],
    ids=["int4, divided", "luq_fp4", "int8"],
)
def test_a_step_reads_nothing_back(physical: int, settings: dict[str, Any]) -> None:
    found = notes_of(__name__, "runs", physical, settings)
    assert found["operators"] > 1000  # of two steps were seen, on the device: 1,698 in int8, more elsewhere
    assert found["micro"] == []
    # Once per logical batch: what is due of the checks, and the fingerprint that must be on record before it is used.
    assert ["settle()" in wait for wait in found["step"]] == [True, False] * 2
    assert ["gmac" in wait for wait in found["step"]] == [False, True] * 2
    near = found["near"]
    assert found["weights"] == near["weights"]
    assert found["dropped"] == near["dropped"] == 0
