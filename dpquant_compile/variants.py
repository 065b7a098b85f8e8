"""Whole-graph specialised variants: compiled ahead for a schedule, limited in number, sharing compiled blocks."""

import atexit
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from dpquant_compile import pipeline
from dpquant_compile.errors import NotCapturedError
from dpquant_compile.link_table import LinkTable
from dpquant_compile.passes.capture import NO_TRACE
from dpquant_compile.passes.fx_utils import bind_inputs, draws_random, read_attribute
from dpquant_compile.passes.precision.insert_switches import LINK_TABLE
from dpquant_compile.passes.precision.split_blocks import block_key, lift_tensors, split_blocks
from dpquant_compile.policy import Policy
from dpquant_compile.programs import Program, Programs

__all__ = ["Precompilation", "VariantCache"]


@dataclass(frozen=True)
class Precompilation:
    """A running or finished `precompile`. `wait()` blocks until the variants are ready, and raises any error."""

    policies: tuple[Policy, ...]
    futures: tuple["Future[None]", ...] = field(repr=False)

    def wait(self, timeout: float | None = None) -> "Precompilation":
        for future in self.futures:
            future.result(timeout)
        return self

    @property
    def done(self) -> bool:
        return all(future.done() for future in self.futures)


class _Variant:
    """A graph of compiled blocks, called with the model's current tensors."""

    def __init__(self, program: Program, policy: Policy, programs: Programs, table: LinkTable) -> None:
        self.owner = program.base
        self.table = table
        recipe = str(programs.spec.recipe)
        gm = pipeline.specialised(program.base, table, policy, program.rows, recipe, programs.log)
        lifted, self.names = lift_tensors(gm, lambda name: tuple(self._read(name).shape))
        self.graph = split_blocks(lifted, programs.original)
        self.random = any(draws_random(node) for node in gm.graph.nodes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat = bind_inputs(self.owner, args, kwargs)
        return self._unflatten(self.graph(*flat, *map(self._read, self.names)))

    def warm_up(self, example: tuple[Any, Any]) -> None:
        """Compile forward and backward by one run on made-up inputs and copies of the tensors: no state changes."""
        device = next((p.device for p in self.owner.parameters()), torch.device("cpu"))
        flat = bind_inputs(self.owner, *tree_map(partial(_blank, device=device), example))
        copies = [_copy(self._read(name)) for name in self.names]
        with torch.enable_grad():
            outputs = self.graph(*flat, *copies)
            ends = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
            wanted = [tensor for tensor in copies if tensor.requires_grad]
            if ends and wanted:
                torch.autograd.grad([end.sum() for end in ends], wanted, allow_unused=True)

    def _unflatten(self, outputs: Any) -> Any:
        return self.owner.graph._codegen.process_outputs(outputs)

    def _read(self, name: str) -> Any:
        if name.startswith(f"{LINK_TABLE}.keys["):
            row = int(name.removesuffix("]").rpartition("[")[2])
            return self.table.keys[row : row + 1]
        if name.startswith(f"{LINK_TABLE}."):
            return read_attribute(self.table, name.removeprefix(f"{LINK_TABLE}."))
        return read_attribute(self.owner, name)


class _Worker:
    """One thread that runs jobs in order, none while a model is traced in another.

    When the program ends, waiting jobs are dropped and the current one finishes:
    a thread that is killed inside the compiler would crash the process.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        self._ending = False
        self._thread = threading.Thread(target=self._work, name="dpquant-precompile", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def _end(self) -> None:
        self._ending = True
        self._jobs.put((lambda: None, Future()))
        self._thread.join()

    def submit(self, job: Callable[[], None]) -> "Future[None]":
        future: Future[None] = Future()
        self._jobs.put((job, future))
        return future

    def _work(self) -> None:
        while not self._ending:
            job, future = self._jobs.get()
            if self._ending:
                return
            try:
                with NO_TRACE:
                    job()
            except BaseException as error:  # `wait()` raises it
                future.set_exception(error)
            else:
                future.set_result(None)


class VariantCache:
    """Specialised variants by policy; beyond `limit` the least recently used is dropped.

    Blocks that compute the same thing on the same shapes are compiled once and shared by all variants and all places
    in the model; beyond `block_limit` compiled blocks, further policies stay with the link table.
    """

    def __init__(self, limit: int = 32, block_limit: int = 128) -> None:
        self.limit = limit
        self.block_limit = block_limit
        self.asked = False  # whether anything was to be compiled ahead, ready or not
        self._ready: OrderedDict[tuple[int, Policy], _Variant] = OrderedDict()
        self._blocks: dict[str, Callable[..., Any]] = {}
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def blocks(self) -> int:
        """How many different blocks are compiled."""
        return len(self._blocks)

    def get(self, program: Program, policy: Policy) -> Callable[..., Any] | None:
        """The compiled variant of `program` for `policy`, if there is one."""
        key = (id(program), policy)
        with self._lock:
            if key in self._ready:
                self._ready.move_to_end(key)
            return self._ready.get(key)

    def precompile(
        self, programs: Programs, table: LinkTable, policies: Sequence[Policy], background: bool
    ) -> Precompilation:
        """Build and compile the variants that are missing, in order; see `CompiledModule.precompile`."""
        program = programs.latest if programs.spec.quantize_eval else programs.last_trained
        if program is None:
            raise NotCapturedError("precompile() needs the shapes of a batch: run the model once in train() before it")
        missing = [p for p in dict.fromkeys(policies) if (id(program), p) not in self._ready]
        if programs.spec.inner == "eager":
            missing = []  # nothing is compiled, so nothing can be compiled ahead
        jobs = [(policy, _Variant(program, policy, programs, table)) for policy in missing]
        self.asked = self.asked or bool(jobs)
        # A run on made-up inputs draws from the global generator if the model has dropout. In the foreground its
        # state is restored; a thread could not do that without disturbing concurrent training.
        threaded = background and not any(variant.random for _, variant in jobs)
        futures: list[Future[None]] = []
        for policy, variant in jobs:
            if threaded:
                self._worker = self._worker or _Worker()
                futures.append(self._worker.submit(partial(self._build, programs, program, policy, variant)))
            else:
                done: Future[None] = Future()
                with torch.random.fork_rng(devices=[]):
                    self._build(programs, program, policy, variant)
                done.set_result(None)
                futures.append(done)
        return Precompilation(tuple(policies), tuple(futures))

    def _build(self, programs: Programs, program: Program, policy: Policy, variant: _Variant) -> None:
        keys = {name: block_key(block) for name, block in _children(variant.graph)}
        if len({*self._blocks, *keys.values()}) > self.block_limit:
            return
        for name, block in _children(variant.graph):
            key = keys[name]
            if key not in self._blocks:
                self._blocks[key] = programs.compile(block)
            setattr(variant.graph, name, _Block(self._blocks[key], _batch_dims(variant.graph, name)))
        variant.warm_up(program.example)
        with self._lock:
            self._ready[(id(program), policy)] = variant
            while len(self._ready) > self.limit:
                self._ready.popitem(last=False)


class _Block(nn.Module):
    """A compiled block, which tells Dynamo the batch dimension of its inputs."""

    def __init__(self, call: Callable[..., Any], batch_dims: tuple[tuple[int, int], ...]) -> None:
        super().__init__()
        self.__dict__["call"] = call
        self.batch_dims = batch_dims

    def forward(self, *inputs: Any) -> Any:
        for position, dim in self.batch_dims:
            torch._dynamo.maybe_mark_dynamic(inputs[position], dim)
        return self.__dict__["call"](*inputs)


def _batch_dims(graph: fx.GraphModule, name: str) -> tuple[tuple[int, int], ...]:
    call = next(node for node in graph.graph.nodes if node.op == "call_module" and node.target == name)
    block = graph.get_submodule(name)
    assert isinstance(block, fx.GraphModule)
    inputs = [node for node in block.graph.nodes if node.op == "placeholder"]
    axes = [node.meta.get("batch_axis") for node in inputs]
    assert len(inputs) == len(call.args)
    return tuple((position, axis.dim) for position, axis in enumerate(axes) if axis is not None)


def _children(graph: fx.GraphModule) -> list[tuple[str, fx.GraphModule]]:
    return [(name, child) for name, child in graph.named_children() if isinstance(child, fx.GraphModule)]


def _blank(value: Any, device: torch.device) -> Any:
    return torch.zeros(value.shape, dtype=value.dtype, device=device) if isinstance(value, Tensor) else value


def _copy(value: Tensor) -> Tensor:
    copied = value.detach().clone()
    # Of the same type: Dynamo distinguishes parameters from other tensors, and would compile again.
    if isinstance(value, nn.Parameter):
        return nn.Parameter(copied, requires_grad=value.requires_grad)
    return copied.requires_grad_(value.requires_grad)
