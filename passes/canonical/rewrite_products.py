"""Pass: write products of the batch with a two-dimensional parameter as linears."""

import operator
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from dpquant_compile.passes.fx_utils import dependents, op_name, read_attribute
from dpquant_compile.passes.runner import PassResult

__all__ = ["rewrite_products", "stored_weight", "swap_last"]


def rewrite_products(gm: fx.GraphModule) -> PassResult:
    """Write addmm, mm, matmul (and `@`), bmm, baddbmm, einsum and tensordot with a matrix parameter as `F.linear`.

        y = torch.addmm(b, x, w)               →   t = torch.t(w); y = F.linear(x, t, b)
        y = w @ x                              →   y = swap_last(F.linear(swap_last(x), w)).contiguous()
        y = torch.einsum("bti,oi->bto", x, w)  →   y = F.linear(x, w)

    A matrix parameter is a parameter of two dimensions, or such a one transposed or expanded to a batch of matrices.
    The transposed weights of linears are written as `torch.t` too. So the weight of a linear that a parameter holds is
    either that parameter or `torch.t` of it, see `stored_weight`, and nothing is copied.
    Requires: `functionalize`. Numerics: unchanged up to the order of float sums. Other products stay as they are.
    """
    batch = dependents(gm.graph, {n for n in gm.graph.find_nodes(op="placeholder") if "state" not in n.meta})
    modified = False
    for node in list(gm.graph.nodes):
        if node.target is F.linear:
            modified |= _turn_weight(gm, node)
            continue
        product = _product(gm, node, batch)
        if product is None:
            continue
        with gm.graph.inserting_before(node):
            result = product.written(gm.graph)
        for new in _made(result, set(node.all_input_nodes)):
            new.meta |= {k: node.meta[k] for k in ("source", "nn_module_stack", "stack_trace") if k in node.meta}
        batch.add(result)
        node.replace_all_uses_with(result)
        sources = node.all_input_nodes
        gm.graph.erase_node(node)
        _erase_unused(gm.graph, sources)
        modified = True
    return PassResult(gm, modified)


def stored_weight(weight: Any) -> tuple[Any, bool]:
    """The value that holds the weight of a linear, and whether the linear takes it transposed."""
    if isinstance(weight, fx.Node) and weight.target is torch.t:
        return weight.args[0], True
    return weight, False


def swap_last(x: Tensor) -> Tensor:
    """`x` with its last two dimensions exchanged; a vector stays as it is."""
    return x.transpose(-1, -2) if x.dim() > 1 else x


@dataclass(frozen=True)
class _Matrix:
    """A view of a matrix parameter: transposed, or one matrix for every member of a batch."""

    node: fx.Node
    turned: bool = False
    batched: bool = False


@dataclass(frozen=True)
class _Product:
    """A product over one dimension of `x` and one of a matrix.

    first      whether the matrix' first dimension is summed over, else its second
    source     the dimension of x that is summed over; None if it is the last
    place      where the matrix' other dimension lies in the result; None if it is the last
    swap       whether the matrix is the left factor: the last two dimensions are exchanged before and after
    bias       what is added, `beta` and `alpha` being factors of it and of the product
    """

    x: fx.Node
    matrix: _Matrix
    first: bool
    source: int | None = None
    place: int | None = None
    swap: bool = False
    bias: Any = None
    fits: bool = False
    beta: Any = 1
    alpha: Any = 1

    def written(self, graph: fx.Graph) -> fx.Node:
        """The product as nodes of the graph, at its point of insertion."""
        x, weight = self.x, self.matrix.node
        if self.matrix.turned != self.first:
            weight = graph.call_function(torch.t, (weight,))
        if self.source is not None:
            x = graph.call_method("movedim", (x, self.source, -1))
        if self.swap:
            x = graph.call_function(swap_last, (x,))
        own = self.bias if self.fits and not self.swap and (self.beta, self.alpha) == (1, 1) else None
        y = graph.call_function(F.linear, (x, weight, own))
        if self.swap:
            y = graph.call_method("contiguous", (graph.call_function(swap_last, (y,)),))
        if self.place is not None:
            y = graph.call_method("contiguous", (graph.call_method("movedim", (y, -1, self.place)),))
        if self.alpha != 1:
            y = graph.call_function(operator.mul, (y, self.alpha))
        if self.bias is not None and own is None:
            bias = self.bias if self.beta == 1 else graph.call_function(operator.mul, (self.bias, self.beta))
            y = graph.call_function(operator.add, (bias, y))
        return y


