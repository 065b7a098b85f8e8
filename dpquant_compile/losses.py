"""Losses for models whose output is a record of fields, such as those of Hugging Face: one loss per sample.

All are called `criterion(output, labels)`. `output` is the model's output as it comes: a `ModelOutput` or another
mapping, an object with fields, a tuple, or the tensor itself.

A model that computes a loss by itself, from `labels`, takes the mean over the positions of the whole batch. The more
positions a sample has, the less the others count, so that is no sum of functions of one sample each. These losses take
the mean over a sample's own positions first.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpquant_compile.errors import PrivacySpecError

__all__ = ["CausalLMLoss", "OnField", "SequenceClassificationLoss", "TokenClassificationLoss", "on_field"]

REDUCTIONS = ("mean", "sum", "none")
_IGNORED = -100  # never a class, whatever else is ignored


class _CrossEntropy(nn.Module):
    """Cross entropy of `logits` with integer labels; what a subclass calls positions lies between batch and classes.

    reduction "none" gives one loss per sample: the mean over its own counted positions, 0 if it has none. "mean" and
    "sum" are over samples, each of which counts. A position counts unless its label is `ignore_index`, or -100 as
    data collators write it. Class weights scale a position's loss and are not divided out again.

    Guarantee: the loss of a sample is a function of this sample's logits and labels alone.
    """

    shape = ""  # of logits and labels, for errors
    positions = 1  # how many dimensions of positions the labels have

    def __init__(
        self,
        ignore_index: int = _IGNORED,
        reduction: str = "mean",
        *,
        weight: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        if reduction not in REDUCTIONS:
            raise PrivacySpecError(f"reduction={reduction!r} of {type(self).__name__}: {', '.join(REDUCTIONS)}")
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.weight: Tensor | None
        self.register_buffer("weight", weight)
        self.label_smoothing = label_smoothing

    def forward(self, output: Any, labels: Tensor) -> Tensor:
        logits = field_of(output, "logits", type(self).__name__)
        self._check(logits, labels)
        labels = labels.to(torch.int64)
        labels = self._targets(labels.masked_fill(torch.eq(labels, _IGNORED), self.ignore_index))
        losses = F.cross_entropy(
            logits.float().flatten(0, -2),
            labels.flatten(),
            self.weight,
            ignore_index=self.ignore_index,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )
        places = tuple(range(1, labels.ndim))
        if places:
            counted = torch.ne(labels, self.ignore_index).sum(places).clamp(min=1)
            losses = losses.view(labels.shape).sum(places) / counted
        if self.reduction == "none":
            return losses
        return losses.sum() if self.reduction == "sum" else losses.sum() / max(len(losses), 1)

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}, reduction={self.reduction!r}"

    def _targets(self, labels: Tensor) -> Tensor:
        """The label that each position is to predict."""
        return labels

    def _check(self, logits: Tensor, labels: Tensor) -> None:
        name = type(self).__name__
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise PrivacySpecError(
                f"{name} takes integer labels, not {labels.dtype}. Fix: for regression or several labels per sample "
                'give dpq.losses.on_field("logits", nn.MSELoss()) or dpq.losses.on_field("logits", '
                "nn.BCEWithLogitsLoss()) as criterion"
            )
        if labels.ndim != 1 + self.positions or logits.ndim != labels.ndim + 1 or logits.shape[:-1] != labels.shape:
            raise PrivacySpecError(
                f"{name} takes {self.shape}, not logits {list(logits.shape)} with labels {list(labels.shape)}. Fix: "
                "give the loss that fits the model, or one of your own on a field of its output: "
                "dpq.losses.on_field(name, criterion)"
            )


class CausalLMLoss(_CrossEntropy):
    """Next-token prediction: the logits at a position are compared with the label of the next one.

    `labels` are the token ids, not shifted, as for Hugging Face's own loss; -100 at padding and wherever nothing is to
    be learned. Padding that has no such label counts as text.
    """

    shape = "logits [B, T, V] and labels [B, T]"

    def __init__(self, ignore_index: int = _IGNORED, reduction: str = "mean") -> None:
        super().__init__(ignore_index, reduction)

    def _targets(self, labels: Tensor) -> Tensor:
        return F.pad(labels, (0, 1), value=self.ignore_index)[:, 1:]


class TokenClassificationLoss(_CrossEntropy):
    """A class for each token; also masked language models, and models with a decoder, whose logits are not shifted."""

    shape = "logits [B, T, C] and labels [B, T]"


class SequenceClassificationLoss(_CrossEntropy):
    """A class for each sequence, or image. A sample whose label is `ignore_index` has loss 0."""

    shape = "logits [B, C] and labels [B]"
    positions = 0


class OnField(nn.Module):
    """A loss of one field of the model's output; see `on_field`. `reduction` is that of the loss within."""

    def __init__(self, field: str | int, criterion: Callable[..., Any]) -> None:
        super().__init__()
        self.field = field
        self.criterion = criterion
        self.reduction = own_reduction(criterion)

    def forward(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        value = field_of(output, self.field, f"on_field({self.field!r}, …)")
        return with_reduction(self.criterion, self.reduction, (value, *args), kwargs)

    def extra_repr(self) -> str:
        return f"field={self.field!r}, reduction={self.reduction!r}"


def on_field(name: str | int, criterion: Callable[..., Any]) -> OnField:
    """`criterion` on the field `name` of the model's output: `on_field("logits", nn.CrossEntropyLoss())`.

    `criterion` is a module or a function with a `reduction`, as for `make_private`. A number is the place of the field
    in a tuple. A tensor is taken as the field itself.
    """
    return OnField(name, criterion)


def field_of(output: Any, name: str | int, asker: str) -> Any:
    """A field of a model's output; `asker` is named in errors."""
    if isinstance(output, Tensor):
        return output
    fields: Sequence[Any] = ()
    if isinstance(output, Mapping):
        fields = list(output)
        if name in output:
            return output[name]
    elif isinstance(name, str) and getattr(output, name, None) is not None:
        return getattr(output, name)
    elif isinstance(output, tuple | list) and not hasattr(output, "_fields"):
        fields = range(len(output))
        place = 0 if name == "logits" else name  # in a tuple, logits come first
        if isinstance(place, int) and place < len(output):
            return output[place]
    raise PrivacySpecError(
        f"{asker}: the model's output, a {type(output).__name__}, has no field {name!r}"
        f"{f', only {list(fields)}' if fields else ''}. Fix: name one of its fields, as in "
        'dpq.losses.on_field("logits", nn.CrossEntropyLoss())'
    )


def read_fields(criterion: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of a call, with the one field that the loss reads in the place of a whole output.

    So what else an output holds (a cache, the model's own loss of the batch) is no part of the call. A field that is no
    tensor but a tuple or a record stays where it is: the loss, which gets what this gives, would read a field of it.
    """
    forward = getattr(type(criterion), "forward", None)
    if not args or forward not in (OnField.forward, _CrossEntropy.forward):  # one of a subclass may read more
        return tuple(args)
    field = criterion.field if isinstance(criterion, OnField) else "logits"
    value = field_of(args[0], field, type(criterion).__name__)
    return (value, *args[1:]) if isinstance(value, Tensor) else tuple(args)


def signature_of(criterion: Callable[..., Any]) -> inspect.Signature | None:
    """The arguments of a call of a criterion; None if they are not known."""
    try:
        return inspect.signature(criterion.forward if isinstance(criterion, nn.Module) else criterion)
    except (TypeError, ValueError):  # builtins have none
        return None


def own_reduction(criterion: Callable[..., Any]) -> Any:
    """The reduction of a module, or the default of a function's keyword `reduction`; raises if it has none."""
    if hasattr(criterion, "reduction"):
        return criterion.reduction
    signature = signature_of(criterion)
    parameter = signature.parameters.get("reduction") if signature else None
    if parameter is None:
        raise PrivacySpecError(
            f"{getattr(criterion, '__name__', type(criterion).__name__)} has no reduction that can be set to 'none', "
            "so the loss of each sample is not known. Fix: give a module with an attribute, or a function with a "
            "keyword, `reduction` that can be 'none'"
        )
    return parameter.default


def with_reduction(criterion: Any, reduction: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a criterion with another reduction; it is not changed."""
    if not hasattr(criterion, "reduction"):
        return criterion(*args, **kwargs, reduction=reduction)
    # A shallow copy for each call: it shares buffers and mode with the user's criterion.
    criterion = copy.copy(criterion)
    criterion.reduction = reduction
    return criterion(*args, **kwargs)
