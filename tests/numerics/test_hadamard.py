"""The Hadamard transform: orthogonal along the places of a sample, for any number of them."""

import pytest
import torch

from dpquant_compile.numerics.hadamard import transform_places
from tests.support.quantizers import normal


@pytest.mark.parametrize("places", [1, 2, 3, 7, 16, 17, 31, 32, 50])
def test_it_keeps_the_weight_gradient(places: int) -> None:
    x, grad = normal(3, places, 5).double(), normal(3, places, 4, seed=1).double()
    plain = torch.einsum("btn,btk->bnk", grad, x)
    torch.testing.assert_close(torch.einsum("btn,btk->bnk", transform_places(grad), transform_places(x)), plain)


def test_samples_are_apart() -> None:
    x = normal(4, 20, 3)
    assert torch.equal(transform_places(x)[2:3], transform_places(x[2:3]))


def test_an_outlier_is_spread() -> None:
    x = torch.zeros(1, 16, 1)
    x[0, 5] = 16.0
    assert torch.equal(transform_places(x).abs(), torch.full((1, 16, 1), 4.0))


def test_no_places() -> None:
    assert transform_places(torch.zeros(2, 0, 3)).shape == (2, 0, 3)
