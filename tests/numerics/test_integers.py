"""Integers: exact units, multipliers of groups, the unsigned grid, and groups that stay inside a sample."""

import math

import pytest
import torch

from dpquant_compile.numerics.integers import GROUP
from dpquant_compile.numerics.quantize import quantize, quantize_parts
from dpquant_compile.sites import BatchAxis
from tests.support.quantizers import KEY, normal, parts, same_bits

INTEGERS = (
    "int8",
    "int8.nearest",
    "int4",
    "int4.nearest",
    "int4.channel",
    "int4.nearest.channel",
    "int4.nearest.block",
)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("size", [1e-37, 3e-20, 1.0, 1e7, 3.4e38])
def test_values_are_exact_products(name: str, size: float) -> None:
    """A level times its step does not round, so a kernel may multiply units at the end and find the same bits."""
    x = normal(4, 6, 40) / 5 * size
    x[1] = x[1].abs()
    q, unit = parts(x, name, block_dim=1)
    assert torch.equal(q.double() * unit.double(), (q * unit).double()) and (q * unit).isfinite().all()


@pytest.mark.parametrize("scale", ["channel", "block"])
def test_steps_are_small_multiples_of_one_unit(scale: str) -> None:
    x = normal(5, 24, 6, 6) * torch.logspace(-2, 0, 24)[None, :, None, None]
    x[2] = x[2].abs()
    _, unit = quantize_parts(x, f"int4.{scale}", KEY, torch.arange(5), BatchAxis(0), 1)
    steps = unit.expand(x.shape).flatten(1).double()
    for i in range(5):
        most = 16 if scale == "block" and i != 2 else 8  # a byte holds 7 · 16, and 15 · 8
        multipliers = steps[i] / (steps[i].max() / most)
        assert torch.equal(multipliers, multipliers.round())
        assert multipliers.min() == 1 and len(multipliers.unique()) > most // 2


def test_a_group_has_the_smallest_step_that_covers_it() -> None:
    x = normal(3, 8, 32) * torch.logspace(-2, 0, 8)[None, :, None]
    q, unit = quantize_parts(x, "int4.nearest.channel", KEY, torch.arange(3), BatchAxis(0), 1)
    steps = unit.unflatten(2, (2, 16))
    assert torch.equal(steps, steps[..., :1].expand_as(steps)), "sixteen places of a channel share a step"
    top, tops = x.abs().amax((1, 2)) / 56, x.unflatten(2, (2, 16)).abs().amax(3)
    for step, largest, finest in zip(steps[..., 0].flatten(1), tops.flatten(1), top, strict=True):
        assert torch.all(7 * step >= largest * (1 - 1e-6)), "clipped"
        assert torch.all((7 * (step - finest) <= largest * (1 + 1e-3)) | (step <= finest * 1.001)), (
            "coarser than need be"
        )
    assert q.abs().max() == 7


@pytest.mark.parametrize("name", ["int4.nearest", "int4.nearest.channel"])
def test_samples_without_negative_values_use_all_sixteen_levels(name: str) -> None:
    x = torch.linspace(-1, 1, 401).expand(3, 2, -1).clone()
    x[1:] = x[1:].abs()
    x[2, 0, 0] = -1e-40  # counts as zero
    q, _ = parts(x, name, block_dim=1)
    assert q[0].unique().tolist() == list(range(-7, 8))
    assert q[1].unique().tolist() == q[2].unique().tolist() == list(range(16))


def test_blocks_to_nearest_have_the_less_error_of_two_steps() -> None:
    """A step that covers the largest is not always the best; and no worse than that one is ever taken."""
    x = normal(40, 64)
    covering = quantize_parts(x, "int4.block", KEY, torch.arange(40), BatchAxis(0))[1]
    _, best = quantize_parts(x, "int4.nearest.block", KEY, torch.arange(40), BatchAxis(0))

    def error(step: torch.Tensor) -> torch.Tensor:
        values = (x / step).round().clamp(-7, 7) * step
        return (values - x).square().unflatten(1, (4, 16)).sum(2)

    assert torch.all(error(best) <= error(covering) * (1 + 1e-5)) and (best < covering).any()
    finest = x.abs().amax(1, keepdim=True) / 112
    assert torch.all(error(best) <= error((covering - finest).clamp(min=finest)) * (1 + 1e-3))


def test_channels_of_few_elements_share_a_step() -> None:
    """At least sixteen elements to a multiplier, so that it costs at most 3/16 bits each."""
    for places, together in ((1, 16), (3, 6), (7, 3), (15, 2)):
        x = normal(2, 20, places)
        _, unit = quantize_parts(x, "int4.nearest.channel", KEY, torch.arange(2), BatchAxis(0), 1)
        assert (unit == unit[..., :1]).all()
        step = unit[..., 0]
        for first in range(0, 20, together):
            assert (step[:, first : first + together] == step[:, first : first + 1]).all()
        assert together * places >= GROUP
        groups = math.ceil(20 / together)
        assert len(step[0].unique()) > 1 or groups <= 2


@pytest.mark.parametrize("name", ["int4.nearest.channel", "int4.nearest.block"])
def test_a_channels_scale_is_its_own(name: str) -> None:
    """A channel's outlier costs the others nothing but the reach of the multiplier."""
    x = normal(2, 16, 50)
    before = quantize(x, name, block_dim=1) if "channel" in name else quantize(x.mT, name).mT
    moved = x.clone()
    moved[:, 3] *= 6
    after = quantize(moved, name, block_dim=1) if "channel" in name else quantize(moved.mT, name).mT
    error, worse = ((before - x)[:, 8:].square().mean(), (after - moved)[:, 8:].square().mean())
    one_scale = (quantize(moved, "int4.nearest") - moved)[:, 8:].square().mean()
    assert worse < one_scale / (4 if "channel" in name else 1) and worse < 40 * error


def test_single_channels_and_single_elements() -> None:
    for shape in ((3, 1, 7), (3, 5, 1), (3, 1, 1), (1, 1, 1)):
        x = normal(*shape)
        for scale in ("channel", "block"):
            y = quantize(x, f"int4.nearest.{scale}", block_dim=1)
            assert y.shape == x.shape and (y - x).abs().max() <= x.abs().max() / 14 * 1.001
    assert same_bits(quantize(torch.zeros(2, 3, 4), "int4.channel", block_dim=1), torch.zeros(2, 3, 4))
