"""Random bits: determinism, independence of the counter's parts, and the statistics of the streams."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from dpquant_compile.numerics.random_bits import ROLES, fold, random_bits, sample_keys, site_keys

N = 1 << 16
NAMES = [f"layer{i}.conv" for i in range(100)]


def stream(seed: int = 0, step: int = 0, site: str = "fc", role: str = "input", sample: int = 0, n: int = N) -> Tensor:
    key = site_keys(seed, step, [site])[0, ROLES.index(role)]
    k0, k1 = sample_keys(key, torch.tensor([sample]))
    return random_bits(k0, k1, torch.arange(n, dtype=torch.int32))


def unit(bits: Tensor) -> Tensor:
    """int32 bits as uniform numbers with mean 0 and variance 1."""
    return bits.to(torch.float64) / 2**31 * 3**0.5


def ones(bits: Tensor) -> Tensor:
    """`[n, 32]`, the single bits as 0.0 and 1.0."""
    return ((bits[:, None] >> torch.arange(32, dtype=torch.int32)) & 1).to(torch.float64)


STREAMS: dict[str, dict[str, Any]] = {
    "seed": dict(seed=1),
    "large seed": dict(seed=(1 << 64) + 5),
    "step": dict(step=1),
    "site": dict(site="fc2"),
    "role": dict(role="weight"),
    "sample": dict(sample=1),
    "last role": dict(role="grad_weight", sample=12345),
}


def test_keys_do_not_depend_on_the_other_sites() -> None:
    keys = site_keys(3, 7, ["a", "b", "c"])
    assert keys.dtype == torch.int64 and keys.shape == (3, len(ROLES))
    assert torch.equal(site_keys(3, 7, ["c"])[0], keys[2])
    assert torch.equal(site_keys(3, 7, ["b", "a"]), keys[[1, 0]])
    assert site_keys(3, 7, []).shape == (0, len(ROLES))


def test_all_keys_are_distinct() -> None:
    keys = torch.stack([site_keys(seed, step, NAMES) for seed in (-1, 0, 1) for step in range(5)])
    assert keys.unique().numel() == keys.numel()
    key = keys[0, 0, 0]
    folded = torch.stack([fold(key, value) for value in range(1000)])
    k0, k1 = sample_keys(key, torch.arange(1000))
    both = (k0.to(torch.int64) & 0xFFFFFFFF) | (k1.to(torch.int64) << 32)
    assert torch.cat([folded, both]).unique().numel() == 2000
    assert torch.equal(fold(keys, 3)[0, 0, 0], folded[3])


def test_keys_are_pinned() -> None:
    """A resumed run draws the same bits as the one that was saved: these numbers may not change between versions."""
    assert site_keys(0, 0, ["fc"])[0, :2].tolist() == [-5946637328107909105, -5604913050231691334]
    assert stream(n=3).tolist() == [-344213100, -940703333, 1671212280]


def test_mix_is_splitmix64() -> None:
    """Against the published finalizer in unbounded Python integers."""

    def splitmix64(x: int) -> int:
        mask = (1 << 64) - 1
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    key, samples = -1234567890123456789, [0, 1, 2**40]
    k0, k1 = sample_keys(torch.tensor(key), torch.tensor(samples))
    for i, sample in enumerate(samples):
        mixed = splitmix64((key + (sample + 1) * 0x9E3779B97F4A7C15) % (1 << 64))
        assert k0[i].item() % (1 << 32) == mixed % (1 << 32)
        assert k1[i].item() % (1 << 32) == mixed >> 32


def test_site_keys_are_cheap() -> None:
    site_keys(0, 0, NAMES)
    best = min(_timed(step) for step in range(50))
    assert best < 1e-3, f"{best * 1e6:.0f} µs for 100 sites"  # about 130 µs; the margin is for busy machines


def _timed(step: int) -> float:
    start = time.perf_counter()
    site_keys(0, step, NAMES)
    return time.perf_counter() - start


@pytest.mark.parametrize("which", ["seed", "step", "site", "role", "sample"])
def test_every_bit_is_balanced(which: str) -> None:
    z = (ones(stream(**STREAMS[which])).mean(dim=0) - 0.5) * 2 * N**0.5
    assert z.abs().max() < 4.5


@pytest.mark.parametrize("which", list(STREAMS))
def test_streams_are_uncorrelated(which: str) -> None:
    """With the stream that differs in one part of the counter only; whole numbers, and each pair of equal bits."""
    a, b = stream(), stream(**STREAMS[which])
    assert (unit(a) * unit(b)).mean().abs() * N**0.5 < 4.5
    agree = (ones(a) == ones(b)).to(torch.float64).mean(dim=0)
    assert ((agree - 0.5) * 2 * N**0.5).abs().max() < 4.5


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 256, 4096])
def test_neighbouring_elements_are_uncorrelated(lag: int) -> None:
    for kwargs in STREAMS.values():
        bits = stream(**kwargs)
        assert (unit(bits[lag:]) * unit(bits[:-lag])).mean().abs() * N**0.5 < 4.5
        agree = (ones(bits[lag:]) == ones(bits[:-lag])).to(torch.float64).mean(dim=0)
        assert ((agree - 0.5) * 2 * N**0.5).abs().max() < 5


def test_first_element_over_consecutive_samples() -> None:
    """Small tensors: the stream runs over sample ids, not over elements."""
    key = site_keys(0, 0, ["fc"])[0, 0]
    k0, k1 = sample_keys(key, torch.arange(N))
    bits = random_bits(k0, k1, torch.zeros(N, dtype=torch.int32))
    assert ((ones(bits).mean(dim=0) - 0.5) * 2 * N**0.5).abs().max() < 4.5
    assert (unit(bits[1:]) * unit(bits[:-1])).mean().abs() * N**0.5 < 4.5
    assert chi_square(bits & 255) < 5


def chi_square(cells: Tensor) -> float:
    """Standard score of the chi-square of 256 cells."""
    expected = cells.numel() / 256
    counts = torch.bincount(cells.to(torch.int64), minlength=256).to(torch.float64)
    statistic = ((counts - expected) ** 2).sum().item() / expected
    return float(abs(statistic - 255) / (2 * 255) ** 0.5)


@pytest.mark.parametrize("which", list(STREAMS))
def test_chi_square_of_high_and_low_bits(which: str) -> None:
    bits = stream(**STREAMS[which], n=1 << 18)
    assert chi_square((bits >> 24) & 255) < 5
    assert chi_square(bits & 255) < 5


def test_avalanche() -> None:
    """Flipping one bit of the index or of a key flips every output bit with probability one half."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(-(1 << 31), 1 << 31, (4096,), generator=generator).to(torch.int32) for _ in range(3)]
    before = random_bits(*parts)
    for changed in range(3):
        for bit in range(32):
            flip = 1 << bit if bit < 31 else -(1 << 31)
            after = random_bits(*(part ^ flip if i == changed else part for i, part in enumerate(parts)))
            rate = ones(before ^ after).mean(dim=0)
            assert (rate - 0.5).abs().max() < 0.06, (changed, bit)  # 0.04 = 5 standard deviations, and the mixer's bias
