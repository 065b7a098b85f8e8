"""Functions of a batch tensor, by what they do to the batch: the cases for every rule about where samples lie."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpquant_compile.sites import BatchAxis

B = 7
aten = torch.ops.aten
EVERYWHERE = {
    "plain": (BatchAxis(0), lambda shape: (B, *shape)),
    "second": (BatchAxis(1), lambda shape: (shape[0], B, *shape[1:])),
    "last": (BatchAxis(-1), lambda shape: (*shape, B)),
    "folded": (BatchAxis(0, 1, 2), lambda shape: (B * 2, *shape)),
    "swapped": (BatchAxis(0, 2, 1), lambda shape: (2 * B, *shape)),
}


def samples(x: Tensor, axis: BatchAxis) -> Tensor:
    """[B, the elements of one sample], a copy."""
    x = x.unflatten(axis.dim, (axis.outer, B, axis.inner)) if x.dim() else x
    return x.movedim(axis.dim + 1, 0).reshape(B, -1).clone()


def data(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def positions(length: int) -> Tensor:
    """[length, length]: how far positions of a sequence are apart."""
    return (torch.arange(length)[:, None] - torch.arange(length)).abs()


# Functions of a batch of [3, 4] matrices, wherever the batch is: the rule must be right, or give up.
ANYWHERE: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda x: x + 1,
    "mul": lambda x: x * x.sin(),
    "where": lambda x: torch.where(x > 0, x, -x),
    "_prelu_kernel": lambda x: aten._prelu_kernel(x, torch.tensor(0.3).expand((1,) * x.dim())),
    "expand": lambda x: x.unsqueeze(0).expand(2, *x.shape),
    "repeat": lambda x: x.repeat(2, *range(1, x.dim() + 1)),
    "tile": lambda x: x.tile(2),
    "masked_fill_": lambda x: x.clone().masked_fill_(x > 0, 1.0),
    "lerp_": lambda x: x.clone().lerp_(x.cos(), 0.3),
    "copy_": lambda x: torch.zeros(x.shape).copy_(x),
    "fill_": lambda x: x.clone().fill_(2.0),
    "zero_": lambda x: x.clone().zero_(),
    "index_fill": lambda x: x.index_fill(1, torch.tensor([0, 2]), 5.0),
    "_to_copy": lambda x: x.to(torch.float64),
    "native_dropout": lambda x: aten.native_dropout(x, 0.5, True),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "alias": lambda x: aten.alias(x),
    "zeros_like": lambda x: torch.zeros_like(x) + x,
    "ones_like": lambda x: torch.ones_like(x) + x,
    "full_like": lambda x: torch.full_like(x, 2.0) * x,
    "empty_like": lambda x: torch.empty_like(x).fill_(1.0),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x),
    "uniform_": lambda x: x.clone().uniform_(),
    "normal_": lambda x: x.clone().normal_(),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.5),
    "bernoulli_ by place": lambda x: aten.bernoulli_.Tensor(torch.empty(x.shape), x.sigmoid().nan_to_num(0.5)),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "exponential_": lambda x: x.clone().exponential_(),
    "random_": lambda x: x.clone().random_(9),
    "log_normal_": lambda x: x.clone().log_normal_(),
    "cauchy_": lambda x: x.clone().cauchy_(),
    "geometric_": lambda x: x.clone().geometric_(0.5),
    "normal": lambda x: torch.normal(x, 1.0),
    # Of values that do not change: how much of a stream these take depends on them.
    "poisson": lambda x: torch.poisson(torch.where(x == x, 2.0, 2.0)),
    "rrelu_with_noise": lambda x: F.rrelu(torch.where(x == x, -1.0, -1.0), training=True),
    "view": lambda x: x.contiguous().view(-1),
    "view_ends": lambda x: x.contiguous().view(x.shape[0], -1),
    "view_start": lambda x: x.contiguous().view(-1, x.shape[-1]),
    "view_split": lambda x: x.contiguous().view(*x.shape[:-1], 1, x.shape[-1]),
    "view_mixed": lambda x: x.contiguous().view(2, -1),
    "view_odd": lambda x: x.contiguous().view(-1, 6),
    "view_by_batch": lambda x: x.contiguous().view(B, -1),
    "reshape": lambda x: x.transpose(0, 1).reshape(-1, x.shape[0]),
    "permute": lambda x: x.permute(2, 0, 1),
    "permute_negative": lambda x: x.permute(-1, 1, -3),
    "transpose": lambda x: x.transpose(0, -1),
    "transpose_other": lambda x: x.transpose(-2, -1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "unsqueeze_last": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x.unsqueeze(0).unsqueeze(2).squeeze(),
    "squeeze_dim": lambda x: x.unsqueeze(0).squeeze(0),
    "squeeze_dims": lambda x: x.unsqueeze(0).unsqueeze(-1).squeeze((0, -1)),
    "select": lambda x: x[:, 1],
    "select_first": lambda x: x[0],
    "select_last": lambda x: x[..., -1],
    "slice": lambda x: x[:, 1:],
    "slice_first": lambda x: x[:2],
    "slice_step": lambda x: x[..., ::2],
    "split": lambda x: x.split(2, 1),
    "split_with_sizes": lambda x: x.split([1, x.shape[-1] - 1], -1),
    "constant_pad_nd": lambda x: F.pad(x, (1, 2)),
    "constant_pad_outer": lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)),
    "unbind": lambda x: x.unbind(1),
    "unbind_first": lambda x: x.unbind(0),
    "cat": lambda x: torch.cat((x, x * 2), 1),
    "cat_first": lambda x: torch.cat((x, x)),
    "cat_constant": lambda x: torch.cat((x, torch.ones(*x.shape[:-1], 2)), -1),
    "cat_swapped": lambda x: torch.cat((x, x.transpose(0, 1).contiguous().view(x.shape)), -1),
    "stack": lambda x: torch.stack((x, x + 1), 1),
    "stack_last": lambda x: torch.stack((x, x + 1), -1),
    **{f"{name}_{d}": (lambda x, name=name, d=d: getattr(torch, name)(x, d))
       for name in "sum mean amax amin prod var std any all argmax argmin logsumexp max min median".split()
       for d in (0, 1, -1)},
    **{f"{name}_all": (lambda x, name=name: getattr(torch, name)(x))
       for name in "sum mean amax max prod any std".split()},
    "sum_keep": lambda x: x.sum(1, keepdim=True),
    "sum_two": lambda x: x.sum((0, 2)),
    "var_mean": lambda x: torch.var_mean(x, -1),
    "std_mean": lambda x: torch.std_mean(x, 1),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, 2, -1),
    "linalg_vector_norm_all": lambda x: torch.linalg.vector_norm(x),
    "max_other": lambda x: torch.max(x, x.cos()),
    **{f"{name}_{d}": (lambda x, name=name, d=d: getattr(torch, name)(x, dim=d))
       for name in "softmax log_softmax cumsum cumprod logcumsumexp sort".split() for d in (0, 1, -1)},
    "_safe_softmax": lambda x: aten._safe_softmax(x, -1),
    "sort_default": lambda x: x.sort(),
    "sort_stable": lambda x: torch.sort(x, stable=True, dim=0),
    "glu": lambda x: F.glu(torch.cat((x, x), 1), 1),
    "glu_last": lambda x: F.glu(x.transpose(1, -1)) if x.shape[1] % 2 == 0 else x,
    "flip": lambda x: x.flip(1),
    "flip_two": lambda x: x.flip(0, -1),
    "topk": lambda x: x.topk(2, 1),
    "topk_default": lambda x: x.topk(2),
    "roll": lambda x: x.roll(1, 1),
    "roll_two": lambda x: x.roll((1, 1), (0, 1)),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "layer_norm_two": lambda x: F.layer_norm(x, x.shape[-2:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]) if x.shape[-1] != B else x,  # over the batch: see below
    "mm": lambda x: x.reshape(-1, x.shape[-1]).mm(torch.ones(x.shape[-1], 2)),
    "mm_right": lambda x: torch.ones(2, x.shape[0]).mm(x.reshape(x.shape[0], -1)),
    "mm_both": lambda x: x[0].mm(x[0].t()),
    "addmm": lambda x: torch.addmm(torch.ones(2), x.reshape(-1, x.shape[-1]), torch.ones(x.shape[-1], 2)),
    "bmm": lambda x: x.bmm(x.transpose(1, 2)),
    "bmm_right": lambda x: torch.ones(x.shape[0], 2, x.shape[1]).bmm(x),
    "bmm_left": lambda x: x.bmm(torch.ones(x.shape[0], x.shape[2], 3)),
    "baddbmm": lambda x: torch.baddbmm(torch.ones(1, 1, 1), x, x.transpose(1, 2)),
    "linear": lambda x: F.linear(x, torch.ones(2, x.shape[-1]), torch.ones(2)),
    "gather": lambda x: x.gather(1, torch.zeros(x.shape[0], 2, x.shape[2], dtype=torch.int64)),
    "gather_own": lambda x: x.gather(-1, x.argsort(-1)),
    "gather_expanded": lambda x: x.gather(-1, torch.tensor([1, 0, 2]).expand(*x.shape[:-1], 3)),
    "gather_expanded_last": lambda x: x.gather(1, torch.tensor([[2], [0]]).expand(x.shape[0], 2, x.shape[2])),
    "gather_first": lambda x: x.gather(0, torch.zeros_like(x, dtype=torch.int64)),
    "scatter": lambda x: x.scatter(1, (x > 0).long(), x.sin()),
    "scatter_add": lambda x: x.scatter_add(-1, (x > 0).long(), x),
    "index_select": lambda x: x.index_select(1, torch.tensor([0, 0, 1])),
    "as_strided": lambda x: aten.as_strided(x, x.shape, x.contiguous().stride()),
    "as_strided_": lambda x: x.clone().as_strided_(x.shape, x.contiguous().stride()),
    "_reshape_alias": lambda x: aten._reshape_alias(x, [x.shape[0], x[0].numel()], [x[0].numel(), 1]),
    "view_copy": lambda x: aten.view_copy(x, [x.shape[0], -1]),
    "permute_copy": lambda x: aten.permute_copy(x, [1, -1, 0]),
    "mT": lambda x: x.mT,
    "numpy_T": lambda x: x[0].T,
    "hardswish": lambda x: F.hardswish(x),
    "log_sigmoid": lambda x: F.logsigmoid(x),
    "norm": lambda x: aten.norm.ScalarOpt_dim(x, 2, [-1]),
    "norm_first": lambda x: aten.norm.ScalarOpt_dim(x, 1, [0], True),
    "norm_all": lambda x: aten.norm.Scalar(x, 2),
    **{f"{name}_{reduction}": (
           lambda x, name=name, reduction=reduction: getattr(F, name)(x.sigmoid(), x.cos().abs(), reduction=reduction))
       for name in "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy".split()
       for reduction in ("none", "sum")},
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid(), reduction="none"),
    "bce_with_logits_mean": lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid()),
    "cdist": lambda x: torch.cdist(x, x * 2, p=1.0),
    "cdist_rows": lambda x: torch.cdist(x.reshape(x.shape[0], -1), x.reshape(x.shape[0], -1), p=1.0),
    "_int_mm": lambda x: aten._int_mm(
        x.reshape(-1, x.shape[-1]).to(torch.int8), torch.ones(x.shape[-1], 8, dtype=torch.int8)),
}  # fmt: skip


# Functions of a batch of the given shape, and where the batch must be found afterwards.
EXACT: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...], BatchAxis]] = {
    "convolution": (lambda x: F.conv2d(x, torch.ones(3, 2, 3, 3)), (2, 5, 5), BatchAxis(0)),
    "_convolution": (
        lambda x: aten._convolution(x, torch.ones(3, 2, 3), None, [1], [0], [1], False, [0], 1, *[False] * 4),
        (2, 5), BatchAxis(0)),
    "conv_transpose": (lambda x: F.conv_transpose2d(x, torch.ones(2, 3, 3, 3)), (2, 5, 5), BatchAxis(0)),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), (2, 6), BatchAxis(0)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2, return_indices=True), (2, 6, 6), BatchAxis(0)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), (2, 4, 4, 4), BatchAxis(0)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (2, 6, 6), BatchAxis(0)),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), (2, 4, 4, 4), BatchAxis(0)),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 2), (2, 6), BatchAxis(0)),
    "adaptive_avg_pool1d": (lambda x: F.adaptive_avg_pool1d(x, 2), (2, 6), BatchAxis(0)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 2), (2, 6, 6), BatchAxis(0)),
    "adaptive_avg_pool2d_1": (lambda x: F.adaptive_avg_pool2d(x, 1), (2, 6, 6), BatchAxis(0)),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, 2), (2, 4, 4, 4), BatchAxis(0)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 2), (2, 6, 6), BatchAxis(0)),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, 2), (2, 4, 4, 4), BatchAxis(0)),
    "im2col": (lambda x: F.unfold(x, 3), (2, 5, 5), BatchAxis(0)),
    "group_norm": (lambda x: F.group_norm(x, 2), (4, 5), BatchAxis(0)),
    "instance_norm": (lambda x: F.group_norm(x, 4), (4, 5), BatchAxis(0)),
    "nearest1d": (lambda x: F.interpolate(x, scale_factor=2), (2, 5), BatchAxis(0)),
    "nearest2d": (lambda x: F.interpolate(x, scale_factor=2), (2, 5, 5), BatchAxis(0)),
    "linear1d": (lambda x: F.interpolate(x, scale_factor=2, mode="linear"), (2, 5), BatchAxis(0)),
    "bilinear2d": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (2, 5, 5), BatchAxis(0)),
    **{f"{mode}{n}": (lambda x, m=mode, n=n: F.pad(x, (1, 1) * n, mode=m), (2, *[4] * n), BatchAxis(0))
       for mode in ("reflect", "replicate") for n in (1, 2, 3)},
    "col2im": (lambda x: F.fold(x, (4, 4), 2, stride=2), (8, 4), BatchAxis(0)),
    "nearest3d": (lambda x: F.interpolate(x, scale_factor=2), (2, 3, 3, 3), BatchAxis(0)),
    "trilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), (2, 3, 3, 3), BatchAxis(0)),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (2, 4, 4), BatchAxis(0)),
    **{f"nearest exact {n}": (
           lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"), (2, *[3] * n), BatchAxis(0))
       for n in (1, 2, 3)},
    **{f"{mode} antialias": (
           lambda x, mode=mode: F.interpolate(x, scale_factor=0.5, mode=mode, antialias=True), (2, 6, 6), BatchAxis(0))
       for mode in ("bilinear", "bicubic")},
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), (2, 4, 4), BatchAxis(0)),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), (4, 3, 3), BatchAxis(0)),
    "affine_grid": (
        lambda x: aten.affine_grid_generator(x, [x.shape[0], 1, 3, 3], False), (2, 3), BatchAxis(0)),
    **{f"max_unpool{n}d": (
           lambda x, n=n: getattr(F, f"max_unpool{n}d")(*getattr(F, f"max_pool{n}d")(x, 2, return_indices=True), 2),
           (2, *[4] * n), BatchAxis(0)) for n in (2, 3)},
    **{f"grid_sample {n}d": (
           lambda x, n=n: F.grid_sample(x, x[:, :n].movedim(1, -1).tanh(), align_corners=False),
           (3, *[4] * n), BatchAxis(0)) for n in (2, 3)},
    "grid_sample, one grid": (
        lambda x: F.grid_sample(x, torch.zeros(1, 2, 2, 2).expand(B, -1, -1, -1), align_corners=False),
        (3, 4, 4), BatchAxis(0)),
    "nll_loss": (lambda x: F.nll_loss(x, (x[:, 0] > 0).long(), reduction="none"), (4,), BatchAxis(0)),
    "nll_loss2d": (lambda x: F.nll_loss(x, (x[:, 0] > 0).long(), reduction="none"), (4, 2, 2), BatchAxis(0)),
    "multi_margin": (lambda x: F.multi_margin_loss(x, (x[:, 0] > 0).long(), reduction="none"), (4,), BatchAxis(0)),
    "distances": (lambda x: torch.cdist(x, x[:, :2], p=1.0), (5, 4), BatchAxis(0)),
    **{f"fractional_max_pool{n}d": (
           lambda x, n=n: getattr(F, f"fractional_max_pool{n}d")(x, 2, output_size=2), (2, *[4] * n), BatchAxis(0))
       for n in (2, 3)},
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), (4, 3, 3), BatchAxis(0)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), (2, 5, 4), BatchAxis(0)),
    "attention_mask": (
        lambda x: F.scaled_dot_product_attention(x, x, x, torch.zeros(5, 5)), (2, 5, 4), BatchAxis(0)),
    "embedding": (lambda x: F.embedding(x.abs().long() % 3, torch.arange(12.0).view(3, 4)), (5,), BatchAxis(0)),
    "class token": (lambda x: torch.cat((torch.ones(1, 1, 4).expand(x.shape[0], -1, -1), x), 1), (5, 4), BatchAxis(0)),
    "patches": (
        lambda x: F.conv2d(x, torch.ones(3, 2, 2, 2), stride=2).flatten(2).transpose(1, 2), (2, 4, 4), BatchAxis(0)),
    "heads": (lambda x: x.view(B, 5, 2, 2).transpose(1, 2).reshape(B * 2, 5, 2), (5, 4), BatchAxis(0, 1, 2)),
    "chunk": (lambda x: x.chunk(2, 1), (4,), BatchAxis(0)),
    "windows": (
        lambda x: x.view(B, 2, 2, 2, 2, 3).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 3), (4, 4, 3), BatchAxis(0, 1, 4)),
    # Positions that all heads of all samples share, as in DeBERTa.
    "gather at shared positions": (
        lambda x: x.gather(-1, positions(5)[None].expand(B, 5, 5)), (5, 6), BatchAxis(0)),
    "gather at positions shared by heads": (
        lambda x: x.view(B * 2, 5, 6).gather(-1, positions(5)[None].expand(B * 2, 5, 5)), (2, 5, 6),
        BatchAxis(0, 1, 2)),
    "gather at positions of each head": (
        lambda x: x.view(B * 2, 5, 6).gather(
            -1, torch.stack((positions(5), 5 - positions(5))).repeat(B, 1, 1)), (2, 5, 6), BatchAxis(0, 1, 2)),
    "scatter at positions shared by heads": (
        lambda x: x.view(B * 2, 5, 6).scatter_add(-1, positions(5)[None].expand(B * 2, 5, 5), x.view(B * 2, 5, 6)),
        (2, 5, 6), BatchAxis(0, 1, 2)),
    "time first": (lambda x: x.transpose(0, 1), (5, 4), BatchAxis(1)),
    "bernoulli": (lambda x: torch.bernoulli(x.sigmoid().round()), (4,), BatchAxis(0)),
    "multinomial": (lambda x: torch.multinomial(torch.where(x == x, 1.0, 1.0), 2), (4,), BatchAxis(0)),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.5, True), (4,), BatchAxis(0)),
    "dropout": (lambda x: F.dropout(x, 0.5, True), (4,), BatchAxis(0)),
}  # fmt: skip


LOST: dict[str, Callable[[Tensor], Any]] = {
    "attention over the batch": lambda x: F.scaled_dot_product_attention(*[x.transpose(0, 1)[None].contiguous()] * 3),
    "conv over the batch": lambda x: F.conv1d(x.transpose(0, 1), torch.ones(2, B, 1)),
    "norm over the batch": lambda x: F.layer_norm(x.permute(1, 2, 0), (B,)),
    "table from the batch": lambda x: F.embedding(torch.tensor([0, 1]), x[:, 0]),
    "weight from the batch": lambda x: F.conv1d(x, x[:, :, :1].transpose(0, 1).transpose(0, 1)),
    "channels for samples": lambda x: F.fractional_max_pool2d(x, 2, output_size=2),
    "unpooled channels": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "losses added up": lambda x: F.nll_loss(x[:, :, 0], (x[:, 0, 0] > 0).long()),
    "loss of shared scores": lambda x: F.multi_margin_loss(x[:, :, 0].t(), (x[0, :, 0] > 0).long(), reduction="none"),
    "distances of samples": lambda x: torch.cdist(x[:, 0], x[:, 1], p=1.0),
    "overlapping strides": lambda x: x.as_strided((B, 4, 4), (4, 1, 4)),
}


def _written(x: Tensor) -> Tensor:
    y = x.clone()
    y[0] = x[1]
    return y


def _written_turned(x: Tensor) -> Tensor:
    y = torch.zeros(B, B)
    y.t()[:, :4] = x
    return y


def _written_shifted(x: Tensor) -> Tensor:
    y = torch.zeros(B + 1, 4)
    later = y[1:]
    y[:B] = x
    return later * 1


def _written_windows(x: Tensor) -> Tensor:
    y = torch.zeros(4 * B + 4)
    windows = y.unfold(0, 8, 4)
    y[: 4 * B].view(B, 4)[:] = x
    return windows * 1


# What moves samples to other places, in ways that sizes alone do not show.
MOVED: dict[str, Callable[[Tensor], Any]] = {
    "flat roll": lambda x: x.roll(1),
    "shift": lambda x: F.pad(x, (0, 0, 1, -1)),
    "index": lambda x: x.index_select(1, x[:, 0].gt(0).long()),
    "weight": lambda x: F.conv1d(x[:, :, None], x[:4, :, None]),
    "written view": _written,
    "written turned": _written_turned,
    "written shifted": _written_shifted,
    "written windows": _written_windows,
}
