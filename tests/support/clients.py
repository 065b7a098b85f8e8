"""Models of Hugging Face transformers as users find them: default configurations in tiny sizes, with random weights.

One `Client` per model. `examine` trains one private step, compares the sum of clipped gradients with a loop over single
samples of the original model, takes a step of a scheduler, and compares eval() with the original. The findings are the
table of docs/support.md: `python -m tests.support.clients --write` writes it row by row, and with names after
`--write` only the rows of these clients.
"""

import copy
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dpquant_compile as dpq
from dpquant_compile import torchvision_compat

torchvision_compat.models()  # before transformers, which imports torchvision

import peft  # noqa: E402
import transformers  # noqa: E402

__all__ = ["CLIENTS", "Client", "Finding", "causal", "committed_rows", "examine", "mixtral", "sound", "wav2vec2"]

hf: Any = transformers  # whose own types do not hold for what its configurations take
lora: Any = peft

Batch = dict[str, Tensor]

LENGTH, WORDS = 5, 20
TABLE = Path(__file__).parents[2] / "docs" / "support.md"
MARKS = "<!-- clients -->", "<!-- end of clients -->"


@dataclass(frozen=True)
class Client:
    """One model.

    build   makes it, without dropout, so that gradients can be compared
    batch   its arguments for some samples, and their labels
    loss    the class of the loss, of `dpq.losses`
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: type[nn.Module]


# What the models take


def text(samples: int) -> Batch:
    """Token ids with an attention mask, and one class per sequence."""
    return {**tokens(samples), "labels": torch.arange(samples) % 2}


def tokens(samples: int) -> Batch:
    ids = torch.randint(3, WORDS, (samples, LENGTH))
    mask = torch.ones_like(ids)
    mask[1::2, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def causal(samples: int) -> Batch:
    """Token ids with an attention mask; the labels are the ids, without those of padding."""
    batch = tokens(samples)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def images(samples: int) -> Batch:
    return {"pixel_values": torch.randn(samples, 3, 16, 16), "labels": torch.arange(samples) % 2}


def translation(samples: int) -> Batch:
    """Two sequences of tokens; the labels are the second one's next tokens."""
    ids = torch.randint(3, WORDS, (samples, LENGTH - 1))
    return {**tokens(samples), "decoder_input_ids": ids, "labels": ids.roll(-1, 1)}


def transcription(samples: int) -> Batch:
    """A spectrogram and its tokens."""
    ids = torch.randint(3, WORDS, (samples, LENGTH))
    return {"input_features": torch.randn(samples, 4, 12), "decoder_input_ids": ids, "labels": ids.roll(-1, 1)}


def sound(samples: int) -> Batch:
    return {"input_values": torch.randn(samples, 64), "labels": torch.arange(samples) % 2}


next_token = dpq.losses.CausalLMLoss
each_token = dpq.losses.TokenClassificationLoss
one_class = dpq.losses.SequenceClassificationLoss


# The models

