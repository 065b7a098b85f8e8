"""`RegionCalls`: a program that calls compiled regions, and frees memory as early as one program would."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import fx

__all__ = ["RegionCalls"]

Compiled = Callable[[list[Any]], Sequence[Any]]


class RegionCalls:
    """Runs a graph of calls. It takes its arguments as one list, which it empties; so does each region.

    A value is dropped here when it is given to its last reader, so that a region can free it while it runs.
    """

    def __init__(self, gm: fx.GraphModule, regions: Mapping[str, Compiled]) -> None:
        self._inputs = gm.graph.find_nodes(op="placeholder")
        self._kept = {node: attrgetter(str(node.target))(gm) for node in gm.graph.find_nodes(op="get_attr")}
        self._output = gm.graph.output_node()
        readers = {source: node for node in gm.graph.nodes for source in node.all_input_nodes}
        self._calls = [
            (
                node,
                regions.get(str(node.target)),
                [source for source in node.all_input_nodes if readers[source] is node],
            )
            for node in gm.graph.nodes
            if node.op in ("call_module", "call_function")
        ]

    def __call__(self, given: list[Any]) -> list[Any]:
        values: dict[fx.Node, Any] = {**self._kept, **dict(zip(self._inputs, given, strict=True))}
        given.clear()
        for node, region, last in self._calls:
            arguments = [values[argument] if isinstance(argument, fx.Node) else argument for argument in node.args]
            for source in last:
                del values[source]
            values[node] = node.target(*arguments) if region is None else region(arguments)
            del arguments
        results: Any = fx.map_arg(self._output.args[0], values.__getitem__)
        return list(results)
