"""`meaning`: what a program computes, whether it is whole or cut into regions."""

import operator
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor import inductor_prims
from torch.utils._pytree import tree_leaves

from dpquant_compile.backends.site_args import signature_of
from dpquant_compile.errors import GraphInvariantError
from dpquant_compile.passes.fx_utils import draws_seeded

__all__ = ["LOOKUP", "ROWS", "ROWS_OF", "Meaning", "arguments_of", "moved", "table_of"]

# The operator that takes rows of a table for a region, and a key in the metadata of such a node: which table it is.
ROWS = torch.ops.aten.slice.Tensor
ROWS_OF = "rows_of"

# Inductor's dropout takes its seed from one tensor of seeds, by number.
LOOKUP = inductor_prims.lookup_seed


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """A node's arguments; by name those of this library's operators, and of look-ups."""
    if getattr(node.target, "namespace", None) == "dpquant" or node.target is LOOKUP:
        return signature_of(node.target).bind(node.args, node.kwargs)
    return {"args": node.args, "kwargs": dict(node.kwargs)}


def table_of(node: fx.Node) -> tuple[tuple[str, ...], str]:
    """The arguments of a node that are tables with rows, and the argument that says which rows; or none and ""."""
    if node.target is LOOKUP:
        return ("seeds",), "index"
    given = arguments_of(node).keys()
    number = next((name for name in ("site", "sites") if name in given), "")
    return tuple(name for name in ("policy", "keys") if name in given) if number else (), number


class Meaning:
    """Numbers for values: two have one number if the same operators compute them from the same inputs.

    Names and order do not matter, except for random draws: each is another value, and the order of draws counts. A site
    in a region that is given rows of the link table is the site that these rows belong to; so are seeds of dropout.
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
                given = (values[source] for source in node.args)
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
        given = fx.map_arg(arguments_of(node), lambda source: values[source])
        rows = {value for value in tree_leaves(given) if isinstance(value, _Rows)}
        if rows:
            given = _in_table(node, given, rows)
        key = f"{node.target} {given}"
        if draws_seeded(node):
            self._draws += 1
            key = f"{key} draw {self._draws}"
        number = self._number(key)
        if node.target is ROWS and ROWS_OF in node.meta:
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
    bases = {value.base for value in rows}
    held = {name for name, value in given.items() if isinstance(value, _Rows)}
    tables, number = table_of(node)
    if len(bases) > 1 or held != set(tables):
        raise GraphInvariantError(f"node {node.name!r} is given rows of different tables: {sorted(held)}")
    (base,) = bases
    whole = {name: _Value(value.table) if name in held else value for name, value in given.items()}
    return {**whole, number: moved(given[number], base)}


def moved(number: Any, by: int) -> Any:
    """The number of a row, or numbers of rows, in a table that begins `by` rows earlier; -1 is no row."""
    if isinstance(number, list | tuple):
        return [moved(each, by) for each in number]
    return number + by if number >= 0 else number
