"""Train a small CNN privately on several processes, with three quarters of its layers in four bits.

    torchrun --nproc-per-node=2 examples/ddp.py [--epochs 6] [--inner inductor] [--shard]

The data are the 1,797 handwritten digits that come with scikit-learn. Each process clips the gradients of its share of
every Poisson batch; the sums are added up, noise comes in once, and all processes take the same step. Killed and
started again, or with another --nproc-per-node, it goes on from its checkpoint. Without torchrun it is one process.
With --shard each process keeps its part of parameters, gradients and optimizer states.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq

DELTA = 1e-4


def build() -> nn.Module:
    """Four sites."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """Training records, test images and test labels: the same split on every process, since the seed is."""
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return TensorDataset(x[train], y[train]), x[test], y[test]


def main() -> None:
    """Train, and let rank 0 say what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--inner", default="inductor", help="inductor, aot_eager or eager (default: inductor)")
    parser.add_argument("--out", type=Path, default=Path("out/ddp"), help="for checkpoint and ledger; all must see it")
    parser.add_argument("--shard", action="store_true", help="fully_shard the model; under torchrun")
    args = parser.parse_args()
    if "RANK" in os.environ:  # set by torchrun
        dpq.init_process_group()
    first = int(os.environ.get("RANK", "0")) == 0
    args.out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    records, test_x, test_y = digits()
    model = dpq.compile(build(), budget=0.75, inner=args.inner)
    if args.shard:
        fully_shard(model)  # after compile, before the optimizer
    engine = dpq.PrivacyEngine(accountant="rdp", ledger_path=args.out / "ledger.json")
    model, optimizer, criterion, loader = engine.make_private(
        module=model.train(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(records, batch_size=256),  # of all processes together
        noise_multiplier=1.3,
        max_grad_norm=1.0,
        max_physical_batch_size=64,  # of each process
    )
    scheduler = dpq.Scheduler(engine, epochs=args.epochs, n_sample=4)
    checkpoint = args.out / "checkpoint"
    if checkpoint.exists():
        engine.load_checkpoint(path=checkpoint)
    else:
        engine.save_checkpoint(path=checkpoint)  # before anything is spent: from here on a restart is a repetition

    while scheduler.epoch < args.epochs:
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        scheduler.step()
        engine.save_checkpoint(path=checkpoint)
        model.eval()
        with torch.no_grad():
            accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
        if first:
            spent = engine.get_epsilon(DELTA)
            print(f"epoch {scheduler.epoch}: test accuracy {accuracy:.1%}, epsilon {spent:.2f}", flush=True)
    if first:
        print(engine.ledger.statement(DELTA))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
