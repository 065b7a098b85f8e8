"""One case for each class of torch.nn and each function of torch.nn.functional: how it is called on a small batch.

`python -m tests.support.nn_walk` writes the table of docs/support.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CASES", "NO_CASE", "PAGE", "Called", "Case", "called", "groups", "public_names", "written"]


class Called(nn.Module):
    """A module, or a function, that is called in another way than on one tensor."""

    def __init__(self, inner: Any, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.inner, x)


@dataclass(frozen=True)
class Case:
    """How one class or function is put between two trained layers, and what must come of it.

    name     as users write it: nn.GELU, F.gelu; a second word tells cases of one function apart
    build    a module that takes [B, *shape]: what a trained linear made, or integers below `tokens`; or a criterion
    refused  empty where it trains; else words of the error, which name the alternative
    instead  what the table says to do, where it is refused
    loss     makes the arguments of a criterion of the model's output [B, *shape] and of classes [B]
    drawn    whether it draws random numbers
    """

    name: str
    build: Callable[[], Any]
    shape: tuple[int, ...] = (3, 4)
    tokens: int = 0
    refused: str = ""
    instead: str = ""
    loss: Callable[[Tensor, Tensor], tuple[Any, ...]] | None = None
    drawn: bool = False

    @property
    def public(self) -> str:
        """The name of the class or function."""
        return self.name.split()[0]


def of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    """A module that calls a function on its input, with some more arguments."""
    return lambda: Called(None, lambda _, x: function(x, *args, **kwargs))


def on(function: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    """A module that computes a function of its input."""
    return lambda: Called(None, lambda _, x: function(x))


def called(make: Callable[[], Any], call: Callable[[Any, Tensor], Any]) -> Callable[[], nn.Module]:
    """A module that calls another one in its own way."""
    return lambda: Called(make(), call)


IMAGE, SERIES, VOLUME = (4, 6, 6), (4, 6), (2, 4, 4, 4)
BY_RANK = {1: SERIES, 2: IMAGE, 3: VOLUME}
RANKS = (1, 2, 3)


def _by_rank(name: str, *args: Any, ranks: tuple[int, ...] = RANKS, shapes: Any = BY_RANK, **more: Any) -> list[Case]:
    return [
        Case(f"nn.{name}{n}d", lambda n=n: getattr(nn, f"{name}{n}d")(*args), shapes[n], **more)  # type: ignore[misc]
        for n in ranks
    ]


def _plain(names: str, *args: Any, shape: tuple[int, ...] = (3, 4), **more: Any) -> list[Case]:
    return [
        Case(f"nn.{name}", lambda name=name: getattr(nn, name)(*args), shape, **more)  # type: ignore[misc]
        for name in names.split()
    ]


def unpool(n: int) -> Callable[[], nn.Module]:
    def call(pools: nn.ModuleList, x: Tensor) -> Tensor:
        y, where = pools[0](x)
        result: Tensor = pools[1](y, where)
        return result

    return called(
        lambda: nn.ModuleList([getattr(nn, f"MaxPool{n}d")(2, return_indices=True), getattr(nn, f"MaxUnpool{n}d")(2)]),
        call,
    )


BATCH_NORM: Any = {
    "refused": "dpquant_compile.replace_batch_norm",
    "instead": "`dpq.replace_batch_norm(model)`, or `nn.GroupNorm`",
}
LAZY: Any = {"refused": "run the lazy model once", "instead": "run the lazy model once on a batch, then compile it"}

MODULES = [
    # Activations
    *_plain("CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish PReLU"),
    *_plain("RReLU", drawn=True),
    *_plain("ReLU ReLU6 SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink"),
    *_plain("LogSoftmax Softmax Softmin", -1),
    *_plain("Softmax2d", shape=IMAGE),
    *_plain("Threshold", 0.1, 0.5),
    # Layers with parameters
    *_plain("Linear", 4, 5),
    *_plain("LazyLinear", 5, **LAZY),
    Case("nn.Bilinear", called(lambda: nn.Bilinear(4, 4, 3), lambda m, x: m(x, x.flip(1)))),
    *[Case(f"nn.Conv{n}d", lambda n=n: getattr(nn, f"Conv{n}d")(BY_RANK[n][0], 3, 3), BY_RANK[n]) for n in RANKS],
    *[
        Case(f"nn.ConvTranspose{n}d", lambda n=n: getattr(nn, f"ConvTranspose{n}d")(BY_RANK[n][0], 3, 2), BY_RANK[n])
        for n in RANKS
    ],
    *[
        Case(f"nn.Lazy{kind}{n}d", lambda n=n, kind=kind: getattr(nn, f"Lazy{kind}{n}d")(3, 2), BY_RANK[n], **LAZY)
        for kind in ("Conv", "ConvTranspose")
        for n in RANKS
    ],
    Case("nn.Embedding", lambda: nn.Embedding(9, 4), (5,), tokens=9),
    Case("nn.EmbeddingBag", lambda: nn.EmbeddingBag(9, 4), (5,), tokens=9),
    # Normalisation
    *[
        Case(f"nn.BatchNorm{n}d", lambda n=n: getattr(nn, f"BatchNorm{n}d")(BY_RANK[n][0]), BY_RANK[n], **BATCH_NORM)
        for n in RANKS
    ],
    *[
        Case(f"nn.LazyBatchNorm{n}d", lambda n=n: getattr(nn, f"LazyBatchNorm{n}d")(), BY_RANK[n], **LAZY)
        for n in RANKS
    ],
    Case("nn.SyncBatchNorm", lambda: nn.SyncBatchNorm(4), IMAGE, **BATCH_NORM),
    *[
        Case(
            f"nn.InstanceNorm{n}d", lambda n=n: getattr(nn, f"InstanceNorm{n}d")(BY_RANK[n][0], affine=True), BY_RANK[n]
        )
        for n in RANKS
    ],
    *[
        Case(
            f"nn.LazyInstanceNorm{n}d",
            lambda n=n: getattr(nn, f"LazyInstanceNorm{n}d")(affine=True),
            BY_RANK[n],
            **LAZY,
        )
        for n in RANKS
    ],
    Case("nn.GroupNorm", lambda: nn.GroupNorm(2, 4), IMAGE),
    Case("nn.LayerNorm", lambda: nn.LayerNorm(4)),
    Case("nn.RMSNorm", lambda: nn.RMSNorm(4)),
    Case("nn.LocalResponseNorm", lambda: nn.LocalResponseNorm(2), IMAGE),
    Case(
        "nn.CrossMapLRN2d",
        lambda: nn.CrossMapLRN2d(2),
        IMAGE,
        refused="nn.LocalResponseNorm",
        instead="`nn.LocalResponseNorm`",
    ),
    # Dropout
    *_plain("AlphaDropout Dropout", 0.5, drawn=True),
    *_by_rank("Dropout", 0.5, drawn=True),
    *_plain("FeatureAlphaDropout", 0.5, shape=IMAGE, drawn=True),
    # Pooling, padding, shapes
    *_by_rank("AdaptiveAvgPool", 2),
    *_by_rank("AdaptiveMaxPool", 2),
    *_by_rank("AvgPool", 2),
    *_by_rank("MaxPool", 2),
    *_by_rank("LPPool", 2.0, 2),
    *[Case(f"nn.MaxUnpool{n}d", unpool(n), BY_RANK[n]) for n in RANKS],
    Case("nn.FractionalMaxPool2d", lambda: nn.FractionalMaxPool2d(2, output_size=3), IMAGE, drawn=True),
    Case("nn.FractionalMaxPool3d", lambda: nn.FractionalMaxPool3d(2, output_size=2), VOLUME, drawn=True),
    *_by_rank("CircularPad", 1),
    *_by_rank("ConstantPad", 1, 0.5),
    *_by_rank("ReflectionPad", 1),
    *_by_rank("ReplicationPad", 1),
    *_by_rank("ZeroPad", 1),
    Case("nn.ChannelShuffle", lambda: nn.ChannelShuffle(2), IMAGE),
    Case("nn.PixelShuffle", lambda: nn.PixelShuffle(2), IMAGE),
    Case("nn.PixelUnshuffle", lambda: nn.PixelUnshuffle(2), IMAGE),
    Case("nn.Flatten", lambda: nn.Flatten(), IMAGE),
    Case("nn.Unflatten", lambda: nn.Unflatten(1, (2, 2)), IMAGE),
    Case("nn.Fold", lambda: nn.Fold((4, 4), (2, 2), stride=2), (8, 4)),
    Case("nn.Unfold", lambda: nn.Unfold(2), IMAGE),
    Case("nn.Upsample", lambda: nn.Upsample(scale_factor=2), IMAGE),
    Case("nn.UpsamplingBilinear2d", lambda: nn.UpsamplingBilinear2d(scale_factor=2), IMAGE),
    Case("nn.UpsamplingNearest2d", lambda: nn.UpsamplingNearest2d(scale_factor=2), IMAGE),
    Case("nn.CosineSimilarity", called(lambda: nn.CosineSimilarity(dim=-1), lambda m, x: m(x, x.flip(1)))),
    Case("nn.PairwiseDistance", called(lambda: nn.PairwiseDistance(), lambda m, x: m(x[:, 0], x[:, 1])[:, None])),
    # Sequences
    Case(
        "nn.RNN",
        called(lambda: nn.RNN(4, 3, batch_first=True), lambda m, x: m(x)[0]),
        refused="opacus.layers.DPRNN",
        instead="`opacus.layers.DPRNN`",
    ),
    Case(
        "nn.LSTM",
        called(lambda: nn.LSTM(4, 3, batch_first=True), lambda m, x: m(x)[0]),
        refused="opacus.layers.DPLSTM",
        instead="`opacus.layers.DPLSTM`",
    ),
    Case(
        "nn.GRU",
        called(lambda: nn.GRU(4, 3, batch_first=True), lambda m, x: m(x)[0]),
        refused="opacus.layers.DPGRU",
        instead="`opacus.layers.DPGRU`",
    ),
    Case("nn.RNNCell", called(lambda: nn.RNNCell(4, 3), lambda m, x: m(x[:, 1], m(x[:, 0])))),
    Case("nn.LSTMCell", called(lambda: nn.LSTMCell(4, 3), lambda m, x: m(x[:, 1], m(x[:, 0]))[0])),
    Case("nn.GRUCell", called(lambda: nn.GRUCell(4, 3), lambda m, x: m(x[:, 1], m(x[:, 0])))),
    Case(
        "nn.MultiheadAttention",
        called(lambda: nn.MultiheadAttention(4, 2, batch_first=True), lambda m, x: m(x, x, x)[0]),
    ),
    Case(
        "nn.Transformer",
        called(lambda: nn.Transformer(4, 2, 1, 1, 6, 0.0, batch_first=True), lambda m, x: m(x, x.flip(1))),
    ),
    Case(
        "nn.LinearCrossEntropyLoss",
        called(
            lambda: nn.LinearCrossEntropyLoss(4, 5, reduction="none"), lambda m, x: m(x[:, 0], _classes(x))[:, None]
        ),
    ),
    Case(
        "nn.AdaptiveLogSoftmaxWithLoss",
        called(lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 5, [2]), lambda m, x: m(x[:, 0], _classes(x))[0][:, None]),
        refused="nn.CrossEntropyLoss",
        instead="`nn.Linear`, and `nn.CrossEntropyLoss` as the criterion",
    ),
    # Losses
    *[
        Case(
            f"nn.{name}",
            lambda name=name: getattr(nn, name)(reduction="sum"),
            (4,),
            loss=lambda o, t: (o, o.detach() + 1),
        )
        for name in "HuberLoss L1Loss MSELoss SmoothL1Loss".split()
    ],
    *[
        Case(f"nn.{name}", lambda name=name: getattr(nn, name)(reduction="sum"), (4,), loss=lambda o, t: (o, t))
        for name in "CrossEntropyLoss MultiMarginLoss".split()
    ],
    Case("nn.NLLLoss", lambda: nn.NLLLoss(reduction="sum"), (4,), loss=lambda o, t: (o.log_softmax(1), t)),
    Case(
        "nn.BCELoss",
        lambda: nn.BCELoss(reduction="sum"),
        (4,),
        loss=lambda o, t: (o.sigmoid(), F.one_hot(t, 4).float()),
    ),
    Case(
        "nn.BCEWithLogitsLoss",
        lambda: nn.BCEWithLogitsLoss(reduction="sum"),
        (4,),
        loss=lambda o, t: (o, F.one_hot(t, 4).float()),
    ),
    Case(
        "nn.KLDivLoss",
        lambda: nn.KLDivLoss(reduction="sum"),
        (4,),
        loss=lambda o, t: (o.log_softmax(1), F.one_hot(t, 4).float()),
    ),
    Case(
        "nn.PoissonNLLLoss",
        lambda: nn.PoissonNLLLoss(reduction="sum"),
        (4,),
        loss=lambda o, t: (o, F.one_hot(t, 4).float()),
    ),
    Case(
        "nn.GaussianNLLLoss",
        lambda: nn.GaussianNLLLoss(reduction="sum"),
        (4,),
        loss=lambda o, t: (o[:, :2], o[:, :2].detach() + 1, o[:, 2:].exp()),
    ),
    Case(
        "nn.SoftMarginLoss",
        lambda: nn.SoftMarginLoss(reduction="sum"),
        (4,),
        loss=lambda o, t: (o, 2 * F.one_hot(t, 4) - 1.0),
    ),
    Case(
        "nn.HingeEmbeddingLoss",
        lambda: nn.HingeEmbeddingLoss(reduction="sum"),
        (4,),
        loss=lambda o, t: (o, 2 * F.one_hot(t, 4) - 1.0),
    ),
    Case(
        "nn.MultiLabelSoftMarginLoss",
        lambda: nn.MultiLabelSoftMarginLoss(reduction="sum"),
        (4,),
        loss=lambda o, t: (o, F.one_hot(t, 4).float()),
    ),
    Case(
        "nn.MultiLabelMarginLoss",
        lambda: nn.MultiLabelMarginLoss(reduction="sum"),
        (4,),
        loss=lambda o, t: (o, F.pad(t[:, None], (0, 3), value=-1)),
    ),
    Case(
        "nn.MarginRankingLoss",
        lambda: nn.MarginRankingLoss(reduction="sum"),
        (4,),
        loss=lambda o, t: (o[:, 0], o[:, 1], 2 * (t % 2) - 1.0),
    ),
    Case(
        "nn.CosineEmbeddingLoss",
        lambda: nn.CosineEmbeddingLoss(reduction="sum"),
        (4,),
        loss=lambda o, t: (o[:, :2], o[:, 2:], 2 * (t % 2) - 1.0),
    ),
    Case(
        "nn.TripletMarginLoss",
        lambda: nn.TripletMarginLoss(reduction="sum"),
        (6,),
        loss=lambda o, t: (o[:, :2], o[:, 2:4], o[:, 4:]),
    ),
    Case(
        "nn.TripletMarginWithDistanceLoss",
        lambda: nn.TripletMarginWithDistanceLoss(reduction="sum"),
        (6,),
        loss=lambda o, t: (o[:, :2], o[:, 2:4], o[:, 4:]),
    ),
    Case(
        "nn.CTCLoss",
        lambda: nn.CTCLoss(reduction="sum"),
        (5, 4),
        loss=lambda o, t: (
            o.log_softmax(-1).transpose(0, 1),
            t[:, None] % 3 + 1,
            torch.full((len(t),), 5),
            torch.ones(len(t), dtype=torch.int64),
        ),
    ),
]


def _like(x: Tensor) -> Tensor:
    return torch.full_like(x, 0.3)


def _positive(x: Tensor) -> Tensor:
    return x.sigmoid() * 0.8 + 0.1


def _signs(x: Tensor) -> Tensor:
    return torch.where(torch.arange(x.shape[-1]) % 2 == 0, 1.0, -1.0).expand_as(x)


def _classes(x: Tensor) -> Tensor:
    """A class for each row, which depends on nothing."""
    return torch.ones(x.shape[0], dtype=torch.int64)


def with_weight(shape: tuple[int, ...], call: Callable[[Any, Tensor], Any]) -> Callable[[], nn.Module]:
    """A function of the input and of one parameter of this shape."""
    return called(lambda: nn.ParameterList([torch.randn(shape)]), lambda m, x: call(m[0], x))


def _by(names: str, shape: tuple[int, ...] = (3, 4), *args: Any, **kwargs: Any) -> list[Case]:
    drawn = bool(kwargs.get("training")) or "gumbel" in names or "fractional" in names
    return [Case(f"F.{name}", of(getattr(F, name), *args, **kwargs), shape, drawn=drawn) for name in names.split()]


def _elementwise(name: str, target: Callable[[Tensor], Tensor] = _like, prepare: Any = None, **kwargs: Any) -> Case:
    """A loss of each element or row, inside of forward()."""
    before = prepare or (lambda x: x)
    return Case(f"F.{name}", on(lambda x: getattr(F, name)(before(x), target(x), reduction="none", **kwargs)))


def _unpooled(n: int) -> Callable[[], nn.Module]:
    return on(lambda x: getattr(F, f"max_unpool{n}d")(*getattr(F, f"max_pool{n}d")(x, 2, return_indices=True), 2))


FUNCTIONS = [
    *_by(
        "celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu sigmoid"
    ),
    *_by("silu softplus softshrink softsign tanh tanhshrink"),
    *[
        Case(f"F.{name}_", on(lambda x, name=name: getattr(F, f"{name}_")(x * 1.0)))
        for name in "celu elu hardtanh leaky_relu relu rrelu selu".split()
    ],
    Case("F.threshold", of(F.threshold, 0.1, 0.5)),
    Case("F.threshold_", on(lambda x: F.threshold_(x * 1.0, 0.1, 0.5))),
    *_by("log_softmax softmax softmin normalize", (3, 4), dim=-1),
    *_by("gumbel_softmax", (3, 4), dim=-1),
    Case("F.rrelu", of(F.rrelu, training=True), drawn=True),
    Case("F.prelu", with_weight((3,), lambda w, x: F.prelu(x, w))),
    Case("F.linear", with_weight((5, 4), lambda w, x: F.linear(x, w))),
    Case("F.bilinear", with_weight((3, 4, 4), lambda w, x: F.bilinear(x, x.flip(1), w))),
    *[
        Case(
            f"F.conv{n}d",
            with_weight((3, BY_RANK[n][0], *[2] * n), lambda w, x, n=n: getattr(F, f"conv{n}d")(x, w)),
            BY_RANK[n],
        )
        for n in RANKS
    ],
    *[
        Case(
            f"F.conv_transpose{n}d",
            with_weight((BY_RANK[n][0], 3, *[2] * n), lambda w, x, n=n: getattr(F, f"conv_transpose{n}d")(x, w)),
            BY_RANK[n],
        )
        for n in RANKS
    ],
    Case(
        "F.conv_tbc",
        called(
            lambda: nn.ParameterList([torch.randn(2, 4, 3), torch.randn(3)]),
            lambda m, x: F.conv_tbc(x.transpose(0, 1).contiguous(), m[0], m[1]).transpose(0, 1),
        ),
        (6, 4),
    ),
    Case("F.embedding", with_weight((9, 4), lambda w, x: F.embedding(x, w)), (5,), tokens=9),
    Case("F.embedding_bag", with_weight((9, 4), lambda w, x: F.embedding_bag(x, w)), (5,), tokens=9),
    Case("F.one_hot", on(lambda x: F.one_hot(x, 9).float()), (5,), tokens=9),
    Case("F.batch_norm", of(F.batch_norm, None, None, training=True), IMAGE, **BATCH_NORM),
    Case("F.instance_norm", of(F.instance_norm), IMAGE),
    Case("F.group_norm", of(F.group_norm, 2), IMAGE),
    Case("F.layer_norm", of(F.layer_norm, (4,))),
    Case("F.rms_norm", of(F.rms_norm, (4,))),
    Case("F.local_response_norm", of(F.local_response_norm, 2), IMAGE),
    *_by("alpha_dropout dropout", (3, 4), training=True),
    *_by("dropout1d", SERIES, training=True),
    *_by("dropout2d feature_alpha_dropout", IMAGE, training=True),
    *_by("dropout3d", VOLUME, training=True),
    *[
        case
        for n in RANKS
        for case in _by(f"avg_pool{n}d max_pool{n}d adaptive_avg_pool{n}d adaptive_max_pool{n}d", BY_RANK[n], 2)
    ],
    *[
        Case(
            f"F.{kind}pool{n}d_with_indices",
            on(lambda x, n=n, kind=kind: getattr(F, f"{kind}pool{n}d_with_indices")(x, 2)[0]),
            BY_RANK[n],
        )
        for n in RANKS
        for kind in ("max_", "adaptive_max_")
    ],
    *[case for n in RANKS for case in _by(f"lp_pool{n}d", BY_RANK[n], 2.0, 2)],
    *[Case(f"F.max_unpool{n}d", _unpooled(n), BY_RANK[n]) for n in RANKS],
    *_by("fractional_max_pool2d", IMAGE, 2, output_size=3),
    *_by("fractional_max_pool3d", VOLUME, 2, output_size=2),
    Case(
        "F.fractional_max_pool2d_with_indices",
        on(lambda x: F.fractional_max_pool2d_with_indices(x, 2, output_size=3)[0]),
        IMAGE,
        drawn=True,
    ),
    Case(
        "F.fractional_max_pool3d_with_indices",
        on(lambda x: F.fractional_max_pool3d_with_indices(x, 2, output_size=2)[0]),
        VOLUME,
        drawn=True,
    ),
    *_by("pad", IMAGE, (1, 1, 0, 1), mode="reflect"),
    *_by("channel_shuffle pixel_shuffle pixel_unshuffle unfold", IMAGE, 2),
    *_by("fold", (8, 4), (4, 4), (2, 2), stride=2),
    *_by("interpolate upsample upsample_nearest upsample_bilinear", IMAGE, scale_factor=2),
    Case("F.interpolate bicubic", of(F.interpolate, scale_factor=2, mode="bicubic"), IMAGE),
    Case("F.interpolate area", of(F.interpolate, size=3, mode="area"), IMAGE),
    Case("F.interpolate antialias", of(F.interpolate, scale_factor=0.5, mode="bilinear", antialias=True), IMAGE),
    Case("F.interpolate nearest-exact", of(F.interpolate, scale_factor=2, mode="nearest-exact"), IMAGE),
    Case("F.interpolate trilinear", of(F.interpolate, scale_factor=2, mode="trilinear"), VOLUME),
    Case("F.interpolate nearest 3d", of(F.interpolate, scale_factor=2), VOLUME),
    Case("F.affine_grid", on(lambda x: F.affine_grid(x[:, :2, :3], [x.shape[0], 1, 2, 2], align_corners=False))),
    Case(
        "F.grid_sample",
        on(lambda x: F.grid_sample(x, x[:, :2, :, :3].permute(0, 2, 3, 1).tanh(), align_corners=False)),
        IMAGE,
    ),
    Case("F.cosine_similarity", on(lambda x: F.cosine_similarity(x, x.flip(1), dim=-1))),
    Case("F.pairwise_distance", on(lambda x: F.pairwise_distance(x[:, 0], x[:, 1])[:, None])),
    Case(
        "F.pdist",
        on(lambda x: F.pdist(x[:, 0])),
        refused="torch.cdist",
        instead="`torch.cdist(x, x)` within a sample: it compares the rows of the batch",
    ),
    Case(
        "F.scaled_dot_product_attention",
        on(lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])),
    ),
    # Losses, inside of forward()
    *[
        _elementwise(name)
        for name in (
            *"huber_loss l1_loss mse_loss smooth_l1_loss poisson_nll_loss kl_div".split(),
            "binary_cross_entropy_with_logits",
        )
    ],
    _elementwise("binary_cross_entropy", prepare=_positive),
    *[_elementwise(name, _signs) for name in "soft_margin_loss hinge_embedding_loss".split()],
    Case(
        "F.gaussian_nll_loss",
        on(lambda x: F.gaussian_nll_loss(x, _like(x), _positive(x), reduction="none")),
        refused="depends on values",
        instead="give it to `make_private` as the criterion",
    ),
    *[
        Case(f"F.{name}", on(lambda x, name=name: getattr(F, name)(x[:, 0], _classes(x), reduction="none")[:, None]))
        for name in "cross_entropy nll_loss multi_margin_loss".split()
    ],
    Case(
        "F.multilabel_margin_loss",
        on(
            lambda x: F.multilabel_margin_loss(
                x[:, 0], torch.tensor([1, 2, -1, -1]).expand(x.shape[0], 4), reduction="none"
            )[:, None]
        ),
        refused="by the criterion",
        instead="give it to `make_private` as the criterion",
    ),
    Case(
        "F.multilabel_soft_margin_loss",
        on(lambda x: F.multilabel_soft_margin_loss(x[:, 0], _like(x[:, 0]), reduction="none")[:, None]),
    ),
    Case("F.margin_ranking_loss", on(lambda x: F.margin_ranking_loss(x, x.flip(1), _signs(x), reduction="none"))),
    Case(
        "F.cosine_embedding_loss",
        on(lambda x: F.cosine_embedding_loss(x[:, 0], x[:, 1], _classes(x), reduction="none")[:, None]),
    ),
    Case(
        "F.triplet_margin_loss",
        on(lambda x: F.triplet_margin_loss(x[:, 0].tanh(), x[:, 1].sin(), x[:, 2], reduction="none")[:, None]),
    ),
    Case(
        "F.triplet_margin_with_distance_loss",
        on(
            lambda x: F.triplet_margin_with_distance_loss(x[:, 0].tanh(), x[:, 1].sin(), x[:, 2], reduction="none")[
                :, None
            ]
        ),
    ),
    Case(
        "F.ctc_loss",
        on(
            lambda x: F.ctc_loss(
                x.log_softmax(-1).transpose(0, 1),
                torch.ones(x.shape[0], 1, dtype=torch.int64),
                torch.full((x.shape[0],), 5),
                torch.ones(x.shape[0], dtype=torch.int64),
                reduction="none",
            )[:, None]
        ),
        (5, 4),
        refused="cannot capture",
        instead='give it to `make_private` as the criterion, with `reduction="sum"`',
    ),
    Case(
        "F.linear_cross_entropy",
        with_weight((5, 4), lambda w, x: F.linear_cross_entropy(x[:, 0], w, _classes(x), reduction="none")[:, None]),
    ),
    Case(
        "F.multi_head_attention_forward",
        called(
            lambda: nn.MultiheadAttention(4, 2),
            lambda m, x: F.multi_head_attention_forward(
                x.transpose(0, 1),
                x.transpose(0, 1),
                x.transpose(0, 1),
                4,
                2,
                m.in_proj_weight,
                m.in_proj_bias,
                None,
                None,
                False,
                0.0,
                m.out_proj.weight,
                m.out_proj.bias,
            )[0].transpose(0, 1),
        ),
    ),
]


# What is no layer and no function of the batch, or is tested inside of another case.
_INSIDE = "tested inside of nn.Transformer"
_GPU = "multiplies in formats or groups that need a GPU; torch.bmm, or a recipe of this library"
NO_CASE: dict[str, str] = {
    **dict.fromkeys(("nn.Module", "nn.Container", "nn.RNNBase", "nn.RNNCellBase"), "a base class"),
    **dict.fromkeys(
        ("nn.Sequential", "nn.ModuleList", "nn.ModuleDict", "nn.ParameterList", "nn.ParameterDict"), "a container"
    ),
    "nn.DataParallel": "one process on several GPUs; see docs/distributed.md",
    "nn.NLLLoss2d": "an old name of nn.NLLLoss",
    **dict.fromkeys(
        ("nn.TransformerEncoderLayer", "nn.TransformerEncoder", "nn.TransformerDecoderLayer", "nn.TransformerDecoder"),
        _INSIDE,
    ),
    "F.native_channel_shuffle": "has no derivative in torch; F.channel_shuffle",
    **dict.fromkeys(("F.grouped_mm", "F.scaled_mm", "F.scaled_grouped_mm"), _GPU),
    **dict.fromkeys(
        (
            "F.assert_int_or_pair",
            "F.boolean_dispatch",
            "F.handle_torch_function",
            "F.has_torch_function",
            "F.has_torch_function_unary",
            "F.has_torch_function_variadic",
        ),
        "a helper of torch itself",
    ),
}
CASES = [*MODULES, *FUNCTIONS]


def public_names() -> set[str]:
    """The classes of torch.nn that are modules, and the functions of torch.nn.functional."""
    classes = {n for n, v in vars(nn).items() if isinstance(v, type) and issubclass(v, nn.Module)}
    functions = {
        name
        for name, value in vars(F).items()
        if callable(value)
        and not isinstance(value, type)
        and not name.startswith("_")
        and (getattr(value, "__module__", None) or "").startswith("torch")
    }
    return {*(f"nn.{name}" for name in classes), *(f"F.{name}" for name in functions)}


def groups() -> list[list[Case]]:
    """Cases that train, a few of one kind in each program: a program costs more than an operator in it."""
    alike: dict[Any, list[Case]] = {}
    for case in CASES:
        if not case.refused and case.loss is None:
            # A transformer alone: it is as large as all others, and what is traced for each grows with the model.
            alone = case.name == "nn.Transformer"
            alike.setdefault((case.shape, case.tokens, case.drawn, alone), []).append(case)
    return [cases[i : i + SIZE] for cases in alike.values() for i in range(0, len(cases), SIZE)]


SIZE = 10
BEGIN, END = "<!-- nn walk: begin -->", "<!-- nn walk: end -->"
PAGE = Path(__file__).parents[2] / "docs" / "support.md"


def table() -> str:
    """What the cases say, as a table in Markdown."""
    found: dict[str, list[str]] = {}
    for case in CASES:
        result = (
            f"– refused: {case.instead}" if case.refused else "✓ trains, as the criterion" if case.loss else "✓ trains"
        )
        found.setdefault(result, []).append(f"`{case.public}`")
    for name, why in NO_CASE.items():
        if why == _INSIDE:
            found["✓ trains"].append(f"`{name}`")
        elif name.startswith("F.") and "helper" not in why:
            found.setdefault(f"– {why}", []).append(f"`{name}`")
    rows = (
        f"| {', '.join(sorted(dict.fromkeys(names), key=str.lower))} | {result} |" for result, names in found.items()
    )
    return "\n".join(["| `torch.nn` and `F`, its `functional` | private training |", "|---|---|", *rows])


def written(text: str) -> str:
    """A page with the table between its two markers."""
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
