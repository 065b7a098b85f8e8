"""How well one private measurement ranks the sites, against an oracle without noise, and what it costs.

    python experiments/estimator_ranks.py --task cnn-digits --out experiments/results/estimator_ranks_digits.json
    python experiments/estimator_ranks.py --task cnn-gtsrb-small --data FOLDER --out …

Trains privately with uniform draws of sites. After some epochs it stops and asks each estimator, several times, which
sites bear low precision badly. The oracle is the mean difference of losses over all training samples and several
roundings, unclipped and without noise. It is not private: this is an experiment on public data. The figure is
Spearman's rank correlation with the oracle; ε is that of one measurement alone.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr  # type: ignore[import-untyped, unused-ignore]

from dpquant_compile.lab.config import RunConfig
from dpquant_compile.lab.train import Run
from dpquant_compile.privacy.accounting.accountants import composed_epsilon
from dpquant_compile.privacy.accounting.epsilon import Entry, gathered
from dpquant_compile.privacy.schedule.estimators import Paper, PerSample, Setting
from dpquant_compile.privacy.schedule.probe import draw_batch, unpack_batch


@dataclass(frozen=True)
class Contestant:
    """An estimator with its settings; `samples` is the expected size of its probe batch."""

    name: str
    estimator: Any
    samples: int
    private: bool = True


CONTESTANTS = (
    Contestant("paper", Paper(), 128),
    Contestant("paper, C = 0.1", Paper(clip=0.1), 128),
    Contestant("paper, before clipping and noise", Paper(clip=math.inf), 128, private=False),
    Contestant("per_sample", PerSample(), 512),
    Contestant("per_sample, 128 samples", PerSample(), 128),
    Contestant("per_sample, C = 0.1", PerSample(clip=0.1), 512),
    Contestant("per_sample, C = 0.1, σ = 8", PerSample(clip=0.1, sigma=8.0), 512),
    Contestant("per_sample, C = 0.05, σ = 8", PerSample(clip=0.05, sigma=8.0), 512),
    Contestant("per_sample, C = 0.05, σ = 16", PerSample(clip=0.05, sigma=16.0), 512),
    Contestant("per_sample, C = 0.02, σ = 8", PerSample(clip=0.02, sigma=8.0), 512),
    Contestant("per_sample, C = 2", PerSample(clip=2.0), 512),
    Contestant("per_sample, before clipping and noise", PerSample(clip=math.inf), 512, private=False),
)


def measured(run: Run, estimator: Any, rate: float, number: int, noisy: bool) -> torch.Tensor:
    """One measurement of every site; `number` makes draw, rounding and noise its own."""
    made = run.engine.run
    assert made.criterion is not None  # tasks have one
    setting = Setting(made.session, made.optimizer, made.criterion, number, rate * made.loader.size)
    generator = torch.Generator().manual_seed(7919 * number + 1)

    def uniform(n: int) -> torch.Tensor:
        return torch.rand(n, generator=generator, dtype=torch.float64)

    batches = draw_batch(made.loader, rate, uniform, made.session.physical, setting.group_of, unpack_batch)
    policies = [frozenset({name}) for name in run.model.sites.names]
    vector = estimator.measure(setting, policies, batches)
    if noisy:
        vector = vector + estimator.sigma * estimator.sensitivity("add_remove") * torch.randn(
            len(vector), generator=generator, dtype=torch.float64
        )
    result: torch.Tensor = vector / estimator.divisor(setting)
    return result


def ranks(run: Run, repeats: int, oracle_turns: int, offset: int) -> Iterator[tuple[str, list[float]]]:
    """The correlations of each contestant's measurements with the oracle, at the weights as they are now."""
    oracle = measured(run, PerSample(clip=math.inf, repetitions=oracle_turns), 1.0, offset, noisy=False)
    for contestant in CONTESTANTS:
        rate = min(1.0, contestant.samples / len(run.split.train_x))
        found = []
        for turn in range(repeats):
            vector = measured(run, contestant.estimator, rate, offset + 1 + turn, contestant.private)
            found.append(float(spearmanr(oracle.numpy(), vector.numpy()).statistic))
        yield contestant.name, found


def main() -> None:
    """Train, stop, measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", default="cnn-digits")
    parser.add_argument("--data", default=None)
    parser.add_argument("--recipe", default="int4")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--at", type=int, nargs="+", default=[2, 6], help="epochs after which to measure")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each kind, each time")
    parser.add_argument("--oracle", type=int, default=8, help="roundings that the oracle goes through")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found: dict[str, list[float]] = {contestant.name: [] for contestant in CONTESTANTS}
    size = 0
    for seed in args.seeds:
        config = RunConfig(
            args.task,
            seed=seed,
            recipe=args.recipe,
            scheduler="pls",
            data=args.data,
            epochs=max(args.at),
            reproducible=True,
        ).resolved()
        with tempfile.TemporaryDirectory() as folder:
            run = Run(config, Path(folder))
            size = len(run.split.train_x)
            for row in run.epochs():
                if row.epoch in args.at:
                    for name, values in ranks(run, args.repeats, args.oracle, 1000 * row.epoch):
                        found[name] += values
                        print(f"seed {seed} epoch {row.epoch}: {name}: {statistics.mean(values):.2f}", flush=True)
    rows = []
    for contestant in CONTESTANTS:
        values, delta = found[contestant.name], config.delta
        assert delta is not None
        rate = min(1.0, contestant.samples / size)
        entry = Entry("analysis", "subsampled_gaussian", rate, contestant.estimator.sigma, 1)
        epsilon = composed_epsilon("prv", gathered([entry]), delta) if contestant.private else None
        rows.append(
            dict(
                estimator=contestant.name,
                mean=statistics.mean(values),
                std=statistics.stdev(values) if len(values) > 1 else 0.0,
                measurements=len(values),
                samples=contestant.samples,
                epsilon=epsilon,
            )
        )
    table = dict(
        task=args.task,
        recipe=args.recipe,
        seeds=args.seeds,
        after_epochs=args.at,
        oracle_roundings=args.oracle,
        rows=rows,
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
