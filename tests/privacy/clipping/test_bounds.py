"""Neighbouring batches, replayed on the same random bits: one sample more moves the clipped sums by at most C.

This is the property that the noise is scaled to. It is tested as it is stated: a batch S, and S with a sample x that is
the worst we could think of, go through the same program with the same rounding bits, and f, the vector of all clipped
sums before noise, must not move by more than C in float64. What moves must be x's own clipped gradient and nothing
else: the others stay as they are to the last bits of a float32 sum.
"""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from dpquant_compile.numerics.recipe import recipe_names
from dpquant_compile.privacy.clipping import joint_graph as trace
from tests.support import models
from tests.support.heavy import few
from tests.support.neighbouring_batches import (
    BOUND,
    CONVS,
    FEW,
    MODELS,
    OUTLIERS,
    ROUNDING,
    Replay,
    Sample,
    check_replay,
    make_replay,
    norm,
)
from tests.support.private import made_private

pytestmark = pytest.mark.slow  # each case traces a private program

FORMATS = ("luq_fp4", "fp8_e5m2", "uniform4", "fp4_e2m1", "fp4_e2m1_nv", "int4.nearest.channel", "int8")
# Formats, roundings and granularities, one for all operands.
SPECS = (
    "luq_fp4.nearest",
    "uniform4.nearest",
    "fp8_e4m3",
    "fp8_e4m3.nearest",
    "fp4_e2m1.nearest",
    "fp4_e2m1_nv.nearest",
)
SPECS += ("int8", "int8.nearest", "int4", "int4.nearest", "int4.channel", "int4.block", "int4.nearest.block")

# Models


def check_policies(replay: Replay, outliers: Sequence[str] = tuple(OUTLIERS)) -> None:
    """In full precision and in low."""
    for policy in ("none", "all"):
        replay.model.set_policy(policy)
        check_replay(replay, outliers)


# Tests


@pytest.mark.parametrize("name", [*CONVS, *MODELS])
def test_one_sample_moves_the_sums_by_at_most_the_bound(name: str) -> None:
    check_policies(make_replay(name))


