"""A causal language model, fine-tuned privately by LoRA, with a schedule of layers and an ε per text or per user.

    python examples/llm_lora.py                    # a sequence is protected
    python examples/llm_lora.py --unit user        # a user, with all that they wrote, is protected
    python examples/llm_lora.py --smoke            # half a minute less, and nothing learned

The model is a small Llama of random weights, trained for a moment on public text (scikit-learn's descriptions of its
data) and then frozen. The text that counts as private here comes with Python: its reference, topic by topic. A topic
plays the part of a user. No network is needed.

What to notice
- What ε protects is a sample: the rows that are clipped as one. `--unit sequence` makes each piece of text a sample. So
  ε says how little can be learned of one piece, and nothing of a user who wrote many. `--unit user` makes all pieces of
  a user one sample: their pieces are joined, up to `--pieces` of them, and the rest is left out. So ε holds for the
  user, whatever they wrote. The price is fewer samples, and so more noise for the same ε. Clip, count and sample by
  what must be protected; to divide a user's text into several samples and quote the ε of one is the common mistake.
- LoRA: the base is frozen. Only the adapters have per-sample gradients and noise. The frozen layers are sites all the
  same: they can run in four bits, and the scheduler chooses which.
- The criterion takes the model's output as it comes. Each sequence has one loss, the mean over its own bytes; padding
  has the label -100 and is not counted. All samples have one length, since a batch that is padded to its longest sample
  would tell its length to all others.
- The tokenizer is the bytes themselves. A vocabulary that is learned from private text is a release of its own.
- Test losses are of users that were not trained on. Losses on training data are not private.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import sklearn.datasets
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dpquant_compile as dpq
from dpquant_compile import torchvision_compat

torchvision_compat.models()  # transformers imports torchvision, which a CPU build of torch needs help with

import peft  # noqa: E402
import transformers  # noqa: E402

hugging_face: Any = transformers  # whose own types do not hold for what its configurations take
lora: Any = peft
BEGIN, PAD, VOCABULARY = 256, 257, 258  # after the 256 bytes
LENGTH = 64  # bytes of a piece of text
IGNORED = -100
Batch = dict[str, Tensor]


class Texts(Dataset[Batch]):
    """Samples of one fixed length: the arguments of the model by name, and the labels."""

    def __init__(self, texts: list[bytes], length: int) -> None:
        self.texts, self.length = texts, length

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Batch:
        ids = torch.full((self.length,), PAD)
        tokens = [BEGIN, *self.texts[index]][: self.length]
        ids[: len(tokens)] = torch.tensor(tokens)
        mask = (ids != PAD).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def pieces(text: str) -> list[bytes]:
    """A text cut to pieces that fit into a sequence."""
    data = text.encode()
    return [data[start : start + LENGTH - 1] for start in range(0, len(data), LENGTH - 1)]


def public_text() -> list[bytes]:
    """Text that everyone may see, for the base."""
    folder = Path(sklearn.datasets.__file__).with_name("descr")
    return [piece for path in sorted(folder.glob("*.rst")) for piece in pieces(path.read_text(encoding="utf-8"))]


def private_samples(users: list[str], unit: str, limit: int) -> Texts:
    """Samples by the unit of privacy: a piece of text, or up to `limit` pieces of a user, joined."""
    if unit == "sequence":
        return Texts([piece for user in users for piece in pieces(topics[user])], LENGTH)
    return Texts([b"".join(pieces(topics[user])[:limit]) for user in users], LENGTH * limit)


def base_model(layers: int, steps: int, length: int) -> nn.Module:
    """A small Llama, trained on public text without privacy."""
    config = hugging_face.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
        bos_token_id=BEGIN,
        eos_token_id=PAD,
        pad_token_id=PAD,
    )
    model: nn.Module = hugging_face.LlamaForCausalLM(config)
    data = Texts(public_text(), LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    criterion = dpq.losses.CausalLMLoss()
    for _, batch in zip(range(steps), iter_forever(DataLoader(data, batch_size=32, shuffle=True)), strict=False):
        labels = batch.pop("labels")
        optimizer.zero_grad()
        criterion(model(**batch), labels).backward()
        optimizer.step()
    return model


def iter_forever(loader: "DataLoader[Any]") -> Any:
    """Epoch after epoch."""
    while True:
        yield from loader


def bits_per_byte(model: nn.Module, data: Texts) -> float:
    """What a byte of unseen text costs, in full precision; 8 for a model that knows nothing."""
    criterion = dpq.losses.CausalLMLoss()
    model.eval()
    total = 0.0
    with torch.no_grad():
        for batch in DataLoader(data, batch_size=32):
            labels = batch.pop("labels")
            total += float(criterion(model(**batch), labels)) * len(labels)
    return total / len(data) / 0.6931


def say(model: Any, start: str, count: int) -> str:
    """A continuation, by the model's own generate()."""
    ids = torch.tensor([[BEGIN, *start.encode()]])
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return bytes(token for token in out[0].tolist() if token < BEGIN).decode(errors="replace")


