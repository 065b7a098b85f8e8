"""Releases: fingerprints of noised values, by which a resumed run is seen to repeat the one that was interrupted.

A resumed run goes through the steps since its checkpoint again, with the same noise, and is not charged for them twice.
That is right only if it releases the very same values. With a changed learning rate, other data or other code it would
add the same noise to another sum, and the difference of the two would be bare. So each release leaves a fingerprint in
a file beside the ledger, and a repetition that differs is stopped before anything uses it.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dpquant_compile.errors import PrivateTrainingError
from dpquant_compile.private.files import sync_folder

__all__ = ["Releases", "fingerprint"]


def fingerprint(values: Sequence[Tensor]) -> str:
    """64 bits of the values' own bits; quick, and meant for accidents, not for attacks."""
    total = 0
    for value in values:
        bits = value.detach().to(torch.float32).contiguous().view(torch.int32)
        total = (total * 0x100000001B3 + int(bits.sum(dtype=torch.int64))) % (1 << 64)
    return f"{total:016x}"


class Releases:
    """The fingerprints of runs, in a file that is only ever added to.

    Its lines are: run, number of the release, fingerprint. A line that a crash cut short counts for nothing: that
    release never got past it.
    """

    def __init__(self, ledger: Path) -> None:
        self.path = ledger.with_name(f"{ledger.name}.releases")
        self._known: dict[tuple[str, int], str] = {}
        self._worlds: set[tuple[str, int, int]] = set()  # (run, releases before, processes) of those that went on
        self._cut = False  # whether the last line lacks its end
        if self.path.exists():
            text = self.path.read_text(encoding="utf-8")
            self._cut = bool(text) and not text.endswith("\n")
            for line in text.splitlines():
                run, _, rest = line.partition(" ")
                number, _, value = rest.partition(" ")
                if number.isdigit() and len(value) == 16:
                    self._known[run, int(number)] = value
                elif number.isdigit() and value.startswith("world ") and value[6:].isdigit():
                    self._worlds.add((run, int(number), int(value[6:])))

    def went_on_elsewhere(self, run: str, number: int, size: int) -> bool:
        """Whether another number of processes went on with a run after its release `number`: its sums differ."""
        return any(name == run and at >= number and other != size for name, at, other in self._worlds)

    def go_on(self, run: str, number: int, size: int) -> None:
        """Note that this number of processes goes on with a run that another had begun."""
        self._worlds.add((run, number, size))
        self._append(f"{run} {number} world {size}")

    def _append(self, line: str) -> None:
        new = not self.path.exists()
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{chr(10) * self._cut}{line}\n")
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync_folder(self.path.parent)
        self._cut = False

    def check(self, run: str, number: int, values: Sequence[Tensor]) -> None:
        """Note a release, or raise if it was made before and differs."""
        value, key = fingerprint(values), (run, number)
        if key not in self._known:
            self._known[key] = value
            self._append(f"{run} {number} {value}")
        elif self._known[key] != value:
            raise PrivateTrainingError(
                f"this resumed run does not repeat the interrupted one: release {number} since it began has other "
                "values, and would carry the same noise. Something changed: the learning rate, the data, the loss, the "
                "code, or the number of threads. Fix: resume as it was, or load the checkpoint with replay=False, "
                "which takes new noise and charges the steps since the checkpoint again"
            )
