"""Pass: follow the batch through the graph, so that every site knows which elements belong to one sample."""

import itertools
import logging
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from dpquant_compile.errors import CaptureError, DPQuantError, InplaceAliasError
from dpquant_compile.passes.batch.batch_rules import Axis, Lost, OpCall, output_axis
from dpquant_compile.passes.batch.own_rules import own_axis, own_rule
from dpquant_compile.passes.fx_utils import bind_inputs, node_source
from dpquant_compile.passes.runner import PassResult
from dpquant_compile.passes.snapshot import storage_of
from dpquant_compile.sites import BatchAxis, Site, Skipped

__all__ = [
    "PROBES",
    "batch_size",
    "bind_batch",
    "hint",
    "memory_order",
    "run_on_fakes",
    "symbolic_batch",
    "track_batch",
    "without_hooks",
]

# Two large primes in place of the batch size: a number that a model contains (reshape(7, -1)) is neither, and an axis
# that is right for both is not right by chance.
PROBES = (1009, 1013)


def batch_size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The size of dimension 0 of the first tensor with dimensions among the arguments of a call."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return hint(leaf.shape[0])
    raise CaptureError("the model was called without a tensor that has a batch dimension; pass the batch as a tensor")


def track_batch(
    gm: fx.GraphModule,
    *,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    any_batch: bool = True,
    batch: int | None = None,
) -> PassResult:
    """Run the graph on fake tensors of the call's shapes and record the results in node.meta.

    Sets meta["shape"] (with the call's batch size), meta["batch_axis"] and meta["contiguous"] on nodes with tensor
    outputs; on placeholders meta["batch_leaves"], one flag per leaf of the argument: whether it counts as the batch; on
    site nodes meta["axis"], the `BatchAxis` of the input, meta["output_axis"], and a `Site` with shapes and FLOPs per
    sample. A site whose batch cannot be followed gets meta["skipped"] with the reason: quantizing it could give one
    scale to many samples. With `any_batch` the result holds for all batch sizes, else only for this call's; `batch`
    gives the batch size if it is not that of the first tensor.
    The fake tensors have the layouts of the call's, so a view that fails in the user's model fails here.
    Requires: `mark_sites`; dimension 0 of the inputs is the batch; all other sizes are fixed.
    Ensures: nodes and edges are untouched. Numerics: unchanged; nothing is computed.
    """
    inputs, actual, alike = bind_batch(gm, args, kwargs, batch)
    probes = PROBES if any_batch else (actual,)
    best: tuple[int, list[_Recorder], set[int]] | None = None
    failure: CaptureError | None = None
    # A mask of shape [length, length] looks like a batch if the length equals the batch size. Then shapes do not fit
    # together, or samples cannot be told apart, and fewer tensors are tried as the batch. A tensor that is left out
    # passes its axis to nothing, so at worst a site is skipped.
    choices = (batched for count in range(len(alike), 0, -1) for batched in itertools.combinations(alike, count))
    for batched in itertools.islice(choices, 32):
        chosen, recorders = {id(leaf) for leaf in batched}, [_Recorder(gm, _Tracker(probe), actual) for probe in probes]
        try:
            for recorder in recorders:
                run_on_fakes(recorder, inputs, chosen)
        except CaptureError as error:
            failure = failure or error
            continue
        lost = sum("skipped" in notes for notes in recorders[0].notes.values())
        if best is None or lost < best[0]:
            best = (lost, recorders, chosen)
        if lost == 0:
            break
    if best is None:
        raise failure or CaptureError("none of the inputs has a batch dimension")
    _write(gm, best[1])
    for node, value in inputs:
        node.meta["batch_leaves"] = tuple(id(leaf) in best[2] for leaf in tree_leaves(value))
    return PassResult(gm, False)


Inputs = list[tuple[fx.Node, Any]]


