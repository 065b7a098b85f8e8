"""`check_batch_rule`: look for a counterexample to what a user's batch rule claims."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dpquant_compile.errors import IsolationError, RegistryError
from dpquant_compile.passes.batch.batch_rules import OpCall
from dpquant_compile.passes.batch.own_rules import Operator, name_of, own_axis, own_rule
from dpquant_compile.sites import BatchAxis

__all__ = ["check_batch_rule"]

_TOLERANCE = 1e-5  # of float32 sums in another order, relative to the largest value


def check_batch_rule(
    op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, trials: int = 8, seed: int = 0
) -> int:
    """Look for samples that change the results of others where the rule of `op` says that they do not.

    args, kwargs  of one call of the operator; a tensor may have its samples in any dimension
    trials        random inputs for each place, beside the given ones and some with special values

    Every place that the samples could have in the arguments is tried, as far as the rule does not give up there: each
    dimension of each tensor, also with samples that are several rows. In each, single samples are replaced, by random
    numbers, copies of others, zeros, huge values, infinities and NaN; and samples are reordered, left out and repeated.
    Other samples' rows of the output must stay, and so must their gradients; gradients of arguments without samples
    must be the sum of what each sample gives alone. Returns the number of places that the rule claims to know.

    Guarantee: none. It is a test on examples, and finds no mixing that needs values it does not try.
    Raises `IsolationError` with the counterexample, or if the rule gives up everywhere.
    """
    if own_rule(op) is None:
        raise RegistryError(f"{name_of(op)} has no batch rule. Fix: register_batch_rule(op, rule) first")
    generator = torch.Generator().manual_seed(seed)
    call = _Call(op, tuple(args), dict(kwargs or {}))
    call.check_plain()
    places = [place for place in _places(call) if call.claims(place) is not None]
    if not places:
        raise IsolationError(
            f"the rule of {name_of(op)} gives up on these arguments, wherever the samples are. Fix: give arguments "
            "whose samples it follows, at least two, in a dimension of another size than the others have"
        )
    for place in places:
        for given in _inputs(call, trials, generator):
            _check(given, place, generator)
        _check_sizes(call, place, generator)
    return len(places)


_Place = Mapping[int, BatchAxis]  # of the samples in each tensor among the arguments, by its number


@dataclass(frozen=True)
class _Call:
    op: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def with_tensors(self, values: Sequence[Tensor]) -> "_Call":
        rest = iter(values)
        args, kwargs = tree_map(lambda v: next(rest) if isinstance(v, Tensor) else v, (self.args, self.kwargs))
        return _Call(self.op, args, kwargs)

    def run(self) -> list[Tensor]:
        result = self.op(*self.args, **self.kwargs)
        return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]

    def check_plain(self) -> None:
        """Refuse operators that draw random numbers, or write into their arguments."""
        before = [value.clone() for value in self.tensors]
        first, second = self.run(), self.run()
        if any(not torch.equal(a, b) for a, b in zip(before, self.tensors, strict=True)):
            raise IsolationError(f"{name_of(self.op)} writes into its arguments")
        if any(not _alike(a, b) for a, b in zip(first, second, strict=True)):
            raise IsolationError(
                f"{name_of(self.op)} gives other results each time. Fix: give random numbers to it as an argument"
            )

    def claims(self, place: _Place) -> list[BatchAxis] | None:
        """Where the rule says that the samples are in each output; None where it gives up."""
        tensors = self.tensors
        axes = {id(value): place.get(i) for i, value in enumerate(tensors)}
        number, axis = next(iter(place.items()))
        size = tensors[number].shape[axis.dim] // (axis.outer * axis.inner)

        def axis_of(value: Any) -> BatchAxis | None:
            return axes.get(id(value))

        overload: Any = getattr(self.op, "_opoverload", self.op)
        try:
            outputs = self.run()
        except Exception as error:
            raise IsolationError(f"{name_of(self.op)} fails on the given arguments: {error}") from error
        found = [
            own_axis(overload, OpCall(name_of(self.op), self.args, self.kwargs, output, axis_of, size))
            for output in outputs
        ]
        known = [axis for axis in found if isinstance(axis, BatchAxis)]
        return known if len(known) == len(found) else None


def _places(call: _Call) -> Iterator[_Place]:
    """Where samples could be: in one dimension of some tensors, as rows, or as several rows each."""
    tensors = call.tensors
    for outer, inner in ((1, 1), (1, 2), (2, 1)):
        options: list[list[tuple[int, BatchAxis] | None]] = []
        for i, value in enumerate(tensors):
            axes = [BatchAxis(dim, outer, inner) for dim in range(value.dim())]
            options.append([None, *((i, a) for a in axes if value.shape[a.dim] % (outer * inner) == 0)])
        for chosen in itertools.islice(itertools.product(*options), 512):
            place = dict(pair for pair in chosen if pair is not None)
            sizes = {tensors[i].shape[axis.dim] // (outer * inner) for i, axis in place.items()}
            if len(sizes) == 1 and min(sizes) > 1:
                yield place


def _inputs(call: _Call, trials: int, generator: torch.Generator) -> Iterator[_Call]:
    """The given arguments, and others of their shapes."""
    yield call
    special = (torch.zeros_like, torch.ones_like, lambda v: -torch.ones_like(v))
    floats = [value.is_floating_point() for value in call.tensors]
    for make in special:
        yield call.with_tensors([make(v) if f else v for v, f in zip(call.tensors, floats, strict=True)])
    for trial in range(trials):
        scale = (1.0, 1e-3, 30.0, 1.0)[trial % 4]
        values = [_random(value, generator) for value in call.tensors]
        yield call.with_tensors([v * scale if f else v for v, f in zip(values, floats, strict=True)])


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers of the same shape and kind; integers stay between those given."""
    if like.is_floating_point() or like.is_complex():
        return torch.randn(like.shape, generator=generator, dtype=like.dtype)
    if like.dtype == torch.bool:
        return torch.rand(like.shape, generator=generator) < 0.5
    low, high = int(like.min()), int(like.max())
    return torch.randint(low, high + 1, like.shape, generator=generator, dtype=like.dtype)


