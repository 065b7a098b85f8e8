"""What does four bits cost less if the first layer, the classifier or both stay in float32?

    python experiments/spared_sites.py --task cnn-gtsrb-small --data folder --out out/spared_sites.json

Trains over paired seeds with all sites in the default recipe but the ones that are spared, from the first epoch to the
last. Not private as a choice: which sites to spare is compared here on public data.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from known_ranks import accuracies  # type: ignore[import-not-found, unused-ignore]

from dpquant_compile.lab.config import RunConfig
from dpquant_compile.lab.tasks import get_task

SPARED = {"none": (), "the first": (0,), "the last": (-1,), "the first and the last": (0, -1)}


def sites_of(task: str, data: str | None) -> tuple[str, ...]:
    """The names of the task's sites, in the order of the model."""
    model = get_task(task).model(None if data is None else Path(data))
    kinds = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.Linear)
    return tuple(name for name, module in model.named_modules() if isinstance(module, kinds))


def main() -> None:
    """Train with each choice of spared sites over all seeds, and write accuracies and paired differences."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", default="cnn-gtsrb-small")
    parser.add_argument("--data", default=None)
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--epsilon", type=float, default=4.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = sites_of(args.task, args.data)
    common: dict[str, Any] = dict(
        data=args.data, epochs=args.epochs, target_epsilon=args.epsilon, reproducible=True, budget=1.0
    )
    found: dict[str, list[tuple[float, float]]] = {}
    for kind, places in SPARED.items():
        spared = {names[place] for place in places}
        low = [name for name in names if name not in spared]
        found[kind] = []
        for seed in args.seeds:
            config = RunConfig(args.task, seed=seed, scheduler="static", **common)
            found[kind].append(accuracies(config.resolved(), low))
            print(kind, seed, found[kind][-1], flush=True)
    rows = [dict(spared=kind, **_column(found[kind], found["none"])) for kind in SPARED]
    table = dict(task=args.task, seeds=args.seeds, rows=rows)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def _column(own: list[tuple[float, float]], base: list[tuple[float, float]]) -> dict[str, Any]:
    """Accuracies in float32 and in low precision, and how far they are above those without spared sites."""
    values: dict[str, Any] = {}
    for place, word in enumerate(("accuracy", "accuracy_low")):
        gains = [one[place] - other[place] for one, other in zip(own, base, strict=True)]
        error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
        values |= {word: [one[place] for one in own], f"{word}_gain": statistics.fmean(gains), f"{word}_error": error}
    return values


if __name__ == "__main__":
    main()
