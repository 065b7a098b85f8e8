"""Models of transformers train privately, follow a schedule and evaluate as the table of docs/support.md says."""

from typing import Any

import pytest

import dpquant_compile as dpq
from dpquant_compile import torchvision_compat

torchvision_compat.models()  # before transformers, which imports torchvision
pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.support.clients import CLIENTS, Client, causal, committed_rows, examine, mixtral, sound, wav2vec2  # noqa: E402
from tests.support.heavy import few  # noqa: E402

SHOWN = few(CLIENTS, "BERT", "GPT-2", "Llama", "GPT-2 + LoRA", name=lambda client: client.name)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of transformers, on tiny configurations


@pytest.mark.parametrize("client", SHOWN, ids=lambda client: client.name)
def test_a_client_does_what_the_table_says(client: Client) -> None:
    """After a change: python -m tests.support.clients --write"""
    assert examine(client).row == committed_rows()[client.name]


def test_the_table_has_a_row_for_each_client_and_no_other() -> None:
    assert list(committed_rows()) == [client.name for client in CLIENTS]


def test_experts_that_sort_tokens_are_refused_with_the_switch() -> None:
    found = examine(Client("Mixtral", mixtral(None), causal, dpq.losses.CausalLMLoss))
    assert 'model.set_experts_implementation("batched_mm")' in found.refused


def test_losses_of_a_router_are_refused_with_the_switch() -> None:
    def balanced() -> Any:
        model: Any = mixtral("batched_mm")()
        model.config.output_router_logits = True
        return model

    found = examine(Client("Mixtral", balanced, causal, dpq.losses.CausalLMLoss))
    assert "config.output_router_logits=False" in found.refused


@pytest.mark.parametrize("switch", ["apply_spec_augment=False", "layerdrop=0.0"])
def test_noise_that_is_drawn_for_the_whole_batch_is_refused_with_its_switch(switch: str) -> None:
    name = switch.partition("=")[0]
    given: dict[str, Any] = {name: {"layerdrop": 0.1, "apply_spec_augment": True}[name]}
    found = examine(Client("Wav2Vec2", wav2vec2(**given), sound, dpq.losses.SequenceClassificationLoss))
    assert found.refused.startswith("CaptureError") and f"Fix: set {switch}" in found.refused
