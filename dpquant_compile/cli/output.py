"""`Output`: results on standard output, as tables or as JSON; everything else on standard error."""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["Output", "shape", "share", "table"]

# Width where there is no terminal: wide enough that no table is wrapped.
_FILE_WIDTH = 200


class Output:
    """Prints the output of a command.

    With `as_json`, standard output gets one JSON document and nothing else. rich respects NO_COLOR and output that is
    not a terminal.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._shown = _console(sys.stdout)
        self.log = _console(sys.stderr)  # progress and remarks

    def result(self, document: Any, *shown: RenderableType) -> None:
        """Print `document` as JSON, or else `shown`. Numbers that JSON lacks, such as infinity, become null."""
        if self.as_json:
            sys.stdout.write(json.dumps(_plain(document), indent=2, allow_nan=False) + "\n")
        else:
            for part in shown:
                self._shown.print(part)

    def part(self, *shown: RenderableType) -> None:
        """Print a part of a result that has more to come; nothing with `as_json`, whose document is whole."""
        if not self.as_json:
            self.result(None, *shown)

    def note(self, message: str) -> None:
        """Print a remark to standard error."""
        self.log.print(message, soft_wrap=True)


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None, right: Sequence[str] = ()
) -> RenderableType:
    """A table of text below its title; the columns named in `right` are right-aligned."""
    made = Table(header_style="bold", box=None, pad_edge=False)
    for name in head:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made if title is None else Group(Text(title, style="bold"), made)


def share(value: float | None) -> str:
    """A share as a percentage; a dash for None."""
    return "–" if value is None else f"{100 * value:.1f} %"


def shape(sizes: Sequence[int] | None) -> str:
    """The sizes of a tensor; a dash if unknown."""
    return "–" if sizes is None else "×".join(map(str, sizes))


def _console(file: TextIO) -> Console:
    # No markup: names of sites and messages may hold brackets.
    fixed = not file.isatty() and "COLUMNS" not in os.environ
    return Console(file=file, markup=False, highlight=False, emoji=False, width=_FILE_WIDTH if fixed else None)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, os.PathLike) else value
