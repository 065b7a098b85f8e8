"""`FileLock`: exclusive ownership of a file, across processes and within each process.

The lock is advisory (`flock`) and lies on a separate file: each write replaces the ledger, and a lock on the ledger
itself would stay with the replaced file.
"""

import fcntl
import gc
import os
import weakref
from pathlib import Path

from dpquant_compile.errors import LedgerError

__all__ = ["FileLock"]


class FileLock:
    """The right to write the file at `path`, held until `release`, garbage collection or the end of the process.

    Requires: `path` is absolute and without symlinks, and its folder exists.
    Guarantee: no second `FileLock` of that path exists meanwhile, in this or another process; making one raises
    `LedgerError`, which names the owner. A forked child holds neither the lock nor a descriptor that keeps it alive.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(f".{path.name}.lock")
        if _held_here(self.path):
            gc.collect()  # an unreachable engine may not have been collected yet
        if _held_here(self.path):  # checked here, since NFS grants a second lock to the process that has the first
            raise LedgerError(_in_use(path, f"this process ({os.getpid()}) itself"))
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise LedgerError(
                f"The privacy ledger {path} cannot be locked, since {self.path} cannot be written ({error}). Fix: make "
                f"the folder {path.parent} writable, or read the ledger with Ledger.read, which takes no lock."
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise LedgerError(_in_use(path, f"process {owner}" if owner else "another process")) from None
        except OSError as error:
            os.close(self._descriptor)
            raise LedgerError(
                f"The privacy ledger {path} cannot be locked: the filesystem of the folder {path.parent} has no locks "
                f"({error}), and two processes that write one ledger lose spends. Fix: put the ledger into a folder "
                "on a local disk, or on a network filesystem with flock."
            ) from error
        self._finalizer = weakref.finalize(self, _unlock, self._descriptor)
        _HELD.add(self)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()} on {os.uname().nodename}\n".encode(), 0)

    def check(self) -> None:
        """Raise `LedgerError` if the lock file was removed: the lock then no longer excludes others."""
        try:
            there, ours = os.stat(self.path), os.fstat(self._descriptor)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            raise LedgerError(
                f"The lock file {self.path} was removed while this process held it, so another process may have opened "
                "the privacy ledger. Nothing was spent. Fix: leave the file in its place (a lock ends with its "
                "process, the file may stay), make sure that one process uses the ledger, and open the ledger again."
            )

    def release(self) -> None:
        """Give up the lock; repeated calls do nothing."""
        _HELD.discard(self)
        self._finalizer()

    def abandon(self) -> None:
        """In a forked child: close the descriptor, and leave the lock with the parent."""
        _HELD.discard(self)
        if self._finalizer.detach() is not None:
            os.close(self._descriptor)  # without LOCK_UN, which would release the parent's lock


_HELD: "weakref.WeakSet[FileLock]" = weakref.WeakSet()


def _held_here(path: Path) -> bool:
    return any(lock.path == path for lock in _HELD)


def _unlock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # also releases it for a process that shares the descriptor without a fork
    os.close(descriptor)


def _in_use(path: Path, owner: str) -> str:
    return (
        f"The privacy ledger {path} is in use by {owner}. One engine at a time may write a ledger, since two would "
        "overwrite each other's spends. Fix: end that process, or call close() on its engine or ledger. "
        "Ledger.read(path) reads a ledger that is in use."
    )


def _abandon_all() -> None:
    for lock in list(_HELD):
        lock.abandon()


os.register_at_fork(after_in_child=_abandon_all)
