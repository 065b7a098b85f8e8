"""A fingerprint tells values apart by their own bytes, in their order."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dpquant_compile.errors import PrivateTrainingError
from dpquant_compile.privacy.accounting.replay_check import Releases, fingerprint


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def test_order_counts() -> None:
    x = normal(10)
    pairs = x.view(5, 2).flip(0).reshape(-1)
    assert len({fingerprint([v]) for v in (x, x.flip(0), pairs, x.roll(2))}) == 4
    assert fingerprint([x[:5], x[5:]]) != fingerprint([x[5:], x[:5]])
    assert fingerprint([x[:5], x[5:]]) != fingerprint([x[:4], x[4:]])


@pytest.mark.parametrize("sizes", [(2,), (4, 4), (1 << 17,), (65536, 65536)])
def test_signs_count_however_many_change(sizes: tuple[int, ...]) -> None:
    values = [normal(size) for size in sizes]
    odd = [v.clone() for v in values]
    for v in odd:
        v[1::2] *= -1
    assert len({fingerprint(values), fingerprint([-v for v in values]), fingerprint(odd)}) == 3


def test_every_bit_of_wide_and_narrow_types_counts() -> None:
    x = normal(10, dtype=torch.float64)
    assert fingerprint([x]) != fingerprint([x + 1e-13])
    for dtype in (torch.bfloat16, torch.int64, torch.bool, torch.float16):
        values = torch.zeros(9, dtype=dtype)
        other = values.clone()
        other[-1] = 1
        assert fingerprint([values]) != fingerprint([other])
        assert fingerprint([values]) != fingerprint([values.to(torch.uint8)])


def test_a_fingerprint_of_an_earlier_version_is_not_compared(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.json"
    (tmp_path / "ledger.json.releases").write_text("run 0 begun\nrun 1 0123456789abcdef\nrun 2 dropped\n")
    releases = Releases(ledger)
    assert releases.counts == {"run": 2}  # the release counts, its value is unknown
    releases.pay("run", 1, recorded=2)
    with pytest.raises(PrivateTrainingError, match=r"not known.*earlier version.*replay=False"):
        releases.note([normal(4)])
