"""How one ATen operator carries the batch axis of its inputs to its outputs.

A rule takes an `OpCall` and returns the axis of the output: a `BatchAxis`, or a `Lost` with the reason where
samples are mixed or the axis cannot be followed. Operators without batch inputs never reach a rule.

An axis says which elements belong to which sample. It does not say that they are independent of other samples:
`x - x.mean(0)` keeps its axis. `verify_isolation` refuses such models.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpquant_compile.errors import RegistryError
from dpquant_compile.sites import BatchAxis

__all__ = ["Axis", "Lost", "OpCall", "has_rule", "output_axis"]


@dataclass(frozen=True)
class Lost:
    """The batch axis cannot be followed from here on."""

    reason: str


Axis = BatchAxis | Lost | None


@dataclass(frozen=True)
class OpCall:
    """One call of an operator: arguments, output, and the axis of each tensor among the arguments."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    axis_of: Callable[[Any], Axis]
    batch: int
    was_contiguous: bool = True  # whether the first argument was contiguous before the call

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)

    @property
    def first(self) -> BatchAxis:
        """The axis of the first argument, or of the first argument that has one."""
        axes = [self.axis_of(value) for value in _tensors(self.args)]
        return next(axis for axis in axes if isinstance(axis, BatchAxis))

    @property
    def source(self) -> Tensor:
        """The tensor to which `first` belongs."""
        return next(value for value in _tensors(self.args) if isinstance(self.axis_of(value), BatchAxis))


