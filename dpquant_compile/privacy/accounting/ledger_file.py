"""`LedgerFile`: a privacy ledger on disk, written atomically by its one owner, and read only if it is undamaged."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpquant_compile.errors import LedgerError, PrivacySpecError
from dpquant_compile.privacy.accounting.epsilon import Record, Target, total_steps
from dpquant_compile.privacy.accounting.replay_check import Releases
from dpquant_compile.privacy.atomic_file import write_whole
from dpquant_compile.privacy.file_lock import FileLock

__all__ = ["EARLIER", "VERSION", "Contents", "LedgerFile", "checked_caveats", "read_contents", "resolved"]

VERSION = 2  # 1 had no caveats

EARLIER = (
    "an earlier release of dpquant_compile wrote some of these spends, and did not record whether secure_mode was on. "
    "Unless you know that it was, take it that it was off: whoever knows or guesses the seed can repeat the noise"
)


@dataclass(frozen=True)
class Contents:
    """What a ledger's file holds; `caveats` are sentences that a statement about the record must not leave out."""

    accountant: str
    target: Target
    record: Record
    caveats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "caveats", checked_caveats(self.caveats))


class LedgerFile:
    """The file of a ledger, opened for writing.

    contents  what it held when it was opened; None if there was no file

    Guarantee: until `close` no other `LedgerFile` of this path exists, in any process. Once `write` returns, its
    contents are on disk.
    """

    def __init__(self, path: Path) -> None:
        if not path.parent.is_dir():
            raise LedgerError(
                f"The folder of the privacy ledger {path} does not exist. Fix: make it, or choose another path."
            )
        if path.exists() and not path.is_file():
            raise LedgerError(_no_ledger(path))
        if path.exists() and path.stat().st_nlink > 1:
            raise LedgerError(
                f"The privacy ledger {path} has a second name in its filesystem, a hard link, which would keep the "
                "old contents while this one changes. Fix: remove the other name, or make it a symbolic link."
            )
        self.path = path
        self._lock = FileLock(path)
        self._bytes = b""
        self.contents: Contents | None = None
        try:
            if path.exists():
                self.contents, self._bytes = _decode(path)
            _check_whole(path, Record() if self.contents is None else self.contents.record, Releases(path).counts)
        except BaseException:
            self.close()
            raise

    def write(self, contents: Contents) -> None:
        """Replace the file, atomically and durably; after a failure it is the whole old file or the whole new one."""
        self._lock.check()
        try:
            found = self.path.read_bytes()
        except FileNotFoundError:
            found = b""
        if found != self._bytes:
            raise LedgerError(
                f"The privacy ledger {self.path} changed under this process, which has it open. One process must own a "
                "ledger. Nothing was spent. Fix: find out what else wrote, restored or removed the file, and open it "
                "again to continue from its contents."
            )
        data = _encode(contents)

        def placed() -> None:
            # From here on the file has the spend, even if the caller cannot make it: if the folder cannot be synced,
            # the caller gets an error, and the next write removes the spend.
            self._bytes = data

        write_whole(self.path, lambda file: file.write(data), placed)

    def close(self) -> None:
        """Release the file, so that others can open it for writing."""
        self._lock.release()


def resolved(path: str | Path) -> Path:
    """The absolute path without symlinks: a write replaces the file of that name."""
    try:
        return Path(path).resolve()
    except (OSError, RuntimeError) as error:  # a loop of symlinks
        raise LedgerError(f"The path of the privacy ledger {path} leads to no file: {error}.") from error


def read_contents(path: Path) -> Contents:
    """What the ledger at `path` holds at this moment, read without a lock."""
    released = Releases(path).counts  # read first: the owner writes each spend before its release
    if not path.is_file() and not any(released.values()):
        raise LedgerError(_no_ledger(path))
    contents = _decode(path)[0] if path.is_file() else None
    _check_whole(path, Record() if contents is None else contents.record, released)
    assert contents is not None  # else `_check_whole` has found missing spends
    return contents


def _check_whole(path: Path, record: Record, released: Mapping[str, int]) -> None:
    """Raise if the releases file shows spends that the ledger lacks: the ledger was deleted, or rolled back."""
    missing = {run: (count, total_steps(record.spends_of(run))) for run, count in released.items()}
    parts = [f"{there} of run {run}, of which it has {here}" for run, (there, here) in missing.items() if there > here]
    if parts:
        raise LedgerError(
            f"The privacy ledger {path} was deleted or rolled back: {path.name}.releases beside it shows more spends "
            f"than the ledger holds. It shows {'; '.join(parts)}. The missing spends were made and still count. Fix: "
            "restore the ledger from a backup. If it is lost for good, start a new ledger under another name, enter "
            "the missing spends by hand with ledger.spend(purpose, q=…, sigma=…, steps=…), and keep the .releases file "
            "as evidence."
        )


def _header(contents: Contents) -> dict[str, Any]:
    epsilon, delta = contents.target
    return {"accountant": contents.accountant, "target_epsilon": epsilon, "target_delta": delta}


def checked_caveats(caveats: Iterable[Any]) -> tuple[str, ...]:
    """The caveats without duplicates; an error unless they are sentences."""
    once = dict.fromkeys([caveats] if isinstance(caveats, str) else caveats)
    if not all(isinstance(caveat, str) and caveat for caveat in once):
        raise PrivacySpecError(f"A caveat of a privacy ledger must be a sentence: {list(once)!r}.")
    return tuple(once)


def _encode(contents: Contents, version: int = VERSION) -> bytes:
    caveats = {} if version == 1 else {"caveats": list(contents.caveats)}
    body = {"version": version, **_header(contents), **caveats, **contents.record.as_plain()}
    checksum = hashlib.sha256(_canonical(body)).hexdigest()
    return json.dumps({**body, "checksum": checksum}, indent=1).encode()


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _decode(path: Path) -> tuple[Contents, bytes]:
    """Contents and bytes of a ledger file; LedgerError unless it is, byte for byte, a file that this library wrote."""
    data = path.read_bytes()
    try:
        body = json.loads(data)
        version = body["version"]
        if version in (1, VERSION):
            target = body["target_epsilon"], body["target_delta"]
            caveats = () if version == 1 else tuple(body["caveats"])
            contents = Contents(body["accountant"], target, Record.from_plain(body), caveats)
            if _encode(contents, version) == data:
                earlier = version == 1 and bool(contents.record.entries)
                return (replace(contents, caveats=(EARLIER,)) if earlier else contents), data
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise LedgerError(_corrupt(path, f"{type(error).__name__}: {error}")) from error
    if version not in (1, VERSION):
        raise LedgerError(
            f"The privacy ledger {path} is of version {version!r}, and this release of dpquant_compile reads versions "
            f"1 to {VERSION}. Fix: use the release that wrote it; do not begin a new ledger for the same data."
        )
    raise LedgerError(_corrupt(path, "its checksum does not match"))


def _no_ledger(path: Path) -> str:
    return f"There is no privacy ledger at {path}. Fix: give the path of an existing file."


def _corrupt(path: Path, reason: str) -> str:
    return (
        f"The privacy ledger {path} is damaged ({reason}). The spends it recorded still count. Fix: put back a copy "
        "of the file, or enter the spends by hand in a new one. Do not begin again from zero."
    )
