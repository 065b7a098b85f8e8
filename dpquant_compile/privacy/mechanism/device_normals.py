"""Normals on a GPU: the keystream of ChaCha20 (RFC 8439), turned into normals where the gradients lie.

`normals` makes noise on the CPU by AES, which GPUs have no instructions for. ChaCha20 is additions, rotations and xors
of 32 bits, which they are quick at, and no noise crosses to the device. The transform is that of `normals`, operation
by operation: what is said there of its tail, its grid and its zeros holds here, and both give the same normals of the
same words, bit for bit. The words differ, since ciphers and keys do.

The key stays on the host: a launch takes it as eight numbers. `reference_normals` is the same in NumPy.

Never run on hardware: Triton's interpreter runs the kernels in the tests, and its compiler compiles them for GPUs.
"""

import importlib.util
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpquant_compile.privacy.mechanism.normals import GROUP, box_muller

__all__ = ["PURPOSE", "can_draw", "draw_on_device", "reference_normals", "reference_words"]

PURPOSE = b"dpquant chacha20"  # what the key of this cipher is derived for; AES has another

BLOCKS = 3  # of the keystream, for a group
_WORDS = 16  # of a block
_LANES = 128  # groups to a program


def can_draw(device: torch.device) -> bool:
    """Whether normals for tensors on `device` are drawn there."""
    return device.type == "cuda" and _has_triton()


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def draw_on_device(key: bytes, first: int, std: float, out: Tensor) -> None:
    """Fill `out` with normals of standard deviation `std`, a group from `BLOCKS` blocks from number `first` on.

    Requires: `out` is dense, float32, of whole groups; a block number has 64 bits.
    """
    groups = out.numel() // GROUP
    if groups:
        arguments = (*_words_of(key), _signed64(first), float(std), groups)
        _launch(_kernels().normals, groups, out, *arguments)


def _launch(kernel: Any, count: int, out: Tensor, *arguments: Any) -> None:
    with torch.cuda.device_of(out):  # Triton launches on the current device, whatever the tensors are on
        # Fused multiplications and additions would round once where the reference rounds twice.
        kernel[(-(-count // _LANES),)](out, *arguments, block=_LANES, enable_fp_fusion=False)


def _kernels() -> Any:
    from dpquant_compile.privacy.mechanism import chacha_kernels

    return chacha_kernels


def _words_of(key: bytes) -> tuple[int, ...]:
    """The words of a key, as Triton takes numbers of 32 bits."""
    return tuple(int(word) for word in np.frombuffer(key, dtype="<i4"))


def _signed64(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def draw_keystream(key: bytes, counter: int, nonce: bytes, out: Tensor) -> None:
    """Fill `out` [blocks, 16], int32, with words of the keystream from `counter` on: the cipher by itself."""
    n = np.frombuffer(nonce, dtype="<i4")
    at = int(np.uint32(counter).astype(np.int32))
    _launch(_kernels().keystream, len(out), out, *_words_of(key), at, *(int(word) for word in n), len(out))


# The same on the CPU, for what a kernel is compared with


def reference_normals(key: bytes, first: int, std: float, count: int) -> Tensor:
    """What `draw_on_device` writes into `count` values, whole groups."""
    numbers = (np.uint64(first % (1 << 64)) + np.arange(BLOCKS * (count // GROUP), dtype=np.uint64)).astype(np.uint64)
    nonces = np.zeros((3, len(numbers)), dtype=np.uint32)
    nonces[0] = numbers >> np.uint64(32)
    words = reference_words(key, (numbers & np.uint64(0xFFFFFFFF)).astype(np.uint32), nonces)
    return box_muller(torch.from_numpy(words.view(np.int32)).reshape(-1), std)


def reference_words(key: bytes, counters: "np.ndarray[Any, Any]", nonces: "np.ndarray[Any, Any]") -> Any:
    """The keystream's words [blocks, 16], uint32, at counters [blocks] with nonces [3, blocks]."""
    count = len(counters)
    state = np.empty((_WORDS, count), dtype=np.uint32)
    state[:4] = np.frombuffer(b"expand 32-byte k", dtype="<u4")[:, None]
    state[4:12] = np.frombuffer(key, dtype="<u4")[:, None]
    state[12], state[13:] = counters, nonces
    x = state.copy()
    for _ in range(10):
        for shift in range(4):  # the columns
            _quarter(x, shift, 4 + shift, 8 + shift, 12 + shift)
        for shift in range(4):  # the diagonals
            _quarter(x, shift, 4 + (shift + 1) % 4, 8 + (shift + 2) % 4, 12 + (shift + 3) % 4)
    return np.ascontiguousarray((x + state).T)


def _quarter(x: "np.ndarray[Any, Any]", a: int, b: int, c: int, d: int) -> None:
    for added, to, turned, by in ((b, a, d, 16), (d, c, b, 12), (b, a, d, 8), (d, c, b, 7)):
        x[to] += x[added]
        mixed = x[turned] ^ x[to]
        x[turned] = (mixed << np.uint32(by)) | (mixed >> np.uint32(32 - by))
