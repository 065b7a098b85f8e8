"""A layered, top-to-bottom layout of a DAG for drawing networks: one straight spine, branches and skips beside it.

Sugiyama's steps, with whole vertical paths in place of single nodes:

1. *Layers*: longest path from the sources. A critical path then visits every layer once; it becomes the spine.
2. *Lanes*: an edge that spans several layers gets a dummy cell in each layer between. Edges that leave one node
   share their cells, so a value read in many places (a dense block, an attention mask) is one line with branches.
3. *Columns*: nodes and cells off the spine are joined into vertical paths. Barycentre sweeps move every path to
   the free column nearest to its neighbours; short paths go first, so long skips pass around short branches.
4. *Coordinates*: a path keeps one x throughout, as near to the spine as the boxes between allow. So lines are
   vertical, turn only at their ends, and never run through a box.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

__all__ = ["Box", "Edge", "Layout", "Point", "layout"]

Point = tuple[float, float]
Edge = tuple[str, str]

BOX_GAP = 26.0  # between two boxes of a layer
LANE_GAP = 11.0  # between two lines
LANE_CLEARANCE = 20.0  # between a line and a box
ROW_GAP = 18.0  # between two layers joined by vertical lines only
TRACK_GAP = 9.0  # between two horizontal lines in the space between layers
SWEEPS = 4


@dataclass(frozen=True)
class Box:
    """A node's position: centre and size."""

    x: float
    y: float
    width: float
    height: float

    @property
    def left(self) -> float:
        return self.x - self.width / 2

    @property
    def right(self) -> float:
        return self.x + self.width / 2

    @property
    def top(self) -> float:
        return self.y - self.height / 2

    @property
    def bottom(self) -> float:
        return self.y + self.height / 2


@dataclass(frozen=True)
class Layout:
    """Boxes by node and corner points by edge, all within (0, 0)–(width, height)."""

    boxes: Mapping[str, Box]
    routes: Mapping[Edge, tuple[Point, ...]]
    width: float
    height: float


@dataclass(eq=False)
class _Path:
    """Nodes and lane cells (None) in consecutive layers from `start` on, drawn in one column."""

    start: int
    cells: list[str | None] = field(default_factory=list)
    neighbours: list["_Path"] = field(default_factory=list)
    column: int | None = None
    x: float = 0.0

    @property
    def mask(self) -> int:
        return ((1 << len(self.cells)) - 1) << self.start


@dataclass(eq=False)
class _Graph:
    """The graph with its layers and paths, filled in by the steps of `layout`."""

    sizes: Mapping[str, tuple[float, float]]
    edges: Sequence[Edge]
    preds: dict[str, list[str]]
    succs: dict[str, list[str]]
    layer: dict[str, int] = field(default_factory=dict)
    path_of: dict[str, _Path] = field(default_factory=dict)
    lane_of: dict[str, _Path] = field(default_factory=dict)  # source of long edges -> the path that holds its lane

    @property
    def depth(self) -> int:
        return max(self.layer.values(), default=-1) + 1

    def is_long(self, edge: Edge) -> bool:
        return self.layer[edge[1]] > self.layer[edge[0]] + 1


def layout(sizes: Mapping[str, tuple[float, float]], edges: Iterable[Edge], inputs: Collection[str] = ()) -> Layout:
    """Place boxes of the given (width, height) and route the edges between them.

    Requires: the order of `sizes` is topological; every edge joins two of its nodes.
    Ensures: boxes do not overlap, every edge's target lies wholly below its source, no line crosses a foreign box.
    A source that is not among `inputs` (a constant) is drawn just above its first use, not at the top.
    """
    unique = list(dict.fromkeys(edges))
    preds: dict[str, list[str]] = {node: [] for node in sizes}
    succs: dict[str, list[str]] = {node: [] for node in sizes}
    for u, v in unique:
        preds[v].append(u)
        succs[u].append(v)
    graph = _Graph(sizes, unique, preds, succs)
    spine = _assign_layers(graph, inputs)
    paths = _make_paths(graph, spine)
    _assign_columns(paths)
    _assign_x(graph, paths)
    return _place(graph)


def _assign_layers(graph: _Graph, inputs: Collection[str]) -> list[str]:
    """Fill `graph.layer`; return the spine, a path with one node in every layer."""
    layer = graph.layer
    for node, preds in graph.preds.items():
        layer[node] = 1 + max((layer[p] for p in preds), default=-1)
    if not layer:
        return []
    last = max(reversed(layer), key=layer.__getitem__)
    spine = [last]
    while graph.preds[spine[-1]]:
        above = layer[spine[-1]] - 1
        spine.append(next(p for p in graph.preds[spine[-1]] if layer[p] == above))
    for node, succs in graph.succs.items():
        if succs and not graph.preds[node] and node not in inputs and node != spine[-1]:
            layer[node] = min(layer[s] for s in succs) - 1
    return spine[::-1]


