"""`Ledger`: every privacy spend of a run, itemised, composed by one accountant, and on disk before it is made.

A crash can so leave too much in the ledger, never too little. A resumed run that repeats its releases bit for bit
repeats no spend: each spend belongs to a run, and a run may go once more through its own spends.
"""

import hashlib
import importlib
import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from opacus.accountants import create_accountant

from dpquant_compile.errors import LedgerError, PrivacyBudgetError, PrivacySpecError
from dpquant_compile.private.accounting import (
    Entry,
    Headroom,
    History,
    Record,
    between,
    check_accountant,
    check_delta,
    check_number,
    composed_epsilon,
    gathered,
    opacus_accountant,
    total_steps,
)
from dpquant_compile.private.files import write_whole

__all__ = ["Entry", "Ledger"]

VERSION = 1

Target = tuple[float | None, float | None]  # (ε, δ), or None twice


class Ledger:
    """The privacy spends of a run, in order, and what they cost together.

    With a `path` each spend is on disk before `spend` returns, and a ledger made with the same path goes on from
    there; one process at a time may do so. With a target, a spend that would pass it is refused.
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
        self.target_epsilon, self.target_delta = _target(target_epsilon, target_delta)
        self.path = None if path is None else Path(path)
        self.caveats: tuple[str, ...] = ()  # sentences that `statement` must not leave out
        self._record = Record()
        self._run = uuid.uuid4().hex
        self._done = 0  # spends that this run has made, those that it repeated among them
        self._pending: tuple[Entry, ...] = ()  # recorded spends of this run that it has yet to repeat
        self._on_disk = b""
        self._headroom: dict[tuple[float, float], Headroom] = {}
        self._epsilons: dict[tuple[History, float], float] = {}
        if accountant == "gdp":
            create_accountant(accountant)  # Opacus says of this one that it can underestimate: let it be heard once
        if self.path is not None:
            self._open(self.path)

    def add_caveat(self, text: str) -> None:
        """Record a sentence that `statement` must not leave out."""
        if text not in self.caveats:
            self.caveats += (text,)

    @property
    def position(self) -> tuple[str, int]:
        """The run that spends now, and how many spends it has made."""
        return self._run, self._done

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All spends in order, equal neighbours merged."""
        return self._record.entries

    def set_target(self, target_epsilon: float, target_delta: float) -> None:
        """Set the target of a ledger that has none, also in the file; one that is there is not changed."""
        target = _target(target_epsilon, target_delta)
        own = (self.target_epsilon, self.target_delta)
        if own == target:
            return
        if own != (None, None):
            raise LedgerError(
                f"The privacy ledger has the target (ε, δ) = {own} already, and it cannot become {target}: the spends "
                "so far were allowed under the first. Give the same target, or use another ledger."
            )
        if self.path is not None:
            self._write(self.path, self._record, target)
        self.target_epsilon, self.target_delta = target
        self._headroom.clear()

    def check(self, purpose: str, *, q: float, sigma: float, steps: int = 1) -> None:
        """Raise what `spend` would raise, and spend nothing."""
        entry = Entry(purpose, "subsampled_gaussian", q, sigma, steps)
        new = entry.steps - self._repeated(entry)
        if new:
            self._admit(replace(entry, steps=new))

    @property
    def repeating(self) -> bool:
        """Whether a resumed run has recorded spends before it that it is to make again."""
        return bool(self._pending)

    def departs(self, purpose: str, *, q: float, sigma: float) -> bool:
        """Whether a spend would be another than the recorded one that a resumed run is due to repeat."""
        return self.repeating and not self._repeated(Entry(purpose, "subsampled_gaussian", q, sigma, 1))

    def spend(
        self, purpose: str, *, q: float, sigma: float, steps: int = 1, mechanism: str = "subsampled_gaussian"
    ) -> None:
        """Record `steps` releases that are about to be made.

        The file, if there is one, has them when this returns. If it raises, nothing is spent.
        """
        entry = Entry(purpose, mechanism, q, sigma, steps)
        repeated = self._repeated(entry)
        pending = between(self._pending, repeated, total_steps(self._pending))
        new = entry.steps - repeated
        if not new:
            self._pending = pending
            self._done += repeated
            return
        fresh = replace(entry, steps=new)
        self._admit(fresh)
        # A spend other than the recorded one that was due: from here on this is another run than the recorded.
        run = uuid.uuid4().hex if pending else self._run
        record = self._record.with_spend(fresh, run)
        if self.path is not None:
            self._write(self.path, record, (self.target_epsilon, self.target_delta))
        self._done = new if pending else self._done + entry.steps
        self._record, self._run, self._pending = record, run, ()
        room = self._headroom.get((entry.sigma, entry.q))
        self._headroom.clear()  # what else fits depends on what is spent
        if room is not None:
            room.take(new)
            self._headroom[entry.sigma, entry.q] = room

    def epsilon(self, delta: float, purpose: str | None = None) -> float:
        """ε at `delta` of all spends together, or of those with one purpose."""
        delta = check_delta(delta)
        return self._epsilon(gathered(e for e in self.entries if purpose is None or e.purpose == purpose), delta)

    def epsilons(self, delta: float) -> dict[str, float]:
        """ε of each purpose by itself, in the order of first spend. Their sum is more than what all cost together."""
        return {purpose: self.epsilon(delta, purpose) for purpose in self._purposes()}

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

    def statement(self, delta: float, *, unit: str = "one sample of the dataset", adjacency: str = "add_remove") -> str:
        """The privacy claim in plain words: whom it protects, what was counted, and what was not.

        `adjacency` is "add_remove", which is what the entries stand for; for "replace" there is no number here.
        """
        if adjacency != "add_remove":
            raise PrivacySpecError(
                f"adjacency must be 'add_remove', not {adjacency!r}: the spends are of Poisson-subsampled Gaussian "
                "mechanisms whose σ is relative to what adding or removing one unit changes. The statement for "
                "'add_remove' says what follows for replacement."
            )
        total = self.epsilon(delta)
        counted = [self._line(purpose, delta) for purpose in self._purposes()] or ["  nothing: no release was made"]
        return "\n".join(
            [
                f"This run is (ε, δ)-differentially private with ε = {_up(total)} at δ = {delta:g}."
                if total < math.inf
                else "This run is not private: something was released without noise, or ε could not be bounded.",
                "",
                f"Unit of privacy: {unit}.",
                f"Adjacency: two datasets are neighbours if one is the other with {unit} added or removed.",
                "  If the unit is replaced by another instead, that is one removal and one addition: ε is up to twice "
                f"as large, at a δ of up to (1 + exp(ε)) times {delta:g}.",
                f"Accountant: {self.accountant} (Opacus), all of the following composed by it at once.",
                "Counted (ε in brackets is of that part alone; the parts add up to more than the whole):",
                *counted,
                "Not counted:",
                "  - hyperparameter tuning, and other runs on the same data: each spends anew, and is to be composed;",
                "  - values computed from the data and shown without noise, such as losses, accuracies, gradient norms "
                "or the sizes of batches;",
                "  - what finite-precision arithmetic and the source of random bits may give away: the claim is for "
                "exact real numbers and ideal Gaussian noise;",
                "  - releases that were not entered here.",
                *(f"Mind: {caveat}." for caveat in self.caveats),
            ]
        )

    def state_dict(self) -> dict[str, Any]:
        """The ledger at this moment in plain Python types, for a checkpoint."""
        return {"version": VERSION, **self._record.as_plain(), "run": self._run, "done": self._done}

    def load_state_dict(self, state: Mapping[str, Any], *, replays: bool) -> None:
        """Go back to the moment of `state`, without forgetting what a file has recorded since.

        `replays` is the promise that the run will now make the same releases as before with the same random bits.
        Its recorded spends beyond `state` are then not counted again, as far as it keeps to them in order. Without
        it everything from here on is new. Without a file the state replaces all entries.
        """
        try:
            if state["version"] != VERSION:
                raise ValueError(f"version {state['version']!r}")
            then, run, done = Record.from_plain(state), str(state["run"]), int(state["done"])
            if not 0 <= done <= total_steps(then.spends_of(run)):
                raise ValueError(f"done {done}")
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(
                f"This is not the state of a privacy ledger of version {VERSION} ({type(error).__name__}: {error}). "
                "Load the checkpoint with the version of dpquant_compile that wrote it."
            ) from error
        if self.path is not None and self._record.first(total_steps(then.entries)) != then:
            raise LedgerError(
                f"The checkpoint and the privacy ledger {self.path} belong to different runs: the checkpoint has "
                f"{_summary(then)}, and the ledger does not begin with them; it has {_summary(self._record)}. Use the "
                "ledger file of the run that wrote the checkpoint."
            )
        if self.path is None:
            self._record = then
        self._headroom.clear()
        if replays:
            spends = self._record.spends_of(run)
            self._run, self._done, self._pending = run, done, between(spends, done, total_steps(spends))
        else:
            self._run, self._done, self._pending = uuid.uuid4().hex, 0, ()

    @classmethod
    def read(cls, path: str | Path) -> "Ledger":
        """The ledger in an existing file, with the accountant and target that the file names."""
        header, _, _ = _decode(Path(path))
        return cls(path=path, **header)

    def _purposes(self) -> list[str]:
        return list(dict.fromkeys(entry.purpose for entry in self.entries))

    def _line(self, purpose: str, delta: float) -> str:
        parts = gathered(e for e in self.entries if e.purpose == purpose)
        spent = "; ".join(f"{n} step{'s' * (n != 1)} at q = {q:.6g}, σ = {sigma:.6g}" for sigma, q, n in parts)
        return f"  - {purpose}: {spent} [ε = {_up(self.epsilon(delta, purpose))}]"

    def _epsilon(self, history: History, delta: float) -> float:
        if (history, delta) not in self._epsilons:
            self._epsilons[history, delta] = composed_epsilon(self.accountant, history, delta)
        return self._epsilons[history, delta]

    def _repeated(self, entry: Entry) -> int:
        """How many of the entry's spends are the recorded ones that this run has to make next."""
        due = self._pending[:1]
        return min(entry.steps, due[0].steps) if due and due[0].same_spend(entry) else 0

    def _admit(self, entry: Entry) -> None:
        """Raise if the entry cannot be accounted for, or would pass the target."""
        after = gathered((*self.entries, entry))
        if self.accountant == "gdp":
            opacus_accountant(self.accountant, after)  # it cannot compose different mechanisms, and says so
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
                f"{target:g}. Nothing was spent. Stop here, or plan the run with more noise, fewer steps or fewer "
                "analyses (dpq.plan)."
            )

    def _open(self, path: Path) -> None:
        if not path.parent.is_dir():
            raise LedgerError(
                f"The folder of the privacy ledger {path} does not exist. Make it, or choose another path."
            )
        if not path.exists():
            self._write(path, Record(), (self.target_epsilon, self.target_delta))
            return
        header, self._record, self._on_disk = _decode(path)
        if self.target_epsilon is None:
            self.target_epsilon, self.target_delta = header["target_epsilon"], header["target_delta"]
        here = _header(self.accountant, (self.target_epsilon, self.target_delta))
        different = [
            f"{name} is {header[name]!r} there and {here[name]!r} here" for name in here if header[name] != here[name]
        ]
        if different:
            raise LedgerError(
                f"The privacy ledger {path} was begun otherwise: {'; '.join(different)}. Use what it has (Ledger.read "
                "does), or another path for an unrelated run on other data."
            )

    def _write(self, path: Path, record: Record, target: Target) -> None:
        """Replace the file by one with `record`, durably; on failure the old one stays or the new one is whole."""
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            found = b""
        if found != self._on_disk:
            raise LedgerError(
                f"The privacy ledger {path} changed under this process, which wrote it last with "
                f"{_summary(self._record)}. One process must own a ledger: end the other one, and open the file anew "
                "to go on from what it has. Nothing was spent."
            )
        data = _encode(_header(self.accountant, target), record)

        def placed() -> None:
            # From here on the file has the spend, whether or not the caller gets to make it. If the folder cannot be
            # synchronised the caller does not, and the next write takes it out again.
            self._on_disk = data

        write_whole(path, lambda file: file.write(data), placed)


