"""`private_loader`: Poisson batches, cut into micro-batches that fit the memory, each announced before it is yielded.

The engine must know which samples the user's loop works on, and where one optimizer step ends and the next begins.
Plain batches do not show this, so the loader reports it to a listener.
"""

import copy
import math
import operator
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from opacus.data_loader import DPDataLoader
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from dpquant_compile.errors import IntegrationError, PrivacySpecError, PrivateTrainingError
from dpquant_compile.privacy.accelerate_guard import PreparedForAccelerate
from dpquant_compile.privacy.mechanism.secret_bits import uniform_numbers

__all__ = [
    "Hooks",
    "Listener",
    "MicroBatch",
    "PrivateLoader",
    "SecurePoissonSampler",
    "SharedUniform",
    "holds_batch",
    "micro_batches",
    "private_loader",
    "secure_uniform",
]


@dataclass(frozen=True)
class MicroBatch:
    """The samples that the user's loop gets next."""

    ids: Tensor  # int64 [b], dataset indices of the samples; b may be 0
    first: bool  # the first micro-batch of its logical (Poisson) batch
    last: bool  # the last one: the optimizer steps after it
    divided: bool = True  # samples of its logical batch are in more than one micro-batch


# Called with each micro-batch before the loop gets it, and with None when an iteration ends for any reason.
Listener = Callable[[MicroBatch | None], None]


class Hooks:
    """Called by a loader around the batches of an iteration; each may refuse what follows by raising."""

    def begin_epoch(self) -> None:
        """Before the first batch is drawn."""

    def pay(self) -> None:
        """Before each logical batch is fetched."""

    def end_epoch(self) -> None:
        """After the last batch, unless the loop was left before."""


def secure_uniform(n: int) -> Tensor:
    """n numbers, uniform on the multiples of 2^-53 in [0, 1), from the operating system's cryptographic source."""
    return uniform_numbers(os.urandom(8 * n))


class SharedUniform:
    """`secure_uniform` for several processes: all draw the same numbers, from a key that one of them made.

    Each epoch has a new key, so processes that left an epoch at different places still draw the same in the next one.
    """

    def __init__(self) -> None:
        self._stream: Any = None

    def take_key(self, key: bytes) -> None:
        """Start the stream of an unused key of 32 bytes."""
        self._stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def __call__(self, n: int) -> Tensor:
        return uniform_numbers(self._stream.update(bytes(8 * n)))


RARE = 1e-12  # a Poisson batch does not fit into its micro-batches with a smaller probability than this


def holds_batch(samples: int, sample_rate: float, size: int) -> bool:
    """Whether a Poisson batch out of `samples` has at most `size` of them, but for a probability below `RARE`.

    By Chernoff's bound on the binomial tail, P(at least k) ≤ exp(−samples · KL(k/samples ‖ sample_rate)).
    """
    if size >= samples:
        return True
    share = (size + 1) / samples
    if share <= sample_rate:
        return False
    rest = (1 - share) * math.log((1 - share) / (1 - sample_rate)) if share < 1 else 0.0
    return samples * (share * math.log(share / sample_rate) + rest) >= -math.log(RARE)


def micro_batches(samples: int, sample_rate: float, limit: int) -> int:
    """How many micro-batches of `limit` each Poisson batch is cut into: the fewest that hold all but `RARE` ones.

    Guarantee: the number depends on public numbers alone, so how many micro-batches a loop sees says nothing about the
    samples. A batch that is larger has more; nothing is ever left out.
    """
    counts = range(1, math.ceil(samples / limit) + 1)
    return next(count for count in counts if holds_batch(samples, sample_rate, count * limit))


class SecurePoissonSampler(Sampler[list[int]]):
    """Opacus' `UniformWithReplacementSampler` with `bits(n)` in place of `torch.rand(n)`."""

    def __init__(self, num_samples: int, sample_rate: float, bits: Callable[[int], Tensor]) -> None:
        self.num_samples = num_samples
        self.sample_rate = sample_rate
        self.bits = bits

    def __len__(self) -> int:
        return int(1 / self.sample_rate)

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            yield torch.nonzero(self.bits(self.num_samples) < self.sample_rate).flatten().tolist()


