"""The view of a graph without a browser: contraction, networkx, layout, SVG, and the page as text."""

import json
import random
import re
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from dpquant_compile.errors import CompileSpecError, DPQuantError, SiteError
from dpquant_compile.numerics.recipe import Recipe, get_recipe
from dpquant_compile.policy import Policy
from dpquant_compile.sites import Site, SiteTable, Skipped
from dpquant_compile.view import GraphView
from dpquant_compile.view.html import embed_json
from dpquant_compile.view.layout import Layout, layout
from dpquant_compile.view.svg import badge_width

SVG = "{http://www.w3.org/2000/svg}"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv2(self.relu(self.conv1(x))) + x)


class Small(nn.Module):
    """A residual CNN with bookkeeping: shapes, an assertion, a parameter, two outputs of one op."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.layer = nn.Sequential(Block(4), Block(4))
        self.gain = nn.Parameter(torch.ones(4, 1, 1))
        self.fc = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert(x.dim() == 4, "a batch of images")
        x = self.layer(self.pool(self.stem(x)) * self.gain.abs())
        a, b = x.chunk(2, 1)
        x = torch.cat((b, a), 1)
        return self.fc(x.mean((2, 3)).reshape(x.shape[0], x.size(1)))


def traced(model: nn.Module, prefix: str = "") -> tuple[fx.GraphModule, SiteTable]:
    gm = fx.symbolic_trace(model)
    sites: list[Site] = []
    for node in gm.graph.nodes:
        module = gm.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(module, nn.Conv2d | nn.Linear):
            op = "conv2d" if isinstance(module, nn.Conv2d) else "linear"
            site = Site(prefix + node.target, op, len(sites), weight_shape=tuple(module.weight.shape), flops=1000)
            sites.append(site)
            node.meta |= {"site": site, "origin": "capture", "shape": (2, 4, 8, 8), "source": f"net.py:{len(sites)}"}
    return gm, SiteTable(tuple(sites))


def small_view(*low: str, prefix: str = "", recipe: Recipe | None = None) -> GraphView:
    gm, sites = traced(Small(), prefix)
    kernels = {prefix + "fc": "reference (emulated)"}
    return GraphView.build(gm, sites, Policy(low, sites.names), kernels, "small", recipe)


def test_networkx_has_the_tensor_flow_and_nothing_else() -> None:
    graph = small_view().to_networkx()
    labels = [graph.nodes[name]["label"] for name in graph]
    block = ["conv1", "relu", "conv2", "add", "relu"]
    assert labels == [
        "x",
        "stem",
        "maxpool",
        "mul",
        *[f"layer.0.{x}" if x.startswith("conv") else x for x in block],
        *[f"layer.1.{x}" if x.startswith("conv") else x for x in block],
        "chunk",
        "cat",
        "mean",
        "reshape",
        "fc",
        "output",
    ]
    assert list(graph.edges("chunk")) == [("chunk", "cat")]
    assert set(graph.predecessors("reshape")) == {"mean"}
    assert graph.graph == {
        "title": "small",
        "policy": "none",
        "recipe": "int4",
        "operands": "input int4.nearest.channel; weight int4.nearest.block; output gradient int4.channel",
    }


def test_node_attributes() -> None:
    graph = small_view("fc").to_networkx()
    assert graph.nodes["layer_0_conv1"] == {
        "label": "layer.0.conv1",
        "kind": "site",
        "op": "conv2d",
        "site": "layer.0.conv1",
        "scope": "layer.0",
        "shape": (2, 4, 8, 8),
        "flops": 1000,
        "source": "net.py:2",
        "origin": "capture",
        "skipped": None,
        "precision": "full",
        "kernel": None,
    }
    assert graph.nodes["fc"]["precision"] == "low"
    assert graph.nodes["fc"]["kernel"] == "reference (emulated)"
    relu = graph.nodes["layer_0_relu"]
    assert (relu["kind"], relu["op"], relu["precision"], relu["scope"]) == ("op", "ReLU", None, "layer.0")
    assert [graph.nodes[name]["kind"] for name in ("x", "output")] == ["input", "output"]


def test_residual_edges_survive_and_are_marked() -> None:
    graph = small_view().to_networkx()
    assert {edge for edge in graph.edges if graph.edges[edge]["skip"]} == {("mul", "add"), ("relu", "add_1")}


def test_projection_shortcut_is_marked_where_it_merges() -> None:
    class Projection(Block):
        def __init__(self) -> None:
            super().__init__(4)
            self.down = nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv2(self.relu(self.conv1(x))) + self.down(x)

    gm, sites = traced(Projection())
    view = GraphView.build(gm, sites, Policy((), sites.names))
    assert [(edge.source, edge.target) for edge in view.edges if edge.skip] == [("down", "add")]


def test_precision_follows_the_policy() -> None:
    view = small_view("stem")
    other = view.with_policy(["fc", "layer.1.conv2"])
    low = {name for name, data in other.to_networkx().nodes.items() if data["precision"] == "low"}
    assert low == {"fc", "layer_1_conv2"}
    assert view.policy == {"stem"}
    assert str(view.with_policy("all").policy) == "all"
    with pytest.raises(SiteError, match="nowhere"):
        view.with_policy(["nowhere"])


def test_internal_inputs_are_hidden() -> None:
    graph = fx.Graph()
    x, policy, keys, samples = (graph.placeholder(name) for name in ("x", "dpq_policy", "dpq_keys", "dpq_samples"))
    weight = graph.placeholder("l_self_modules_fc_parameters_weight_")
    graph.output(graph.call_function(torch.conv2d, (x, weight, policy, keys, samples)))
    view = GraphView.build(fx.GraphModule(nn.Module(), graph), SiteTable(()), Policy((), ()))
    assert [node.id for node in view.nodes] == ["x", "conv2d", "output"]


def test_dynamo_scope_and_skipped_layers() -> None:
    graph = fx.Graph()
    x = graph.placeholder("L_x_")
    conv = graph.call_function(torch.ops.aten.conv2d.default, (x,))
    conv.meta["nn_module_stack"] = {
        "a": ("L['self'].layer1[0]", Block),
        "b": ("L['self'].layer1[0].conv1", nn.Conv2d),
    }
    act = graph.call_method("relu_", (conv,))
    act.meta["nn_module_stack"] = {"a": ("L['self']._modules['layer1']._modules['0']", Block)}
    graph.output(act)
    table = SiteTable((), (Skipped("layer1.0.conv1", "conv2d", "grouped"),))
    view = GraphView.build(fx.GraphModule(nn.Module(), graph), table, Policy((), ()))
    by_label = {node.label: node for node in view.nodes}
    assert list(by_label) == ["x", "conv2d", "relu", "output"]
    assert (by_label["conv2d"].scope, by_label["conv2d"].skipped) == ("layer1.0", "grouped")
    assert (by_label["relu"].scope, by_label["relu"].skipped) == ("layer1.0", None)


def test_a_layer_called_twice_is_two_nodes_of_one_site() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.fc(x))

    gm, sites = traced(Twice())
    view = GraphView.build(gm, SiteTable(sites[:1]), Policy(["fc"], ["fc"]))
    assert [(node.site, view.precision(node)) for node in view.nodes if node.kind == "site"] == [("fc", "low")] * 2


def test_svg_is_well_formed_and_names_every_site() -> None:
    view = small_view("fc", "stem")
    root = ET.fromstring(view.to_svg())
    nodes = {group.get("data-id"): group for group in root.iter(f"{SVG}g") if group.get("data-id")}
    assert set(nodes) == {node.id for node in view.nodes}
    names = {title.text for title in root.iter(f"{SVG}title")}
    assert names >= set(view.sites.names)
    assert {name for name, group in nodes.items() if "low" in (group.get("class") or "").split()} == {"fc", "stem"}
    text = " ".join(root.itertext())
    assert "2 of 6 sites in int4 (policy" in text and "INT4" in text
    assert len([p for p in root.iter(f"{SVG}path") if p.get("data-from")]) == len(view.edges)


@pytest.mark.parametrize("high", ["float32", "bfloat16", "int8"])
def test_every_export_says_the_recipe_and_what_the_other_sites_run_in(high: str, tmp_path: Path) -> None:
    recipe = replace(get_recipe("luq"), high=high)
    view, operands = small_view("fc", recipe=recipe), "input int4.nearest; weight int4.nearest; output gradient luq_fp4"
    graph = view.to_networkx()
    assert (graph.graph["recipe"], graph.graph["operands"]) == ("luq", operands)
    found = {data["precision"] for data in graph.nodes.values() if data["site"] is not None}
    assert found == {"low", "full" if high == "float32" else high}
    drawing, page = " ".join(ET.fromstring(view.to_svg()).itertext()), view.save_html(tmp_path / "a.html").read_text()
    assert "1 of 6 sites in luq" in drawing and operands in drawing and "INT4/FP4" in drawing
    assert f"luq: {operands}" in page
    assert (f"the others in {high}" in drawing) == ("full precision" not in drawing) == (high != "float32")
    legend = page[page.index('<div id="legend"') : page.index('<section id="private"')]
    assert (f"<span>{high}</span>" in legend) == ("full precision" not in legend) == (high != "float32")


def test_a_badge_is_as_wide_as_its_text() -> None:
    assert badge_width("FP4") == 34 and badge_width("INT4/INT8/FP4") > 13 * 7


def test_long_names_are_shortened_but_given_in_full() -> None:
    prefix = "encoder.layers.encoder_layer_11.self_attention."
    root = ET.fromstring(small_view(prefix=prefix).to_svg())
    assert f"{prefix}stem" in {title.text for title in root.iter(f"{SVG}title")}
    shown = [text.text or "" for text in root.iter(f"{SVG}text") if text.get("class") == "name"]
    assert max(map(len, shown)) <= 34
    assert any(text.startswith("encoder.") and text.endswith("n.layer.0.conv1") for text in shown)


def test_markup_in_names_is_escaped(tmp_path: Path) -> None:
    evil = "</script><b a=\"'&]]>\x01{{data}}"
    view = small_view(evil + "fc", prefix=evil)
    titles = {title.text for title in ET.fromstring(view.to_svg()).iter(f"{SVG}title")}
    assert evil.replace("\x01", "\ufffd") + "fc" in titles
    page = view.save_html(tmp_path / "page.html").read_text()
    assert "</script><b" not in page
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["sites"][-1] == evil + "fc"


def test_embedded_json_reads_back() -> None:
    text = "<!-- </script> & \u2028 × \\u003c"
    assert json.loads(embed_json([text])) == [text]
    assert not set("<>&\u2028") & set(embed_json([text]))


def test_files_are_written(tmp_path: Path) -> None:
    view = small_view("fc")
    assert ET.parse(view.draw(tmp_path / "graph.svg")).getroot().tag == f"{SVG}svg"
    page = view.save_html(str(tmp_path / "graph.html"), schedule=[view.policy, ["stem"], []]).read_text()
    assert "http" not in page.replace("http-equiv", "")
    assert "{{" not in page


@pytest.mark.parametrize("name", ["graph.png", "graph", "graph.html", "graph.svg.pdf"])
def test_draw_wants_an_svg_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(CompileSpecError, match=re.escape("must end in .svg")) as caught:
        small_view().draw(tmp_path / name)
    assert isinstance(caught.value, DPQuantError)
    assert not (tmp_path / name).exists()


def test_save_html_checks_name_and_schedule(tmp_path: Path) -> None:
    with pytest.raises(CompileSpecError, match=r"must end in \.html"):
        small_view().save_html(tmp_path / "graph.svg")
    with pytest.raises(SiteError, match="nowhere"):
        small_view().save_html(tmp_path / "graph.html", schedule=[["fc"], ["nowhere"]])


def check_layout(placed: Layout) -> None:
    """Boxes apart, edges downward, no line through a foreign box, all within the bounds."""
    boxes = list(placed.boxes.items())
    for (_, a), (_, b) in combinations(boxes, 2):
        assert a.right <= b.left or b.right <= a.left or a.bottom <= b.top or b.bottom <= a.top
    for _, box in boxes:
        assert box.left >= 0 <= box.top
        assert box.right <= placed.width + 1e-6
        assert box.bottom <= placed.height + 1e-6
    for (source, target), route in placed.routes.items():
        assert placed.boxes[source].bottom < placed.boxes[target].top
        for (x1, y1), (x2, y2) in pairwise(route):
            assert y2 >= y1
            assert x1 == x2 or y1 == y2
            for name, box in boxes:
                if name not in (source, target):
                    apart_x = max(x1, x2) <= box.left or min(x1, x2) >= box.right
                    assert apart_x or max(y1, y2) <= box.top or min(y1, y2) >= box.bottom, (source, target, name)


def test_layout_of_a_small_network() -> None:
    view = small_view()
    placed = view.layout
    check_layout(placed)
    chain = [node.id for node in view.nodes]
    assert len({placed.boxes[name].x for name in chain}) == 1
    lane = max(x for x, _ in placed.routes["mul", "add"])
    assert lane > max(placed.boxes[name].right for name in chain)


@pytest.mark.parametrize("seed", range(12))
def test_layout_of_random_graphs(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"n{i}" for i in range(40)]
    edges = [(names[rng.randrange(max(0, i - 9), i)], names[i]) for i in range(1, 40) for _ in range(rng.randint(0, 3))]
    check_layout(layout({name: (rng.choice([40.0, 150.0]), rng.choice([20.0, 40.0])) for name in names}, edges))


def test_layout_of_nothing_and_of_one() -> None:
    assert layout({}, []).boxes == {}
    assert layout({"a": (10, 10)}, []).boxes["a"].left == 0


def test_constants_stand_just_above_their_use() -> None:
    sizes = dict.fromkeys(["x", "a", "b", "mask", "c"], (40.0, 20.0))
    placed = layout(sizes, [("x", "a"), ("a", "b"), ("b", "c"), ("mask", "c")], inputs={"x"})
    check_layout(placed)
    assert placed.boxes["mask"].y == placed.boxes["b"].y


def test_a_graph_of_densenet121_size_is_placed_in_time() -> None:
    sizes: dict[str, tuple[float, float]] = {"x": (64.0, 20.0)}
    edges: list[tuple[str, str]] = []

    def add(name: str, *before: str) -> str:
        sizes[name] = (180.0, 40.0) if "conv" in name else (80.0, 20.0)
        edges.extend((source, name) for source in before)
        return name

    last = "x"
    for block, depth in enumerate((6, 12, 24, 16)):
        features = [last]
        for i in range(depth):
            last = add(f"{block}.{i}.cat", *features)
            for op in ("norm1", "relu1", "conv1", "norm2", "relu2", "conv2"):
                last = add(f"{block}.{i}.{op}", last)
            features.append(last)
        last = add(f"{block}.cat", *features)
    assert len(sizes) > 400
    start = time.perf_counter()
    placed = layout(sizes, edges, inputs={"x"})
    assert time.perf_counter() - start < 2
    assert len({placed.boxes[name].x for name in sizes}) == 1
    for source, target in edges:
        assert placed.boxes[source].bottom < placed.boxes[target].top