def bind_batch(
    gm: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any], batch: int | None
) -> tuple[Inputs, int, list[Tensor]]:
    """Each placeholder with its argument, the size of the batch, and the tensors whose dimension 0 has that size."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    inputs = list(zip(placeholders, bind_inputs(gm, args, kwargs), strict=True))
    given = [value for node, value in inputs if "state" not in node.meta]
    actual = batch_size(given, {}) if batch is None else batch
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.dim()]
    return inputs, actual, [leaf for leaf in tensors if hint(leaf.shape[0]) == actual]


def _write(gm: fx.GraphModule, recorders: "list[_Recorder]") -> None:
    for node in gm.graph.nodes:
        notes = [recorder.notes.get(node, {}) for recorder in recorders]
        agree = all(n.get(key) == notes[0].get(key) for n in notes for key in ("axis", "output_axis"))
        node.meta |= notes[0]
        if not agree and "site" in node.meta:
            site = node.meta["site"]
            reason = "samples cannot be told apart here: where they lie depends on the batch size"
            node.meta["skipped"] = Skipped(site.name, site.op, reason, node_source(node))
        if "skipped" in node.meta:
            node.meta.pop("site", None)
    _add_up_calls(gm)


def hint(size: Any) -> int:
    """A size as a number; of a symbolic size its example, without specialising on it."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def run_on_fakes(recorder: "_Recorder", inputs: Inputs, batched: set[int]) -> None:
    """Run a recorder's graph on fake tensors; those with an id in `batched` get its probe as dimension 0."""
    mode, tracker, gm = FakeTensorMode(allow_non_fake_inputs=True), recorder.tracker, recorder.module
    probe = tracker.batch
    symbols = {symbolic_batch(node) for node, value in inputs if id(value) in batched} - {None}

    def fake(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return probe if _symbol(value) in symbols else hint(value)
        if not isinstance(value, Tensor):
            return value
        is_batch = id(value) in batched
        shape = [probe, *map(hint, value.shape[1:])] if is_batch else [hint(size) for size in value.shape]
        with mode:
            made = _laid_out(shape, value)
        made.requires_grad_(value.requires_grad)
        tracker.enter(made, None if is_batch else "an input that is no batch")
        return made

    # In inference mode PyTorch dispatches composite operators (aten.linear), for which there are no rules.
    with torch.inference_mode(False):
        fakes = [tree_map(fake, value) for _, value in inputs]
        # The model's tensors are replaced by fakes too: else a BatchNorm would count this run as a training step.
        state = {**dict(gm.named_parameters(remove_duplicate=False)), **dict(gm.named_buffers(remove_duplicate=False))}
        swapped: dict[str, Tensor] = {
            name: mode.from_tensor(value.detach(), static_shapes=True) for name, value in state.items()
        }
        for name, tensor in swapped.items():
            tracker.enter(tensor, name)
        recorder.extra_traceback = False
        with _quiet(), mode, tracker, torch.no_grad(), without_hooks(gm), _reparametrize_module(gm, swapped):
            recorder.run(*fakes, enable_io_processing=False)


def memory_order(value: Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor, from the outermost in memory to the innermost."""
    if value.layout is not torch.strided:
        return tuple(range(value.dim()))
    strides = [hint(stride) for stride in value.stride()]
    single = value.dim() > 0 and hint(value.shape[0]) == 1  # then its stride says nothing
    return tuple(sorted(range(value.dim()), key=lambda dim: (not (single and dim == 0), -strides[dim])))


def _laid_out(shape: Sequence[int], value: Tensor) -> Tensor:
    """An empty tensor of this shape, with dimensions in the order in memory of those of `value`."""
    order, sizes = memory_order(value), [hint(size) for size in value.shape]
    dense = value.layout is not torch.strided or sizes[:1] == [1]
    if order[:1] == (0,) and list(shape[1:]) == sizes[1:] and not dense:
        # The batch lies outermost, so its size changes no stride. Gaps between elements stay: a view may fail on them.
        strides = [hint(stride) for stride in value.stride()]
        return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    return torch.empty_permuted(shape, order, dtype=value.dtype, device=value.device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's log of a stack for every shape mismatch; the error that is raised says it in one line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def symbolic_batch(node: fx.Node) -> Any:
    """The symbol of Dynamo for dimension 0 of an input; None if it is a number."""
    example = node.meta.get("example_value")
    size = example.shape[0] if isinstance(example, Tensor) and example.dim() > 0 else None
    return _symbol(size)


def _symbol(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else None


@contextmanager
def without_hooks(gm: nn.Module) -> Iterator[None]:
    """Disable the user's hooks: they must not see fake tensors, nor run twice."""
    names = ("_forward_hooks", "_forward_pre_hooks")
    kept = [(module, name, getattr(module, name)) for module in gm.modules() for name in names]
    try:
        for module, name, _ in kept:
            module.__dict__[name] = OrderedDict()
        yield
    finally:
        for module, name, hooks in kept:
            module.__dict__[name] = hooks


def _add_up_calls(gm: fx.GraphModule) -> None:
    """A layer that is called several times is one site: add up the FLOPs of its calls."""
    calls: dict[str, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if "site" in node.meta:
            calls.setdefault(node.meta["site"].name, []).append(node)
    for nodes in calls.values():
        total = sum(node.meta["site"].flops for node in nodes)
        first = nodes[0].meta["site"]
        for node in nodes:
            node.meta["site"] = replace(first, flops=total)


class _Tracker(TorchDispatchMode):
    """Records the batch axis of every tensor that an operator makes."""

    def __init__(self, batch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.batch = batch
        self.axes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._in_storage: dict[int, list[weakref.ref[Tensor]]] = {}

    def enter(self, value: Tensor, name: str | None) -> None:
        """Add a tensor that no operator made: a batch, without a name, or an input, parameter or buffer with one."""
        if name is None:
            self.axes[value] = BatchAxis(0)
        self._register(value)

    def axis_of(self, value: Any) -> Axis:
        axis: Axis = self.axes.get(value) if isinstance(value, Tensor) else None
        return axis

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        carried = any(self.axis_of(value) is not None for value in inputs)
        contiguous = not inputs or inputs[0].is_contiguous()
        result = func(*args, **kwargs)
        for output in tree_leaves(result):
            if isinstance(output, Tensor):
                if carried:
                    name = func.overloadpacket.__name__
                    axis = self._axis(func, OpCall(name, args, kwargs, output, self.axis_of, self.batch, contiguous))
                    self.axes[output] = axis
                    if func._schema.is_mutable:
                        self._spread(output, axis)
                self._register(output)
        return result

    def _register(self, value: Tensor) -> None:
        self._in_storage.setdefault(storage_of(value), []).append(weakref.ref(value))

    def _sharing(self, value: Tensor) -> list[Tensor]:
        """Other tensors in the same memory."""
        others = (reference() for reference in self._in_storage.get(storage_of(value), []))
        return [other for other in others if other is not None and other is not value]

    def _rule(self, func: Any, call: OpCall) -> Axis:
        return output_axis(func, call) if own_rule(func) is None else own_axis(func, call)

    def _axis(self, func: Any, call: OpCall) -> Axis:
        axis = self._rule(func, call)
        if isinstance(axis, BatchAxis):
            size = axis.outer * self.batch * axis.inner
            if axis.dim >= call.output.dim() or call.output.shape[axis.dim] != size:
                # Second outputs (indices, statistics, masks) that do not carry the batch where the first one does.
                return Lost(f"an output of aten.{call.name} does not carry the batch")
        return axis

    def _spread(self, written: Tensor, axis: Axis) -> None:
        """A write through one view changes all other views of the same memory."""
        for other in self._sharing(written):
            if self.axis_of(other) == axis:
                continue
            if isinstance(axis, BatchAxis) and self.axis_of(other) is None and _aligned(other, written, axis.dim):
                self.axes[other] = axis
            else:
                self.axes[other] = Lost("a part of it was written through a view")


def _aligned(a: Tensor, b: Tensor, dim: int) -> bool:
    """Whether two views of one storage agree on which memory belongs to each index of dimension `dim`."""
    if a.dim() != b.dim() or a.shape[dim] != b.shape[dim] or a.stride(dim) != b.stride(dim) or a.stride(dim) == 0:
        return False
    step = a.stride(dim)
    larger = min((stride for stride in (*a.stride(), *b.stride()) if stride > step), default=None)
    starts = set()
    for view in (a, b):
        offset = int(view.storage_offset())
        within = sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True) if stride < step)
        if offset % step + within >= step:
            return False  # a row overlaps the next one
        starts.add((offset if larger is None else offset % larger) // step)
    return len(starts) == 1


class _Recorder(fx.Interpreter):
    """Runs the graph node by node and records shapes and axes."""

    def __init__(self, gm: fx.GraphModule, tracker: _Tracker, actual: int) -> None:
        super().__init__(gm)
        self.tracker = tracker
        self.actual = actual
        self.notes: dict[fx.Node, dict[str, Any]] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return next(self.args_iter)  # *args and **kwargs are packed already

    def run_node(self, n: fx.Node) -> Any:
        try:
            result = super().run_node(n)
        except DPQuantError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            values = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
            advice = " Its result depends on values: use torch.where or masks instead." if values else ""
            if reason.startswith("Cannot view"):
                advice = " The model itself fails here, too. Fix: reshape() instead of view()."
            raise CaptureError(
                f"node {n.name!r} ({node_source(n) or 'source line unknown'}) fails on the shapes of this call: "
                f"{reason}.{advice}"
            ) from error
        if isinstance(result, Tensor):
            self._check_dtype(n, result)
            axis = self.tracker.axis_of(result)
            self.notes[n] = self._note(n, result, axis)
        return result

    def _note(self, node: fx.Node, result: Tensor, axis: Axis) -> dict[str, Any]:
        known = axis if isinstance(axis, BatchAxis) else None
        notes: dict[str, Any] = {
            "shape": self._shape(result, axis),
            "batch_axis": known,
            "contiguous": result.is_contiguous(),
        }
        return notes | self._site(node, result, axis) if "site" in node.meta else notes

    def _check_dtype(self, node: fx.Node, result: Tensor) -> None:
        self._dtypes[node.name] = result.dtype
        was = self._dtypes.get(node.meta.get("inplace_of", node.name))
        if was is not None and was != result.dtype:
            raise InplaceAliasError(
                f"node {node.name!r} ({node_source(node) or 'source line unknown'}) is an in-place operation on {was}, "
                f"whose out-of-place form gives {result.dtype}. Fix: cast the other operand to {was} first."
            )

    def _shape(self, value: Tensor, axis: Axis) -> tuple[int, ...]:
        shape = [int(size) for size in value.shape]
        if isinstance(axis, BatchAxis):
            shape[axis.dim] = axis.outer * self.actual * axis.inner
        return tuple(shape)

    def _site(self, node: fx.Node, result: Tensor, output_axis: Axis) -> dict[str, Any]:
        site: Site = node.meta["site"]
        x, weight = (self.env[arg] for arg in node.args[:2] if isinstance(arg, fx.Node))
        axis = self.tracker.axis_of(x)
        if not isinstance(axis, BatchAxis) or not isinstance(output_axis, BatchAxis):
            lost = axis if not isinstance(axis, BatchAxis) else output_axis
            why = lost.reason if isinstance(lost, Lost) else "its input does not carry the batch"
            reason = f"samples cannot be told apart here: {why}"
            return {"skipped": Skipped(site.name, site.op, reason, node_source(node))}
        expected = node.meta.get("expects_batch_dim", axis.dim)
        if axis.dim != expected:
            raise CaptureError(
                f"site {site.name!r} ({node_source(node) or 'source line unknown'}): this attention takes dimension "
                f"{expected} of [length, batch, width] for the batch, but dimension 0 of the model's inputs is in "
                f"dimension {axis.dim} here. Fix: pass inputs batch first, and set batch_first=True."
            )
        per_output = 2 * weight.numel() // weight.shape[0]
        measured = replace(
            site,
            input_shape=self._shape(x, axis),
            output_shape=self._shape(result, output_axis),
            weight_shape=tuple(int(size) for size in weight.shape),
            flops=per_output * (result.numel() // self.tracker.batch),
        )
        return {"axis": axis, "output_axis": output_axis, "site": measured}