def _check_caller(module: str | None) -> None:
    """Refuse a plain transformers.Trainer, which takes micro-batches for steps; `PrivateTrainer` iterates by itself."""
    if module == "transformers.trainer":
        raise IntegrationError(
            "transformers.Trainer iterates over a private loader: it would count each micro-batch as a step, and make "
            "fewer steps than it says. Fix: PrivateTrainer(engine=engine, args=…) of "
            "dpquant_compile.integrations.transformers, which needs no get_train_dataloader()"
        )


class _Share:
    """This process' part of each batch: every process draws from the whole dataset and keeps its own samples.

    Opacus draws from the process' own part. That correlates the samples of two processes with the same seed, and skips
    an empty part, after which the processes no longer work on the same step.
    """

    def __init__(self, batches: Iterable[list[int]]) -> None:
        self.batches = batches
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            yield [i for i in batch if i % self.world_size == self.rank]


class _Splitter(Sampler[list[int]]):
    """The batch sampler of a `PrivateLoader`: cuts logical batches, and queues the announcement of each micro-batch.

    Each logical batch is cut into `pieces` micro-batches, the last of which may be empty; one that is larger has more.
    Without `pieces` it has as many as it needs.

    Workers fetch ahead of the loop, but the loader yields batches in the order they were drawn, so a queue matches
    announcements to batches. Each iteration has its own queue: what an abandoned one drew ahead stays in it.
    """

    def __init__(self, batches: Iterable[Iterable[Any]], steps: int, limit: int | None, pieces: int | None) -> None:
        self.batches = batches
        self.steps = steps
        self.limit = limit
        self.pieces = pieces
        self.open = False  # whether the loader is beginning an iteration
        self.queue: deque[MicroBatch] = deque()

    def __len__(self) -> int:
        if self.pieces is None:
            raise TypeError(
                "this private loader has no length: the sizes of its batch sampler's batches are not known. Fix: give "
                "the batch sampler an attribute batch_size, the most samples of a batch; `loader.steps` is the number "
                "of optimizer steps"
            )
        return self.steps * self.pieces

    def __iter__(self) -> Iterator[list[int]]:
        if not self.open:
            raise PrivateTrainingError(
                "another data loader was made of a private one (its batch_sampler), as accelerate's "
                "skip_first_batches, Lightning's samplers and BatchMemoryManager do. Its batches would reach the model "
                "unannounced, and without privacy amplification by sampling. Fix: iterate over the loader that "
                "make_private returned, which cuts batches to max_physical_batch_size by itself; "
                "dpquant_compile.integrations has what trainers need"
            )
        self.queue = deque()
        return self._cut(self.queue)

    def _cut(self, queue: deque[MicroBatch]) -> Iterator[list[int]]:
        for batch in self.batches:
            try:
                ids = [operator.index(i) for i in batch]
            except TypeError as error:
                raise PrivacySpecError(f"the loader's batch sampler gives keys that are no integers: {error}") from None
            if len(set(ids)) < len(ids):
                raise PrivateTrainingError(
                    "a batch holds the same sample twice, which then counts twice however its gradient is clipped. "
                    "Fix: sample without replacement, or with poisson_sampling=True"
                )
            size = self.limit or max(len(ids), 1)
            cuts = [ids[start : start + size] for start in range(0, len(ids), size)]
            cuts += [[]] * ((self.pieces or 1) - len(cuts))
            for place, cut in enumerate(cuts):
                last = place + 1 == len(cuts)
                queue.append(MicroBatch(torch.tensor(cut, dtype=torch.int64), place == 0, last, len(ids) > size))
                yield cut


