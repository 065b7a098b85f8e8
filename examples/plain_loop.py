"""The plain private loop: a small CNN on handwritten digits, half of its layers in FP4, within a stated ε.

    python examples/plain_loop.py [--epochs 8] [--epsilon 6] [--inner inductor]

What to notice
- The loop is that of any PyTorch program. Clipping, noise and accounting are inside what `make_private` returns.
- `dpq.plan` finds the noise for a target ε, with the scheduler's analyses counted; the engine refuses to pass it.
- Accuracy is measured on images that were not trained on. Losses and accuracies on training data are not private.

It takes about half a minute, most of it for compiling; `--inner eager` compiles nothing and is slower per step.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq

BATCH_SIZE, PHYSICAL, TEST_SIZE, DELTA = 256, 64, 360, 1e-4


def build() -> nn.Module:
    """Four sites. GroupNorm, since BatchNorm would mix samples."""
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


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test images, scaled to [0, 1], with their labels."""
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_SIZE], order[TEST_SIZE:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """The share of right answers, in full precision: that is what eval() runs."""
    x, y = data.tensors
    model.eval()
    with torch.no_grad():
        right: Tensor = model(x).argmax(1) == y
    return right.float().mean().item()


def main() -> None:
    """Plan, compile, train, and say what it cost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training data (default: 8)")
    parser.add_argument("--epsilon", type=float, default=6.0, help="the most that may be spent (default: 6)")
    parser.add_argument("--inner", default="inductor", help="inductor, aot_eager or eager (default: inductor)")
    args = parser.parse_args()

    torch.manual_seed(0)
    train, test = digits()
    plan = dpq.plan(
        target_epsilon=args.epsilon,
        delta=DELTA,
        dataset_size=len(train),
        batch_size=BATCH_SIZE,
        epochs=args.epochs,
        max_physical_batch_size=PHYSICAL,
    )
    print(f"Noise multiplier {plan.noise_multiplier:.3f} keeps {args.epochs} epochs within epsilon {args.epsilon:g}")

    model = dpq.compile(build(), budget=0.5, inner=args.inner)  # two of the four sites in FP4
    engine = dpq.PrivacyEngine(target_epsilon=args.epsilon, target_delta=DELTA)
    model, optimizer, criterion, loader = engine.make_private(
        module=model.train(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(train, batch_size=BATCH_SIZE),
        noise_multiplier=plan.noise_multiplier,
        max_grad_norm=1.0,
        max_physical_batch_size=PHYSICAL,
    )
    scheduler = dpq.Scheduler(engine, epochs=args.epochs)

    for epoch in range(1, args.epochs + 1):
        names = ", ".join(sorted(model.policy))
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        scheduler.step()
        spent = engine.get_epsilon(DELTA)
        print(f"epoch {epoch}: in FP4 {names}; test {accuracy(model, test):.1%}; epsilon {spent:.2f}", flush=True)

    print(f"\n{engine.ledger.statement(DELTA)}")


if __name__ == "__main__":
    main()
