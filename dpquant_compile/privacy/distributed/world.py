"""Processes that train together: the parts of `torch.distributed` that private training needs.

Each process holds the whole model, or shards of it (`shards`), and works on its own share of every batch. Rank 0 alone
draws the samples of a batch and the policies, and sends them to the others by a collective. So different seeds cannot
make processes diverge. Each process draws the noise of its own part of the values, so that each value gets noise once.

Two rules keep the collectives of all processes in step. They are called only where every process passes in the same
order, however many micro-batches its share has: at the ends of logical batches and of epochs. And none is called while
an exception propagates, since the other processes wait elsewhere.
"""

import hashlib
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from dpquant_compile.errors import DistributedError, DPQuantError, LedgerError
from dpquant_compile.privacy.accounting.replay_check import fingerprint

if TYPE_CHECKING:
    from dpquant_compile.privacy.accounting.ledger import Ledger
    from dpquant_compile.privacy.clipping.runtime import Session

__all__ = [
    "Traffic",
    "World",
    "buckets",
    "call_roll",
    "copy_ledger",
    "described",
    "init_process_group",
    "wide_sums",
]

# Size of a bucket, as in DistributedDataParallel: one bucket is summed while the next one is filled.
BUCKET_BYTES = 25 * 2**20

_USE = "parameters in use"
_NAMED = 5  # differences that a message names

T = TypeVar("T")


