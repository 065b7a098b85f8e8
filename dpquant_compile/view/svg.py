"""The drawing of a graph as SVG: as a separate file, or embedded in the page."""

from collections.abc import Iterable, Sequence
from html import escape
from math import hypot

from dpquant_compile.numerics.recipe import Precision, Recipe
from dpquant_compile.policy import Policy
from dpquant_compile.sites import SiteTable
from dpquant_compile.view.contract_nodes import ViewEdge, ViewNode
from dpquant_compile.view.layout import Edge, Layout, Point, layout

__all__ = ["ARROWS", "STYLE", "badge_width", "extent", "place", "render_graph", "render_svg"]

MARGIN = 28.0
CORNER = 8.0
SITE_HEIGHT, OP_HEIGHT = 40.0, 20.0
LONGEST_LABEL = 34
FRAME_LABEL = 14.0  # room for a module's name along the left side of its frame
FRAME_PAD = 6.0
# Widths per character at the sizes in STYLE, on the wide side: fonts differ between machines.
SITE_CHAR, DETAIL_CHAR, OP_CHAR, BADGE_CHAR = 8.2, 6.4, 6.8, 7.4

STYLE = """
text { font-family: Inter, system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: #1f2d3d }
.ground { fill: #ffffff }
.heading { font-size: 18px; font-weight: 600 }
.count, .key { font-size: 12px; fill: #4a5665 }
.frame rect { fill: #f6f8fa; stroke: #e3e8ee }
.frame text { font-size: 11px; fill: #7c8896 }
.edge { fill: none; stroke: #97a3b0; stroke-width: 1.4 }
.edge.skip { stroke: #7446c8; stroke-width: 2.4 }
.arrow { fill: #97a3b0 }
.arrow.skip { fill: #7446c8 }
.node .box { fill: #f3f4f6; stroke: #d0d6dd }
.node .name { font-size: 11px; fill: #566170 }
.input .box, .output .box { fill: #ffffff; stroke: #566170 }
.site .box { fill: #dbe5ef; stroke: #6f86a0 }
.site .name { font-size: 13px; font-weight: 600; fill: #1f2d3d }
.site .detail { font-size: 10.5px; fill: #43546a }
.site .badge { display: none }
.low .box { fill: #ffa94d; stroke: #b04a00; stroke-width: 3 }
.low .name { fill: #2b1400 }
.low .detail { fill: #5a2d00 }
.low .badge { display: inline }
.badge rect { fill: #b04a00 }
.badge text { font-size: 11px; font-weight: 700; fill: #ffffff }
"""

ARROWS = "".join(
    f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="{size}" markerHeight="{size}" '
    f'markerUnits="userSpaceOnUse" orient="auto"><path class="{style}" d="M0 0.5 8 4 0 7.5z"/></marker>'
    for name, style, size in (("arrow", "arrow", 8), ("arrow-skip", "arrow skip", 10))
)


def badge_width(low: str) -> float:
    """The width of a badge that says `low`."""
    return max(34.0, len(low) * BADGE_CHAR + 6)


def place(nodes: Sequence[ViewNode], edges: Iterable[ViewEdge], sites: SiteTable, low: str) -> Layout:
    """Lay the graph out with boxes that hold their text and a badge that says `low`. All sites are equally wide."""
    texts = [(_elide(node.label), _detail(node, sites)) for node in nodes if node.kind == "site"]
    site_width = max(
        (max(len(name) * SITE_CHAR, len(detail) * DETAIL_CHAR) + badge_width(low) + 28 for name, detail in texts),
        default=0.0,
    )
    sizes = {
        node.id: (site_width, SITE_HEIGHT)
        if node.kind == "site"
        else (max(64.0, len(_elide(node.label)) * OP_CHAR + 20), OP_HEIGHT)
        for node in nodes
    }
    inputs = {node.id for node in nodes if node.kind == "input"}
    return layout(sizes, [(edge.source, edge.target) for edge in edges], inputs)


def render_svg(
    nodes: Sequence[ViewNode],
    edges: Sequence[ViewEdge],
    placed: Layout,
    sites: SiteTable,
    policy: Policy,
    recipe: Recipe,
    title: str,
) -> str:
    """A complete SVG document: title with k of n and the recipe, legend, graph."""
    left, top, right, bottom = extent(nodes, edges, placed)
    header = 130.0
    others = "" if recipe.other == Precision.FULL else f", the others in {recipe.high}"
    count = f"{len(policy)} of {len(policy.universe)} sites in {recipe.name} (policy {policy}){others}"
    operands = f"low precision: {recipe.in_words}"
    width = max(right - left, len(title) * 11.0, max(len(count), len(operands)) * DETAIL_CHAR, 460.0) + 2 * MARGIN
    height = bottom - top + header + 2 * MARGIN
    shift = (width - (right - left)) / 2 - left
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{_text(f"{title}: {count}")}">'
        f"<style>{STYLE}</style><defs>{ARROWS}</defs>"
        f'<rect class="ground" width="100%" height="100%"/>'
        f'<text class="heading" x="{MARGIN}" y="{MARGIN + 12}">{_text(title)}</text>'
        f'<text class="count" x="{MARGIN}" y="{MARGIN + 34}">{_text(count)}</text>'
        f'<text class="count" x="{MARGIN}" y="{MARGIN + 52}">{_text(operands)}</text>'
        f'<g transform="translate({MARGIN} {MARGIN + 68})">{_legend(recipe)}</g>'
        f'<g transform="translate({shift:.1f} {MARGIN + header - top:.1f})">'
        f"{render_graph(nodes, edges, placed, sites, policy, recipe.label)}</g></svg>\n"
    )


