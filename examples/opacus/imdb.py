"""Reviews that are good or bad, by the mean of word embeddings, with Opacus or with this library: the loop is the same.

    python examples/opacus/imdb.py [--engine opacus] [--epochs 8]

What to notice
- `with_opacus` and `with_dpquant` differ in five lines, which are numbered. All the rest serves both.
- ε is the same to the last digit. The noise comes from other generators, so accuracies differ by chance as well.
- An embedding has a gradient for the words of a sample alone. Neither a table of gradients per sample nor the position
  of words reaches memory: the norm is that of the rows, repeated words added up.
- All reviews have one length. A batch that is padded to its longest review would tell its length to the others.
- The vocabulary is a hash of the word. One that is counted in private text is a release of its own.

The reviews are made up here, by a few rules and a seed; no network is needed.
"""

import argparse
import random
import zlib
from typing import Any

import opacus
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq

WORDS, LENGTH = 2048, 32  # size of the hashed vocabulary; words of a review, of which 0 is padding
CLIP, DELTA = 1.0, 1e-5

OPINIONS = (
    "dull slow flat tired clumsy forgettable wooden noisy hollow lazy stale messy".split(),
    "bright gripping warm clever lively moving fresh tender bold honest graceful funny".split(),
)
THINGS = "plot cast script music dialogue ending camera pace hero villain city scene romance joke".split()
FILLERS = "the film has a that everyone in the audience will remember and some will not".split()


class Embeddings(nn.Module):
    """The mean of a review's word embeddings, and two linear layers; word numbers [B, T] to 2 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.fc1 = nn.Linear(16, 16)
        self.fc2 = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x).mean(1)
        logits: Tensor = self.fc2(torch.relu(self.fc1(x)))
        return logits


def with_opacus(model: nn.Module, optimizer: Any, criterion: Any, loader: Any, options: argparse.Namespace) -> Any:
    """Engine, model, optimizer, loss and loader, all private."""
    engine = opacus.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=options.sigma,
        max_grad_norm=CLIP,
    )
    return engine, model, optimizer, criterion, loader


def with_dpquant(model: nn.Module, optimizer: Any, criterion: Any, loader: Any, options: argparse.Namespace) -> Any:
    """Engine, model, optimizer, loss and loader, all private."""
    model = dpq.compile(model, budget=0.5, inner=options.inner)  # 1: half of the layers in four bits
    engine = dpq.PrivacyEngine()  # 2
    model, optimizer, criterion, loader = engine.make_private(  # 3: the loss becomes one loss per sample
        module=model,
        optimizer=optimizer,
        criterion=criterion,  # 4
        data_loader=loader,
        noise_multiplier=options.sigma,
        max_grad_norm=CLIP,
        max_physical_batch_size=options.physical,  # 5: where Opacus takes a BatchMemoryManager
    )
    return engine, model, optimizer, criterion, loader


def reviews(count: int, seed: int) -> TensorDataset:
    """Reviews of random length with mostly words of their class, and the class."""
    draw = random.Random(seed)
    tokens, labels = torch.zeros(count, LENGTH, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    for row in range(count):
        labels[row] = label = draw.randrange(2)
        text: list[str] = []
        for _ in range(draw.randint(4, 10)):
            opinion = draw.choice(OPINIONS[label if draw.random() < 0.85 else 1 - label])
            text += [draw.choice(FILLERS), opinion, draw.choice(THINGS)]
        numbers = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in text][:LENGTH]
        tokens[row, : len(numbers)] = torch.tensor(numbers)
    return TensorDataset(tokens, labels)


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """The share of test reviews that are classified rightly."""
    model.eval()
    tokens, labels = test.tensors
    return float((model(tokens).argmax(1) == labels).float().mean())


def main() -> None:
    """Train with one of the engines, and say what it cost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=("dpquant", "opacus"), default="dpquant")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=128, help="expected size of a Poisson batch")
    parser.add_argument("--physical", type=int, default=64, help="how many reviews fit into memory")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--sigma", type=float, default=1.0, help="noise multiplier")
    parser.add_argument("--inner", choices=("inductor", "aot_eager", "eager"), default="inductor")
    parser.add_argument("--smoke", action="store_true", help="a run of seconds, on few reviews")
    options = parser.parse_args()
    if options.smoke:
        options.epochs, options.batch, options.physical, options.inner = 4, 64, 64, "eager"
    torch.manual_seed(0)
    train, test = reviews(512 if options.smoke else 2048, 0), reviews(512, 1)

    model = Embeddings()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(train, batch_size=options.batch)
    make = with_opacus if options.engine == "opacus" else with_dpquant
    engine, model, optimizer, criterion, loader = make(model, optimizer, criterion, loader, options)

    for epoch in range(1, options.epochs + 1):
        model.train()
        for tokens, labels in loader:
            optimizer.zero_grad()
            criterion(model(tokens), labels).backward()
            optimizer.step()
        spent = engine.get_epsilon(DELTA)
        print(f"epoch {epoch}: test {accuracy(model, test):.1%}; epsilon {spent:.4f} at delta {DELTA:g}", flush=True)


if __name__ == "__main__":
    main()
