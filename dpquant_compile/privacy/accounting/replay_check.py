"""Fingerprints of releases: the check that a resumed run repeats the interrupted one.

A resumed run repeats the steps since its checkpoint with the same noise, and is not charged for them twice. That is
sound only if it releases exactly the same values. With a changed learning rate, other data or other code it would add
the same noise to another sum, and would reveal the difference of the two sums. So each release leaves a fingerprint in
a file beside the ledger, and a repetition that differs is stopped before anything uses it.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dpquant_compile.errors import PrivateTrainingError
from dpquant_compile.privacy.accounting.prints import gmac
from dpquant_compile.privacy.atomic_file import sync_folder

__all__ = ["Releases", "fingerprint"]

_EARLIER = re.compile(r"[0-9a-f]{16}")  # a fingerprint by an earlier version, too short to be unique
_LINE = re.compile(r"(\S+) (\d+) ([0-9a-f]{32}|[0-9a-f]{16}|dropped|begun|world (\d+))")
_DROPPED = "dropped"
_SAME_NOISE = (
    "this run is about to release the very values of an earlier release in this ledger, so both have the same noise, "
    "as runs with one seed do. Any later difference between the two runs would show data without noise. Fix: "
    "PrivacyEngine(secure_mode=True), or another seed or noise_generator for each run; to resume, load the checkpoint"
)
_ANEW = "load the checkpoint with replay=False, which takes new noise and charges the steps since the checkpoint again"


def fingerprint(values: Sequence[Tensor]) -> str:
    """128 bits of the values' dtypes, shapes and bytes, in their order: their `gmac`.

    Any accidental change alters it. It does not resist an attacker: the key is public, so two values with the same
    fingerprint can be constructed. Values that lie on another device have other fingerprints.
    """
    return gmac(values)


@dataclass(frozen=True)
class _Payment:
    """A spend whose release is due: spend `number` of a run that had `recorded` spends on record when it resumed."""

    run: str
    number: int
    recorded: int


class Releases:
    """The outcomes of the spends of runs, in an append-only file; in memory if the ledger has no file.

    Its lines are a run, the number of a spend, and one of
      <fingerprint>  the spend's release, recorded before anything uses it
      dropped        the spend had no release, recorded before the next one
      begun          nothing was spent after this number yet, recorded before the next spend: all later ones are here
      world <n>      from here on n processes continued a run that another number of processes had begun
    A line that a crash cut short is ignored: that release was never used. A fingerprint of 16 digits is of an earlier
    version: it shows that there was a release, but not which values it had.

    For each spend the order is `settle`, `note_begun`, `pay` with the spend itself, and then `note`, or none.

    Guarantee: noise that may have been used is not used for another sum. While a resumed run repeats recorded spends,
    each must have the same outcome as before. The outcome may be unknown only for the last spend on record, if the run
    was interrupted between payment and release. If it is unknown for another one, lines are missing, and the run is
    stopped.
    """

    def __init__(self, ledger: Path | None) -> None:
        self.path = None if ledger is None else ledger.with_name(f"{ledger.name}.releases")
        self._known: dict[tuple[str, int], str] = {}
        self._last: dict[str, int] = {}
        self._worlds: set[tuple[str, int, int]] = set()  # (run, releases before, processes) of continued runs
        self._due: _Payment | None = None
        self._cut = False  # whether the last line is incomplete
        if self.path is not None and self.path.exists():
            *lines, rest = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
            self._cut = bool(rest)
            for line in lines:
                if found := _LINE.fullmatch(line):
                    self._take(found[1], int(found[2]), found[3])

    @property
    def counts(self) -> Mapping[str, int]:
        """The least number of spends that each run has made, as far as recorded here."""
        return self._last

    def went_on_elsewhere(self, run: str, number: int, size: int) -> bool:
        """Whether another number of processes continued a run after its release `number`: its sums differ."""
        return any(name == run and at >= number and other != size for name, at, other in self._worlds)

    def go_on(self, run: str, number: int, size: int) -> None:
        """Record that this number of processes continues a run that another number had begun."""
        self._write(run, number, f"world {size}")

    def note_begun(self, run: str, number: int) -> None:
        """Record that all releases after the run's spend `number` will be here.

        Requires: the ledger has no spend of the run after that number, so nothing can have been released.
        """
        if self._last.get(run, -1) < number:
            self._write(run, number, "begun")

    def pay(self, run: str, number: int, recorded: int) -> None:
        """Expect the release of a spend. A number up to `recorded` repeats a spend that was on record."""
        self._due = _Payment(run, number, recorded)

    def note(self, values: Sequence[Tensor]) -> None:
        """Record the release that is due; raise if it differs from the earlier one, or may have been made before."""
        if self._due is None:
            raise PrivateTrainingError(
                "noised values are about to be used that no spend of the ledger pays for. Fix: engine.spend() before "
                "each engine.release()"
            )
        self._become(self._due, fingerprint(values))

    def settle(self) -> None:
        """Record that the previous spend had no release, if so; raises as `note` does."""
        if self._due is not None:
            self._become(self._due, _DROPPED)

    def forget(self) -> None:
        """Expect nothing: the spend was refused, or the run continues from a checkpoint."""
        self._due = None

    def _become(self, due: _Payment, value: str) -> None:
        known = self._known.get((due.run, due.number))
        if known is None:
            # After an interruption the outcome of the last spend on record may be unknown, if all earlier ones are
            # known. The noise of a new spend was never seen.
            interrupted = due.number == due.recorded and self._last.get(due.run) == due.number - 1
            if due.number <= due.recorded and not interrupted:
                raise PrivateTrainingError(self._lost(due))
            if self.path is not None and value != _DROPPED and value in self._known.values():
                raise PrivateTrainingError(_SAME_NOISE)
            self._write(due.run, due.number, value)
        elif known != value:
            raise PrivateTrainingError(_differs(due.number, known, value))
        self._due = None

    def _write(self, run: str, number: int, value: str) -> None:
        if self.path is not None:
            text, self._cut = f"{' cut' + chr(10) if self._cut else ''}{run} {number} {value}\n", True
            _append(self.path, text)  # may fail half-way
            self._cut = False
        self._take(run, number, value)

    def _take(self, run: str, number: int, value: str) -> None:
        self._last[run] = max(number, self._last.get(run, 0))
        if value.startswith("world "):
            self._worlds.add((run, number, int(value.removeprefix("world "))))
        elif value != "begun" and not _EARLIER.fullmatch(value):
            self._known[run, number] = value

    def _lost(self, due: _Payment) -> str:
        where = "in memory, since there is no ledger_path" if self.path is None else f"in {self.path}"
        return (
            f"this resumed run has come to release {due.number} since it began, of {due.recorded} on record, and what "
            f"was released then is not known: fingerprints are kept {where}, and those of this run are lost or rolled "
            "back, or an earlier version wrote them. The same noise on another sum would reveal the difference of the "
            f"two sums. Fix: put the .releases file of the run back beside its ledger, or {_ANEW}"
        )


def _append(path: Path, text: str) -> None:
    new = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if new:
        sync_folder(path.parent)


def _differs(number: int, known: str, value: str) -> str:
    what = (
        f"release {number} since it began was made then, and is left out now"
        if value == _DROPPED
        else f"spend {number} since it began had no release then, and has one now"
        if known == _DROPPED
        else f"release {number} since it began has other values, and would carry the same noise"
    )
    return (
        f"this resumed run does not repeat the interrupted one: {what}. Something changed: the learning rate, the "
        "data, the loss, the code, or the number of threads. Fix: resume as it was, or "
        f"{_ANEW}"
    )
