"""Capture: from a user's module to one fx graph over the user's own parameters."""

import inspect
import operator
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from dpquant_compile.errors import CaptureError
from dpquant_compile.passes.batch.batch_guards import BatchGuards, read_batch_guards
from dpquant_compile.passes.batch.track_batch import batch_size
from dpquant_compile.passes.fx_utils import copy_graph, graph_module_over, node_source, read_attribute, user_frames
from dpquant_compile.passes.generation_cache import without_cache
from dpquant_compile.passes.gradient_hooks import asks_for_gradients, without_gradient_requests
from dpquant_compile.passes.recorded_outputs import lacks_recorders, with_recorders
from dpquant_compile.passes.snapshot import Change, Snapshot, Writes

__all__ = ["NO_TRACE", "SITE_MODULES", "TRANSPOSED_MODULES", "Tracer", "capture_dynamo", "capture_fx", "own_hooks"]

# fx changes nn.Module for all threads while it traces, and what others call meanwhile would be in the graph. Held by a
# trace, and by a thread of this library while it calls modules.
NO_TRACE = threading.RLock()

SITE_MODULES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
TRANSPOSED_MODULES = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_WHOLE = (*SITE_MODULES, *TRANSPOSED_MODULES, nn.MultiheadAttention)


class _Proxy(fx.Proxy):
    """A proxy that records `x += y` and `x[i] = y` as in-place operations.

    Plain fx traces `x += y` as `x + y`, which is another program when x has a second name.
    """

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


