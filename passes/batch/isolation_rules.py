"""Rules of `verify_isolation` for single operators, beyond those of batch_rules.py.

Those rules say where the batch lies. Isolation needs three more things: operators that keep the batch in its place but
mix it (BatchNorm), or mix it in their backward; operators that matter only here (`index`); and which
arguments lie along the batch, where a constant must be equal for all samples.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpquant_compile.passes.batch.batch_rules import Axis, Lost, OpCall, output_axis
from dpquant_compile.passes.batch.own_rules import own_axis, own_rule
from dpquant_compile.sites import BatchAxis

__all__ = [
    "BATCH_NORMS",
    "BY_SHAPE",
    "DRAWN_APART",
    "DRAWS",
    "FACTORIES",
    "FILLS",
    "SHAPES",
    "Rows",
    "Shared",
    "is_count",
    "keeps_alike",
    "repeated",
    "strict_axis",
    "tensors",
    "written",
]


@dataclass(frozen=True)
class Shared:
    """A constant that is equal for all samples: along `axis`, or everywhere if that is None."""

    axis: BatchAxis | None = None


@dataclass(frozen=True)
class Rows:
    """A constant that holds the index of the sample at each place of `axis`."""

    axis: BatchAxis


StateOf = Callable[[Any], Any]

BATCH_NORMS = {
    *"native_batch_norm cudnn_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional".split(),
    *"_batch_norm_with_update _native_batch_norm_legit_no_training _batch_norm_no_update".split(),
}
# Operators that make a new tensor from only the shape of their argument; below, those without a tensor argument.
BY_SHAPE = {f"{kind}_like" for kind in "zeros ones empty full rand randn randint".split()} | {
    f"new_{kind}" for kind in "zeros ones empty full empty_strided".split()
}
FACTORIES = {*"zeros ones full empty empty_strided empty_permuted scalar_tensor rand randn randint".split()}
# Overwrite the whole tensor, with one number or with independent draws.
FILLS = {*"fill_ zero_ uniform_ normal_ bernoulli_ exponential_ random_ log_normal_ cauchy_ geometric_".split()}
# Random operators that draw every element independently.
DRAWN_APART = {
    *"rand randn randint rand_like randn_like randint_like normal poisson bernoulli native_dropout".split(),
    *"rrelu_with_noise".split(),
    *(FILLS - {"fill_", "zero_"}),
}
# Operators that only rearrange elements, so that a tensor with equal elements keeps them.
SHAPES = {
    *"view _unsafe_view reshape _reshape_alias view_copy permute permute_copy transpose t unsqueeze squeeze".split(),
    *"select slice split split_with_sizes unsafe_split narrow unbind expand repeat as_strided".split(),
    *"clone detach alias contiguous lift_fresh _to_copy".split(),
}
_ALIASES = {"scatter_": "scatter", "scatter_add_": "scatter_add", "unsafe_split": "split"}
# Arguments after the first are weights: the rules ensure that no sample has its own.
_NORMS = {"native_layer_norm", "_fused_rms_norm", "rms_norm", "native_group_norm"}
_WEIGHTED = {*"convolution _convolution mm _int_mm mv embedding index_select".split(), *_NORMS}


def tensors(tree: Any) -> list[Tensor]:
    """All tensors in arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def strict_axis(func: Any, call: OpCall, state_of: StateOf) -> Axis:
    """The batch axis of the output if samples stay apart, also in the backward; a `Lost` if they may not."""
    if own_rule(func) is not None:
        return _by_own_rule(func, call, state_of)
    if func.namespace != "aten":
        return Lost(f"no rule follows the batch through {func}")  # its name and tags prove nothing
    call = replace(call, name=_ALIASES.get(call.name, call.name))
    axis = _STRICT[call.name](call, state_of) if call.name in _STRICT else output_axis(func, call)
    if not isinstance(axis, BatchAxis):
        return axis
    for value, dim in _beside(call, axis):
        own, state = call.axis_of(value), state_of(value)
        if call.name in _OWN_PLACE and own is not None and own != replace(axis, dim=dim):
            return Lost("an argument carries the batch in another place than the result")
        alone = value.dim() > 0 and call.name in _NO_BROADCAST  # a single row meets only the first sample
        if own is None and (state is None or isinstance(state, Rows)) and dim >= 0 and (alone or value.shape[dim] != 1):
            return Lost("a constant has a row of its own for each place in the batch")
    if call.name == "native_group_norm" and tuple(call.args[3:5]) != tuple(call.args[0].shape[:2]):
        return Lost("aten.native_group_norm is told other sizes than its input has")
    beyond = tensors((call.args[1:], call.kwargs)) if call.name in _NORMS else []
    if any(call.axis_of(value) is not None for value in beyond):
        return Lost("a weight depends on the batch")
    return axis


