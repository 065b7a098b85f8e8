"""Accuracy and ε of a task trained by Opacus, and here in float32, int8 and four bits: the same loop, several seeds.

    python benchmarks/beside_opacus.py                    # digits, five seeds each; a quarter of an hour
    python benchmarks/beside_opacus.py --smoke            # one epoch, one seed

All take the task's own settings: the same noise, clipping, batches in expectation, epochs and start. "int8" has all
layers low, "int4" three quarters of them, chosen by the schedule, whose measurements count in ε. Accuracy is of test
data, with the model used in the precision in which it was trained: mean ± standard error over the seeds.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dpquant_compile.lab.config import RunConfig
from dpquant_compile.lab.opacus_run import train_by_opacus
from dpquant_compile.lab.train import train

OURS: dict[str, dict[str, Any]] = {
    "float32": {"budget": 0.0},
    "int8": {"recipe": "int8", "budget": 1.0},
    "int4": {"budget": 0.75},
}


def ours(config: RunConfig) -> tuple[float, float]:
    """Accuracy and ε of a run here."""
    with tempfile.TemporaryDirectory() as folder:
        result = train(config, Path(folder) / "run")
    assert result.epsilon is not None
    return result.accuracy_low, result.epsilon


def main() -> None:
    """Train all, print a row of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cnn-digits", help="see `dpquant tasks`; default: %(default)s")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    seeds = range(1 if args.smoke else args.seeds)
    base = RunConfig(args.task, epochs=1 if args.smoke else None).resolved()
    figures: dict[str, dict[str, object]] = {}
    print(f"{args.task}, {base.epochs} epochs, δ = {base.delta:g}\n{'':<10}{'accuracy, %':>14}{'ε':>8}", flush=True)
    for name in ("Opacus", *OURS):
        found = []
        for seed in seeds:
            config = replace(base, seed=seed, **OURS.get(name, {}))
            if name == "Opacus":
                run = train_by_opacus(config)
                found.append((run.accuracy, run.epsilon))
            else:
                found.append(ours(config))
        accuracies = [100 * accuracy for accuracy, _ in found]
        error = statistics.stdev(accuracies) / len(accuracies) ** 0.5 if len(accuracies) > 1 else 0.0
        mean, epsilon = statistics.mean(accuracies), found[0][1]
        figures[name] = {"accuracies": accuracies, "mean": mean, "error": error, "epsilon": epsilon}
        print(f"{name:<10}{f'{mean:.1f} ± {error:.1f}':>14}{epsilon:>8.2f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
