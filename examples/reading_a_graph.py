"""Reading what the compiler made of a model: sites, programs, differences, passes, the graph as data and as a picture.

    python examples/reading_a_graph.py [--out out/reading_a_graph]

Nothing is trained or compiled here: it takes seconds. What to notice
- `explain()` says of each layer what runs it, and of what is no site, why (here a transposed convolution).
- `variant(policy)` is a torch.fx.GraphModule that computes what the model computes under that policy.
- `graph_view().to_networkx()` is an ordinary graph: questions to it are a line or two each.
- graph.svg is the picture, and graph.html the page: one file that works offline, with a slider over the epochs.
"""

import argparse
from pathlib import Path

import networkx
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpquant_compile as dpq


class Block(nn.Module):
    """Two convolutions with GroupNorm and a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class Net(nn.Module):
    """Five sites, a skip connection, and a transposed convolution, which is no site."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.block = Block(16)
        self.down = nn.Conv2d(16, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.fc = nn.Linear(4 * 8 * 8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(F.relu(self.stem(x)))
        logits: Tensor = self.fc(F.relu(self.up(F.relu(self.down(x)))).flatten(1))
        return logits


def feeding(graph: networkx.DiGraph, site: str) -> list[str]:
    """The sites whose results reach `site` without passing through another site."""
    (node,) = [name for name, fields in graph.nodes(data=True) if fields["site"] == site]
    found, waiting = [], list(graph.predecessors(node))
    for name in waiting:  # it grows while we go through it
        if graph.nodes[name]["site"] is not None:
            found.append(graph.nodes[name]["site"])
        else:
            waiting += [before for before in graph.predecessors(name) if before not in waiting]
    return sorted(set(found))


def heading(text: str) -> None:
    """A line that stands out."""
    print(f"\n== {text}")


def main() -> None:
    """Look at one model in every way there is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/reading_a_graph"), help="folder for the pictures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    # With example inputs shapes and FLOPs are known now, and not only after the first forward.
    model = dpq.compile(Net(), budget=3, inner="eager", example_inputs=(torch.zeros(2, 1, 8, 8),))

    heading("sites: name, FLOPs of a sample forward, where it is called")
    for site in model.sites:
        print(f"{site}: {site.flops} FLOPs, {site.input_shape} -> {site.output_shape}; {site.source}")

    model.set_policy(["block.conv1", "down", "fc"])
    heading("explain(): what runs each layer now")
    print(model.explain())

    heading("variant(): the program with one site in FP4; dpquant's operator in the place of conv2d")
    model.variant(["block.conv1"]).print_readable()

    heading("diff(): the same, as what changes")
    print(model.diff("none", ["block.conv1"]))

    heading("trace_log(): every pass, and what it did to the operations; print a record to see before and after")
    for record in model.trace_log():
        changes = ", ".join(f"{op} {delta:+d}" for op, delta in sorted(record.ops.items()))
        print(f"{record.origin} → {record.name}: {changes or 'the same operations'}")

    graph = model.graph_view().to_networkx()
    heading(f"the graph as data: {len(graph)} nodes, {graph.number_of_edges()} edges")
    for name in ("block.conv2", "down", "fc"):
        print(f"sites that feed {name}: {', '.join(feeding(graph, name))}")
    low = [fields for _, fields in graph.nodes(data=True) if fields["precision"] == "low"]
    share = sum(fields["flops"] for fields in low) / sum(site.flops or 0 for site in model.sites)
    print(f"share of the FLOPs in low precision: {share:.0%}")
    chain = networkx.dag_longest_path(graph)
    print(f"longest chain: {' → '.join(graph.nodes[name]['label'] for name in chain)}")
    skips = [(graph.nodes[a]["label"], graph.nodes[b]["label"]) for a, b, skip in graph.edges(data="skip") if skip]
    print(f"skip connections: {', '.join(f'{a} → {b}' for a, b in skips)}")
    after = [graph.nodes[name]["site"] for name in networkx.descendants(graph, chain[0])]
    print(f"sites behind the input: {len([site for site in after if site is not None])} of {len(model.sites)}")

    drawing = model.draw(args.out / "graph.svg")
    page = model.save_html(args.out / "graph.html", schedule=[["stem"], ["block.conv1", "block.conv2"], "all"])
    print(f"\nWrote {drawing} and {page}")


if __name__ == "__main__":
    main()
