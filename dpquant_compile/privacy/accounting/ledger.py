"""`Ledger`: every privacy spend of a run, itemised, composed by one accountant, and on disk before it is made.

So a crash can leave too many spends in the ledger, never too few. A resumed run that repeats its releases bit for bit
is not charged again: each spend belongs to a run, and a run may repeat its own spends once.
"""

import importlib
import os
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from opacus.accountants import create_accountant

from dpquant_compile.errors import LedgerError, PrivacyBudgetError
from dpquant_compile.privacy.accounting.accountants import check_accountant, composed_epsilon, opacus_accountant
from dpquant_compile.privacy.accounting.epsilon import (
    Entry,
    Headroom,
    History,
    Record,
    Target,
    between,
    check_delta,
    check_target,
    gathered,
    total_steps,
)
from dpquant_compile.privacy.accounting.ledger_file import (
    Contents,
    LedgerFile,
    checked_caveats,
    read_contents,
    resolved,
)
from dpquant_compile.privacy.accounting.ledger_state import LedgerState
from dpquant_compile.privacy.accounting.statement import UNIT, statement

__all__ = ["Entry", "Ledger"]


class Ledger:
    """The privacy spends of a run, in order, and their total cost.

    With a `path` each spend is on disk before `spend` returns, and a ledger made with the same path continues from
    there. With a target, a spend that would exceed it is refused. Symlinks in `path` are resolved.

    standing  caveats that hold for the spends that follow; each spend records them, on disk in the same write

    Guarantee: once `spend` returns, the spend is never lost, nor is a recorded caveat. Only one ledger at a time has a
    file open for writing, from its construction to `close()`, garbage collection or the end of the process; a second
    one is refused. A ledger takes spends in the process that made it, not in a forked child. One from `Ledger.read`
    takes none.
    """

    def __init__(
        self,
        accountant: str = "prv",
        path: str | Path | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
    ) -> None:
        check_accountant(accountant)
        self.accountant = accountant
        self.target_epsilon, self.target_delta = check_target(target_epsilon, target_delta)
        self.path = None if path is None else resolved(path)
        self.standing: tuple[str, ...] = ()
        self._caveats: tuple[str, ...] = ()  # recorded ones only
        self._record = Record()
        self._run = uuid.uuid4().hex
        self._done = 0  # spends that this run has made, repeated ones included
        self._recorded = 0  # spends of this run that were on record when it was resumed: it repeats up to here
        self._pending: tuple[Entry, ...] = ()  # recorded spends of this run that it has yet to repeat
        self._file: LedgerFile | None = None
        self._refusal: str | None = None  # why nothing can be spent here
        self._headroom: dict[tuple[float, float], Headroom] = {}
        self._epsilons: dict[tuple[History, float], float] = {}
        if accountant == "gdp":
            create_accountant(accountant)  # shows Opacus' warning once that this accountant can underestimate
        if self.path is not None:
            self._open(LedgerFile(self.path))
        _OPEN.add(self)

    def __reduce__(self) -> NoReturn:
        """Refuse copies and pickles: two ledgers would each count a part of one run's spends."""
        raise LedgerError("A privacy ledger cannot be copied or pickled. Fix: take its state_dict().")

    def close(self) -> None:
        """Release the file for other ledgers. What was spent can still be read here; spending is refused."""
        if self._file is not None:
            self._file.close()
        self._refusal = self._refusal or "This privacy ledger was closed. Fix: make a new engine or ledger to go on."

    def check_open(self) -> None:
        """Raise `LedgerError` unless spends can be recorded here."""
        if self._refusal is not None:
            raise LedgerError(f"{self._refusal} Nothing was spent.")

    def disown(self) -> None:
        """In a forked child: refuse all further spends, since the parent continues the same account."""
        self._refusal = self._refusal or (
            "This privacy ledger belongs to the parent process, from which this one was forked: spends of the child "
            "would not reach it. Fix: make a new engine in the child, with another ledger_path."
        )

    @property
    def position(self) -> tuple[str, int]:
        """The current run, and how many spends it has made."""
        return self._run, self._done

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All spends in order, equal neighbours merged."""
        return self._record.entries

    @property
    def purposes(self) -> tuple[str, ...]:
        """The purposes of all spends, in the order of first spend."""
        return tuple(dict.fromkeys(entry.purpose for entry in self.entries))

    @property
    def caveats(self) -> tuple[str, ...]:
        """The sentences that `statement` must not leave out: those recorded, and those of the spends that follow."""
        return checked_caveats((*self._caveats, *self.standing))

    def add_caveat(self, text: str) -> None:
        """Record a sentence that `statement` must not leave out, also in the file; a repeated one is recorded once."""
        self.check_open()
        self._record_caveats(checked_caveats((*self._caveats, text)))

    def set_target(self, target_epsilon: float, target_delta: float) -> None:
        """Set the target of a ledger that has none, also in the file; an existing target cannot be changed."""
        self.check_open()
        target = check_target(target_epsilon, target_delta)
        own = (self.target_epsilon, self.target_delta)
        if own == target:
            return
        if own != (None, None):
            raise LedgerError(
                f"The privacy ledger has the target (ε, δ) = {own} already, and it cannot become {target}: the spends "
                "so far were allowed under the first. Fix: give the same target, or use another ledger."
            )
        self._write(self._record, self._caveats, target)
        self.target_epsilon, self.target_delta = target
        self._headroom.clear()

    def check(self, purpose: str, *, q: float, sigma: float, steps: int = 1) -> None:
        """Raise what `spend` would raise, without spending."""
        self.check_open()
        entry = Entry(purpose, "subsampled_gaussian", q, sigma, steps)
        new = entry.steps - self._repeated(entry)
        if new:
            self._admit(replace(entry, steps=new))

    @property
    def recorded(self) -> int:
        """How many spends of this run were on record when it was resumed; it repeats them up to this number."""
        return self._recorded

    @property
    def repeating(self) -> bool:
        """Whether a resumed run still has recorded spends to repeat."""
        return bool(self._pending)

    def departs(self, purpose: str, *, q: float, sigma: float) -> bool:
        """Whether a spend differs from the recorded one that a resumed run must repeat next."""
        return self.repeating and not self._repeated(Entry(purpose, "subsampled_gaussian", q, sigma, 1))

    def spend(
        self, purpose: str, *, q: float, sigma: float, steps: int = 1, mechanism: str = "subsampled_gaussian"
    ) -> None:
        """Record `steps` releases that are about to be made.

        The file, if there is one, has them when this returns. If it raises, nothing is spent.
        """
        self.check_open()
        entry = Entry(purpose, mechanism, q, sigma, steps)
        repeated = self._repeated(entry)
        pending = between(self._pending, repeated, total_steps(self._pending))
        new = entry.steps - repeated
        if not new:
            self._record_caveats(self.caveats)
            self._pending = pending
            self._done += repeated
            return
        fresh = replace(entry, steps=new)
        self._admit(fresh)
        # The spend differs from the recorded one that was due: from here on this is a new run.
        run = uuid.uuid4().hex if pending else self._run
        record = self._record.with_spend(fresh, run)
        caveats = self.caveats
        self._write(record, caveats, (self.target_epsilon, self.target_delta))
        self._done = new if pending else self._done + entry.steps
        self._recorded = 0 if pending else self._recorded
        self._record, self._caveats, self._run, self._pending = record, caveats, run, ()
        room = self._headroom.get((entry.sigma, entry.q))
        self._headroom.clear()  # it depends on what is spent
        if room is not None:
            room.take(new)
            self._headroom[entry.sigma, entry.q] = room

    def epsilon(self, delta: float, purpose: str | None = None) -> float:
        """ε at `delta` of all spends together, or of those with one purpose."""
        delta = check_delta(delta)
        return self._epsilon(gathered(e for e in self.entries if purpose is None or e.purpose == purpose), delta)

    def epsilons(self, delta: float) -> dict[str, float]:
        """ε of each purpose by itself, in the order of first spend. Their sum is more than the total cost."""
        return {purpose: self.epsilon(delta, purpose) for purpose in self.purposes}

    @property
    def opacus_accountant(self) -> Any:
        """Opacus' accountant of this ledger's kind, with all spends in its history."""
        return opacus_accountant(self.accountant, gathered(self.entries))

    def to_dp_event(self) -> Any:
        """The spends as a `dp_accounting.ComposedDpEvent`, for the accountants of Google's library."""
        try:
            dp = importlib.import_module("dp_accounting")
        except ImportError as error:
            raise LedgerError("to_dp_event needs Google's dp-accounting: pip install dp-accounting.") from error
        return dp.ComposedDpEvent(
            [
                dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(e.q, dp.GaussianDpEvent(e.sigma)), e.steps)
                for e in self.entries
            ]
        )

    def statement(self, delta: float, *, unit: str = UNIT, adjacency: str = "add_remove") -> str:
        """The privacy claim in plain words: whom it protects, what was counted, what was not, and all caveats.

        `adjacency` must be "add_remove", which the entries are for; "replace" is refused.
        """
        return statement(self, delta, unit, adjacency)

    def state_dict(self) -> dict[str, Any]:
        """The current state of the ledger in plain Python types, for a checkpoint."""
        return LedgerState(self._record, self._caveats, self._run, self._done).as_plain()

    def load_state_dict(self, state: Mapping[str, Any], *, replays: bool) -> None:
        """Go back to the moment of `state`, without forgetting what was recorded since.

        `replays` promises that the run will make the same releases as before with the same random bits. Its recorded
        spends beyond `state` are then not counted again, as long as it repeats them in order. Without `replays`
        everything from here on is new.

        Guarantee: no spend is forgotten, neither of this ledger nor of the state. The ledger must begin with the spends
        of the state; without a file the state may also be ahead, and its spends are taken over. Otherwise `LedgerError`
        is raised, and nothing changes. Caveats of both stay.
        """
        self.check_open()
        then = LedgerState.from_plain(state)
        if self._record.begins_with(then.record):
            record = self._record
        elif self._file is None and then.record.begins_with(self._record):
            record = then.record
        else:
            raise LedgerError(self._different(then.record))
        self._record_caveats(checked_caveats((*self._caveats, *then.caveats)))
        self._record = record
        self._headroom.clear()
        if replays:
            self._resume(then)
        else:
            self.depart()

    def is_ahead_of(self, state: Mapping[str, Any]) -> bool:
        """Whether this ledger has spends that the ledger of this state lacks."""
        return not LedgerState.from_plain(state).record.begins_with(self._record)

    def mirror(self, state: Mapping[str, Any]) -> None:
        """Become a copy of the ledger of another process of the same run, from its state.

        Guarantee: if this ledger has spends that the state lacks, `LedgerError` is raised, and nothing changes.
        """
        self.check_open()
        then = LedgerState.from_plain(state)
        if self._file is not None or not then.record.begins_with(self._record):
            raise LedgerError(self._different(then.record))
        self._record, self._caveats = then.record, checked_caveats((*self._caveats, *then.caveats))
        self._headroom.clear()
        self._resume(then)

    def depart(self, run: str | None = None) -> None:
        """Continue as another run, of this name or a new one: it repeats nothing, and every spend counts."""
        self.check_open()
        self._run, self._done, self._recorded, self._pending = run or uuid.uuid4().hex, 0, 0, ()

    @classmethod
    def read(cls, path: str | Path) -> "Ledger":
        """The ledger in an existing file, with the accountant and target that the file names.

        It is for reading, also while another process writes the file: a spend raises `LedgerError`.
        """
        contents = read_contents(resolved(path))
        ledger = cls(contents.accountant, None, *contents.target)
        ledger.path, ledger._record, ledger._caveats = resolved(path), contents.record, contents.caveats
        ledger._refusal = (
            f"The privacy ledger {ledger.path} was opened by Ledger.read, for reading. Fix: to spend, open it with "
            "Ledger(accountant, path), or by PrivacyEngine(ledger_path=…)."
        )
        return ledger

    def _epsilon(self, history: History, delta: float) -> float:
        if (history, delta) not in self._epsilons:
            self._epsilons[history, delta] = composed_epsilon(self.accountant, history, delta)
        return self._epsilons[history, delta]

    def _resume(self, then: LedgerState) -> None:
        spends = self._record.spends_of(then.run)
        self._run, self._done, self._recorded = then.run, then.done, total_steps(spends)
        self._pending = between(spends, then.done, self._recorded)

    def _different(self, then: Record) -> str:
        own = f"the privacy ledger {self.path}" if self.path else "the privacy ledger of this engine"
        fix = (
            "Fix: use the ledger file of the run that wrote the checkpoint."
            if self.path
            else "Fix: load it into a new engine, or give both runs the same ledger_path."
        )
        return (
            f"The checkpoint and {own} belong to different runs: the checkpoint has {_summary(then)}, and the ledger "
            f"does not begin with them; it has {_summary(self._record)}. Nothing was changed. {fix}"
        )

    def _repeated(self, entry: Entry) -> int:
        """How many of the entry's spends are recorded ones that this run must repeat next."""
        due = self._pending[:1]
        return min(entry.steps, due[0].steps) if due and due[0].same_spend(entry) else 0

    def _admit(self, entry: Entry) -> None:
        """Raise if the entry cannot be accounted for, or would exceed the target."""
        after = gathered((*self.entries, entry))
        if self.accountant == "gdp":
            opacus_accountant(self.accountant, after)  # raises for mechanisms that it cannot compose
        target, delta = self.target_epsilon, self.target_delta
        if target is None or delta is None:
            return
        base = self.entries

        def fits(steps: int) -> bool:
            return self._epsilon(gathered((*base, replace(entry, steps=steps))), delta) <= target

        room = self._headroom.setdefault((entry.sigma, entry.q), Headroom(fits))
        if not room.allows(entry.steps):
            raise PrivacyBudgetError(
                f"{entry.steps} more {entry.purpose} step(s) at q={entry.q:.6g}, sigma={entry.sigma:.6g} would take ε "
                f"from {self.epsilon(delta):.6g} to {self._epsilon(after, delta):.6g} at δ={delta:g}, past the target "
                f"{target:g}. Nothing was spent. Fix: stop here, or plan the run with more noise, fewer steps or fewer "
                "analyses (dpq.plan)."
            )

    def _open(self, file: LedgerFile) -> None:
        """Continue from a file, or create it."""
        try:
            self._file = file
            if file.contents is None:
                self._write(Record(), (), (self.target_epsilon, self.target_delta))
            else:
                self._take(file.contents)
        except BaseException:
            file.close()
            raise

    def _take(self, found: Contents) -> None:
        if self.target_epsilon is None:
            self.target_epsilon, self.target_delta = found.target
        own = self.accountant, (self.target_epsilon, self.target_delta)
        pairs = zip(("accountant", "target (ε, δ)"), (found.accountant, found.target), own, strict=True)
        different = [f"{name} is {there!r} there and {here!r} here" for name, there, here in pairs if there != here]
        if different:
            raise LedgerError(
                f"The privacy ledger {self.path} was begun with other settings: {'; '.join(different)}. Fix: use those "
                "of the file, or another path for an unrelated run on other data."
            )
        self._record, self._caveats = found.record, found.caveats

    def _record_caveats(self, caveats: tuple[str, ...]) -> None:
        if caveats != self._caveats:
            self._write(self._record, caveats, (self.target_epsilon, self.target_delta))
            self._caveats = caveats

    def _write(self, record: Record, caveats: tuple[str, ...], target: Target) -> None:
        if self._file is not None:
            self._file.write(Contents(self.accountant, target, record, caveats))


_OPEN: "weakref.WeakSet[Ledger]" = weakref.WeakSet()


def _disown_all() -> None:
    for ledger in list(_OPEN):
        ledger.disown()


os.register_at_fork(after_in_child=_disown_all)


def _summary(record: Record) -> str:
    return f"{total_steps(record.entries)} spends by {len({run for _, run in record.runs})} run(s)"