class _Collate:
    """The user's collate function; for no samples, an empty batch of the same structure.

    The structure is that of dataset[0]; only its shapes and types are kept.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any, batch_first: bool, rand: bool) -> None:
        self.collate = collate
        self.batch_first = batch_first
        self.rand = rand
        # Read as torch's fetcher does: a dataset may have __getitems__ instead of __getitem__.
        samples = dataset.__getitems__([0]) if getattr(dataset, "__getitems__", None) else [dataset[0]]
        self.empty = self._empty(collate(samples))

    def __call__(self, samples: list[Any]) -> Any:
        if samples:
            return self.collate(samples)
        return self._empty(self.empty)  # a new one each time: the loop may change it

    def _empty(self, batch: Any) -> Any:
        if isinstance(batch, Tensor) and batch.ndim > 0:
            shape = list(batch.shape)
            # A vector has one entry per sample, even where matrices have the batch second.
            shape[0 if self.batch_first or len(shape) == 1 else 1] = int(self.rand)
            if self.rand:
                return torch.randint(0, 2, shape, device=batch.device).to(batch.dtype)
            return batch.new_empty(shape)
        if isinstance(batch, MutableMapping):
            clone = copy.copy(batch)  # keeps the type, such as a tokenizer's
            clone.update({key: self._empty(value) for key, value in batch.items()})
            return clone
        if isinstance(batch, list | tuple):
            if not self.rand and all(isinstance(entry, str | bytes) for entry in batch):
                return type(batch)()  # the default collate function gives strings this way: one per sample
            entries = [self._empty(entry) for entry in batch]
            return type(batch)(*entries) if hasattr(batch, "_fields") else type(batch)(entries)
        if batch is None:
            return None
        raise PrivacySpecError(
            f"collate_fn gives a {type(batch).__name__} without a row per sample. Poisson sampling can draw a batch of "
            "no samples, which needs that form too. Fix: give tensors with a row per sample, in tuples, lists or dicts"
        )


class PrivateLoader(PreparedForAccelerate, DataLoader[Any]):
    """A data loader that yields micro-batches, and announces each to `listener`. Made by `private_loader`.

    One iteration is live at a time: `iter(loader)` ends the previous one, whose iterator then raises when it is
    advanced. The listener gets None exactly once for each iteration that had begun, before the next one's first
    micro-batch.

    steps                   logical batches of an iteration, that is, optimizer steps
    micro_batches_per_step  into how many micro-batches each is cut, some of which may be empty; None where the sizes of
                            batches are not known
    len(loader)             the product: how many batches an iteration yields. A Poisson batch that does not fit, which
                            has a probability below `RARE`, yields more

    Guarantee: `hooks.pay` is called before the loop reads a logical batch, and the listener gets each micro-batch
    before the loop does. Workers may fetch ahead; what they fetched does not reach the loop before it is paid for.
    """

    def __init__(
        self,
        source: DataLoader[Any],
        splitter: _Splitter,
        collate_fn: Callable[[list[Any]], Any],
        generator: torch.Generator | None,
        listener: Listener,
        hooks: Hooks,
    ) -> None:
        self._hooks = hooks
        self.sample_rate = 1 / len(source)
        self.size = len(source.dataset)  # type: ignore[arg-type]
        self.expected_batch_size = max(1, self.size // len(source))  # not int(N · q), which rounding can put one lower
        self.max_physical_batch_size = splitter.limit
        self.steps = splitter.steps
        self.micro_batches_per_step = splitter.pieces
        self._splitter = splitter
        self._listener = listener
        self._turn = 0  # the number of iterators made so far
        self._running = False  # whether the newest of them has begun and not ended
        self._done = False  # whether it has handed out its last batch
        self._live: Callable[[], Generator[Any] | None] = lambda: None
        self.draws_ahead = False  # whether workers hold batches that the loop has not asked for yet
        kept = "num_workers pin_memory timeout worker_init_fn multiprocessing_context prefetch_factor"
        # By name: in `PoissonLoader`, super() is DPDataLoader, which would make its own sampler.
        DataLoader.__init__(
            self,
            source.dataset,
            batch_sampler=splitter,
            collate_fn=collate_fn,
            generator=generator,
            persistent_workers=source.persistent_workers,
            in_order=True,  # the queue of announcements depends on it
            **{name: getattr(source, name) for name in kept.split()},
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its own private class
        _check_caller(sys._getframe(1).f_globals.get("__name__"))
        self._end()
        self._turn += 1
        batches = self._iterate(self._turn)
        self._live = weakref.ref(batches)  # a loop that is left ends the iteration by letting go of it
        return batches

    def _iterate(self, turn: int) -> Generator[Any]:
        self._check(turn)
        self._running, self._done = True, False
        try:
            self._hooks.begin_epoch()
            self._hooks.pay()
            self._splitter.open = True
            try:
                batches = super().__iter__()
            finally:
                self._splitter.open = False
            self.draws_ahead = self.num_workers > 0
            queue, left = self._splitter.queue, self.steps - 1
            for batch in batches:
                micro = queue.popleft()
                self._listener(micro)
                self._done = micro.last and left == 0
                yield batch
                self._check(turn)
                if micro.last and left > 0:
                    left -= 1
                    self._hooks.pay()
            self._hooks.end_epoch()
        finally:
            if turn == self._turn:  # else the later iter() has announced the end
                self._end()

    def finish(self) -> None:
        """End the iteration if it has handed out its last batch, as a loop does that asks for one more.

        Trainers count batches, and never ask.
        """
        live = self._live()
        if self._running and self._done and live is not None:
            next(live, None)

    def leave(self) -> None:
        """End the iteration where it is, as `break` does; its iterator raises when it is advanced."""
        self._end()
        self._turn += 1

    def check_not_ahead(self) -> None:
        """Refuse to change the randomness while workers hold batches that were drawn with the old one."""
        if self.draws_ahead:
            raise PrivateTrainingError(
                "this resumed run departs from the recorded one in the middle of an epoch, when the loader's workers "
                "have drawn batches ahead that would come twice. Fix: change settings between epochs, or num_workers=0"
            )

    def _check(self, turn: int) -> None:
        if turn != self._turn:
            raise PrivateTrainingError(
                "this iterator over the private loader is out of date: iter(loader), or a new for loop, has begun "
                "another one since. Each optimizer step belongs to one batch, so iterate over a private loader "
                "once at a time"
            )

    def _end(self) -> None:
        if self._running:
            self._running = self._done = self.draws_ahead = False
            self._listener(None)


class PoissonLoader(PrivateLoader, DPDataLoader):  # type: ignore[misc]  # Opacus has no types
    """A `PrivateLoader` that is also Opacus' `DPDataLoader`: a sample is in a batch with probability `sample_rate`."""


