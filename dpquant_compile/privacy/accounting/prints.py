"""What stands for the contents of tensors, computed where they lie: comparing two copies nothing to the host.

A print is two int64 numbers on the device of its tensor. On the CPU they are a GMAC. Elsewhere they are two sums of the
tensor's bits, each 32 of them times an odd number of their own, modulo 2^64. A change of one element changes both;
changes of several cancel in both with a chance of 2^-60 or so. Neither resists an attacker: the keys are public. Sums
of integers do not depend on their order, so a device gives the same print each time.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from dpquant_compile.numerics.random_bits import fold

__all__ = ["gmac", "print_of"]

_KEY, _NONCE = b"dpquant releases", b"fingerprint2"
_PART = 1 << 30  # bytes that the cipher takes at once

_WIDTH = 1 << 20  # elements that are multiplied at once
_STEP = 0x2545F4914F6CDD1D  # odd; from one part of a tensor to the next
_BITS = {1: torch.uint8, 2: torch.int16}  # by the size of an element; larger ones are taken in parts of 32 bits


def print_of(value: Tensor) -> Tensor:
    """Two int64 numbers, on the device of `value`, that stand for its bytes."""
    if value.device.type == "cpu":
        return torch.frombuffer(bytearray.fromhex(gmac([value])), dtype=torch.int64)
    bits = value.detach().contiguous().reshape(-1).view(_BITS.get(value.element_size(), torch.int32))
    factors = _factors(value.device)
    total = torch.zeros(2, dtype=torch.int64, device=value.device)
    for part in bits.split(_WIDTH):
        total = total * _STEP + (part.to(torch.int64) * factors[:, : part.numel()]).sum(1)
    return total


def gmac(values: Sequence[Tensor]) -> str:
    """128 bits of dtypes, shapes and bytes of tensors; about as fast as reading memory.

    Of tensors on other devices than the CPU it takes the prints, by one read of each device.
    """
    mac = Cipher(algorithms.AES(_KEY), modes.GCM(_NONCE)).encryptor()
    for value, near in zip(values, _on_host(values), strict=True):
        mac.authenticate_additional_data(f"{value.dtype} {tuple(value.shape)};".encode())
        flat = near.detach().contiguous().reshape(-1).view(torch.uint8)
        for part in flat.split(_PART):
            mac.authenticate_additional_data(part.numpy().data)
    mac.finalize()
    return mac.tag.hex()


def _on_host(values: Sequence[Tensor]) -> list[Tensor]:
    """The values, those of other devices than the CPU replaced by their prints."""
    result = list(values)
    for device in dict.fromkeys(value.device for value in values if value.device.type != "cpu"):
        places = [place for place, value in enumerate(values) if value.device == device]
        found = torch.stack([print_of(values[place]) for place in places]).cpu()
        for place, print_ in zip(places, found, strict=True):
            result[place] = print_
    return result


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        numbers = torch.arange(2 * _WIDTH, dtype=torch.int64, device=device).view(2, _WIDTH)
        return fold(numbers, 0) | 1
