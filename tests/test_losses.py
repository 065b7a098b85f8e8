"""Losses of models with fields: one per sample, the mean over its own positions, from any form of output."""

import re
from collections import OrderedDict, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dpquant_compile as dpq
from dpquant_compile.errors import PrivacySpecError
from dpquant_compile.privacy.data.criterion import PrivateCriterion

B, T, V = 4, 6, 5


def _logits(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _labels(*shape: int, ignored: bool = True) -> Tensor:
    """Classes; in the first sample all are ignored, in the second the last two."""
    labels = torch.randint(0, V, shape, generator=torch.Generator().manual_seed(1))
    if ignored and len(shape) == 2:
        labels[0] = -100
        labels[1, -2:] = -100
    return labels


WEIGHT = torch.tensor([0.5, 2.0, 1.0, 3.0, 1.0])

Case = tuple[Any, Tensor, Tensor]
CASES: dict[str, Any] = {
    "causal": (lambda **o: dpq.losses.CausalLMLoss(**o), _logits(B, T, V), _labels(B, T)),
    "token": (lambda **o: dpq.losses.TokenClassificationLoss(**o), _logits(B, T, V), _labels(B, T)),
    "token-weight": (
        lambda **o: dpq.losses.TokenClassificationLoss(weight=WEIGHT, label_smoothing=0.1, **o),
        _logits(B, T, V),
        _labels(B, T),
    ),
    "sequence": (lambda **o: dpq.losses.SequenceClassificationLoss(**o), _logits(B, V), _labels(B)),
    "field": (
        lambda **o: dpq.losses.on_field("logits", nn.CrossEntropyLoss(**o)),
        _logits(B, V, T),
        _labels(B, T),
    ),
}
each_case = pytest.mark.parametrize("name", CASES)


@pytest.mark.parametrize("name", ["causal", "token", "token-weight", "sequence"])
def test_labels_of_minus_100_are_ignored_beside_another_ignore_index(name: str) -> None:
    make, logits, labels = CASES[name]
    if labels.ndim == 1:
        labels = labels.index_fill(0, torch.tensor([0]), -100)
    found = make(ignore_index=4, reduction="none")(logits, labels)
    expected = make(reduction="none")(logits, labels.masked_fill(labels == 4, -100))
    assert (labels == 4).any() and (labels == -100).any()
    torch.testing.assert_close(found, expected)


def test_a_sequence_has_the_mean_over_the_positions_that_count_for_it() -> None:
    logits, labels = _logits(B, T, V), _labels(B, T)
    expected = []
    for row, own in zip(logits, labels, strict=True):
        terms = [F.cross_entropy(row[t], own[t + 1]) for t in range(T - 1) if own[t + 1] != -100]
        expected.append(torch.stack(terms).mean() if terms else torch.tensor(0.0))
    assert expected[0] == 0 and (labels[1] == -100).sum() == 2
    each = torch.stack(expected)
    for reduction, value in (("none", each), ("sum", each.sum()), ("mean", each.mean())):
        torch.testing.assert_close(dpq.losses.CausalLMLoss(reduction=reduction)(logits, labels), value)


def test_one_long_sequence_counts_as_one_of_the_mean() -> None:
    """The mean over all positions of the batch, which models compute, would let the others decide its share."""
    logits, labels = _logits(B, T, V), _labels(B, T)
    tokens = dpq.losses.TokenClassificationLoss()
    whole = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert not torch.isclose(tokens(logits, labels), whole, rtol=1e-2)
    full = _labels(B, T, ignored=False)
    torch.testing.assert_close(tokens(logits, full), F.cross_entropy(logits.flatten(0, 1), full.flatten()))


def test_class_weights_scale_a_position_and_are_not_divided_out() -> None:
    logits, labels = _logits(B, V), _labels(B)
    losses = dpq.losses.SequenceClassificationLoss(weight=WEIGHT, reduction="none")(logits, labels)
    torch.testing.assert_close(losses, WEIGHT[labels] * F.cross_entropy(logits, labels, reduction="none"))


@each_case
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradient_of_a_sample_is_that_of_its_own_loss(name: str, reduction: str) -> None:
    make, values, labels = CASES[name]
    criterion = PrivateCriterion(make(reduction=reduction))
    logits = values.clone().requires_grad_()
    (together,) = torch.autograd.grad(criterion({"logits": logits}, labels), logits)
    for i in range(B):
        alone = values[i : i + 1].clone().requires_grad_()
        (own,) = torch.autograd.grad(criterion({"logits": alone}, labels[i : i + 1]), alone)
        torch.testing.assert_close(together[i], own[0] / (B if reduction == "mean" else 1))


@each_case
def test_private_criterion_leaves_the_value_as_it_is(name: str) -> None:
    make, logits, labels = CASES[name]
    if name == "field":  # the mean of a plain loss is over the positions of the batch
        labels = labels.clamp(min=0)
    for reduction in ("mean", "sum", "none"):
        criterion = make(reduction=reduction)
        torch.testing.assert_close(PrivateCriterion(criterion)(logits, labels), criterion(logits, labels))


@each_case
def test_empty_batch_has_loss_zero_with_a_graph(name: str) -> None:
    make, values, labels = CASES[name]
    logits = values[:0].clone().requires_grad_()
    loss = PrivateCriterion(make())({"logits": logits}, labels[:0])
    loss.backward()
    assert loss.item() == 0 and logits.grad is not None


FORMS = {
    "tensor": lambda x: x,
    "dict": lambda x: {"hidden": 0 * x, "logits": x},
    "ordered": lambda x: OrderedDict(logits=x),
    "object": lambda x: SimpleNamespace(logits=x),
    "named tuple": lambda x: namedtuple("Out", "hidden logits")(0 * x, x),
    "tuple": lambda x: (x, 0 * x),
}


@pytest.mark.parametrize("form", FORMS)
@each_case
def test_output_may_have_any_form(name: str, form: str) -> None:
    make, logits, labels = CASES[name]
    expected = make(reduction="none")(logits, labels)
    assert torch.equal(make(reduction="none")(FORMS[form](logits), labels), expected)


def test_a_field_may_be_a_place_in_a_tuple() -> None:
    logits, labels = _logits(B, V), _labels(B)
    criterion = dpq.losses.on_field(1, F.cross_entropy)
    assert torch.equal(criterion((0 * logits, logits), labels), F.cross_entropy(logits, labels))


class Pairwise(nn.Module):
    """A loss of a field that is a pair."""

    reduction = "mean"

    def forward(self, pair: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        losses = (pair[0] - target).square().sum(1) + pair[1].exp().sum(1)
        return losses if self.reduction == "none" else losses.mean()


@pytest.mark.parametrize(
    ("criterion", "form"),
    [
        (dpq.losses.on_field("pair", Pairwise()), lambda a, b: {"pair": (a, b), "rest": None}),
        (dpq.losses.on_field(0, Pairwise()), lambda a, b: ((a, b), None)),
        (dpq.losses.on_field("a", dpq.losses.on_field("b", nn.MSELoss())), lambda a, b: {"a": {"b": a}}),
    ],
    ids=["by name", "by place", "two names"],
)
def test_a_field_that_is_no_tensor_is_read_once(criterion: Any, form: Any) -> None:
    output, target = form(_logits(B, V), _logits(B, V) / 2), torch.zeros(B, V)
    torch.testing.assert_close(PrivateCriterion(criterion)(output, target), criterion(output, target))


def test_a_loss_on_a_field_keeps_reduction_and_ignored_positions_of_the_loss_within() -> None:
    inner = nn.CrossEntropyLoss(ignore_index=2, reduction="sum")
    criterion = PrivateCriterion(dpq.losses.on_field("logits", inner))
    assert criterion.reduction == "sum" and criterion._counted(torch.zeros(3), (0, torch.tensor([1, 2, 3])), {})[1] == 0
    criterion({"logits": _logits(B, V)}, _labels(B))
    assert inner.reduction == "sum", "the user's own loss is not changed"
    with pytest.raises(PrivacySpecError, match="CTC"):
        PrivateCriterion(dpq.losses.on_field("logits", nn.CTCLoss()))
    with pytest.raises(PrivacySpecError, match="no reduction"):
        dpq.losses.on_field("logits", lambda x, y: x)


@pytest.mark.parametrize(
    ("output", "labels", "message"),
    [
        (torch.zeros(B, T, V), torch.zeros(B, dtype=torch.int64), r"CausalLMLoss takes .* not logits \[4, 6, 5\]"),
        (torch.zeros(B, T + 1, V), torch.zeros(B, T, dtype=torch.int64), r"\[4, 7, 5\] with labels \[4, 6\]"),
        (torch.zeros(B, T, V), torch.zeros(B, T), r'on_field\("logits", nn.MSELoss\(\)\)'),
        ({"last_hidden_state": torch.zeros(B)}, torch.zeros(B), r"no field 'logits', only \['last_hidden_state'\]"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(output: Any, labels: Tensor, message: str) -> None:
    with pytest.raises(PrivacySpecError, match=message):
        dpq.losses.CausalLMLoss()(output, labels)


def test_unknown_fields_and_reductions_are_refused() -> None:
    with pytest.raises(PrivacySpecError, match=re.escape("no field 'pooled'")):
        dpq.losses.on_field("pooled", nn.MSELoss())((torch.zeros(2), torch.zeros(2)), torch.zeros(2))
    with pytest.raises(PrivacySpecError, match="mean, sum, none"):
        dpq.losses.CausalLMLoss(reduction="batchmean")
