"""A private step of a small network: every contestant takes part, and its time is of whole steps."""

import pytest
import torch

from dpquant_compile import torchvision_compat
from dpquant_compile.lab.models import ResNet18
from dpquant_compile.lab.private_step import SMALL, time_private_step


@pytest.mark.slow
def test_every_contestant_is_timed() -> None:
    times = time_private_step(SMALL)
    assert [row.name for row in times.rows] == ["Opacus", "float32", "int8", "int4", "not private"]
    assert [row.private for row in times.rows] == [True, True, True, True, False]
    assert all(row.milliseconds > 0 for row in times.rows) and times.threads == torch.get_num_threads()
    assert times.ratio("int8") == times.of("Opacus").milliseconds / times.of("int8").milliseconds


@pytest.mark.slow
def test_the_network_is_torchvisions_resnet18() -> None:
    """The same sizes of the same parameters, so that times are comparable with those of docs/performance.md."""
    theirs = torchvision_compat.models().resnet18(
        num_classes=10, norm_layer=lambda width: torch.nn.GroupNorm(32, width)
    )
    assert sorted(p.shape for p in theirs.parameters()) == sorted(p.shape for p in ResNet18().parameters())
    assert ResNet18()(torch.randn(2, 3, 64, 64)).shape == theirs(torch.randn(2, 3, 64, 64)).shape
