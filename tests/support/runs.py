"""Results of runs that never ran, for tests of what is made of results."""

import dataclasses
from typing import Any

from dpquant_compile.lab.config import RunConfig
from dpquant_compile.lab.results import EpochRow, RunResult

SITES = ("stem", "block.0.conv1", "block.0.conv2", "fc")


def make_run(accuracy: float = 0.8, low: float | None = None, epochs: int = 4, **settings: Any) -> RunResult:
    """A result of `RunConfig(**settings)` that ends at these accuracies; whatever else it holds follows from them."""
    config = RunConfig(**{"task": "cnn-digits", "epochs": epochs, **settings}).resolved()
    low = accuracy if low is None else low
    k = round(config.budget * len(SITES))
    private, measured = config.privacy == "dp", config.scheduler == "dpquant" and 0 < k < len(SITES)
    rows = tuple(
        EpochRow(
            epoch=i + 1,
            accuracy=accuracy * (i + 1) / epochs,
            accuracy_low=low * (i + 1) / epochs,
            epsilon=1.0 + i if private else None,
            seconds=2.0,
            policy=tuple(sorted(SITES[(config.seed + i + j) % len(SITES)] for j in range(k))),
        )
        for i in range(epochs)
    )
    return RunResult(
        key=config.key,
        config=config,
        sites=SITES,
        delta=1e-5,
        epochs=rows,
        accuracy=accuracy,
        accuracy_low=low,
        epsilon=float(epochs) if private else None,
        epsilons={"training": epochs - 0.125, **({"analysis": 0.25} if measured else {})} if private else {},
        scores={site: 0.1 * i - 0.05 if measured else 0.0 for i, site in enumerate(SITES)},
        probabilities={site: (4 - i) / 10 if measured else 0.25 for i, site in enumerate(SITES)},
        seconds={"training": 6.0, "analysis": 1.0 if measured else 0.0, "evaluation": 0.5, "compiling": 3.0},
        versions={"torch": "2.13.0", "dpquant_compile": "0.1.0"},
    )


def changed(run: RunResult, **values: Any) -> RunResult:
    return dataclasses.replace(run, **values)
