"""A Hugging Face model of BERT's type, fine-tuned privately by DP-AdamW with most of its layers frozen.

    python examples/bert_frozen.py                                       # a tiny model, 48 sentence pairs, no network
    python examples/bert_frozen.py --data FOLDER --weights FOLDER --epochs 3 --limit 8000      # the real thing

`--data` is a folder with SNLI as snli_train*.tsv.gz and snli_dev.tsv.gz (columns label, premise, hypothesis),
`--weights` a local folder of a pretrained model with its tokenizer. Without them the model is random and the pairs are
the 48 of sentence_pairs.tsv, made up for this example: the mechanics are real, the accuracy is then that of chance.

What to notice
- Frozen parameters have no per-sample gradients, no noise and no cost: explain() lists the trained ones alone. The
  frozen layers are sites all the same, since their forward can run in low precision.
- The optimizer is torch's AdamW as it is: it works on noised gradients, which makes it DP-AdamW.
- BERT takes several inputs by name. `example_inputs=` lets the compiler capture it at once, and `unpack=` tells the
  scheduler how a batch becomes a call.
- The vocabulary must not come from private text. Here it is a hash of the word, or the pretrained model's own.
"""

import argparse
import gzip
import zlib
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile import torchvision_compat

hugging_face: Any = transformers  # whose own types do not hold for what its configurations take
LABELS = ("entailment", "neutral", "contradiction")
WORDS, LENGTH = 2048, 48  # size of the hashed vocabulary; tokens of a pair
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # noise is regularisation enough
Pair = tuple[str, str, str]


class Classifier(nn.Module):
    """The logits of a Hugging Face classifier alone, which is what a loss takes."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.bert(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


def build(weights: Path | None, trained_layers: int) -> Classifier:
    """The model, with everything frozen but the last `trained_layers` layers, the pooler and the classifier."""
    if weights is None:
        config = hugging_face.BertConfig(
            vocab_size=WORDS,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=LENGTH,
            num_labels=len(LABELS),
            **NO_DROPOUT,
        )
        bert = hugging_face.BertForSequenceClassification(config)
    else:
        auto = hugging_face.AutoModelForSequenceClassification
        bert = auto.from_pretrained(weights, num_labels=len(LABELS), local_files_only=True, **NO_DROPOUT)
    bert.requires_grad_(False)
    layers = bert.bert.encoder.layer
    for part in (*layers[len(layers) - trained_layers :], bert.bert.pooler, bert.classifier):
        part.requires_grad_(True)
    return Classifier(bert)


def read_pairs(path: Path) -> list[Pair]:
    """Label, premise and hypothesis of each line; lines without one of the three labels are left out."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows = [line.split("\t") for line in data.decode().splitlines()]
    return [(row[0], row[1], row[2]) for row in rows if row[0] in LABELS]


def encode(pairs: list[Pair], weights: Path | None) -> TensorDataset:
    """Token ids, mask and label of each pair."""
    labels = torch.tensor([LABELS.index(label) for label, _, _ in pairs])
    if weights is not None:
        tokenizer = hugging_face.AutoTokenizer.from_pretrained(weights, local_files_only=True)
        first, second = [pair[1] for pair in pairs], [pair[2] for pair in pairs]
        options = {"padding": "max_length", "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
        tokens = tokenizer(first, second, **options)
        return TensorDataset(tokens["input_ids"], tokens["attention_mask"], labels)
    ids = torch.zeros(len(pairs), LENGTH, dtype=torch.int64)  # 0: padding, 1: begin, 2: between and end
    for row, (_, premise, hypothesis) in enumerate(pairs):
        words = [[3 + zlib.crc32(w.encode()) % (WORDS - 3) for w in s.lower().split()] for s in (premise, hypothesis)]
        sequence = [1, *words[0], 2, *words[1], 2][:LENGTH]
        ids[row, : len(sequence)] = torch.tensor(sequence)
    return TensorDataset(ids, (ids != 0).long(), labels)


def load(folder: Path | None, limit: int) -> tuple[list[Pair], list[Pair]]:
    """Training and test pairs."""
    if folder is None:
        pairs = read_pairs(Path(__file__).with_name("sentence_pairs.tsv"))
        return pairs[12:], pairs[:12]
    found = sorted(folder.glob("snli_train*.tsv.gz"))
    if not found:
        raise SystemExit(f"{folder} has no snli_train*.tsv.gz: lines of label, premise and hypothesis, by tabs")
    return read_pairs(found[0])[:limit], read_pairs(folder / "snli_dev.tsv.gz")[:1000]


def unpack(batch: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """A batch of the loader as arguments of the model, by place and by name, and the target of the loss."""
    ids, mask, labels = batch
    return (), {"input_ids": ids, "attention_mask": mask}, labels


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """The share of right answers, in full precision."""
    model.eval()
    right = 0
    with torch.no_grad():
        for batch in DataLoader(data, batch_size=64):
            _, inputs, labels = unpack(batch)
            right += int((model(**inputs).argmax(1) == labels).sum())
    return right / len(data)


def main() -> None:
    """Build, freeze, train privately, say what was trained and what it cost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with SNLI (default: 48 pairs made up for this example)")
    parser.add_argument("--weights", type=Path, help="folder of a pretrained model (default: a tiny random one)")
    parser.add_argument("--limit", type=int, default=2000, help="pairs of SNLI to train on (default: 2000)")
    parser.add_argument("--trained-layers", type=int, default=1, help="layers that are not frozen (default: 1)")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the training data (default: 2)")
    parser.add_argument("--inner", default="eager", help="inductor, aot_eager or eager (default: eager)")
    args = parser.parse_args()

    torchvision_compat.models()  # transformers imports torchvision, which a CPU build of torch needs help with
    torch.manual_seed(0)
    train, test = (encode(pairs, args.weights) for pairs in load(args.data, args.limit))
    network = build(args.weights, args.trained_layers)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    counts = [sum(p.numel() for p in parameters) for parameters in (trained, network.parameters())]
    print(f"{len(train)} pairs, {counts[0]:,} of {counts[1]:,} parameters are trained")

    ids, mask, _ = train[:2]
    model = dpq.compile(network, budget=0.75, inner=args.inner, example_inputs=(ids, mask))
    batch_size, delta = max(8, len(train) // 10), 1 / (2 * len(train))
    engine = dpq.PrivacyEngine()
    model, optimizer, criterion, loader = engine.make_private(
        module=model.train(),
        optimizer=torch.optim.AdamW(trained, lr=1e-3),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(train, batch_size=batch_size),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        max_physical_batch_size=min(32, batch_size),
    )
    scheduler = dpq.Scheduler(engine, epochs=args.epochs, unpack=unpack, n_interval=1)
    for epoch in range(1, args.epochs + 1):
        policy = model.policy
        model.train()
        for batch in loader:
            _, inputs, labels = unpack(batch)
            optimizer.zero_grad()
            criterion(model(**inputs), labels).backward()
            optimizer.step()
        scheduler.step()
        print(f"epoch {epoch}: {policy}; test {accuracy(model, test):.1%} (chance: 33%)", flush=True)

    print(f"\n{model.train().explain()}")
    print(f"\nepsilon {engine.get_epsilon(delta):.2f} at delta {delta:.2g}, one pair more or less")
    if args.data is None:
        print("So few pairs can be learned only at the price of their privacy: this run shows the mechanics alone.")


if __name__ == "__main__":
    main()
