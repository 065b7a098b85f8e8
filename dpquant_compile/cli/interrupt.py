"""Ctrl-C while `dpquant` is still importing torch: one line and exit code 130 instead of a traceback.

`dpquant_compile/__init__.py` imports this first, before the imports that take seconds. It does nothing in a process
that is not `dpquant`, nor in its workers.
"""

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from dpquant_compile.cli.command import INTERRUPTED

__all__ = ["raise_again"]


def _is_command() -> bool:
    if multiprocessing.parent_process() is not None:
        return False  # a worker of a sweep, which has its parent's arguments
    as_module = sys.argv[:1] == ["-m"] and "dpquant_compile.cli" in sys.orig_argv
    return as_module or bool(sys.argv and Path(sys.argv[0]).name in ("dpquant", "dpquant.exe"))


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"dpquant: interrupted\n")
    os._exit(INTERRUPTED)  # nothing has started yet, and an exception might be lost inside a C extension


def raise_again() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, which a command handles."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# A process that was started to ignore the signal, such as a shell's background job, still ignores it.
if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)
