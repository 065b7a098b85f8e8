"""RegionCalls: runs a graph of calls, and holds no value that nothing reads any more."""

import weakref
from typing import Any

import torch
from torch import Tensor, fx, nn

from dpquant_compile.backends.region_calls import RegionCalls


def chain() -> fx.GraphModule:
    """Two calls of one region and the sum of a value that the first has read, too."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    first = graph.call_module("region", (x, y))
    a = graph.call_function(lambda pair, place: pair[place], (first, 0))
    second = graph.call_module("region", (a, y))
    b = graph.call_function(lambda pair, place: pair[place], (second, 0))
    graph.output([b, y])
    root = nn.Module()
    root.add_module("region", fx.symbolic_trace(nn.Identity()))
    return fx.GraphModule(root, graph)


def test_calls_give_what_the_graph_says_and_free_what_is_read_for_the_last_time() -> None:
    seen: list[Any] = []

    def region(given: list[Any]) -> tuple[Tensor, ...]:
        a, y = given
        given.clear()
        held = weakref.ref(a)
        result = (a + y,)
        del a
        seen.append(held() is None)
        return result

    x, y = torch.ones(3), torch.full((3,), 2.0)
    arguments = [x, y]
    del x
    b, same = RegionCalls(chain(), {"region": region})(arguments)
    assert arguments == [] and seen == [True, True]
    assert torch.equal(b, torch.full((3,), 5.0)) and same is y
