"""`Contents`: what tensors hold, to be compared with what they held before."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dpquant_compile.privacy.accounting.prints import gmac, print_of
from dpquant_compile.privacy.device_checks import DeviceChecks

__all__ = ["Contents"]


class Contents:
    """What the parameters of a run hold now.

    Equality is of contents. Those of the CPU are compared at once. Those of another device are taken to be equal for
    now: `checks` refuses the sum that they are part of, if they are not.
    """

    def __init__(self, values: Sequence[Tensor], checks: DeviceChecks) -> None:
        self._checks = checks
        far: dict[torch.device, list[Tensor]] = {}
        for value in values:
            if value.device.type != "cpu":
                far.setdefault(value.device, []).append(print_of(value))
        self._far = {device: torch.stack(found) for device, found in far.items()}
        self._near = gmac([value for value in values if value.device.type == "cpu"])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Contents) or self._near != other._near or self._far.keys() != other._far.keys():
            return False
        for device, found in self._far.items():
            if found.shape != other._far[device].shape:
                return False
            self._checks.refuse((found != other._far[device]).any(), _moved)
        return True

    __hash__ = None  # type: ignore[assignment]


def _moved() -> str:
    return (
        "parameters were changed between two micro-batches of one logical batch, or between a forward and its "
        "backward, so the gradients of its samples do not belong together. Fix: step only the optimizer that "
        "make_private returned, at the end of the logical batch; make other changes after it"
    )
