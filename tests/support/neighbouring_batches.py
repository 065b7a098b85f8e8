"""Neighbouring batches, run on the same random bits: how far the clipped sums move."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import models
from tests.support.matrix_models import Spelled, TiedBothWays, TiedHead
from tests.support.per_sample_models import Adapter, ClassToken, Generic, Merged, Norms
from tests.support.private import leaves, made_private

BOUND = 0.5
ROUNDING = 1e-5  # of float32 sums, relative to the bound
PHYSICAL = 8
SHARED = 5  # samples of S; with x there are still padding rows


@dataclass(frozen=True)
class Sample:
    """One sample, and the gradients of its outputs; both without a batch dimension."""

    x: Tensor
    tangents: tuple[Tensor, ...]
    id: int


Outlier = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _centred(tangent: Tensor) -> Tensor:
    """Gradients that add up to nothing over the places of each feature, be it the first dimension or the last."""
    if tangent.dim() < 2:
        return tangent - tangent.mean()
    for feature in (0, tangent.dim() - 1):
        tangent = tangent - tangent.mean([d for d in range(tangent.dim()) if d != feature], keepdim=True)
    return tangent


def _poke(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    x.view(-1)[x.numel() // 2] = value
    return x


# Functions of a usual sample and the gradient of its output.
OUTLIERS: dict[str, Outlier] = {
    "large": lambda x, g: (1e4 * x, g),
    "steep": lambda x, g: (x, 1e4 * g),
    "constant": lambda x, g: (torch.full_like(x, 3.0), g),
    "zeros": lambda x, g: (torch.zeros_like(x), g),
    "no gradient": lambda x, g: (x, torch.zeros_like(g)),
    # The terms of each place are large, and all but cancel: what a gram matrix knows least about.
    "cancelling": lambda x, g: (torch.full_like(x, 1e6), _centred(1e3 * g)),
    "cancelling more": lambda x, g: (1e9 + x, _centred(1e6 * g)),
    "alternating": lambda x, g: (1e8 * torch.ones_like(x), 1e6 * g.roll(1, -1) - 1e6 * g),
    "1e19": lambda x, g: (1e19 * x, g),
    "1e30": lambda x, g: (1e30 * x, g),
    "1e30 up": lambda x, g: (x, 1e30 * g),
    # Squares that fall below the smallest float32, times a gradient whose square is just below the largest.
    "tiny times huge": lambda x, g: (1e-24 * x, 1e18 * g),
    "1e-30": lambda x, g: (1e-30 * x, 1e-30 * g),
    "nan": lambda x, g: (_poke(x, math.nan), g),
    "inf": lambda x, g: (_poke(x, math.inf), g),
    "nan gradient": lambda x, g: (x, _poke(g, math.nan)),
    "inf gradient": lambda x, g: (x, _poke(g, -math.inf)),
}
# Of these x's own gradient is rounding noise, which differs with the order of sums; clipping bounds it all the same.
CANCELLING = ("cancelling", "cancelling more", "alternating")
OWN_NOISE = 0.03
FEW = ("large", "steep", "cancelling more", "zeros", "1e30", "nan", "inf gradient")


class Replay:
    """A private model, the batch S, and f: a list of samples to their clipped sums, all in float64."""

    def __init__(
        self, model: nn.Module, shape: Sequence[int], *, tokens: int = 0, dtype: Any = None, **options: Any
    ) -> None:
        self.model, self.optimizer, engine = made_private(model, PHYSICAL, **{"bound": BOUND, **options})
        assert engine.session is not None
        self.session, self.dtype = engine.session, dtype
        self.generator = torch.Generator().manual_seed(11)
        self.tokens, self.shape = tokens, tuple(shape)
        batch = torch.stack([self._input() for _ in range(SHARED + 1)])
        outputs = leaves(self.model(batch))
        self.outputs = [out.shape[1:] for out in outputs]
        samples = [Sample(x, self._tangents(), 100 + 7 * i) for i, x in enumerate(batch)]
        self.shared, self.usual = samples[:-1], samples[-1]

    def _input(self) -> Tensor:
        if self.tokens:
            return torch.randint(0, self.tokens, self.shape, generator=self.generator)
        return torch.randn(self.shape, generator=self.generator).to(self.dtype)

    def _tangents(self) -> tuple[Tensor, ...]:
        return tuple(torch.randn(shape, generator=self.generator).to(self.dtype) for shape in self.outputs)

    def outlier(self, name: str) -> Sample:
        """A usual sample, made into the outlier of this name; tokens can only be all the same."""
        x = torch.randn(self.shape) if self.tokens else self.usual.x
        pairs = [OUTLIERS[name](x, tangent) for tangent in self.usual.tangents]
        changed = torch.zeros_like(self.usual.x) if self.tokens else pairs[0][0]
        return Sample(changed, tuple(tangent for _, tangent in pairs), self.usual.id)

    def run(self, samples: Sequence[Sample]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Outputs, and f."""
        self.model.sample_ids = torch.tensor([sample.id for sample in samples])
        outputs = leaves(self.model(torch.stack([sample.x for sample in samples])))
        tangents = [torch.stack(rows) for rows in zip(*(sample.tangents for sample in samples), strict=True)]
        torch.autograd.backward(outputs, tangents)
        held = ((name, getattr(p, "summed_grad", None)) for name, p in self.model.named_parameters())
        sums = {name: value.double().clone() for name, value in held if value is not None}
        self.optimizer.zero_grad()
        return [out.detach().clone() for out in outputs], sums

    def f(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        return self.run(samples)[1]


def norm(sums: dict[str, Tensor]) -> float:
    """The norm of all parameters' sums as one vector."""
    return math.sqrt(sum(float(value.square().sum()) for value in sums.values()))


def minus(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    """a − b."""
    assert a.keys() == b.keys()
    return {name: a[name] - b[name] for name in a}


def check_replay(replay: Replay, outliers: Sequence[str] = tuple(OUTLIERS), bound: float = BOUND) -> float:
    """Add each outlier to S in the middle, some at the front as well; returns how far f moved at most."""
    outputs, base = replay.run(replay.shared)
    assert 0 < norm(base) <= SHARED * bound * (1 + ROUNDING)
    furthest = 0.0
    for name in outliers:
        x = replay.outlier(name)
        alone = replay.f([x])
        for place in (0, SHARED // 2) if name in FEW else (SHARED // 2,):
            others, more = replay.run([*replay.shared[:place], x, *replay.shared[place:]])
            what = f"{name!r} at {place}"
            assert all(bool(value.isfinite().all()) for value in more.values()), f"{what}: sums are not finite"
            moved = norm(minus(more, base))
            assert moved <= bound * (1 + ROUNDING), f"{what}: f moved by {moved:.6g}, over {bound}"
            for old, new in zip(outputs, others, strict=True):
                kept = torch.cat([new[:place], new[place + 1 :]])
                # Not to the bit: what a matrix product makes of a tiny row can depend on the row's place.
                assert torch.allclose(kept, old, rtol=1e-5, atol=1e-6), f"{what}: other samples' outputs moved"
            strange = norm(minus(minus(more, base), alone))
            allowed = (OWN_NOISE if name in CANCELLING else ROUNDING) * bound
            assert strange <= allowed, f"{what}: {strange:.2e} of the move is not x's own"
            furthest = max(furthest, moved)
    return furthest


class Mixed(nn.Module):
    """A conv, a linear over places, and one on top: both kinds of site, with and without biases; [B, 2, 6, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.places = nn.Linear(6, 5)
        self.fc = nn.Linear(4 * 6 * 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.silu(self.places(F.silu(self.conv(x)))).flatten(1))


class SelfAttention(nn.Module):
    """nn.MultiheadAttention; [B, 4, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "mixed": (Mixed, (2, 6, 6), 0),
    "residual": (models.GroupNormNet, (3, 8, 8), 0),
    "tied text": (models.TextNet, (6,), 11),
    "folds": (models.TimeFirst, (3, 4), 0),
    "functional": (models.Functional, (2, 5, 5), 0),
    "linear": (lambda: nn.Linear(5, 4), (5,), 0),
    "linear without bias": (lambda: nn.Linear(5, 4, bias=False), (5,), 0),
    "linear over places": (lambda: nn.Linear(5, 4, bias=False), (3, 7, 5), 0),
    "embedding": (lambda: nn.Embedding(9, 4), (6,), 9),
    "norms": (Norms, (4, 6), 0),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 5, 5), 0),
    "layer norm": (lambda: nn.LayerNorm(6), (4, 6), 0),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 5, 5), 0),
    "rms norm": (lambda: nn.RMSNorm(6), (4, 6), 0),
    "attention": (SelfAttention, (4, 8), 0),
    "class token": (ClassToken, (3, 8, 8), 0),
    "low rank": (Adapter, (6,), 0),
    "generic": (Generic, (4,), 0),
    "merged": (Merged, (4,), 0),
    "matrix": (lambda: Spelled("addmm"), (3, 6), 0),
    "matrix on the left": (lambda: Spelled("matmul from the left"), (3, 6), 0),
    "table both ways": (TiedBothWays, (5,), 7),
    "table, turned": (lambda: TiedHead(turned=True), (5,), 7),
}
KINDS = "conv1d conv3d grouped depthwise dilated strided valid same same_even_3d reflect".split()
CONVS = {f"conv {kind}": models.conv_zoo()[kind][1][1:] for kind in KINDS}


def make_replay(name: str, **options: Any) -> Replay:
    """One of the models above, with the same weights each time."""
    if name in CONVS:
        torch.manual_seed(0)
        return Replay(models.conv_zoo()[name.removeprefix("conv ")][0], CONVS[name], **options)
    make, shape, tokens = MODELS[name]
    return Replay(models.seeded(make), shape, tokens=tokens, **options)
