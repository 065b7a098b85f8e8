"""verify_isolation against brute force: whole models, single operators and random programs; and replace_batch_norm."""

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dpquant_compile import torchvision_compat
from dpquant_compile.batchnorm import replace_batch_norm
from dpquant_compile.passes.batch import isolation_rules
from dpquant_compile.passes.batch.isolation_rules import Rows, Shared, tensors
from dpquant_compile.passes.batch.verify_isolation import Mixed, _Isolation
from dpquant_compile.sites import BatchAxis
from tests.support.batch_functions import ANYWHERE, EVERYWHERE, EXACT, LOST, MOVED, B, data, positions, samples
from tests.support.models import (
    Attention,
    BatchNormNet,
    Branch,
    Functional,
    GroupNormNet,
    TextNet,
    TimeFirst,
    Transposed,
    conv_zoo,
    proved,
)

# Whole models


class ViT(nn.Module):
    """Patches, a class token, positions, an encoder; images [B, 3, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, stride=4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.norm, self.attn = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.positions
        y = self.norm(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return self.head(x[:, 0])


class SelfAttention(nn.Module):
    """One input for all of query, key and value, with a mask of what is not to be seen; [B, 5, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention("self", batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.inner.attn(x, x, x, x[:, :, 0] > 100)


def resnet() -> nn.Module:
    model: nn.Module = replace_batch_norm(torchvision_compat.models().resnet18(num_classes=5))
    return model


def norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(2, 4), nn.Dropout2d(0.5), nn.Flatten(1),
        nn.LayerNorm(144), nn.Linear(144, 3), nn.Softmax(1),
    )  # fmt: skip


images = (3, 8, 8)
ZOO: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "group norm": (GroupNormNet, images),
    "batch norm replaced": (lambda: replace_batch_norm(BatchNormNet()), images),
    "batch norm fixed": (lambda: BatchNormNet().eval(), images),
    "transposed": (Transposed, (2, 6, 6)),
    "time first": (TimeFirst, (5, 4)),
    "functional": (Functional, (2, 5, 5)),
    "text": (TextNet, (5,)),
    "branch": (Branch, (4,)),
    "vit": (ViT, images),
    "attention": (SelfAttention, (5, 8)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (5, 8)),
    "norms": (lambda: norms().eval(), images),
    "resnet18": (resnet, (3, 32, 32)),
    **{name: (lambda conv=conv: nn.Sequential(conv), shape[1:]) for name, (conv, shape) in conv_zoo().items()},
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", ZOO)
def test_accepted_models_keep_samples_apart(name: str) -> None:
    make, shape = ZOO[name]
    torch.manual_seed(0)
    model = make()
    x = torch.randint(0, 11, (4, *shape)) if name == "text" else torch.randn(4, *shape)
    gm = proved(model, x, dynamo=name in ("branch", "encoder"))
    for node in gm.graph.nodes:
        assert not node.meta.get("batched") or isinstance(node.meta["batch_axis"], BatchAxis)
    outputs = [output.detach() for output in tensors(model(x))]
    for row in [(x[2] + 3) % 11] if name == "text" else [x[2] + 0.1, x[2] * 1e3, x[2] * float("nan")]:
        changed = x.clone()
        changed[2] = row
        for before, after in zip(outputs, tensors(model(changed)), strict=True):
            torch.testing.assert_close(after[[0, 1, 3]], before[[0, 1, 3]], rtol=1e-6, atol=1e-6)
            assert not torch.equal(after[2], before[2])


# Operators and programs


def states(function: Callable[[Tensor], Any], x: Tensor, axis: BatchAxis) -> list[tuple[Tensor, Any]]:
    """What a function makes of a batch, and what is claimed about it."""
    tracker, x = _Isolation(B), x.clone()
    tracker.enter(x, None)
    tracker.axes[x] = axis
    tracker.at(fx.Graph().placeholder("x"))
    torch.manual_seed(0)
    with torch.no_grad(), tracker:
        made = tensors(function(x))
    return [(value, tracker.state_of(value)) for value in made]


def check(function: Callable[[Tensor], Any], x: Tensor, axis: BatchAxis, drawn: bool = False) -> list[Any]:
    """The claims, after changes of single samples and of their order found no counterexample to any."""
    axis = BatchAxis(axis.dim % x.dim(), axis.outer, axis.inner)
    first, split = states(function, x, axis), x.unflatten(axis.dim, (axis.outer, B, axis.inner))
    for value, state in first:
        if isinstance(state, Shared):
            rows = value.reshape(-1, 1) if state.axis is None else samples(value, state.axis)
            assert drawn or torch.equal(rows, rows[:1].expand_as(rows)), f"claimed {state}"
    for i in (0, B - 1):
        changed = split.clone()
        changed.select(axis.dim + 1, i).mul_(-1.5).add_(0.3)
        for (a, state), (b, _) in zip(first, states(function, changed.reshape(x.shape), axis), strict=True):
            if isinstance(state, BatchAxis):
                differs = (samples(a, state) != samples(b, state)).any(1)
                differs[i] = False
                assert not differs.any(), f"claimed {state}, but sample {i} changes {differs.nonzero().tolist()}"
            elif not isinstance(state, Mixed):
                assert torch.equal(a, b), f"claimed a constant, but sample {i} changes it"
    order = torch.tensor([3, 0, 5, 6, 1, 4, 2])
    moved = states(function, split.index_select(axis.dim + 1, order).reshape(x.shape), axis)
    for (a, state), (b, _) in zip(first, moved, strict=True):
        if isinstance(state, BatchAxis) and not drawn:  # a sample's place must not matter
            torch.testing.assert_close(samples(b, state), samples(a, state)[order], equal_nan=True)
    return [state for _, state in first]


DRAWN = [
    *"native_dropout rand_like randn_like uniform_ normal_ bernoulli_ bernoulli alpha_dropout dropout".split(),
    *"randint_like exponential_ random_ log_normal_ cauchy_ geometric_ normal poisson rrelu_with_noise".split(),
    *("bernoulli_ by place", "multinomial", "fractional_max_pool2d", "fractional_max_pool3d"),
]


@pytest.mark.parametrize("where", EVERYWHERE)
def test_claims_about_operators(where: str) -> None:
    axis, shape = EVERYWHERE[where]
    for name, function in ANYWHERE.items():
        check(function, data(shape((3, 4))), axis, drawn=name in DRAWN)


def test_what_is_isolated_is_found_and_what_is_not_is_mixed() -> None:
    for name, (function, shape, axis) in EXACT.items():
        assert set(check(function, data((B, *shape)), BatchAxis(0), drawn=name in DRAWN)) == {axis}, name
    for function, shape in [*((f, (B, 4, 4)) for f in LOST.values()), *((f, (B, 4)) for f in MOVED.values())]:
        assert all(isinstance(state, Mixed) for _, state in states(function, data(shape), BatchAxis(0)))


POSITIONS: dict[str, Callable[[], Tensor]] = {
    "rows of their own": lambda: torch.arange(2 * B)[:, None, None].expand(2 * B, 5, 5) % 6,
    "two rows in turns": lambda: torch.stack((positions(5), 5 - positions(5))).repeat_interleave(B, 0),
    "no multiple": lambda: positions(5)[None].expand(2 * B - 1, 5, 5),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_that_may_differ_between_samples_are_not_taken_for_shared(name: str) -> None:
    def picked(x: Tensor) -> Tensor:
        index = POSITIONS[name]()
        return x.view(B * 2, 5, 6)[: len(index)].gather(-1, index)

    (found,) = check(picked, data((B, 2, 5, 6)), BatchAxis(0))
    assert isinstance(found, Mixed)


def test_a_chance_multiple_of_the_batch_is_no_batch() -> None:
    heads = torch.linspace(0, 1, 5)
    for certain, expected in ((True, Shared(BatchAxis(0, 1, 2))), (False, None)):
        tracker = _Isolation(B, certain)
        tracker.enter(heads, "heads")
        tracker.at(fx.Graph().placeholder("x"))
        with tracker:
            made = heads[None].expand(2 * B, 5)
        assert tracker.state_of(made) == expected


def _partly_written(a: Tensor, b: Tensor, n: int) -> Tensor:
    y = a.clone()
    view, first = y[:, :n], y[:1]
    y[:, n - 1] = b
    return view + 0 if n > 1 else first * 1.0


def step(choose: random.Random, values: list[Tensor]) -> Tensor:
    """One random operation on a few of the values; not all fit."""
    a, b = choose.choice([*values[-3:], values[0]]), choose.choice(values)
    d, e, n, keep = *choose.choices(range(-3, 3), k=2), choose.randrange(1, 4), choose.random() < 0.5
    ones = [1] * (a.dim() - 1)
    steps: list[Callable[[], Tensor]] = [
        lambda: a + b, lambda: torch.where(a > 0, a, b), lambda: a @ b, lambda: torch.einsum("bij,bkj->bik", a, b),
        lambda: a.transpose(d, e), lambda: a.reshape(-1), lambda: a.reshape(a.shape[0], -1), lambda: a.squeeze(),
        lambda: a.reshape(-1, a.shape[-1]), lambda: a.reshape(B, -1), lambda: a.unsqueeze(d),
        lambda: torch.cat((a, b), d), lambda: torch.stack((a, b), d), lambda: a.repeat_interleave(n, d),
        lambda: a.sum(d, keepdim=keep), lambda: a - a.mean(d, keepdim=True), lambda: a.softmax(d),
        lambda: F.layer_norm(a, a.shape[-1:]), lambda: F.instance_norm(a),
        lambda: F.batch_norm(a, None, None, training=True), lambda: a.unsqueeze(0).expand(B, *a.shape),
        lambda: a.unsqueeze(0).expand(n, *a.shape), lambda: a.repeat(B, *ones), lambda: a.repeat(*ones, n),
        lambda: torch.zeros(B, 3) + a.new_zeros(3), lambda: torch.arange(B).float()[:, None],
        lambda: a[torch.arange(B), (b > 0).long()], lambda: a[:, n - 1], lambda: a[..., :n], lambda: a[n - 1],
        lambda: a.gather(d, (b > 0).long()), lambda: a.index_select(d, torch.tensor([0, n - 1])),
        lambda: F.embedding((a > 0).long(), values[2]), lambda: torch.zeros_like(a).narrow(d, 0, n).copy_(b),
        lambda: _partly_written(a, b, n), lambda: a.clone().copy_(b),
    ]  # fmt: skip
    return choose.choice(steps)()


def program(seed: int) -> Callable[[Tensor], list[Tensor]]:
    """A random program over a batch [B, 3, 4], two constants and what the size of a batch gives."""

    def run(x: Tensor) -> list[Tensor]:
        choose = random.Random(seed)
        values = [x, torch.linspace(-1, 1, 4), torch.linspace(0, 1, 12).view(3, 4)]
        for _ in range(7):
            with contextlib.suppress(RuntimeError, IndexError, ValueError, TypeError):  # shapes that do not fit
                values.append(step(choose, values))
        return [value for value in values[3:] if value.numel() < 20_000]

    return run


@pytest.mark.slow
def test_claims_about_random_programs() -> None:
    found = [state for seed in range(100) for state in check(program(seed), data((B, 3, 4)), BatchAxis(0))]
    for kind in (BatchAxis, Mixed, Shared, Rows):
        assert sum(isinstance(state, kind) for state in found) > 10, f"the programs do not reach {kind.__name__}"


@pytest.mark.parametrize("broken", ["_softmax", "cumsum", "native_batch_norm"])
def test_a_weakened_rule_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function: Callable[[Tensor], Tensor] = {
        "_softmax": lambda x: x.softmax(0),
        "cumsum": lambda x: x.flip(1).cumsum(0),
        "native_batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    }[broken]
    (found,) = check(function, data((B, 3, 4)), BatchAxis(0))
    assert isinstance(found, Mixed)
    monkeypatch.setitem(isolation_rules._STRICT, broken, lambda call, state_of: call.first)
    with pytest.raises(AssertionError, match="claimed dim 0, but sample 0 changes"):
        check(function, data((B, 3, 4)), BatchAxis(0))
