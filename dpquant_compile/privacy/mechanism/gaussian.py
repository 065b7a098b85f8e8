"""The Gaussian noise of DP-SGD: AES-256 in counter mode, or ChaCha20 on GPUs, turned into normals.

The guarantee of DP-SGD assumes that nobody can tell the noise from true randomness. torch's generators (a Mersenne
twister on the CPU) are not built for that: their state can be recovered from their output, and a seed of 32 bits can be
tried out. Here the bits are the keystream of a block cipher, and each draw uses a part of it that no other draw uses.
`normals` turns it into normals, by instructions of the CPU for both, which is also quicker than `torch.randn`. Noise
for tensors on a GPU is drawn there, by `device_normals`, from a key of its own that is derived from the stream's.

A stream is as unpredictable as its key. `GaussianStream.secure` takes its key from the operating system and never
reveals it. `GaussianStream.seeded` can be reproduced by anyone who knows the seed: use it for experiments.

No stream here gives the ideal Gaussian. The results are float32: they lie on a finite grid, reach no further
than 8.3σ, and are added to gradients in floating point. The low bits of such a sum can reveal more than the analysis
over the reals allows (Mironov, "On significance of the least significant bits for differential privacy", 2012). A
secure stream protects against prediction of the bits, not against that attack.
"""

import hashlib
import itertools
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from dpquant_compile.errors import PrivacySpecError
from dpquant_compile.privacy.mechanism import device_normals
from dpquant_compile.privacy.mechanism.normals import BLOCKS, GROUP, draw_normals

__all__ = ["GaussianStream", "Part"]

_NONCE = 16  # bytes of the first value of the cipher's counter

# References to the memory of a draw if nobody else holds it: the kept tensor, and the storage that is queried.
_OURS = 2

# The normals of a seed depend on it. Its key depends on it too, so that noise of different versions is independent.
_VERSION = 2

# blake2b with a personalization differs from the plain hash in numerics.random_bits, so the same seed gives unrelated
# bits for rounding and for noise.
_DOMAIN = b"dpquant noise v2"

