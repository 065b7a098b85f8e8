"""Room for numbers on their way through a kernel, kept from call to call."""

import math
import threading

import torch
from torch import Tensor

__all__ = ["scratch"]

_HELD = threading.local()


def scratch(name: str, *shape: int) -> Tensor:
    """Room for float32 numbers on their way: fresh memory costs more to take from the system than to write.

    The next call with this name gets the same room, so nothing that leaves a kernel may lie here. Each thread has its
    own.
    """
    size, held = math.prod(shape), _HELD.__dict__
    if name not in held or held[name].numel() < size:
        with torch.inference_mode(False):  # its tensors could not be written to elsewhere
            held[name] = torch.empty(size, dtype=torch.float32, device="cpu")  # whatever the default is
    room: Tensor = held[name][:size]
    return room.view(shape)