def _by_own_rule(func: Any, call: OpCall, state_of: StateOf) -> Axis:
    """The axis that a user's rule claims. Which dimension of a constant meets the samples is not known here."""
    for value in tensors((call.args, call.kwargs)):
        rows = any(size > 0 and size % call.batch == 0 for size in value.shape)
        if rows and call.axis_of(value) is None and not isinstance(state_of(value), Shared):
            return Lost("a constant has a row of its own for each place in the batch")
    return own_axis(func, call)


def _beside(call: OpCall, axis: BatchAxis) -> Iterator[tuple[Tensor, int]]:
    """The arguments that have a dimension aligned with the output's batch dimension, and which dimension it is."""
    rank, values = call.output.dim(), tensors((call.args, call.kwargs))
    if call.name in BATCH_NORMS:
        yield from ((value, 0) for value in values[1:] if axis.dim == 1)
    elif call.name == "index":
        used, start, width = _indices(call)
        own = call.axis_of(call.args[0])
        for dim, index in used:
            if not isinstance(own, BatchAxis) or dim != own.dim:
                yield index, axis.dim - start - width + index.dim()
    elif call.name in _SAMPLED:
        yield from ((value, 0) for value in values)
    elif call.name == "stack":
        dim = call.argument(1, "dim", 0) % rank
        yield from ((value, axis.dim - (dim < axis.dim)) for value in values)
    elif call.name not in _WEIGHTED:
        if call.name == "addmm" or (call.name == "baddbmm" and axis.dim > 0):
            values = values[:1]
        elif call.name == "bmm" and axis.dim > 0:
            values = []
        elif call.name in _ATTENTION:
            values = values[3:]
        elif call.name == "copy_":
            values = values[1:]  # the old contents are overwritten
        yield from ((value, axis.dim + value.dim() - rank) for value in values)


def repeated(call: OpCall, certain: bool) -> Shared | None:
    """The state of an expand or a repeat of a constant: equal along the dimension that it repeats once per sample.

    One row that is expanded to several for each sample, as positions are to B·heads, is equal for all of them, however
    they are told apart. That counts only if `certain`: if no size is a multiple of the batch's by chance.
    """
    (source, counts), rank = call.args[:2], call.output.dim()
    shape = (*[1] * (rank - source.dim()), *source.shape)
    for dim, size in enumerate(shape):
        if call.name == "repeat" and counts[dim] == call.batch:
            return Shared(BatchAxis(dim, 1, size))
        if call.name == "expand" and size == 1:
            rows, rest = divmod(call.output.shape[dim], call.batch)
            if rest == 0 and (rows == 1 or (certain and rows > 1)):
                return Shared(BatchAxis(dim, 1, rows))
    return None


def keeps_alike(func: Any, name: str) -> bool:
    """Whether an operator maps arguments with equal elements to a result with equal elements."""
    return name in SHAPES or (func.namespace == "aten" and torch.Tag.pointwise in func.tags)