_PLACE = b"dpquant place v1"

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Part:
    """The normals from `start` up to `stop` of a draw of `whole` ones: what one of several processes draws of it.

    It begins and ends between groups, or where the draw does, so no two parts share a byte of the keystream.
    """

    start: int
    stop: int
    whole: int

    def __post_init__(self) -> None:
        inside = 0 <= self.start <= self.stop <= self.whole
        if not inside or any(edge % GROUP and edge != self.whole for edge in (self.start, self.stop)):
            raise PrivacySpecError(f"{self} is no part of a draw in whole groups of {GROUP}")

    @classmethod
    def of(cls, whole: int, rank: int, size: int) -> "Part":
        """The part of process `rank` of `size`. Parts of all ranks make up the whole, and differ by a group at most."""
        groups = _groups(whole)
        start, stop = (min(groups * r // size * GROUP, whole) for r in (rank, rank + 1))
        return cls(start, stop, whole)


class GaussianStream:
    """An endless stream of independent standard normals; no part of it is drawn twice.

    Made by `secure`, `seeded` or `from_generator`. The state is a key and a position: the number of AES blocks drawn
    so far. Every draw takes whole blocks, so draws of any sizes share no byte of the keystream. Drawing is thread-safe.
    In a forked child, a secure stream takes a new key by itself; a seeded one repeats the parent's.

    The same seed and rank give the same normals, bit for bit, for the same sequence of sizes: on any number of threads,
    on every CPU, with or without a C++ compiler. A GPU gives others. A draw counts alike on both, so a stream may go
    from one to the other: each draw of either cipher uses a part of its keystream that no other draw uses.
    """

    def __init__(self, seed: int | None, rank: int = 0) -> None:
        """The stream of this seed and rank; without a seed a secure one."""
        self._lock = threading.Lock()
        self._kept = torch.empty(0, device="cpu")
        self._position = 0
        self._rekey(seed, rank)
        _STREAMS.add(self)  # now that it is whole: another thread may fork at any time

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

    @property
    def place(self) -> str:
        """What must be equal on processes that draw parts of the same noise; it reveals nothing about the key.

        Seeded streams must be at one place of one keystream. Secure ones have keys of their own, and only count alike.
        """
        whose = "keys of their own" if self.is_secure else f"key {self.derived_key(_PLACE)[:8].hex()}"
        return f"{whose}, block {self.position}"

    def derived_key(self, purpose: bytes) -> bytes:
        """32 bytes derived from the current key, which reveal nothing about it; different for each purpose.

        They are as secret as the noise: new entropy in a secure stream, a function of the seed in a seeded one.
        """
        with self._lock:
            return self._derived(purpose)

    def _derived(self, purpose: bytes) -> bytes:
        nonce = self._nonce.to_bytes(_NONCE, "big")
        return hashlib.blake2b(nonce, key=self._key, digest_size=32, person=purpose).digest()

    def fill(self, n: int) -> Tensor:
        """The next `n` standard normals: float32, on the CPU."""
        _require_int("n", n, least=0)
        return self._draw(Part(0, n, n), 1.0)

    def skip(self, n: int) -> None:
        """Count `n` normals as drawn, which another process has drawn from its stream."""
        _require_int("n", n, least=0)
        with self._lock:
            self._take(_groups(n) * BLOCKS)

    def normal_like(self, tensors: Sequence[Tensor], std: float, part: Part | None = None) -> list[Tensor]:
        """For each tensor, normals of standard deviation `std` in its shape and on its device, from one flat draw.

        They are contiguous, and float32, or float64 where the tensor is: never coarser, since rounding the noise to
        half precision would change its distribution. A `std` of 0 gives zeros but still draws, so that later draws do
        not depend on it.

        With a `part` the tensors are that part of a draw of `part.whole` normals. The keystream of the whole counts as
        drawn, so the normals and the position are those of a process that draws all of it.
        """
        _require_std(std)
        for index, tensor in enumerate(tensors):
            if not tensor.is_floating_point():
                raise PrivacySpecError(f"tensor {index} is {tensor.dtype}: Gaussian noise needs real floating point")
        sizes = [tensor.numel() for tensor in tensors]
        part = part or Part(0, sum(sizes), sum(sizes))
        if sum(sizes) != part.stop - part.start:
            raise PrivacySpecError(f"{sum(sizes)} values in the tensors of {part}, which has another number of them")
        devices = {tensor.device for tensor in tensors}
        flat = self._draw(part, float(std), devices.pop() if len(devices) == 1 else _CPU)
        result = []
        start = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            result.append(flat[start : start + size].view(tensor.shape).to(tensor.device, dtype))
            start += size
        return result

    def normals_at(self, cuts: Sequence[tuple[int, int]], whole: int, std: float) -> list[Tensor]:
        """Of a draw of `whole` normals of standard deviation `std`, those from the first up to the second of each cut.

        They are flat, float32, on the CPU. The keystream of the whole counts as drawn. Cuts are in order and have no
        value in common, so no normal is used twice, also where two cuts, or two processes, draw the same group.
        """
        _require_std(std)
        edges = [0, *(edge for cut in cuts for edge in cut), whole]
        if any(first > last for first, last in itertools.pairwise(edges)):
            raise PrivacySpecError(f"{list(cuts)} are no parts of a draw of {whole}, one after the other")
        # In groups; none for a cut without values.
        spans = [(first // GROUP, _groups(last) if first < last else first // GROUP) for first, last in cuts]
        drawn = [torch.empty((b - a) * GROUP, dtype=torch.float32, device="cpu") for a, b in spans]
        with self._lock, torch.no_grad():
            counter = self._take(_groups(whole) * BLOCKS)
            for (a, _), out in zip(spans, drawn, strict=True):
                if out.numel():
                    draw_normals(self._key, counter + a * BLOCKS, float(std), out)
        ends = zip(cuts, spans, drawn, strict=True)
        return [out[first - a * GROUP : last - a * GROUP] for (first, last), (a, _), out in ends]

    def state_dict(self) -> dict[str, int | str]:
        """The state to save in a checkpoint. A secure stream reveals only that it is secure."""
        with self._lock:
            if self._seed is None:
                return {"kind": "secure"}
            place = {"seed": self._seed, "rank": self._rank, "position": self._position}
            return {"kind": "seeded", "version": _VERSION, **place}

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
        if reason := self.cannot_continue(state):
            raise PrivacySpecError(reason)
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

    @staticmethod
    def cannot_continue(state: Mapping[str, Any]) -> str | None:
        """Why no stream can draw what the saved one would have drawn next; None if one can."""
        if state.get("kind") == "secure" or state.get("version") == _VERSION:
            return None
        return (
            "the saved noise is that of another release of dpquant_compile, which draws other numbers from the same "
            "seed. Fix: resume with that release, or load the checkpoint with replay=False, which takes new noise and "
            "charges the steps since the checkpoint again"
        )

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
            self._nonce = int.from_bytes(os.urandom(_NONCE), "big")
        else:
            self._key = hashlib.blake2b(f"{seed}\0{rank}".encode(), digest_size=32, person=_DOMAIN).digest()
            self._nonce = 0

    def _draw(self, part: Part, std: float, device: torch.device = _CPU) -> Tensor:
        """A part of the next draw, times `std`. The loop multiplies; the result equals a multiplication after it.

        It is on `device` if that can draw, else on the CPU.
        """
        groups = _groups(part.stop - part.start)
        with self._lock, torch.no_grad():
            counter = self._take(_groups(part.whole) * BLOCKS) + part.start // GROUP * BLOCKS
            if device_normals.can_draw(device):
                far = torch.empty(groups * GROUP, dtype=torch.float32, device=device)
                first = (counter - self._nonce) // BLOCKS * device_normals.BLOCKS
                device_normals.draw_on_device(self._derived(device_normals.PURPOSE), first, std, far)
                return far[: part.stop - part.start]
            out = self._room(groups * GROUP)
            draw_normals(self._key, counter, std, out)
            # Return a separate view before another thread calls `_room`: the view marks the memory as in use.
            return out[: part.stop - part.start]

    def _room(self, count: int) -> Tensor:
        """Memory for a draw: that of the last one, if it had the same length and nobody holds any part of it.

        Gradients are freed and drawn anew each step, and allocating their memory costs a third of a draw.
        """
        storage = self._kept.untyped_storage()
        if self._kept.numel() != count or torch._C._storage_Use_Count(storage._cdata) != _OURS:
            with torch.inference_mode(False):  # tensors made in inference mode could not be written elsewhere
                self._kept = torch.empty(count, dtype=torch.float32, device="cpu")
        return self._kept

    def _take(self, blocks: int) -> int:
        """The value of the cipher's counter from which on so many blocks are the caller's."""
        counter = self._nonce + self._position
        self._position += blocks  # before they are used: an error must not make the next draw repeat this one
        return counter


# All streams of this process, for the fork handler.
_STREAMS: weakref.WeakSet[GaussianStream] = weakref.WeakSet()


def _after_fork() -> None:
    """In a child: noise that the parent also draws would cancel in the difference of the two releases."""
    for stream in list(_STREAMS):
        stream._lock = threading.Lock()  # another thread of the parent may have held it
        if stream.is_secure:
            stream._rekey(None, 0)


os.register_at_fork(after_in_child=_after_fork)


def _groups(n: int) -> int:
    """Groups of normals that hold so many of them."""
    return -(-n // GROUP)


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