def _make_paths(graph: _Graph, spine: Sequence[str]) -> list[_Path]:
    """Split nodes and lanes into vertical paths; the spine comes first."""
    layer = graph.layer
    ends = {u: max(layer[v] for v in vs) for u, vs in graph.succs.items() if vs}
    paths = [_Path(0, list(spine))]
    graph.path_of.update(dict.fromkeys(spine, paths[0]))

    def grow(path: _Path, node: str | None, lane: str | None) -> None:
        """Extend a path downwards from a node, or from the start of the lane of a source."""
        while node is not None or lane is not None:
            if node is not None:
                path.cells.append(node)
                graph.path_of[node] = path
                free = [s for s in graph.succs[node] if s not in graph.path_of and layer[s] == layer[node] + 1]
                lane = None if free or ends.get(node, 0) <= layer[node] + 1 else node
                node = free[0] if free else None
            elif lane is not None:
                path.cells += [None] * (ends[lane] - layer[lane] - 1)
                graph.lane_of[lane] = path
                free = [s for s in graph.succs[lane] if s not in graph.path_of and layer[s] == ends[lane]]
                node, lane = (free[0] if free else None), None

    for source in graph.sizes:
        if source not in graph.path_of:
            paths.append(_Path(layer[source]))
            grow(paths[-1], source, None)
        if source not in graph.lane_of and ends.get(source, 0) > layer[source] + 1:
            paths.append(_Path(layer[source] + 1))
            grow(paths[-1], None, source)
    for edge in graph.edges:
        chain = [graph.path_of[edge[0]], graph.path_of[edge[1]]]
        if graph.is_long(edge):
            chain.insert(1, graph.lane_of[edge[0]])
        for a, b in pairwise(chain):
            if a is not b:
                a.neighbours.append(b)
                b.neighbours.append(a)
    return paths


def _assign_columns(paths: Sequence[_Path]) -> None:
    """Give each path a column: 0 is the spine, negative left, positive right; no two paths share a cell."""
    spine, *others = paths
    spine.column = 0
    taken: dict[int, int] = defaultdict(int)
    others.sort(key=lambda path: len(path.cells))
    for _ in range(SWEEPS):
        for path in others:
            mask = path.mask
            if path.column is not None:
                taken[path.column] &= ~mask
            known = [n.column for n in path.neighbours if n.column is not None]
            centre = sum(known) / len(known) if known else 0.0
            reach = max((abs(c) for c in taken), default=0) + 1
            free = [c for c in range(-reach, reach + 1) if c and not taken.get(c, 0) & mask]
            # Nearest to the neighbours; among equals the one nearer to the spine, then the right one.
            path.column = min(free, key=lambda c: (abs(c - centre), abs(c), -c))
            taken[path.column] |= mask


def _assign_x(graph: _Graph, paths: Sequence[_Path]) -> None:
    """Give each path its x, working outwards from the spine on either side."""
    spine = paths[0]
    for side in (-1, 1):
        edge = [0.0] * graph.depth  # how far each layer is filled on this side
        is_line = [False] * graph.depth
        for i, node in enumerate(spine.cells, spine.start):
            edge[i] = graph.sizes[node][0] / 2 if node else 0.0
        row = sorted((p for p in paths if (p.column or 0) * side > 0), key=lambda p: abs(p.column or 0))
        for path in row:
            halves = [graph.sizes[node][0] / 2 if node else 0.0 for node in path.cells]
            reach = 0.0
            for i, (node, half) in enumerate(zip(path.cells, halves, strict=True), path.start):
                if node is None:
                    gap = LANE_GAP if is_line[i] else LANE_CLEARANCE
                else:
                    gap = LANE_CLEARANCE if is_line[i] else BOX_GAP
                reach = max(reach, edge[i] + gap + half)
            path.x = side * reach
            for i, (node, half) in enumerate(zip(path.cells, halves, strict=True), path.start):
                edge[i], is_line[i] = reach + half, node is None


@dataclass(frozen=True)
class _Span:
    """A horizontal piece of an edge in the space below a layer."""

    low: float
    high: float
    edge: Edge

    def fits(self, other: "_Span") -> bool:
        apart = self.high + LANE_GAP < other.low or other.high + LANE_GAP < self.low
        return apart or self.edge[0] == other.edge[0] or self.edge[1] == other.edge[1]


