"""Models of transformers trained by the losses: gradients against a loop, labels in the batch, schedules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dpquant_compile as dpq
from dpquant_compile import torchvision_compat
from dpquant_compile.errors import PrivateTrainingError

torchvision_compat.models()  # before transformers, which imports torchvision

import transformers  # noqa: E402

hf: Any = transformers
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")]

SAMPLES, PHYSICAL, LENGTH, WORDS, BOUND = 8, 4, 6, 20, 0.4


def llama() -> nn.Module:
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **sizes))


def bert() -> nn.Module:
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_labels=3)
    off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = hf.BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **sizes, **off)
    return hf.BertForSequenceClassification(config)


class Samples(Dataset[dict[str, Tensor]]):
    """Token ids with padding at the end of every second sample; labels by token or by sequence."""

    def __init__(self, by_token: bool) -> None:
        ids = torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[1::2, -2:] = 0
        labels = ids.masked_fill(mask == 0, -100) if by_token else ids[:, 0] % 3
        self.batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[index] for name, value in self.batch.items()}


def made(build: Callable[[], nn.Module], criterion: nn.Module, data: Samples) -> Any:
    torch.manual_seed(0)
    network = build()
    model = dpq.compile(network, budget=2, inner="eager").train()
    engine = dpq.PrivacyEngine(accountant="rdp")
    parts = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=criterion,
        data_loader=DataLoader(data, batch_size=PHYSICAL),
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
        max_physical_batch_size=PHYSICAL,
    )
    return network, engine, *parts


def expected_sums(
    network: nn.Module, criterion: nn.Module, call: dict[str, Tensor], labels: Tensor
) -> dict[str, Tensor]:
    """One sample at a time, by plain autograd, clipped by hand."""
    named = dict(network.named_parameters())
    totals = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    for i in range(len(labels)):
        loss = criterion(network(**{key: value[i : i + 1] for key, value in call.items()}).logits, labels[i : i + 1])
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        found = {name: grad for name, grad in zip(named, grads, strict=True) if grad is not None}
        norm = torch.stack([grad.norm() for grad in found.values()]).norm()
        assert norm > BOUND, "clipping is in force"
        for name, grad in found.items():
            totals[name] += grad * (BOUND / norm)
    return totals


CASES: dict[str, tuple[Callable[[], nn.Module], nn.Module, bool]] = {
    "llama-labels": (llama, dpq.losses.CausalLMLoss(), True),
    "bert": (bert, dpq.losses.SequenceClassificationLoss(), False),
}


@pytest.mark.parametrize("name", CASES)
def test_model_trains_on_its_output_and_schedules_from_batches_by_name(name: str) -> None:
    build, own, labels_in_call = CASES[name]
    data = Samples(by_token=build is not bert)
    network, engine, model, optimizer, criterion, loader = made(build, own, data)
    assert list(model.state_dict()) == list(network.state_dict())
    model.set_policy("none")
    batch = {key: value[:3] for key, value in data.batch.items()}  # fewer than the program holds
    call = batch if labels_in_call else {key: value for key, value in batch.items() if key != "labels"}
    wanted = expected_sums(network, own, call, batch["labels"])
    output = model(**call)
    criterion(output, batch["labels"]).backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.summed_grad, wanted[key], rtol=2e-4, atol=1e-6, msg=key)
    if labels_in_call:
        with pytest.raises(PrivateTrainingError, match=r"criterion\(model\(\*\*batch\), labels\).backward\(\)"):
            model(**call).loss.backward()
        model.eval()
        assert model(**call).loss.dim() == 0, "in evaluation it is the model's own"
        model.train()
    optimizer.zero_grad()
    scheduler = dpq.Scheduler(engine, epochs=2, n_interval=1)
    for drawn in loader:
        labels = drawn["labels"] if labels_in_call else drawn.pop("labels")
        optimizer.zero_grad()
        criterion(model(**drawn), labels).backward()
        optimizer.step()
    scheduler.step()
    assert any(scheduler.scores.values()), "the analysis has measured"


@pytest.mark.parametrize("with_labels", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_the_criterion_validates_whatever_else_the_output_holds(with_labels: bool, gradients: bool) -> None:
    """In eval() a causal model gives a cache, and with labels its own loss; the criterion reads neither."""
    data = Samples(by_token=True)
    _, _, model, _, criterion, _ = made(llama, dpq.losses.CausalLMLoss(), data)
    model.eval()
    batch = dict(data.batch)
    labels = batch["labels"] if with_labels else batch.pop("labels")
    with torch.set_grad_enabled(gradients):
        whole, logits = model(**batch), model(**batch).logits
        assert whole.past_key_values is not None
        torch.testing.assert_close(criterion(whole, labels), criterion(logits, labels))
        each = criterion.per_sample(whole, labels)
        torch.testing.assert_close(each, criterion.per_sample(logits, labels))
        torch.testing.assert_close(each.mean(), criterion(whole, labels))
