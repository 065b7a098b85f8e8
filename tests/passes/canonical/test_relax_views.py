"""relax_views: a view means what it means in the user's model, whatever layout a program's sites choose."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from dpquant_compile.errors import CaptureError
from dpquant_compile.passes.canonical.relax_views import relax_views
from tests.support.models import GroupNormNet, after, program, seeded, tracked
from tests.support.private import assert_close, clipped_sums, made_private, reference_sums

PIXELS = 4 * 6 * 6


class Net(nn.Module):
    """A conv, something that views its result, and a linear; images [B, 2, 6, 6]."""

    def __init__(self, view: Callable[[Tensor], Tensor], width: int = PIXELS) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(width, 3)
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(self.view(F.relu(self.conv(x))))
        return y.view(x.size(0), -1, 3).mean(1)


def flat(x: Tensor) -> Tensor:
    return x.view(x.size(0), -1)


def every_view(x: Tensor) -> Tensor:
    """Maps [B, 4, 6, 6] in all the ways that read a layout, side by side: [B, …]."""
    rows = x.size(0)
    halves = x.view(rows, 2, 2, 36).chunk(2, 2)
    views = {
        "sizes": flat(x),
        "size tuple": x.view((-1, PIXELS)),
        "size keyword": x.view(size=(rows, PIXELS)),
        "flatten": x.flatten(1),
        "reshape": x.reshape(rows, -1),
        "view_as": x.view_as(x.new_zeros(rows, 2, 72)).flatten(1),
        "permuted": flat(x.permute(0, 2, 3, 1).contiguous()),
        "chunks": halves[0].view(rows, 2, -1).flatten(1) - halves[1].contiguous().view(rows, -1),
        "max_pool": flat(F.max_pool2d(x, 2)),
        "avg_pool": flat(F.avg_pool2d(x, 2)),
        "adaptive": flat(F.adaptive_avg_pool2d(x, 1)),
        "bytes": flat(x.view(torch.int32).view(torch.float32)),
        "as_strided": x.as_strided(x.shape, (PIXELS, 36, 6, 1)).flatten(1),
    }
    return torch.cat([view * (1 + place) for place, view in enumerate(views.values())], 1)


WIDTH = every_view(torch.zeros(1, 4, 6, 6)).shape[1]


def images(rows: int = 5) -> Tensor:
    return torch.randn(rows, 2, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_private_gradients_are_those_of_the_users_model(inner: str) -> None:
    model, x = seeded(lambda: Net(every_view, WIDTH)), images()
    private, _, _ = made_private(model, 6, inner=inner)
    for policy in ("none", "all"):
        private.set_policy(policy)
        assert_close(clipped_sums(private, [x]), reference_sums(model, [x], policy=policy))
    private.eval()
    torch.testing.assert_close(private(x), model(x), rtol=0, atol=1e-5)


def test_a_batch_that_is_folded_into_another_dimension() -> None:
    model, x = seeded(lambda: Net(lambda x: x.view(-1, 36), 36)), images()
    private, _, _ = made_private(model, 6, inner="eager")
    assert_close(clipped_sums(private, [x]), reference_sums(model, [x]))


@pytest.mark.heavy
def test_private_views_under_inductor() -> None:
    model, x = seeded(lambda: Net(flat)), images()
    private, _, _ = made_private(model, 6, policy="all", inner="inductor", backend="auto")
    assert_close(clipped_sums(private, [x]), reference_sums(model, [x], policy="all"))


def test_inputs_of_every_layout_meet_one_private_program() -> None:
    model, x = seeded(lambda: Net(lambda x: x.mean((2, 3)), 4)), images(6)
    private, _, _ = made_private(model, 6, inner="eager")
    expected = reference_sums(model, [x])
    for order in ((0, 1, 2, 3), (0, 2, 3, 1), (3, 0, 1, 2)):
        back = [order.index(dim) for dim in range(4)]
        assert_close(clipped_sums(private, [x.permute(order).contiguous().permute(back)]), expected)
    assert len(private._programs.private) == 1


def test_views_of_channels_last_inputs_hold() -> None:
    model = seeded(lambda: Net(lambda x: flat(x.permute(0, 2, 3, 1))))
    x = images().contiguous(memory_format=torch.channels_last)
    model(x)
    private, _, _ = made_private(model, 6, inner="eager")
    assert_close(clipped_sums(private, [x]), reference_sums(model, [x]))


@pytest.mark.parametrize("train", [True, False])
def test_a_view_that_fails_in_the_users_model_still_fails(train: bool) -> None:
    model = seeded(lambda: Net(flat))
    private, _, _ = made_private(model, 6, inner="eager")
    private.train(train)
    private(images())  # of this layout the view holds
    bad = images().contiguous(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        model(bad)
    with pytest.raises(CaptureError, match=r"test_relax_views.py:\d+: return x.view.* Fix: reshape\(\)"):
        private(bad)


def test_golden() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Any:
            y = x.view(x.size(0), -1)
            return y.view_as(x), y.view(torch.int32), y.as_strided((2,), (1,)), y.mT.view(3, 0), y.view(size=(-1,))

    gm = tracked(Views(), torch.zeros(5, 0))
    assert_expected_inline(
        program(gm),
        """\
def forward(self, x : torch.Tensor) -> typing_Any:
    size = x.size(0)
    view = x.reshape(size, -1)
    size_1 = x.size()
    view_as = view.reshape(size_1)
    contiguous = view.contiguous()
    view_1 = contiguous.view(torch.int32)
    contiguous_1 = view.contiguous()
    as_strided = contiguous_1.as_strided((2,), (1,))
    getattr_1 = view.mT
    view_2 = getattr_1.reshape(3, 0)
    view_3 = view.reshape(shape = (-1,))
    return (view_as, view_1, as_strided, view_2, view_3)""",
    )


def test_leaves_other_graphs_alone() -> None:
    gm = after(tracked(seeded(GroupNormNet), torch.zeros(2, 3, 8, 8)))
    code = gm.code
    assert relax_views(gm).modified is False and gm.code == code
