"""Find code that a graph keeps as one call, so that a proof over single operators does not see what it does.

`torch.fx.wrap` and `torch.compiler.allow_in_graph` keep a function as one call; so does a module that cannot be traced.
Running such code shows the operators of one forward without gradients. It does not show a custom backward, hooks on
tensors, or what the code does when gradients are on. So only known code counts as proved.
"""

import os
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_leaves

from dpquant_compile.passes.batch.own_rules import own_rule
from dpquant_compile.passes.fx_utils import package_of, read_attribute

__all__ = ["opaque_code"]

_PACKAGES = {"torch", "operator", "_operator", "math", "builtins", "dpquant_compile"}
_FOLDERS = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (os.path.dirname(torch.__file__), os.path.join(os.path.dirname(os.path.realpath(__file__)), "../.."))
)
# Functions of other libraries that were inspected: they use torch operators, the same with gradients on and off.
_READ = {"torchvision.ops.stochastic_depth.stochastic_depth"}
# Operators over graphs whose bodies run, and are differentiated, operator by operator.
_TRANSPARENT = {"tag_activation_checkpoint"}
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}


def opaque_code(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, str]]:
    """Each node of a graph, and of the graphs that it calls, that runs code unknown to the proof, with a description.

    Guarantee: where nothing is found, the graph runs only operators of torch, and autograd their own derivatives.
    """
    for node in gm.graph.nodes:
        found = _reason(gm, node)
        if found is not None:
            yield node, found
        body = _body(gm, node)
        if body is not None:
            yield from opaque_code(body)


def _body(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    if node.op not in ("get_attr", "call_module"):
        return None
    value = read_attribute(gm, node.target)
    return value if isinstance(value, fx.GraphModule) else None


def _reason(gm: fx.GraphModule, node: fx.Node) -> str | None:
    if node.op == "call_function" and (reason := _of_function(node.target)) is not None:
        return reason
    if node.op == "call_method" and node.target in _HOOKS:
        return "a hook on a tensor may do anything with the gradients of the batch"
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        for child in module.modules():
            if not isinstance(child, fx.GraphModule) and not _is_torch_module(child):
                return (
                    f"{type(child).__name__} stays one call that is not looked into, and may have a backward of its own"
                )
    if any(isinstance(leaf, _CODE) for leaf in tree_leaves((node.args, node.kwargs))):
        return "a function is an argument, and what it does is not known"
    return None


_CODE = (types.FunctionType, types.MethodType, partial)


def _of_function(target: Any) -> str | None:
    if isinstance(target, OpOverload | OpOverloadPacket):
        name = target.name() if isinstance(target, OpOverload) else target._qualified_op_name
        known = name.split("::")[0] in ("aten", "prims") or own_rule(target) is not None
        if known:
            return None
        return (
            "no rule follows the batch through an operator that is not PyTorch's. Fix: if it is yours, give it one by "
            "dpquant_compile.register_batch_rule, and test the rule by check_batch_rule"
        )
    if isinstance(target, HigherOrderOperator):
        name = target.name()
        if "autograd_function_apply" in name:
            return "an autograd.Function has a backward of its own"
        return None if name in _TRANSPARENT else "no rule follows the batch through this operator"
    if _is_known(target):
        return None
    name = getattr(target, "__qualname__", None) or repr(target)
    return f"{name}() stays one call that is not looked into, and may have a backward of its own or hooks"


def _is_known(target: Any) -> bool:
    """Whether a callable is torch's, the standard library's or this library's own, whatever name it was given."""
    if isinstance(target, types.FunctionType):
        if f"{target.__module__}.{target.__qualname__}" in _READ:
            return True
        # Check its file too: a decorator such as torch.no_grad() wraps a user's function into one of torch's.
        inside = os.path.realpath(target.__code__.co_filename).startswith(_FOLDERS)
        within = getattr(target, "__wrapped__", None)
        return inside and package_of(target) in _PACKAGES and (within is None or _is_known(within))
    if isinstance(target, type):
        return package_of(target) in _PACKAGES and not issubclass(target, torch.autograd.Function)
    if isinstance(target, types.MethodDescriptorType | types.WrapperDescriptorType | types.GetSetDescriptorType):
        return package_of(target.__objclass__) in _PACKAGES
    return isinstance(target, types.BuiltinFunctionType) and package_of(target) in _PACKAGES


def _is_torch_module(module: nn.Module) -> bool:
    return package_of(type(module)) == "torch" and "forward" not in vars(module) and _is_known(type(module).forward)
