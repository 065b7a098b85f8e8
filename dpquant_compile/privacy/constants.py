"""`Constants`: what a private program reads beside the batch and trained parameters, fixed before any batch is seen.

A number, a tensor without a row per sample, a buffer, a frozen parameter, an attribute or a global variable is shared
by all samples of a batch. If it was computed from the batch, each sample's gradient depends on all samples, and
clipping bounds nothing. The same holds for the structure, types and shapes of arguments: see `CallStructure`.
"""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from dpquant_compile.errors import PrivacySpecError, PrivateTrainingError
from dpquant_compile.held_values import MODULE_INTERNALS, held_values, same_values
from dpquant_compile.passes.fx_utils import read_attribute
from dpquant_compile.privacy.accounting.prints import print_of
from dpquant_compile.privacy.call_structure import CallStructure
from dpquant_compile.privacy.device_checks import DeviceChecks

__all__ = ["Constants", "FrozenValues"]


class FrozenValues:
    """`held_values` of a model or a loss as they were at `freeze`."""

    def __init__(self, root: Any, of: str) -> None:
        self._root = root
        self._of = of
        self.freeze()

    def freeze(self) -> None:
        """Record the current values."""
        self._values = held_values(self._root)

    def take_over(self, prefixes: Collection[str]) -> None:
        """Record the current values of some modules, in place of those recorded before."""
        now = held_values(self._root)
        taken = tuple(f"{prefix}." if prefix else "" for prefix in prefixes)
        kept = {name: value for name, value in self._values.items() if not name.startswith(taken)}
        self._values = kept | {name: value for name, value in now.items() if name.startswith(taken)}

    def check(self, values: Mapping[str, Any] | None = None) -> None:
        """Refuse values (by default the current ones) that differ from the frozen ones."""
        name = same_values(self._values, held_values(self._root) if values is None else values)
        if name is not None:
            kind, _, rest = name.partition(" ")
            known = {"global": "global variable", "class": "class attribute", "variable": "variable"}
            what = f"{known[kind]} {rest!r} that is read by the code" if kind in known else f"attribute {name!r}"
            raise PrivateTrainingError(changed(what, self._of))


