"""track_batch: where the samples lie, shapes and FLOPs at every site, and nothing else changed."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import dpquant_compile as dpq
from dpquant_compile.errors import CaptureError, DPQuantError
from dpquant_compile.passes.batch.track_batch import PROBES, batch_size, track_batch
from dpquant_compile.passes.canonical.mark_sites import collect_sites
from dpquant_compile.sites import BatchAxis
from tests.support.models import (
    Attention,
    BatchNormNet,
    Counting,
    GroupNormNet,
    TextNet,
    TimeFirst,
    canonical,
    conv_zoo,
    program,
    seeded,
    state,
    tracked,
)


def axes(gm: fx.GraphModule) -> dict[str, tuple[BatchAxis, BatchAxis]]:
    return {n.meta["site"].name: (n.meta["axis"], n.meta["output_axis"]) for n in gm.graph.nodes if "site" in n.meta}


class Before(nn.Module):
    """A linear after one function of the batch."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.function(x))


def test_axes_of_every_layout() -> None:
    found = axes(tracked(seeded(TimeFirst), torch.randn(3, 5, 4)))
    assert found == {
        "plain": (BatchAxis(0), BatchAxis(0)),
        "time": (BatchAxis(1), BatchAxis(1)),
        "folded": (BatchAxis(0, 1, 5), BatchAxis(0, 1, 5)),
        "swapped": (BatchAxis(0, 5, 1), BatchAxis(0, 5, 1)),
    }


@pytest.mark.parametrize("batch", [1, 2, 5, 7, 35])
def test_axes_do_not_depend_on_the_batch_size(batch: int) -> None:
    # 7 is the probe, 5 the length, 35 their product.
    assert axes(tracked(seeded(TimeFirst), torch.randn(batch, 5, 4))) == axes(
        tracked(seeded(TimeFirst), torch.randn(3, 5, 4))
    )


def test_a_length_equal_to_the_probe() -> None:
    found = axes(tracked(seeded(TimeFirst), torch.randn(3, PROBES[0], 4)))
    assert found["swapped"][0] == BatchAxis(0, PROBES[0], 1) and found["folded"][0] == BatchAxis(0, 1, PROBES[0])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_keeps_its_batch(batch_first: bool, need_weights: bool) -> None:
    model = seeded(lambda: Attention("self", need_weights, batch_first=batch_first))
    x = torch.randn(3, 5, 8)
    if batch_first:
        found = axes(tracked(model, x, x, x))
        assert found["attn.in_proj"][0] == BatchAxis(1)
        assert found["attn.out_proj"][0] == BatchAxis(0, 5, 1)
    else:

        class Turned(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model

            def forward(self, x: Tensor) -> Any:
                x = x.transpose(0, 1)
                return self.inner(x, x, x)

        found = axes(tracked(Turned(), x))
        assert found["inner.attn.out_proj"][0] == BatchAxis(0, 5, 1)


def test_shapes_have_the_batch_size_of_the_call() -> None:
    gm = tracked(seeded(GroupNormNet), torch.randn(13, 3, 8, 8))
    table = collect_sites(gm)
    assert (table["stem"].input_shape, table["stem"].output_shape) == ((13, 3, 8, 8), (13, 4, 4, 4))
    assert (table["fc"].input_shape, table["fc"].output_shape) == ((13, 4), (13, 5))
    assert {n.meta["shape"][0] for n in gm.graph.nodes if "shape" in n.meta and n.op == "call_function"} == {13}
    folded = collect_sites(tracked(seeded(TimeFirst), torch.randn(3, 5, 4)))
    assert folded["swapped"].input_shape == (15, 4) and folded["time"].input_shape == (5, 3, 4)


def test_flops_by_hand() -> None:
    table = collect_sites(tracked(seeded(GroupNormNet), torch.randn(2, 3, 8, 8)))
    assert table["stem"].flops == 2 * (4 * 4) * 4 * (3 * 9)
    assert table["blocks.0.conv1"].flops == 2 * (4 * 4) * 4 * (4 * 9)
    assert table["fc"].flops == 2 * 5 * 4
    folded = collect_sites(tracked(seeded(TimeFirst), torch.randn(3, 5, 4)))
    assert {site.flops for site in folded} == {2 * 5 * 4 * 4}


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("conv1d", 2 * 7 * 6 * (4 * 3)),
        ("grouped", 2 * 16 * 6 * (2 * 9)),
        ("depthwise", 2 * 16 * 8 * 9),
        ("strided", 2 * (4 * 3) * 3 * (2 * 9)),
        ("conv3d", 2 * (3 * 5 * 5) * 4 * (2 * 6)),
    ],
)
def test_flops_of_convs_by_hand(name: str, flops: int) -> None:
    conv, shape = conv_zoo()[name]
    (site,) = collect_sites(tracked(nn.Sequential(conv), torch.randn(shape)))
    assert site.flops == flops