def init_process_group(backend: str = "gloo", *, timeout: timedelta | None = None, **options: Any) -> None:
    """`torch.distributed.init_process_group`, for processes that torchrun may restart.

    torchrun keeps one store through all restarts, which holds the addresses of ended processes: a restarted process may
    connect to those, and time out. Here each restart uses its own names in that store. Other options are passed on.
    Without torchrun, or with your own `store` or `init_method`, it is the plain call.

    On several nodes it is the plain call too. Each node's torchrun counts its own restarts, and does not count those
    that another node caused: names would differ between nodes, and the processes would never meet.
    """
    if _restarts_are_ours(options):
        from torch.distributed.distributed_c10d import PrefixStore  # not in every build of torch
        from torch.distributed.rendezvous import rendezvous

        asked: dict[str, Any] = {name: options.pop(name) for name in ("rank", "world_size") if name in options}
        if timeout is not None:
            asked["timeout"] = timeout
        store, rank, size = next(rendezvous("env://", **asked))
        named = PrefixStore(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        options = {**options, "init_method": None, "store": named, "rank": rank, "world_size": size}
    dist.init_process_group(backend, timeout=timeout, **options)


def _restarts_are_ours(options: Mapping[str, Any]) -> bool:
    """Whether one torchrun started all processes, and they meet at its store."""
    one_node = "TORCHELASTIC_RESTART_COUNT" in os.environ and os.environ.get("GROUP_WORLD_SIZE") == "1"
    return one_node and options.get("store") is None and options.get("init_method") in (None, "env://")


@dataclass
class Traffic:
    """Communication cost of this process so far."""

    waiting: float = 0.0  # seconds until the slowest process arrived
    moving: float = 0.0  # seconds from then until the sums over all processes arrived
    bytes: int = 0  # of those sums


class World:
    """The processes that train together, seen from one of them. Alone, every method returns at once.

    rank, size   which process this is, of how many
    step         optimizer steps so far, for messages
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.step = 0
        self.traffic = Traffic()

    @classmethod
    def current(cls) -> "World":
        """The world of the default process group, or a single process if there is none."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    def count_step(self) -> None:
        """Count an optimizer step."""
        self.step += 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which draws random values and writes files."""
        return self.rank == 0

    def share(self, ids: Tensor) -> Tensor:
        """The samples that this process works on."""
        return ids[ids % self.size == self.rank]

    def on_first(self, what: str, make: Callable[[], T]) -> T:
        """The value of `make` on rank 0, sent to every process. An error in it is raised on every process.

        `what` names the value and is sent with it: `DistributedError` if this process waits for something else.
        """
        if self.size == 1:
            return make()
        value: Any = None
        failure: Exception | None = None
        sent: list[Any] = [what, b"", None]
        if self.first:
            try:
                value = make()
                sent[1] = pickle.dumps(value)
            except Exception as error:  # of any type: the others must not wait for a value
                failure, sent[2] = error, _portable(error)
        with self.guarded(f"for {what} of rank 0"):
            dist.broadcast_object_list(sent, src=0)
        told, data, theirs = sent
        if told != what:
            raise DistributedError(
                f"rank {self.rank} of {self.size} is out of step: it waits for {what} of rank 0, which has come to "
                f"{told}. Fix: let every process go through the same loop over the loader, call scheduler.step(), "
                "save_checkpoint() and load_checkpoint() as often as the others, and go on from the last checkpoint"
            )
        failure = failure or theirs
        if failure is not None:
            raise failure
        result: T = value if self.first else pickle.loads(data)
        return result

    def gathered(self, value: T) -> list[T]:
        """The value of every process, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.guarded("to hear from all"):
            dist.all_gather_object(values, value)
        return values

    def differing(self, facts: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The facts on which processes differ, with the value of each process; costs 16 bytes if none differs."""
        if self.size == 1:
            return {}
        digest = hashlib.blake2b(repr(sorted(facts.items())).encode(), digest_size=7).digest()
        number = int.from_bytes(digest, "big")
        bounds = torch.tensor([number, -number], device=self._device)
        started = time.perf_counter()
        with self.guarded("for the others"):
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
        self.traffic.waiting += time.perf_counter() - started
        if int(bounds[0]) == -int(bounds[1]):
            return {}
        told = self.gathered(dict(facts))
        names = sorted({name for one in told for name in one})
        values = {name: [one.get(name) for one in told] for name in names}
        return {name: each for name, each in values.items() if len({repr(value) for value in each}) > 1}

    def agree(self, when: str, facts: Mapping[str, Any]) -> None:
        """Raise `DistributedError` on every process unless the facts are equal on all."""
        if differing := self.differing(facts):
            raise apart(when, differing)

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums of the tensors over all processes, bit for bit equal on each; buckets are sent concurrently."""
        if self.size == 1:
            return list(tensors)
        started = time.perf_counter()
        result, running = list(tensors), []
        with self.guarded("for sums of clipped gradients"):
            for places in buckets(tensors):
                flat = self._carried(torch.cat([tensors[i].reshape(-1) for i in places]))
                running.append((places, flat, dist.all_reduce(flat, async_op=True)))
            for places, flat, work in running:
                assert work is not None
                work.wait()
                for i, part in zip(places, flat.split([tensors[i].numel() for i in places]), strict=True):
                    result[i] = part.view(tensors[i].shape).to(tensors[i].device)
                self.traffic.bytes += flat.numel() * flat.element_size()
        self.traffic.moving += time.perf_counter() - started
        return result

    def sum_parts(self, tensors: Sequence[Tensor], start: int, stop: int, whole: int) -> list[Tensor]:
        """`sum` of tensors to which each process has added noise from value `start` up to `stop`, of `whole` in all.

        Guarantee: raises `DistributedError` on every process, and returns no sum, unless the parts of the processes of
        the group make up the whole, and no two have a value in common.
        """
        self.check_group()
        told = torch.zeros(self.size, 3, dtype=torch.int64, device="cpu")
        told[self.rank] = torch.tensor([start, stop, whole], device="cpu")
        *sums, told = self.sum([*tensors, told])
        parts = sorted((first, last) for first, last, _ in told.tolist() if first < last)
        ends = [0, *(last for _, last in parts)]
        if [first for first, _ in parts] + [whole] != ends or told[:, 2].ne(whole).any():
            raise DistributedError(
                f"the parts of the noise that the processes have added do not make up all {whole} values: "
                f"{told.tolist()}, as first, last and number of values by rank. Nothing was released. Fix: run the "
                "same release of dpquant_compile on every process, and go on from the last checkpoint"
            )
        return sums

    def check_group(self) -> None:
        """Refuse to go on with other processes than those that the run was made on."""
        if self.size > 1 and (dist.get_rank(), dist.get_world_size()) != (self.rank, self.size):
            raise DistributedError(
                f"this run was made as rank {self.rank} of {self.size} processes, and this is now rank "
                f"{dist.get_rank()} of {dist.get_world_size()}: a part of the values would get no noise. Fix: call "
                "make_private, and load the checkpoint, after each init_process_group"
            )

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors by those of rank 0, bit for bit."""
        if self.size == 1:
            return
        with torch.no_grad(), self.guarded("for the parameters of rank 0"):
            for places in buckets(tensors):
                flat = self._carried(torch.cat([tensors[i].detach().reshape(-1) for i in places]))
                dist.broadcast(flat.view(torch.uint8), src=0)
                for i, part in zip(places, flat.split([tensors[i].numel() for i in places]), strict=True):
                    if not self.first:
                        tensors[i].copy_(part.view(tensors[i].shape))

    def _carried(self, flat: Tensor) -> Tensor:
        """The tensor on a device that the backend supports: analyses add up on the CPU."""
        return flat.to(self._device) if self._device.type != "cpu" and not flat.is_cuda else flat

    @property
    def _device(self) -> torch.device:
        if dist.get_backend() == "nccl":  # supports no CPU tensors
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Turn the backend's error for a lost process into one that says what is lost and what is not."""
        try:
            yield
        except DPQuantError:
            raise
        except RuntimeError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise DistributedError(
                f"rank {self.rank} of {self.size} lost touch with the other processes after {self.step} optimizer "
                f"steps of this run, while it waited {what} ({reason}). One of them has ended, or cannot be reached: "
                "its own output says why. No entry of the privacy ledger is lost, since rank 0 writes each before the "
                "sums that it pays for are added up. Fix: start all processes again from the last checkpoint; torchrun "
                "--max-restarts=N does so for a script that loads its checkpoint where there is one"
            ) from error


def apart(when: str, differing: Mapping[str, Sequence[Any]]) -> DistributedError:
    """The error for processes that have diverged: what differs, and on which ranks."""
    parts = []
    for name, values in list(differing.items())[:_NAMED]:
        ranks: dict[str, list[str]] = {}
        for rank, value in enumerate(values):
            ranks.setdefault(_short(str(value)), []).append(str(rank))
        parts.append(f"{name}: " + ", ".join(f"{value} on rank {' and '.join(own)}" for value, own in ranks.items()))
    if len(differing) > _NAMED:
        parts.append(f"and {len(differing) - _NAMED} more")
    return DistributedError(
        f"the processes that train together differ {when}. {'; '.join(parts)}. Fix: run the same script with the same "
        "arguments and data on every process, change model, policy, optimizer and ledger on all of them alike, and go "
        "on from the last checkpoint"
    )


def copy_ledger(world: World, ledger: "Ledger") -> None:
    """Copy the ledger of rank 0, which alone has a file, to every process.

    Guarantee: if a process has spends that rank 0 lacks, every process raises `LedgerError`, and no ledger changes.
    """
    *target, state = world.on_first(
        "the ledger", lambda: (ledger.target_epsilon, ledger.target_delta, ledger.state_dict())
    )
    ahead = [str(rank) for rank, found in enumerate(world.gathered(ledger.is_ahead_of(state))) if found]
    if ahead:
        raise LedgerError(
            f"rank {' and '.join(ahead)} of {world.size} has privacy spends that rank 0 lacks, and a copy of rank 0's "
            "ledger would drop them. Fix: give every run of several processes a new PrivacyEngine on each of them, or "
            "enter the missing spends in the ledger of rank 0"
        )
    if not world.first:
        ledger.target_epsilon, ledger.target_delta = target
        ledger.mirror(state)


def call_roll(world: World, session: "Session", facts: Mapping[str, Any]) -> None:
    """Check that all processes are about to add up the same sums.

    A parameter that only some processes have used so far counts as used on all from here on, and gets noise.
    """
    differing = world.differing({**facts, _USE: tuple(sorted(session.used))})
    for names in differing.pop(_USE, ()):
        session.add_used(names)
    if differing:
        raise apart("at an optimizer step", differing)


def wide_sums(session: "Session", sums: Mapping[str, Tensor | None], names: Sequence[str]) -> list[Tensor]:
    """The clipped sums of a process by name, zeros where it has none; float64 for float64 parameters, else float32."""
    wide = []
    for name in names:
        parameter, total = session.parameters[name], sums[name]
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        if total is None:
            wide.append(torch.zeros(parameter.shape, dtype=dtype, device=parameter.device))
        else:
            wide.append(total.to(dtype).reshape(parameter.shape))
    return wide


def described(dataset: Any) -> str:
    """A description of a dataset that is compared without reading samples, which transforms may change each time.

    An index must mean the same record on every process, else one record can be in two shares and count twice.
    """
    if isinstance(dataset, Subset):
        digest = hashlib.blake2b(repr([int(i) for i in dataset.indices]).encode(), digest_size=8).hexdigest()
        return f"Subset {digest} of {described(dataset.dataset)}"
    if isinstance(dataset, TensorDataset):
        return f"TensorDataset {fingerprint(dataset.tensors)}"
    return f"{type(dataset).__name__} of {len(dataset)}"


def buckets(tensors: Sequence[Tensor], limit: int | None = None) -> list[list[int]]:
    """The indices of tensors that are sent together: of one type and device, up to `limit` bytes or one tensor."""
    limit = BUCKET_BYTES if limit is None else limit
    made: list[list[int]] = []
    open_bucket: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        kind, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size()
        bucket, filled = open_bucket.get(kind, ([], limit))
        if filled + size > limit:
            bucket, filled = [], 0
            made.append(bucket)
        bucket.append(i)
        open_bucket[kind] = (bucket, filled + size)
    return made


def _portable(error: Exception | None) -> Exception | None:
    """An error that can be pickled; another one is replaced by its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # its own methods may raise anything
        return DistributedError(f"rank 0 raised {type(error).__name__}: {error}")
    return error


def _short(text: str, limit: int = 160) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"
