"""Losses for private training: sums over samples of functions of one sample each."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpquant_compile.errors import PrivacySpecError, PrivateTrainingError
from dpquant_compile.privacy.data.criterion import PrivateCriterion

B, C, T = 6, 4, 5
Make = Callable[[str], Any]


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _classes(*shape: int, high: int = C) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))


def _signs(*shape: int) -> Tensor:
    return _classes(*shape, high=2) * 2.0 - 1


def _ignoring(*shape: int) -> Tensor:
    """Classes of which some are ignored, and in the first sample all."""
    target = _classes(*shape)
    target[0] = -100
    target[-1, ..., :2] = -100
    return target


WEIGHT = torch.tensor([0.5, 2.0, 1.0, 3.0])
SEQUENCE = (_normal(B, C, T), _classes(B, T))
FLAT = (_normal(B, C), _classes(B))
PAIR = (_normal(B, C), _normal(B, C) + 1)
PROBABILITIES = (torch.sigmoid(_normal(B, C)), _classes(B, C, high=2).float())

# Name: how to make it with a reduction, and a call of it.
LOSSES: dict[str, tuple[Make, tuple[Tensor, ...]]] = {
    "ce": (lambda r: nn.CrossEntropyLoss(reduction=r), FLAT),
    "ce-weight": (lambda r: nn.CrossEntropyLoss(WEIGHT, reduction=r), FLAT),
    "ce-smooth": (lambda r: nn.CrossEntropyLoss(label_smoothing=0.1, reduction=r), FLAT),
    "ce-smooth-weight": (lambda r: nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1, reduction=r), FLAT),
    "ce-ignore": (lambda r: nn.CrossEntropyLoss(ignore_index=int(FLAT[1][0]), reduction=r), FLAT),
    "ce-sequence": (lambda r: nn.CrossEntropyLoss(reduction=r), SEQUENCE),
    "ce-sequence-ignore": (lambda r: nn.CrossEntropyLoss(reduction=r), (SEQUENCE[0], _ignoring(B, T))),
    "ce-soft": (lambda r: nn.CrossEntropyLoss(reduction=r), (FLAT[0], torch.softmax(PAIR[1], 1))),
    "mse": (lambda r: nn.MSELoss(reduction=r), PAIR),
    "mse-vector": (lambda r: nn.MSELoss(reduction=r), (_normal(B), _normal(B) + 1)),
    "l1": (lambda r: nn.L1Loss(reduction=r), PAIR),
    "smooth-l1": (lambda r: nn.SmoothL1Loss(reduction=r), PAIR),
    "huber": (lambda r: nn.HuberLoss(reduction=r, delta=0.3), PAIR),
    "bce": (lambda r: nn.BCELoss(reduction=r), PROBABILITIES),
    "bce-logits": (lambda r: nn.BCEWithLogitsLoss(pos_weight=WEIGHT, reduction=r), (PAIR[0], PROBABILITIES[1])),
    "nll": (lambda r: nn.NLLLoss(WEIGHT, reduction=r), (torch.log_softmax(FLAT[0], 1), FLAT[1])),
    "poisson": (lambda r: nn.PoissonNLLLoss(reduction=r), (PAIR[0], PAIR[1].abs())),
    "gaussian": (lambda r: nn.GaussianNLLLoss(reduction=r), (*PAIR, PROBABILITIES[0])),
    "kl": (lambda r: nn.KLDivLoss(reduction=r), (torch.log_softmax(FLAT[0], 1), torch.softmax(PAIR[1], 1))),
    "hinge": (lambda r: nn.HingeEmbeddingLoss(reduction=r), (PAIR[0], _signs(B, C))),
    "soft-margin": (lambda r: nn.SoftMarginLoss(reduction=r), (PAIR[0], _signs(B, C))),
    "multi-margin": (lambda r: nn.MultiMarginLoss(reduction=r), FLAT),
    "multi-label": (lambda r: nn.MultiLabelMarginLoss(reduction=r), (FLAT[0], _classes(B, C))),
    "multi-label-soft": (lambda r: nn.MultiLabelSoftMarginLoss(reduction=r), (PAIR[0], PROBABILITIES[1])),
    "cosine": (lambda r: nn.CosineEmbeddingLoss(reduction=r), (*PAIR, _signs(B))),
    "ranking": (lambda r: nn.MarginRankingLoss(reduction=r), (_normal(B), _normal(B) + 1, _signs(B))),
    "triplet": (lambda r: nn.TripletMarginLoss(reduction=r), (*PAIR, _normal(B, C) * 2)),
    "function": (lambda r: functools.partial(F.cross_entropy, reduction=r), FLAT),
    "function-ignore": (
        lambda r: functools.partial(F.cross_entropy, reduction=r, ignore_index=-100),
        (SEQUENCE[0], _ignoring(B, T)),
    ),
}
# Those whose own mean divides by a number that other samples have a part in.
MIXING = {"ce-weight", "ce-smooth-weight", "ce-ignore", "ce-sequence-ignore", "nll", "function-ignore"}
each_loss = pytest.mark.parametrize("name", LOSSES)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")  # torch's, on KLDivLoss
@each_loss
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_value_is_that_of_the_criterion_where_samples_do_not_mix(name: str, reduction: str) -> None:
    make, call = LOSSES[name]
    if reduction == "sum" or name not in MIXING:
        torch.testing.assert_close(PrivateCriterion(make(reduction))(*call), make(reduction)(*call))


@each_loss
def test_none_gives_what_the_criterion_gives(name: str) -> None:
    make, call = LOSSES[name]
    torch.testing.assert_close(PrivateCriterion(make("none"))(*call), make("none")(*call), rtol=0, atol=0)


@each_loss
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradient_of_a_sample_is_that_of_its_own_loss(name: str, reduction: str) -> None:
    make, call = LOSSES[name]
    criterion = PrivateCriterion(make(reduction))
    outputs = call[0].clone().requires_grad_()
    (together,) = torch.autograd.grad(criterion(outputs, *call[1:]), outputs)
    assert together.isfinite().all()
    for i in range(B):
        alone = call[0][i : i + 1].clone().requires_grad_()
        (own,) = torch.autograd.grad(criterion(alone, *(x[i : i + 1] for x in call[1:])), alone)
        torch.testing.assert_close(together[i], own[0] / (B if reduction == "mean" else 1))


@each_loss
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_empty_batch_has_loss_zero_with_a_graph(name: str, reduction: str) -> None:
    make, call = LOSSES[name]
    outputs = call[0][:0].clone().requires_grad_()
    loss = PrivateCriterion(make(reduction))(outputs, *(x[:0] for x in call[1:]))
    assert loss.shape == () and loss.item() == 0.0
    loss.backward()
    assert outputs.grad is not None and outputs.grad.shape == outputs.shape


def test_batchmean_sums_each_sample() -> None:
    call = LOSSES["kl"][1]
    own = nn.KLDivLoss(reduction="batchmean")
    criterion = PrivateCriterion(own)
    assert criterion.reduction == "batchmean"
    torch.testing.assert_close(criterion(*call), own(*call))
    assert criterion(*(x[:0] for x in call)).item() == 0.0


def test_weighted_mean_is_not_divided_by_the_weights_of_the_batch() -> None:
    outputs, targets = FLAT
    losses = F.cross_entropy(outputs, targets, WEIGHT, reduction="none")
    torch.testing.assert_close(PrivateCriterion(nn.CrossEntropyLoss(WEIGHT))(outputs, targets), losses.sum() / B)


@pytest.mark.parametrize("name", ["ce-sequence-ignore", "function-ignore"])
def test_ignored_positions_leave_the_mean_of_their_own_sample(name: str) -> None:
    make, (outputs, targets) = LOSSES[name]
    means = []
    for row, target in zip(outputs, targets, strict=True):
        kept = target != -100
        means.append(F.cross_entropy(row.T[kept], target[kept]) if kept.any() else torch.tensor(0.0))
    assert means[0] == 0 and bool((targets[-1] == -100).any())
    torch.testing.assert_close(PrivateCriterion(make("mean"))(outputs, targets), torch.stack(means).mean())


def test_ignore_index_of_a_function_call_in_every_form() -> None:
    outputs, targets = SEQUENCE[0], _ignoring(B, T).where(_ignoring(B, T) != -100, 2)
    wanted = PrivateCriterion(nn.CrossEntropyLoss(ignore_index=2))(outputs, targets)
    criterion = PrivateCriterion(F.cross_entropy)
    torch.testing.assert_close(criterion(outputs, targets, ignore_index=2), wanted)
    torch.testing.assert_close(criterion(outputs, targets, None, None, 2), wanted)
    torch.testing.assert_close(criterion(target=targets, input=outputs, ignore_index=2), wanted)
    assert not torch.allclose(criterion(outputs, targets), wanted)


def test_user_criterion_stays_as_it_is_and_is_followed() -> None:
    own = nn.CrossEntropyLoss(WEIGHT, reduction="sum")
    criterion = PrivateCriterion(own)
    before = criterion(*FLAT)
    assert criterion.criterion is own and own.reduction == "sum" and criterion.reduction == "sum"
    assert "reduction='sum'" in repr(criterion)
    criterion.double()  # moves the user's buffers, and with them what is evaluated
    assert own.weight is not None and own.weight.dtype == torch.float64
    torch.testing.assert_close(criterion(FLAT[0].double(), FLAT[1]).float(), before)


def test_copies_and_wrappers_of_wrappers_work() -> None:
    criterion = PrivateCriterion(nn.CrossEntropyLoss(WEIGHT))
    for other in (copy.deepcopy(criterion), PrivateCriterion(criterion)):
        torch.testing.assert_close(other(*FLAT), criterion(*FLAT))


def test_compiled_criterion_is_not_changed() -> None:
    own = nn.MSELoss()
    criterion = PrivateCriterion(torch.compile(own))
    torch.testing.assert_close(criterion(*PAIR), own(*PAIR))
    assert own.reduction == "mean"


def test_reduction_of_functions_and_given_ones() -> None:
    assert PrivateCriterion(F.cross_entropy).reduction == "mean"
    assert PrivateCriterion(functools.partial(F.mse_loss, reduction="sum")).reduction == "sum"
    assert PrivateCriterion(nn.MSELoss(), reduction="sum").reduction == "sum"
    torch.testing.assert_close(
        PrivateCriterion(nn.MSELoss(), reduction="sum")(*PAIR), F.mse_loss(*PAIR, reduction="sum")
    )

    def needs_one(x: Tensor, y: Tensor, reduction: str) -> Tensor:
        return F.mse_loss(x, y, reduction=reduction)

    torch.testing.assert_close(PrivateCriterion(needs_one, reduction="mean")(*PAIR), F.mse_loss(*PAIR))
    with pytest.raises(PrivacySpecError, match=r"reduction=.* of needs_one: give one of mean, sum, none, batchmean"):
        PrivateCriterion(needs_one)


def test_ctc_has_the_batch_second() -> None:
    call = (torch.log_softmax(_normal(T, B, C), 2), _classes(B, 2, high=C - 1) + 1, (T,) * B, (2,) * B)
    own = nn.CTCLoss(reduction="sum")
    torch.testing.assert_close(PrivateCriterion(own)(*call), own(*call))
    for criterion in (nn.CTCLoss(), F.ctc_loss):
        with pytest.raises(PrivacySpecError, match="target lengths"):
            PrivateCriterion(criterion)


@pytest.mark.parametrize("criterion", [lambda x, y: (x - y).square().mean(), nn.Identity(), torch.dot])
def test_criterion_without_a_reduction_is_refused(criterion: Any) -> None:
    with pytest.raises(PrivacySpecError, match=r"no reduction that can be set to 'none'.*`reduction`"):
        PrivateCriterion(criterion)


def test_unknown_reduction_is_refused() -> None:
    with pytest.raises(PrivacySpecError, match="reduction='median' of MSELoss"):
        PrivateCriterion(nn.MSELoss(), reduction="median")


class Loss(nn.Module):
    """A user's loss, given as a function of outputs and targets."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.reduction = "mean"
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y)


