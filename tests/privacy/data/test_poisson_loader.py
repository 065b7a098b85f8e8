"""Loaders for private training: what is announced is what the loop gets."""

import functools
import gc
import itertools
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from opacus.data_loader import DPDataLoader
from scipy.stats import binom
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from dpquant_compile.errors import PrivacySpecError, PrivateTrainingError
from dpquant_compile.privacy.data.poisson_loader import (
    MicroBatch,
    SecurePoissonSampler,
    micro_batches,
    private_loader,
    secure_uniform,
)
from tests.support.heavy import few
from tests.support.loaders import Heard, N, Own, indices, logical, make


@pytest.mark.parametrize("limit", [None, 1, 3, 100])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_opacus_in_pieces(limit: int | None, workers: int) -> None:
    source = DataLoader(Own(), batch_size=8, num_workers=workers)
    heard = Heard()
    loader = make(source, heard, seed=3, max_physical_batch_size=limit)
    opacus = DPDataLoader.from_data_loader(source, generator=torch.Generator().manual_seed(3))
    assert isinstance(loader, DPDataLoader) and isinstance(loader, DataLoader)
    assert loader.sample_rate == opacus.sample_rate == 0.2 and loader.expected_batch_size == 8
    assert loader.dataset is source.dataset and loader.max_physical_batch_size == limit
    for _ in range(2):  # the generator goes on from epoch to epoch
        heard.all.clear()
        batches = logical(loader, heard)
        assert len(batches) == loader.steps == len(opacus) == 5
        assert len(loader) == 5 * (loader.micro_batches_per_step or 0) == len([micro for micro in heard.all if micro])
        assert batches == [indices(batch) for batch in opacus]
        assert all(batch == sorted(set(batch)) for batch in batches)


def test_empty_batches_are_micro_batches_of_none() -> None:
    heard = Heard()
    loader = make(DataLoader(Own(3), batch_size=1), heard, max_physical_batch_size=2)
    assert loader.micro_batches_per_step == 2
    sizes = []
    for _ in range(20):
        heard.all.clear()
        sizes += [len(batch) for batch in logical(loader, heard)]
    assert len(sizes) == 60 and 0 in sizes and max(sizes) > 1


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("item", "check"),
    [
        (
            lambda i: (torch.ones(2, 3), i),
            lambda b: isinstance(b, list) and b[0].shape == (0, 2, 3) and b[1].shape == (0,),
        ),
        (lambda i: {"x": torch.ones(2), "y": i}, lambda b: b["x"].shape == (0, 2) and b["y"].dtype == torch.int64),
        (lambda i: torch.ones(2, dtype=torch.float64), lambda b: b.shape == (0, 2) and b.dtype == torch.float64),
        (lambda i: torch.tensor(i), lambda b: b.shape == (0,) and b.dtype == torch.int64),
        (lambda i: i, lambda b: b.shape == (0,) and b.dtype == torch.int64),
        (lambda i: Pair(torch.ones(2), 1.0), lambda b: type(b) is Pair and b.x.shape == (0, 2) and b.y.shape == (0,)),
        (lambda i: (torch.ones(2), "text", [i, i]), lambda b: b[1] == () and [y.shape for y in b[2]] == [(0,), (0,)]),
    ],
    ids=["tuple", "dict", "tensor", "scalar", "int", "namedtuple", "text"],
)
def test_first_batch_may_be_empty(item: Callable[[int], Any], check: Callable[[Any], bool], workers: int) -> None:
    heard = Heard()
    source = DataLoader(Own(4, item), batch_size=2, num_workers=workers)
    loader = make(source, heard, sampler_bits=lambda n: torch.ones(n))
    batches = list(loader)
    assert len(batches) == 2 and all(check(batch) for batch in batches)
    assert [(len(m.ids), m.first, m.last) for m in heard.all if m] == [(0, True, True)] * 2
    if workers == 0:
        full = next(iter(make(source, sampler_bits=lambda n: torch.zeros(n))))
        assert type(full) is type(batches[0])


