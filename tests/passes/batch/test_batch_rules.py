"""The rules of batch_rules.py against brute force: change one sample, and see where the output changes.

Each case is a function of a batch tensor. It runs once on fake data under the tracker, which claims an axis, and then
on real data: after a change of sample i only the elements that the claimed axis gives to sample i may differ.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpquant_compile.errors import RegistryError
from dpquant_compile.passes.batch import batch_rules
from dpquant_compile.passes.batch.batch_rules import Axis, Lost, known_operators
from dpquant_compile.passes.batch.track_batch import _Tracker
from dpquant_compile.sites import BatchAxis
from tests.support.batch_functions import ANYWHERE, EVERYWHERE, EXACT, LOST, MOVED, B, aten, data, samples


class Seen(_Tracker):
    """A tracker that also notes the names of the operators it was asked about."""

    names: set[str] = set()  # noqa: RUF012 (shared on purpose: one set for all cases)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return super().__torch_dispatch__(func, types, args, kwargs)


def claims(function: Callable[[Tensor], Any], x: Tensor, axis: BatchAxis) -> list[tuple[Tensor, Axis]]:
    tracker = Seen(B)
    x = x.clone()
    tracker.axes[x] = axis
    torch.manual_seed(0)
    with torch.no_grad(), tracker:
        leaves = [leaf for leaf in tree_leaves(function(x)) if isinstance(leaf, Tensor)]
    return [(leaf, tracker.axis_of(leaf)) for leaf in leaves]


def check(function: Callable[[Tensor], Any], x: Tensor, axis: BatchAxis) -> list[Axis]:
    """The claimed axes, after brute force found no counterexample to any."""
    axis = BatchAxis(axis.dim % x.dim(), axis.outer, axis.inner)
    first = claims(function, x, axis)
    split = x.unflatten(axis.dim, (axis.outer, B, axis.inner))
    for i in range(B):
        changed = split.clone()
        row = changed.select(axis.dim + 1, i)
        if x.dtype == torch.bool:
            row.logical_not_()
        elif x.is_floating_point():
            row.mul_(-1.5).add_(0.3)
        else:
            row.add_(1).remainder_(3)
        second = claims(function, changed.reshape(x.shape), axis)
        for (a, claimed), (b, _) in zip(first, second, strict=True):
            if isinstance(claimed, BatchAxis):
                assert a.shape[claimed.dim] == claimed.outer * B * claimed.inner
                differs = (samples(a, claimed) != samples(b, claimed)).any(1)
                differs[i] = False
                assert not differs.any(), f"claimed {claimed}, but sample {i} changes {differs.nonzero().tolist()}"
    return [claimed for _, claimed in first]


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("name", ANYWHERE)
def test_claims_hold_wherever_the_batch_is(name: str, where: str) -> None:
    axis, shape = EVERYWHERE[where]
    check(ANYWHERE[name], data(shape((3, 4))), axis)


@pytest.mark.parametrize("name", EXACT)
def test_the_batch_is_found_again(name: str) -> None:
    function, shape, axis = EXACT[name]
    torch.manual_seed(0)
    found = check(function, data((B, *shape)), BatchAxis(0))
    assert found == [axis] * len(found)


def circular(x: Tensor) -> Tensor:
    return F.pad(x, (1, 1) * (x.dim() - 2), mode="circular")


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_circular_padding_keeps_the_batch(rank: int) -> None:
    assert check(circular, data((B, 2, *[4] * rank)), BatchAxis(0)) == [BatchAxis(0)]


@pytest.mark.parametrize("name", LOST)
def test_mixtures_are_lost(name: str) -> None:
    x = data((B, 4, 4))
    assert all(isinstance(axis, Lost) and axis.reason for axis in check(LOST[name], x, BatchAxis(0)))


# In training they mix samples, which verify_isolation refuses; here only the place of the batch counts.
BATCH_NORMS: dict[str, tuple[Any, ...]] = {
    "native_batch_norm": (True, 0.1, 1e-5),
    "_native_batch_norm_legit": (True, 0.1, 1e-5),
    "_native_batch_norm_legit_functional": (True, 0.1, 1e-5),
    "_native_batch_norm_legit_no_training": (0.1, 1e-5),
    "_batch_norm_with_update": (0.1, 1e-5),
    "_batch_norm_no_update": (0.1, 1e-5),
}


def batch_norm(name: str, x: Tensor) -> Any:
    return getattr(aten, name)(x, None, None, torch.zeros(3), torch.ones(3), *BATCH_NORMS[name])


@pytest.mark.parametrize("name", BATCH_NORMS)
def test_batch_norm_keeps_the_axis(name: str) -> None:
    first, *statistics = (axis for _, axis in claims(partial(batch_norm, name), data((B, 3, 4)), BatchAxis(0)))
    assert first == BatchAxis(0) and all(isinstance(axis, Lost) for axis in statistics)


def fresh(x: Tensor) -> list[Tensor]:
    return [x.new_zeros(B), x.new_ones(B), x.new_full((B,), 2.0), x.new_empty_strided((B,), (1,)).fill_(1.0)]


def test_fresh_tensors_have_no_batch() -> None:
    assert check(fresh, data((B, 4)), BatchAxis(0)) == [None] * 4


@pytest.mark.parametrize("name", MOVED)
def test_moved_samples_are_lost(name: str) -> None:
    assert all(isinstance(axis, Lost) and axis.reason for axis in check(MOVED[name], data((B, 4)), BatchAxis(0)))


@pytest.mark.parametrize("axis", [BatchAxis(0), BatchAxis(1)], ids=str)
def test_a_batch_that_is_written_into_a_part_is_found(axis: BatchAxis) -> None:
    def padded(x: Tensor) -> Tensor:
        y = torch.zeros(B, 3, 4) if axis.dim == 0 else torch.zeros(3, B, 4)
        y.narrow(1 - axis.dim, 1, 2)[..., 1:] = x.movedim(0, axis.dim)
        return y

    assert check(padded, data((B, 2, 3)), BatchAxis(0)) == [axis]


@pytest.mark.parametrize(
    ("function", "axis"),
    [(lambda x: x - x.mean(0), BatchAxis(0)), (lambda x: F.rms_norm(x.t(), (B,)), BatchAxis(1))],
    ids=["centre", "rms_norm over the batch"],
)
def test_what_mixes_samples_in_their_place_keeps_the_axis(function: Callable[[Tensor], Any], axis: BatchAxis) -> None:
    # Elementwise with a statistic of the batch: by contract for verify_isolation to refuse, not for the rules.
    assert [claimed for _, claimed in claims(function, data((B, 4)), BatchAxis(0))] == [axis]


def test_rules_are_registered_once() -> None:
    with pytest.raises(RegistryError, match=r"aten\.cat has a batch rule already"):
        batch_rules.rule("cat")(lambda call: None)
    assert list(known_operators()) == sorted(set(known_operators()))


# Rules that no case reaches: for operators that PyTorch decomposes before the tracker sees them …
COMPOSITE = {
    *"contiguous reshape narrow rms_norm _fused_rms_norm max_pool1d adaptive_avg_pool1d".split(),
    *"scaled_dot_product_attention _scaled_dot_product_attention_math".split(),
}
# … and for kernels that a CPU does not have.
ELSEWHERE = {
    *"cudnn_batch_norm _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention".split(),
    *"_scaled_dot_product_flash_attention _scaled_dot_product_fused_attention_overrideable".split(),
}


def test_all_other_rules_have_a_case() -> None:
    Seen.names.clear()
    batches = (fresh, circular, *(partial(batch_norm, name) for name in BATCH_NORMS), *ANYWHERE.values())
    cases = [(function, (3, 4)) for function in batches]
    cases += [(function, shape) for function, shape, _ in EXACT.values()]
    cases += [(function, (4, 4)) for function in LOST.values()] + [(function, (4,)) for function in MOVED.values()]
    for function, shape in cases:
        claims(function, data((B, *shape)), BatchAxis(0))
    assert set(known_operators()) - Seen.names <= COMPOSITE | ELSEWHERE