def _place(graph: _Graph) -> Layout:
    """Turn layers and x into boxes and routes."""
    rows: list[list[str]] = [[] for _ in range(graph.depth)]
    for node, i in graph.layer.items():
        rows[i].append(node)
    x = {node: path.x for node, path in graph.path_of.items()}

    def lane_x(edge: Edge) -> float | None:
        return graph.lane_of[edge[0]].x if graph.is_long(edge) else None

    def side_is_clear(node: str, lane: float) -> bool:
        """Whether a horizontal line from the node's side to its lane meets no other box."""
        low, high = min(x[node], lane) - LANE_GAP, max(x[node], lane) + LANE_GAP
        return all(
            other == node or x[other] + graph.sizes[other][0] / 2 < low or x[other] - graph.sizes[other][0] / 2 > high
            for other in rows[graph.layer[node]]
        )

    # Horizontal pieces that must run between layers share tracks where that cannot be misread.
    tracks: list[list[list[_Span]]] = [[] for _ in range(graph.depth)]
    track_of: dict[tuple[Edge, int], int] = {}

    def reserve(edge: Edge, gap: int, a: float, b: float) -> None:
        span = _Span(min(a, b), max(a, b), edge)
        fitting = (i for i, track in enumerate(tracks[gap]) if all(span.fits(other) for other in track))
        number = next(fitting, len(tracks[gap]))
        if number == len(tracks[gap]):
            tracks[gap].append([])
        tracks[gap][number].append(span)
        track_of[edge, gap] = number

    for edge in graph.edges:
        (u, v), lane = edge, lane_x(edge)
        if lane is None:
            if x[u] != x[v]:
                reserve(edge, graph.layer[u], x[u], x[v])
            continue
        if x[u] != lane and not side_is_clear(u, lane):
            reserve(edge, graph.layer[u], x[u], lane)
        if x[v] != lane and not side_is_clear(v, lane):
            reserve(edge, graph.layer[v] - 1, lane, x[v])

    left = min([x[n] - w / 2 for n, (w, _) in graph.sizes.items()] + [p.x for p in graph.lane_of.values()], default=0.0)
    right = max(
        [x[n] + w / 2 for n, (w, _) in graph.sizes.items()] + [p.x for p in graph.lane_of.values()], default=0.0
    )
    boxes: dict[str, Box] = {}
    bottoms: list[float] = []
    y = 0.0
    for i, row in enumerate(rows):
        height = max(graph.sizes[node][1] for node in row)
        for node in row:
            boxes[node] = Box(x[node] - left, y + height / 2, *graph.sizes[node])
        bottoms.append(y + height)
        y += height + ROW_GAP + (TRACK_GAP * (len(tracks[i]) - 0.5) if tracks[i] else 0.0)

    def track_y(edge: Edge, gap: int) -> float:
        return bottoms[gap] + ROW_GAP / 2 - 2 + TRACK_GAP * track_of[edge, gap]

    def route(edge: Edge) -> tuple[Point, ...]:
        a, b, lane = boxes[edge[0]], boxes[edge[1]], lane_x(edge)
        first, last = graph.layer[edge[0]], graph.layer[edge[1]] - 1
        if lane is None:
            if (edge, first) not in track_of:
                return (a.x, a.bottom), (b.x, b.top)
            middle = track_y(edge, first)
            return (a.x, a.bottom), (a.x, middle), (b.x, middle), (b.x, b.top)
        lane -= left
        # A line leaves a side below the middle and enters it above, so that the two never merge.
        if lane == a.x:
            head: tuple[Point, ...] = ((a.x, a.bottom),)
        elif (edge, first) in track_of:
            middle = track_y(edge, first)
            head = (a.x, a.bottom), (a.x, middle), (lane, middle)
        else:
            start = a.y + a.height / 4
            head = (a.right if lane > a.x else a.left, start), (lane, start)
        if lane == b.x:
            tail: tuple[Point, ...] = ((b.x, b.top),)
        elif (edge, last) in track_of:
            middle = track_y(edge, last)
            tail = (lane, middle), (b.x, middle), (b.x, b.top)
        else:
            end = b.y - b.height / 4
            tail = (lane, end), (b.right if lane > b.x else b.left, end)
        return head + tail

    return Layout(boxes, {edge: route(edge) for edge in graph.edges}, right - left, bottoms[-1] if bottoms else 0.0)