def test_empty_batches_where_the_batch_is_second_or_random() -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.stack([x for x, _ in samples], 1), torch.tensor([y for _, y in samples])

    source = DataLoader(Own(), batch_size=4, collate_fn=collate)
    x, y = next(iter(make(source, batch_first=False, sampler_bits=lambda n: torch.ones(n))))
    assert x.shape == (2, 0) and y.shape == (0,)
    heard = Heard()
    batches = iter(make(source, heard, batch_first=False, rand_on_empty=True, sampler_bits=lambda n: torch.ones(n)))
    (x, y), (other, _) = next(batches), next(batches)
    assert x.shape == (2, 1) and x.dtype == torch.float32 and y.shape == (1,) and y.dtype == torch.int64
    assert x.data_ptr() != other.data_ptr() and set(x.flatten().tolist()) <= {0.0, 1.0}
    assert len(heard.last.ids) == 0


def test_each_empty_batch_is_a_new_one() -> None:
    batches = iter(make(DataLoader(Own(item=lambda i: {"x": i})), sampler_bits=lambda n: torch.ones(n)))
    first, second = next(batches), next(batches)
    assert first is not second and first["x"] is not second["x"]


def test_collate_without_rows_is_refused() -> None:
    source = DataLoader(Own(), batch_size=2, collate_fn=lambda samples: {"size": len(samples)})
    with pytest.raises(PrivacySpecError, match=r"gives a int without a row per sample.*tensors with a row"):
        make(source)
    make(source, poisson_sampling=False)  # draws no empty batch


def test_collate_may_give_nothing_for_a_field_and_a_mapping_of_its_own() -> None:
    source = DataLoader(Own(), batch_size=2, collate_fn=lambda samples: UserDict(x=torch.ones(len(samples)), y=None))
    batch = next(iter(make(source, sampler_bits=lambda n: torch.ones(n))))
    assert type(batch) is UserDict and batch["x"].shape == (0,) and batch["y"] is None


def test_dataset_that_reads_many_at_once() -> None:
    class Many(Own):
        def __getitems__(self, wanted: list[int]) -> list[Any]:
            return [self.item(i) for i in wanted]

        def __getitem__(self, index: int) -> Any:
            raise AssertionError("read one by one")

    heard = Heard()
    logical(make(DataLoader(Many(), batch_size=8), heard, max_physical_batch_size=3), heard)


@pytest.mark.parametrize("options", [{}, dict(num_workers=2), dict(num_workers=2, persistent_workers=True)])
def test_break_and_start_again(options: dict[str, Any]) -> None:
    heard = Heard()
    source = DataLoader(Own(), batch_size=8, **options)
    loader = make(source, heard, max_physical_batch_size=3)
    for stop in (1, 2, 4):
        heard.all.clear()
        for count, batch in enumerate(loader, 1):
            assert heard.last.ids.tolist() == indices(batch)
            assert heard.last.first or count > 1
            if count == stop:
                break
        assert heard.all[-1] is None and heard.ends == 1 and len(heard.all) == stop + 1
    heard.all.clear()
    assert len(logical(loader, heard)) == 5


@pytest.mark.parametrize("options", few([{}, dict(num_workers=2, persistent_workers=True)], {}))
def test_older_iterator_is_out_of_date(options: dict[str, Any]) -> None:
    heard = Heard()
    loader = make(DataLoader(Own(), batch_size=8, **options), heard, max_physical_batch_size=3)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    assert heard.ends == 1  # said when the newer one came, and not again
    batch = next(newer)
    assert heard.last.first and heard.last.ids.tolist() == indices(batch)
    with pytest.raises(PrivateTrainingError, match="out of date"):
        next(older)
    del older
    gc.collect()
    assert heard.ends == 1
    for batch in newer:
        assert heard.last.ids.tolist() == indices(batch)
    assert heard.ends == 2 and heard.all[-1] is None