def private_loader(
    data_loader: DataLoader[Any],
    *,
    max_physical_batch_size: int | None,
    poisson_sampling: bool,
    listener: Listener,
    hooks: Hooks | None = None,
    generator: torch.Generator | None = None,
    sampler_bits: Callable[[int], Tensor] | None = None,
    distributed: bool = False,
    batch_first: bool = True,
    rand_on_empty: bool = False,
) -> PrivateLoader:
    """A loader over the samples of `data_loader` that announces micro-batches of at most `max_physical_batch_size`.

    With `poisson_sampling`, batches are drawn as Opacus' `DPDataLoader` draws them: int(1/q) batches an epoch, each
    sample in each of them with probability q = 1/len(data_loader). Else they are the batches of `data_loader`. All
    batches have the same number of micro-batches (see `micro_batches`): full ones, at most one in part, empty ones.

    The randomness is `sampler_bits` (n -> n uniform numbers, see `secure_uniform`), else `generator`, else that of
    `data_loader`, else a new generator seeded from torch's global one. Without Poisson sampling the user's own sampler
    draws. `distributed`: every process draws the same batches, given the same randomness, and yields its share of each.
    With `rand_on_empty`, a batch of no samples is one row of random zeros and ones, as in Opacus; its `ids` are still
    empty.
    """
    limit: Any = max_physical_batch_size
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise PrivacySpecError(f"max_physical_batch_size={limit!r}: give an int from 1 up, or None for no limit")
    if sampler_bits is not None and not poisson_sampling:
        raise PrivacySpecError("sampler_bits is the randomness of Poisson sampling; give poisson_sampling=True")
    n, steps = _sizes(data_loader)
    generator = generator or data_loader.generator
    if not poisson_sampling:
        batches: Any = data_loader.batch_sampler
        largest = _largest(batches, n)
        pieces = 1 if limit is None else None if largest is None else math.ceil(largest / limit)
        splitter = _Splitter(batches, steps, limit, pieces)
        collate: Any = data_loader.collate_fn
        if pieces is not None and pieces > 1:  # the last batch may be smaller
            collate = _Collate(collate, data_loader.dataset, batch_first, rand_on_empty)
        return PrivateLoader(data_loader, splitter, collate, generator, listener, hooks or Hooks())
    sampler = data_loader.sampler
    if isinstance(sampler, DistributedSampler):
        raise PrivacySpecError(
            "the data loader has a DistributedSampler, but each process takes its share of every Poisson batch by "
            "itself. Fix: give a DataLoader without one, with the batch size of all processes together"
        )
    if not isinstance(sampler, RandomSampler | SequentialSampler) or len(sampler) != n:
        raise PrivacySpecError(
            "Poisson sampling draws from the whole dataset, and would ignore this loader's "
            f"{type(sampler).__name__}. Fix: for a part of the data give torch.utils.data.Subset(dataset, indices)"
        )
    if generator is None:
        generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
    if sampler_bits is not None:
        batches = SecurePoissonSampler(n, 1 / steps, sampler_bits)
    else:
        batches = UniformWithReplacementSampler(num_samples=n, sample_rate=1 / steps, generator=generator)
    # The largest share of the dataset, so that all processes take the same number.
    share = math.ceil(n / torch.distributed.get_world_size()) if distributed else n
    pieces = 1 if limit is None else micro_batches(share, 1 / steps, limit)
    splitter = _Splitter(_Share(batches) if distributed else batches, len(batches), limit, pieces)
    collate = _Collate(data_loader.collate_fn, data_loader.dataset, batch_first, rand_on_empty)
    loader = PoissonLoader(data_loader, splitter, collate, generator, listener, hooks or Hooks())
    loader.distributed = distributed
    return loader


