"""`meaning`: what a program computes, whether it is whole or cut into regions."""

import operator
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from dpquant_compile.backends.site_args import site_args
from dpquant_compile.errors import GraphInvariantError
from dpquant_compile.passes.fx_utils import draws_seeded
from dpquant_compile.passes.private.joint_facts import INPUT

__all__ = ["ROWS", "TABLE", "Meaning", "arguments_of"]

# The inputs that have a row for each site, and the operator that takes the rows of a region.
TABLE = ("policy", "keys")
ROWS = torch.ops.aten.slice.Tensor


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """A node's arguments; those of an operator of this library by name."""
    if getattr(node.target, "namespace", None) == "dpquant":
        return dict(vars(site_args(node)))
    return {"args": node.args, "kwargs": dict(node.kwargs)}


class Meaning:
    """Numbers for values: two have one number if the same operators compute them from the same inputs.

    Names and order do not matter, except for random draws: each is another value, and the order of draws counts. A site
    in a region that is given rows of the link table is the site that these rows belong to.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, _Value] = {}
        self._draws = 0

    def of(self, gm: fx.GraphModule) -> str:
        """What a program of the same inputs returns."""
        self._draws = 0
        inputs = (node for node in gm.graph.nodes if node.op in ("placeholder", "get_attr"))
        values: dict[fx.Node, Any] = {node: self._number(f"{node.op} {node.target}") for node in inputs}
        return str(self._run(gm, values))

    def _number(self, key: str) -> "_Value":
        return self._numbers.setdefault(key, _Value(len(self._numbers)))

    def _run(self, gm: fx.GraphModule, values: dict[fx.Node, Any]) -> Any:
        for node in gm.graph.nodes:
            if node.op == "call_module":
                region: Any = gm.get_submodule(str(node.target))
                given = (values[source] for source in node.args)  # type: ignore[index]
                inside = dict(zip(region.graph.find_nodes(op="placeholder"), given, strict=True))
                values[node] = self._run(region, inside)
            elif node.op == "call_function":
                values[node] = self._value(node, values)
        return fx.map_arg(gm.graph.output_node().args[0], lambda node: values[node])

    def _value(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        if node.target is operator.getitem:
            source, place = node.args
            held = values[source]  # type: ignore[index]
            if isinstance(held, list | tuple):
                return held[place]  # type: ignore[index]
        given = fx.map_arg(arguments_of(node), lambda source: values[source])  # type: ignore[arg-type]
        rows = {value for value in tree_leaves(given) if isinstance(value, _Rows)}
        if rows:
            given = _in_table(node, given, rows)
        key = f"{node.target} {given}"
        if draws_seeded(node):
            self._draws += 1
            key = f"{key} draw {self._draws}"
        number = self._number(key)
        if node.target is ROWS and node.args[0].meta.get(INPUT) in TABLE:  # type: ignore[union-attr]
            _, dim, base = node.args[:3]
            assert dim == 0
            return _Rows(number.number, given["args"][0].number, base)  # type: ignore[arg-type]
        return number


@dataclass(frozen=True)
class _Value:
    number: int

    def __repr__(self) -> str:
        return f"%{self.number}"


@dataclass(frozen=True)
class _Rows(_Value):
    """Rows of `table` from `base` on."""

    table: int
    base: int

    __repr__ = _Value.__repr__


def _in_table(node: fx.Node, given: dict[str, Any], rows: set[_Rows]) -> dict[str, Any]:
    """The same arguments with rows of the whole table."""
    if getattr(node.target, "namespace", None) != "dpquant" or not {"site", "sites"} & given.keys():
        return given
    bases = {value.base for value in rows}
    tables = {name for name, value in given.items() if isinstance(value, _Rows)}
    if len(bases) > 1 or tables != set(TABLE) & given.keys():
        raise GraphInvariantError(f"node {node.name!r} is given rows of different sites: {sorted(tables)}")
    (base,) = bases

    def whole(name: str, value: Any) -> Any:
        if name in tables:
            return _Value(value.table)
        if name == "site":
            return value + base if value >= 0 else value
        return [site + base if site >= 0 else site for site in value] if name == "sites" else value

    return {name: whole(name, value) for name, value in given.items()}
