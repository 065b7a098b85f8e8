"""`PrivateView`: the private program of a model as text, with what its lines compute."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpquant_compile.passes.runner import PassRecord, called_programs

__all__ = ["PrivateView"]

# What a line computes, by the name of its result; `trace_joint` gives these names.
_KINDS = {"squared_norms": "norms", "clip_factors": "factors", "clipped_sum": "sums", "samples_left_out": "factors"}


@dataclass(frozen=True)
class PrivateView:
    """The passes that made a private program, its two programs, and how each parameter is clipped.

    passes      headlines of the records, in order
    programs    forward and backward: their lines, each with what it computes ("norms", "factors", "sums" or "")
    parameters  parameter, its uses, and how its per-sample gradients are computed
    """

    passes: tuple[str, ...]
    programs: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    parameters: tuple[tuple[str, str, str], ...]

    @staticmethod
    def build(log: Sequence[PassRecord], parameters: Sequence[tuple[str, str, str]]) -> "PrivateView | None":
        """The last private program in a log of passes; None if there is none."""
        first = max((place for place, record in enumerate(log) if record.name == "trace_joint"), default=len(log))
        last = max((place for place in range(first, len(log)) if called_programs(log[place].after)), default=None)
        if last is None:
            return None
        records, programs = log[first : last + 1], called_programs(log[last].after)
        shown = tuple((name.removeprefix("private_"), _lines(text)) for name, text in programs.items())
        return PrivateView(tuple(r.headline.removeprefix("# ") for r in records), shown, tuple(parameters))

    def to_json(self) -> dict[str, Any]:
        """The data of the page."""
        return {"passes": self.passes, "programs": self.programs, "parameters": self.parameters}


def _lines(text: str) -> tuple[tuple[str, str], ...]:
    """The lines of a program, each with what it computes; without fx's statements that clear names."""
    found = []
    for line in text.splitlines():
        shown = re.sub(r";  (\w+ = )+None$", "", line).removeprefix("    ")
        if shown.strip():
            name = shown.partition(" = ")[0]
            found.append((shown, next((kind for prefix, kind in _KINDS.items() if name.startswith(prefix)), "")))
    return tuple(found)
