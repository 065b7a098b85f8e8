"""`LedgerState`: the state of a privacy ledger in a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpquant_compile.errors import LedgerError
from dpquant_compile.privacy.accounting.epsilon import Record, total_steps
from dpquant_compile.privacy.accounting.ledger_file import EARLIER, VERSION, checked_caveats

__all__ = ["LedgerState"]


@dataclass(frozen=True)
class LedgerState:
    """The spends, the caveats about them, and the current run with its number of spends."""

    record: Record
    caveats: tuple[str, ...]
    run: str
    done: int

    def as_plain(self) -> dict[str, Any]:
        """The state in plain Python types."""
        return {
            "version": VERSION,
            "caveats": list(self.caveats),
            **self.record.as_plain(),
            "run": self.run,
            "done": self.done,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "LedgerState":
        """The state that `as_plain` described, here or in an earlier release; `LedgerError` for anything else."""
        try:
            if plain["version"] not in (1, VERSION):
                raise ValueError(f"version {plain['version']!r}")
            record, run, done = Record.from_plain(plain), str(plain["run"]), int(plain["done"])
            if not 0 <= done <= total_steps(record.spends_of(run)):
                raise ValueError(f"done {done}")
            said = plain["caveats"] if plain["version"] > 1 else [EARLIER] * bool(record.entries)
            return cls(record, checked_caveats(said), run, done)
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(
                f"This is not the state of a privacy ledger, of versions 1 to {VERSION} ({type(error).__name__}: "
                f"{error}). Fix: load the checkpoint with the version of dpquant_compile that wrote it."
            ) from error
