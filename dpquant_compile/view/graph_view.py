"""`GraphView`: a frozen description of a compiled graph under one policy, and its exports."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import fx

from dpquant_compile.errors import CompileSpecError
from dpquant_compile.numerics.recipe import Precision, Recipe
from dpquant_compile.policy import Policy, resolve_policy
from dpquant_compile.sites import SiteTable
from dpquant_compile.view.contract_nodes import ViewEdge, ViewNode, contract
from dpquant_compile.view.html import render_html
from dpquant_compile.view.layout import Layout
from dpquant_compile.view.private_view import PrivateView
from dpquant_compile.view.svg import place, render_svg

if TYPE_CHECKING:
    import networkx

__all__ = ["GraphView"]


@dataclass(frozen=True)
class GraphView:
    """The graph of a model for drawing: sites, other tensor ops, and the flow between them.

    Parameters, shape arithmetic and the compiler's own inputs are left out; see `contract`. A view is a snapshot:
    it does not follow later changes of the model, and shows sites as they run in training. `recipe` says in what.
    `private` is the private program, once an engine has made one; the page shows it. `with_policy` shows the same graph
    under another policy.
    """

    nodes: tuple[ViewNode, ...]
    edges: tuple[ViewEdge, ...]
    sites: SiteTable
    policy: Policy
    kernels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    title: str = "model"
    recipe: Recipe = field(default_factory=Recipe)
    private: PrivateView | None = None

    @classmethod
    def build(
        cls,
        gm: fx.GraphModule,
        sites: SiteTable,
        policy: Policy,
        kernels: Mapping[str, str] | None = None,
        title: str = "model",
        recipe: Recipe | None = None,
    ) -> "GraphView":
        """Describe `gm`, whose site nodes carry `meta["site"]`.

        `kernels` says per site name what runs it; `recipe`, by default that of `compile`, what low precision is.
        """
        nodes, edges = contract(gm, sites)
        policy = resolve_policy(policy, sites.names)
        return cls(nodes, edges, sites, policy, MappingProxyType(dict(kernels or {})), title, recipe or Recipe())

    def with_policy(self, policy: str | Iterable[str]) -> "GraphView":
        """The same graph under another policy: a `Policy`, site names, "all" or "none"."""
        return replace(self, policy=resolve_policy(policy, self.sites.names))

    def precision(self, node: ViewNode) -> str | None:
        """The precision of a node under the policy of this view: "low", "full" or what the recipe's `high` says.

        None if it is no site.
        """
        if node.site is None:
            return None
        other = "full" if self.recipe.other == Precision.FULL else self.recipe.high
        return "low" if node.site in self.policy else other

    @cached_property
    def layout(self) -> Layout:
        """The positions of nodes and edges."""
        return place(self.nodes, self.edges, self.sites, self.recipe.label)

    def to_networkx(self) -> "networkx.DiGraph":
        """A DiGraph in graph order. Nodes carry the fields of `ViewNode`, `precision` and `kernel`; edges `skip`.

        The graph itself carries title, policy, and name and operands of the recipe.
        """
        import networkx  # slow to import, and only needed here

        recipe = {"recipe": self.recipe.name, "operands": self.recipe.in_words}
        graph = networkx.DiGraph(title=self.title, policy=str(self.policy), **recipe)
        for node in self.nodes:
            fields = {name: value for name, value in vars(node).items() if name != "id"}
            kernel = self.kernels.get(node.site) if node.site is not None else None
            graph.add_node(node.id, **fields, precision=self.precision(node), kernel=kernel)
        for edge in self.edges:
            graph.add_edge(edge.source, edge.target, skip=edge.skip)
        return graph

    def to_svg(self) -> str:
        """The drawing as an SVG document."""
        return render_svg(self.nodes, self.edges, self.layout, self.sites, self.policy, self.recipe, self.title)

    def draw(self, path: str | Path) -> Path:
        """Write the drawing to `path`, which must end in .svg; return the path."""
        target = _checked(path, ".svg", "draw")
        target.write_text(self.to_svg(), encoding="utf-8")
        return target

    def save_html(self, path: str | Path, schedule: Sequence[Policy | Iterable[str]] | None = None) -> Path:
        """Write one self-contained interactive page to `path`, which must end in .html or .htm; return the path.

        `schedule` holds one policy per epoch; the page then has a slider that recolours the sites. Without one (or
        with an empty one) it shows the policy of this view. Deep links: `graph.html#epoch=3&site=layer1.0.conv1`
        opens at the third epoch with that site's panel open, `#search=conv2` with that search; they combine.
        """
        target = _checked(path, ".html", "save_html", ".htm")
        epochs = [resolve_policy(policy, self.sites.names) for policy in schedule or ()]
        page = render_html(
            self.nodes,
            self.edges,
            self.layout,
            self.sites,
            self.policy,
            epochs,
            self.kernels,
            self.recipe,
            self.title,
            self.private,
        )
        target.write_text(page, encoding="utf-8")
        return target


def _checked(path: str | Path, suffix: str, verb: str, *also: str) -> Path:
    target = Path(path)
    if target.suffix.lower() not in (suffix, *also):
        raise CompileSpecError(f"{verb}({str(path)!r}): the file name must end in {suffix}, such as 'graph{suffix}'.")
    return target
