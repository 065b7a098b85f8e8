"""Whole-graph compilation on AOTAutograd, with the forward and backward graphs kept for reading."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._inductor.codegen.cpp import CppKernel, CppScheduling
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.virtualized import V
from torch.compiler import config as compiler_config

from dpquant_compile.backends.native_library import instructions
from dpquant_compile.backends.region_calls import RegionCalls
from dpquant_compile.progress import progress

__all__ = ["INDUCTOR", "AotGraph", "Recorder", "compile_graph", "lower"]

# The inner compilers that are Inductor: "regions" compiles once what a private program repeats.
INDUCTOR = ("inductor", "regions")


@dataclass(frozen=True)
class AotGraph:
    """A graph that AOTAutograd made, after decomposition and partition: what the inner compiler got."""

    kind: str
    graph_module: fx.GraphModule

    def __str__(self) -> str:
        return f"# {self.kind}\n{self.graph_module.print_readable(print_output=False)}"


class Recorder:
    """Collects the graphs of one program in the order they were compiled."""

    def __init__(self) -> None:
        self.graphs: list[AotGraph] = []

    def add(self, kind: str, gm: fx.GraphModule) -> None:
        self.graphs.append(AotGraph(kind, gm))


@contextmanager
def _own_choices() -> Iterator[None]:
    """Let Inductor's CPU code make two choices otherwise.

    Sums over a symbolic batch are taken in one way for all sizes. By itself Inductor takes a cascade for sums over more
    than 4096 elements and a plain loop under that, and puts a guard on the batch size to hold its choice; the next
    Poisson batch on the other side of it would recompile. The cascade is right for all sizes, and the more accurate.

    Loops are not split where an index is divided, as by the groups that share a scale. In torch 2.13 the split drops
    what is left of a dimension that is no multiple of the divisor: these elements are never written.

    Inductor's cache knows a graph by its text, which says neither this nor what our operators give. So a digest of
    these sources is part of its keys: no program is found that was compiled for other operators. Unlike the methods,
    which all threads have in common, the keys are a setting of this thread.
    """
    global _inside
    given, own = compiler_config.cache_key_tag, f" dpquant {_digest()}"
    with _PATCH_LOCK:
        _inside += 1
        for (owner, name), choice in _CHOICES.items():
            setattr(owner, name, choice)
    compiler_config.cache_key_tag = given if given.endswith(own) else given + own
    try:
        yield
    finally:
        compiler_config.cache_key_tag = given
        with _PATCH_LOCK:
            _inside -= 1
            if _inside == 0:
                for (owner, name), original in _ORIGINALS.items():
                    setattr(owner, name, original)


@cache
def _digest() -> str:
    found = hashlib.sha256(instructions().encode())  # which kernels there are; a cache may be shared by machines
    for path in sorted(Path(__file__).parent.rglob("*")):
        if path.suffix in _SOURCES:  # the sizes of what operators give may be those of the C++
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _cascade_if_symbolic(self: Any, reduction_type: str, dtype: torch.dtype, use_scalar: bool) -> bool:
    reduced = (self.call_ranges or ())[self.reduction_depth :]
    symbolic = any(getattr(size, "free_symbols", None) for size in reduced)
    if reduction_type == "sum" and dtype == torch.float and symbolic:
        return True
    return bool(_ORIGINALS[_CASCADE](self, reduction_type, dtype, use_scalar))


def _unsplit(self: Any, nodes: Any) -> Any:
    return nodes


_SOURCES = (".py", ".cpp", ".h")
_PATCH_LOCK = threading.Lock()
_inside = 0
_CASCADE = (CppKernel, "need_use_acc_helper")
_CHOICES: dict[tuple[type, str], Callable[..., Any]] = {
    _CASCADE: _cascade_if_symbolic,
    (CppScheduling, "try_loop_split"): _unsplit,
}
_ORIGINALS: dict[tuple[type, str], Callable[..., Any]] = {place: getattr(*place) for place in _CHOICES}


def lower(inner: str, recorder: Recorder) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A Dynamo backend: AOTAutograd, then `inner` ("inductor" or "aot_eager"), recording both graphs."""

    def record_and_compile(gm: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        kind = "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
        recorder.add(kind, gm)
        with _own_choices(), progress(f"{kind} of the model"):
            return compile_fx_inner(gm, example_inputs, **kwargs)

    def with_inductor(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        # AOTAutograd's own cache would skip the graphs that are to be read. Inductor's cache, which saves the long part
        # of a compilation between runs, stays on.
        with functorch_config.patch(enable_autograd_cache=False):
            compiled: Any = compile_fx(gm, example_inputs, inner_compile=record_and_compile)
        return cast(Callable[..., Any], compiled)

    def keep(kind: str) -> Callable[[fx.GraphModule, Any], Callable[..., Any]]:
        def compiler(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
            recorder.add(kind, gm)
            boxed: Callable[..., Any] = make_boxed_func(gm.forward)
            return boxed

        return compiler

    if inner in INDUCTOR:
        return with_inductor
    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=keep("forward"), bw_compiler=keep("backward"), inference_compiler=keep("inference")
    )
    return backend


def compile_graph(
    gm: fx.GraphModule, kind: str, inner: str, recorder: Recorder
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile a functional graph of ATen operators for the sizes it was traced with; of one that calls regions, each
    region once.

    The result takes its arguments as one list, which it empties, so that memory is freed as the program goes.
    """
    recorder.add(kind, gm)
    if inner not in INDUCTOR:
        interpret: Callable[[list[Any]], Sequence[Any]] = make_boxed_func(gm.forward)
        return interpret
    regions = {str(node.target): gm.get_submodule(str(node.target)) for node in gm.graph.find_nodes(op="call_module")}
    if not regions:
        return _compiled(gm)
    return RegionCalls(gm, {name: _compiled(cast(fx.GraphModule, region)) for name, region in regions.items()})


def _compiled(gm: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    examples = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    fake_mode = next(value.fake_mode for value in examples if hasattr(value, "fake_mode"))
    # What reads the results is compiled for the strides that the trace has, so Inductor may not choose others.
    output = gm.graph.output_node()
    results = enumerate(cast(Sequence[Any], output.args[0]))
    output.meta["user_visible_output_idxs"] = [place for place, value in results if isinstance(value, fx.Node)]
    with (
        tracing(TracingContext(fake_mode)),
        V.set_fake_mode(fake_mode),
        _own_choices(),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        compiled: Any = compile_fx_inner(gm, examples, is_inference=True)
    return cast(Callable[[list[Any]], Sequence[Any]], compiled)
