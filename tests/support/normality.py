"""What every source of noise must show of a million normals."""

import numpy as np
from scipy import stats

from dpquant_compile.privacy.mechanism.normals import GROUP

SIGMAS = 6.0  # chance 2e-9: a secure stream is different every time, and must not fail by bad luck


def pairs(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two normals of each pair: a group has all first ones and then all second ones."""
    groups = x.reshape(-1, 2, GROUP // 2)
    return groups[:, 0].ravel(), groups[:, 1].ravel()


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """In units of its own standard deviation for independent a and b."""
    return float(np.corrcoef(a, b)[0, 1] * len(a) ** 0.5)


def check_moments_and_distribution(x: np.ndarray) -> None:
    # mean, variance, skewness and excess kurtosis of n normals have variances 1/n, 2/n, 6/n and 24/n.
    found = [(x.mean(), 1), (x.var() - 1, 2), (stats.skew(x), 6), (stats.kurtosis(x), 24)]
    for value, variance in found:
        assert abs(value) < SIGMAS * (variance / len(x)) ** 0.5
    assert stats.kstest(x, "norm", method="asymp").pvalue > 1e-7


def check_tail_counts(x: np.ndarray) -> None:
    for sigma in (1.0, 2.0, 3.0, 3.5, 4.0, 4.5):
        for side in (x, -x):
            count = int((side > sigma).sum())
            assert stats.binomtest(count, len(x), stats.norm.sf(sigma)).pvalue > 1e-8, (sigma, count)


def check_neighbours_and_pairs(x: np.ndarray) -> None:
    for lag in (1, 2, 3, 4, 8, 16, 32):
        assert abs(correlation(x[lag:], x[:-lag])) < SIGMAS
    first, second = pairs(x)
    assert abs(correlation(first, second)) < SIGMAS
    assert abs(correlation(first**2, second**2)) < SIGMAS


def check_radius_and_angle(x: np.ndarray) -> None:
    """For a source that is always the same."""
    first, second = pairs(x)
    angle = np.arctan2(second, first) / (2 * np.pi) + 0.5
    assert stats.kstest(angle, "uniform", method="asymp").pvalue > 1e-3
    assert stats.kstest(np.exp(-(first**2 + second**2) / 2), "uniform", method="asymp").pvalue > 1e-3
