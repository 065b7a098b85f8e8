"""Loaders for private training: how batches are drawn, and which loaders are refused."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from opacus.data_loader import DPDataLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from dpquant_compile.errors import PrivacySpecError, PrivateTrainingError
from dpquant_compile.privacy.data.poisson_loader import SecurePoissonSampler, private_loader, secure_uniform
from tests.support.loaders import Heard, N, Own, indices, logical, make


def test_each_sample_is_drawn_with_the_sample_rate() -> None:
    heard = Heard()
    loader = make(DataLoader(Own(), batch_size=4), heard, max_physical_batch_size=3)
    counts = torch.zeros(N)
    epochs = 300
    for _ in range(epochs):
        heard.all.clear()
        for batch in logical(loader, heard):
            counts[batch] += 1
    draws, q = epochs * len(loader), loader.sample_rate
    deviations = (counts - draws * q) / (draws * q * (1 - q)) ** 0.5
    assert deviations.abs().max() < 4.5
    assert 0.5 < deviations.square().mean() < 1.7  # as wide as independent draws make it


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_own_batches_are_split_likewise(workers: int, drop_last: bool) -> None:
    source = DataLoader(Own(), batch_size=7, drop_last=drop_last, num_workers=workers)
    heard = Heard()
    loader = make(source, heard, poisson_sampling=False, max_physical_batch_size=3)
    assert not isinstance(loader, DPDataLoader)
    assert logical(loader, heard) == [indices(batch) for batch in source]
    assert len(loader) == len(source) and loader.sample_rate == 1 / len(source)
    assert [len(m.ids) for m in heard.all if m][:6] == [3, 3, 1, 3, 3, 1]
    assert [(m.first, m.last) for m in heard.all if m][:4] == [
        (True, False),
        (False, False),
        (False, True),
        (True, False),
    ]


def test_own_samplers_keep_their_say() -> None:
    heard = Heard()
    shuffled = make(DataLoader(Own(), batch_size=7, shuffle=True), heard, poisson_sampling=False)
    batches = logical(shuffled, heard)
    drawn = [i for batch in batches for i in batch]
    assert sorted(drawn) == list(range(N)) and drawn != sorted(drawn)

    class Backwards(BatchSampler):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                yield torch.tensor(batch).flip(0)

    heard.all.clear()
    own = DataLoader(Own(), batch_sampler=Backwards(SequentialSampler(range(N)), 10, False))
    assert logical(make(own, heard, poisson_sampling=False), heard)[0] == list(range(9, -1, -1))


def test_sample_twice_in_a_batch_is_refused() -> None:
    own = RandomSampler(Own(), replacement=True, generator=torch.Generator().manual_seed(0))
    with pytest.raises(PrivateTrainingError, match="same sample twice"):
        list(make(DataLoader(Own(), batch_size=20, sampler=own), poisson_sampling=False))


def test_keys_that_are_no_indices_are_refused() -> None:
    named = DataLoader(Own(), batch_sampler=[["a", "b"]])
    with pytest.raises(PrivacySpecError, match="no integers"):
        list(make(named, poisson_sampling=False))


def test_sampler_bits_make_the_draw() -> None:
    heard = Heard()
    asked = []

    def bits(n: int) -> Tensor:
        asked.append(n)
        return torch.arange(n) / n  # the first n q samples are below q

    loader = make(DataLoader(Own(), batch_size=8), heard, sampler_bits=bits, max_physical_batch_size=3)
    assert logical(loader, heard) == [list(range(8))] * 5
    assert asked == [N] * 5 and isinstance(loader, DPDataLoader)
    heard.all.clear()
    assert len(logical(make(DataLoader(Own(), batch_size=8), heard, sampler_bits=secure_uniform), heard)) == 5


def test_secure_uniform_is_uniform_and_new_each_time() -> None:
    numbers = secure_uniform(200_000)
    assert numbers.dtype == torch.float64 and numbers.shape == (200_000,)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert bool((numbers * 2**53 == (numbers * 2**53).round()).all())
    counts = np.histogram(numbers.numpy(), bins=20, range=(0, 1))[0]
    assert abs(counts - 10_000).max() < 6 * 10_000**0.5  # six deviations: once in millions of runs
    assert not torch.equal(secure_uniform(8), secure_uniform(8))
    assert secure_uniform(0).shape == (0,)


def test_secure_sampler_has_the_length_of_opacus() -> None:
    for steps in (1, 5, 93, 211):  # int(1 / (1 / 93)) is 92
        loader = make(DataLoader(Own(steps), batch_size=1))
        secure = SecurePoissonSampler(steps, 1 / steps, secure_uniform)
        assert len(secure) == len(loader) == len(DPDataLoader.from_data_loader(DataLoader(Own(steps), batch_size=1)))
        assert len(list(secure)) == len(secure)


def test_randomness_comes_from_the_loader_or_the_global_generator() -> None:
    def draw(source: DataLoader[Any]) -> list[list[int]]:
        heard = Heard()
        return logical(
            private_loader(source, max_physical_batch_size=None, poisson_sampling=True, listener=heard), heard
        )

    own = [draw(DataLoader(Own(), batch_size=8, generator=torch.Generator().manual_seed(seed))) for seed in (1, 1, 2)]
    assert own[0] == own[1] != own[2]
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(draw(DataLoader(Own(), batch_size=8)))
    assert drawn[0] == drawn[1] != drawn[2]
    assert draw(DataLoader(Own(), batch_size=8)) != draw(DataLoader(Own(), batch_size=8))


def test_processes_share_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    source = DataLoader(Own(), batch_size=2)
    whole_heard = Heard()
    whole = logical(make(source, whole_heard), whole_heard)
    shares = []
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    for rank in range(3):
        monkeypatch.setattr(torch.distributed, "get_rank", functools.partial(int, rank))
        heard = Heard()
        shares.append(logical(make(source, heard, distributed=True), heard))
    assert [len(share) for share in shares] == [20] * 3  # empty parts are steps too
    assert [sorted(itertools.chain(*parts)) for parts in zip(*shares, strict=True)] == whole
    assert any(not part for share in shares for part in share)


def test_settings_of_the_loader_are_kept() -> None:
    def start(worker: int) -> None: ...

    source = DataLoader(
        Own(),
        batch_size=8,
        drop_last=True,
        num_workers=2,
        prefetch_factor=3,
        persistent_workers=True,
        timeout=50,
        worker_init_fn=start,
        multiprocessing_context="fork",
        in_order=False,
    )
    for poisson in (True, False):
        loader = make(source, poisson_sampling=poisson)
        for name in "num_workers prefetch_factor persistent_workers timeout worker_init_fn".split():
            assert getattr(loader, name) == getattr(source, name)
        assert loader.multiprocessing_context is source.multiprocessing_context
        assert loader.in_order


@pytest.mark.parametrize("limit", [0, -1, 2.0, "8", True])
def test_bad_limit_is_refused(limit: Any) -> None:
    with pytest.raises(PrivacySpecError, match=f"max_physical_batch_size={limit!r}"):
        make(DataLoader(Own(), batch_size=8), max_physical_batch_size=limit)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([torch.ones(2)])


class Endless(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.ones(2)


@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (DataLoader(Stream(), batch_size=2), "IterableDataset"),
        (DataLoader(Endless(), batch_size=2), "must have a length"),
        (DataLoader(Own(), batch_sampler=(b for b in [[1]])), "must have a length"),
        (DataLoader(Own(), batch_size=None), "batch_size=None"),
        (DataLoader(Own(3), batch_size=8, drop_last=True), "3 samples in 0 batches"),
        (DataLoader(TensorDataset(torch.ones(0, 2)), batch_size=8), "0 samples in 0 batches"),
        (make(DataLoader(Own(), batch_size=8)), "private already"),
    ],
    ids=["iterable", "dataset length", "sampler length", "no batches", "all dropped", "empty", "private"],
)
def test_loaders_that_cannot_be_made_private(source: DataLoader[Any], message: str, poisson: bool) -> None:
    with pytest.raises(PrivacySpecError, match=message):
        make(source, poisson_sampling=poisson)


def test_bits_without_poisson_sampling_are_refused() -> None:
    with pytest.raises(PrivacySpecError, match="sampler_bits"):
        make(DataLoader(Own(), batch_size=8), poisson_sampling=False, sampler_bits=secure_uniform)
