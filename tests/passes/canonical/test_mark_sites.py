"""mark_sites: which convs and linears are sites, what they are called, and why the rest is none."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpquant_compile as dpq
from dpquant_compile.passes.canonical.mark_sites import collect_sites, mark_sites
from dpquant_compile.sites import SiteTable
from tests.support.models import (
    BatchNormNet,
    Functional,
    GroupNormNet,
    Hooked,
    Hyper,
    TextNet,
    Transposed,
    canonical,
    program,
    seeded,
)


def found(model: nn.Module) -> SiteTable:
    return collect_sites(canonical(model))


def reasons(model: nn.Module) -> dict[str, str]:
    return {skip.name: skip.reason for skip in found(model).skipped}


class Plain(nn.Module):
    """One function of the parameters `w` [4, 4] and `b` [4], the layer `fc`, and the batch."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.register_buffer("running", torch.zeros(4, 4))
        self.fc = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def test_golden() -> None:
    # Not by expecttest, which writes ASCII only.
    assert str(found(seeded(GroupNormNet))).splitlines() == [
        "  0  stem (conv2d 4×3×3×3 s2x2 p1x1)",
        "  1  blocks.0.conv1 (conv2d 4×4×3×3 s1x1 p1x1)",
        "  2  blocks.0.conv2 (conv2d 4×4×3×3 s1x1 p1x1)",
        "  3  blocks.1.conv1 (conv2d 4×4×3×3 s1x1 p1x1)",
        "  4  blocks.1.conv2 (conv2d 4×4×3×3 s1x1 p1x1)",
        "  5  fc (linear 5×4)",
    ]


def test_the_graph_is_untouched() -> None:
    gm = canonical(seeded(BatchNormNet))
    before = program(gm)
    result = mark_sites(gm)
    assert result.modified is False and result.graph_module is gm
    gm.recompile()
    assert program(gm) == before


def test_marking_twice_finds_the_same() -> None:
    gm = canonical(seeded(TextNet))
    first = collect_sites(gm)
    mark_sites(gm)
    assert collect_sites(gm) == first


def test_a_graph_without_sites() -> None:
    table = found(nn.Sequential(nn.ReLU(), nn.Flatten()))
    assert len(table) == 0 and table.skipped == ()


def test_names_of_plain_parameters() -> None:
    table = found(seeded(Functional))
    assert table.names == ("kernel", "conv2d", "table")
    assert table["conv2d"].weight is None, "its weight is computed"
    assert table["kernel"].weight == "kernel" and table["kernel"].module_types == ()


def test_a_layer_that_is_called_twice_is_one_site() -> None:
    gm = canonical(seeded(TextNet))
    table = collect_sites(gm)
    assert table.names == ("mix", "head")
    assert len(table["mix"].nodes) == 2
    calls = [(n.meta["site"].name, n.meta["call"]) for n in gm.graph.nodes if "site" in n.meta]
    assert calls == [("mix", 0), ("mix", 1), ("head", 0)]


def test_tied_layers_are_sites_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    table = found(model)
    assert table.names == ("0", "2")
    assert [site.bias for site in table] == ["0.bias", "2.bias"]


def test_a_parametrised_layer_keeps_its_name() -> None:
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    table = found(model)
    assert table.names == ("0", "1")
    assert table["0"].weight is None and "Linear" in table["0"].module_types
    assert table["1"].module_types == ("Linear",)


def test_transposed_convs_are_skipped() -> None:
    assert "transposed" in reasons(seeded(Transposed))["up"]
    by_dynamo = collect_sites(canonical(seeded(Transposed), torch.randn(3, 2, 6, 6), dynamo=True))
    assert [(skip.name, skip.op) for skip in by_dynamo.skipped] == [("up", "conv_transpose2d")]


