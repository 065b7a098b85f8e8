"""Arguments of operators by name: the schema says where they stand, and nothing else counts positions.

    site_args(node).policy                        of a node, whether it holds the argument by position or by name
    named_args(operator, inputs).weight           of the flat tuple that autograd sees
    in_order(operator, x=…, bits=…)               the flat tuple of a call
    @by_name(operator)                            an implementation that gets its arguments by name

A schema is read once per operator. What it gains, loses or moves, readers do not notice.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from operator import itemgetter
from typing import Any

import torch
from torch import fx

from dpquant_compile.errors import OperatorArgumentError, listing

__all__ = [
    "Signature",
    "SiteArgs",
    "by_name",
    "call_operator",
    "grads_in_order",
    "in_order",
    "named_args",
    "signature_of",
    "site_args",
]


class SiteArgs:
    """The arguments of one call as attributes, defaults filled in; `vars()` gives all of them in their order."""

    __slots__ = ("__dict__", "_operator")

    def __init__(self, operator: str, values: dict[str, Any]) -> None:
        self._operator, self.__dict__ = operator, values

    def __getattr__(self, name: str) -> Any:
        raise _unknown(self._operator, name, self.__dict__)


@dataclass(frozen=True)
class Signature:
    """The names of an operator's arguments in their order, and the values of those that may be left out."""

    operator: str
    names: tuple[str, ...]
    defaults: Mapping[str, Any]

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments by name. Torch drops trailing arguments that equal their defaults; they are put back."""
        values = dict(zip(self.names, args, strict=False))
        if len(values) == len(self.names) == len(args) and not kwargs:
            return values
        if len(args) > len(self.names):
            names = listing(self.names)
            raise OperatorArgumentError(f"{self.operator} takes {names}, but is given {len(args)} arguments")
        for name in kwargs:
            if name not in self.names:
                raise _unknown(self.operator, name, self.names)
        given = {**self.defaults, **values, **kwargs}
        if missing := [name for name in self.names if name not in given]:
            raise OperatorArgumentError(f"{self.operator} is not given {listing(missing)}")
        return {name: given[name] for name in self.names}

    @staticmethod
    def parse(name: str, schema: str) -> "Signature":
        """The signature of an operator that is yet to be defined, `schema` being "(Tensor x, …) -> Tensor"."""
        return _of_schema(torch._C.parse_schema(f"{name}{schema}"))


def _of_schema(schema: Any) -> Signature:
    defaults = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    return Signature(schema.name, tuple(argument.name for argument in schema.arguments), defaults)


@lru_cache(maxsize=256)
def signature_of(target: Any) -> Signature:
    """The signature of what a node calls: an operator, or a Python function."""
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return _of_schema(schema)
    found = inspect.signature(target).parameters
    defaults = {name: value.default for name, value in found.items() if value.default is not inspect.Parameter.empty}
    return Signature(target.__name__, tuple(found), defaults)


def site_args(node: fx.Node) -> SiteArgs:
    """The arguments of the call that a node stands for."""
    signature = signature_of(node.target)
    return SiteArgs(signature.operator, signature.bind(node.args, node.kwargs))


def named_args(target: Any, args: Sequence[Any]) -> SiteArgs:
    """A flat tuple of one value per argument of `target`: its inputs, or something about each of them."""
    signature = signature_of(target)
    return SiteArgs(signature.operator, signature.bind(args, {}))


def in_order(target: Any, **values: Any) -> tuple[Any, ...]:
    """The flat tuple of arguments that calls `target` with these values."""
    return tuple(signature_of(target).bind((), values).values())


def call_operator(graph: fx.Graph, target: Any, **values: Any) -> fx.Node:
    """A call of an operator by named arguments, at the place of insertion, with the value that its fake gives."""
    args = in_order(target, **values)
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda source: source.meta["val"]))
    return node


def grads_in_order(target: Any, **grads: Any) -> tuple[Any, ...]:
    """What the backward of `target` returns: these gradients in their places, and None for all other arguments."""
    return in_order(target, **{**dict.fromkeys(signature_of(target).names), **grads})


def by_name(signature: Signature) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function be called as an operator of this signature calls it, and get the arguments by name.

    The function's parameters are names of arguments, in any order. A last one named `rest` gets a mapping of all the
    others. Positions are worked out once, here: operators are called a hundred times a step.
    """
    names, count, empty = signature.names, len(signature.names), inspect.Parameter.empty
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=signature.defaults.get(name, empty))
        for name in names
    ]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        taken = list(inspect.signature(function).parameters)
        with_rest = taken[-1:] == ["rest"]
        for name in taken[:-1] if with_rest else taken:
            if name not in names:
                raise _unknown(signature.operator, name, names)
        others = [name for name in names if name not in taken]
        if others and not with_rest:
            raise OperatorArgumentError(f"{signature.operator}: {function.__name__} leaves out {listing(others)}")
        own_values = _picked([names.index(name) for name in taken if name in names])
        other_values = _picked([names.index(name) for name in others])

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs or len(args) != count:
                args = tuple(signature.bind(args, kwargs).values())
            if with_rest:
                return function(*own_values(args), dict(zip(others, other_values(args), strict=True)))
            return function(*own_values(args))

        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return call

    return wrap


def _picked(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """The values at these places of a tuple, as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda args: tuple(args[place] for place in places)


def _unknown(operator: str, name: str, names: Sequence[str] | Mapping[str, Any]) -> OperatorArgumentError:
    return OperatorArgumentError(f"{operator} has no argument {name!r}. Its arguments are: {listing(tuple(names))}")
