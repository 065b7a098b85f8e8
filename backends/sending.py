"""Small numbers that the host makes for every step, on their way to a device."""

import torch
from torch import Tensor

__all__ = ["sent"]

# Devices that have taken the numbers out of ordinary memory when a copy that nobody waits for returns. CUDA moves them
# to a place of its own first, and then goes on by itself.
_TAKES_AT_ONCE = {"cuda"}


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on `device`. The host does not wait for what the device has still to do, if it need not."""
    return values.to(device, non_blocking=device.type in _TAKES_AT_ONCE)
