"""Trace the computation of a private program into one joint graph of ATen operators."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpquant_compile.errors import IsolationError
from dpquant_compile.passes.batch.own_rules import backward_names
from dpquant_compile.passes.private.joint_facts import INPUT, TENSOR, JointFacts, keep_facts
from dpquant_compile.passes.runner import PassResult
from dpquant_compile.privacy.clipping.joint_graph import Inputs, JointSpec, Tracing

__all__ = ["no_autocast", "refuse_custom_backwards", "trace_joint"]


def trace_joint(gm: fx.GraphModule, *, spec: JointSpec, example: Inputs, decompose: bool) -> PassResult:
    """From the canonical graph of a model to its joint graph: forward, norms, clip factors and weighted sums.

        y = linear(x, fc.weight)   →   y = private_site(x, …)
                                       squared_norms_fc_weight = sample_norms(x, grad, …)
                                       clip_factors = where(finite, where(live, scale, 0), nan)
                                       clipped_sum_fc_weight = weighted_grad(x, grad, clip_factors, …)

    Requires: `verify_isolation`; `gm` is `spec.base`; `example` has the shapes of every run.
    Ensures: a functional graph of ATen operators that takes `spec.flat(inputs)` and the gradients of the outputs; with
    `decompose`, in Inductor's operators. It carries `JointFacts`; nodes are named after what they compute.
    Numerics: those of `Tracing`. Parameters are constants to autograd, so no gradient reaches one around the clipping.
    """
    traced = _Traced(spec, example)
    joint = traced.joint(decompose)
    keep_facts(joint, traced.facts)
    return PassResult(joint, True)


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """Switch autocast off: clipping and sums are in float32 or wider, whatever region the caller is in."""
    with torch.autocast("cpu", enabled=False):
        yield


class _Traced:
    """One trace: the functions that are traced, and what they record."""

    def __init__(self, spec: JointSpec, example: Inputs) -> None:
        self.spec, self.example = spec, example
        self.leaves: tuple[Any, ...] = ()
        self.differentiable: tuple[bool, ...] = ()
        self.ways: tuple[tuple[str, str, str], ...] = ()
        self.computed: tuple[str, ...] = ()

    @property
    def facts(self) -> JointFacts:
        count = len(self.differentiable)
        return JointFacts(self.spec.order, count, self.differentiable, self.leaves, self.ways)

    def joint(self, decompose: bool) -> fx.GraphModule:
        # All shapes are fixed, but Inductor looks up no program in its cache without a shape environment.
        fixed = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        mode = FakeTensorMode(allow_non_fake_inputs=False, shape_env=fixed)
        primals: list[Tensor] = [mode.from_tensor(v, static_shapes=True) for v in self.spec.flat(self.example)]
        with mode, no_autocast(), torch.inference_mode(False):
            _, outputs, _, _ = self._forward(primals)
            tensors = [o for o in outputs if isinstance(o, Tensor)]
            self.leaves = tuple(TENSOR if isinstance(o, Tensor) else o for o in outputs)
            self.differentiable = tuple(o.requires_grad for o in tensors)
            ends = [o for o in tensors if o.requires_grad]
            refuse_custom_backwards(ends)
            tangents = [torch.empty_like(end, memory_format=torch.contiguous_format).detach() for end in ends]
            gm = make_fx(lambda primals, tangents: self._run(primals, tangents), tracing_mode="real")(primals, tangents)
            again = decompose or any(_mutates(node) for node in gm.graph.nodes)
            if again:
                gm = _functional(gm, primals, tangents)
        self._name(gm)
        if again:
            gm.graph.eliminate_dead_code()
        gm.recompile()
        return gm

    def _forward(self, values: Sequence[Tensor]) -> tuple[Tracing, list[Any], Tensor, Tensor]:
        spec, rest = self.spec, iter(values)
        sizes = (len(spec.attributes), len(spec.packed_weights), 3, 1, 1)
        read, packed, table, (bounds,), (live,) = ([next(rest) for _ in range(size)] for size in sizes)
        leaves, structure = tree_flatten(list(self.example.args))
        given = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        attributes = dict(zip(spec.attributes, read, strict=True))
        weights = dict(zip(spec.packed_weights, packed, strict=True))
        tracing = Tracing(spec, attributes, weights, (table[0], table[1], table[2]))
        with torch.enable_grad():
            outputs = tracing.outputs(tree_unflatten(given, structure))
        return tracing, outputs, bounds, live

    def _run(self, primals: list[Tensor], tangents: list[Tensor]) -> list[Any]:
        tracing, outputs, bounds, live = self._forward(primals)
        # Outputs come before anything that belongs to backward: see `tag_forward`.
        results = [o.detach() for o in outputs if isinstance(o, Tensor)]
        sums, dropped = tracing.private(outputs, tangents, bounds, live)
        self.ways, self.computed = tracing.ways, tuple(tracing.computed)
        # Norms and factors are outputs only until `_name` has named their nodes.
        return [*results, *sums, dropped, *tracing.computed.values()]

    def _name(self, gm: fx.GraphModule) -> None:
        """Name inputs, norms, clip factors and sums; remove the outputs that only served this."""
        for node, name in zip(gm.graph.find_nodes(op="placeholder"), self._inputs(), strict=False):
            node.meta[INPUT] = name
            # Inductor recognises inputs by the prefix of their names.
            _rename(node, f"{node.target}_{name}")
        output = gm.graph.output_node()
        values = list(output.args[0])  # type: ignore[arg-type]
        kept = len(values) - len(self.computed)
        sums = zip(values[len(self.differentiable) : kept - 1], self.spec.order, strict=True)
        one_factor = self.spec.clipping.mode != "per_layer"
        names = {
            node: "clip_factors" if one_factor and name.startswith("clip_factors") else name
            for node, name in zip(values[kept:], self.computed, strict=True)
        }
        names |= {node: f"clipped_sum {name}" for node, name in sums}
        names[values[kept - 1]] = "samples_left_out"
        for node, name in names.items():
            if node.op != "placeholder":
                _rename(node, name)
        output.args = (values[:kept],)
        gm.graph.set_codegen(fx.graph.CodeGen())  # flat inputs and outputs, to which passes may add

    def _inputs(self) -> tuple[str, ...]:
        """What each input is: the spec's names, then the tensors of the batch."""
        placeholders = self.spec.base.graph.find_nodes(op="placeholder")
        batch = [
            f"input {node.name}"
            for node, value in zip(placeholders, self.example.args, strict=True)
            for leaf in tree_flatten(value)[0]
            if isinstance(leaf, Tensor)
        ]
        return (*self.spec.flat_names, *batch)


