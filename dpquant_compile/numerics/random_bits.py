"""Counter-based random bits: a pure function of (seed, step, site, role, sample, element).

Nothing here keeps state, so the bits are the same on every backend and thread count, after a resume, and, for samples
with ids of their own, in every split into micro-batches. The upper levels of the counter are mixed in 64 bits, once per
tensor or per sample; the element level, which runs for every number that is quantized, is plain int32 arithmetic that
Inductor turns into one vector loop.

The bits are for rounding. They are not cryptographic: the Gaussian noise of DP-SGD must not come from here. A private
run does not use `PublicBits`: it takes the keys of sites and the ids of samples from its secret
(`privacy.mechanism.secret_bits.SecretBits`), and only the element level from here.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["ROLES", "PublicBits", "RandomBits", "fold", "fold_int", "random_bits", "sample_keys", "site_keys"]

ROLES = ("input", "weight", "grad_output", "output", "grad_input", "grad_weight")


def _signed64(value: int) -> int:
    """The int64 with the same 64 bits as `value` modulo 2^64: torch takes only signed literals."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


# splitmix64 (Steele, Lea, Flood 2014): the counter increment and the two multipliers of its finalizer.
_GAMMA = _signed64(0x9E3779B97F4A7C15)
_MIX_A = _signed64(0xBF58476D1CE4E5B9)
_MIX_B = _signed64(0x94D049BB133111EB)
# Keeps the keys that `fold` makes apart from the ones `sample_keys` makes of the same key and number.
_FOLD = _signed64(0xD6E8FEB86659FD93)

# A 32-bit finalizer of very low bias (Wellons' "lowbias32"); the second constant is 0x846ca68b as an int32.
_MUL_A = 0x7FEB352D
_MUL_B = 0x846CA68B - (1 << 32)


def _mix64(x: Tensor) -> Tensor:
    """The splitmix64 finalizer on int64. `>>` is arithmetic in torch, so the sign's copies are masked away."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_A
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_B
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _mix32(x: Tensor) -> Tensor:
    """A bijection of int32 in which every input bit flips every output bit with probability close to one half."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _MUL_A
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _MUL_B
    return x ^ ((x >> 16) & 0xFFFF)


def _hash64(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


# Python ints, not tensors: a tensor cached while a FakeTensorMode is on would poison every later call.
@lru_cache(maxsize=1 << 14)
def _role_hashes(site_name: str) -> tuple[int, ...]:
    return tuple(_hash64(f"{site_name}\0{role}") for role in ROLES)


def site_keys(seed: int, step: int, site_names: Sequence[str]) -> Tensor:
    """One 64-bit key for each site and role at this step: int64 `[len(site_names), len(ROLES)]`.

    A key depends on the seed, the step, its own site's name and its role only: adding, removing or reordering
    sites leaves the keys of the others as they are.
    """
    hashes = torch.tensor([_role_hashes(name) for name in site_names], dtype=torch.int64)
    when = _hash64(f"{seed}\0{step}")
    return _mix64(hashes.reshape(len(site_names), len(ROLES)) + when)


class RandomBits(Protocol):
    """Where a training step's random bits come from: the keys of sites, and the ids that samples draw by."""

    def site_keys(self, step: int, names: Sequence[str]) -> Tensor:
        """A key for each site and role: int64 `[len(names), len(ROLES)]`."""

    def sample_ids(self, step: int, ids: Tensor) -> Tensor:
        """What stands for the samples `ids` (int64 `[B]`) in `sample_keys`."""


@dataclass(frozen=True)
class PublicBits:
    """Bits that follow from a seed, which anyone may know: for training without privacy, and for evaluation."""

    seed: int

    def site_keys(self, step: int, names: Sequence[str]) -> Tensor:
        return site_keys(self.seed, step, names)

    def sample_ids(self, step: int, ids: Tensor) -> Tensor:
        return ids


def fold(key: Tensor, value: int) -> Tensor:
    """New keys, a deterministic function of `key` and `value`, distinct for distinct values (e.g. a call number)."""
    return _mix64((key ^ _FOLD) + value)


def fold_int(key: int, value: int) -> int:
    """`fold` for a key that is a number already."""
    x, mask = ((key ^ _FOLD) + value) % (1 << 64), (1 << 64) - 1
    x = (x ^ (x >> 30)) * _MIX_A & mask
    x = (x ^ (x >> 27)) * _MIX_B & mask
    return _signed64(x ^ (x >> 31))


def sample_keys(key: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 keys `[B]` for the sample ids `samples` (int64 `[B]`) under the int64 scalar `key`.

    They depend on the id of a sample and not on its place in the batch.
    """
    mixed = _mix64(key + (samples + 1) * _GAMMA)
    return mixed.to(torch.int32), (mixed >> 32).to(torch.int32)


def random_bits(k0: Tensor, k1: Tensor, index: Tensor) -> Tensor:
    """32 uniform bits (as int32) for each element, from two int32 keys and the element's int32 index.

    Elementwise and broadcasting. For fixed keys this is a bijection of the index, keyed before each of its two
    rounds, so samples whose indices meet after the first key are told apart by the second.
    """
    return _mix32(_mix32(index ^ k0) + k1)
