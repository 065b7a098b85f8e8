"""Are the gradients of private training larger, and does the batch size matter? Norms of raw gradients, epoch by epoch.

    python experiments/gradient_norms.py --task cnn-digits --out experiments/results/gradient_norms_digits.json

Trains in full precision with and without noise and clipping, and for several batch sizes. After each epoch the gradient
of the plain loss is taken on a few batches of training data, without clipping or noise, in float32. Per weight of a
conv or linear layer: its norm, and its range, the largest element over the median one in powers of two, which is what a
format with few exponents must span. Not private: this is an experiment on public data.
"""

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path

import torch
from torch import nn

from dpquant_compile.lab.config import RunConfig
from dpquant_compile.lab.tasks import get_task
from dpquant_compile.lab.train import Run


def gradients(run: Run, model: nn.Module, batch: int, count: int) -> tuple[list[float], list[float]]:
    """Norm and range of each weight's gradient on `count` batches, at the run's weights."""
    model.load_state_dict(run.model.state_dict())
    norms, ranges = [], []
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        chosen = torch.randperm(len(run.split.train_x), generator=generator)[:batch]
        model.zero_grad()
        nn.functional.cross_entropy(model(run.split.train_x[chosen]), run.split.train_y[chosen]).backward()
        for parameter in model.parameters():
            if parameter.dim() < 2 or parameter.grad is None:
                continue
            size = parameter.grad.abs()
            norms.append(float(size.norm()))
            if (middle := float(size.median())) > 0:
                ranges.append(math.log2(float(size.max()) / middle))
    return norms, ranges


def main() -> None:
    """Train each control, collect, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", default="cnn-digits")
    parser.add_argument("--data", default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    usual = RunConfig(args.task, budget=0.0).resolved().batch_size
    kinds = [("none", usual), ("clip", usual), *(("dp", batch) for batch in sorted({*args.batches, usual}))]
    rows = []
    for privacy, batch in kinds:
        norms: list[float] = []
        ranges: list[float] = []
        for seed in args.seeds:
            config = RunConfig(
                args.task,
                seed=seed,
                budget=0.0,
                privacy=privacy,
                batch_size=batch,
                data=args.data,
                epochs=args.epochs,
                reproducible=True,
            ).resolved()
            plain = get_task(args.task).model(None if args.data is None else Path(args.data))
            with tempfile.TemporaryDirectory() as folder:
                run = Run(config, Path(folder))
                for _ in run.epochs():
                    found = gradients(run, plain, 256, 4)
                    norms += found[0]
                    ranges += found[1]
        row = dict(privacy=privacy, batch=batch, norm_mean=statistics.mean(norms), norm_std=statistics.stdev(norms))
        row |= dict(norm_max=max(norms), range_mean=statistics.mean(ranges), range_std=statistics.stdev(ranges))
        rows.append(row)
        print(json.dumps(row), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dict(task=args.task, seeds=args.seeds, rows=rows), indent=1)
    args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