@pytest.mark.parametrize("outputs", ["none", "flow", "all"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_and_output(fmt: str, outputs: str) -> None:
    check_policies(make_replay("mixed", format=fmt, quantize_outputs=outputs), FEW)


@pytest.mark.parametrize("fmt", ["luq_fp4", "fp4_e2m1_nv"])
@pytest.mark.parametrize("name", ["tied text", "folds"])
def test_quantized_gradients_of_shared_and_folded_weights(name: str, fmt: str) -> None:
    check_policies(make_replay(name, format=fmt, quantize_outputs="all"), FEW)


@pytest.mark.parametrize("clipping", ["per_layer", "automatic"])
@pytest.mark.parametrize("name", ["mixed", "tied text", "merged"])
def test_every_clipping_mode(name: str, clipping: str) -> None:
    check_policies(make_replay(name, clipping=clipping), FEW)


def test_bounds_of_layers_hold_one_by_one() -> None:
    bounds = [0.1, 0.2, 0.3, 0.4, 0.5]
    replay = make_replay("mixed", clipping="per_layer", bound=bounds)
    check_replay(replay, ["large", "steep"], bound=math.sqrt(sum(c * c for c in bounds)))
    moved = replay.f([replay.outlier("large")])
    for (name, value), c in zip(moved.items(), bounds, strict=True):
        assert float(value.norm()) == pytest.approx(c, rel=1e-5), name


@pytest.mark.parametrize("method", ["gram", "direct", "kept"])
@pytest.mark.parametrize(
    "name", ["conv conv1d", "conv conv3d", "conv depthwise", "conv strided", "conv dilated", "folds"]
)
def test_every_way_to_the_norms(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "choose_method", lambda *args: method)
    replay = make_replay(name)
    check_policies(replay)
    way = "book-keeping" if method == "kept" else f"book-keeping ({method})"
    assert way in [row[2] for row in replay.session.ways()]


@pytest.mark.parametrize("method", ["gram", "direct", "kept"])
def test_quantized_gradients_by_every_way(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "choose_method", lambda *args: method)
    check_policies(make_replay("mixed", quantize_outputs="all"))


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_and_both_sides_of_the_switch(recipe: str, backend: str) -> None:
    replay = make_replay("mixed", recipe=recipe, backend=backend, high="int8", inner="eager")
    check_policies(replay, FEW)  # all sites high, and all low
    replay.model.set_policy(["conv"])
    check_replay(replay, FEW)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("recipe", ["int4", "luq", "nvfp4"])
def test_bfloat16_beside_low_sites(recipe: str, backend: str) -> None:
    replay = make_replay("mixed", recipe=recipe, backend=backend, high="bfloat16", inner="eager")
    check_policies(replay, FEW)
    for low in ("conv", "places", "fc"):
        replay.model.set_policy([low])
        check_replay(replay, FEW)


@pytest.mark.parametrize(
    "name", ["mixed", "residual", "tied text", "folds", "attention", "class token", "matrix", "conv grouped"]
)
def test_bfloat16_wherever_samples_lie(name: str) -> None:
    replay = make_replay(name, high="bfloat16", inner="eager", policy="none")
    check_replay(replay, FEW if name != "mixed" else tuple(OUTLIERS))


def test_bfloat16_in_the_compiled_program() -> None:
    check_replay(make_replay("mixed", high="bfloat16", inner="aot_eager", policy="none"), FEW)


@pytest.mark.parametrize("spec", SPECS)
def test_every_rounding_and_granularity(spec: str) -> None:
    replay = make_replay("mixed", format=spec, backend="auto", inner="eager", policy="all")
    check_replay(replay, FEW)


@pytest.mark.parametrize("name", ["tied text", "folds", "attention", "residual", "conv grouped", "conv conv1d"])
def test_the_default_recipe_wherever_samples_lie(name: str) -> None:
    check_replay(make_replay(name, recipe="int4", backend="auto", inner="eager", policy="all"), FEW)


@pytest.mark.parametrize("backend", ["compiled", "auto"])
@pytest.mark.parametrize("name", ["mixed", "tied text", "conv grouped", "attention"])
def test_fast_backends(name: str, backend: str) -> None:
    check_policies(make_replay(name, backend=backend, inner="eager"), FEW)


@pytest.mark.parametrize("fmt", ["uniform4", pytest.param("fp8_e5m2", marks=pytest.mark.slow), "fp4_e2m1"])
def test_fast_backends_in_other_formats(fmt: str) -> None:
    check_policies(make_replay("mixed", format=fmt, backend="auto", inner="eager", quantize_outputs="flow"), FEW)


@pytest.mark.parametrize("outputs", few(["none", "all"], "all"))
def test_the_compiled_program(outputs: str) -> None:
    check_policies(make_replay("mixed", backend="auto", inner="inductor", quantize_outputs=outputs))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mixed", "tied text", "linear"])
def test_other_dtypes_clip_as_exactly(name: str, dtype: torch.dtype) -> None:
    # Half precision moves a sample's own gradient with its place, so only single samples are held against the bound.
    make, shape, tokens = MODELS[name]
    replay = Replay(models.seeded(make).to(dtype), shape, tokens=tokens, dtype=dtype)
    for outlier in ("steep", "large", "nan gradient"):
        for sample in (*replay.shared, replay.outlier(outlier)):
            sums = replay.f([sample])
            assert norm(sums) <= BOUND * (1 + ROUNDING), outlier


def test_large_maps_whose_terms_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    # The weighted sum of many places, computed in another order than the norm, has rounding noise of its own.
    monkeypatch.setattr(trace, "choose_method", lambda *args: "direct")
    replay = Replay(nn.Conv2d(4, 4, 3, bias=False), (4, 66, 66))
    half = torch.rand(4, 64 * 32, generator=replay.generator) + 0.5
    x = (torch.rand(4, 1, 1, generator=replay.generator) + 0.5).expand(4, 66, 66) * 1e8
    mirrored = Sample(x, (torch.cat([half, -half], 1).reshape(4, 64, 64),), replay.usual.id)
    assert norm(replay.f([mirrored])) <= 0.1 * BOUND


@pytest.mark.parametrize("places", [(), (3,)])
def test_norms_whose_squares_underflow(places: tuple[int, ...]) -> None:
    replay = Replay(nn.Linear(512, 4, bias=False), (*places, 512), bound=1e-3)
    sample = Sample(torch.full((*places, 512), 2e-23), (torch.full((*places, 4), 4e18),), 1)
    assert norm(replay.f([sample])) <= 1e-3 * (1 + ROUNDING)


def test_outliers_do_reach_the_bound() -> None:
    assert check_replay(make_replay("mixed", policy="all"), ["large"]) == pytest.approx(BOUND, rel=1e-4)


def test_bounds_go_by_parameter() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(3))
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    compiled, _, _ = made_private(Unused(), 4, clipping="per_layer", bound=[100.0, 0.1, 0.01])
    (10 * compiled(10 * torch.randn(1, 4))).sum().backward()
    norms = [float(p.summed_grad.norm()) for p in (compiled.a.weight, compiled.b.weight)]
    assert norms == pytest.approx([0.1, 0.01], rel=1e-4)
