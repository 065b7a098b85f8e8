"""Pass: write functions of torch that are one operator as several that have rules."""

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from dpquant_compile.passes.fx_utils import read_attribute
from dpquant_compile.passes.runner import PassResult

__all__ = ["expand_functions"]


def expand_functions(gm: fx.GraphModule) -> PassResult:
    """Replace bags of words, `F.bilinear`, `F.conv_tbc` and recurrent cells by other functions that compute the same.

        bag = F.embedding_bag(words, table)   →   embedding = F.embedding(words, table); mean = embedding.mean(1)
        y = F.bilinear(a, b, weight, bias)    →   einsum = torch.einsum('...i,oij,...j->...o', a, weight, b); …
        y = F.conv_tbc(x, weight, bias, 1)    →   conv1d = F.conv1d(x.permute(1, 2, 0), weight.permute(2, 1, 0), …); …
        h = torch.rnn_tanh_cell(x, h, w_ih, …)   →   h = torch.tanh(F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh))

    So a bag's table is looked up like an embedding's, convolutions and cells are sites, and batch rules see plain
    operators.
    A bag stays as it is, and has no batch rule, where its samples are not the rows of a matrix (`offsets`), or where
    it changes its table or gradients by what is in the batch (`max_norm`, `scale_grad_by_freq`).
    Requires: `inline_modules`. Numerics: unchanged up to the order of sums; of equal largest words, `mode="max"` gives
    the gradient to one.
    """
    modified = False
    for node in reversed(list(gm.graph.nodes)):  # what reads a cell's state comes before the cell
        make = _EXPANSIONS.get(node.target) if node.op == "call_function" else None
        body = make(gm, _bound(node)) if make is not None and _taken_apart(node) else None
        if body is not None:
            _inline(gm.graph, node, *body)
            modified = True
    return PassResult(gm, modified)


_Body = tuple[Callable[..., Any], list[Any]]  # a function of tensors, and the nodes that are its arguments
_Arguments = Mapping[str, Any]


def _taken_apart(node: fx.Node) -> bool:
    """Whether only parts of a result of several tensors are read."""
    if node.target is not torch.lstm_cell:
        return True
    return all(user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users)


def _bound(node: fx.Node) -> _Arguments:
    bound = _SIGNATURES[node.target].bind(*node.args, **node.kwargs)  # type: ignore[index]
    bound.apply_defaults()
    return bound.arguments


def _embedding_bag(gm: fx.GraphModule, given: _Arguments) -> _Body | None:
    mode, padding, weights = given["mode"], given["padding_idx"], given["per_sample_weights"]
    plain = given["offsets"] is None and given["max_norm"] is None and not given["scale_grad_by_freq"]
    if padding is not None and padding < 0:
        table = given["weight"]
        if table.op != "get_attr":
            return None  # how many words it has is not known
        padding += len(read_attribute(gm, table.target))
    if not plain or mode not in ("sum", "mean", "max") or not all(isinstance(given[n], fx.Node) for n in _BAG):
        return None

    def bag(words: Tensor, table: Tensor, scales: Tensor | None = None) -> Tensor:
        rows = F.embedding(words, table)
        if scales is not None:
            rows = rows * scales.unsqueeze(-1)
        if padding is None:
            return rows.max(1)[0] if mode == "max" else rows.mean(1) if mode == "mean" else rows.sum(1)
        kept = words.ne(padding).unsqueeze(-1)
        count = kept.sum(1)
        if mode == "max":
            largest = rows.masked_fill(kept.logical_not(), -torch.inf).max(1)[0]
            return largest.masked_fill(count.eq(0), 0.0)
        total = rows.masked_fill(kept.logical_not(), 0.0).sum(1)
        return total / count.clamp(min=1) if mode == "mean" else total

    return bag, [given["input"], given["weight"], *([weights] if weights is not None else [])]


_BAG = ("input", "weight")


