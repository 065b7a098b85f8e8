"""Resuming after a kill: a run that SIGKILL ends in the middle of an epoch comes out as if nothing had happened.

    python examples/resuming.py [--epochs 4] [--out out/resuming]

The same training runs twice. The first run is left in peace. The second kills itself in the middle of an epoch
(SIGKILL: no handler, no clean-up), is started again by the same command, and goes on from its last checkpoint. Then the
two are compared: parameters, policies, scores, the ledger and ε, bit for bit. What to notice
- Checkpoints are made between epochs, one of them before anything is spent.
- After the kill the ledger on disk is *ahead* of the checkpoint: a step is recorded before its data is read.
- The resumed run goes through those steps again with the same batches and the same noise. That is the same release,
  so it is not charged twice. In secure mode randomness is new, and the repeated steps would count again.
- Seeds make the run repeatable, and so its noise predictable: train what you release with secure_mode=True.
"""

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq

DELTA = 1e-4


def build() -> nn.Module:
    """Four sites, and dropout, whose masks come from torch's own generator: that is in the checkpoint too."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def prepare(folder: Path, inner: str) -> tuple[dpq.PrivacyEngine, Any]:
    """The run before its first step, the same for a new run and for one that goes on: engine, and private objects."""
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target))
    model = dpq.compile(build(), budget=2, inner=inner)
    engine = dpq.PrivacyEngine(accountant="rdp", ledger_path=folder / "ledger.json")
    made = engine.make_private(
        module=model.train(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=256, generator=torch.Generator().manual_seed(1)),
        noise_multiplier=1.3,
        max_grad_norm=1.0,
        max_physical_batch_size=128,
        noise_generator=torch.Generator().manual_seed(2),
    )
    return engine, made


def train(folder: Path, epochs: int, inner: str, die_in: int | None = None) -> None:
    """Train from the last checkpoint on, or from the start; in the middle of epoch `die_in` kill this process."""
    folder.mkdir(parents=True, exist_ok=True)
    engine, (model, optimizer, criterion, loader) = prepare(folder, inner)
    scheduler = dpq.Scheduler(engine, epochs=epochs, n_interval=1)
    path = folder / "checkpoint.pt"
    if path.exists():
        engine.load_checkpoint(path=path)
        print(f"  goes on after {scheduler.epoch} epochs", flush=True)
    else:
        engine.save_checkpoint(path=path)  # before anything is spent: from here on a restart is a replay
    while scheduler.epoch < epochs:
        for number, (x, y) in enumerate(loader):
            if scheduler.epoch == die_in and number == loader.steps:
                print(f"  in epoch {scheduler.epoch}, before micro-batch {number}: SIGKILL", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        scheduler.step()
        engine.save_checkpoint(path=path)
    torch.save(outcome(engine, scheduler), folder / "outcome.pt")


def outcome(engine: dpq.PrivacyEngine, scheduler: dpq.Scheduler) -> dict[str, Any]:
    """What the runs are compared by; parameters by a hash of their bytes."""
    digest = hashlib.sha256()
    for name, parameter in engine.session.model.state_dict().items():
        digest.update(name.encode() + parameter.numpy().tobytes())
    return {
        "parameters": digest.hexdigest()[:16],
        "policies": " ".join("+".join(record.policy) for record in scheduler.history),
        "scores": " ".join(value.hex() for value in scheduler.scores.values()),
        "ledger": "; ".join(f"{e.steps} {e.purpose} q={e.q:.4g} σ={e.sigma:g}" for e in engine.ledger.entries),
        "epsilon": repr(engine.get_epsilon(DELTA)),
    }


def in_a_process(folder: Path, epochs: int, inner: str, *options: str) -> int:
    """`train` in a new process; its exit code, minus the signal if one ended it."""
    command = [sys.executable, __file__, "--only", str(folder), "--epochs", str(epochs), "--inner", inner, *options]
    return subprocess.run(command, check=False).returncode


def main() -> None:
    """Train in peace, train with a kill, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4, help="passes over the data (default: 4)")
    parser.add_argument("--die-in", type=int, help="the epoch, from 0, that is cut short (default: the last but one)")
    parser.add_argument("--inner", default="inductor", help="inductor, aot_eager or eager (default: inductor)")
    parser.add_argument("--out", type=Path, default=Path("out/resuming"), help="folder; what it holds is replaced")
    parser.add_argument("--only", type=Path, metavar="FOLDER", help="one run, with what it leaves in this folder")
    args = parser.parse_args()
    if args.die_in is not None and not 0 <= args.die_in < args.epochs:
        parser.error(f"--die-in {args.die_in}: give an epoch from 0 to {args.epochs - 1}")
    if args.only is not None:
        train(args.only, args.epochs, args.inner, args.die_in)
        return
    whole, killed = args.out / "whole", args.out / "killed"
    for folder in (whole, killed):
        shutil.rmtree(folder, ignore_errors=True)

    print("In peace", flush=True)
    train(whole, args.epochs, args.inner)

    print("With a kill", flush=True)
    die_in = max(0, args.epochs - 2) if args.die_in is None else args.die_in
    code = in_a_process(killed, args.epochs, args.inner, "--die-in", str(die_in))
    saved = torch.load(killed / "checkpoint.pt", weights_only=True)["dpquant"]["ledger"]["entries"]
    on_disk = dpq.Ledger.read(killed / "ledger.json").entries
    print(f"  exit code {code}, outcome written: {(killed / 'outcome.pt').exists()}")
    print(f"  spends in the checkpoint: {sum(e['steps'] for e in saved)}, on disk: {sum(e.steps for e in on_disk)}")
    print("Started again", flush=True)
    if in_a_process(killed, args.epochs, args.inner) != 0:
        raise SystemExit("the resumed run failed")

    first, second = (torch.load(folder / "outcome.pt", weights_only=True) for folder in (whole, killed))
    print("\nIn peace, and killed and resumed:")
    for name in first:
        print(f"  {name:<10}  {'equal' if first[name] == second[name] else 'DIFFERENT'}\n    {first[name]}")
        if first[name] != second[name]:
            print(f"    {second[name]}")


if __name__ == "__main__":
    main()
