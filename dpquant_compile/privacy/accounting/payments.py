"""`Payments`: spends and releases of an engine, in the only sound order."""

import uuid
from collections.abc import Callable, Sequence

from torch import Tensor

from dpquant_compile.privacy.accounting.ledger import Ledger
from dpquant_compile.privacy.accounting.replay_check import Releases
from dpquant_compile.privacy.distributed.world import World

__all__ = ["Payments"]


class Payments:
    """The spends of a ledger and the releases that they pay for. On several processes rank 0 keeps the releases.

    Guarantee: a spend is recorded before its data is read, and after the outcome of the previous spend. A run that
    departs from the recorded one takes new noise, and is a new run from there on. Neither a closed engine nor a forked
    child records a release.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.releases = Releases(ledger.path)
        self._ledger = ledger
        self._repeating = False  # whether the last spend repeated a recorded one

    def spend(self, world: World, renew: Callable[[], None], purpose: str, *, q: float, sigma: float) -> None:
        """Record a spend before its release; `renew` gives the run unused randomness."""
        ledger, releases = self._ledger, self.releases
        ledger.check_open()
        if self._repeating:
            world.on_first("the end of a repeated step", releases.settle)
        elif world.first:
            releases.settle()
        if ledger.departs(purpose, q=q, sigma=sigma):
            renew()
            ledger.depart(world.on_first("the name of a run", lambda: uuid.uuid4().hex))
        if world.first and not ledger.repeating:
            releases.note_begun(*ledger.position)
        self._repeating = ledger.repeating
        run, done = ledger.position
        try:
            releases.pay(run, done + 1, ledger.recorded)  # first: an interrupt must not leave a spend unsettled
            ledger.spend(purpose, q=q, sigma=sigma)
        except BaseException:
            if ledger.position == (run, done):
                releases.forget()
            raise

    def note(self, values: Sequence[Tensor]) -> None:
        """Record noised values before they are used; a resumed run must repeat those that were recorded before."""
        self._ledger.check_open()
        self.releases.note(values)

    def note_step(self, world: World, values: Sequence[Tensor]) -> None:
        """`note` for values that all processes have: rank 0 stops all of them if a repetition differs."""
        if self._repeating:
            world.on_first("the check of a repeated step", lambda: self.note(values))
        elif world.first:
            self.note(values)
