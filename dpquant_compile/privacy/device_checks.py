"""`DeviceChecks`: refusals that depend on numbers of a device, without making the host wait for each."""

from collections.abc import Callable

import torch
from torch import Tensor

from dpquant_compile.errors import PrivateTrainingError

__all__ = ["DeviceChecks"]

Message = Callable[[], str]


class DeviceChecks:
    """Checks of one run whose outcome is a tensor.

    On the CPU `refuse` raises at once. Another device is asked later, for all checks together, by `settle`: the host
    would wait for everything that the device has still to do, and then the device for the host.

    Guarantee: a sum leaves only after `settle`, so nothing that a check refuses is released. Until then what it refuses
    may be computed, and stays as secret as sums without noise are. `settle` forgets what it was asked: whoever calls it
    drops what was refused.
    """

    def __init__(self) -> None:
        self._open: list[tuple[Tensor, Message]] = []

    def refuse(self, found: Tensor, why: Message) -> None:
        """Raise `PrivateTrainingError`, now or at `settle`, if the boolean scalar `found` is true."""
        if found.device.type != "cpu":
            self._open.append((found, why))
        elif bool(found):
            raise PrivateTrainingError(why())

    def settle(self) -> None:
        """Raise what is due. One read of each device that has something due."""
        due, self._open = self._open, []
        for device in dict.fromkeys(found.device for found, _ in due):
            own = [(found, why) for found, why in due if found.device == device]
            outcomes = torch.stack([found for found, _ in own]).cpu().tolist()
            for (_, why), outcome in zip(own, outcomes, strict=True):
                if outcome:
                    raise PrivateTrainingError(why())
