"""Cut a program into regions, so that a block which a model repeats is compiled once."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn
from torch._inductor import inductor_prims
from torch.utils._pytree import tree_leaves

from dpquant_compile.backends.site_args import in_order
from dpquant_compile.errors import GraphInvariantError
from dpquant_compile.passes.fx_utils import draws_seeded, read_attribute
from dpquant_compile.passes.private.meaning import ROWS, ROWS_OF, Meaning, arguments_of, moved, table_of
from dpquant_compile.passes.private.repeats import find_repeats
from dpquant_compile.passes.runner import PassResult

__all__ = ["check_regions", "cut_regions"]


def cut_regions(gm: fx.GraphModule, *, at_least: int, smallest: int) -> PassResult:
    """Make a region of every stretch of nodes that comes `at_least` times in a row, and of what lies between them.

        a = sin(x); b = sin(a); c = sin(b)   →   a = region_0(x)[0]; b = region_0(a)[0]; c = region_0(b)[0]

    Stretches are equal if their operators, their constants, and the shapes, strides and dtypes of their values are.
    Sites may differ: a region gets the rows of its sites from the link table, and counts its sites from 0. So may the
    seeds of dropout: a region gets its own rows of the tensor of seeds. Any other node that draws random numbers equals
    no other. A stretch has at least `smallest` nodes.

    Requires: a flat functional program of ATen operators; values are `meta["val"]`. Ensures: the same inputs and
    outputs; the graph calls regions, and nothing else but look-ups of rows; `check_regions` holds. The program that is
    given stays as it is. Numerics: unchanged bit for bit, except for the order in which Inductor fuses.
    """
    outside = _first_seeds(gm.graph)
    tables = _tables(gm.graph, outside)
    if tables is None:
        return PassResult(gm, False)
    body = [n for n in gm.graph.nodes if n.op == "call_function" and n is not outside and not _is_constant(n)]
    tokens = [_token(node) for node in body]
    repeats = find_repeats(tokens, _live(body), at_least=at_least, smallest=smallest)
    if not repeats:
        return PassResult(gm, False)
    edges = sorted({0, len(body), *(edge for repeat in repeats for edge in repeat.edges)})
    stretches = [body[start:end] for start, end in pairwise(edges)]
    return PassResult(_Cut(gm, stretches, outside, tables).program(), True)


def check_regions(gm: fx.GraphModule, *, whole: fx.GraphModule) -> None:
    """Refuse a cut that does not compute what the whole program does."""
    meaning = Meaning()
    if meaning.of(gm) != meaning.of(whole):
        raise GraphInvariantError("a program that was cut into regions computes something else than before the cut")


def _is_constant(node: fx.Node) -> bool:
    """Whether a node has no inputs. Such nodes belong to no region: each that reads one makes it anew."""
    return node.op == "call_function" and not node.all_input_nodes and not draws_seeded(node)


def _token(node: fx.Node) -> str:
    """What a node computes, without where its inputs come from and which sites it belongs to."""
    if draws_seeded(node):
        return node.name
    given = fx.map_arg(_shifted(node, None), lambda _: None)
    return f"{node.target} {given} {_form(node)}"


def _form(node: fx.Node) -> str:
    """Shape, strides, dtype and device of a value."""
    leaves = tree_leaves(node.meta.get("val"))
    return str([(tuple(v.shape), v.stride(), v.dtype, str(v.device)) for v in leaves if isinstance(v, Tensor)])


def _first_seeds(graph: fx.Graph) -> fx.Node | None:
    """The draw of the seeds of dropout, if no draw comes before it: then it can be made before all regions."""
    first = next((node for node in graph.nodes if draws_seeded(node)), None)
    return first if first is not None and first.target is inductor_prims.seeds else None


def _tables(graph: fx.Graph, outside: fx.Node | None) -> dict[fx.Node, str] | None:
    """The tables of which regions get rows, with their names; None if one is made or read by what could be a region."""
    found: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            given = arguments_of(node)
            found |= {given[name]: name for name in table_of(node)[0]}
    for table, name in found.items():
        readers = (user for user in table.users if user.op != "output")
        if not (table.op == "placeholder" or table is outside) or any(name not in table_of(r)[0] for r in readers):
            return None
    return found


def _numbers(node: fx.Node) -> list[int]:
    """The rows of a table that a node reads."""
    _, name = table_of(node)
    given = arguments_of(node)[name] if name else []
    return [number for number in (given if isinstance(given, list | tuple) else [given]) if number >= 0]


def _shifted(node: fx.Node, bases: Mapping[str, int] | None) -> dict[str, Any]:
    """A node's arguments, with rows of the tables that it reads counted from `bases`; None: without their numbers."""
    given, (tables, name) = arguments_of(node), table_of(node)
    if not name:
        return given
    found = given[name]
    if bases is None:
        return {**given, name: len(found) if isinstance(found, list | tuple) else min(found, 0)}
    return {**given, name: moved(found, -bases[_kind(tables[0])])}