def _check(call: _Call, place: _Place, generator: torch.Generator) -> None:
    claimed = call.claims(place)
    if claimed is None:
        return
    tensors = call.tensors
    number, axis = next(iter(place.items()))
    size = tensors[number].shape[axis.dim] // (axis.outer * axis.inner)
    weights = [_random(output, generator) for output in call.run()]
    first = _results(call, place, claimed, weights)
    for i in {0, size // 2, size - 1}:
        kept = [j for j in range(size) if j != i]
        for what, changed in _changes(tensors, place, i, generator):
            other = [_rows(w, a).clone() for w, a in zip(weights, claimed, strict=True)]
            for rows in other:
                rows[i] = rows[i] * -2 + 1 if rows.is_floating_point() else rows[i]
            new = [_unrows(rows, w, a) for rows, w, a in zip(other, weights, claimed, strict=True)]
            second = _results(call.with_tensors(changed), place, claimed, new)
            for (name, a), (_, b) in zip(first, second, strict=True):
                if a is not None and b is not None and not _alike(a[kept], b[kept]):
                    raise IsolationError(
                        f"the rule of {name_of(call.op)} is wrong: with samples in {_said(place)}, it claims "
                        f"{', '.join(map(str, claimed))} for the output, but {what} of sample {i} changes {name} of "
                        "other samples. Fix: let the rule return a reason for this place, or correct the operator"
                    )
    _check_choice(call, place, claimed, weights, torch.randperm(size, generator=generator), "its place in the batch")
    _check_shared(call, place, claimed, weights)


def _check_sizes(call: _Call, place: _Place, generator: torch.Generator) -> None:
    """Leave out one sample, half of them, all but one; and repeat one, and all of them."""
    claimed = call.claims(place)
    assert claimed is not None
    weights = [_random(output, generator) for output in call.run()]
    whole = torch.arange(len(_rows(weights[0], claimed[0])))
    more = torch.cat([whole, whole[:1]])  # with whole[1:], of the other parity: neighbouring batches
    for order in (whole[1:], more, whole[: (len(whole) + 1) // 2], whole[-1:], whole.repeat(5)):
        try:
            _check_choice(call, place, claimed, weights, order, "how many samples there are")
        except IsolationError:
            raise
        except RuntimeError:  # of the operator: another argument gives the number of samples
            continue


def _check_choice(
    call: _Call, place: _Place, claimed: Sequence[BatchAxis], weights: Sequence[Tensor], order: Tensor, what: str
) -> None:
    """Choose samples, and refuse if the results of one depend on which others are chosen."""
    first = _results(call, place, claimed, weights)
    moved = [_chosen(v, place[i], order) if i in place else v for i, v in enumerate(call.tensors)]
    new = [_chosen(w, a, order) for w, a in zip(weights, claimed, strict=True)]
    for (name, a), (_, b) in zip(first, _results(call.with_tensors(moved), place, claimed, new), strict=True):
        if a is not None and b is not None and not _alike(a[order], b):
            raise IsolationError(
                f"the rule of {name_of(call.op)} is wrong: with samples in {_said(place)}, {name} of a sample depend "
                f"on {what}. Fix: let the rule return a reason for this place, or correct the operator"
            )


def _check_shared(call: _Call, place: _Place, claimed: Sequence[BatchAxis], weights: Sequence[Tensor]) -> None:
    """Refuse where the gradient of an argument without samples is not the sum of what each sample gives alone.

    Samples alone, since a mask over the batch multiplies the others by zero, which is NaN where they are infinite.
    """
    shared = [i for i, value in enumerate(call.tensors) if i not in place and value.is_floating_point()]

    def gradients(order: Tensor) -> list[Tensor]:
        values = [_chosen(v, place[i], order) if i in place else v for i, v in enumerate(call.tensors)]
        values = [v.detach().clone().requires_grad_(i in shared) for i, v in enumerate(values)]
        with torch.enable_grad():
            outputs = call.with_tensors(values).run()
        chosen = [_chosen(w, a, order) for w, a in zip(weights, claimed, strict=True)]
        ends = [(output, weight) for output, weight in zip(outputs, chosen, strict=True) if output.requires_grad]
        if not ends:
            return []
        learned = [values[i] for i in shared]
        of, by = [output for output, _ in ends], [weight for _, weight in ends]
        return list(torch.autograd.grad(of, learned, by, allow_unused=True, materialize_grads=True))

    if not shared:
        return
    whole = torch.arange(len(_rows(weights[0], claimed[0])))
    try:
        alone = [gradients(sample) for sample in whole.split(1)]
    except RuntimeError:  # of the operator: another argument gives the number of samples
        return
    for i, total, parts in zip(shared, gradients(whole), zip(*alone, strict=True), strict=False):
        each = torch.stack(parts)
        near = _TOLERANCE * float(each.abs().max()) if each.numel() else 0.0
        if each.isfinite().all() and not torch.allclose(total, each.sum(0), rtol=_TOLERANCE, atol=near):
            raise IsolationError(
                f"the rule of {name_of(call.op)} is wrong: with samples in {_said(place)}, the gradient of argument "
                f"{i} is not the sum of those of each sample alone. Fix: let the rule return a reason for this place, "
                "or correct the operator"
            )


def _results(
    call: _Call, place: _Place, claimed: Sequence[BatchAxis], weights: Sequence[Tensor]
) -> list[tuple[str, Tensor | None]]:
    """Each output, and each gradient of Σ weights · outputs that has samples, as [samples, elements]."""
    tensors = [v.detach().clone().requires_grad_(v.is_floating_point()) for v in call.tensors]
    run = call.with_tensors(tensors)
    with torch.enable_grad():
        outputs = run.run()
    results: list[tuple[str, Tensor | None]] = [
        ("the output", _rows(output.detach(), axis)) for output, axis in zip(outputs, claimed, strict=True)
    ]
    ends = [(o, w, a) for o, w, a in zip(outputs, weights, claimed, strict=True) if o.requires_grad]
    inputs = [(i, value) for i, value in enumerate(tensors) if value.requires_grad]
    if not ends or not inputs:
        return results
    values = [value for _, value in inputs]
    grads: Any = torch.autograd.grad([o for o, _, _ in ends], values, [w for _, w, _ in ends], True, allow_unused=True)
    results += [
        (f"the gradients of argument {i}", None if grad is None else _rows(grad, place[i]))
        for (i, _), grad in zip(inputs, grads, strict=True)
        if i in place
    ]
    return results


def _changes(
    tensors: Sequence[Tensor], place: _Place, i: int, generator: torch.Generator
) -> Iterator[tuple[str, list[Tensor]]]:
    """The arguments with sample i replaced."""
    size = len(_rows(tensors[next(iter(place))], place[next(iter(place))]))
    copied = (i + 1) % size

    def replaced(make: Any) -> list[Tensor]:
        values = list(tensors)
        for number, axis in place.items():
            rows = _rows(values[number], axis).clone()
            rows[i] = make(rows)
            values[number] = _unrows(rows, values[number], axis)
        return values

    yield "another value", replaced(lambda rows: _random(rows, generator)[i])
    yield "a copy of another sample instead", replaced(lambda rows: rows[copied])
    yield "zeros instead", replaced(lambda rows: rows[i] * 0 if rows.is_floating_point() else rows[copied])
    for value in (1e6, -1e6, math.inf, math.nan):
        if all(tensors[number].is_floating_point() for number in place):
            yield f"the value {value}", replaced(lambda rows, value=value: torch.full_like(rows[i], value))


def _chosen(value: Tensor, axis: BatchAxis, order: Tensor) -> Tensor:
    """The samples with these numbers, in this order."""
    return _unrows(_rows(value, axis)[order], value, axis)


def _split(shape: Sequence[int], axis: BatchAxis) -> list[int]:
    size = shape[axis.dim] // (axis.outer * axis.inner)
    return [*shape[: axis.dim], axis.outer, size, axis.inner, *shape[axis.dim + 1 :]]


def _rows(value: Tensor, axis: BatchAxis) -> Tensor:
    """[samples, elements of one]."""
    split = value.reshape(_split(value.shape, axis)).movedim(axis.dim + 1, 0)
    return split.reshape(split.shape[0], -1)


def _unrows(rows: Tensor, like: Tensor, axis: BatchAxis) -> Tensor:
    split, shape = _split(like.shape, axis), list(like.shape)
    del split[axis.dim + 1]
    shape[axis.dim] = axis.outer * len(rows) * axis.inner
    return rows.reshape(len(rows), *split).movedim(0, axis.dim + 1).reshape(shape)


def _alike(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    finite = a[a.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * largest, equal_nan=True)


def _said(place: _Place) -> str:
    return ", ".join(f"{axis} of argument {i}" for i, axis in place.items())
