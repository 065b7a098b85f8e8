"""How the tests of several processes start them: one group on the loopback interface, one thread each."""

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dpquant_compile as dpq

# The processes are forked off a server that has imported what takes seconds. It does not find files in this folder.
CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = ["dpquant_compile", "torch.distributed.checkpoint", "torch._inductor.standalone_compile"]

_KNOWN: dict[tuple[str, str], Any] = {}


@dataclass(frozen=True)
class Raised:
    """How a process ended that raised."""

    kind: str
    text: str
    trace: str = ""


def together(size: int, work: Callable[..., Any], *args: Any, folder: Path, seconds: float = 120) -> list[Any]:
    """What `work(*args)` gave on each of `size` processes of one group; None for one that died without a word."""
    CONTEXT.set_forkserver_preload(PRELOAD)
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    pipes, processes = [], []
    for rank in range(size):
        receiver, sender = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_enter, args=(rank, size, meeting, sender, work, args))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    until, results = time.monotonic() + seconds, []
    try:
        for receiver in pipes:
            assert receiver.poll(max(0.0, until - time.monotonic())), f"no answer after {seconds} s"
            try:
                results.append(pickle.loads(receiver.recv_bytes()))
            except EOFError:
                results.append(None)
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            process.kill()
    return results


def alone(work: Callable[..., Any], *args: Any, folder: Path) -> Any:
    """The same on one process, without a group; once, since it gives the same each time."""
    key = (work.__name__, repr(args))
    if key not in _KNOWN:
        (_KNOWN[key],) = succeeded(together(1, work, *args, folder=folder))
    return _KNOWN[key]


def succeeded(results: Sequence[Any]) -> list[Any]:
    """The results, of which none is an error."""
    for rank, result in enumerate(results):
        assert not isinstance(result, Raised), f"rank {rank}: {result.trace}"
        assert result is not None, f"rank {rank} died"
    return list(results)


def _enter(rank: int, size: int, meeting: Path, tell: Any, work: Callable[..., Any], args: Sequence[Any]) -> None:
    settle_down()
    if size > 1:
        meet(init_method=f"file://{meeting}", rank=rank, world_size=size)
    try:
        result = work(*args)
    except Exception as error:
        result = Raised(type(error).__name__, str(error), traceback.format_exc())
    tell.send_bytes(pickle.dumps(result))  # by value: shared memory would need this process to stay
    tell.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def settle_down() -> None:
    """One thread."""
    torch.set_num_threads(1)


def meet(**options: Any) -> None:
    """Join the group."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dpq.init_process_group(timeout=timedelta(seconds=40), **options)


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-5) -> bool:
    return all(float((a[name] - b[name]).norm()) <= tolerance * max(float(b[name].norm()), 1e-6) for name in b)


def same(results: list[dict[str, Any]], name: str) -> bool:
    """Whether all processes have the very same value."""
    first = results[0][name]
    if isinstance(first, dict) and first and isinstance(next(iter(first.values())), torch.Tensor):
        return all(torch.equal(result[name][key], first[key]) for result in results for key in first)
    return all(result[name] == first for result in results)


def on_disk(path: Path) -> int:
    """The number of spends in a ledger's file."""
    return sum(entry.steps for entry in dpq.Ledger.read(path).entries)
