"""The kernel that `explain()` and drawings name is the one that runs."""

import copy

import pytest
import torch
from torch import Tensor, nn

import dpquant_compile as dpq
from dpquant_compile.errors import KernelError
from dpquant_compile.explain import Row
from tests.support.models import seeded


class Folded(nn.Module):
    """Three images per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.fc = nn.Linear(2 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.flatten(0, 1)).relu().flatten(1)
        return self.fc(y).unflatten(0, (x.shape[0], -1)).mean(1)


CLIPS = torch.randn(4, 3, 1, 6, 6, generator=torch.Generator().manual_seed(1))


def rows(model: dpq.CompiledModule) -> dict[str, Row]:
    return {row.site: row for row in model.explain()}


@pytest.mark.parametrize(
    ("fmt", "kernel"), [("luq_fp4", "compiled (emulated)"), ("int4.block", "reference (emulated)")]
)
def test_a_folded_conv_has_the_kernel_that_takes_it(fmt: str, kernel: str) -> None:
    model = dpq.compile(seeded(Folded), 1.0, format=fmt, inner="eager").train()
    model.capture(CLIPS)
    found = rows(model)["conv"]
    assert (found.kernel, found.native) == (kernel, False)
    assert "not cpu_int8: a sample of this conv is more than one image" in found.note
    nodes = model.graph_view().to_networkx().nodes.values()
    assert {node["kernel"] for node in nodes if node["site"] == "conv"} == {kernel}


def test_a_site_that_is_not_float32_runs_by_the_reference() -> None:
    model = dpq.compile(seeded(Folded).double(), 1.0, inner="eager").train()
    assert {row.kernel for row in model.explain()} == {"reference (emulated)"}
    assert all("not cpu_int8: its weight is torch.float64" in row.note for row in model.explain())
    other = dpq.compile(copy.deepcopy(model.original), 1.0, inner="eager", backend="reference").train()
    assert torch.equal(model(CLIPS.double()), other(CLIPS.double()))
    model.float()
    assert rows(model)["fc"].native


def test_only_float32_weights_are_said_to_multiply_in_bfloat16() -> None:
    model = dpq.compile(seeded(Folded).double(), 0, high="bfloat16", inner="eager").train()
    row = rows(model)["fc"]
    assert (row.precision, row.kernel, row.native) == ("full", "torch (full precision)", False)
    assert row.note == "its weight is torch.float64"
    model.float()
    row = rows(model)["fc"]
    assert (row.precision, row.kernel, row.native) == ("bfloat16", "torch (bfloat16)", True)


def test_a_site_that_no_kernel_of_the_backend_runs_is_named() -> None:
    with pytest.raises(KernelError, match=r"site 'conv': no kernel runs conv2d in int4.block.*Try backend='auto'"):
        dpq.compile(seeded(Folded), 1.0, format="int4.block", backend="compiled")
    model = dpq.compile(seeded(Folded), 1.0, backend="cpu_int8", inner="eager").train()
    model.capture(CLIPS)
    with pytest.raises(KernelError, match=r"site 'conv': .*more than one image.*Try backend='auto'"):
        model.explain()
    assert rows(model.eval())["conv"].kernel == "torch (full precision)"


def test_a_site_that_is_called_in_two_ways_has_the_lesser_kernel() -> None:
    class Twice(Folded):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.fc(self.conv(x[:, 0]).flatten(1))

    model = dpq.compile(seeded(Twice), 1.0, inner="eager").train()
    model.capture(CLIPS)
    assert rows(model)["conv"].kernel == "compiled (emulated)" and rows(model)["fc"].native


def test_eval_says_that_nothing_is_rounded() -> None:
    model = dpq.compile(seeded(Folded), 1, high="int8", inner="eager", backend="reference").eval()
    assert {row.precision for row in model.explain()} == {"full"}
    title = str(model.explain()).splitlines()[0]
    assert title == (
        "1 of 2 sites in int4, outputs 'none', the others in int8, train(); now eval(): all in full precision, on cpu"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "site", "said"),
    [(torch.float32, "conv", "more than one image"), (torch.float64, "fc", "its weight is torch.float64")],
)
def test_a_handle_of_torch_compile_knows_its_tensors_too(dtype: torch.dtype, site: str, said: str) -> None:
    torch._dynamo.reset()
    run = torch.compile(seeded(Folded).to(dtype), backend="dpquant", options={"budget": 1.0, "inner": "eager"})
    run(CLIPS.to(dtype)).sum().backward()
    (row,) = [row for row in dpq.sessions()[-1].explain() if row.site == site]
    assert not row.native and said in row.note