def is_count(call: OpCall) -> bool:
    """Whether this is arange(B)."""
    return call.name == "arange" and call.args in ((call.batch,), (0, call.batch), (0, call.batch, 1))


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operator writes into, even if its schema does not say so."""
    schema, name = func._schema.arguments, func.overloadpacket.__name__
    given = [*zip(schema, args, strict=False), *((a, kwargs[a.name]) for a in schema if a.name in kwargs)]
    declared = [value for argument, value in given if argument.alias_info is not None and argument.alias_info.is_write]
    statistics = args[3:5] if name in BATCH_NORMS and _trains(name, args) else ()
    return list({id(value): value for value in tensors((declared, statistics))}.values())


# Rules


def _trains(name: str, args: Any) -> bool:
    if name in ("_native_batch_norm_legit_no_training", "_batch_norm_no_update"):
        return False
    return name == "_batch_norm_with_update" or next(value for value in args if isinstance(value, bool))


def _batch_norm(call: OpCall, state_of: StateOf) -> Axis:
    axis = call.axis_of(call.args[0])
    if not isinstance(axis, BatchAxis):
        return Lost("a weight or a statistic depends on the batch")
    if axis.dim == 1:
        return axis  # each channel belongs to one sample, as instance_norm lays them out: [1, B·C, …]
    if any(call.axis_of(value) is not None for value in tensors(call.args[1:])):
        return Lost("a weight or a statistic depends on the batch")
    return Lost("BatchNorm in training mode normalises over the batch") if _trains(call.name, call.args) else axis


def _embedding(call: OpCall, state_of: StateOf) -> Axis:
    if call.argument(3, "scale_grad_by_freq", False):
        return Lost("scale_grad_by_freq divides gradients by how often a word is in the batch")
    if call.axis_of(call.args[0]) is not None:
        return Lost("an embedding table depends on the batch")
    return call.axis_of(call.args[1])


def _index_fill(call: OpCall, state_of: StateOf) -> Axis:
    axis = call.axis_of(call.args[0])
    if not isinstance(axis, BatchAxis) or call.args[1] % call.args[0].dim() == axis.dim:
        return Lost("aten.index_fill fills chosen samples")
    return Lost("the indices depend on the batch") if call.axis_of(call.args[2]) is not None else axis


def _matrix_vector(call: OpCall, state_of: StateOf) -> Axis:
    axis = call.axis_of(call.args[0])
    if not isinstance(axis, BatchAxis) or axis.dim != 0 or call.axis_of(call.args[1]) is not None:
        return Lost("aten.mv sums over the batch, or multiplies samples with each other")
    return axis


def _indices(call: OpCall) -> tuple[list[tuple[int, Tensor]], int, int]:
    """The indexed dimensions with their indices; the position and number of their common dimensions in the output."""
    used = [(dim, index) for dim, index in enumerate(call.args[1]) if index is not None]
    dims = [dim for dim, _ in used]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    return used, dims[0] if adjacent else 0, max(index.dim() for _, index in used)


def _index(call: OpCall, state_of: StateOf) -> Axis:
    used, start, width = _indices(call)
    own, dims, found = call.axis_of(call.args[0]), [dim for dim, _ in used], set()
    for dim, index in used:
        axis, state = call.axis_of(index), state_of(index)
        if isinstance(own, BatchAxis) and dim == own.dim:
            if not isinstance(state, Rows) or (own.outer, own.inner) != (1, 1):
                return Lost("aten.index picks samples of the batch")
            axis = state.axis
        if isinstance(axis, BatchAxis):
            found.add(replace(axis, dim=start + width - index.dim() + axis.dim))
    if isinstance(own, BatchAxis) and own.dim not in dims:
        before = sum(1 for dim in dims if dim < own.dim)
        shift = width if start <= own.dim and (before or start == 0) else 0
        found.add(replace(own, dim=own.dim - before + shift))
        if len(found) > 1 or any(call.axis_of(index) is not None for _, index in used):
            return Lost("aten.index picks from one sample what another asks for")
    return found.pop() if len(found) == 1 else Lost("aten.index combines batches that lie in different dimensions")


def _attention(call: OpCall, state_of: StateOf) -> Axis:
    axes = {call.axis_of(value) for value in call.args[:3]}
    axis = next(iter(axes))
    if len(axes) != 1 or not isinstance(axis, BatchAxis) or axis.dim >= call.args[0].dim() - 2:
        return Lost("attention mixes samples: queries, keys and values do not share one batch dimension")
    return axis


_ATTENTION = {
    *"_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention".split(),
    *"_scaled_dot_product_efficient_attention _scaled_dot_product_attention_math scaled_dot_product_attention".split(),
    *"_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_cudnn_attention".split(),
}
# Random operators that draw at least the rows of a batch independently.
DRAWS = DRAWN_APART | _ATTENTION | {"multinomial"}
_SAMPLED = {"fractional_max_pool2d", "fractional_max_pool3d"}  # with [B, C, …], where to cut each channel
_NO_BROADCAST = {"max_unpool2d", "max_unpool3d", "grid_sampler_2d", "grid_sampler_3d", *_SAMPLED} | {
    "gather",
    "scatter",
    "scatter_add",
}
_OWN_PLACE = BATCH_NORMS | _ATTENTION | {"addmm", "baddbmm"}
_STRICT: dict[str, Callable[[OpCall, StateOf], Axis]] = {
    **dict.fromkeys(BATCH_NORMS, _batch_norm),
    **dict.fromkeys(_ATTENTION, _attention),
    "embedding": _embedding,
    "index_fill": _index_fill,
    "index": _index,
    "mv": _matrix_vector,
}
