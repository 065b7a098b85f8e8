"""The Gaussian noise of DP-SGD: AES-256 in counter mode, turned into normals by one compiled loop.

The guarantee of DP-SGD assumes that nobody can tell the noise from true randomness. torch's generators (a Mersenne
twister on the CPU) are not built for that: their state can be recovered from their output, and a seed of 32 bits can be
tried out. Here the bits are the keystream of a block cipher, and each draw uses a part of it that no other draw uses.
The keystream becomes normals by the Box–Muller transform, compiled by Inductor, which makes this also quicker than
`torch.randn`.

A stream is as unpredictable as its key. `GaussianStream.secure` takes its key from the operating system and never
reveals it. `GaussianStream.seeded` can be reproduced by anyone who knows the seed: use it for experiments.

No stream here gives the ideal Gaussian. The results are float32: they lie on a finite grid, reach no further
than 8.3σ, and are added to gradients in floating point. The low bits of such a sum can reveal more than the analysis
over the reals allows (Mironov, "On significance of the least significant bits for differential privacy", 2012). A
secure stream protects against prediction of the bits, not against that attack.
"""

import hashlib
import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Self

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor
from torch._inductor import standalone_compile
from torch.fx.experimental.proxy_tensor import make_fx

from dpquant_compile.backends.compiled import _missing_compiler
from dpquant_compile.errors import PrivacySpecError

__all__ = ["GaussianStream"]

_BLOCK = 16  # bytes of one AES block
_COUNTERS = 1 << 128  # values of the cipher's counter

# A pair of normals takes three 32-bit words, so four pairs take three whole blocks.
_WORDS = 3
_PAIRS = 4

# Pairs per run of the transform: 12 MiB of keystream, which stays in the cache between cipher and transform.
# The words of a run are laid out by role, so another number here gives another stream.
_RUN = 1 << 20

# The plaintext for the keystream: the same zeros each time, few enough to stay in the nearest cache.
_ZEROS = memoryview(bytes(1 << 16))

# Older versions of cryptography require this much space behind the result, and write nothing there.
_SLACK = _BLOCK - 1

# References to the memory of a draw if nobody else holds it: the kept tensor, and the storage that is queried.
_OURS = 2

# blake2b with a personalization differs from the plain hash in numerics.random_bits, so the same seed gives unrelated
# bits for rounding and for noise.
_DOMAIN = b"dpquant noise v1"

_LOCK = threading.Lock()

Transform = Callable[[Tensor, Tensor, Tensor, Tensor], object]


def _box_muller(words: Tensor, std: Tensor, first: Tensor, second: Tensor) -> tuple[()]:
    """Normals of the standard deviation `std` into `first` and `second` `[m]`, from random int32 `words` `[3, m]`.

    The radius has 48 bits, for the tail: it reaches 8.2σ, where 24 bits would end at 5.8σ. The added halves keep radius
    and angle away from zero. The clamp keeps u below 1, to which it rounds once in 2^25 pairs. So no normal is zero,
    and none leaves its coordinate without noise.
    """
    high = (words[0] >> 8) & 0xFFFFFF
    low = (words[1] >> 8) & 0xFFFFFF
    u = high.float() * 2.0**-24 + (low.float() + 0.5) * 2.0**-48
    radius = torch.sqrt(-2 * torch.log(u.clamp(max=1 - 2.0**-24)))
    angle = (words[2].float() + 0.5) * (math.pi * 2.0**-31)
    first.copy_(radius * torch.cos(angle) * std)
    second.copy_(radius * torch.sin(angle) * std)
    return ()


def _transform() -> Transform:
    """`_box_muller` as one compiled loop if there is a C++ compiler, else uncompiled; equal up to the last bits."""
    if _missing_compiler() is not None:
        return _box_muller
    with _LOCK:
        return _compiled()


@lru_cache(maxsize=1)
def _compiled() -> Transform:
    with torch.device("cpu"):
        example = [torch.zeros(_WORDS, 64, dtype=torch.int32), torch.ones(()), torch.zeros(64), torch.zeros(64)]
    with torch.no_grad():
        graph = make_fx(_box_muller, tracing_mode="symbolic")(*example)
        # By default Inductor decides from the small example that threads do not pay, or fixes their number.
        options = {"config_patches": {"cpp.dynamic_threads": True}}
        program: Any = standalone_compile(graph, list(example), dynamic_shapes="from_graph", options=options)
    transform: Transform = program
    return transform