def test_flops_of_a_layer_that_is_called_twice() -> None:
    table = collect_sites(tracked(seeded(TextNet), torch.zeros(3, 5, dtype=torch.int64)))
    assert table["mix"].flops == 2 * (2 * 5 * 8 * 8)


@pytest.mark.parametrize("make", [BatchNormNet, Counting])
def test_nothing_is_computed_or_changed(make: Any) -> None:
    model = seeded(make)
    x = torch.randn(3, 3, 8, 8) if make is BatchNormNet else torch.randn(3, 4)
    gm = canonical(model)
    before, code, parameters = state(model), program(gm), dict(model.named_parameters())
    generator = torch.get_rng_state()
    result = track_batch(gm, args=(x,), kwargs={})
    assert result.modified is False and result.graph_module is gm
    gm.recompile()
    assert program(gm) == code
    torch.testing.assert_close(state(model), before, rtol=0, atol=0)
    assert all(dict(model.named_parameters())[name] is p for name, p in parameters.items())
    assert torch.equal(torch.get_rng_state(), generator)


def test_inference_mode_finds_the_same() -> None:
    expected = collect_sites(tracked(seeded(GroupNormNet), torch.randn(3, 3, 8, 8)))
    with torch.inference_mode():
        found = collect_sites(tracked(seeded(GroupNormNet), torch.randn(3, 3, 8, 8)))
    assert found == expected and not found.skipped


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x[0], "one sample is picked"),
        (lambda x: x.mean(0), "reduces over the batch"),
        (lambda x: torch.cat((x, x)), "joins batches"),
        (lambda x: x[1:], "takes a part of the batch"),
        (lambda x: x.flip(0), "runs over the batch"),
        (lambda x: (x @ x.t()) @ x, "multiplies samples with each other"),
        (lambda x: x.reshape(-1, 2, 4).transpose(0, 1).reshape(-1, 2, 4), "splits the batch"),
        (lambda x: torch.linalg.pinv(x).t(), "no rule follows the batch"),
    ],
    ids=["select", "mean", "cat", "slice", "flip", "gram", "reshape", "no rule"],
)
def test_a_lost_batch_is_a_reason(function: Any, why: str) -> None:
    gm = tracked(Before(function), torch.randn(6, 4) if why != "splits the batch" else torch.randn(6, 2, 4))
    (skip,) = collect_sites(gm).skipped
    assert skip.name == "fc" and skip.reason.startswith("samples cannot be told apart here: ") and why in skip.reason
    assert not [n for n in gm.graph.nodes if "site" in n.meta or "axis" in n.meta]


@pytest.mark.parametrize(
    "function",
    [lambda x: x.roll(1), lambda x: F.pad(x, (0, 0, 1, -1)), lambda x: x.index_select(1, x[:, 0].long() % 4)[:, :4]],
    ids=["flat roll", "shift", "index"],
)
def test_what_moves_samples_is_skipped(function: Any) -> None:
    assert not len(collect_sites(tracked(Before(function), torch.randn(6, 4))))


def test_what_mixes_samples_in_their_place_keeps_its_axis() -> None:
    # An axis says which elements belong to which sample; that others went into them is for verify_isolation.
    assert axes(tracked(Before(lambda x: x - x.mean(0)), torch.randn(6, 4))) == {"fc": (BatchAxis(0), BatchAxis(0))}


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.attn(x, x, x, attn_mask=mask, need_weights=False)[0]


