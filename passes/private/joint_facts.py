"""`JointFacts`: what the passes over a private program must know beyond its nodes."""

from dataclasses import dataclass
from typing import Any

from torch import fx

__all__ = ["INPUT", "TENSOR", "JointFacts", "facts_of", "keep_facts", "outputs_of"]

# Marks in `JointFacts.leaves` a tensor that the program computes; other entries are constants.
TENSOR = object()

# Key in a placeholder's metadata: the name of the input, such as "fc.weight" or "bounds".
INPUT = "private_input"

_KEY = "private"


@dataclass(frozen=True)
class JointFacts:
    """The outputs of a joint graph, in order: those of forward, a clipped sum per parameter, the samples left out.

    parameters       the parameters whose clipped sums the program gives, in order
    forward_outputs  how many of the first outputs are forward's: the model's own, then those that a pass has added
    differentiable   for each tensor that the model returns, whether it has a gradient
    leaves           the leaves of what the model returns: TENSOR, or a constant
    ways             parameter, its uses, and how its per-sample gradients are computed
    """

    parameters: tuple[str, ...]
    forward_outputs: int
    differentiable: tuple[bool, ...]
    leaves: tuple[Any, ...] = ()
    ways: tuple[tuple[str, str, str], ...] = ()


def facts_of(gm: fx.GraphModule) -> JointFacts:
    """The facts of a joint graph, or of the two programs that it is cut into."""
    facts: JointFacts = gm.meta[_KEY]
    return facts


def keep_facts(gm: fx.GraphModule, facts: JointFacts | None) -> None:
    """Attach `facts` to `gm`; None removes inherited ones."""
    gm.meta.pop(_KEY, None)
    if facts is not None:
        gm.meta[_KEY] = facts


def outputs_of(gm: fx.GraphModule) -> list[Any]:
    """The values that a graph with a flat list of outputs returns."""
    outputs: Any = gm.graph.output_node().args[0]
    return list(outputs)
