"""Looking at a compiled model: networkx, SVG, and one self-contained HTML page."""

from dpquant_compile.view.contract_nodes import ViewEdge, ViewNode
from dpquant_compile.view.graph_view import GraphView

__all__ = ["GraphView", "ViewEdge", "ViewNode"]
