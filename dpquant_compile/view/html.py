"""The interactive page: `page.html` filled with style, script, drawing and data. It works without a network."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dpquant_compile.numerics.recipe import Recipe
from dpquant_compile.policy import Policy
from dpquant_compile.sites import SiteTable
from dpquant_compile.view.contract_nodes import ViewEdge, ViewNode
from dpquant_compile.view.layout import Layout
from dpquant_compile.view.private_view import PrivateView
from dpquant_compile.view.svg import ARROWS, STYLE, badge_width, extent, render_graph
from dpquant_compile.view.template import fill_template, read_resource

__all__ = ["embed_json", "render_html"]

_HERE = "dpquant_compile.view"


def render_html(
    nodes: Sequence[ViewNode],
    edges: Sequence[ViewEdge],
    placed: Layout,
    sites: SiteTable,
    policy: Policy,
    epochs: Sequence[Policy],
    kernels: Mapping[str, str],
    recipe: Recipe,
    title: str,
    private: PrivateView | None = None,
) -> str:
    """The page. With `epochs` it has a slider over them and starts at the first, else it shows `policy`.

    With `private` a button opens the private program.
    """
    data = {
        "title": title,
        "low": recipe.label,
        "others": recipe.others,
        "recipe": recipe.name,
        "operands": recipe.in_words,
        "extent": extent(nodes, edges, placed),
        "sites": sites.names,
        "scheduled": bool(epochs),
        "epochs": [_epoch(each) for each in epochs or [policy]],
        "nodes": [_node(node, placed, sites, kernels) for node in nodes],
        "private": None if private is None else private.to_json(),
    }
    parts = {
        "title": escape(title),
        "low": escape(recipe.label),
        "low_width": f"{badge_width(recipe.label):.0f}",
        "others": escape(recipe.others),
        "recipe": escape(recipe.name),
        "operands": escape(recipe.in_words),
        "style": STYLE,
        "arrows": ARROWS,
        "graph": render_graph(nodes, edges, placed, sites, epochs[0] if epochs else policy, recipe.label),
        "data": embed_json(data),
        "css": read_resource(_HERE, "page.css"),
        "script": read_resource(_HERE, "page.js"),
    }
    return fill_template(_HERE, "page.html", parts)


def embed_json(data: object) -> str:
    """JSON that is safe inside a script element: no text in it can end the element or open a comment."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _epoch(policy: Policy) -> dict[str, str]:
    return {"policy": str(policy), "mask": "".join("01"[on] for on in policy.mask)}


def _node(node: ViewNode, placed: Layout, sites: SiteTable, kernels: Mapping[str, str]) -> dict[str, Any]:
    """The page's data of a node: its fields, its position, and for a site the table's entry."""
    box = placed.boxes[node.id]
    fields: dict[str, Any] = {**vars(node), "box": [box.left, box.top, box.width, box.height]}
    if node.site is not None:
        site = sites[node.site]
        fields |= {
            "weight_shape": site.weight_shape,
            "input_shape": site.input_shape,
            "geometry": str(site.geometry) if site.geometry else None,
            "kernel": kernels.get(site.name),
            "index": sites.names.index(site.name),
        }
    return {key: value for key, value in fields.items() if value is not None}
