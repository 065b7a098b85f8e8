"""The history of a schedule: what was chosen, with which probabilities, and what it cost. Noised values only."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpquant_compile.privacy.accounting.ledger import Ledger

__all__ = ["EpochRecord", "History"]


@dataclass(frozen=True)
class EpochRecord:
    """The policy of epoch `epoch` (from 0), how it was chosen, and all that had been spent by then."""

    epoch: int
    policy: tuple[str, ...]
    probabilities: Mapping[str, float]
    scores: Mapping[str, float]
    analysed: bool
    spent: tuple[tuple[str, float, float, int], ...]


class History(Sequence[EpochRecord]):
    """The records of a run, one per epoch, with plots of them."""

    def __init__(self, sites: tuple[str, ...]) -> None:
        self.sites = sites
        self._records: list[EpochRecord] = []
        self.now: tuple[tuple[str, float, float, int], ...] = ()  # all that was spent when the last epoch ended

    def add(self, record: EpochRecord) -> None:
        """Append the record of the next epoch."""
        self._records.append(record)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        return self._records[index]

    def __iter__(self) -> Iterator[EpochRecord]:
        return iter(self._records)

    def state_dict(self) -> list[dict[str, Any]]:
        """Plain types."""
        return [asdict(record) for record in self._records]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Replace the records."""
        self._records = [
            EpochRecord(
                epoch=int(row["epoch"]),
                policy=tuple(row["policy"]),
                probabilities=dict(row["probabilities"]),
                scores=dict(row["scores"]),
                analysed=bool(row["analysed"]),
                spent=tuple((str(p), float(q), float(s), int(n)) for p, q, s, n in row["spent"]),
            )
            for row in state
        ]

    def heat_map(self, path: str | Path) -> Path:
        """Epochs × sites: which ran in low precision."""
        figure, axes = _figure(max(4.0, 0.18 * len(self)), max(2.5, 0.22 * len(self.sites)))
        grid = [[float(site in record.policy) for record in self] for site in self.sites]
        axes.imshow(grid, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set(xlabel="epoch", yticks=range(len(self.sites)), title="sites in low precision: dark")
        axes.set_yticklabels(self.sites, fontsize=7)
        return _saved(figure, path)

    def probability_plot(self, path: str | Path) -> Path:
        """The probability of each policy to be drawn first, by epoch."""
        figure, axes = _figure(6.0, 4.0)
        names = list(self[0].probabilities) if len(self) else []
        for name in names:
            axes.plot([r.epoch for r in self], [r.probabilities[name] for r in self], label=name, linewidth=1)
        axes.set(xlabel="epoch", ylabel="sampling probability", ylim=(0, None))
        if len(names) <= 12:
            axes.legend(fontsize=7)
        return _saved(figure, path)

    def privacy_plot(self, path: str | Path, delta: float, accountant: str = "prv") -> Path:
        """ε by purpose and in total, by the number of epochs that had ended."""
        figure, axes = _figure(6.0, 4.0)
        curves: dict[str, list[tuple[int, float]]] = {}
        ended = [(record.epoch, record.spent) for record in self]
        if self.now and ended:
            ended.append((ended[-1][0] + 1, self.now))
        for epoch, spent in ended:
            ledger = Ledger(accountant)
            for purpose, q, sigma, steps in spent:
                ledger.spend(purpose, q=q, sigma=sigma, steps=steps)
            for purpose, epsilon in {**ledger.epsilons(delta), "total": ledger.epsilon(delta)}.items():
                curves.setdefault(purpose, []).append((epoch, epsilon))
        for purpose, points in curves.items():
            axes.plot(*zip(*points, strict=True), label=purpose, marker=".")
        axes.set(xlabel="epoch", ylabel=f"ε at δ = {delta:g}", ylim=(0, None))
        axes.legend()
        return _saved(figure, path)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # an optional dependency: only plots need it

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _saved(figure: Any, path: str | Path) -> Path:
    figure.savefig(path, dpi=120)
    return Path(path)