def _functional(gm: fx.GraphModule, primals: list[Tensor], tangents: list[Tensor]) -> fx.GraphModule:
    """The same graph without mutations, in the operators that Inductor compiles."""
    functional: Callable[..., Any] = torch.func.functionalize(gm, remove="mutations")

    def again(primals: list[Tensor], tangents: list[Tensor]) -> Any:
        return functional(primals, tangents)

    with torch.no_grad():
        return make_fx(again, decomposition_table=select_decomp_table(), tracing_mode="real")(primals, tangents)


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _rename(node: fx.Node, name: str) -> None:
    """Give a node a name that copies of its graph keep: fx changes upper case, repeated underscores, and a number
    after the last underscore."""
    words = re.sub(r"[\W_]+", "_", name.lower())
    node._rename(re.sub(r"_(\d+)$", r"\1", words))


def refuse_custom_backwards(outputs: Sequence[Tensor]) -> None:
    """Refuse an autograd graph that contains a backward which is neither PyTorch's nor this library's.

    Guarantee: a second check behind `verify_isolation`, which proves forwards. All operators that are differentiated
    here have derivatives that isolate samples as their forwards do; of operators with a rule of the user, the rule
    claims that too.
    """
    stack: list[Any] = [output.grad_fn for output in outputs]
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = type(node).__name__
        known = ("GeneratedBackwardFor_dpquant_", *backward_names())
        if isinstance(node, BackwardCFunction) and not name.startswith(known):
            raise IsolationError(
                f"the model has a backward of its own, {name}, and nothing proves that it keeps samples apart. Fix: "
                "write it in torch operators in forward(), or keep it out of the model."
            )
        stack.extend(following for following, _ in node.next_functions)