Rule = Callable[[OpCall], Axis]
_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register one rule under the names of the ATen operators it serves."""

    def register(function: Rule) -> Rule:
        for name in names:
            if name in _RULES:
                raise RegistryError(f"aten.{name} has a batch rule already")
            _RULES[name] = function
        return function

    return register


def output_axis(func: Any, call: OpCall) -> Axis:
    """The axis of the output of one operator with at least one batch input."""
    axes = [call.axis_of(value) for value in _tensors((call.args, call.kwargs))]
    known = [axis for axis in axes if isinstance(axis, BatchAxis)]
    if not known:
        return next(axis for axis in axes if isinstance(axis, Lost))
    if call.name in _RULES:
        return _RULES[call.name](call)
    if torch.Tag.pointwise in func.tags:
        return _pointwise(call)
    return Lost(f"no rule follows the batch through aten.{call.name}")


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _positive(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def _moved(axis: BatchAxis, dim: int) -> BatchAxis:
    return BatchAxis(dim, axis.outer, axis.inner)


@rule("copy_", "masked_fill_", "lerp_", "expand", "native_dropout", "_to_copy", "index_fill", "fill_", "zero_", "where")
@rule("_prelu_kernel", "bernoulli", "bernoulli_", "normal", "poisson", "rrelu_with_noise", "hardswish")
def _pointwise(call: OpCall) -> Axis:
    """Broadcasting aligns dimensions from the right; all batch inputs must agree on where the batch is."""
    rank, found = call.output.dim(), set()
    for value in _tensors((call.args, call.kwargs)):
        axis = call.axis_of(value)
        if isinstance(axis, BatchAxis):
            found.add(_moved(axis, axis.dim + rank - value.dim()))
    if len(found) > 1:
        return Lost(f"aten.{call.name} combines inputs whose batches lie in different dimensions")
    return found.pop()


@rule("clone", "detach", "alias", "contiguous", "lift_fresh", "rand_like", "randn_like", "randint_like")
@rule("zeros_like", "ones_like", "empty_like", "full_like", "uniform_", "normal_", "exponential_", "random_")
@rule("log_normal_", "cauchy_", "geometric_", "log_sigmoid_forward")
def _same(call: OpCall) -> Axis:
    return call.first


@rule("repeat")
def _repeat(call: OpCall) -> Axis:
    axis, counts = call.first, call.args[1]
    dim = axis.dim + len(counts) - call.source.dim()
    return BatchAxis(dim, counts[dim] * axis.outer, axis.inner)


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy")
def _view(call: OpCall) -> Axis:
    """Row-major order is kept, so counting elements before and after the batch finds it."""
    axis, shape, new = call.first, call.source.shape, call.output.shape
    before = math.prod(shape[: axis.dim]) * axis.outer
    after = axis.inner * math.prod(shape[axis.dim + 1 :])
    for dim, size in enumerate(new):
        left, right = math.prod(new[:dim]), math.prod(new[dim + 1 :])
        if left and right and before % left == 0 and after % right == 0:
            outer, inner = before // left, after // right
            if size == outer * call.batch * inner:
                return BatchAxis(dim, outer, inner)
    return Lost(f"a reshape from {tuple(shape)} to {tuple(new)} splits the batch")


@rule("as_strided", "as_strided_")
def _as_strided(call: OpCall) -> Axis:
    """Pooling restrides its result in place; that is harmless if it was row-major and stays so."""
    sizes, strides = call.argument(1, "size"), call.argument(2, "stride")
    kept = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    row_major = [math.prod(size for size, _ in kept[i + 1 :]) for i in range(len(kept))]
    whole = tuple(sizes) == tuple(call.source.shape) and call.argument(3, "storage_offset") in (None, 0)
    if whole and call.was_contiguous and [stride for _, stride in kept] == row_major:
        return call.first
    return Lost("as_strided may lay samples over each other")


@rule("permute", "permute_copy")
def _permute(call: OpCall) -> Axis:
    order = [_positive(d, call.source.dim()) for d in call.argument(1, "dims")]
    return _moved(call.first, order.index(call.first.dim))


@rule("transpose", "t")
def _transpose(call: OpCall) -> Axis:
    rank = call.source.dim()
    a, b = (_positive(d, rank) for d in (call.argument(1, "dim0", 0), call.argument(2, "dim1", 1)))
    return _moved(call.first, {a: b, b: a}.get(call.first.dim, call.first.dim))


@rule("unsqueeze")
def _unsqueeze(call: OpCall) -> Axis:
    dim = _positive(call.argument(1, "dim"), call.output.dim())
    return _moved(call.first, call.first.dim + (dim <= call.first.dim))


@rule("squeeze")
def _squeeze(call: OpCall) -> Axis:
    rank = call.source.dim()
    asked = call.argument(1, "dim", list(range(rank)))
    dims = [_positive(d, rank) for d in ([asked] if isinstance(asked, int) else asked)]
    gone = sum(1 for d in dims if call.source.shape[d] == 1 and d < call.first.dim)
    return _moved(call.first, call.first.dim - gone)


@rule("select")
def _select(call: OpCall) -> Axis:
    dim = _positive(call.argument(1, "dim"), call.source.dim())
    if dim == call.first.dim:
        return Lost("one sample is picked out of the batch")
    return _moved(call.first, call.first.dim - (dim < call.first.dim))


@rule("constant_pad_nd")
def _pad(call: OpCall) -> Axis:
    pad = call.argument(1, "pad")
    first = 2 * (call.source.dim() - 1 - call.first.dim)  # pairs run from the last dimension to the first
    if any(pad[first : first + 2]):
        return Lost("padding shifts the batch, or adds to it")
    return call.first


@rule("slice", "split", "split_with_sizes", "narrow")
def _keeps_dimensions(call: OpCall) -> Axis:
    """The output has the input's dimensions, and must contain the whole batch."""
    if call.output.shape[call.first.dim] != call.source.shape[call.first.dim]:
        return Lost(f"aten.{call.name} takes a part of the batch, or adds to it")
    return call.first


@rule("unbind")
def _unbind(call: OpCall) -> Axis:
    dim = _positive(call.argument(1, "dim", 0), call.source.dim())
    if dim == call.first.dim:
        return Lost("the batch is unbound into its samples")
    return _moved(call.first, call.first.dim - (dim < call.first.dim))


@rule("cat")
def _cat(call: OpCall) -> Axis:
    dim = _positive(call.argument(1, "dim", 0), call.output.dim())
    axes = {call.axis_of(value) for value in _tensors(call.args)} - {None}
    if len(axes) != 1 or dim == call.first.dim:
        return Lost("a concatenation joins batches, or values whose batches lie in different dimensions")
    return call.first


@rule("stack")
def _stack(call: OpCall) -> Axis:
    dim = _positive(call.argument(1, "dim", 0), call.output.dim())
    axes = {call.axis_of(value) for value in _tensors(call.args)} - {None}
    if len(axes) != 1:
        return Lost("a stack joins values whose batches lie in different dimensions")
    return _moved(call.first, call.first.dim + (dim <= call.first.dim))


