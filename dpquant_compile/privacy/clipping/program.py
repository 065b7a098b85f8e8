"""Private programs: a joint graph for one batch size, cut into forward and backward, and compiled."""

from collections.abc import MutableSequence, Sequence
from functools import partial
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from dpquant_compile import pipeline
from dpquant_compile.backends.graph_compile import INDUCTOR, Recorder, compile_graph
from dpquant_compile.passes.fx_utils import draws_seeded
from dpquant_compile.passes.private.cut_joint import backward_of, forward_of
from dpquant_compile.passes.private.free_saved_inputs import SavedInputs
from dpquant_compile.passes.private.joint_facts import facts_of
from dpquant_compile.passes.runner import PassRecord
from dpquant_compile.privacy.clipping.joint_graph import Inputs, JointSpec
from dpquant_compile.privacy.clipping.parameter_uses import axis_of
from dpquant_compile.privacy.clipping.trace_joint import no_autocast, trace_joint
from dpquant_compile.progress import progress

__all__ = ["PrivateProgram"]


class PrivateProgram:
    """Forward, backward, clipping and sums of a micro-batch, compiled for one batch size.

    `run_forward` gives the outputs and what backward needs. `run_backward` takes that and the outputs' gradients, and
    gives the sums of clipped gradients in the order of `spec.order`, and the number of samples that were left out.
    """

    def __init__(
        self, spec: JointSpec, example: Inputs, inner: str, recorder: Recorder, log: MutableSequence[PassRecord]
    ) -> None:
        self.spec = spec
        with progress("private program", "tracing", "forward", "backward") as begin_part:
            begin_part()
            trace = partial(trace_joint, spec=spec, example=example, decompose=inner in INDUCTOR)
            program = pipeline.private(spec.base, trace, inner, log)
            facts, forward, backward = facts_of(program), forward_of(program), backward_of(program)
            # Kept here: the graph is shared with programs for other shapes.
            self.axes = tuple(axis_of(leaf) if isinstance(leaf, fx.Node) else None for leaf in _leaves(spec.base))
            self.outputs, self.differentiable, self.ways = facts.leaves, facts.differentiable, facts.ways
            self.draws_random = any(draws_seeded(node) for part in (forward, backward) for node in part.graph.nodes)
            self._count = facts.forward_outputs
            self._saved_inputs = SavedInputs.of(program)
            if inner == "regions":
                forward, backward = pipeline.in_regions((forward, backward), log)
            begin_part()
            self._forward = compile_graph(forward, "private forward", inner, recorder)
            begin_part()
            self._backward = compile_graph(backward, "private backward", inner, recorder)

    def run_forward(self, inputs: Inputs) -> tuple[list[Any], list[Any]]:
        """The flat outputs of the model on the padded batch, and what `run_backward` needs."""
        with no_autocast():
            results = self._forward(self.spec.flat(inputs))
        outputs, saved = list(results[: len(self.differentiable)]), list(results[self._count :])
        self._saved_inputs.free(saved, inputs.table[0])
        return outputs, saved

    def run_backward(self, saved: list[Any], tangents: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """The clipped sums and the count of samples left out; empties `saved` to free memory early."""
        saved.extend(tangents)
        with no_autocast():
            results = self._backward(saved)
        return list(results[:-1]), results[-1]


def _leaves(base: fx.GraphModule) -> list[Any]:
    return tree_leaves(base.graph.output_node().args[0])