def test_trainable_parameters_are_refused() -> None:
    loss = Loss(lambda x, y: (x - y).square())
    loss.temperature = nn.Parameter(torch.ones(()))
    with pytest.raises(PrivacySpecError, match="trainable parameters"):
        PrivateCriterion(loss)
    loss.requires_grad_(False)
    PrivateCriterion(loss)


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda x, y: (x - y).square().mean(), r"shape \[\]"),
        (lambda x, y: (x - y).square().mean(0), r"shape \[4\]"),
        (lambda x, y: (x - y).square().flatten(), r"shape \[24\]"),
        (lambda x, y: (x, y), "a tuple"),
    ],
)
def test_loss_without_a_row_for_each_sample_is_refused(function: Callable[[Tensor, Tensor], Any], got: str) -> None:
    with pytest.raises(PrivacySpecError, match=f"gives {got}, but must give one row for each sample, here 6"):
        PrivateCriterion(Loss(function))(*PAIR)


def test_known_number_of_samples_shows_a_flattened_batch() -> None:
    outputs, targets = SEQUENCE
    number: list[int | None] = [B]
    criterion = PrivateCriterion(nn.CrossEntropyLoss(), samples=lambda: number[0])
    criterion(outputs, targets)
    flattened = outputs.transpose(1, 2).reshape(B * T, C), targets.flatten()
    with pytest.raises(PrivacySpecError, match=r"shape \[30\].*here 6\..*\[B, C, T\]"):
        criterion(*flattened)
    number[0] = None
    criterion(*flattened)


MIXERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "contrastive": lambda x, y: F.cross_entropy(x @ y.T, torch.arange(len(x)), reduction="none"),
    "batch statistics": lambda x, y: ((x - x.mean(0)) - y).square().mean(1),
    "neighbour": lambda x, y: (x - y.roll(1, 0)).square().mean(1),
    "pairs": lambda x, y: (x[:, None] - y[None]).square().mean(2),
}


@pytest.mark.parametrize("name", MIXERS)
def test_mixing_loss_is_refused_at_the_first_call(name: str) -> None:
    loss = Loss(MIXERS[name])
    with pytest.raises(PrivacySpecError, match="Loss mixes samples"):
        PrivateCriterion(loss)(*PAIR)
    PrivateCriterion(loss, verify=False)(*PAIR)


def test_check_waits_for_two_samples_and_is_done_once() -> None:
    calls: list[int] = []

    def function(x: Tensor, y: Tensor) -> Tensor:
        calls.append(len(x))
        return (x - y).square()

    criterion = PrivateCriterion(Loss(function))
    for size in (0, 1, 5, 5):
        criterion(*(x[:size] for x in PAIR))
    assert calls == [0, 1, 5, 3, 2, 5]
    waiting = PrivateCriterion(Loss(MIXERS["contrastive"]))
    waiting(*(x[:1] for x in PAIR))
    with pytest.raises(PrivacySpecError, match="mixes samples"):
        waiting(*(x[:2] for x in PAIR))


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_target_that_broadcasts_over_the_batch_is_refused() -> None:
    with pytest.raises(PrivacySpecError, match=r"mixes samples.*same shape"):
        PrivateCriterion(nn.MSELoss())(_normal(B, 1), _normal(B))