def _bilinear(gm: fx.GraphModule, given: _Arguments) -> _Body | None:
    def product(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = torch.einsum("...i,oij,...j->...o", a, weight, b)
        return y if bias is None else y + bias

    tensors = [given["input1"], given["input2"], given["weight"]]
    return product, tensors if given["bias"] is None else [*tensors, given["bias"]]


def _conv_tbc(gm: fx.GraphModule, given: _Arguments) -> _Body | None:
    def conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv1d(x.permute(1, 2, 0), weight.permute(2, 1, 0), bias, padding=given["pad"]).permute(2, 0, 1)

    return conv, [given["input"], given["weight"], given["bias"]]


def _cell(function: Callable[..., Any]) -> Callable[[fx.GraphModule, _Arguments], _Body | None]:
    def expand(gm: fx.GraphModule, given: _Arguments) -> _Body | None:
        state = given["hx"] if isinstance(given["hx"], tuple | list) else [given["hx"]]
        if function is _lstm and len(state) == 1:  # a state in one piece, as another cell returns it
            with gm.graph.inserting_after(state[0]):
                state = [gm.graph.call_function(operator.getitem, (state[0], i)) for i in range(2)]
        count = len(state)

        def cell(x: Tensor, *rest: Tensor) -> Any:
            biases: Any = rest[count + 2 :] or (None, None)
            weights = rest[count : count + 2]
            return function(F.linear(x, weights[0], biases[0]), F.linear(rest[0], weights[1], biases[1]), *rest[:count])

        biases = [] if given["b_ih"] is None else [given["b_ih"], given["b_hh"]]
        return cell, [given["input"], *state, given["w_ih"], given["w_hh"], *biases]

    return expand


def _lstm(a: Tensor, b: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    gates = (a + b).chunk(4, 1)
    c = torch.sigmoid(gates[1]) * c + torch.sigmoid(gates[0]) * torch.tanh(gates[2])
    return torch.sigmoid(gates[3]) * torch.tanh(c), c


def _gru(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    given, kept = a.chunk(3, 1), b.chunk(3, 1)
    update = torch.sigmoid(given[1] + kept[1])
    new = torch.tanh(given[2] + torch.sigmoid(given[0] + kept[0]) * kept[2])
    return (h - new) * update + new


def _rnn_tanh(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    return torch.tanh(a + b)


def _rnn_relu(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    return torch.relu(a + b)


def _of_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> None:
    """The signature of builtins, which have none."""


def _of_bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> None:
    """The signature of a builtin, which has none."""


def _of_conv_tbc(input: Any, weight: Any, bias: Any, pad: Any = 0) -> None:
    """The signature of a builtin, which has none."""


_EXPANSIONS: dict[Any, Callable[[fx.GraphModule, _Arguments], _Body | None]] = {
    F.embedding_bag: _embedding_bag,
    F.bilinear: _bilinear,
    F.conv_tbc: _conv_tbc,
    torch.rnn_tanh_cell: _cell(_rnn_tanh),
    torch.rnn_relu_cell: _cell(_rnn_relu),
    torch.gru_cell: _cell(_gru),
    torch.lstm_cell: _cell(_lstm),
}
_SIGNATURES = {
    F.embedding_bag: inspect.signature(F.embedding_bag),
    F.bilinear: inspect.signature(_of_bilinear),
    F.conv_tbc: inspect.signature(_of_conv_tbc),
    **dict.fromkeys(
        (torch.rnn_tanh_cell, torch.rnn_relu_cell, torch.gru_cell, torch.lstm_cell), inspect.signature(_of_cell)
    ),
}


def _inline(graph: fx.Graph, node: fx.Node, function: Callable[..., Any], values: list[Any]) -> None:
    body = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(body)
    inputs = [body.placeholder(f"value_{i}") for i in range(len(values))]
    made = function(*(fx.Proxy(inner, tracer) for inner in inputs))
    mapping: dict[fx.Node, Any] = dict(zip(inputs, values, strict=True))
    before = set(graph.nodes)
    with graph.inserting_before(node):
        graph.graph_copy(body, mapping)
    if isinstance(made, fx.Proxy):
        node.replace_all_uses_with(mapping[made.node])
    else:
        for user in list(node.users):
            user.replace_all_uses_with(mapping[made[user.args[1]].node])
            graph.erase_node(user)
    for new in graph.nodes:
        if new not in before:
            new.meta = {
                key: node.meta[key]
                for key in ("origin", "source", "nn_module_stack", "stack_trace")
                if key in node.meta
            }
    graph.erase_node(node)
