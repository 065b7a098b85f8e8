"""Progress bar and logs of a private run. They contain noised values only.

Losses, gradient norms and accuracies on training data depend on the data and have no noise, so none is shown.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from tqdm.auto import tqdm

from dpquant_compile.errors import PrivacySpecError
from dpquant_compile.privacy.engine import PrivacyEngine

__all__ = ["JsonlLog", "Log", "TensorBoardLog", "progress"]

# Seconds between two computations of ε for the bar: an accountant can take as long as a training step.
_EVERY = 15.0


class Log(Protocol):
    """Receives a record of each epoch from a scheduler; any object with this method will do."""

    def epoch(self, record: Mapping[str, Any]) -> None:
        """`record` holds epoch, policy, probabilities, scores (noised), analysed, epsilon and epsilons by purpose.

        The first epoch is 1.
        """


class JsonlLog:
    """One JSON object per line and epoch, appended to a file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Append one line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


class TensorBoardLog:
    """Scalars for TensorBoard: ε by purpose, the number of sites in low precision, scores and probabilities."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise PrivacySpecError("TensorBoardLog needs the package tensorboard: pip install tensorboard") from error
        self._writer = SummaryWriter(str(folder))

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Write the scalars of one epoch."""
        step, writer = record["epoch"], self._writer
        writer.add_scalar("privacy/epsilon", record["epsilon"], step)
        for purpose, epsilon in record["epsilons"].items():
            writer.add_scalar(f"privacy/epsilon of {purpose}", epsilon, step)
        writer.add_scalar("schedule/sites in low precision", len(record["policy"]), step)
        for kind in ("scores", "probabilities"):
            for name, value in record[kind].items():
                writer.add_scalar(f"{kind}/{name}", value, step)
        writer.flush()


def progress(engine: PrivacyEngine, *, delta: float, title: str = "epoch", show: bool | None = None) -> Iterator[Any]:
    """The batches of the engine's loader, with a bar that shows ε so far, the policy and samples per second.

    The bar is shown on a terminal only, unless `show` says otherwise. It counts logical batches.
    """
    run = engine.run
    visible = sys.stderr.isatty() if show is None else show
    bar = tqdm(total=run.loader.steps, desc=title, unit="batch", disable=not visible, leave=False)
    begun = asked = time.perf_counter()
    samples = 0
    epsilon = engine.get_epsilon(delta) if visible else 0.0
    try:
        for batch in run.loader:
            yield batch
            micro = run.session.micro
            if micro is None or not visible:
                continue
            samples += run.loader.expected_batch_size * micro.last  # the true size would reveal data
            now = time.perf_counter()
            if now - asked > _EVERY:
                asked, epsilon = now, engine.get_epsilon(delta)
            rate = f"{samples / max(now - begun, 1e-9):.0f}/s"
            bar.set_postfix_str(f"ε {epsilon:.2f}, {run.session.model.policy}, {rate}", refresh=False)
            bar.update(int(micro.last))
    finally:
        bar.close()
