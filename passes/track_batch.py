"""Pass: follow the batch through the graph, so that every site knows which elements belong to one sample."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from dpquant_compile.errors import CaptureError
from dpquant_compile.passes.batch_rules import Axis, Lost, OpCall, output_axis
from dpquant_compile.passes.infra import PassResult, bind_inputs, node_source
from dpquant_compile.sites import BatchAxis, Site, Skipped

__all__ = ["batch_size", "track_batch"]

# A prime, so that no fold of the batch is mistaken for a plain dimension.
PROBE_BATCH = 7


def batch_size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The size of dimension 0 of the first tensor with dimensions among the arguments of a call."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    raise CaptureError("the model was called without a tensor that has a batch dimension; pass the batch as a tensor")


def track_batch(
    gm: fx.GraphModule, *, args: Sequence[Any], kwargs: Mapping[str, Any], any_batch: bool = True
) -> PassResult:
    """Run the graph on fake tensors of the call's shapes and write what is learnt into node.meta.

    Sets meta["shape"] (with the call's batch size) and meta["batch_axis"] on nodes with tensor outputs; on site nodes
    meta["axis"], the `BatchAxis` of the input, meta["output_axis"], and a `Site` with shapes and FLOPs per sample. A
    site whose batch cannot be followed becomes a meta["skipped"] with the reason: quantizing it could give one scale
    to many samples.
    Requires: `mark_sites`; dimension 0 of the inputs is the batch. Ensures: nodes and edges are untouched.
    Numerics: unchanged; nothing is computed.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    inputs = list(zip(placeholders, bind_inputs(gm, args, kwargs), strict=True))
    actual = batch_size([value for node, value in inputs if "state" not in node.meta], {})
    probe = PROBE_BATCH if any_batch else actual
    mode, tracker = FakeTensorMode(allow_non_fake_inputs=True), _Tracker(probe)

    def fake(value: Any, state: bool) -> Any:
        if isinstance(value, torch.SymInt):
            return int(value)
        if not isinstance(value, Tensor):
            return value
        shape = [int(size) for size in value.shape]
        batched = not state and value.dim() > 0 and shape[0] == actual
        with mode:
            made = torch.empty([probe, *shape[1:]] if batched else shape, dtype=value.dtype, device=value.device)
        if batched:
            tracker.axes[made] = BatchAxis(0)
        return made

    fakes = [tree_map(partial(fake, state="state" in node.meta), value) for node, value in inputs]
    # The model's tensors are swapped for fakes too: else a BatchNorm would count this run as a training step.
    state = {**dict(gm.named_parameters(remove_duplicate=False)), **dict(gm.named_buffers(remove_duplicate=False))}
    swapped: dict[str, Tensor] = {
        name: mode.from_tensor(value.detach(), static_shapes=True) for name, value in state.items()
    }
    with mode, tracker, torch.no_grad(), _reparametrize_module(gm, swapped):
        _Recorder(gm, tracker, actual).run(*fakes, enable_io_processing=False)
    return PassResult(gm, False)


class _Tracker(TorchDispatchMode):
    """Keeps the batch axis of every tensor that an operator makes."""

    def __init__(self, batch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.batch = batch
        self.axes: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def axis_of(self, value: Any) -> Axis:
        axis: Axis = self.axes.get(value) if isinstance(value, Tensor) else None
        return axis

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        carried = any(self.axis_of(value) is not None for value in inputs)
        result = func(*args, **kwargs)
        if carried:
            name = func.overloadpacket.__name__
            for output in tree_leaves(result):
                if isinstance(output, Tensor):
                    self.axes[output] = self._axis(func, OpCall(name, args, kwargs, output, self.axis_of, self.batch))
        return result

    def _axis(self, func: Any, call: OpCall) -> Axis:
        axis = output_axis(func, call)
        if isinstance(axis, BatchAxis):
            size = axis.outer * self.batch * axis.inner
            if axis.dim >= call.output.dim() or call.output.shape[axis.dim] != size:
                # Second outputs (indices, statistics, masks) that do not carry the batch where the first does.
                return Lost(f"an output of aten.{call.name} does not carry the batch")
        return axis


class _Recorder(fx.Interpreter):
    """Runs the graph node by node and writes shapes and axes into node.meta."""

    def __init__(self, gm: fx.GraphModule, tracker: _Tracker, actual: int) -> None:
        super().__init__(gm)
        self.tracker = tracker
        self.actual = actual

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            axis = self.tracker.axis_of(result)
            n.meta["shape"] = self._shape(result, axis)
            n.meta["batch_axis"] = axis if isinstance(axis, BatchAxis) else None
            if "site" in n.meta:
                self._record_site(n, result, axis)
        return result

    def _shape(self, value: Tensor, axis: Axis) -> tuple[int, ...]:
        shape = [int(size) for size in value.shape]
        if isinstance(axis, BatchAxis):
            shape[axis.dim] = axis.outer * self.actual * axis.inner
        return tuple(shape)

    def _record_site(self, node: fx.Node, result: Tensor, output_axis: Axis) -> None:
        site: Site = node.meta["site"]
        x, weight = (self.env[arg] for arg in node.args[:2] if isinstance(arg, fx.Node))
        axis = self.tracker.axis_of(x)
        if not isinstance(axis, BatchAxis) or not isinstance(output_axis, BatchAxis):
            lost = axis if not isinstance(axis, BatchAxis) else output_axis
            why = lost.reason if isinstance(lost, Lost) else "its input does not carry the batch"
            node.meta["skipped"] = Skipped(
                site.name, site.op, f"samples cannot be told apart here: {why}", node_source(node)
            )
            del node.meta["site"]
            return
        node.meta["axis"], node.meta["output_axis"] = axis, output_axis
        per_output = 2 * weight.numel() // weight.shape[0]
        per_sample = result.numel() // self.tracker.batch
        node.meta["site"] = replace(
            site,
            input_shape=self._shape(x, axis),
            output_shape=self._shape(result, output_axis),
            weight_shape=tuple(int(size) for size in weight.shape),
            flops=per_output * per_sample,
        )
