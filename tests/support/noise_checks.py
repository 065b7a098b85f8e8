"""Checks of the noise that several processes have drawn together."""

import math

import torch
from torch import Tensor


def check_one_draw(values: Tensor) -> None:
    """Each value of each step, `[steps, values]`, has noise of standard deviation one, and no noise twice."""
    n = values.numel()
    assert n > 90_000
    for piece in values.split(values.shape[1] // 16, dim=1):
        assert abs(float(piece.std()) - 1) < 5 / math.sqrt(2 * piece.numel())
    assert abs(float(values.mean())) < 5 / math.sqrt(n)
    assert abs(float(values.std()) - 1) < 5 / math.sqrt(2 * n)
    # None is used twice: steps are not correlated, and the kurtosis is that of a Gaussian.
    correlations = torch.corrcoef(values) - torch.eye(len(values))
    assert float(correlations.abs().max()) < 5 / math.sqrt(values.shape[1])
    assert abs(float((values**4).mean()) - 3) < 5 * math.sqrt(96 / n)


def in_units(noise: Tensor) -> Tensor:
    """Gradients without anything of the data, in units of σ·C."""
    return noise.double() * 12 / 0.5
