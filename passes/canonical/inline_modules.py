"""Pass: replace calls of torch.nn modules by operations on the model's own parameters."""

import copy
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from dpquant_compile.errors import CaptureError
from dpquant_compile.passes.capture import Tracer, own_hooks
from dpquant_compile.passes.runner import PassResult

__all__ = ["has_hooks", "inline_modules"]


def inline_modules(gm: fx.GraphModule) -> PassResult:
    """Replace each module call by the operations of its forward, so that both ways of capture end in one form.

        y = self.conv1(x)      →   y = F.conv2d(x, self.conv1.weight, self.conv1.bias, (1, 1), …)
        y = self.relu(x)       →   y = F.relu(x, inplace=True)

    A module stays one call if it has hooks, which must still be called, or if fx cannot trace it (an LSTM).
    Requires: parameters are initialised. Numerics: unchanged.
    """
    modified = False
    for node in list(gm.graph.nodes):
        if node.op != "call_module":
            continue
        module = gm.get_submodule(str(node.target))
        _check_initialised(str(node.target), module)
        body = None if has_hooks(module) else _trace(module, len(node.args) + len(node.kwargs))
        if body is not None and _inline(gm.graph, node, body):
            modified = True
    return PassResult(gm, modified)


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its forward and that of its children."""
    return any(own_hooks(child) for child in module.modules())


class _InsideTracer(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


def _trace(module: nn.Module, given: int) -> fx.Graph | None:
    target, fixed = module, None
    if isinstance(module, _ConvTransposeNd) and given == 1:
        fixed = {"output_size": None}  # forward() branches on it
    if isinstance(module, _NormBase):
        # Its only control flow on the input is a check of the number of dimensions.
        target = copy.copy(module)
        target.__dict__["_check_input_dim"] = lambda _: None
        if isinstance(module, _InstanceNorm):  # it also checks for a batch, which a compiled model always has
            target.__class__ = type("Batched", (type(module),), {"forward": type(module)._apply_instance_norm})
    if type(module) in _CELLS:
        # forward() branches on whether there is a batch, which a compiled model always has, and a state.
        target, fixed = copy.copy(module), {"hx": None} if given == 1 else None
        target.__class__ = type("Batched", (type(module),), {"forward": _cell_forward})
    try:
        return _InsideTracer().trace(target, fixed)
    except Exception:  # the module's code may raise anything on a Proxy; the call then stays as it is
        return None


_CELLS = (nn.RNNCell, nn.LSTMCell, nn.GRUCell)


def _cell_forward(self: nn.RNNCellBase, input: Any, hx: Any = None) -> Any:
    """forward() of a recurrent cell on inputs with a batch."""
    if hx is None:
        hx = input.new_zeros((input.size(0), self.hidden_size))
        hx = (hx, hx) if isinstance(self, nn.LSTMCell) else hx
    kind = "lstm" if isinstance(self, nn.LSTMCell) else "gru"
    if isinstance(self, nn.RNNCell):
        kind = f"rnn_{self.nonlinearity}"
    return getattr(torch, f"{kind}_cell")(input, hx, self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)


def _inline(graph: fx.Graph, node: fx.Node, body: fx.Graph) -> bool:
    inputs = [inner for inner in body.nodes if inner.op == "placeholder"]
    given = dict(zip((str(inner.target) for inner in inputs), node.args, strict=False)) | node.kwargs
    mapping: dict[fx.Node, Any] = {}
    for inner in inputs:
        name = str(inner.target)
        if name.startswith("*") or (name not in given and not inner.args):
            return False
        mapping[inner] = given[name] if name in given else inner.args[0]
    before = set(graph.nodes)
    with graph.inserting_before(node):
        result = graph.graph_copy(body, mapping)
    for new in graph.nodes:
        if new not in before:
            if new.op == "get_attr":
                new.target = f"{node.target}.{new.target}"
                new._rename(str(new.target).replace(".", "_"))
            new.meta.pop("stack_trace", None)  # its lines are torch.nn's; readers need the model's
            new.meta |= {
                key: node.meta[key] for key in ("source", "nn_module_stack", "stack_trace") if key in node.meta
            }
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.call_function(_identity, (result,)))
    graph.erase_node(node)
    return True


def _identity(value: Any) -> Any:
    return value


def _check_initialised(name: str, module: nn.Module) -> None:
    if any(is_lazy(tensor) for tensor in module.parameters()):
        raise CaptureError(
            f"module {name!r} ({type(module).__name__}) has parameters without a shape: run the lazy model once on a "
            "batch, then compile it"
        )
