"""The pass runner: runs a list of passes, checks each output, and records each program.

Passes transform; the runner checks. After each pass it lints the *output* graph, checks the invariants that
the pass promises, stamps new nodes with the pass that made them, and records the program before and after.
"""

import operator
import os
import re
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
    "NOTE",
    "Invariant",
    "Pass",
    "PassRecord",
    "PassResult",
    "called_programs",
    "program_source",
    "run_passes",
]

# Key in a node's metadata: a remark that is printed below the program.
NOTE = "note"

Pass = Callable[[fx.GraphModule], PassResult]
Invariant = Callable[[fx.GraphModule], None]


@dataclass(frozen=True)
class PassRecord:
    """One pass over one graph: its origin, what it changed, and both programs as text."""

    name: str
    origin: str
    modified: bool
    seconds: float
    before: str
    after: str
    ops: dict[str, int]

    def __str__(self) -> str:
        if not self.modified:
            return f"{self.headline}\n# graph unchanged"
        if self.before == self.after:
            return f"{self.headline}\n# only metadata changed"
        return f"{self.headline}\n# before\n{self.before}\n# after\n{self.after}"

    @property
    def headline(self) -> str:
        """The pass, its input, its time, and the changes in operation counts."""
        changes = ", ".join(f"{op} {delta:+d}" for op, delta in sorted(self.ops.items())) or "no op count changed"
        return f"# {self.origin} → {self.name} ({self.seconds * 1e3:.1f} ms): {changes}"


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
    source, counts = program_source(gm), _op_counts(gm)
    for transform in passes:
        name = _pass_name(transform)
        before, seen = source, set(gm.graph.nodes)
        start = time.perf_counter()
        result = transform(gm)
        seconds = time.perf_counter() - start
        gm = result.graph_module
        if result.modified:
            for node in gm.graph.nodes:
                if node not in seen:
                    node.meta.setdefault("origin", name)
            gm.recompile()
        source = program_source(gm, gm.code if result.modified else None)
        if not result.modified and source != before:
            raise GraphInvariantError(f"pass {name} changed the graph but reported modified=False")
        try:
            gm.graph.lint()
        except RuntimeError as error:
            raise GraphInvariantError(f"pass {name} left a graph that is not well formed: {error}") from error
        for invariant in invariants:
            invariant(gm)
        after = _op_counts(gm)
        delta = {op: after[op] - counts[op] for op in {*after, *counts} if after[op] != counts[op]}
        counts = after
        record = PassRecord(name, origin, result.modified, seconds, before, source, delta)
        log.append(record)
        if os.environ.get("DPQUANT_TRACE", "0") != "0":
            print(record, file=sys.stderr)
        origin = name
    return gm


def program_source(gm: fx.GraphModule, code: str | None = None) -> str:
    """The program as text: its code, the notes of its nodes, and below it the programs that it calls.

    `code` is its own code, where that was printed just now: `gm.code` is out of date until recompile().
    """
    parts = [str(gm.graph.python_code("self").src) if code is None else code]
    parts += [f"# {node.name}: {node.meta[NOTE]}\n" for node in gm.graph.nodes if NOTE in node.meta]
    parts += [f"\n{_CALLED}{name}\n{program_source(called)}" for name, called in dict(_called(gm)).items()]
    return "".join(parts)


def called_programs(source: str) -> dict[str, str]:
    """The programs that a program calls, by name, from its text."""
    parts = re.split(rf"^{_CALLED}(\w+)\n", source, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


_CALLED = "# program "


def _called(gm: fx.GraphModule) -> list[tuple[str, fx.GraphModule]]:
    calls = ((str(node.target), getattr(gm, str(node.target), None)) for node in gm.graph.find_nodes(op="call_module"))
    return [(name, called) for name, called in calls if isinstance(called, fx.GraphModule)]


def _pass_name(transform: Any) -> str:
    while hasattr(transform, "func"):
        transform = transform.func
    return str(transform.__name__)


def _op_counts(gm: fx.GraphModule) -> Counter[str]:
    own, called = list(gm.graph.nodes), _called(gm)
    if called:  # count the operations of called programs, not the calls
        own = [node for node in own if node.op == "call_function" and node.target is not operator.getitem]
    return sum((_op_counts(program) for _, program in called), Counter(op_name(node) for node in own))