class GaussianStream:
    """An endless stream of independent standard normals; no part of it is drawn twice.

    Made by `secure`, `seeded` or `from_generator`. The state is a key and a position: the number of AES blocks drawn
    so far. Every draw takes whole blocks, so draws of any sizes share no byte of the keystream. Drawing is thread-safe.
    In a forked child, a secure stream takes a new key by itself; a seeded one repeats the parent's.

    The same seed and rank give the same normals for the same sequence of sizes, on any number of threads; between
    machines, and with or without a C++ compiler, the last bits may differ.
    """

    def __init__(self, seed: int | None, rank: int = 0) -> None:
        """The stream of this seed and rank; without a seed a secure one."""
        self._lock = threading.Lock()
        _STREAMS.add(self)
        self._scratch = bytearray()
        self._kept = torch.empty(0, device="cpu")
        self._position = 0
        self._rekey(seed, rank)

    @classmethod
    def secure(cls) -> Self:
        """A stream under a new key from the operating system. It is not reproducible, and its key is never revealed."""
        return cls(None)

    @classmethod
    def seeded(cls, seed: int, rank: int = 0) -> Self:
        """The reproducible stream of `seed` on process `rank`. Whoever knows the seed can subtract the noise."""
        _require_int("seed", seed)
        _require_int("rank", rank, least=0)
        return cls(seed, rank)

    @classmethod
    def from_generator(cls, generator: torch.Generator | None, rank: int = 0) -> Self:
        """The seeded stream of a 63-bit seed, drawn once, here, from `generator` (None: torch's global one)."""
        if generator is not None and not isinstance(generator, torch.Generator):
            raise PrivacySpecError(
                f"the noise generator must be a torch.Generator or None, not {type(generator).__name__}"
            )
        device = torch.device("cpu") if generator is None else generator.device
        seed = torch.randint(0, 2**63 - 1, (), dtype=torch.int64, generator=generator, device=device)
        return cls.seeded(int(seed), rank)

    @property
    def is_secure(self) -> bool:
        """Whether the key comes from the operating system, so that the noise can be neither predicted nor repeated."""
        return self._seed is None

    @property
    def position(self) -> int:
        """The number of AES blocks drawn under the current key."""
        return self._position

    def derived_key(self, purpose: bytes) -> bytes:
        """32 bytes derived from the current key, which reveal nothing about it; different for each purpose.

        They are as secret as the noise: new entropy in a secure stream, a function of the seed in a seeded one.
        """
        with self._lock:
            nonce = self._nonce.to_bytes(_BLOCK, "big")
            return hashlib.blake2b(nonce, key=self._key, digest_size=32, person=purpose).digest()

    def fill(self, n: int) -> Tensor:
        """The next `n` standard normals: float32, on the CPU."""
        _require_int("n", n, least=0)
        return self._draw(n, 1.0)

    def normal_like(self, tensors: Sequence[Tensor], std: float) -> list[Tensor]:
        """For each tensor, normals of standard deviation `std` in its shape and on its device, from one flat draw.

        They are contiguous, and float32, or float64 where the tensor is: never coarser, since rounding the noise to
        half precision would change its distribution. A `std` of 0 gives zeros but still draws, so that later draws do
        not depend on it.
        """
        _require_std(std)
        for index, tensor in enumerate(tensors):
            if not tensor.is_floating_point():
                raise PrivacySpecError(f"tensor {index} is {tensor.dtype}: Gaussian noise needs real floating point")
        sizes = [tensor.numel() for tensor in tensors]
        flat = self._draw(sum(sizes), float(std))
        result = []
        start = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            result.append(flat[start : start + size].view(tensor.shape).to(tensor.device, dtype))
            start += size
        return result

    def state_dict(self) -> dict[str, int | str]:
        """The state to save in a checkpoint. A secure stream reveals only that it is secure."""
        with self._lock:
            if self._seed is None:
                return {"kind": "secure"}
            return {"kind": "seeded", "seed": self._seed, "rank": self._rank, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the saved position, with the noise that an uninterrupted run would have drawn next.

        A secure stream takes a new key instead. A stream that has itself drawn beyond the saved position stays where
        it is: going back would add the noise of earlier steps to other gradients, and reveal their difference.
        """
        kind = "secure" if self.is_secure else "seeded"
        if state.get("kind") != kind:
            raise PrivacySpecError(
                f"the saved noise is {state.get('kind')!r}, but this run's is {kind!r}: resume with the same "
                "secure_mode as the run that saved the checkpoint, or leave the noise out of what is loaded"
            )
        if self.is_secure:
            with self._lock:
                self._rekey(None, 0)
            return
        missing = [name for name in ("seed", "rank", "position") if name not in state]
        if missing:
            raise PrivacySpecError(f"the saved noise lacks {', '.join(missing)}: it was not made by state_dict()")
        seed, rank, position = state["seed"], state["rank"], state["position"]
        _require_int("the saved seed", seed)
        _require_int("the saved rank", rank, least=0)
        _require_int("the saved position", position, least=0)
        with self._lock:
            if rank != self._rank:
                raise PrivacySpecError(
                    f"the saved noise is that of rank {rank}, but this is rank {self._rank}: two processes would draw "
                    "the same noise. Load on each rank the state that this rank saved"
                )
            if seed != self._seed:
                self._rekey(seed, rank)
            self._position = max(self._position, position)

    def renew(self) -> None:
        """Take an unused key, for a run that no longer repeats the one that used the old key."""
        with self._lock:
            fresh = None if self.is_secure else int.from_bytes(os.urandom(8), "big") >> 1
            self._rekey(fresh, self._rank)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by `state_dict`: the key of a secure stream stays here, and a copy gets a new one."""
        return _restore, (self.state_dict(),)

    def _rekey(self, seed: int | None, rank: int) -> None:
        self._seed = seed
        self._rank = rank
        self._position = 0
        if seed is None:
            self._key = os.urandom(32)
            self._nonce = int.from_bytes(os.urandom(_BLOCK), "big")
        else:
            self._key = hashlib.blake2b(f"{seed}\0{rank}".encode(), digest_size=32, person=_DOMAIN).digest()
            self._nonce = 0

    def _draw(self, n: int, std: float) -> Tensor:
        """The next `n` normals times `std`. The loop multiplies; the result equals a multiplication after it."""
        transform = _transform()
        scale = torch.tensor(std, dtype=torch.float32, device="cpu")
        pairs = -(-n // (2 * _PAIRS)) * _PAIRS
        with self._lock, torch.no_grad():
            out = self._room(2 * pairs)
            for done in range(0, pairs, _RUN):
                count = min(_RUN, pairs - done)
                keystream = self._keystream(count // _PAIRS * _WORDS)
                words = torch.frombuffer(keystream, dtype=torch.int32, count=_WORDS * count).view(_WORDS, count)
                first, second = out[2 * done : 2 * (done + count)].view(2, count)
                transform(words, scale, first, second)
            # Return a separate view before another thread calls `_room`: the view marks the memory as in use.
            return out[:n]

    def _room(self, count: int) -> Tensor:
        """Memory for a draw: that of the last one, if it had the same length and nobody holds any part of it.

        Gradients are freed and drawn anew each step, and allocating their memory costs a third of a draw.
        """
        storage = self._kept.untyped_storage()
        if self._kept.numel() != count or torch._C._storage_Use_Count(storage._cdata) != _OURS:
            with torch.inference_mode(False):  # tensors made in inference mode could not be written elsewhere
                self._kept = torch.empty(count, dtype=torch.float32, device="cpu")
        return self._kept

    def _keystream(self, blocks: int) -> bytearray:
        """The next blocks of the keystream, at the start of a buffer that the next call overwrites."""
        counter = (self._nonce + self._position) % _COUNTERS
        self._position += blocks  # first, so that an error below cannot make the next draw repeat this one
        size = blocks * _BLOCK
        if len(self._scratch) < size + _SLACK:
            self._scratch = bytearray(size + _SLACK)
        room = memoryview(self._scratch)
        encryptor = Cipher(algorithms.AES(self._key), modes.CTR(counter.to_bytes(_BLOCK, "big"))).encryptor()
        for start in range(0, size, len(_ZEROS)):
            count = min(len(_ZEROS), size - start)
            encryptor.update_into(_ZEROS[:count], room[start : start + count + _SLACK])
        return self._scratch


# All streams of this process, for the fork handler.
_STREAMS: weakref.WeakSet[GaussianStream] = weakref.WeakSet()


def _after_fork() -> None:
    """In a child: noise that the parent also draws would cancel in the difference of the two releases."""
    for stream in list(_STREAMS):
        stream._lock = threading.Lock()  # another thread of the parent may have held it
        if stream.is_secure:
            stream._rekey(None, 0)


os.register_at_fork(after_in_child=_after_fork)


def _restore(state: Mapping[str, Any]) -> GaussianStream:
    stream = GaussianStream(state.get("seed"), state.get("rank", 0))
    stream.load_state_dict(state)
    return stream


def _require_int(name: str, value: object, least: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise PrivacySpecError(f"{name} must be an int{bound}, not {value!r}")


def _require_std(value: object) -> None:
    if not isinstance(value, int | float) or not 0 <= value <= torch.finfo(torch.float32).max:
        raise PrivacySpecError(f"std must be a finite number of at least 0 that float32 can hold, not {value!r}")
