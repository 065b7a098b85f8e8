"""Pass: prove that no sample of a batch can change the output, and so the gradient, of another sample.

Every tensor is in one of these states while the graph runs on fake tensors:

    BatchAxis  computed from the batch; the elements at sample i along the axis depend on sample i alone
    Shared     computed without the batch, and equal for all samples: along an axis (`cls.expand(B, -1, -1)`), or in all
               elements (`zeros(B, n)`)
    Rows       the indices of the samples, `arange(B)`, which may select a sample's own row and nothing else
    None       any other constant: parameters, buffers, `eye(B)`. It must not lie along the batch
    Mixed      an element may depend on several samples; remembers the operator that mixed them first

A Mixed value may exist. It is an error where it reaches an output, from which all gradients come, or state.

Random numbers are like data: a draw with a row for each sample belongs to the samples, if the operator draws rows
independently, as `rand` does and `randperm` does not. A draw that samples share is Mixed: each micro-batch makes a new
one, so which samples share it depends on how many others there are.

The proof covers operators of PyTorch. Code that the graph keeps as one call is refused, since a run without gradients
does not show its backward; so are operators of other libraries, and state that forward() assigns.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves

from dpquant_compile.errors import CaptureError, IsolationError
from dpquant_compile.passes.batch import isolation_rules as rules
from dpquant_compile.passes.batch.batch_rules import Axis, Lost, OpCall
from dpquant_compile.passes.batch.isolation_rules import Rows, Shared, tensors
from dpquant_compile.passes.batch.opaque_code import opaque_code
from dpquant_compile.passes.batch.own_rules import name_of, own_rule
from dpquant_compile.passes.batch.track_batch import (
    PROBES,
    Inputs,
    _aligned,
    _Recorder,
    _Tracker,
    bind_batch,
    run_on_fakes,
)
from dpquant_compile.passes.canonical.inline_modules import has_hooks
from dpquant_compile.passes.fx_utils import is_known_operator, node_source, op_name
from dpquant_compile.passes.runner import PassResult
from dpquant_compile.passes.snapshot import storage_of
from dpquant_compile.sites import BatchAxis

__all__ = ["Mixed", "verify_isolation"]


@dataclass(frozen=True)
class Mixed(Lost):
    """A value in which samples were mixed, or may have been: by which operator of which node."""

    node: fx.Node
    position: int  # of the node in its graph
    op: str


State = BatchAxis | Mixed | Shared | Rows | None


def verify_isolation(
    gm: fx.GraphModule, *, args: Sequence[Any], kwargs: Mapping[str, Any], batch: int | None = None
) -> PassResult:
    """Prove that each sample's outputs depend on that sample and the parameters only, or raise `IsolationError`.

        x - x.mean(0)             →   IsolationError: node 'mean' (model.py:12: …), aten.mean, reduces over the batch
        x - x.mean(1, True)       →   meta["batched"] = True, meta["batch_axis"] = BatchAxis(0)
        cls.expand(len(x), 1, 8)  →   meta["batched"] = False, meta["expanded_batch"] = BatchAxis(0)

    Sets on nodes with tensor outputs meta["batched"], whether the value depends on data of the batch;
    meta["batch_axis"], where its samples lie (None for constants, and for mixed values that reach nothing); and, for
    constants that are equal for all samples, meta["expanded_batch"], where the batch lies in them. On nodes whose
    isolation a rule of the user claims, meta["own_rule"] names the operator.
    Refused: mixed values in outputs or in writes into parameters, buffers or inputs; any write of the batch into state,
    which would carry samples to later batches; operators without a rule, since nothing proves them; calls of code that
    is neither PyTorch's nor this library's; and attributes that forward() assigns.
    The size of the batch itself is public. Random numbers must be drawn for each sample, as dropout does.
    Requires: `canonicalize`; `track_batch`, which chooses the inputs that are the batch (without it, all with the
    batch's size in dimension 0 are); the graph of the mode (train or eval) that is to be proved.
    Ensures: nodes and edges are untouched. Numerics: unchanged; nothing is computed.
    Guarantee: if it returns, each sample's outputs, and so its gradient, depend only on that sample, on parameters and
    on constants. This bounds what one sample can change after clipping.
    """
    _check_code(gm)
    inputs, actual, alike = bind_batch(gm, args, kwargs, batch)
    ids = {id(leaf) for leaf in alike}
    chosen = {id(leaf) for node, value in inputs for leaf in _batch_leaves(node, value, ids)}
    try:
        recorders = [_run(gm, inputs, chosen, actual, probe) for probe in PROBES]
    except CaptureError:  # a model that contains its batch size as a number holds for that size only
        recorders = [_run(gm, inputs, chosen, actual, actual)]
    findings = [finding for recorder in recorders for finding in recorder.findings()]
    if findings:
        raise IsolationError(_message(*min(findings, key=lambda finding: finding[0].position)))
    _check_inputs(gm, inputs, chosen, ids, recorders[0])
    for node in gm.graph.nodes:
        notes = [recorder.notes.get(node, {}) for recorder in recorders]
        if any(other.get("batch_axis") != notes[0].get("batch_axis") for other in notes):
            raise IsolationError(f"{_place(node)}: where samples lie depends on the size of the batch; {_NOT_PROVED}")
        node.meta.pop("expanded_batch", None)
        node.meta.pop("own_rule", None)
        node.meta |= {key: value for key, value in notes[0].items() if all(n.get(key) == value for n in notes)}
    return PassResult(gm, False)


def _check_code(gm: fx.GraphModule) -> None:
    """Refuse what a run of operators does not show."""
    for node, reason in opaque_code(gm):
        fix = "write it in torch operators in forward(), or keep it out of the model"
        if "grouped_mm" in op_name(node):  # which sorts the tokens of all samples by expert
            fix = 'model.set_experts_implementation("batched_mm"), which multiplies each token by its experts'
        raise IsolationError(f"{_place(node)}, {op_name(node)}: {reason}; {_NOT_PROVED}. Fix: {fix}.")
    assigned = next((node.meta.get("assigns") for node in gm.graph.nodes if node.op == "output"), None)
    if assigned is not None:
        raise IsolationError(
            f"forward() changes {assigned}. A graph does not keep that, and what is made of a batch must not outlive "
            "it: it has no noise, and later batches would find it. Fix: return such values, one row per sample; count "
            "or cache outside of forward()."
        )


def _batch_leaves(node: fx.Node, value: Any, alike: set[int]) -> Iterator[Any]:
    leaves = tree_leaves(value)
    flags = node.meta.get("batch_leaves", tuple(id(leaf) in alike for leaf in leaves))
    return (leaf for leaf, flag in zip(leaves, flags, strict=True) if flag)


def _run(gm: fx.GraphModule, inputs: Inputs, chosen: set[int], actual: int, probe: int) -> "_Prover":
    prover = _Prover(gm, _Isolation(probe, certain=probe in PROBES), actual)
    run_on_fakes(prover, inputs, chosen)
    prover.settle()
    return prover


def _check_inputs(gm: fx.GraphModule, inputs: Inputs, chosen: set[int], alike: set[int], run: "_Prover") -> None:
    """Refuse an input with the batch's size that does not count as the batch, if it could be one: it hides samples."""
    for node, value in inputs:
        for leaf in tree_leaves(value):
            if id(leaf) in alike - chosen:
                try:
                    _run(gm, inputs, chosen | {id(leaf)}, run.actual, run.tracker.batch)
                except CaptureError:
                    continue  # it is no batch: the model fails if this input grows with the batch
                except IsolationError:
                    pass  # the model runs up to where it mixes samples
                raise IsolationError(
                    f"input {node.name!r} of shape {tuple(leaf.shape)} may hold one row per sample or be a constant; "
                    f"{_NOT_PROVED}. Fix: if it is a constant, make it a buffer of the model before make_private."
                )


# Messages

_NOT_PROVED = "that samples are isolated cannot be proved"
_FIXES = (
    ("batch_norm", "call dpquant_compile.replace_batch_norm(model) before compile, or use GroupNorm"),
    ("hook", "remove the hook"),
    ("pdist", "take distances within a sample, as torch.cdist(x, x) does for x of shape [B, n, d]"),
    ("attention", "pass inputs batch first, and set batch_first=True"),
    ("random numbers", "draw a row for each sample, as torch.rand_like(x) or dropout on x does"),
    ("loss", "return the logits, and compute the loss by the criterion given to make_private"),
)


def _message(mixed: Mixed, reached: str, scalar: bool) -> str:
    fix = next((fix for word, fix in _FIXES if word in f"{mixed.op} {mixed.reason}"), None)
    if "expert" in (node_source(mixed.node) or ""):
        fix = fix or (
            "keep tokens of different samples apart; where this balances the experts of a mixture, "
            "config.output_router_logits=False before compile"
        )
    if "buffer" in reached:
        fix = fix or "do not keep data of samples in the model (of InstanceNorm: track_running_stats=False)"
    elif "no rule" in mixed.reason:
        fix = fix or (
            f"use other operators. If you can prove that {mixed.op} keeps samples apart, give it a rule by "
            "dpquant_compile.register_batch_rule"
        )
    elif scalar:
        fix = fix or "return one row per sample, and compute the loss by the criterion given to make_private"
    fix = fix or "work within each sample, along dimensions other than the batch's"
    return (
        f"{_place(mixed.node)}, {mixed.op}: {mixed.reason}, and this reaches {reached}. The gradient of one sample "
        f"could depend on the others, and then clipping does not bound what one sample can change. Fix: {fix}."
    )


def _place(node: fx.Node) -> str:
    return f"node {node.name!r} ({node_source(node) or 'source line unknown'})"


# The run


class _Prover(_Recorder):
    """Runs the graph node by node; records the states of values, and where mixed ones end."""

    tracker: "_Isolation"

    def __init__(self, gm: fx.GraphModule, tracker: "_Isolation", actual: int) -> None:
        super().__init__(gm, tracker, actual)
        self._values: dict[fx.Node, Tensor] = {}
        self._outputs: list[Tensor] = []
        self._unseen = {node: reason for node in gm.graph.nodes if (reason := _beyond_operators(gm, node)) is not None}

    def run_node(self, n: fx.Node) -> Any:
        self.tracker.at(n)
        result = super().run_node(n)
        leaves = tensors(result)
        if n in self._unseen:
            for leaf in leaves:
                self.tracker.axes[leaf] = self.tracker.mixed(Lost(self._unseen[n]), str(n.target))
        if n.op == "output":
            self._outputs = leaves
        return result

    def _note(self, node: fx.Node, result: Tensor, axis: Axis) -> dict[str, Any]:
        self._values[node] = result
        return {}

    def settle(self) -> None:
        """Record the states after the run: a later node may write into what an earlier one made."""
        for node, value in self._values.items():
            state = self.tracker.state_of(value)
            axis = state if isinstance(state, BatchAxis) else None
            self.notes[node] = {"batched": isinstance(state, BatchAxis | Mixed), "batch_axis": axis}
            if node in self.tracker.own:
                self.notes[node]["own_rule"] = self.tracker.own[node]
            if isinstance(state, Shared) and (shared := state.axis or self.tracker.only_axis(value)) is not None:
                self.notes[node]["expanded_batch"] = shared

    def findings(self) -> Iterator[tuple[Mixed, str, bool]]:
        """Each mixed value that has an effect, what it reaches, and whether it is one number."""
        for written, name in self.tracker.writes:
            yield written, f"the buffer, parameter, input or tensor {name.removeprefix('_const.')!r}", False
        for output in self._outputs:
            state = self.tracker.state_of(output)
            if isinstance(state, Mixed):
                yield state, "an output of the model", output.dim() == 0


def _beyond_operators(gm: fx.GraphModule, node: fx.Node) -> str | None:
    """What a node does beyond the operators that run here, if that may affect the samples."""
    if node.op == "call_module" and has_hooks(gm.get_submodule(str(node.target))):
        return f"a hook on this module may do anything with the batch; {_NOT_PROVED}"
    return None


class _Isolation(_Tracker):
    """Records the state of every tensor that an operator makes, and writes of the batch into what outlives it."""

    def __init__(self, batch: int, certain: bool = True) -> None:
        """`certain`: no dimension has the size of the batch by chance."""
        super().__init__(batch)
        self._certain = certain
        self.writes: list[tuple[Mixed, str]] = []
        self._kept: dict[int, str] = {}  # memory of parameters, buffers and constant inputs
        self.own: dict[fx.Node, str] = {}  # nodes whose isolation a user's rule claims, with the operator
        self._node: Any = None
        self._position = -1

    def at(self, node: fx.Node) -> None:
        """Set the node that runs next."""
        self._node, self._position = node, self._position + 1

    def enter(self, value: Tensor, name: str | None) -> None:
        super().enter(value, name)
        # Tensors that forward() makes from plain numbers are stored with the buffers, but each call makes new ones.
        if name is not None and not name.startswith("_const._tensor_constant"):
            self._kept.setdefault(storage_of(value), name)

    def state_of(self, value: Any) -> State:
        state: State = self.axes.get(value) if isinstance(value, Tensor) else None
        return state

    def axis_of(self, value: Any) -> Axis:
        """The state as the rules see it: a value that is equal along an axis has the batch on that axis."""
        state = self.state_of(value)
        return state.axis if isinstance(state, Shared) else None if isinstance(state, Rows) else state

    def only_axis(self, value: Tensor) -> BatchAxis | None:
        """The one dimension with the size of the batch."""
        dims = [dim for dim, size in enumerate(value.shape) if size == self.batch]
        return BatchAxis(dims[0]) if len(dims) == 1 else None

    def mixed(self, lost: Lost, op: str) -> Mixed:
        """`lost` with the current node, unless an earlier one caused it."""
        return lost if isinstance(lost, Mixed) else Mixed(lost.reason, self._node, self._position, op)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors((args, kwargs))
        states = [self.state_of(value) for value in inputs]
        contiguous = not inputs or inputs[0].is_contiguous()
        written = [(value, self.state_of(value)) for value in rules.written(func, args, kwargs)]
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if not any(isinstance(state, BatchAxis | Mixed) for state in states):
                raise
            raise IsolationError(
                f"{_place(self._node)}, {func}: values of the batch become a number or a size, which all samples "
                "share. Fix: keep values in tensors; use torch.where or masks instead."
            ) from error
        # Only PyTorch's own operators are known by their names.
        name = func.overloadpacket.__name__ if func.namespace == "aten" else str(func)
        outputs = tensors(result)
        found = [
            self._state(func, OpCall(name, args, kwargs, output, self.axis_of, self.batch, contiguous), states)
            for output in outputs
        ]
        for output, state in zip(outputs, found, strict=True):
            self.axes[output] = state
            self._register(output)
        for value, before in written:
            if not any(value is output for output in outputs):
                self.axes[value] = self._written_aside(func, name, args, states)
            self._follow_write(str(func), value, before)
        return result

    def _state(self, func: Any, call: OpCall, states: list[State]) -> State:
        if torch.Tag.nondeterministic_seeded in func.tags:
            source = next(iter(states), None)
            if call.name in rules.BY_SHAPE and isinstance(source, BatchAxis):
                return source
            if call.name in rules.BY_SHAPE or not any(isinstance(state, BatchAxis | Mixed) for state in states):
                return self._drawn(func, call)
            if call.name not in rules.DRAWS and not any(isinstance(state, Mixed) for state in states):
                return self.mixed(Lost(f"no rule says that {func} draws for each sample alone"), str(func))
        if call.name in rules.BY_SHAPE:
            return Shared()
        mixed = [state for state in states if isinstance(state, Mixed)]
        if mixed:
            return min(mixed, key=lambda state: state.position)
        if not any(isinstance(state, BatchAxis) for state in states):
            return self._constant(func, call, states)
        axis = self._axis(func, call)
        return axis if isinstance(axis, BatchAxis) else self.mixed(axis or Lost("the batch is lost"), str(func))

    def _drawn(self, func: Any, call: OpCall) -> State:
        """The state of random numbers that were drawn without the batch: rows of the samples, or shared by them."""
        value = call.output
        dims = [dim for dim, size in enumerate(value.shape) if size > 0 and size % self.batch == 0]
        rows = call.name == "multinomial" and value.dim() == 2  # one draw for each row of probabilities
        if call.name not in rules.DRAWN_APART and not rows:
            return self.mixed(Lost("random numbers that are drawn together: each depends on the others"), str(func))
        if self._certain and len(dims) == 1 and dims[0] in ((0,) if rows else dims):
            return BatchAxis(dims[0], 1, value.shape[dims[0]] // self.batch)
        reason = "random numbers that the samples of a micro-batch share: who shares them depends on the others"
        return self.mixed(Lost(reason), str(func))

    def _constant(self, func: Any, call: OpCall, states: list[State]) -> State:
        """The state of a value that is computed without the batch."""
        if not is_known_operator(func) and own_rule(func) is None:
            return self.mixed(Lost(f"no rule says what {func} does, and whether it draws random numbers"), str(func))
        first = next(iter(states), None)
        if not states:
            return Shared() if call.name in rules.FACTORIES else Rows(BatchAxis(0)) if rules.is_count(call) else None
        if call.name in rules.FILLS and len(states) == 1:
            return Shared()
        if all(state == Shared() for state in states) and rules.keeps_alike(func, call.name):
            return Shared()
        if isinstance(first, Rows) and call.name in rules.SHAPES:
            rows = first.axis
            axis = self._axis(func, replace(call, axis_of=lambda value: rows))
            return Rows(axis) if isinstance(axis, BatchAxis) else None
        if first is None and call.name in ("expand", "repeat"):
            return rules.repeated(call, self._certain)

        def assumed(value: Any) -> Axis:
            return self.only_axis(value) if self.state_of(value) == Shared() else self.axis_of(value)

        if all(assumed(value) is None for value in tensors((call.args, call.kwargs))):
            return None
        axis = self._axis(func, replace(call, axis_of=assumed))
        return Shared(axis) if isinstance(axis, BatchAxis) else None

    def _rule(self, func: Any, call: OpCall) -> Axis:
        if own_rule(func) is not None:
            self.own.setdefault(self._node, name_of(func))
        return rules.strict_axis(func, call, self.state_of)

    def _written_aside(self, func: Any, name: str, args: Any, states: list[State]) -> State:
        """The state of an argument that an operator writes but does not return."""
        axis = self.state_of(args[0]) if args else None
        if name in rules.BATCH_NORMS and isinstance(axis, BatchAxis) and axis.dim == 1:
            return replace(axis, dim=0)  # statistics of channels, each of which belongs to one sample
        if any(isinstance(state, BatchAxis | Mixed) for state in states):
            norm = "BatchNorm in training mode normalises over the batch, and keeps its statistics"
            lost = Lost(norm if name in rules.BATCH_NORMS else f"{func} writes values of the batch")
            return self.mixed(lost, str(func))
        return None

    def _follow_write(self, op: str, value: Tensor, before: State) -> None:
        """Record a write into what outlives the call, and pass it on to all views of the memory."""
        state, name = self.state_of(value), self._kept.get(storage_of(value))
        if name is not None and isinstance(state, BatchAxis | Mixed):
            carried = Lost("values of the batch are written into state, where later batches find them")
            self.writes.append((self.mixed(state if isinstance(state, Mixed) else carried, op), name))
        if isinstance(state, BatchAxis) and state == before:
            return  # the axes of the memory are unchanged
        for other in self._sharing(value):
            self.axes[other] = self._seen_through(other, value, state, op)

    def _seen_through(self, other: Tensor, written: Tensor, state: State, op: str) -> State:
        theirs = self.state_of(other)
        if isinstance(theirs, Mixed) or isinstance(state, Mixed):
            return theirs if isinstance(theirs, Mixed) else state
        if _geometry(other) == _geometry(written):
            return state
        if isinstance(state, BatchAxis):
            alike = theirs in (Shared(), Shared(state)) and _aligned(other, written, state.dim)
            if alike:
                return state
        if isinstance(state, BatchAxis) or isinstance(theirs, BatchAxis):
            return self.mixed(Lost("a part of a value is written through a view, and whose it is is not known"), op)
        return None


def _geometry(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.stride(), value.storage_offset()