_SMALL = {"vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
_LLAMA = {**_SMALL, "intermediate_size": 12, "num_key_value_heads": 1, "max_position_embeddings": 16}
_ENCODER = {
    **_SMALL,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 2,
}


def model(kind: str, config: str, /, **sizes: Any) -> Callable[[], nn.Module]:
    """The class `kind` on a configuration of class `config`."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = getattr(hf, kind)(getattr(hf, config)(**sizes))
        return made

    return build


def mixtral(experts: str | None) -> Callable[[], nn.Module]:
    """Mixtral with one implementation of its experts; None is the default."""
    chosen = {} if experts is None else {"experts_implementation": experts}
    sizes = {**_LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2}
    return model("MixtralForCausalLM", "MixtralConfig", **sizes, **chosen)


def wav2vec2(layerdrop: float = 0.0, apply_spec_augment: bool = False) -> Callable[[], nn.Module]:
    """Wav2Vec2 without the two kinds of noise that are drawn for the whole batch."""
    return model(
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        conv_dim=[4, 4],
        conv_kernel=[4, 4],
        conv_stride=[2, 2],
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        layerdrop=layerdrop,
        apply_spec_augment=apply_spec_augment,
    )


def adapted(base: Callable[[], nn.Module], *layers: str) -> Callable[[], nn.Module]:
    """`base` with adapters on these layers."""

    def build() -> nn.Module:
        config = lora.LoraConfig(r=2, target_modules=list(layers), lora_dropout=0.0, task_type="CAUSAL_LM")
        made: nn.Module = lora.get_peft_model(base(), config)
        for name, parameter in made.named_parameters():
            if "lora_B" in name:  # which peft starts from zero, where the other half has no gradient
                nn.init.normal_(parameter, std=0.1)
        return made

    return build


_LLAMA_MODEL = model("LlamaForCausalLM", "LlamaConfig", **_LLAMA)
_MISTRAL = model("MistralForCausalLM", "MistralConfig", **_LLAMA, head_dim=4)
_GPT2 = model(
    "GPT2LMHeadModel",
    "GPT2Config",
    vocab_size=WORDS,
    n_embd=8,
    n_layer=1,
    n_head=2,
    n_positions=16,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=0,
)

CLIENTS = (
    Client("Llama", _LLAMA_MODEL, causal, next_token),
    Client("Qwen2", model("Qwen2ForCausalLM", "Qwen2Config", **_LLAMA), causal, next_token),
    Client("Qwen3", model("Qwen3ForCausalLM", "Qwen3Config", **_LLAMA, head_dim=4), causal, next_token),
    Client("Gemma", model("GemmaForCausalLM", "GemmaConfig", **_LLAMA, head_dim=4), causal, next_token),
    Client(
        "Phi",
        model("PhiForCausalLM", "PhiConfig", **{**_LLAMA, "num_key_value_heads": 2}),
        causal,
        next_token,
    ),
    Client("Mistral", _MISTRAL, causal, next_token),
    Client("GPT-2", _GPT2, causal, next_token),
    Client(
        "GPT-NeoX",
        model(
            "GPTNeoXForCausalLM",
            "GPTNeoXConfig",
            **{**_SMALL, "num_attention_heads": 1},  # of which a quarter is rotated
            intermediate_size=12,
            max_position_embeddings=16,
        ),
        causal,
        next_token,
    ),
    Client(
        "OPT",
        model(
            "OPTForCausalLM",
            "OPTConfig",
            **_SMALL,
            ffn_dim=12,
            max_position_embeddings=16,
            word_embed_proj_dim=8,
            dropout=0.0,
        ),
        causal,
        next_token,
    ),
    Client("BERT", model("BertForSequenceClassification", "BertConfig", **_ENCODER), text, one_class),
    Client(
        "DistilBERT",
        model(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            vocab_size=WORDS,
            dim=8,
            n_layers=1,
            n_heads=2,
            hidden_dim=12,
            max_position_embeddings=16,
            dropout=0.0,
            attention_dropout=0.0,
            seq_classif_dropout=0.0,
        ),
        text,
        one_class,
    ),
    Client("RoBERTa", model("RobertaForSequenceClassification", "RobertaConfig", **_ENCODER), text, one_class),
    Client(
        "DeBERTa",
        model(
            "DebertaForSequenceClassification",
            "DebertaConfig",
            **_ENCODER,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            pooler_hidden_size=8,
        ),
        text,
        one_class,
    ),
    Client(
        "DeBERTa-v2",
        model(
            "DebertaV2ForSequenceClassification",
            "DebertaV2Config",
            **_ENCODER,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            position_buckets=8,
            pooler_hidden_size=8,
        ),
        text,
        one_class,
    ),
    Client(
        "ViT",
        model(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=12,
            image_size=16,
            patch_size=8,
        ),
        images,
        one_class,
    ),
    Client(
        "Swin",
        model(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=16,
            patch_size=4,
            embed_dim=4,
            depths=[2],
            num_heads=[2],
            window_size=2,
            drop_path_rate=0.0,
        ),
        images,
        one_class,
    ),
    Client(
        "ConvNeXt",
        model("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[4, 8], depths=[1, 1], num_stages=2),
        images,
        one_class,
    ),
    Client(
        "T5",
        model(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=WORDS,
            d_model=8,
            d_kv=4,
            d_ff=12,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
        ),
        translation,
        each_token,
    ),
    Client(
        "Whisper",
        model(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=WORDS,
            d_model=8,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=12,
            decoder_ffn_dim=12,
            num_mel_bins=4,
            max_source_positions=6,
            max_target_positions=16,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        transcription,
        each_token,
    ),
    Client("Wav2Vec2", wav2vec2(), sound, one_class),
    Client("Mixtral", mixtral("batched_mm"), causal, next_token),
    Client(
        "Mamba",
        model("MambaForCausalLM", "MambaConfig", vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, state_size=4),
        causal,
        next_token,
    ),
    Client("Llama + LoRA", adapted(_LLAMA_MODEL, "q_proj", "v_proj"), causal, next_token),
    Client("GPT-2 + LoRA", adapted(_GPT2, "c_attn"), causal, next_token),
    Client("Mistral + LoRA", adapted(_MISTRAL, "q_proj", "v_proj", "down_proj"), causal, next_token),
)


# What is found


@dataclass(frozen=True)
class Finding:
    """What became of one client: its sites among all linears, convs and sites, and the error of its gradient.

    The error is relative to the norm of the sum of clipped gradients; None if the model was refused, with the error.
    """

    name: str
    sites: int
    layers: int
    error: float | None
    schedule: bool
    refused: str = ""

    @property
    def row(self) -> str:
        """A row of the table. Errors are in classes, which do not depend on the machine."""
        error = (
            f"– {self.refused.partition(':')[0]}"
            if self.error is None
            else f"< 1e{max(math.ceil(math.log10(max(self.error, 1e-9))), -5)}"
        )
        works = "✓" if self.schedule else "–"
        return f"| {self.name} | {self.sites} of {self.layers} | {error} | {works} |"


BOUND, SAMPLES = 0.01, 3
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, hf.pytorch_utils.Conv1D)


def examine(client: Client) -> Finding:
    """Train a client privately for a step, schedule it, and run it in eval(), each compared with the original."""
    original = client.build().train()
    layers = {name for name, module in original.named_modules() if isinstance(module, _LAYERS)}
    model: Any = dpq.compile(copy.deepcopy(original), budget=0.5, inner="eager")
    torch.manual_seed(1)
    data = client.batch(SAMPLES)
    engine = dpq.PrivacyEngine(accountant="rdp")
    model, optimizer, criterion, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        criterion=client.loss(),
        data_loader=DataLoader(_rows(data), batch_size=SAMPLES),  # type: ignore[arg-type]
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
        max_physical_batch_size=SAMPLES + 1,  # so that the program pads
        poisson_sampling=False,
        noise_generator=torch.Generator().manual_seed(3),
    )
    model.set_policy("none")
    try:
        (batch,) = loader
        labels = batch.pop("labels")
        output = model(**batch)
        criterion(output, labels).backward()
    except dpq.errors.DPQuantError as refusal:
        counts = len(model.sites), len(layers.union(model.sites.names))
        return Finding(client.name, *counts, None, False, f"{type(refusal).__name__}: {refusal}")
    assert type(output) is type(original(**batch))
    error = _error(model, original, client, batch, labels)
    optimizer.step()
    scheduler = dpq.Scheduler(engine, epochs=2, n_sample=1, n_interval=1)
    scheduler.step()
    _check_eval(model, original, batch)
    counts = len(model.sites), len(layers.union(model.sites.names))
    assert set(model.sites.names) <= {name for name, _ in original.named_modules()}, "sites have the modules' names"
    return Finding(client.name, *counts, error, any(scheduler.scores.values()))


def _rows(data: Batch) -> Sequence[Batch]:
    return [{name: values[i] for name, values in data.items()} for i in range(SAMPLES)]


def _error(model: nn.Module, original: nn.Module, client: Client, batch: Batch, labels: Tensor) -> float:
    """The largest error of a parameter's sum of clipped gradients, relative to the norm of all."""
    trained = {name: parameter for name, parameter in original.named_parameters() if parameter.requires_grad}
    expected = {name: torch.zeros_like(parameter) for name, parameter in trained.items()}
    loss = client.loss()
    for i in range(len(labels)):
        original.zero_grad()
        one = original(**{name: values[i : i + 1] for name, values in batch.items()})
        loss(one, labels[i : i + 1]).backward()
        grads = {name: p.grad for name, p in trained.items() if p.grad is not None}
        norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))
        assert norm > BOUND, "clipping is in force"
        for name, grad in grads.items():
            expected[name] += BOUND / norm * grad
    found = {name: getattr(parameter, "summed_grad", None) for name, parameter in model.named_parameters()}
    frozen = [name for name, value in found.items() if value is not None and name not in expected]
    assert not frozen, f"gradients of frozen parameters: {frozen}"
    zero = torch.zeros(())
    errors = [float(((zero if found[n] is None else found[n]) - value).norm()) for n, value in expected.items()]
    return max(errors) / math.sqrt(sum(float(value.square().sum()) for value in expected.values()))


