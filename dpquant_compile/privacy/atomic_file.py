"""Atomic, durable file writes, for ledgers and checkpoints."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["sync_folder", "write_whole"]


def write_whole(path: Path, write: Callable[[BinaryIO], Any], placed: Callable[[], None] = lambda: None) -> None:
    """Replace the file at `path` by one that `write` fills, atomically and durably.

    Requires: the folder exists, and one process at a time writes the file.
    Ensures: a reader of `path`, at any time and after any crash, finds the whole old file or the whole new one. Once
    this returns, the new file also survives a loss of power. Errors of `write` or of the disk are raised unchanged:
    before the call of `placed` they leave the old file; after it the new file is in place, but a loss of power may undo
    that. The temporary file is `.<name>.tmp` in the same folder; the next write overwrites one that a crash has left.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    placed()
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a loss of power."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
