"""`CallStructure`: what all calls of one kind must have in common beside the rows of their samples.

Which arguments a call has, how they are nested, their types and the shapes of their rows are shared by all samples of a
batch. If the batch decides them, samples reach each other through them. Examples: `len(x)` of a list without tensors, a
key that is present or absent, the length that a batch is padded to.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_is_leaf, tree_structure

from dpquant_compile.errors import PrivateTrainingError
from dpquant_compile.held_values import same_values, values_in

__all__ = ["CallStructure"]

Leaf = tuple[torch.dtype, tuple[Any, ...]] | None
Sizes = Callable[[str, Any], tuple[Any, ...] | None]


class CallStructure:
    """The structure of calls of the model or of the loss; `of` names it in errors.

    declared        arguments without a row per sample, by name, with the value that every call gives
    prefix          what comes before these names in constant_inputs=
    varying_shapes  whether rows may change their size from call to call; their number of dimensions is fixed

    Guarantee: calls of one kind that pass `check` differ only in the contents and the number of their rows; with
    `varying_shapes` also in the sizes of rows.
    """

    def __init__(self, of: str, declared: Mapping[str, Any], varying_shapes: bool, prefix: str = "") -> None:
        self._of = of
        self._prefix = prefix
        self._declared = {name: values_in(value) for name, value in declared.items()}
        self._varying = varying_shapes
        self._pinned: dict[str, dict[str, tuple[TreeSpec, dict[str, Leaf]]]] = {}

    @property
    def declared(self) -> frozenset[str]:
        """The names of declared arguments."""
        return frozenset(self._declared)

    def given(self, kind: str) -> frozenset[str]:
        """The arguments of the first call of a kind that are neither declared nor None."""
        return frozenset(self._pinned.get(kind, ()))

    def check(self, kind: str, arguments: Sequence[tuple[str, Any]], sizes: Sizes) -> None:
        """Refuse a call with another structure than the first one of its kind, or with undeclared constants.

        `sizes` gives the sizes of a leaf of an argument, without the batch dimension; None for a leaf without rows.
        """
        found: dict[str, tuple[TreeSpec, dict[str, Leaf]]] = {}
        for name, value in arguments:
            if name in self._declared:
                self._check_declared(name, value)
            elif value is not None:
                leaves = {keystr(path): leaf for path, leaf in tree_flatten_with_path(_plain(value))[0]}
                described = {path: self._leaf(name, path, leaf, sizes) for path, leaf in leaves.items()}
                found[name] = (tree_structure(value), described)
        self._compare(found, self._pinned.setdefault(kind, found))

    def check_default(self, name: str, default: Any) -> None:
        """Refuse a call that leaves a declared argument at its default, unless the default was declared."""
        if same_values(self._declared[name], values_in(default)) is not None:
            raise PrivateTrainingError(
                f"argument {name!r} of {self._of} is left out, or at its default, though constant_inputs= declares "
                "another value: it may be made of the batch. Fix: give the declared value in every call"
            )

    def _check_declared(self, name: str, value: Any) -> None:
        if (path := same_values(self._declared[name], values_in(value))) is not None:
            raise PrivateTrainingError(
                f"input {name + path!r} of {self._of} has another value than constant_inputs= declared for it, or is "
                "missing, so it may be made of the batch. Fix: give the whole declared value in every call, or one row "
                "per sample"
            )

    def _leaf(self, name: str, path: str, leaf: Any, sizes: Sizes) -> Leaf:
        if leaf is None:
            return None
        found = sizes(name, leaf)
        if found is not None:
            return leaf.dtype if isinstance(leaf, Tensor) else torch.bool, found
        kind = f"a tensor of shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
        raise PrivateTrainingError(
            f"input {name + path!r} of {self._of} is {kind} without a row per sample. If it is made of the batch, "
            "samples reach each other through it. Fix: give it one row per sample; or, if it does not depend on the "
            f"data, declare it before the first batch: make_private(..., constant_inputs={{{self._prefix + name!r}: "
            "value})"
        )

    def _compare(self, now: Mapping[str, Any], first: Mapping[str, Any]) -> None:
        if now is first:
            return
        if changed := sorted(now.keys() ^ first.keys()):
            raise PrivateTrainingError(
                f"argument {changed[0]!r} of {self._of} is given in some calls and left out, or None, in others. If "
                "the batch decides it, samples reach each other through it. Fix: give it in every call, or in none"
            )
        for name, (spec, leaves) in now.items():
            if spec != first[name][0]:
                raise PrivateTrainingError(
                    f"argument {name!r} of {self._of} has other keys, lengths or types of containers than in the first "
                    "call of its kind. If the batch decides them, samples reach each other through them. Fix: give "
                    "the same structure in every call, with rows for every entry"
                )
            for path, leaf in leaves.items():
                self._compare_leaf(f"input {name + path!r} of {self._of}", leaf, first[name][1][path])

    def _compare_leaf(self, what: str, now: Leaf, first: Leaf) -> None:
        if now is None or first is None:
            if now is not first:
                raise PrivateTrainingError(
                    f"{what} is given in some calls and None in others. If the batch decides it, samples reach each "
                    "other through it. Fix: give it in every call, or in none"
                )
        elif now[0] != first[0]:
            raise PrivateTrainingError(
                f"{what} has dtype {now[0]}, and had {first[0]} in the first call of its kind. If the batch decides "
                "it, samples reach each other through it. Fix: convert it to one dtype in every call"
            )
        elif len(now[1]) != len(first[1]) or (now[1] != first[1] and not self._varying):
            raise PrivateTrainingError(
                f"{what} has rows of shape {list(now[1])}, and had {list(first[1])} in the first call of its kind. In "
                "a batch that is padded to its longest sample, one sample's length reaches all others. Fix: pad every "
                "batch to one fixed length; or, if shapes do not depend on private data, "
                "make_private(..., varying_shapes=True), which the ledger's statement then says"
            )


def _plain(value: Any) -> Any:
    """A `ModelOutput` as a dict: it is a mapping that pytrees can take apart, but not name the parts of."""
    if isinstance(value, Mapping) and not tree_is_leaf(value):
        return {key: _plain(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value
