"""trace_joint: the private program in `trace_log()`, in DPQUANT_TRACE and on the page."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile import pipeline
from dpquant_compile.errors import GraphInvariantError
from dpquant_compile.passes.private.joint_facts import facts_of
from dpquant_compile.passes.runner import PassResult, called_programs
from tests.support.private import clipped_sums, made_private
from tests.support.private_loops import assert_same

ROOT = Path(__file__).resolve().parent
while not (ROOT / "pyproject.toml").exists():
    ROOT = ROOT.parent


def private(clipping: str = "flat") -> dpq.CompiledModule:
    """A tiny model, made private."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    compiled = dpq.compile(net, budget=1, backend="reference")
    model, _, _ = dpq.PrivacyEngine().make_private(
        module=compiled,
        optimizer=torch.optim.SGD(compiled.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.zeros(16, 4)), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        loss_reduction="sum",
        clipping=clipping,
        max_physical_batch_size=4,
        noise_generator=torch.Generator().manual_seed(0),
    )
    return model


@pytest.mark.slow
def test_a_later_run_finds_its_programs_in_the_cache_of_inductor() -> None:
    x, sums, found = torch.randn(4, 4), [], []
    for _ in range(2):
        counters["inductor"].clear()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        sums.append(clipped_sums(made_private(net, 4, inner="inductor")[0], [x]))
        found.append([counters["inductor"][f"fxgraph_cache_{kind}"] for kind in ("hit", "bypass")])
    assert found[1] == [2, 0] and found[0][1] == 0  # forward and backward
    assert_same(sums[1], sums[0])


NAMES = [f"{layer}_{kind}" for layer in (0, 2) for kind in ("weight", "bias")]


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_nodes_are_named_by_what_they_compute(clipping: str) -> None:
    model = private(clipping)
    model(torch.randn(4, 4))
    (record,) = (r for r in model.trace_log() if r.name == "free_saved_inputs")
    programs = called_programs(record.after)
    lines = [line.split(" = ")[0].strip() for line in programs["private_backward"].splitlines()]
    factors = ["clip_factors"] if clipping == "flat" else [f"clip_factors_{name}" for name in NAMES]
    for prefix, wanted in (
        ("squared_norms", [f"squared_norms_{name}" for name in NAMES]),
        ("clip_factors", factors),
        ("clipped_sum", [f"clipped_sum_{name}" for name in NAMES]),
    ):
        assert [line for line in lines if line.startswith(prefix)] == wanted
        assert prefix not in programs["private_forward"]
    assert "tangents" not in programs["private_forward"] and "primals_1_0_weight" in programs["private_forward"]


def test_every_step_is_recorded_and_the_document_shows_the_form() -> None:
    model = private()
    model(torch.randn(4, 4))
    log = model.trace_log()
    steps = [*pipeline.INTERPRETED_JOINT_PASSES, *pipeline.TAGGING_PASSES, *pipeline.INTERPRETED_CUT_PASSES]
    names = ["verify_isolation", "trace_joint", *(getattr(step, "func", step).__name__ for step in steps)]
    assert [record.name for record in log][-len(names) :] == names
    assert all(record.origin == before.name for before, record in zip(log[-7:], log[-6:], strict=False))
    text = (ROOT / "docs" / "graphs.md").read_text(encoding="utf-8")
    shape = re.compile(r"^# (\w+) → (\w+) \([\d.]+ ms\): .+$", re.MULTILINE)
    shown = [match[2] for match in shape.finditer(text)]
    compiled = [*pipeline.COMPILED_JOINT_PASSES, *pipeline.TAGGING_PASSES, *pipeline.COMPILED_CUT_PASSES]
    assert shown == ["trace_joint", *(getattr(step, "func", step).__name__ for step in compiled)]
    assert all(shape.match(record.headline) for record in log)


def test_a_private_step_makes_no_switched_program() -> None:
    model = private()
    model(torch.randn(4, 4))
    assert "insert_switches" not in [record.name for record in model.trace_log()]
    with torch.no_grad():
        model(torch.randn(4, 4))
    assert "insert_switches" in [record.name for record in model.trace_log()]


def test_tracing_shows_the_private_passes(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DPQUANT_TRACE", "1")
    private()(torch.randn(4, 4))
    printed = capfd.readouterr().err
    assert "→ trace_joint" in printed and "→ cut_joint" in printed and "clipped_sum_2_weight = " in printed


def test_the_page_shows_the_private_program(tmp_path: Path) -> None:
    model = private()

    def shown() -> dict[str, object] | None:
        page = model.save_html(tmp_path / "graph.html").read_text(encoding="utf-8")
        found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
        assert found is not None
        value: dict[str, object] | None = json.loads(found[1])["private"]
        return value

    assert shown() is None
    model(torch.randn(4, 4))
    private_program = shown()
    assert private_program is not None
    (forward, lines), (backward, others) = private_program["programs"]  # type: ignore[misc]
    assert (forward, backward) == ("forward", "backward") and {kind for _, kind in lines} == {""}
    kinds = [kind for _, kind in others if kind]
    assert kinds == 4 * ["norms"] + 2 * ["factors"] + 4 * ["sums"]
    assert [row[0] for row in private_program["parameters"]] == ["0.weight", "0.bias", "2.weight", "2.bias"]  # type: ignore[attr-defined]


def leak_a_sum(gm: torch.fx.GraphModule) -> PassResult:
    """Returns a clipped sum, without noise, among forward's outputs."""
    outputs = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    outputs[0] = outputs[facts_of(gm).forward_outputs]
    gm.graph.output_node().args = (outputs,)
    return PassResult(gm, True)


def forget_clipping(gm: torch.fx.GraphModule) -> PassResult:
    """Takes every factor for one."""
    for node in gm.graph.nodes:
        if node.name == "clip_factors":
            with gm.graph.inserting_before(node):
                node.replace_all_uses_with(gm.graph.call_function(torch.ops.aten.ones.default, ([4],)))
    return PassResult(gm, True)


@pytest.mark.parametrize("faulty", [leak_a_sum, forget_clipping])
def test_an_unsound_pass_is_caught(faulty: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "INTERPRETED_JOINT_PASSES", (*pipeline.INTERPRETED_JOINT_PASSES, faulty))
    with pytest.raises(GraphInvariantError, match=r"outputs of a private program|gradients|clipping bounds"):
        private()(torch.randn(4, 4))