@pytest.mark.parametrize("batch", [3, 5])
def test_an_input_that_is_no_batch(batch: int) -> None:
    table = collect_sites(tracked(Masked(), torch.randn(batch, 5, 4), torch.zeros(5, 5)))
    assert table.names == ("attn.in_proj", "attn.out_proj")


@pytest.mark.parametrize(
    "function", [lambda x: x * x.max().item(), lambda x: x[x[:, 0] > 0]], ids=["item", "boolean index"]
)
def test_data_dependent_models_are_a_typed_error_or_a_reason(function: Any) -> None:
    with contextlib.suppress(DPQuantError):
        assert not len(collect_sites(tracked(Before(function), torch.randn(6, 4))))


def test_batch_size_is_that_of_the_first_tensor_with_dimensions() -> None:
    assert batch_size((torch.tensor(3.0), {"x": torch.zeros(4, 2)}), {}) == 4
    assert batch_size((), {"x": [torch.zeros(2, 3)]}) == 2
    with pytest.raises(CaptureError, match="without a tensor that has a batch dimension"):
        batch_size((1, "a", torch.tensor(1)), {})


def test_keyword_and_default_arguments() -> None:
    model = seeded(lambda: Attention("self", batch_first=True))
    x = torch.randn(3, 5, 8)
    gm = canonical(model)
    track_batch(gm, args=(x,), kwargs={"value": x, "key": x, "padding": torch.zeros(3, 5, dtype=torch.bool)})
    assert len(collect_sites(gm)) == 2


def test_variable_arguments() -> None:
    class Variable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, *inputs: Tensor) -> Tensor:
            return self.fc(inputs[0])

    assert len(collect_sites(tracked(Variable(), torch.randn(3, 4)))) == 1


class Reshape(nn.Module):
    """Writes a size as a number, so that samples and positions change places."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.before, self.fc = kind, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        if self.kind == "number":
            return self.fc(x.reshape(7, -1, 4)).reshape(x.shape)
        if self.kind == "strided":
            turned = x.transpose(0, 1)
            return self.fc(turned.as_strided(turned.shape, (x.shape[0] * 4, 4, 1))).reshape(x.shape)
        if self.kind == "turned":
            return self.fc(x.transpose(0, 1)).transpose(0, 1)
        return self.fc(x.reshape(-1, 4)).reshape(x.shape)


def outputs_with_and_without_outlier(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    outlier = torch.cat([x, 1e4 * torch.ones_like(x[:1])])
    return model(x), model(outlier)[: len(x)]


@pytest.mark.parametrize("kind", ["number", "strided", "turned", "folded"])
@pytest.mark.parametrize("batch", [3, 6, 7])
def test_an_outlier_moves_no_other_sample(kind: str, batch: int) -> None:
    torch.manual_seed(0)
    model = dpq.compile(Reshape(kind), budget=1.0, backend="reference")
    x = torch.randn(batch, 7, 4)
    model(x)
    model.set_policy("all")
    alone, beside = outputs_with_and_without_outlier(model, x)
    plain, plain_beside = outputs_with_and_without_outlier(model._original, x)
    if torch.equal(plain, plain_beside):  # else the model itself mixes samples
        assert torch.equal(alone, beside)
    expected = ("before", "fc") if kind in ("turned", "folded") else ("before",)
    assert model.sites.names == expected
    assert [skip.name for skip in model.sites.skipped] == [n for n in ("fc",) if n not in expected]


def test_a_variant_runs_only_where_its_samples_lie() -> None:
    model = dpq.compile(Reshape("folded"), budget=2, backend="reference")
    early = model.variant("all")
    with pytest.raises(CaptureError, match=r"variant\(policy\) again"):
        early(torch.randn(3, 6, 4))
    late, x = model.variant("all"), torch.randn(3, 6, 4)
    model.set_policy("all")
    assert torch.equal(late(x), model(x))
    with pytest.raises(CaptureError, match=r"variant\(policy\) again"):
        late(torch.randn(3, 5, 4))