def test_loss_that_fails_on_part_of_a_batch_is_refused() -> None:
    weights = torch.rand(B, 1)
    with pytest.raises(PrivacySpecError, match=r"fails on a part of the batch.*verify=False"):
        PrivateCriterion(Loss(lambda x, y: weights * (x - y).square()))(*PAIR)


def test_class_weights_are_no_rows_where_there_are_as_many() -> None:
    criterion = PrivateCriterion(F.cross_entropy)
    criterion(FLAT[0][:C], FLAT[1][:C], WEIGHT)
    PrivateCriterion(F.cross_entropy)(FLAT[0][:C], FLAT[1][:C], weight=WEIGHT)
    assert not criterion.verify


def test_check_allows_the_rounding_of_low_precision() -> None:
    outputs = _normal(64, 100).bfloat16()
    PrivateCriterion(nn.CrossEntropyLoss())(outputs, _classes(64, high=100))


# Outputs with fields


def _by_field(output: Any, target: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(output["logits"], target, reduction=reduction)


def _mixed_field(output: Any, target: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(output["logits"] - output["logits"].mean(0), target, reduction=reduction)


def test_output_with_fields_is_compared_with_its_parts() -> None:
    logits, target = FLAT
    output = {"logits": logits, "states": (logits, None)}
    torch.testing.assert_close(PrivateCriterion(_by_field)(output, target), F.cross_entropy(logits, target))
    with pytest.raises(PrivacySpecError, match="_mixed_field mixes samples"):
        PrivateCriterion(_mixed_field)(output, target)


def test_as_many_fields_as_samples_are_no_samples() -> None:
    logits, target = FLAT[0][:2], FLAT[1][:2]

    def first(output: Any, target: Tensor, reduction: str = "mean") -> Tensor:
        return F.cross_entropy(output[0], target, reduction=reduction)

    for output in ((logits, 0 * logits), (logits, None)):
        torch.testing.assert_close(PrivateCriterion(first)(output, target), F.cross_entropy(logits, target))


def test_fields_of_the_output_are_pinned() -> None:
    logits, target = FLAT[0].clone().requires_grad_(), FLAT[1]
    criterion = PrivateCriterion(_by_field)
    criterion.pin({})
    criterion({"logits": logits}, target)
    with pytest.raises(PrivateTrainingError, match="other keys"):
        criterion({"logits": logits, "more": logits}, target)
    with pytest.raises(PrivateTrainingError, match=r"input \"output\['logits'\]\" of the criterion has rows of shape"):
        criterion({"logits": torch.cat([logits, logits], 1)}, target)


@pytest.mark.parametrize(
    ("output", "field"),
    [({"loss": None, "logits": _normal(B, C)}, "'logits'"), ((_normal(B, C),), "0"), ({"scores": 1}, "'scores'")],
)
@pytest.mark.parametrize(
    ("loss", "written"), [(nn.CrossEntropyLoss(), r"CrossEntropyLoss\(\)"), (F.cross_entropy, "cross_entropy")]
)
def test_a_loss_of_torch_on_an_output_with_fields_names_what_to_write(
    loss: Any, written: str, output: Any, field: str
) -> None:
    with pytest.raises(PrivacySpecError, match=rf"on_field\({field}, {written}\)") as raised:
        PrivateCriterion(loss)(output, _classes(B))
    assert isinstance(raised.value.__cause__, TypeError)


def test_an_error_of_a_loss_of_ones_own_is_shown_as_it_is() -> None:
    def own(output: Any, target: Tensor, reduction: str = "mean") -> Tensor:
        return output["logits"].missing

    with pytest.raises(AttributeError, match="missing"):
        PrivateCriterion(own)({"logits": _normal(B, C)}, _classes(B))