def _kind(table: str) -> str:
    """What the rows of a table are for. Tables of one kind are cut alike: one number tells the row of all of them."""
    return "seeds" if table == "seeds" else "sites"


def _live(body: Sequence[fx.Node]) -> list[int]:
    """For the place before each node, and the end: how many elements are alive there only to be read further on.

    What the program returns is left out: it is in memory anyway.
    """
    places = {node: place for place, node in enumerate(body)}
    change = [0] * (len(body) + 1)
    for node, place in places.items():
        readers = [places[user] for user in node.users if user in places]
        if readers and all(user.op != "output" for user in node.users):
            size = sum(v.numel() for v in tree_leaves(node.meta.get("val")) if isinstance(v, Tensor))
            change[place + 1] += size
            change[max(readers) + 1] -= size
    total, live = 0, []
    for step in change:
        total += step
        live.append(total)
    return live


@dataclass(frozen=True)
class _Region:
    """A stretch of a program as a program of its own.

    inputs   values from outside, in the order of their first use
    outputs  places of the nodes that others read
    bases    for each kind of table, the row that is its row 0
    rows     and how many rows it gets
    text     what it computes, on what; two regions of one text are one program
    """

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: frozenset[int]
    bases: dict[str, int]
    rows: dict[str, int]
    text: str


