"""Where does low precision hurt training? The part of the clipped gradient that is left when a site is in FP4.

    python experiments/training_signal.py --task cnn-digits --out experiments/results/training_signal_digits.json

Trains privately for some epochs with uniform draws of sites. Then, on one batch of training data and without noise,
takes the sum of clipped gradients in full precision, g, and under a policy, h: "signal" is ⟨h, g⟩ / ⟨g, g⟩, the part of
g that is left, and "cosine" the angle between both. For all sites in FP4, for each site alone, and for all sites but
that one; means over some roundings. Not private: this is an experiment on public data.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dpquant_compile.lab.config import RunConfig
from dpquant_compile.lab.train import Run
from dpquant_compile.privacy.data.poisson_loader import MicroBatch

FAR = 1 << 40  # a step that no training reaches: roundings of this experiment are its own


def clipped_sum(run: Run, policy: Sequence[str], turn: int) -> Tensor:
    """The sum of clipped gradients of the first samples, as one vector."""
    session = run.engine.session
    ids = torch.arange(min(session.physical, len(run.split.train_x)))
    run.model.train()
    run.model.set_policy(policy)
    run.model.step = FAR + turn
    with session.rehearsal(noise := run.engine.run.noise_multiplier):
        session.announce(MicroBatch(ids, first=True, last=True))
        run.criterion(run.model(run.split.train_x[ids]), run.split.train_y[ids]).backward()
        return torch.cat([total.flatten() for total in session.take_sums(noise).values() if total is not None])


def left(run: Run, policy: Sequence[str], base: Tensor, turns: int) -> dict[str, float]:
    """Signal and cosine of a policy, means over roundings."""
    vectors = [clipped_sum(run, policy, turn) for turn in range(turns)]
    signal = sum(float(v @ base / (base @ base)) for v in vectors) / turns
    cosine = sum(float(v @ base / (v.norm() * base.norm())) for v in vectors) / turns
    return dict(signal=signal, cosine=cosine)


def main() -> None:
    """Train, stop, compare, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", default="cnn-digits")
    parser.add_argument("--data", default=None)
    parser.add_argument("--epochs", type=int, default=3, help="before the comparison")
    parser.add_argument("--turns", type=int, default=4, help="roundings")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = RunConfig(
        args.task, seed=args.seed, scheduler="pls", data=args.data, epochs=args.epochs, reproducible=True
    ).resolved()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, Path(folder))
        for _ in run.epochs():
            pass
        names = list(run.model.sites.names)
        base = clipped_sum(run, [], 0)
        rows = [dict(site=name, **left(run, [name], base, args.turns)) for name in names]
        for row in rows:
            others = [name for name in names if name != row["site"]]
            row.update({f"{k}_without": v for k, v in left(run, others, base, args.turns).items()})
            print(json.dumps(row), flush=True)
        whole = left(run, names, base, args.turns)
    table = dict(task=args.task, seed=args.seed, after_epochs=args.epochs, all_sites=whole, rows=rows)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
