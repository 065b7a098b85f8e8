"""Tell whether a graph that Dynamo captured on one batch holds for every batch size, by the guards of the capture.

Dynamo follows sizes as symbols and notes a guard for every decision that it takes on one. A decision of the model's own
code (`if len(x) < 16`) chose what is in the graph. A decision inside an operator (whether a reshape can be a view) did
not: the graph calls this operator, which decides anew in every run.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._dynamo.utils import run_node

__all__ = ["BatchGuards", "read_batch_guards"]

# Sizes at which guards are tried. Batches of 0 and 1 never reach a graph that is compiled for others.
_SIZES = (*range(2, 34), 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 1009, 1023, 1024, 1025)
_LARGE = (4095, 4097, 65535, 65537, 1048575, 1048577)
_DYNAMO = os.path.dirname(run_node.__code__.co_filename) + os.sep


@dataclass(frozen=True)
class BatchGuards:
    """What the guards of a capture say of its batch size.

    bound     why the graph holds for one batch size only; None if it holds for all
    doubtful  sizes at which an operator would have decided otherwise than in the capture, at most one for each guard
    """

    bound: str | None
    doubtful: tuple[int, ...]


def read_batch_guards(exported: fx.GraphModule, batch: int) -> BatchGuards:
    """Read the guards of a graph that was captured with symbols for the dimensions of size `batch`.

    Guarantee: `bound` is None only if no code of the model took a decision that another batch size, of 2 or more, could
    change; a decision whose place is unknown counts as the model's.
    """
    symbols: set[sympy.Symbol] = set()
    env: Any = None
    for node in exported.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value", node.meta.get("val"))
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue
        size = value.shape[0]
        if isinstance(size, torch.SymInt):
            env = size.node.shape_env
            # Under both names: where two symbols are equal, Dynamo replaces one by the other.
            symbols |= size.node.expr.free_symbols | size.node._expr.free_symbols
            if not size.node.expr.free_symbols:
                return BatchGuards(_written(env, size.node._expr) or _fixed(node, batch), ())
        elif size == batch:
            return BatchGuards(_fixed(node, batch), ())
    if env is None:
        return BatchGuards("no input has a dimension that varies", ())
    doubtful: dict[int, None] = {}
    one = sympy.Symbol("batch", integer=True, positive=True)
    for guard in env.guards:
        expr = guard.expr.xreplace(dict.fromkeys(symbols, one))
        failing = next((size for size in (*_SIZES, *_LARGE, *_named(expr)) if not _holds(expr, one, size)), None)
        if failing is None:
            continue
        if _is_of_model(guard):
            return BatchGuards(f"forward() decides by its batch size ({_place(guard)})", ())
        doubtful[failing] = None
    return BatchGuards(None, tuple(doubtful))


def _named(expr: Any) -> list[int]:
    """The sizes at and beside the numbers in a guard, and their quotients: `Ne(4*batch, 1200)` is false at 300."""
    numbers = {1, *(abs(int(number)) for number in expr.atoms(sympy.Integer))} - {0}
    near = {a // b + d for a in numbers for b in numbers for d in (-1, 0, 1)}
    return sorted(size for size in near if 2 <= size <= _LARGE[-1])


def _holds(expr: Any, symbol: sympy.Symbol, size: int) -> bool:
    try:
        return expr is sympy.true or bool(expr.xreplace({symbol: sympy.Integer(size)}) == sympy.true)
    except ZeroDivisionError:  # a remainder by a size that is 0 there
        return False


def _is_of_model(guard: Any) -> bool:
    """Whether Dynamo took a decision for Python code, instead of an operator while it ran."""
    place = guard.sloc.framework_loc
    if not hasattr(place, "filename"):
        return True
    runs_operator = place.name == run_node.__name__
    return bool(place.filename.startswith(_DYNAMO) and not runs_operator)


def _written(env: Any, expr: sympy.Expr) -> str | None:
    """The place that made a size a number, if a guard says so."""
    found: Iterable[Any] = (g for g in env.guards if isinstance(g.expr, sympy.Eq) and g.expr.free_symbols)
    for guard in found:
        if guard.expr.free_symbols <= expr.free_symbols:
            return f"forward() uses its batch size as a number ({_place(guard)})"
    return None


def _fixed(node: fx.Node, batch: int) -> str:
    return f"forward() uses the size {batch} of input {node.name!r} as a number"


def _place(guard: Any) -> str:
    """The user's line of a guard, as "file.py:12: if len(x) < 16:"; Dynamo gives "code  # path:12 in function"."""
    code, _, where = (guard.sloc.maybe_user_loc or "").rpartition("  # ")
    path, _, _ = where.rpartition(" in ")
    return f"{os.path.basename(path)}:{' ' + code.strip() if code else ''}" if path else f"{guard.expr}, line unknown"
