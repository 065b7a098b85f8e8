"""Private programs: a plan, traced for one batch size, cut into forward and backward, and compiled."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from dpquant_compile.backends.graph_compile import Recorder, compile_graph
from dpquant_compile.errors import IsolationError
from dpquant_compile.passes.batch.opaque_code import is_known_operator
from dpquant_compile.passes.private.free_saved_inputs import find_savings
from dpquant_compile.passes.private.pack_relu_masks import pack_masks
from dpquant_compile.passes.private.recompute_relu_masks import recompute_masks
from dpquant_compile.privacy.clipping.joint_graph import Plan, Tracing
from dpquant_compile.privacy.clipping.parameter_uses import read_attribute

__all__ = ["Inputs", "PrivateProgram", "refuse_custom_backwards"]


@dataclass(frozen=True)
class Inputs:
    """What one run of a program is given, beside the model's own tensors.

    args      one value per placeholder, padded to the program's batch
    packed    weights as this step's low-precision products take them, by `packed_key`
    table     policy, keys, sample ids
    bounds    clipping bounds; `live` [B] tells samples from padding
    """

    args: Sequence[Any]
    packed: Mapping[str, Tensor]
    table: tuple[Tensor, Tensor, Tensor]
    bounds: Tensor
    live: Tensor


class PrivateProgram:
    """Forward, backward, clipping and sums of a micro-batch, compiled for one batch size.

    `run_forward` gives the outputs and what backward needs; `run_backward` takes that and the outputs' gradients, and
    gives the sums of clipped gradients in the order of `plan.order`, and the number of samples that were left out.
    """

    TENSOR = object()  # stands in `outputs` for what the program computes; other entries are constants

    def __init__(self, plan: Plan, example: Inputs, inner: str, recorder: Recorder) -> None:
        self.plan = plan
        nodes = plan.base.graph.nodes
        self.attributes = tuple(
            dict.fromkeys(
                str(n.target)
                for n in nodes
                if n.op == "get_attr" and isinstance(read_attribute(plan.base, str(n.target)), Tensor)
            )
        )
        self.packed = tuple(
            dict.fromkeys(key for n in nodes if plan.row(n) is not None and (key := plan.packed(n)) is not None)
        )
        joint, primals, tangents = self._trace(example, inner == "inductor")
        _share_operands(joint)
        if inner == "inductor":
            with V.set_fake_mode(primals[0].fake_mode):  # type: ignore[attr-defined]
                joint_graph_passes(joint)
        # The min-cut recomputes what Inductor can fuse; a graph that is interpreted gains nothing by it. But the plain
        # cut would draw random numbers again in backward.
        self.draws_random = any(_is_random(node) for node in joint.graph.nodes)
        interpreted = inner != "inductor" and not self.draws_random
        cut = default_partition if interpreted else min_cut_rematerialization_partition
        # Two equal calls of a random operator are two draws, which merging equal nodes does not know.
        if not self.draws_random:
            joint.graph = fx_graph_cse(joint.graph)
            joint.recompile()
        self._count = len(self.differentiable)
        if inner == "inductor":
            recompute_masks(joint)
            self._count = pack_masks(joint, self._count)
        _tag_forward(joint, self._count)
        with functorch_config.patch(cse=False):
            forward, backward = cut(
                joint, (primals, tangents), num_fwd_outputs=self._count, static_lifetime_input_indices=None
            )
        self._savings = find_savings(backward)
        self._forward = compile_graph(forward, "private forward", inner, recorder)
        self._backward = compile_graph(backward, "private backward", inner, recorder)

    def run_forward(self, inputs: Inputs) -> tuple[list[Any], list[Any]]:
        """The flat outputs of the model on the padded batch, and what `run_backward` needs."""
        with _no_autocast():
            results = self._forward(self._flat(inputs))
        outputs, saved = list(results[: len(self.differentiable)]), list(results[self._count :])
        self._savings.let_go(saved, inputs.table[0])
        return outputs, saved

    def run_backward(self, saved: list[Any], tangents: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """The clipped sums and the count of samples left out; empties `saved`, so that memory is freed on the way."""
        saved.extend(tangents)
        with _no_autocast():
            results = self._backward(saved)
        return list(results[:-1]), results[-1]

    def _flat(self, inputs: Inputs) -> list[Any]:
        read = [read_attribute(self.plan.base, target).detach() for target in self.attributes]
        packed = [inputs.packed[key] for key in self.packed]
        leaves = [leaf for leaf in tree_leaves(list(inputs.args)) if isinstance(leaf, Tensor)]
        return [*read, *packed, *inputs.table, inputs.bounds, inputs.live, *leaves]

    def _trace(self, example: Inputs, decompose: bool) -> tuple[fx.GraphModule, list[Tensor], list[Tensor]]:
        mode = FakeTensorMode(allow_non_fake_inputs=False)
        primals: list[Tensor] = [mode.from_tensor(value, static_shapes=True) for value in self._flat(example)]
        sizes = (len(self.attributes), len(self.packed), 3, 1, 1)

        def run(values: Sequence[Tensor]) -> tuple[Tracing, list[Any], Tensor, Tensor]:
            rest = iter(values)
            read, packed, table, (bounds,), (live,) = ([next(rest) for _ in range(size)] for size in sizes)
            leaves, spec = torch.utils._pytree.tree_flatten(list(example.args))
            given = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            tracing = Tracing(
                self.plan,
                dict(zip(self.attributes, read, strict=True)),
                dict(zip(self.packed, packed, strict=True)),
                (table[0], table[1], table[2]),
            )
            with torch.enable_grad():
                outputs = tracing.outputs(torch.utils._pytree.tree_unflatten(given, spec))
            return tracing, outputs, bounds, live

        def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Any]:
            tracing, outputs, bounds, live = run(primals)
            results = [
                o.detach() for o in outputs if isinstance(o, Tensor)
            ]  # before what is backward: see _tag_forward
            sums, dropped = tracing.private(outputs, tangents, bounds, live)
            self.ways = tracing.ways
            return [*results, *sums, dropped]

        with mode, _no_autocast(), torch.inference_mode(False):
            _, outputs, _, _ = run(primals)
            self.outputs = tuple(self.TENSOR if isinstance(o, Tensor) else o for o in outputs)
            self.differentiable = tuple(o.requires_grad for o in outputs if isinstance(o, Tensor))
            ends = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
            refuse_custom_backwards(ends)
            tangents = [torch.empty_like(end, memory_format=torch.contiguous_format).detach() for end in ends]
            first = make_fx(joint, tracing_mode="real")(primals, tangents)
            if not decompose and not any(_mutates(node) for node in first.graph.nodes):
                return first, primals, tangents
            functional: Callable[..., Any] = torch.func.functionalize(first, remove="mutations")

            def again(primals: list[Tensor], tangents: list[Tensor]) -> Any:
                return functional(primals, tangents)

            with torch.no_grad():
                second = make_fx(again, decomposition_table=select_decomp_table(), tracing_mode="real")(
                    primals, tangents
                )
        second.graph.eliminate_dead_code()
        second.recompile()
        return second, primals, tangents


def refuse_custom_backwards(outputs: Sequence[Tensor]) -> None:
    """Refuse an autograd graph with a backward that is neither PyTorch's nor this library's.

    Guarantee: a second line behind `verify_isolation`, which proves forwards. What is differentiated here are operators
    whose derivatives keep samples apart as their forwards do.
    """
    stack: list[Any] = [output.grad_fn for output in outputs]
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = type(node).__name__
        if isinstance(node, BackwardCFunction) and not name.startswith("GeneratedBackwardFor_dpquant_"):
            raise IsolationError(
                f"the model has a backward of its own, {name}, of which nothing proves that it keeps samples "
                "apart. Fix: write it in torch operators in forward(), or keep it out of the model."
            )
        stack.extend(following for following, _ in node.next_functions)


def _share_operands(gm: fx.GraphModule) -> None:
    """Round an output gradient once: it is asked for by the input's gradient and by the weight's."""
    known: dict[Any, fx.Node] = {}
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.dpquant.round_operand.default):
        first = known.setdefault(str(node.args), node)
        if first is not node:
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)
    gm.recompile()


def _tag_forward(gm: fx.GraphModule, count: int) -> None:
    """Mark what the first `count` outputs need as forward: the plain cut would compute all of it again in backward."""
    outputs: Any = gm.graph.output_node().args[0]
    needed = {node for node in outputs[:count] if isinstance(node, fx.Node)}
    for node in reversed(gm.graph.nodes):
        if node in needed and node.op != "placeholder":
            node.meta["partitioner_tag"] = "is_forward"
            needed.update(node.all_input_nodes)


def _is_random(node: fx.Node) -> bool:
    if isinstance(node.target, OpOverload) and not is_known_operator(node.target):
        return True  # its author may have left out the tag
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Clipping and sums are in float32 or wider, whatever region a batch comes in."""
    with torch.autocast("cpu", enabled=False):
        yield
