"""Prints on a device: sums that see every change of one element, and stand for bytes, not for where they lie."""

from typing import Any

import pytest
import torch

from dpquant_compile.privacy.accounting import prints
from dpquant_compile.privacy.accounting.prints import gmac, print_of
from tests.support.pretend_device import NAME, PretendDevice, notes_of


def found(device: PretendDevice) -> dict[str, Any]:
    """Prints of tensors on the device, as text; each kind of value, and what it must differ from or equal."""
    prints._WIDTH = 64  # several parts in a small tensor
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, generator=generator)
    wide = torch.randn(3, 70, 2, generator=generator, dtype=torch.float64)
    half, flags = x.to(torch.bfloat16), x > 0

    def told(value: torch.Tensor) -> str:
        return str(print_of(value.to(NAME)).cpu().tolist())

    changed = {}
    for name, value in {"x": x, "wide": wide, "half": half, "flags": flags}.items():
        flat = value.flatten()
        texts = {told(value)}
        for place in range(0, len(flat), 17):
            other = flat.clone()
            other[place] = ~other[place] if name == "flags" else -other[place]
            texts.add(told(other))
        changed[name] = len(texts) == 1 + len(range(0, len(flat), 17))
    orders = {told(v) for v in (x, x.flip(0), x.roll(1), x.roll(64), torch.cat([x[64:128], x[:64], x[128:]]))}
    zeros = {told(torch.tensor(v)) for v in ([0.0, 0.0], [-0.0, 0.0], [0.0, -0.0])}
    far = x.to(NAME)
    device.waits.clear()
    texts = [
        gmac([far, far[:3], x]),
        gmac([far.clone(), far[:3], x]),
        gmac([far, far[:2], x]),
        gmac([far.view(30, 10), far[:3], x]),
    ]
    waits = len(device.waits)
    return {
        "changed": changed,
        "orders": len(orders),
        "zeros": len(zeros),
        "strided": told(wide.transpose(0, 1).contiguous()) == told(wide.transpose(0, 1)),
        "gmac": texts,
        "waits": waits,
    }


@pytest.mark.slow
def test_prints_of_a_device_see_what_changes() -> None:
    told = notes_of(__name__, "found")
    assert told["changed"] == dict.fromkeys(("x", "wide", "half", "flags"), True)
    assert told["orders"] == 5 and told["zeros"] == 3 and told["strided"]
    first, same, shorter, reshaped = told["gmac"]
    assert first == same and len({first, shorter, reshaped}) == 3
    assert told["waits"] == 4  # one read for each, whatever the number of tensors


def test_the_print_of_the_cpu_is_a_gmac() -> None:
    x = torch.arange(7.0)
    assert print_of(x).numpy().tobytes().hex() == gmac([x])