class Constants:
    """The constants of one run.

    declared        arguments of forward() that have no row per sample, by name, with the value that every call gives
    varying_shapes  whether rows may change their size from call to call

    Guarantee: a training forward or an analysis that passes the checks reads only trained parameters, rows of its own
    samples, and values that were fixed at `freeze`, before the run read any batch. Its arguments have the structure of
    the first call of its kind. Tensors that `held_values` does not find (in globals of libraries or behind extension
    types) are fixed at the first call of a kind that reads them.
    """

    def __init__(self, model: nn.Module, declared: Mapping[str, Any], varying_shapes: bool = False) -> None:
        self._model = model
        self._signature = inspect.signature(model.forward)
        check_names(declared, self._signature, "forward()")
        self._calls = CallStructure("the model", declared, varying_shapes)
        self._frozen = FrozenValues(model, "the model")
        self._tensors: dict[str, _Marks] = {}
        self._read: dict[str, _Marks] = {}  # of tensors that no module holds, by kind of call and name in the graph
        self._holders: list[tuple[str, nn.Module, str]] = []
        self.freeze()

    def given(self, what: str) -> frozenset[str]:
        """The arguments that calls of a kind give, by name; none before the first call."""
        return self._calls.given(what)

    def freeze(self) -> None:
        """Record tensors and attributes as they are now, when the run begins."""
        self._holders = self._find_holders()
        self._tensors = {name: _marked(tensor) for name, tensor in self._named_tensors()}
        self._frozen.freeze()

    def take_loaded(self, names: Collection[str]) -> None:
        """Record parameters and buffers of these names as a checkpoint has set them; the rest stays as at `freeze`."""
        own = dict(self._named_tensors())
        self._tensors |= {name: _marked(own[name]) for name in names if name in own}
        extra = [name.removesuffix("_extra_state").removesuffix(".") for name in names if name.endswith("_extra_state")]
        if extra:  # set_extra_state() of these modules may have set any attribute
            self._frozen.take_over(extra)

    def check_call(
        self, base: fx.GraphModule, given: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any], what: str
    ) -> None:
        """Refuse undeclared inputs without a row per sample, and calls of another structure.

        `given` holds the call's values by placeholder of `base`, where `track_batch` has recorded which have rows.
        `args` and `kwargs` are those of the call, without arguments at their defaults. `what` names the kind of call:
        all calls of one kind must have the same structure.
        """
        rows: dict[int, Tensor] = {}
        read: set[int] = set()
        placeholders = (node for node in base.graph.nodes if node.op == "placeholder")
        for node, value in zip(placeholders, given, strict=True):
            leaves = tree_leaves(value)
            read |= {id(leaf) for leaf in leaves}
            rows |= {id(leaf): leaf for leaf, batched in zip(leaves, node.meta["batch_leaves"], strict=True) if batched}
        batch = {leaf.shape[0] for leaf in rows.values()}

        def sizes(_: str, leaf: Any) -> tuple[Any, ...] | None:
            if id(leaf) in rows:
                return tuple(leaf.shape[1:])
            if isinstance(leaf, Tensor) and id(leaf) not in read:  # the model may still have read its shape
                return tuple(leaf.shape[1:]) if leaf.dim() and leaf.shape[0] in batch else ("whole", *leaf.shape)
            return None

        arguments = dict(named_arguments(self._signature, args, kwargs))
        for name in self._calls.declared:
            if name not in arguments:
                self._calls.check_default(name, self._default(name))
        self._calls.check(what, list(arguments.items()), sizes)

    def check_read(
        self,
        base: fx.GraphModule,
        targets: Sequence[str],
        trained: Mapping[str, nn.Parameter],
        what: str,
        checks: DeviceChecks,
    ) -> None:
        """Refuse tensors of the model, except trained parameters, that changed since the run began; see `checks`.

        `targets` are those that the program reads in a call of the kind `what`. Contents are compared, since a write
        through `.data` leaves no other trace. Tensors that no module holds are identified by their names in the graph,
        so a new capture must give them the same names.
        """
        ours = {id(parameter) for parameter in trained.values()}
        for name, tensor in self._named_tensors():
            if id(tensor) not in ours:
                kind = "buffer" if name in dict(self._model.named_buffers()) else "parameter or attribute"
                self._compare(tensor, self._tensors.get(name), f"{kind} {name!r}", checks)
        for target in targets:
            if target.startswith("_const."):
                tensor = read_attribute(base, target)
                first = self._read.setdefault(f"{what} {target}", _marked(tensor))
                self._compare(tensor, first, f"tensor {target.removeprefix('_const.')!r}", checks)

    def _compare(self, tensor: Tensor, known: "_Marks | None", what: str, checks: DeviceChecks) -> None:
        """Refuse a tensor that is not what it was."""
        why = partial(changed, what, "the model")
        now = _marked(tensor)
        if known is None or known[:2] != now[:2] or known[2].device != now[2].device:
            raise PrivateTrainingError(why())
        checks.refuse((known[2] != now[2]).any(), why)

    def check_attributes(self, captured: Mapping[str, Any]) -> None:
        """Refuse a graph captured with other values than the run began with, and values that have changed by now.

        Call it once per program: it walks over everything that the model holds.
        """
        then = {(id(module), name) for _, module, name in self._holders}
        for prefix, module, name in self._find_holders():
            if (id(module), name) not in then:
                raise PrivateTrainingError(changed(f"attribute {f'{prefix}.{name}'.lstrip('.')!r}", "the model"))
        self._frozen.check(captured)
        self._frozen.check()

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, buffers, and tensors in plain attributes of modules, if any module had one at `freeze`."""
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

    def _default(self, name: str) -> Any:
        parameter = self._signature.parameters.get(name)
        return inspect.Parameter.empty if parameter is None else parameter.default


_Marks = tuple[torch.dtype, torch.Size, Tensor]


def _marked(tensor: Tensor) -> _Marks:
    """What a tensor is and holds."""
    return tensor.dtype, tensor.shape, print_of(tensor)


def named_arguments(
    signature: inspect.Signature | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The arguments of a call by name; by position where the signature does not match, as under a decorator."""
    try:
        bound = {} if signature is None else signature.bind(*args, **kwargs).arguments
    except TypeError:
        bound = {}
    if signature is None or (not bound and (args or kwargs)):
        yield from ((f"args[{i}]", value) for i, value in enumerate(args))
        yield from kwargs.items()
        return
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((f"{name}[{i}]", one) for i, one in enumerate(value))
        else:
            yield name, value


def check_names(declared: Collection[str], signature: inspect.Signature | None, what: str, prefix: str = "") -> None:
    """Refuse declared constants that a signature has no argument for."""
    known = {} if signature is None else signature.parameters
    if signature is None or any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in known.values()):
        return
    for name in declared:
        if name not in known:
            raise PrivacySpecError(
                f"constant_inputs names {prefix + name!r}, which is no argument of {what}. Fix: choose from "
                f"{', '.join(prefix + n for n in known)}"
            )


def changed(what: str, of: str) -> str:
    """The error message for a value that has changed."""
    return (
        f"{what} of {of} changed since make_private. If its value is made of the batch, samples reach each other "
        "through it. Fix: give such values as arguments with one row per sample; set what does not depend on the data "
        "before make_private, or, after the change, call model.recapture() and make_private again"
    )
