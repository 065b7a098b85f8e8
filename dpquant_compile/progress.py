"""`progress`: a line on standard error that tells what is compiled, and how far it is."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress"]

_LOG = logging.getLogger("dpquant_compile")
_EVERY = 1.0  # seconds; what takes less shows nothing


@contextmanager
def progress(what: str, *parts: str) -> Iterator[Callable[[], None]]:
    """Show that `what` is compiled, part by part; call the function that this gives when a part begins.

        dpquant: compiling private program, 2 of 3 (forward), 12 s

    The line is shown if standard error is a terminal, from the first second on. `DPQUANT_PROGRESS=1` in the environment
    shows it everywhere, and `DPQUANT_PROGRESS=0` nowhere. Within a compilation that shows its own line, another one
    shows none. The logger "dpquant_compile" gets the seconds of each part, at level INFO.
    """
    line = _Line(what, parts)
    shown = _wanted() and _ONE.acquire(blocking=False)
    ticker = threading.Thread(target=line.run, name="dpquant-progress", daemon=True) if shown else None
    if ticker is not None:
        ticker.start()
    try:
        yield line.begin_part
    finally:
        line.end()
        if ticker is not None:
            ticker.join()
            _ONE.release()


_ONE = threading.Lock()


def _wanted() -> bool:
    asked = os.environ.get("DPQUANT_PROGRESS", "")
    return asked != "0" if asked else sys.stderr.isatty()


class _Line:
    """The line of one compilation. It is rewritten in place on a terminal, and printed once for each part elsewhere."""

    def __init__(self, what: str, parts: tuple[str, ...]) -> None:
        self.what, self.parts = what, parts
        self._begun = self._part_begun = time.perf_counter()
        self._part = -1 if parts else 0
        self._ended = threading.Event()

    def begin_part(self) -> None:
        """The next part begins."""
        self._log_part()
        self._part, self._part_begun = self._part + 1, time.perf_counter()

    def end(self) -> None:
        """Nothing is compiled any more."""
        self._log_part()
        self._ended.set()

    def run(self) -> None:
        """Show the line until the end; erase it then."""
        # A bar of rich takes standard error over, and shows whole lines alone, above the bar.
        in_place = sys.stderr.isatty() and sys.stderr is sys.__stderr__
        seen = None
        while not self._ended.wait(_EVERY):
            part = self._part
            if in_place:
                sys.stderr.write(f"\r{self.text()}\x1b[K")
            elif part != seen:
                sys.stderr.write(f"{self.text()}\n")
            sys.stderr.flush()
            seen = part
        if in_place and seen is not None:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def text(self) -> str:
        """What the line says now."""
        place = f", {self._part + 1} of {len(self.parts)} ({self.parts[self._part]})" if self._in_part else ""
        return f"dpquant: compiling {self.what}{place}, {time.perf_counter() - self._begun:.0f} s"

    @property
    def _in_part(self) -> bool:
        return 0 <= self._part < len(self.parts)

    def _log_part(self) -> None:
        seconds = time.perf_counter() - self._part_begun
        if self._in_part:
            _LOG.info("compiled %s, %s: %.1f s", self.what, self.parts[self._part], seconds)
        elif not self.parts:
            _LOG.info("compiled %s: %.1f s", self.what, seconds)
