"""Loaders for private training: what is announced is what the loop gets."""

import gc
from collections import UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus.data_loader import DPDataLoader
from torch.utils.data import DataLoader

from dpquant_compile.errors import PrivacySpecError, PrivateTrainingError
from dpquant_compile.privacy.data.poisson_loader import MicroBatch
from tests.support.loaders import Heard, Own, indices, logical, make


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
        assert len(batches) == len(loader) == len(opacus) == 5
        assert batches == [indices(batch) for batch in opacus]
        assert all(batch == sorted(set(batch)) for batch in batches)


def test_empty_batches_are_one_micro_batch_of_none() -> None:
    heard = Heard()
    loader = make(DataLoader(Own(3), batch_size=1), heard, max_physical_batch_size=2)
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


@pytest.mark.parametrize("options", [{}, dict(num_workers=2, persistent_workers=True)])
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