def test_two_loops_at_once_are_refused() -> None:
    loader = make(DataLoader(Own(), batch_size=8))
    with pytest.raises(PrivateTrainingError, match="out of date"):
        list(zip(loader, loader, strict=False))


def test_look_at_one_batch_then_train() -> None:
    heard = Heard()
    loader = make(DataLoader(Own(), batch_size=8), heard, max_physical_batch_size=3)
    assert next(iter(loader)) is not None
    assert heard.ends == 1
    heard.all.clear()
    logical(loader, heard)


def test_iterator_that_never_began_says_nothing() -> None:
    heard = Heard()
    loader = make(DataLoader(Own(), batch_size=8), heard)
    never = iter(loader)
    logical(loader, heard)
    with pytest.raises(PrivateTrainingError, match="out of date"):
        next(never)
    assert heard.ends == 1


def test_end_is_said_when_the_loop_or_the_dataset_or_the_listener_raises() -> None:
    heard = Heard()
    loader = make(DataLoader(Own(), batch_size=8), heard)

    def train() -> None:
        for _ in loader:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert heard.ends == 1 and heard.all[-1] is None

    heard = Heard()
    source = DataLoader(Own(item=lambda i: 1 // (7 - i)), batch_size=8)
    broken = make(source, heard, max_physical_batch_size=4, sampler_bits=lambda n: torch.zeros(n))
    with pytest.raises(ZeroDivisionError):
        list(broken)
    assert [m.ids.tolist() if m else None for m in heard.all] == [[0, 1, 2, 3], None]

    def strict(micro: MicroBatch | None) -> None:
        heard(micro)
        if micro is not None:
            raise PrivateTrainingError("no step after the last batch")

    heard.all.clear()
    with pytest.raises(PrivateTrainingError, match="no step"):
        list(make(DataLoader(Own(), batch_size=8), strict))
    assert heard.ends == 1 and len(heard.all) == 2


def test_announcement_comes_before_the_batch() -> None:
    heard = Heard()
    count = 0
    for count, _ in enumerate(make(DataLoader(Own(), batch_size=8), heard, max_physical_batch_size=2), 1):
        assert len(heard.all) == count
    assert len(heard.all) == count + 1


def test_each_sample_is_drawn_with_the_sample_rate() -> None:
    heard = Heard()
    loader = make(DataLoader(Own(), batch_size=4), heard, max_physical_batch_size=3)
    counts = torch.zeros(N)
    epochs = 300
    for _ in range(epochs):
        heard.all.clear()
        for batch in logical(loader, heard):
            counts[batch] += 1
    draws, q = epochs * loader.steps, loader.sample_rate
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
    assert loader.steps == len(source) and loader.sample_rate == 1 / len(source)
    assert len(loader) == 3 * len(source) == len([m for m in heard.all if m])
    assert [len(m.ids) for m in heard.all if m][:6] == [3, 3, 1, 3, 3, 1]
    assert drop_last or [len(m.ids) for m in heard.all if m][-3:] == [3, 2, 0]
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


@pytest.mark.parametrize("limit", [None, 1])
def test_processes_share_each_batch(limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    source = DataLoader(Own(), batch_size=2)
    whole_heard = Heard()
    whole = logical(make(source, whole_heard), whole_heard)
    shares, lengths = [], set()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    for rank in range(3):
        monkeypatch.setattr(torch.distributed, "get_rank", functools.partial(int, rank))
        heard = Heard()
        loader = make(source, heard, distributed=True, max_physical_batch_size=limit)
        shares.append(logical(loader, heard))
        lengths.add((len(loader), len([micro for micro in heard.all if micro])))
    assert [len(share) for share in shares] == [20] * 3  # empty parts are steps too
    assert [sorted(itertools.chain(*parts)) for parts in zip(*shares, strict=True)] == whole
    assert any(not part for share in shares for part in share)
    assert len(lengths) == 1 and len(set(*lengths)) == 1  # all take the same number of micro-batches


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


def test_a_sampler_of_a_part_is_refused() -> None:
    with pytest.raises(PrivacySpecError, match=r"SubsetRandomSampler.*Subset"):
        make(DataLoader(Own(), batch_size=8, sampler=SubsetRandomSampler(range(20))))


# A fixed number of micro-batches


@pytest.mark.parametrize(
    ("samples", "rate", "limit"),
    [(40, 0.2, 3), (40, 0.2, 1), (50_000, 1 / 195, 64), (50_000, 1 / 195, 320), (10, 1.0, 3), (24, 0.25, 24)],
)
def test_micro_batches_hold_almost_every_poisson_batch(samples: int, rate: float, limit: int) -> None:
    pieces = micro_batches(samples, rate, limit)
    assert binom.sf(pieces * limit, samples, rate) < 1e-12
    assert pieces == 1 or binom.sf((pieces - 1) * limit, samples, rate) > 1e-14  # the bound is not far from the tail


def test_length_is_what_an_iteration_yields() -> None:
    for limit in (1, 3, 16, 40, None):
        loader = make(DataLoader(Own(), batch_size=8), max_physical_batch_size=limit)
        assert len(loader) == loader.steps * (loader.micro_batches_per_step or 0) == len(list(loader))


def test_a_batch_that_does_not_fit_has_more_micro_batches() -> None:
    heard = Heard()
    everything = dict(sampler_bits=lambda n: torch.zeros(n), max_physical_batch_size=3)
    loader = make(DataLoader(Own(), batch_size=8), heard, **everything)
    assert logical(loader, heard) == [list(range(N))] * 5 and loader.micro_batches_per_step == 10
    assert len([micro for micro in heard.all if micro]) == 5 * 14


def test_batch_sampler_that_does_not_say_how_large_batches_are() -> None:
    class Silent(Sampler[list[int]]):
        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Iterator[list[int]]:
            yield from ([0, 1, 2], [3])

    heard = Heard()
    source = DataLoader(Own(), batch_sampler=Silent())
    loader = make(source, heard, poisson_sampling=False, max_physical_batch_size=2)
    assert loader.steps == 2 and loader.micro_batches_per_step is None
    with pytest.raises(TypeError, match="attribute batch_size"):
        len(loader)
    assert logical(loader, heard) == [[0, 1, 2], [3]] and len(heard.all) == 4
    known = make(DataLoader(Own(), batch_sampler=[[0, 1, 2], [3]]), poisson_sampling=False, max_physical_batch_size=2)
    assert len(known) == len(list(known)) == 4


def test_another_loader_of_a_private_one_is_refused() -> None:
    loader = make(DataLoader(Own(), batch_size=8))
    again = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)
    with pytest.raises(PrivateTrainingError, match=r"made of a private one.*max_physical_batch_size"):
        next(iter(again))
    list(loader)
    with pytest.raises(PrivateTrainingError, match="made of a private one"):
        next(iter(again))


def test_a_loop_that_counts_is_finished_or_left() -> None:
    heard = Heard()
    loader = make(DataLoader(Own(), batch_size=8), heard, max_physical_batch_size=5)
    batches = iter(loader)
    for _ in range(len(loader) - 1):
        next(batches)
    loader.finish()  # one batch is left, so the loop goes on
    assert heard.ends == 0
    next(batches)
    loader.finish()
    loader.finish()
    assert heard.ends == 1 and next(batches, None) is None
    batches = iter(loader)
    next(batches)
    loader.leave()
    assert heard.ends == 2
    with pytest.raises(PrivateTrainingError, match="out of date"):
        next(batches)
    heard.all.clear()
    assert len(logical(loader, heard)) == 5