def _target(epsilon: float | None, delta: float | None) -> Target:
    if (epsilon is None) != (delta is None):
        raise PrivacySpecError(f"A target needs target_epsilon and target_delta, not {epsilon!r} and {delta!r}.")
    if epsilon is None or delta is None:
        return None, None
    number = check_number("target_epsilon", epsilon)
    if not 0 < number < math.inf:
        raise PrivacySpecError(f"target_epsilon must be a number above 0, not {epsilon!r}.")
    return number, check_delta(delta, "target_delta")


def _header(accountant: str, target: Target) -> dict[str, Any]:
    return {"accountant": accountant, "target_epsilon": target[0], "target_delta": target[1]}


def _up(epsilon: float) -> str:
    """Four decimals, rounded up: a claim must not be smaller than what was computed."""
    return f"{math.ceil(epsilon * 1e4) / 1e4:.4f}" if epsilon < math.inf else "infinite"


def _summary(record: Record) -> str:
    return f"{total_steps(record.entries)} spends by {len({run for _, run in record.runs})} run(s)"


def _encode(header: Mapping[str, Any], record: Record) -> bytes:
    body = {"version": VERSION, **header, **record.as_plain()}
    checksum = hashlib.sha256(_canonical(body)).hexdigest()
    return json.dumps({**body, "checksum": checksum}, indent=1).encode()


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _decode(path: Path) -> tuple[dict[str, Any], Record, bytes]:
    """Header, record and bytes of a ledger file; LedgerError unless it is, byte for byte, one that we wrote."""
    if not path.is_file():
        raise LedgerError(f"There is no privacy ledger at {path}. Give the path of a file.")
    data = path.read_bytes()
    try:
        body = json.loads(data)
        version = body["version"]
        if version == VERSION:
            header = {name: body[name] for name in ("accountant", "target_epsilon", "target_delta")}
            record = Record.from_plain(body)
            if _encode(header, record) == data:
                return header, record, data
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise LedgerError(_corrupt(path, f"{type(error).__name__}: {error}")) from error
    if version != VERSION:
        raise LedgerError(
            f"The privacy ledger {path} is of version {version!r}, and this release of dpquant_compile reads version "
            f"{VERSION}. Use the release that wrote it; do not begin a new ledger for the same data."
        )
    raise LedgerError(_corrupt(path, "its checksum does not match"))


def _corrupt(path: Path, reason: str) -> str:
    return (
        f"The privacy ledger {path} is damaged ({reason}). What it recorded has been spent all the same: put back a "
        "copy of the file, or write down the spends by hand in a new one. Do not begin again from zero."
    )
