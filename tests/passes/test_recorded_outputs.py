"""recorded_outputs: models of transformers that record hidden states are captured, and keep no hooks."""

import pytest
import torch
from torch import nn

from dpquant_compile import torchvision_compat
from dpquant_compile.passes.capture import capture_dynamo
from dpquant_compile.passes.recorded_outputs import lacks_recorders

torchvision_compat.models()  # before transformers, which imports torchvision
transformers = pytest.importorskip("transformers")


def hooks(model: nn.Module) -> list[object]:
    return [hook for module in model.modules() for hook in module._forward_hooks.values()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers, on tiny configurations
def test_a_model_that_records_is_captured_and_keeps_its_own_hooks() -> None:
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    config = transformers.BertConfig(vocab_size=9, max_position_embeddings=8, output_hidden_states=True, **sizes)
    model = transformers.BertForSequenceClassification(config).eval()
    attributes = [set(module.__dict__) for module in model.modules()]
    tokens = torch.arange(6).view(2, 3)
    gm, _ = capture_dynamo(model, (tokens,), {})
    assert not hooks(model) and [set(module.__dict__) for module in model.modules()] == attributes
    found, expected = gm(tokens), model(tokens)
    assert len(found.hidden_states) == len(expected.hidden_states) == 2
    for value, other in zip(
        (found.logits, *found.hidden_states), (expected.logits, *expected.hidden_states), strict=True
    ):
        torch.testing.assert_close(value, other)


def test_other_failures_are_not_taken_for_it() -> None:
    assert not lacks_recorders(RuntimeError("a lock context manager"))
