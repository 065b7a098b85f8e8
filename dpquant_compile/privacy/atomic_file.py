"""Files that are there whole or not at all: what ledgers and checkpoints are written by."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["sync_folder", "write_whole"]


def write_whole(path: Path, write: Callable[[BinaryIO], Any], placed: Callable[[], None] = lambda: None) -> None:
    """Replace the file at `path` by one that `write` fills, durably.

    Requires: the folder exists, and one process at a time writes the file.
    Ensures: whoever reads `path`, at any time and after any crash, finds the old file or the new one, each whole. When
    this returns, the new one outlives a loss of power too. Errors, of `write` or of the disk, are raised as they are:
    one before `placed` was called has left the old file, and after it the new file is there, though it may be lost with
    the power. The temporary file is `path` with a dot before its name and .tmp behind it; the next write overwrites one
    that a crash has left.
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
    """Make the names in a folder outlive a loss of power."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
