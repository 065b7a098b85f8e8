"""`Constants`: what a private program reads beside the batch and trained parameters, fixed before any batch is seen.

A number, a tensor without a row per sample, a buffer, a frozen parameter or a plain attribute of the model is alike for
all samples of a batch. If it was made of the batch, each sample's gradient depends on all of them, and clipping bounds
nothing.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from dpquant_compile.errors import PrivacySpecError, PrivateTrainingError
from dpquant_compile.passes.fx_utils import read_attribute
from dpquant_compile.privacy.accounting.replay_check import fingerprint
from dpquant_compile.programs import MODULE_INTERNALS, plain_attributes

__all__ = ["Constants"]


class Constants:
    """The constants of one run.

    declared   arguments of forward() that have no row per sample, by name, with the value that every call gives

    Guarantee: a training forward or an analysis that passes the checks reads nothing but trained parameters, rows of
    its own samples, and values that were fixed at `freeze`, before the run read any batch. Tensors that lie in neither
    modules nor arguments (globals, objects of other kinds) are fixed at the first forward that reads them.
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
        self._declared = {
            name: tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, value)
            for name, value in declared.items()
        }
        self._tensors: dict[str, Tensor | str] = {}  # a copy, or the fingerprint of a frozen parameter
        self._attributes: dict[str, Any] = {}
        self._holders: list[tuple[str, nn.Module, str]] = []
        self._given: dict[str, frozenset[str]] = {}
        self.freeze()

    def freeze(self) -> None:
        """Take tensors and attributes as they are now: when the run begins, and when a checkpoint was loaded."""
        self._holders = self._find_holders()
        self._tensors = {name: _kept(tensor) for name, tensor in self._named_tensors()}
        self._attributes = plain_attributes(self._model)

    def check_call(
        self, base: fx.GraphModule, given: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any], what: str
    ) -> None:
        """Refuse inputs without a row per sample that were not declared, or have another value than declared.

        `given` holds the call's values by placeholder of `base`, which `track_batch` has told rows apart in. `args` and
        `kwargs` are the call's without what is at its default. `what` names the kind of call: all of one kind must give
        the same arguments.
        """
        rows: set[int] = set()
        read: set[int] = set()
        placeholders = (node for node in base.graph.nodes if node.op == "placeholder")
        for node, value in zip(placeholders, given, strict=True):
            leaves = tree_leaves(value)
            read |= {id(leaf) for leaf in leaves}
            rows |= {id(leaf) for leaf, batched in zip(leaves, node.meta["batch_leaves"], strict=True) if batched}
        arguments = [(name, tree_flatten_with_path(value)[0]) for name, value in self._named(args, kwargs)]
        for name, found in arguments:
            for path, leaf in found:
                if leaf is None or id(leaf) in rows or (isinstance(leaf, Tensor) and id(leaf) not in read):
                    continue
                self._check_leaf(name, path, leaf)
        for name, value in self._declared.items():
            if name not in dict(arguments) and not _same(self._default(name), value):
                raise PrivateTrainingError(
                    f"argument {name!r} of the model is left out, or at its default, though constant_inputs= declares "
                    "another value: it may be made of the batch. Fix: give the declared value in every call"
                )
        present = frozenset(name for name, found in arguments if any(leaf is not None for _, leaf in found))
        if present != self._given.setdefault(what, present):
            changed = sorted(present ^ self._given[what])
            raise PrivateTrainingError(
                f"argument {changed[0]!r} of the model is given in some calls and left out, or None, in others. If the "
                "batch decides it, samples reach each other through it. Fix: give it in every call, or in none"
            )

    def check_read(self, base: fx.GraphModule, targets: Sequence[str], trained: Mapping[str, nn.Parameter]) -> None:
        """Refuse tensors of the model, but for trained parameters, that changed since the run began.

        `targets` are those that the program reads. By their contents: what is written through `.data` leaves no trace.
        """
        ours = {id(parameter) for parameter in trained.values()}
        for name, tensor in self._named_tensors():
            if id(tensor) not in ours and (name not in self._tensors or not _is_kept(self._tensors[name], tensor)):
                kind = "buffer" if name in dict(self._model.named_buffers()) else "parameter or attribute"
                raise PrivateTrainingError(_changed(f"{kind} {name!r}"))
        for target in targets:  # tensors that no module holds
            if target.startswith("_const."):
                tensor = read_attribute(base, target)
                if not _is_kept(self._tensors.setdefault(f"{id(base)} {target}", _kept(tensor)), tensor):
                    raise PrivateTrainingError(_changed(f"tensor {target.removeprefix('_const.')!r}"))

    def check_attributes(self, captured: Mapping[str, Any]) -> None:
        """Refuse a graph that was captured with other plain attributes than the run began with: it holds them.

        For once in the life of a program, since it looks at every attribute of every module.
        """
        then = {(id(module), name) for _, module, name in self._holders}
        for prefix, module, name in self._find_holders():
            if (id(module), name) not in then:
                raise PrivateTrainingError(_changed(f"attribute {f'{prefix}.{name}'.lstrip('.')!r}"))
        for name in {*captured, *self._attributes}:
            held = name in captured and name in self._attributes
            if not held or not _same(self._attributes[name], captured[name]):
                raise PrivateTrainingError(_changed(f"attribute {name!r}"))

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, buffers, and tensors that modules hold as plain attributes, where any did at `freeze`."""
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()
        known = {id(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())}
        for prefix, module, name in self._holders:
            for path, leaf in tree_flatten_with_path(vars(module).get(name))[0]:
                if isinstance(leaf, Tensor) and id(leaf) not in known:
                    yield f"{prefix}.{name}{keystr(path)}".lstrip("."), leaf

    def _find_holders(self) -> list[tuple[str, nn.Module, str]]:
        return [
            (prefix, module, name)
            for prefix, module in self._model.named_modules()
            for name, value in vars(module).items()
            if name not in MODULE_INTERNALS and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
        ]

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

    def _default(self, name: str) -> Any:
        parameter = self._signature.parameters.get(name)
        return inspect.Parameter.empty if parameter is None else parameter.default

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


def _kept(tensor: Tensor) -> Tensor | str:
    """What a tensor is compared with later. Parameters may be large, and are not copied."""
    if isinstance(tensor, nn.Parameter):
        return f"{tuple(tensor.shape)} {tensor.dtype} {fingerprint([tensor])}"
    with torch.inference_mode(False):
        return tensor.detach().clone()


def _is_kept(kept: Tensor | str, tensor: Tensor) -> bool:
    return kept == _kept(tensor) if isinstance(kept, str) else _same(kept, tensor)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        return alike and (torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return type(a) is type(b) and (a is b or bool(a == b) or (a != a and b != b))


def _changed(what: str) -> str:
    return (
        f"{what} of the model changed since make_private. If its value is made of the batch, samples reach each other "
        "through it. Fix: give such values to forward() with one row per sample; set what does not depend on the data "
        "before make_private, or call make_private again after the change"
    )