def render_graph(
    nodes: Sequence[ViewNode], edges: Sequence[ViewEdge], placed: Layout, sites: SiteTable, policy: Policy, low: str
) -> str:
    """The graph alone, as SVG elements: frames around modules, edges (residual ones on top), nodes.

    A badge on the sites of the policy says `low`.
    """
    frames = [_frame(scope, box) for scope, box in _frames(nodes, edges, placed)]
    routes = _without_overlap(placed)
    lines = [_edge(edge, routes[edge.source, edge.target]) for edge in sorted(edges, key=lambda edge: edge.skip)]
    boxes = [_node(node, placed, sites, policy, low) for node in nodes]
    return "\n".join([*frames, *lines, *boxes])


def _legend(recipe: Recipe) -> str:
    wide = badge_width(recipe.label)

    def site(x: float, width: float, style: str, text: str) -> str:
        badge = (
            f'<g class="badge"><rect x="4" y="2" width="{width - 8:.0f}" height="12" rx="3"/>'
            f'<text x="{width / 2:.0f}" y="12" text-anchor="middle">{_text(recipe.label)}</text></g>'
        )
        return (
            f'<g class="node site {style}" transform="translate({x} 0)">'
            f'<rect class="box" width="{width:.0f}" height="16" rx="4"/>{badge}</g>'
            f'<text class="key" x="{x + width + 8:.0f}" y="12">{text}</text>'
        )

    return (
        site(0, 34, "full", _text(recipe.others))
        + site(150, wide + 8, "low", "low precision")
        + f'<g class="node op" transform="translate({wide + 264:.0f} 0)">'
        '<rect class="box" width="34" height="16" rx="8"/></g>'
        f'<text class="key" x="{wide + 306:.0f}" y="12">other op</text>'
        '<path class="edge" d="M0 34H34" marker-end="url(#arrow)"/><text class="key" x="42" y="38">tensor</text>'
        '<path class="edge skip" d="M150 34H184" marker-end="url(#arrow-skip)"/>'
        '<text class="key" x="192" y="38">shortcut (residual, dense)</text>'
    )


def _node(node: ViewNode, placed: Layout, sites: SiteTable, policy: Policy, low: str) -> str:
    box = placed.boxes[node.id]
    style = "node " + node.kind
    if node.site is not None:
        style += " low" if node.site in policy else " full"
    attributes = f'class="{style}" data-id="{_text(node.id)}" transform="translate({box.left:.1f} {box.top:.1f})"'
    rounding = 7 if node.kind == "site" else OP_HEIGHT / 2
    rect = f'<rect class="box" width="{box.width:.1f}" height="{box.height:.1f}" rx="{rounding}"/>'
    tip = f"<title>{_text(node.label if node.kind == 'site' else f'{node.id} ({node.op})')}</title>"
    name = _text(_elide(node.label))
    if node.kind != "site":
        text = f'<text class="name" x="{box.width / 2:.1f}" y="14" text-anchor="middle">{name}</text>'
        return f"<g {attributes}>{tip}{rect}{text}</g>"
    wide = badge_width(low)
    badge = (
        f'<g class="badge"><rect x="{box.width - wide - 8:.1f}" y="11" width="{wide:.0f}" height="18" '
        f'rx="4"/><text x="{box.width - wide / 2 - 8:.1f}" y="24" text-anchor="middle">{_text(low)}</text></g>'
    )
    text = f'<text class="name" x="12" y="17">{name}</text>'
    text += f'<text class="detail" x="12" y="32">{_text(_detail(node, sites))}</text>'
    return f"<g {attributes}>{tip}{rect}{text}{badge}</g>"


def _without_overlap(placed: Layout) -> dict[Edge, tuple[Point, ...]]:
    """The routes without the pieces that edges from one node share: a farther edge starts where the nearer one turns.

    Drawn twice, a shared piece would look heavier than the rest.
    """
    routes: dict[Edge, tuple[Point, ...]] = {}
    nearer: dict[str, tuple[Point, ...]] = {}
    for edge, route in sorted(placed.routes.items(), key=lambda item: item[1][-1][1]):
        before = nearer.get(edge[0], ())
        shared = next((i for i, (a, b) in enumerate(zip(before, route, strict=False)) if a != b), 0)
        nearer[edge[0]] = route
        if 0 < shared < len(before) - 1 and before[shared - 1][0] == before[shared][0] == route[shared][0]:
            x, y = before[shared]
            route = ((x, y - CORNER), *route[shared:])
        routes[edge] = route
    return routes


