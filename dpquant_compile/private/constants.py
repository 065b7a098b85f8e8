"""`Constants`: what a private program reads beside the batch and the parameters, fixed before any batch is seen.

A number, a tensor without a row per sample, a buffer or a plain attribute of the model is alike for all samples of a
batch. If it was made of the batch, each sample's gradient depends on all of them, and clipping bounds nothing.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from dpquant_compile.errors import PrivacySpecError, PrivateTrainingError

__all__ = ["Constants"]

_PLAIN = (bool, int, float, complex, str, bytes)
_OF_MODULES = frozenset(vars(nn.Module()))  # what torch keeps in every module: hooks, modes, parameters


class Constants:
    """The constants of one run.

    declared   arguments of forward() that have no row per sample, by name, with the value that every call gives

    Guarantee: a training forward or an analysis that passes the checks reads nothing but parameters, rows of its own
    samples, and values that were fixed at `freeze`, before the run read any batch.
    """

    def __init__(self, model: nn.Module, declared: Mapping[str, Any]) -> None:
        self._model = model
        self._signature = inspect.signature(model.forward)
        known = self._signature.parameters
        open_ended = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in known.values())
        for name in declared:
            if name not in known and not open_ended:
                raise PrivacySpecError(
                    f"constant_inputs names {name!r}, which is no argument of forward(): choose of {', '.join(known)}"
                )
        self._declared = {name: _copied(value) for name, value in declared.items()}
        self._buffers: dict[str, Tensor] = {}
        self._attributes: dict[str, Any] = {}
        self.freeze()

    def freeze(self) -> None:
        """Take buffers and attributes as they are now: when the run begins, and when a checkpoint was loaded."""
        with torch.inference_mode(False):
            self._buffers = {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}
            self._attributes = {name: _copied(value) for name, value in _attributes(self._model)}

    def check_call(
        self, base: fx.GraphModule, given: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Refuse inputs without a row per sample that were not declared, or have another value than declared.

        `given` holds the call's values by placeholder of `base`, which `track_batch` has told rows apart in.
        """
        rows: set[int] = set()
        read: set[int] = set()
        placeholders = (node for node in base.graph.nodes if node.op == "placeholder")
        for node, value in zip(placeholders, given, strict=True):
            leaves = tree_leaves(value)
            read |= {id(leaf) for leaf in leaves}
            rows |= {id(leaf) for leaf, batched in zip(leaves, node.meta["batch_leaves"], strict=True) if batched}
        for name, value in self._named(args, kwargs):
            for path, leaf in tree_flatten_with_path(value)[0]:
                if leaf is None or id(leaf) in rows or (isinstance(leaf, Tensor) and id(leaf) not in read):
                    continue
                self._check_leaf(name, path, leaf)

    def check_buffers(self) -> None:
        """Refuse buffers that were written, or replaced, since the run began.

        By their contents: what is written through `.data` leaves no other trace.
        """
        now = dict(self._model.named_buffers())
        for name in {*now, *self._buffers}:
            if name not in now or name not in self._buffers or not _same(self._buffers[name], now[name]):
                raise PrivateTrainingError(_changed(f"buffer {name!r}"))

    def check_attributes(self) -> None:
        """Refuse plain attributes that changed since the run began: a graph that is captured now would hold them."""
        now = dict(_attributes(self._model))
        for name in {*now, *self._attributes}:
            held = name in now and name in self._attributes
            if not held or not _same(self._attributes[name], now[name]):
                raise PrivateTrainingError(_changed(f"attribute {name!r}"))

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        try:
            bound = self._signature.bind(*args, **kwargs).arguments
        except TypeError:  # the model's own forward says what is wrong
            return
        for name, value in bound.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                yield from value.items()
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                yield from ((f"{name}[{i}]", one) for i, one in enumerate(value))
            else:
                yield name, value

    def _check_leaf(self, name: str, path: Any, leaf: Any) -> None:
        what = f"input {name + keystr(path)!r} of the model"
        kind = f"a tensor of shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
        if name not in self._declared:
            raise PrivateTrainingError(
                f"{what} is {kind} without a row per sample. If it is made of the batch, samples reach each other "
                "through it. Fix: give it one row per sample; or, if it does not depend on the data, declare it before "
                f"the first batch: make_private(..., constant_inputs={{{name!r}: value}})"
            )
        wanted = dict(tree_flatten_with_path(self._declared[name])[0])
        if path not in wanted or not _same(wanted[path], leaf):
            raise PrivateTrainingError(
                f"{what} has another value than constant_inputs= declared for it, so it may be made of the batch. Fix: "
                "give the declared value in every call, or one row per sample"
            )


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The numbers, texts and tensors that modules hold as plain attributes, those in lists, tuples and dicts too."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, value in vars(module).items():
            if name in _OF_MODULES:
                continue
            for path, leaf in tree_flatten_with_path(value)[0]:
                if isinstance(leaf, (Tensor, *_PLAIN)) and not isinstance(leaf, nn.Parameter):
                    yield f"{prefix}.{name}{keystr(path)}".lstrip("."), leaf


def _copied(value: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        return alike and (torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
    if isinstance(a, _PLAIN):
        return type(a) is type(b) and (a == b or (a != a and b != b))
    return a is b


def _changed(what: str) -> str:
    return (
        f"{what} of the model changed since make_private. If its value is made of the batch, samples reach each other "
        "through it. Fix: give such values to forward() with one row per sample; set what does not depend on the data "
        "before make_private, or call make_private again after the change"
    )
