"""Pass: remove in-place operations on the values that flow through the graph."""

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from dpquant_compile.errors import InplaceAliasError
from dpquant_compile.passes.fx_utils import node_source
from dpquant_compile.passes.runner import PassResult

__all__ = ["functionalize", "mutated_input", "root_of"]

_OPERATORS: dict[Any, Callable[..., Any]] = {
    getattr(operator, f"i{name}"): getattr(operator, plain)
    for name, plain in {
        **{
            n: n
            for n in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "xor")
        },
        "and": "and_",
        "or": "or_",
    }.items()
}

# Operations whose result may share memory with their first argument.
_VIEWS = {
    *"view view_as reshape reshape_as transpose permute t swapaxes swapdims movedim moveaxis squeeze unsqueeze".split(),
    *"flatten unflatten expand expand_as narrow select chunk split tensor_split unbind diagonal unfold".split(),
    *"detach contiguous to type type_as cpu cuda float double half bfloat16 real imag getitem getattr".split(),
    *"view_as_real view_as_complex adjoint ravel broadcast_to hsplit vsplit dsplit split_with_sizes as_strided".split(),
    *"atleast_1d atleast_2d atleast_3d squeeze_ unsqueeze_ swapaxes mT mH _identity resolve_conj resolve_neg".split(),
}
# In eval mode these return their input, so they count as views.
_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
# Operations that return several new tensors.
_TUPLES = {"topk", "sort", "max", "min", "median", "mode", "kthvalue", "aminmax", "std_mean", "var_mean", "tuple"}
_STATE_ONLY = {"requires_grad_", "share_memory_", "retain_grad"}


def functionalize(gm: fx.GraphModule) -> PassResult:
    """Make each in-place operation return a new value, which later readers then read.

        add_ = x.add_(y); z = x * 2      →   add = x.add(y); z = add * 2
        F.relu(x, inplace=True)          →   F.relu(x, inplace=False)

    Writes to the model's own parameters and buffers stay: they are state, and AOTAutograd keeps them.
    Requires: `inline_modules`. Ensures: no other in-place operation is left. Numerics: unchanged.
    Raises `InplaceAliasError` where a value is changed through a view while another name of the same memory is read
    later: renaming would then change what the model computes.
    """
    modified = False
    for node in list(gm.graph.nodes):
        target = mutated_input(node)
        if target is None or _is_state(root_of(target)):
            continue
        _check_aliases(node, target)
        result = _rewrite(node, target)
        result.meta["inplace_of"] = target.name  # track_batch checks that the dtype stays the target's
        _rename_later_uses(target, result)
        modified = True
    return PassResult(gm, modified)


def _is_state(node: fx.Node) -> bool:
    # Each call of forward() makes new tensors from plain numbers, though the trace keeps one of them.
    return node.op == "get_attr" and not str(node.target).startswith("_const._tensor_constant")


def mutated_input(node: fx.Node) -> fx.Node | None:
    """The value that `node` changes in place, or None if it changes none."""
    first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if node.op == "call_method":
        name = str(node.target)
        changes = name.endswith("_") and not name.endswith("__") and name not in _STATE_ONLY
        return first if changes or name == "__setitem__" else None
    if node.op != "call_function":
        return None
    if node.target in _OPERATORS or node.target is operator.setitem:
        return first
    out = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        return out
    name = str(getattr(node.target, "__name__", ""))
    if name.endswith("_") and not name.endswith("__") and (hasattr(torch.Tensor, name) or hasattr(F, name)):
        return first
    return first if _inplace_argument(node) else None


def _inplace_argument(node: fx.Node) -> bool:
    if "inplace" in node.kwargs:
        return node.kwargs["inplace"] is True
    if getattr(node.target, "__module__", None) != F.__name__ or not inspect.isfunction(node.target):
        return False
    names = list(inspect.signature(node.target).parameters)
    return "inplace" in names and len(node.args) > names.index("inplace") and node.args[names.index("inplace")] is True


def _rewrite(node: fx.Node, target: fx.Node) -> fx.Node:
    """Replace `node` by a functional form; returns the node that holds the new value of `target`."""
    if node.op == "call_function" and node.target in _OPERATORS:
        node.target = _OPERATORS[node.target]
        return node
    if node.op == "call_function" and _inplace_argument(node):
        assert callable(node.target)
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        bound.arguments["inplace"] = False
        node.args, node.kwargs = bound.args, bound.kwargs
        return node
    if isinstance(node.kwargs.get("out"), fx.Node):
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "out"}
        return node
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    plain = str(name).removesuffix("_")
    if (
        node.target is not operator.setitem
        and name != "__setitem__"
        and plain != "copy"
        and hasattr(torch.Tensor, plain)
    ):
        if node.op == "call_function":
            node.op = "call_method"
        node.target = plain
        return node
    if node.op == "call_function" and hasattr(F, plain) and node.target is getattr(F, str(name), None):
        node.target = getattr(F, plain)
        return node
    # Without a functional form: change a new copy, which nothing else reads.
    with node.graph.inserting_before(node):
        fresh = node.graph.call_method("clone", (target,))
        fresh.meta = {"source": node.meta.get("source"), "nn_module_stack": node.meta.get("nn_module_stack")}
    node.replace_input_with(target, fresh)
    return fresh


def _rename_later_uses(target: fx.Node, result: fx.Node) -> None:
    position = {n: i for i, n in enumerate(target.graph.nodes)}
    target.replace_all_uses_with(result, lambda user: user is not result and position[user] > position[result])


def _is_view(node: fx.Node) -> bool:
    if node.op == "call_method":
        return str(node.target) in _VIEWS
    name = str(getattr(node.target, "__name__", ""))
    if name == "getitem" and node.args and isinstance(node.args[0], fx.Node) and _op(node.args[0]) in _TUPLES:
        return False
    if node.op == "call_function" and name in _DROPOUTS:
        return node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True) is False
    return node.op == "call_function" and name in _VIEWS


def _op(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", ""))


def root_of(node: fx.Node) -> fx.Node:
    """The value whose memory `node` may share: behind views, and behind in-place operations, which return it."""
    while True:
        behind = mutated_input(node)
        if behind is None and _is_view(node) and node.args and isinstance(node.args[0], fx.Node):
            behind = node.args[0]
        if behind is None:
            return node
        node = behind


def _check_aliases(node: fx.Node, target: fx.Node) -> None:
    """Refuse to rename if another name of the changed memory is read later."""
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    root = root_of(target)
    for other in node.graph.nodes:
        if other is target or other is node or root_of(other) is not root or order[other] > order[node]:
            continue
        written_back = min((order[user] for user in other.users if _writes_back(user, node)), default=len(order))
        readers = [user for user in other.users if order[node] < order[user] < written_back]
        if readers:
            raise InplaceAliasError(
                f"node {node.name!r} ({node_source(node) or 'source line unknown'}) changes {target.name!r} in place, "
                f"but {other.name!r} shares its memory and is read later by {readers[0].name!r} "
                f"({node_source(readers[0]) or 'source line unknown'}). Fix: use the out-of-place form "
                "(x = x + y instead of x += y), or clone() before the change."
            )


def _writes_back(user: fx.Node, node: fx.Node) -> bool:
    """Whether this is the `x[i] = …` half of `x[i] += y`, which itself carries the change back to x."""
    return user.target is operator.setitem and len(user.args) == 3 and user.args[2] is node
