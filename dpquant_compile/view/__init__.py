"""Looking at a compiled model: networkx, SVG, and one self-contained HTML page."""

from dpquant_compile.view.contract_nodes import ViewEdge, ViewNode
from dpquant_compile.view.graph_view import GraphView
from dpquant_compile.view.private_view import PrivateView

__all__ = ["GraphView", "PrivateView", "ViewEdge", "ViewNode"]
