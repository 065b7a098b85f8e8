"""Packed weights: one for each geometry that a weight is used in."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpquant_compile.backends.cpu_int8 import build as native
from tests.support.private import clipped_sums, made_private

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))


def test_one_weight_packed_for_two_geometries() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, 3, 3) / 6)

        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(x, self.weight, padding=1) + F.conv2d(x, self.weight, padding=2, dilation=2)

    sums = []
    for backend in ("reference", "cpu_int8"):
        torch.manual_seed(0)
        model, _, _ = made_private(Twice(), 3, policy="all", backend=backend, inner="eager")
        sums.append(clipped_sums(model, [torch.randn(3, 4, 6, 6, generator=torch.Generator().manual_seed(1))]))
    torch.testing.assert_close(sums[0]["weight"], sums[1]["weight"], rtol=1e-4, atol=1e-6)