def _edge(edge: ViewEdge, route: Sequence[Point]) -> str:
    style, arrow = ("edge skip", "arrow-skip") if edge.skip else ("edge", "arrow")
    return (
        f'<path class="{style}" data-from="{_text(edge.source)}" data-to="{_text(edge.target)}" '
        f'd="{_rounded(route)}" marker-end="url(#{arrow})"/>'
    )


def _rounded(points: Sequence[Point]) -> str:
    """An SVG path through the points with its corners rounded."""
    pieces = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        radius = min(CORNER, hypot(*_minus(before, corner)) / 2, hypot(*_minus(after, corner)) / 2)
        a, b = _towards(corner, before, radius), _towards(corner, after, radius)
        pieces.append(f"L{a[0]:.1f} {a[1]:.1f}Q{corner[0]:.1f} {corner[1]:.1f} {b[0]:.1f} {b[1]:.1f}")
    pieces.append(f"L{points[-1][0]:.1f} {points[-1][1]:.1f}")
    return "".join(pieces)


def _minus(a: Point, b: Point) -> Point:
    return a[0] - b[0], a[1] - b[1]


def _towards(a: Point, b: Point, distance: float) -> Point:
    (dx, dy), length = _minus(b, a), hypot(*_minus(b, a)) or 1.0
    return a[0] + dx / length * distance, a[1] + dy / length * distance


_Rect = tuple[float, float, float, float]  # left, top, right, bottom


def _frames(nodes: Sequence[ViewNode], edges: Sequence[ViewEdge], placed: Layout) -> list[tuple[str, _Rect]]:
    """A frame for each module whose nodes lie together, outer modules first.

    A module whose frame would cover a foreign node gets none.
    """
    found = []
    scopes = sorted({node.scope for node in nodes} - {""})
    for scope in scopes:
        inside = {node.id for node in nodes if node.scope == scope or node.scope.startswith(scope + ".")}
        if len(inside) < 2:
            continue
        boxes = [placed.boxes[name] for name in inside]
        lines = [placed.routes[e.source, e.target] for e in edges if e.target in inside]
        xs = [x for line in lines for x, _ in line] + [b.left for b in boxes] + [b.right for b in boxes]
        nested = max((other.count(".") for other in scopes if other.startswith(scope + ".")), default=0)
        pad = 8.0 + FRAME_LABEL * max(nested - scope.count("."), 0)
        left, right = min(xs) - pad - FRAME_LABEL, max(xs) + pad
        top, bottom = min(b.top for b in boxes) - FRAME_PAD, max(b.bottom for b in boxes) + FRAME_PAD
        if not any(
            node.id not in inside and b.right > left and b.left < right and b.bottom > top and b.top < bottom
            for node, b in ((node, placed.boxes[node.id]) for node in nodes)
        ):
            found.append((scope, (left, top, right, bottom)))
    return sorted(found, key=lambda item: item[0].count("."))


def _frame(scope: str, rect: _Rect) -> str:
    left, top, right, bottom = rect
    shape = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" rx="9"'
    room = int((bottom - top) / OP_CHAR)
    label = _text(scope if len(scope) <= room else "…" + scope[-max(room - 1, 1) :])
    place_at = (
        f'transform="translate({left + FRAME_LABEL:.1f} {(top + bottom) / 2:.1f}) rotate(-90)" text-anchor="middle"'
    )
    return f'<g class="frame"><rect {shape}/><text {place_at}>{label}</text></g>'


def extent(nodes: Sequence[ViewNode], edges: Sequence[ViewEdge], placed: Layout) -> _Rect:
    """Left, top, right and bottom of what `render_graph` draws."""
    rects = [rect for _, rect in _frames(nodes, edges, placed)] + [(0.0, 0.0, placed.width, placed.height)]
    lefts, tops, rights, bottoms = zip(*rects, strict=True)
    return min(lefts), min(tops), max(rights), max(bottoms)


def _detail(node: ViewNode, sites: SiteTable) -> str:
    shape = sites[node.site].weight_shape if node.site is not None else None
    return f"{node.op} {'×'.join(map(str, shape))}" if shape else node.op


def _elide(text: str) -> str:
    """A name shortened to fit a box: its start and, mostly, its end, where names differ."""
    if len(text) <= LONGEST_LABEL:
        return text
    return f"{text[:8]}…{text[9 - LONGEST_LABEL :]}"


def _text(text: str) -> str:
    """Text for XML: escaped, and without the control characters that XML forbids."""
    return escape("".join(c if c >= " " or c in "\t\n" else "\ufffd" for c in text), quote=True)
