"""What would a perfect ranking be worth? Static subsets that spare the most, and the least, sensitive sites.

    python experiments/known_ranks.py --task cnn-digits --out experiments/results/known_ranks_digits.json

Trains once, privately and in full precision, and takes the mean difference of losses of each site over all training
samples and several roundings, unclipped and without noise: the ranking that a private measurement aims at. Then trains
with the sites in FP4 that this ranking says matter least, and with those that it says matter most, from the first epoch
to the last. Not private: this is an experiment on public data. If the two differ by little, no schedule that ranks
sites by their loss can be worth much there.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from estimator_ranks import measured  # type: ignore[import-not-found, unused-ignore]

from dpquant_compile.lab.config import RunConfig
from dpquant_compile.lab.train import Run
from dpquant_compile.policy import resolve_budget
from dpquant_compile.privacy.schedule.estimators import PerSample


def ranking(config: RunConfig, turns: int) -> list[tuple[str, float]]:
    """The sites from the most sensitive to the least, with what each costs in loss."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, Path(folder))
        for _ in run.epochs():
            pass
        costs = measured(run, PerSample(clip=math.inf, repetitions=turns), 1.0, 1, noisy=False)
        return sorted(zip(run.model.sites.names, costs.tolist(), strict=True), key=lambda pair: -pair[1])


def accuracies(config: RunConfig, low: Sequence[str]) -> tuple[float, float]:
    """Train with these sites in low precision throughout; accuracy in full and in low precision, in per cent."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, Path(folder))
        run.model.set_policy(low)
        run.scheduler.step = lambda: None  # type: ignore[method-assign, assignment, return-value]
        last = list(run.epochs())[-1]
        assert set(last.policy) == set(low)
        return 100 * last.accuracy, 100 * last.accuracy_low


def main() -> None:
    """Rank, train both ways, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", default="cnn-digits")
    parser.add_argument("--data", default=None)
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--epsilon", type=float, default=6.0)
    parser.add_argument("--budget", type=float, default=0.75)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5])
    parser.add_argument("--oracle", type=int, default=4, help="roundings that the ranking goes through")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    common: dict[str, Any] = dict(data=args.data, epochs=args.epochs, target_epsilon=args.epsilon, reproducible=True)
    costs = ranking(RunConfig(args.task, budget=0.0, **common).resolved(), args.oracle)
    names = [name for name, _ in costs]
    count = resolve_budget(args.budget, names)
    rows = []
    for kind, low in (("the least sensitive in FP4", names[-count:]), ("the most sensitive in FP4", names[:count])):
        found = []
        for seed in args.seeds:
            config = RunConfig(args.task, seed=seed, budget=args.budget, scheduler="static", **common)
            found.append(accuracies(config.resolved(), low))
            print(kind, seed, found[-1], flush=True)
        full, quantized = zip(*found, strict=True)
        rows.append(
            dict(
                kind=kind,
                low=low,
                accuracy=list(full),
                accuracy_low=list(quantized),
                mean=statistics.fmean(full),
                mean_low=statistics.fmean(quantized),
            )
        )
    table = dict(task=args.task, budget=args.budget, seeds=args.seeds, costs=dict(costs), rows=rows)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