# Argument names by operation.
_ARGUMENTS = {
    "mm": ("input", "mat2"),
    "bmm": ("input", "mat2"),
    "matmul": ("input", "other"),
    "addmm": ("input", "mat1", "mat2"),
    "baddbmm": ("input", "batch1", "batch2"),
    "tensordot": ("a", "b", "dims"),
}
_OTHER_NAMES = {"self": "input", "tensor1": "input", "tensor2": "other"}


def _product(gm: fx.GraphModule, node: fx.Node, batch: Set[fx.Node]) -> _Product | None:
    name = _name(node)
    if name == "einsum":
        return _einsum(gm, node, batch)
    if name not in _ARGUMENTS:
        return None
    given = {_OTHER_NAMES.get(key, key): value for key, value in node.kwargs.items()}
    given |= dict(zip(_ARGUMENTS[name], node.args, strict=False))
    if name == "tensordot":
        return _tensordot(gm, given, batch)
    if not {*given} <= {*_ARGUMENTS[name], "beta", "alpha"}:
        return None
    left, right = (given.get(key) for key in _ARGUMENTS[name][-2:])
    extra: dict[str, Any] = {}
    if name in ("addmm", "baddbmm"):
        bias = given.get("input")
        extra = {"bias": bias, "beta": given.get("beta", 1), "alpha": given.get("alpha", 1)}
        value = _value(gm, bias)
        # One number for all outputs is no bias of a linear: its gradient would have the shape of one.
        extra["fits"] = name == "addmm" and value is not None and value.dim() == 1 and len(value) > 1
    for x, other, swap in ((left, right, False), (right, left, True)):
        matrix = _matrix(gm, other)
        if matrix is None or x not in batch or matrix.batched != (name in ("bmm", "baddbmm")):
            continue
        assert isinstance(x, fx.Node)
        return _Product(x, matrix, first=not swap, swap=swap, **extra)
    return None


def _tensordot(gm: fx.GraphModule, given: Mapping[str, Any], batch: Set[fx.Node]) -> _Product | None:
    x, matrix, dims = given.get("a"), _matrix(gm, given.get("b")), given.get("dims", 2)
    if matrix is None or matrix.batched or not isinstance(x, fx.Node) or x not in batch:
        return None
    if dims == 1:
        return _Product(x, matrix, first=True)
    if not isinstance(dims, list | tuple) or len(dims) != 2:
        return None
    mine, its = ([part] if isinstance(part, int) else list(part) for part in dims)
    if len(mine) != 1 or len(its) != 1 or not isinstance(mine[0], int) or its[0] not in (0, 1, -1, -2):
        return None
    return _Product(x, matrix, first=its[0] in (0, -2), source=None if mine[0] == -1 else mine[0])


def _einsum(gm: fx.GraphModule, node: fx.Node, batch: Set[fx.Node]) -> _Product | None:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or node.kwargs:
        return None
    inputs, arrow, output = equation.replace(" ", "").replace("...", ".").partition("->")
    terms = inputs.split(",")
    if not arrow:  # then the output has what occurs once, in alphabetical order after an ellipsis
        once = (letter for letter in {*inputs} - {",", "."} if inputs.count(letter) == 1)
        output = "." * ("." in inputs) + "".join(sorted(once))
    for own, other in ((0, 1), (1, 0)):
        x, matrix = operands[own], _matrix(gm, operands[other])
        if matrix is None or matrix.batched or not isinstance(x, fx.Node) or x not in batch:
            continue
        places = _places(terms[own], terms[other], output)
        if places is not None:
            return _Product(x, matrix, *places)
    return None


def _places(x: str, matrix: str, output: str) -> tuple[bool, int | None, int | None] | None:
    """`first`, `source` and `place` of an einsum of x with a matrix; None if it is no product of that form."""
    if any(len({*term}) < len(term) for term in (x, matrix, output)) or len(matrix) != 2 or "." in matrix:
        return None
    summed = [letter for letter in matrix if letter in x and letter not in output]
    kept = [letter for letter in matrix if letter not in x and letter in output]
    if len(summed) != 1 or len(kept) != 1 or x.replace(summed[0], "") != output.replace(kept[0], ""):
        return None
    if x.find(".") > 0 or output.find(".") > 0:
        return None  # positions are counted from the end, which only a leading ellipsis leaves known
    source, place = x.index(summed[0]) - len(x), output.index(kept[0]) - len(output)
    return matrix[0] == summed[0], None if source == -1 else source, None if place == -1 else place