class _Cut:
    """One cut: the stretches, and which of them are equal."""

    def __init__(
        self,
        gm: fx.GraphModule,
        stretches: Iterable[list[fx.Node]],
        outside: fx.Node | None,
        tables: Mapping[fx.Node, str],
    ) -> None:
        self.gm, self.outside, self.tables = gm, outside, tables
        self.regions = [self._region(nodes) for nodes in _with_items(stretches)]

    def program(self) -> fx.GraphModule:
        """The program of calls."""
        graph, root = fx.Graph(), nn.Module()
        values: dict[fx.Node, fx.Node] = {}
        for node in self.gm.graph.nodes:
            if node.op in ("placeholder", "get_attr") or node is self.outside:
                values[node] = graph.node_copy(node)
            if node.op == "get_attr":
                setattr(root, str(node.target), read_attribute(self.gm, node.target))
        # Of equal regions, each gives what any of them must give.
        wanted: dict[str, set[int]] = {}
        for region in self.regions:
            wanted.setdefault(region.text, set()).update(region.outputs)
        names = {text: f"region_{number}" for number, text in enumerate(wanted)}
        for region in self.regions:
            name, outputs = names[region.text], sorted(wanted[region.text])
            if not hasattr(root, name):
                root.add_module(name, self._module(region, outputs, name))
            call = graph.call_module(name, tuple(self._given(graph, values, region, node) for node in region.inputs))
            for item, place in enumerate(outputs):
                if place in region.outputs:
                    node = region.nodes[place]
                    values[node] = graph.call_function(operator.getitem, (call, item))
                    values[node].meta = {"val": node.meta["val"]}
        output = self.gm.graph.output_node()
        for node in output.all_input_nodes:
            if node not in values:
                values[node] = graph.node_copy(node)  # a constant
        graph.node_copy(output, lambda node: values[node])
        return fx.GraphModule(root, graph, class_name=self.gm._get_name())

    def _region(self, nodes: list[fx.Node]) -> _Region:
        inside = set(nodes)
        numbers: dict[str, list[int]] = {"sites": [], "seeds": []}
        for node in nodes:
            for table in table_of(node)[0]:
                numbers[_kind(table)] += _numbers(node)
        bases = {name: min(found, default=0) for name, found in numbers.items()}
        rows = {name: max(found, default=-1) - bases[name] + 1 for name, found in numbers.items()}
        read = (source for node in nodes for source in node.all_input_nodes)
        inputs = list(dict.fromkeys(node for node in read if node not in inside and not _is_constant(node)))
        places = enumerate(nodes)
        outputs = frozenset(place for place, node in places if any(user not in inside for user in node.users))
        names = {node: f"input {place}" for place, node in enumerate(inputs)}
        tables = self.tables
        lines = [f"{tables[node]} {rows}" if node in tables else _form(node) for node in inputs]

        def name(node: fx.Node) -> Any:
            return _Word(names[node] if node in names else f"{node.target} {_shifted(node, bases)}")

        for place, node in enumerate(nodes):
            drawn = f"{node.name} " if draws_seeded(node) else ""  # no two regions share a draw
            lines.append(f"{drawn}{node.target} {fx.map_arg(_shifted(node, bases), name)} {_form(node)}")
            names[node] = str(place)
        return _Region(nodes, inputs, outputs, bases, rows, "\n".join(lines))

    def _given(self, graph: fx.Graph, values: Mapping[fx.Node, fx.Node], region: _Region, node: fx.Node) -> fx.Node:
        """What a region is given for one of its inputs."""
        if node not in self.tables:
            return values[node]
        name = self.tables[node]
        base, count = region.bases[_kind(name)], region.rows[_kind(name)]
        bounds = (0, base, base + count)
        rows = graph.call_function(ROWS, (values[node], *bounds))
        rows.meta = {"val": ROWS(node.meta["val"], *bounds), ROWS_OF: name}
        return rows

    def _module(self, region: _Region, outputs: Sequence[int], name: str) -> fx.GraphModule:
        graph = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        for place, node in enumerate(region.inputs):
            values[node] = graph.placeholder(self.tables.get(node, f"input_{place}"))
            value = node.meta["val"]
            if node in self.tables:
                value = ROWS(value, 0, 0, region.rows[_kind(self.tables[node])])
            values[node].meta = {"val": value}

        def copied(node: fx.Node) -> fx.Node:
            if node not in values:
                values[node] = graph.node_copy(node)  # a constant
            return values[node]

        for node in region.nodes:
            new = values[node] = graph.node_copy(node, copied)
            if table_of(node)[1]:
                shifted = fx.map_arg(_shifted(node, region.bases), copied)
                new.args, new.kwargs = in_order(node.target, **shifted), {}
        graph.output(tuple(values[region.nodes[place]] for place in outputs))
        return fx.GraphModule(nn.Module(), graph, class_name=name)


def _with_items(stretches: Iterable[list[fx.Node]]) -> list[list[fx.Node]]:
    """The same stretches, with the items of a tuple where the tuple is made: regions exchange tensors."""
    home: dict[fx.Node, int] = {}
    found: list[list[fx.Node]] = []
    for number, nodes in enumerate(stretches):
        found.append([])
        for node in nodes:
            source = node.args[0] if node.target is operator.getitem else None
            home[node] = home.get(source, number) if isinstance(source, fx.Node) else number
            found[home[node]].append(node)
    return [nodes for nodes in found if nodes]


class _Word(str):
    """A word that is printed without quotes."""

    __slots__ = ()
    __repr__ = str.__str__