def test_hooked_layers_are_skipped() -> None:
    table = found(seeded(Hooked))
    assert table.names == ("first", "last")
    assert [(skip.name, skip.op) for skip in table.skipped] == [("watched", "Linear")]
    assert "hooks" in table.skipped[0].reason and "models.py" in str(table.skipped[0].source)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_skipped(kind: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.fc = kind(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.rnn(x)[0])

    table = found(Recurrent())
    assert table.names == ("fc",)
    assert "write it with nn.Linear" in table.skipped[0].reason


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: x @ self.w[None],
        lambda self, x: x.mm(self.w * 2),
        lambda self, x: torch.einsum("bi,oi->bio", x, self.w),
        lambda self, x: F.bilinear(x, x, self.w[None]),
    ],
    ids=["a stack", "computed", "einsum", "bilinear"],
)
def test_products_with_a_parameter_are_skipped(function: Any) -> None:
    (skip,) = found(Plain(function)).skipped
    assert "no product of the batch with one matrix; write it as F.linear" in skip.reason


def test_a_weight_that_the_batch_chooses_is_skipped() -> None:
    (skip,) = found(Plain(lambda self, x: torch.bmm(self.w[x[:, :, None].argmax(1)], x[:, :, None]))).skipped
    assert (skip.name, skip.op) == ("w", "bmm") and "chosen by the batch" in skip.reason


def test_products_of_activations_are_nobodys_business() -> None:
    assert found(Plain(lambda self, x: x @ x.t())).skipped == ()


def test_a_weight_that_depends_on_the_batch_is_skipped() -> None:
    table = found(seeded(Hyper))
    assert table.names == ("make",)
    assert "weight depends on the batch" in table.skipped[0].reason


def test_a_weight_may_depend_on_sizes() -> None:
    table = found(Plain(lambda self, x: F.linear(x, self.w * x.shape[1] + x.size(1))))
    assert len(table) == 1


def test_an_input_that_does_not_depend_on_the_batch_is_skipped() -> None:
    table = found(Plain(lambda self, x: x + self.fc(self.w)))
    assert "does not depend on the batch" in table.skipped[0].reason and not len(table)


def test_geometry_that_is_computed_is_skipped() -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(2, 2, 3))

        def forward(self, x: Tensor) -> Tensor:
            return F.conv1d(x, self.w, padding=x.shape[2] // 4)

    assert "computed by the model" in reasons(Computed())["w"]


def _filled(self: Any, x: Tensor) -> Tensor:
    weight = torch.zeros_like(self.w)
    weight[0] = x[0]
    return F.linear(x, weight)


def _running(self: Any, x: Tensor) -> Tensor:
    self.running.copy_(x.t() @ x)
    return F.linear(x, self.running)


@pytest.mark.parametrize("function", [_filled, _running])
def test_a_weight_that_the_batch_is_written_into_is_skipped(function: Any) -> None:
    table = found(Plain(function))
    assert not len(table)
    assert "weight depends on the batch" in table.skipped[0].reason


def test_a_bias_that_depends_on_the_batch_is_skipped() -> None:
    table = found(Plain(lambda self, x: F.linear(x, self.w, self.fc(x))))
    assert table.names == ("fc",)
    assert "bias depends on the batch" in table.skipped[0].reason


def test_an_input_that_the_batch_is_written_into_is_a_site() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        padded = torch.zeros((x.shape[0], 4))
        padded[:, :4] = x
        return self.fc(padded)

    assert found(Plain(forward)).names == ("fc",)


def test_a_weight_in_two_geometries_is_two_sites() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, 3, 3) / 6)

        def forward(self, x: Tensor) -> Tensor:
            near = F.conv2d(x, self.weight, padding=1)
            return (
                near
                + F.conv2d(x, self.weight, padding=2, dilation=2)
                + F.conv2d(x[:, :, 1:], self.weight, padding=1).mean()
            )

    torch.manual_seed(0)
    plain = Twice()
    model = dpq.compile(plain, budget=0, backend="reference", inner="eager").train()
    x = torch.randn(3, 4, 6, 6)
    torch.testing.assert_close(model(x), plain(x))
    assert len(model.sites) == 2 and {site.geometry.dilation for site in model.sites if site.geometry} == {
        (1, 1),
        (2, 2),
    }