def _turn_weight(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Write the weight of a linear in one of the two forms, where it is a view of a matrix parameter."""
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    matrix = _matrix(gm, weight)
    if matrix is None or matrix.batched or stored_weight(weight)[0] is matrix.node:
        return False
    assert isinstance(weight, fx.Node)
    with gm.graph.inserting_before(node):
        turned = gm.graph.call_function(torch.t, (matrix.node,)) if matrix.turned else matrix.node
    turned.meta = turned.meta or dict(weight.meta)
    node.replace_input_with(weight, turned)
    _erase_unused(gm.graph, [weight])
    return True


def _matrix(gm: fx.GraphModule, node: Any) -> _Matrix | None:
    """What `node` is, if it is a matrix parameter or a view of one."""
    if not isinstance(node, fx.Node):
        return None
    value = _value(gm, node)
    if value is not None:
        return _Matrix(node) if isinstance(value, nn.Parameter) and value.dim() == 2 else None
    source = _matrix(gm, node.args[0]) if node.args and node.op in ("call_function", "call_method") else None
    if source is None:
        return None
    name, args = _name(node), _plain_arguments(node)
    if _turns(name, args, source.batched):
        return _Matrix(source.node, not source.turned, source.batched)
    if name == "unsqueeze" and args == [0] and not source.batched:
        return _Matrix(source.node, source.turned, batched=True)
    if name == "expand" and len(args) == 3 and all(_keeps(gm, source, size, d) for d, size in enumerate(args[1:])):
        return _Matrix(source.node, source.turned, batched=True)
    return None


def _turns(name: str, args: list[Any], batched: bool) -> bool:
    if name in ("t", "T"):
        return not batched and not args
    if name == "mT":
        return not args
    last = {1, 2} if batched else {0, 1}
    if name in ("transpose", "swapaxes", "swapdims"):
        return len(args) == 2 and all(isinstance(d, int) for d in args) and {d % (2 + batched) for d in args} == last
    return name == "permute" and [d % (2 + batched) if isinstance(d, int) else d for d in args] == (
        [0, 2, 1] if batched else [1, 0]
    )


def _keeps(gm: fx.GraphModule, source: _Matrix, size: Any, dim: int) -> bool:
    """Whether an `expand` to this size leaves a dimension of a matrix as it is."""
    value = _value(gm, source.node)
    assert value is not None
    return isinstance(size, int) and size in (-1, value.shape[1 - dim if source.turned else dim])


def _plain_arguments(node: fx.Node) -> list[Any]:
    """The arguments of a view after the tensor; sizes may be given one by one or in a row."""
    args = [*node.args[1:], *node.kwargs.values()]
    if node.target is getattr:
        return args[1:]
    return list(args[0]) if len(args) == 1 and isinstance(args[0], list | tuple) else args


def _name(node: fx.Node) -> str:
    """The name of a torch operation, however it is called; empty for what is none."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    if node.target is getattr:
        return str(node.args[1])
    if isinstance(node.target, OpOverload):
        return node.target._schema.name.partition("::")[2] if node.target.namespace == "aten" else ""
    if node.target is operator.matmul or str(getattr(node.target, "__module__", "")) in ("torch", "torch.functional"):
        return op_name(node)
    return ""


def _value(gm: fx.GraphModule, node: Any) -> Tensor | None:
    """The tensor that a node reads from the model."""
    if not isinstance(node, fx.Node):
        return None
    value = read_attribute(gm, node.target) if node.op == "get_attr" else None
    if node.op == "placeholder" and "state" in node.meta:
        value = node.meta.get("example_value")
    return value if isinstance(value, Tensor) else None


def _made(result: fx.Node, before: Set[fx.Node]) -> list[fx.Node]:
    """The nodes that lead from `before` to `result`."""
    found, stack = list[fx.Node](), [result]
    while stack:
        node = stack.pop()
        if node not in before and node not in found and node.op in ("call_function", "call_method"):
            found.append(node)
            stack.extend(node.all_input_nodes)
    return found


def _erase_unused(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Erase views of parameters, and reads of them, that nothing uses any more."""
    for node in nodes:
        if not node._erased and not node.users and node.op in ("call_function", "call_method", "get_attr"):
            sources = node.all_input_nodes
            graph.erase_node(node)
            _erase_unused(graph, sources)