@rule("sum", "mean", "amax", "amin", "prod", "var", "std", "any", "all", "argmax", "argmin", "logsumexp")
@rule("var_mean", "std_mean", "max", "min", "median", "linalg_vector_norm", "norm")
def _reduce(call: OpCall) -> Axis:
    rank, axis = call.source.dim(), call.first
    position = 2 if call.name in ("linalg_vector_norm", "norm") else 1
    dims = call.argument(position, "dim")
    dims = list(range(rank)) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    dims = [_positive(d, rank) for d in dims]
    if axis.dim in dims:
        return Lost(f"aten.{call.name} reduces over the batch")
    keep = call.output.dim() == rank
    return axis if keep else _moved(axis, axis.dim - sum(1 for d in dims if d < axis.dim))


@rule("multinomial")
def _multinomial(call: OpCall) -> Axis:
    """Each row of probabilities has its own draws; the draws of one row depend on each other."""
    if call.source.dim() != 2 or call.first.dim != 0:
        return Lost("aten.multinomial draws over the batch")
    return call.first


@rule("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "logcumsumexp")
@rule("glu", "flip", "sort", "topk", "roll")
def _along(call: OpCall) -> Axis:
    position = 2 if call.name in ("topk", "roll") else 1
    default: Any = [] if call.name == "roll" else -1  # without dims, roll runs over the flattened tensor
    dims = call.argument(position, "dims" if call.name in ("flip", "roll") else "dim", default)
    if dims == []:
        return Lost(f"aten.{call.name} runs over the batch")
    dims = [_positive(d, call.source.dim()) for d in (dims if isinstance(dims, list | tuple) else [dims])]
    return Lost(f"aten.{call.name} runs over the batch") if call.first.dim in dims else call.first


@rule("convolution", "_convolution", "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d")
@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d", "im2col")
@rule("native_group_norm", "upsample_nearest2d", "upsample_bilinear2d", "upsample_nearest1d", "upsample_linear1d")
@rule("reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "pixel_shuffle")
@rule("reflection_pad3d", "replication_pad3d", "adaptive_avg_pool1d", "max_pool1d", "upsample_nearest3d", "col2im")
@rule("upsample_trilinear3d", "upsample_bicubic2d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d")
@rule("_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "pixel_unshuffle")
@rule("channel_shuffle", "affine_grid_generator")
def _batch_first(call: OpCall) -> Axis:
    """Operators that treat dimension 0 as a batch, and everything else as one sample."""
    if any(call.axis_of(value) is not None for value in _tensors(call.args[1:])):
        return Lost(f"a parameter of aten.{call.name} depends on the batch")
    axis = call.axis_of(call.args[0])
    if not isinstance(axis, BatchAxis) or axis.dim != 0:
        return Lost(f"aten.{call.name} takes dimension 0 for the batch, but the batch is elsewhere")
    return axis


@rule("max_unpool2d", "max_unpool3d", "fractional_max_pool2d", "fractional_max_pool3d")
@rule("grid_sampler_2d", "grid_sampler_3d")
def _all_batch_first(call: OpCall) -> Axis:
    """Operators on several tensors, all of which have one sample in each row of dimension 0."""
    values = _tensors((call.args, call.kwargs))
    axes, rank = {call.axis_of(value) for value in values} - {None}, values[0].dim()
    axis = next(iter(axes))
    if len(axes) != 1 or not isinstance(axis, BatchAxis) or axis.dim != 0 or rank < _BATCHED_RANK[call.name]:
        return Lost(f"aten.{call.name} takes dimension 0 of all its tensors for the batch, but it is not everywhere")
    return axis


# With fewer dimensions dimension 0 is channels.
_BATCHED_RANK = {
    **dict.fromkeys(("max_unpool2d", "fractional_max_pool2d", "grid_sampler_2d"), 4),
    **dict.fromkeys(("max_unpool3d", "fractional_max_pool3d", "grid_sampler_3d"), 5),
}

# Where each loss has its argument `reduction`, which is 0 for "none".
_ROW_LOSSES = {"nll_loss_forward": 3, "nll_loss2d_forward": 3, "multi_margin_loss": 5}
_LOSSES = {
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"), 2),
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
}


@rule(*_LOSSES)
def _loss(call: OpCall) -> Axis:
    """The loss of each element."""
    if call.argument(_LOSSES[call.name], "reduction", 1) != 0:
        return Lost(f"aten.{call.name} adds up the losses of the batch")
    return _pointwise(call)


@rule(*_ROW_LOSSES)
def _row_loss(call: OpCall) -> Axis:
    """The loss of each row, or of each place of a row; class weights are equal for all."""
    if call.argument(_ROW_LOSSES[call.name], "reduction", 1) != 0:
        return Lost(f"aten.{call.name} adds up the losses of the batch")
    axes = {call.axis_of(value) for value in call.args[:2]} - {None}
    axis = next(iter(axes))
    weighted = any(call.axis_of(value) is not None for value in _tensors(call.args[2:]))
    if len(axes) != 1 or not isinstance(axis, BatchAxis) or axis.dim != 0 or call.source.dim() < 2 or weighted:
        return Lost(f"aten.{call.name} takes dimension 0 of scores and targets for the batch, but it is elsewhere")
    return axis


@rule("_cdist_forward")
def _distances(call: OpCall) -> Axis:
    """Distances between the rows of two matrices in each place of the leading dimensions."""
    axis = _pointwise(replace(call, args=call.args[:2]))
    if isinstance(axis, BatchAxis) and axis.dim >= call.output.dim() - 2:
        return Lost("aten._cdist_forward compares samples with each other")
    return axis


@rule("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
@rule("_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional", "_batch_norm_no_update")
def _batch_norm(call: OpCall) -> Axis:
    # Statistics over the batch mix samples, and verify_isolation refuses that; the axis itself stays.
    return call.first


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def _layer_norm(call: OpCall) -> Axis:
    normalised = len(call.argument(1, "normalized_shape"))
    if call.first.dim >= call.source.dim() - normalised:
        return Lost(f"aten.{call.name} normalises over the batch")
    return call.first


@rule("mm", "addmm", "_int_mm")
def _matmul(call: OpCall) -> Axis:
    left, right = call.args[1:3] if call.name == "addmm" else call.args[:2]
    return _product(call, left, right, rows=0, columns=1)


@rule("bmm", "baddbmm")
def _batched_matmul(call: OpCall) -> Axis:
    left, right = call.args[1:3] if call.name == "baddbmm" else call.args[:2]
    a, b = call.axis_of(left), call.axis_of(right)
    if isinstance(a, BatchAxis) and a.dim == 0 and (b is None or b == a):
        return a
    if a is None and isinstance(b, BatchAxis) and b.dim == 0:
        return b
    return _product(call, left, right, rows=1, columns=2)


def _product(call: OpCall, left: Tensor, right: Tensor, *, rows: int, columns: int) -> Axis:
    a, b = call.axis_of(left), call.axis_of(right)
    if isinstance(a, BatchAxis) and a.dim == rows and b is None:
        return a
    if a is None and isinstance(b, BatchAxis) and b.dim == columns:
        return b
    return Lost(f"aten.{call.name} sums over the batch, or multiplies samples with each other")


@rule("embedding")
def _embedding(call: OpCall) -> Axis:
    if call.axis_of(call.args[0]) is not None:
        return Lost("an embedding table depends on the batch")
    return call.first


@rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")
@rule("_scaled_dot_product_efficient_attention", "_scaled_dot_product_attention_math", "scaled_dot_product_attention")
@rule("_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_cudnn_attention")
def _attention(call: OpCall) -> Axis:
    axes = {call.axis_of(value) for value in call.args[:3]}
    axis = next(iter(axes))
    if len(axes) != 1 or not isinstance(axis, BatchAxis) or axis.dim > 1:
        return Lost("attention mixes samples: queries, keys and values do not share one batch dimension")
    return axis


@rule("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
def _fresh(call: OpCall) -> Axis:
    """A new tensor of any shape; it gets the batch axis when the batch is written into it."""
    return None


@rule("index_select")
def _index_select(call: OpCall) -> Axis:
    dim = _positive(call.argument(1, "dim"), call.source.dim())
    if call.axis_of(call.argument(2, "index")) is not None or dim == call.first.dim:
        return Lost("aten.index_select picks across samples")
    return call.first


@rule("gather", "scatter", "scatter_add")
def _gather(call: OpCall) -> Axis:
    dim = _positive(call.argument(1, "dim"), call.source.dim())
    axes = {call.axis_of(value) for value in _tensors(call.args)} - {None}
    if dim == call.first.dim or len(axes) != 1:
        return Lost(f"aten.{call.name} picks across samples")
    return call.first


def has_rule(func: Any) -> bool:
    """Whether this library knows where an operator has its samples."""
    name = func.overloadpacket.__name__
    return func.namespace == "aten" and (name in _RULES or torch.Tag.pointwise in func.tags)


def known_operators() -> Sequence[str]:
    """Operators that have their own rule."""
    return sorted(_RULES)
