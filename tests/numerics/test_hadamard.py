"""Hadamard transforms: orthogonal along the places of a sample, for any number of them, and along features."""

import pytest
import torch

from dpquant_compile.numerics.hadamard import rotate_features, rotation_block, transform_places
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


@pytest.mark.parametrize("features", [16, 48, 64, 384])
def test_features_are_rotated_by_a_symmetric_orthogonal_matrix(features: int) -> None:
    matrix = rotate_features(torch.eye(features, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix, torch.eye(features, dtype=torch.float64))
    assert torch.equal(matrix, matrix.t())
    block = rotation_block(features)
    assert torch.equal(matrix[0, :block], torch.full((block,), block**-0.5, dtype=torch.float64))
    assert (matrix[0, block:] == 0).all(), "blocks are apart"
    x = normal(2, 3, features)
    torch.testing.assert_close(rotate_features(x), x @ matrix.float())


@pytest.mark.parametrize(
    ("features", "block"), [(0, 0), (1, 0), (8, 0), (16, 16), (32, 16), (64, 64), (100, 0), (576, 64)]
)
def test_blocks_of_features(features: int, block: int) -> None:
    assert rotation_block(features) == block
    if not block:
        x = normal(2, features)
        assert torch.equal(rotate_features(x), x)


def test_places_are_rotated_apart() -> None:
    x = normal(4, 5, 64)
    assert torch.equal(rotate_features(x)[2, 3:4], rotate_features(x[2, 3:4]))