def _largest(batches: Any, n: int) -> int | None:
    """The most samples in a batch of a batch sampler, as far as it says."""
    size = getattr(batches, "batch_size", None)
    if type(size) is int and size > 0:
        return min(size, n)
    if isinstance(batches, Sequence):
        return max((len(batch) for batch in batches), default=None)
    return None


def _sizes(data_loader: DataLoader[Any]) -> tuple[int, int]:
    """The numbers of samples and of batches of `data_loader`; raises if batches cannot be drawn from it."""
    if isinstance(data_loader, PrivateLoader):
        raise PrivacySpecError("this data loader is private already; give the one it was made from")
    if isinstance(data_loader.dataset, IterableDataset):
        raise PrivacySpecError(
            "batches are drawn by index, which an IterableDataset does not have; use a map-style one"
        )
    if data_loader.batch_sampler is None:
        raise PrivacySpecError("the data loader has batch_size=None, so it yields no batches; give it a batch_size")
    try:
        n = len(data_loader.dataset)  # type: ignore[arg-type]
        steps = len(data_loader)
    except (TypeError, NotImplementedError) as error:
        raise PrivacySpecError(f"the dataset and its batch sampler must have a length: {error}") from None
    if n == 0 or steps == 0:
        raise PrivacySpecError(f"the data loader has {n} samples in {steps} batches: there is nothing to train on")
    return n, steps