def main() -> None:
    """Train a base on public text, adapt it privately, say what was learned and what it cost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--unit", choices=("sequence", "user"), default="sequence", help="what epsilon protects")
    parser.add_argument("--pieces", type=int, default=4, help="pieces of text that count for a user (default: 4)")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the private text (default: 4)")
    parser.add_argument("--epsilon", type=float, default=8.0, help="the most that may be spent (default: 8)")
    parser.add_argument("--inner", default="eager", help="inductor, aot_eager or eager (default: eager)")
    parser.add_argument("--out", type=Path, help="folder for the adapter")
    parser.add_argument("--smoke", action="store_true", help="few users, two epochs: shows the mechanics")
    args = parser.parse_args()

    torch.manual_seed(0)
    users = sorted(topics)[:16] if args.smoke else sorted(topics)
    held_back = users[:: 8 if args.smoke else 6]
    train = private_samples([user for user in users if user not in held_back], args.unit, args.pieces)
    test = private_samples(held_back, args.unit, args.pieces)
    if args.smoke:
        args.epochs, train.texts, test.texts = 2, train.texts[:32], test.texts[:8]
    base = base_model(1 if args.smoke else 2, 5 if args.smoke else 150, train.length)
    print(f"{len(train)} samples of {train.length} bytes; a sample is a {args.unit}")
    print(f"before: {bits_per_byte(base, test):.3f} bits per byte")

    network = lora.get_peft_model(
        base, lora.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    counts = [sum(p.numel() for p in parameters) for parameters in (trained, network.parameters())]
    print(f"{counts[0]:,} of {counts[1]:,} parameters are trained")

    batch_size, delta = max(8, len(train) // 12), 1 / (2 * len(train))
    plan = dpq.plan(
        target_epsilon=args.epsilon,
        delta=delta,
        dataset_size=len(train),
        batch_size=batch_size,
        epochs=args.epochs,
        max_physical_batch_size=min(64, batch_size),
    )
    print(f"noise multiplier {plan.noise_multiplier:.3f} keeps {args.epochs} epochs within epsilon {args.epsilon:g}")
    example = {name: value[None].repeat(2, 1) for name, value in train[0].items() if name != "labels"}
    model = dpq.compile(network, budget=0.5, inner=args.inner)
    model.train()
    model.capture(**example)  # the sites are known before the first batch
    engine = dpq.PrivacyEngine(target_epsilon=args.epsilon, target_delta=delta)
    model, optimizer, criterion, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(trained, lr=5e-3, weight_decay=0.0),
        criterion=dpq.losses.CausalLMLoss(),
        data_loader=DataLoader(train, batch_size=batch_size),
        noise_multiplier=plan.noise_multiplier,
        max_grad_norm=0.5,
        max_physical_batch_size=min(64, batch_size),
    )
    scheduler = dpq.Scheduler(engine, epochs=args.epochs)
    for epoch in range(1, args.epochs + 1):
        policy = model.policy
        model.train()
        for batch in loader:
            labels = batch.pop("labels")
            optimizer.zero_grad()
            criterion(model(**batch), labels).backward()
            optimizer.step()
        scheduler.step()
        spent = engine.get_epsilon(delta)
        print(
            f"epoch {epoch}: {policy}; {bits_per_byte(model, test):.3f} bits per byte; epsilon {spent:.2f}", flush=True
        )

    model.eval()
    print(f"\n{say(model, 'The ', 24)!r}")
    print(f"epsilon {engine.get_epsilon(delta):.2f} at delta {delta:.2g}, one {args.unit} more or less")
    if args.out is not None:
        model.save_pretrained(args.out)  # the adapters alone; what they are made of is covered by epsilon
        print(f"adapter: {', '.join(sorted(path.name for path in args.out.iterdir()))}")


if __name__ == "__main__":
    main()