def _check_eval(model: nn.Module, original: nn.Module, batch: Batch) -> None:
    """In eval() the compiled model must give what the original gives, a cache included."""
    original.load_state_dict(model.state_dict())
    with torch.no_grad():
        found, expected = model.eval()(**batch), original.eval()(**batch)
    assert type(found) is type(expected) and list(found) == list(expected)
    torch.testing.assert_close(found.logits, expected.logits)


# The table


def committed_rows() -> dict[str, str]:
    """The rows of the table in docs/support.md by client."""
    inside = TABLE.read_text().split(MARKS[0])[1].split(MARKS[1])[0]
    rows = {line.split("|")[1].strip(): line for line in inside.splitlines() if line.startswith("| ")}
    return {name: row for name, row in rows.items() if name != "client"}


def write_row(row: str) -> None:
    """Write one row into the table between the marks of docs/support.md, in the order of `CLIENTS`."""
    head = ["| client | sites of linears and convs | gradient error | schedule |", "|---|---|---|---|"]
    rows = {**committed_rows(), row.split("|")[1].strip(): row}
    kept = [rows[client.name] for client in CLIENTS if client.name in rows]
    before, rest = TABLE.read_text().split(MARKS[0])
    TABLE.write_text("\n".join([before + MARKS[0], *head, *kept, MARKS[1]]) + rest.split(MARKS[1])[1])


def write(names: Sequence[str]) -> None:
    """Examine clients, all if none is named, and write each row as it is found."""
    unknown = set(names) - {client.name for client in CLIENTS}
    if unknown:
        sys.exit(f"no client {sorted(unknown)}; there are {[client.name for client in CLIENTS]}")
    for client in CLIENTS:
        if not names or client.name in names:
            begun = time.process_time()
            row = examine(client).row
            write_row(row)
            print(f"{row}  {time.process_time() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"]:
        sys.exit("usage: python -m tests.support.clients --write [client …]")
    warnings.simplefilter("ignore")
    write(sys.argv[2:])
