"""`JointFacts`: what the passes of a private program must know of it beyond its nodes."""

from dataclasses import dataclass
from typing import Any

from torch import fx

__all__ = ["INPUT", "TENSOR", "JointFacts", "facts_of", "keep_facts"]

# Stands in `JointFacts.leaves` for a tensor that the program computes; other entries are constants.
TENSOR = object()

# In the metadata of a placeholder: what the program is given there, such as "fc.weight" or "bounds".
INPUT = "private_input"

_KEY = "private"


@dataclass(frozen=True)
class JointFacts:
    """The outputs of a joint graph, in order: those of forward, a clipped sum per parameter, the samples left out.

    parameters       whose clipped sums the program gives, in order
    forward_outputs  how many of the first outputs are forward's: the model's own, then what a pass has added
    differentiable   for each tensor that the model returns, whether it has a gradient
    leaves           the leaves of what the model returns: TENSOR, or a constant
    ways             parameter, what uses it, how its per-sample gradients are taken
    """

    parameters: tuple[str, ...]
    forward_outputs: int
    differentiable: tuple[bool, ...]
    leaves: tuple[Any, ...] = ()
    ways: tuple[tuple[str, str, str], ...] = ()


def facts_of(gm: fx.GraphModule) -> JointFacts:
    """The facts that travel with a joint graph, or with the two programs that it is cut into."""
    facts: JointFacts = gm.meta[_KEY]
    return facts


def keep_facts(gm: fx.GraphModule, facts: JointFacts | None) -> None:
    """Let `gm` carry `facts`; None takes away what it inherited."""
    gm.meta.pop(_KEY, None)
    if facts is not None:
        gm.meta[_KEY] = facts