def _record_inplace(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


for _name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split():
    setattr(_Proxy, f"__i{_name}__", _record_inplace(getattr(operator, f"i{_name}")))


class Tracer(fx.Tracer):
    """fx tracing that keeps source lines and writes to state, and traces into containers that hold sites."""

    record_stack_traces = True
    proxy_buffer_attributes = True

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        self._region = _region()
        with NO_TRACE:
            return super().trace(root, concrete_args)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _region() != self._region:
            # fx records operations, not the regions they run in; Dynamo does.
            raise CaptureError("forward() switches gradients or autocast on or off for a part of the model")
        return super().create_node(*args, **kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if own_hooks(m):
            return True  # it stays one call, so that its hooks are still called
        if isinstance(m, _WHOLE):
            # A subclass with its own forward (weight standardisation, LoRA) is traced through.
            return type(m).__module__.startswith("torch.nn")
        if any(isinstance(child, _WHOLE) for child in m.modules()):
            return False
        return super().is_leaf_module(m, module_qualified_name)


def own_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its forward."""
    after = any(not asks_for_gradients(hook) for hook in module._forward_hooks.values())
    return after or any((module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def _region() -> tuple[Any, ...]:
    devices = ("cpu", "cuda")
    return (torch.is_grad_enabled(), *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices))


def capture_fx(model: nn.Module, given: Collection[str] = ()) -> fx.GraphModule | CaptureError:
    """Trace `model` symbolically, without an input.

    Returns the graph. If fx cannot trace the model (control flow on values, unpacked arguments), returns the reason as
    an error: the caller keeps it until it has an input that Dynamo can use. The graph takes the arguments of forward()
    that have no default, and those in `given`; the others are fixed at their defaults.
    Numerics: unchanged. Ensures: node.meta["source"] where known, node.meta["origin"].
    """
    if isinstance(model, fx.GraphModule):
        # Already a graph (exported, or traced by the user): keep it, and run it over the same modules.
        return _finish(model, copy_graph(model.graph))
    before, drawn, writes = Snapshot(model), torch.random.get_rng_state(), Writes()
    try:
        root = _with_arguments(model, given)
        # With gradients on, whatever the caller's mode: else a region without gradients would not show.
        with torch.enable_grad(), writes, without_cache(model):
            graph = Tracer().trace(root)
    except Exception as error:  # the model's own code may raise anything when it meets a Proxy
        writes.undo()
        before.restore()
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return CaptureError(f"torch.fx cannot trace {type(model).__name__}: {reason}")
    # Tensors that forward() makes from plain numbers, or finds outside of modules.
    constants = {name: value for name, value in vars(root).items() if name.startswith("_tensor_constant")}
    for name in constants:
        del root.__dict__[name]
    wrote, change = writes.undo(), before.restore()
    if not torch.equal(drawn, torch.random.get_rng_state()):
        torch.random.set_rng_state(drawn)
        return CaptureError(
            f"forward() of {type(model).__name__} draws random numbers, which a trace would do only once"
        )
    if change.drew is not None:
        return CaptureError(
            f"forward() of {type(model).__name__} draws from {change.drew}, which a trace would do only once"
        )
    if change.assigned is not None or wrote:
        what = change.assigned or "a tensor"
        return CaptureError(f"forward() of {type(model).__name__} assigns {what}, which a trace would do only once")
    for node in graph.nodes:
        if _is_opaque(node):
            name = getattr(node.target, "__qualname__", node.target)
            return CaptureError(f"torch.fx keeps {name}(), which reads parameters, as one opaque call")
    outside = {
        name: re.sub(r"\W+", "_", f"{before.label(value) or 'tensor'} {i}")
        for i, (name, value) in enumerate(constants.items())
        if not writes.made(value)
    }
    for node in graph.nodes:
        if node.op == "get_attr" and node.target in outside:
            node.target = outside[node.target]  # state: the next call finds what forward() writes into it
    return _finish(model, graph, {outside.get(name, name): value for name, value in constants.items()})


def _finish(model: nn.Module, graph: fx.Graph, constants: Mapping[str, Any] | None = None) -> fx.GraphModule:
    """A stamped graph module over `model`; tensors that are neither parameters nor buffers are in a holder."""
    holder, owned = nn.Module(), {*dict(model.named_parameters(remove_duplicate=False))}
    owned |= {*dict(model.named_buffers(remove_duplicate=False)), *dict(model.named_modules(remove_duplicate=False))}
    for node in graph.nodes:
        if node.op == "get_attr" and node.target not in owned:
            name = str(node.target).replace(".", "_")
            value = (constants or {}).get(str(node.target))
            value = read_attribute(model, node.target) if value is None else value
            holder.register_buffer(name, value, persistent=False)
            node.target = f"_const.{name}"
    gm = graph_module_over(model, fx.Graph(), type(model).__name__)
    if holder._buffers:
        gm.__dict__["_modules"]["_const"] = holder
    gm.graph = graph
    return _stamp(gm, "capture_fx")


def _with_arguments(model: nn.Module, given: Collection[str]) -> nn.Module:
    """A module over the same children and tensors whose forward takes the required arguments and the given ones.

    A trace would pass a placeholder to every optional argument, and `if mask is not None` would always be true.
    """
    parameters = list(inspect.signature(model.forward).parameters.values())
    if all(p.default is p.empty for p in parameters):
        return model
    defaults = {f"default_{p.name}": p.default for p in parameters if p.name in given and p.default is not p.empty}
    parameters = [p.replace(default=p.empty) if p.name in given else p for p in parameters]
    wanted = [p for p in parameters if p.default is p.empty]
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in wanted):
        raise CaptureError("forward() mixes optional arguments with *args or **kwargs")
    names = [p.name for p in wanted]
    by_name = {p.name for p in wanted if p.kind is p.KEYWORD_ONLY or p.name in given}
    scope: dict[str, Any] = {"call": model.forward, **defaults}
    taken = ", ".join(f"{name}=default_{name}" if f"default_{name}" in defaults else name for name in names)
    passed = ", ".join(f"{name}={name}" if name in by_name else name for name in names)
    exec(f"def forward(self, {taken}): return call({passed})", scope)
    shell = type(type(model).__name__, (nn.Module,), {"forward": scope["forward"]})()
    for name in ("_modules", "_parameters", "_buffers"):
        shell.__dict__[name] = getattr(model, name)
    shell.training = model.training
    result: nn.Module = shell
    return result


def _is_opaque(node: fx.Node) -> bool:
    """Whether this is a user's function (torch.fx.wrap) that takes parameters, and may hide convs and linears."""
    if node.op != "call_function" or not inspect.isfunction(node.target):
        return False
    inside = (node.target.__module__ or "").split(".")[0] in ("torch", "operator", "math", "builtins")
    return not inside and any(_reads_state(source) for source in node.all_input_nodes)


def _reads_state(node: fx.Node) -> bool:
    """Whether a value is computed from parameters and buffers alone."""
    if node.op == "get_attr":
        return True
    return bool(node.all_input_nodes) and all(_reads_state(source) for source in node.all_input_nodes)


def capture_dynamo(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[fx.GraphModule, BatchGuards]:
    """Capture `model` with Dynamo on one example call; the graph keeps the model's own signature and outputs.

    Returns the graph, and what its guards say of the batch size (dimension 0 of the first tensor). All other shapes,
    and all arguments that are not tensors, are constants of the graph. A cache for generation that the model returns by
    default is left out.
    Numerics: unchanged. Ensures: parameters and buffers are get_attr nodes by their names in `model`.
    Ensures: on the output node meta["assigns"], an attribute that forward() assigns and the graph does not, unless it
    assigns the same plain value in every call of this kind, which changes nothing.
    Raises `CaptureError`, with Dynamo's source line, for a model that is not one graph.
    """
    batch = batch_size(args, kwargs)
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch:
            torch._dynamo.maybe_mark_dynamic(leaf, 0)
    exported, change, settings = _export(model, args, kwargs, {})
    if change.drew is not None:
        raise CaptureError(
            f"forward() of {type(model).__name__} draws from {change.drew}, which a capture would do only once. Fix: "
            "draw with torch, one row for each sample, as torch.rand(x.shape[0], 1) does"
        )
    assigned = change.assigned
    if settings:
        # With the assigned values in place the next call assigns them again, and its graph must be the same.
        again, _, repeated = _export(model, args, kwargs, settings)
        assigned = None if repeated == settings and again.code == exported.code else assigned
    gm = graph_module_over(model, _renamed(exported, model), type(model).__name__)
    for name, child in exported.named_children():
        if any(node.target == name for node in gm.graph.nodes):
            gm.__dict__["_modules"][name] = child  # bodies of higher-order operators
    constants = _constants(exported, gm.graph)
    if constants is not None:
        gm.__dict__["_modules"]["_const"] = constants
    # The graph does not repeat these assignments: verify_isolation refuses them.
    gm.graph.output_node().meta["assigns"] = assigned
    gm.recompile()
    return _stamp(gm, "capture_dynamo"), read_batch_guards(exported, batch)


def _export(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], settings: Mapping[tuple[int, str], Any]
) -> tuple[fx.GraphModule, Change, dict[tuple[int, str], Any] | None]:
    """Dynamo's graph, captured with some attributes set; the side effects of forward(), undone; and plain ones."""
    before = Snapshot(model)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None  # Dynamo describes gradients too, and a view among them adds sizes that look like a batch
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        model.__dict__[name] = OrderedDict()  # the caller of the graph runs these hooks; the snapshot restores them
    before.assign(settings)
    assigned = None
    try:
        try:
            exported = _exported(model, args, kwargs)
        except Exception as error:
            if not lacks_recorders(error):
                raise
            with with_recorders(model):
                exported = _exported(model, args, kwargs)
        assigned = before.settings()
    except Exception as error:
        raise CaptureError(
            f"Dynamo cannot capture {type(model).__name__} as one graph: {_reason(error)}\nFix: {_fix(error)}."
        ) from error
    finally:
        change = before.restore()  # Dynamo, too, leaves fake tensors in attributes that forward() assigns
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return exported, change, assigned


def _exported(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.GraphModule:
    export = torch._dynamo.export(model, aten_graph=False, same_signature=True, assume_static_by_default=True)
    # `detach_regions` requires gradients
    with torch.enable_grad(), without_cache(model), without_gradient_requests(model):
        exported: fx.GraphModule = export(*args, **kwargs)[0]
    return exported


def _renamed(exported: fx.GraphModule, model: nn.Module) -> fx.Graph:
    """The exported graph with each tensor attribute under the name it has in `model`, or under `_const.`."""
    names: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        names.setdefault(id(tensor), name)
    for node in exported.graph.nodes:
        if node.op == "get_attr":
            value = read_attribute(exported, node.target)
            if isinstance(value, torch.Tensor):
                node.target = names.get(id(value), f"_const.{str(node.target).replace('.', '_')}")
    return exported.graph


def _constants(exported: fx.GraphModule, graph: fx.Graph) -> nn.Module | None:
    """Tensors that Dynamo found outside the model's parameters and buffers, as buffers of one holder."""
    holder = nn.Module()
    flat = {name.replace(".", "_"): value for name, value in _tensor_attributes(exported)}
    for node in graph.nodes:
        if node.op == "get_attr" and str(node.target).startswith("_const."):
            name = str(node.target).removeprefix("_const.")
            holder.register_buffer(name, flat[name], persistent=False)
    return holder if holder._buffers else None


def _tensor_attributes(gm: fx.GraphModule) -> list[tuple[str, torch.Tensor]]:
    plain = [(name, value) for name, value in vars(gm).items() if isinstance(value, torch.Tensor)]
    return [*gm.named_buffers(), *gm.named_parameters(), *plain]


def _stamp(gm: fx.GraphModule, origin: str) -> fx.GraphModule:
    for node in gm.graph.nodes:
        node.meta["origin"] = origin
        node.meta["source"] = node_source(node)
        # Readers of the graph need the line of the model, which is not the innermost one.
        frames = user_frames(node)
        node.meta.pop("stack_trace", None)
        if frames:
            node.stack_trace = f'  File "{frames[-1]}\n'
    return gm


# What forward() of encoders of sound in transformers does in training, by a word in the line that Dynamo names.
_SWITCHES = {
    "_compute_mask_indices": "apply_spec_augment=False in the model's configuration, and mask samples in the dataset: "
    "SpecAugment draws by numpy, and one of its draws is for the whole batch",
    "layerdrop": "layerdrop=0.0 in the model's configuration: one draw skips a layer for the whole batch",
}


def _fix(error: Exception) -> str:
    switch = next((switch for word, switch in _SWITCHES.items() if word in str(error)), None)
    if switch is not None:
        return f"set {switch}"
    return "remove what it names from forward(), or compile the submodule that holds the convs and linears"


def _reason(error: Exception, limit: int = 600) -> str:
    """The first lines of Dynamo's message, without its lists of types."""
    if found := re.search(r"one of the (in|out)puts with type `<class '(?:.*\.)?(\w+)'>` is not supported", str(error)):
        takes = "takes" if found[1] == "in" else "returns"
        return f"forward() {takes} a {found[2]}, which is neither a tensor nor a container that torch knows"
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    text = "\n".join(lines[:12])
    return text if len(text) <= limit else f"{text[:limit]}…"
