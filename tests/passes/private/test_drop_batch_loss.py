"""The loss that a model computes of the whole batch: left out of private programs, and refused when it is used."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from dpquant_compile import pipeline
from dpquant_compile.errors import IsolationError, PrivateTrainingError
from dpquant_compile.passes.capture import capture_fx
from dpquant_compile.passes.private.drop_batch_loss import BatchLoss, drop_batch_loss, with_batch_loss


class WithLoss(nn.Module):
    """Logits of a linear, and a loss in a form of choice."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.form = form

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.fc(x) + labels[:, None]
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        if self.form == "none":
            return {"logits": logits}
        if self.form == "tuple":
            return losses.mean(), logits
        return {"loss": losses if self.form == "rows" else losses.mean(), "logits": logits}


CALL = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])


def tracked(form: str) -> fx.GraphModule:
    gm = capture_fx(WithLoss(form))
    assert isinstance(gm, fx.GraphModule)
    return pipeline.tracked(pipeline.canonical(gm, []), CALL, {}, True, [])


def test_golden_print() -> None:
    gm = drop_batch_loss(tracked("mean")).graph_module
    gm.recompile()
    lines = [line.partition(";")[0].strip() for line in gm.code.strip().splitlines()]
    assert lines == [
        "def forward(self, x : torch.Tensor, labels : torch.Tensor) -> typing_Any:",
        "fc_weight = self.fc.weight",
        "fc_bias = self.fc.bias",
        "linear = torch._C._nn.linear(x, fc_weight, fc_bias)",
        "getitem = labels[(slice(None, None, None), None)]",
        "add = linear + getitem",
        "return {'loss': None, 'logits': add}",
    ]


@pytest.mark.parametrize("form", ["none", "rows", "tuple"])
def test_other_outputs_are_left_as_they_are(form: str) -> None:
    gm = tracked(form)
    before = str(gm.graph)
    result = drop_batch_loss(gm)
    assert not result.modified and result.graph_module is gm and str(gm.graph) == before


def test_numerics_of_the_rest_are_those_of_the_model() -> None:
    gm = tracked("mean")
    before = str(gm.graph)
    after = drop_batch_loss(gm).graph_module
    after.recompile()
    assert str(gm.graph) == before, "evaluation and plain training keep the loss"
    assert torch.equal(after(*CALL)["logits"], gm(*CALL)["logits"]) and after(*CALL)["loss"] is None


def test_a_loss_without_a_name_is_refused_by_the_proof() -> None:
    pipeline.isolated(tracked("mean"), CALL, {}, [])
    with pytest.raises(IsolationError, match="an output of the model"):
        pipeline.isolated(tracked("tuple"), CALL, {}, [])


def dropped(kind: str = "CausalLMOutputWithPast") -> Any:
    node = fx.Graph().output(None)
    node.meta["batch_loss"] = (0, kind)
    loss, logits = with_batch_loss(node, [None, 3])
    assert logits == 3
    return loss


USES = {
    "backward": lambda loss: loss.backward(),
    "method": lambda loss: loss.item(),
    "arithmetic": lambda loss: loss / 2,
    "reversed": lambda loss: 2 * loss,
    "float": lambda loss: float(loss),
    "format": lambda loss: f"{loss:.3f}",
    "comparison": lambda loss: loss < 3,
    "truth": lambda loss: bool(loss),
    "function": lambda loss: torch.isnan(loss),
    "in a list": lambda loss: torch.stack([loss, torch.zeros(())]),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_shows_the_two_lines_to_write(use: str) -> None:
    with pytest.raises(PrivateTrainingError) as refused:
        USES[use](dropped())
    first, *lines = str(refused.value).splitlines()
    assert "one number for the whole batch" in first
    assert [line.strip() for line in lines] == [
        "model, optimizer, criterion, loader = engine.make_private(..., criterion=dpq.losses.CausalLMLoss())",
        "criterion(model(**batch), labels).backward()",
    ]


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("Seq2SeqSequenceClassifierOutput", "SequenceClassificationLoss()"),
        ("ImageClassifierOutput", "SequenceClassificationLoss()"),
        ("TokenClassifierOutput", "TokenClassificationLoss()"),
        ("Seq2SeqLMOutput", "TokenClassificationLoss()"),
        ("dict", 'on_field("logits", your_loss)'),
    ],
)
def test_the_error_names_the_loss_that_fits_the_model(kind: str, loss: str) -> None:
    with pytest.raises(PrivateTrainingError) as refused:
        dropped(kind).backward()
    assert f"criterion=dpq.losses.{loss})" in str(refused.value)


def test_a_dropped_loss_may_be_printed_and_copied() -> None:
    assert "whole batch" in repr({"loss": dropped()}) and isinstance(copy.deepcopy(dropped()), BatchLoss)
