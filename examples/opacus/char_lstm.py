"""The language of a name, letter by letter, by an LSTM, with Opacus or with this library: the loop is the same.

    python examples/opacus/char_lstm.py [--engine opacus] [--epochs 12]

What to notice
- `with_opacus` and `with_dpquant` differ in five lines, which are numbered. All the rest serves both.
- ε is the same to the last digit. The noise comes from other generators, so accuracies differ by chance as well.
- The LSTM is Opacus' `DPLSTM`, for both engines: it is made of linear layers, which are sites here. `nn.LSTM` is one
  opaque operator, without gradients per sample.
- A linear layer of the LSTM is called once for every letter. The squared norm of its gradient includes the products
  between the letters.
- All names have one length, with padding.

The names are made up here, from syllables and a seed; no network is needed.
"""

import argparse
import random
from typing import Any

import opacus
import torch
from opacus.layers import DPLSTM
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq

LETTERS, LENGTH = 27, 10  # the alphabet and 0, which is padding
CLIP, DELTA = 1.0, 1e-5

# The syllables of three invented languages, and how their names end.
SYLLABLES = (
    ("ka ri mo ta shi no yu ha".split(), "ko ra mi".split()),
    ("grim thor bjar stei hal run vald ulf".split(), "sen son dottir".split()),
    ("del lor ven chi mar bel can ros".split(), "ini etto ella".split()),
)


class CharLSTM(nn.Module):
    """Letters [B, T] to languages: embedding, LSTM, and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, 16)
        self.lstm = DPLSTM(16, 32, batch_first=True)
        self.out = nn.Linear(32, len(SYLLABLES))

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.letters(x))
        logits: Tensor = self.out(states[:, -1])
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


def names(count: int, seed: int) -> TensorDataset:
    """Names with their languages; the end of a name is at the end of its row."""
    draw = random.Random(seed)
    letters, labels = torch.zeros(count, LENGTH, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    for row in range(count):
        labels[row] = language = draw.randrange(len(SYLLABLES))
        inner, ends = SYLLABLES[language]
        name = ("".join(draw.choices(inner, k=draw.randint(1, 2))) + draw.choice(ends))[-LENGTH:]
        letters[row, LENGTH - len(name) :] = torch.tensor([ord(letter) - ord("a") + 1 for letter in name])
    return TensorDataset(letters, labels)


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """The share of test names that are classified rightly."""
    model.eval()
    letters, labels = test.tensors
    return float((model(letters).argmax(1) == labels).float().mean())


def main() -> None:
    """Train with one of the engines, and say what it cost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=("dpquant", "opacus"), default="dpquant")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=128, help="expected size of a Poisson batch")
    parser.add_argument("--physical", type=int, default=64, help="how many names fit into memory")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--sigma", type=float, default=1.0, help="noise multiplier")
    parser.add_argument("--inner", choices=("inductor", "aot_eager", "eager"), default="inductor")
    parser.add_argument("--smoke", action="store_true", help="a run of seconds, on few names")
    options = parser.parse_args()
    if options.smoke:
        options.epochs, options.batch, options.physical, options.inner = 4, 64, 64, "eager"
    torch.manual_seed(0)
    train, test = names(512 if options.smoke else 2048, 0), names(512, 1)

    model = CharLSTM()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(train, batch_size=options.batch)
    make = with_opacus if options.engine == "opacus" else with_dpquant
    engine, model, optimizer, criterion, loader = make(model, optimizer, criterion, loader, options)

    for epoch in range(1, options.epochs + 1):
        model.train()
        for letters, labels in loader:
            optimizer.zero_grad()
            criterion(model(letters), labels).backward()
            optimizer.step()
        spent = engine.get_epsilon(DELTA)
        print(f"epoch {epoch}: test {accuracy(model, test):.1%}; epsilon {spent:.4f} at delta {DELTA:g}", flush=True)


if __name__ == "__main__":
    main()
