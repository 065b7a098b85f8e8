"""The pass runner: runs a list of passes, checks each output, and records each program.

Passes transform; the runner checks. After each pass it lints the *output* graph, checks the invariants that
the pass promises, stamps new nodes with the pass that made them, and records the program before and after.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from dpquant_compile.errors import GraphInvariantError
from dpquant_compile.passes.fx_utils import op_name

__all__ = [
    "Invariant",
    "Pass",
    "PassRecord",
    "PassResult",
    "run_passes",
]

Pass = Callable[[fx.GraphModule], PassResult]
Invariant = Callable[[fx.GraphModule], None]


@dataclass(frozen=True)
class PassRecord:
    """One pass over one graph: where it came from, what it changed, and both programs to read."""

    name: str
    origin: str
    modified: bool
    seconds: float
    before: str
    after: str
    ops: dict[str, int]

    def __str__(self) -> str:
        changes = ", ".join(f"{op} {delta:+d}" for op, delta in sorted(self.ops.items())) or "no op count changed"
        head = f"# {self.origin} → {self.name} ({self.seconds * 1e3:.1f} ms): {changes}"
        if not self.modified:
            return f"{head}\n# graph unchanged"
        return f"{head}\n# before\n{self.before}\n# after\n{self.after}"


def run_passes(
    gm: fx.GraphModule,
    passes: Sequence[Pass],
    *,
    origin: str,
    log: MutableSequence[PassRecord],
    invariants: Iterable[Invariant] = (),
) -> fx.GraphModule:
    """Run `passes` in order, check each output graph, append one `PassRecord` per pass to `log`.

    With the environment variable DPQUANT_TRACE set to anything but "0", each record is printed to stderr.
    """
    invariants = tuple(invariants)
    for transform in passes:
        name = _pass_name(transform)
        before, counts = _source(gm), _op_counts(gm)
        seen = set(gm.graph.nodes)
        start = time.perf_counter()
        result = transform(gm)
        seconds = time.perf_counter() - start
        gm = result.graph_module
        if result.modified:
            for node in gm.graph.nodes:
                if node not in seen:
                    node.meta.setdefault("origin", name)
            gm.recompile()
        elif _source(gm) != before:
            raise GraphInvariantError(f"pass {name} changed the graph but reported modified=False")
        try:
            gm.graph.lint()
        except RuntimeError as error:
            raise GraphInvariantError(f"pass {name} left a graph that is not well formed: {error}") from error
        for invariant in invariants:
            invariant(gm)
        after = _op_counts(gm)
        delta = {op: after[op] - counts[op] for op in {*after, *counts} if after[op] != counts[op]}
        record = PassRecord(name, origin, result.modified, seconds, before, _source(gm), delta)
        log.append(record)
        if os.environ.get("DPQUANT_TRACE", "0") != "0":
            print(record, file=sys.stderr)
        origin = name
    return gm


def _source(gm: fx.GraphModule) -> str:
    # Not gm.code, which lags behind the graph until recompile().
    return str(gm.graph.python_code("self").src)


def _pass_name(transform: Any) -> str:
    while hasattr(transform, "func"):
        transform = transform.func
    return str(transform.__name__)


def _op_counts(gm: fx.GraphModule) -> Counter[str]:
    return Counter(op_name(node) for node in gm.graph.nodes)
