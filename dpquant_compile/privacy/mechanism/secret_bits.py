"""`SecretBits`: the random bits of a private run other than its noise, all from one secret key.

Rounding, random operators such as dropout, and probe batches are part of the mechanism. If their bits were known, and
depended on a record's place in the dataset, then removing one record would change how all later ones are rounded: the
clipped sum would move by far more than one record's share. See "Random bits" in docs/privacy.md for the argument.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from dpquant_compile.numerics.random_bits import ROLES

__all__ = ["SecretBits", "uniform_numbers"]

_BLOCK = 16  # bytes of one AES block

# The state of torch's CPU generator (a Mersenne twister) as `get_state` lays it out: a seed of 8 bytes, how many words
# are left (int32), a flag (int32), the position of the next word (uint64), and 624 words of 32 bits in 64 each.
_TWISTER_BYTES, _TWISTER_LEFT, _TWISTER_NEXT, _TWISTER_WORDS, _TWISTER_COUNT = 5056, 8, 16, 24, 624


class SecretBits:
    """Random bits of a run by purpose, step and sample, from a secret key of 32 bytes.

    Guarantee: under the usual assumptions on AES-256 and BLAKE2b, the tokens of different samples in one step are
    independent of each other and of everything else that the run draws. All random bits of a sample's rounding are
    functions of its token and of keys that all samples share. So their joint distribution does not depend on how
    samples are numbered. The key, and everything drawn from it, must stay secret as long as the noise.

    The same key gives the same bits: on every backend, number of threads and processes, in every split into
    micro-batches, and after a resume. `rank` keeps random operators of different processes apart.
    """

    def __init__(self, key: bytes, rank: int = 0) -> None:
        self._sites = self._derived(key, b"dpquant sites")
        self._streams = self._derived(key, b"dpquant streams")
        self._rank = rank
        # A block cipher on single blocks: a keyed function of (step, sample).
        self._tokens = Cipher(algorithms.AES(self._derived(key, b"dpquant tokens")), modes.ECB()).encryptor()

    def site_keys(self, step: int, names: Sequence[str]) -> Tensor:
        """A key for each site and role at this step, which all samples share: int64 `[len(names), len(ROLES)]`."""
        size = 8 * len(ROLES)
        digests = (hashlib.blake2b(f"{step}\0{n}".encode(), key=self._sites, digest_size=size).digest() for n in names)
        words = np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64)
        return torch.from_numpy(words).reshape(len(names), len(ROLES))

    def sample_ids(self, step: int, ids: Tensor) -> Tensor:
        """The token of each sample at this step, int64 like `ids`; its random bits depend on it."""
        blocks = np.empty((len(ids), 2), dtype="<i8")
        blocks[:, 0], blocks[:, 1] = (step + 2**63) % 2**64 - 2**63, ids.numpy()
        mixed = np.frombuffer(self._tokens.update(blocks.tobytes()), dtype="<i8").reshape(-1, 2)
        return torch.from_numpy(mixed[:, 0].astype(np.int64))

    def uniform(self, purpose: str, number: int) -> Callable[[int], Tensor]:
        """A separate stream of uniform numbers for each purpose and number: see `uniform_numbers`."""
        stream = self._stream(f"{purpose}\0{number}")
        return lambda n: uniform_numbers(stream(8 * n))

    @contextmanager
    def random_operators(self, step: int, number: int, device: torch.device) -> Iterator[None]:
        """Make torch's generators draw from here inside the block, with a new state per step, number and process.

        Afterwards they continue as if nothing had been drawn. The state is secret and new, but the generators are not
        cryptographic, and dropout takes its bits by position in the micro-batch: docs/privacy.md names both.
        """
        stream = self._stream(f"operators\0{step}\0{number}\0{self._rank}")
        cuda = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            torch.default_generator.set_state(_twister_state(stream(4 * _TWISTER_COUNT)))
            for one in cuda:
                seed = int.from_bytes(stream(8), "little") >> 1
                torch.cuda.default_generators[one.index or 0].manual_seed(seed)
            yield

    def _stream(self, name: str) -> Callable[[int], bytes]:
        key = hashlib.blake2b(name.encode(), key=self._streams, digest_size=32).digest()
        encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(_BLOCK))).encryptor()
        return lambda size: encryptor.update(bytes(size))

    @staticmethod
    def _derived(key: bytes, purpose: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=32, person=purpose).digest()

    def __reduce__(self) -> NoReturn:
        raise TypeError("the secret bits of a private run cannot be copied or saved: they must stay secret")


def uniform_numbers(data: bytes) -> Tensor:
    """Numbers uniform on the multiples of 2^-53 in [0, 1), one for every 8 random bytes."""
    words = np.frombuffer(data, dtype=np.uint64)
    return torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _twister_state(words: bytes) -> Tensor:
    """A state of torch's CPU generator with all words given: a seed has only 32 bits, which can be tried out."""
    state = np.zeros(_TWISTER_BYTES, dtype=np.uint8)
    state[_TWISTER_LEFT : _TWISTER_LEFT + 8].view(np.int32)[:] = (1, 1)
    state[_TWISTER_NEXT : _TWISTER_NEXT + 8].view(np.uint64)[:] = 0
    end = _TWISTER_WORDS + 8 * _TWISTER_COUNT
    state[_TWISTER_WORDS:end].view(np.uint64)[:] = np.frombuffer(words, dtype=np.uint32)
    return torch.from_numpy(state)
