"""Gradient rules: the per-sample gradients that one use gives one constant, in the cheapest form for its operator.

A `Piece` gives the squared norm of each sample's gradient and their weighted sum. Where several pieces add up to the
gradient of one parameter, it can also give the gradients themselves. Each rule makes the piece of one kind of use; an
operator without a rule goes through `torch.func.vmap` of its vector-Jacobian product.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from dpquant_compile.backends.ops.group_norm import can_normalise
from dpquant_compile.backends.ops.site import site_arguments
from dpquant_compile.backends.reference.group_norm import lies_by_pixel, normalised_groups
from dpquant_compile.backends.reference.per_sample import as_weight, squares, wide
from dpquant_compile.backends.registry import SiteCall
from dpquant_compile.errors import PerSampleGradientError, RegistryError
from dpquant_compile.numerics.quantize import to_samples
from dpquant_compile.passes.batch.own_rules import own_rule
from dpquant_compile.passes.canonical.canonicalize import CONVS
from dpquant_compile.passes.fx_utils import op_name
from dpquant_compile.privacy.clipping.parameter_uses import Use, axis_of
from dpquant_compile.sites import BatchAxis

__all__ = [
    "DensePiece",
    "EmbeddingPiece",
    "Piece",
    "SitePiece",
    "UseValues",
    "looked_up",
    "make_piece",
    "piece_kind",
    "pooled_norms",
]


class Piece(Protocol):
    """Per-sample gradients of one constant."""

    def norms(self) -> Tensor:
        """‖Gᵢ‖² [B]; never smaller than the norm of what `weighted` adds for a sample."""

    def weighted(self, factors: Tensor) -> Tensor:
        """Σᵢ factorᵢ Gᵢ; samples whose factor is NaN are left out."""

    def grads(self) -> Tensor:
        """G [B, *constant]."""


@dataclass(frozen=True)
class UseValues:
    """The tensors of one use, while the program is traced: arguments by name, the constant, the output's gradient.

    operand  codes and unit of a site's input; None if the use is not a site
    """

    arguments: Mapping[str, Any]
    constant: Tensor
    grad: Tensor
    batch: int
    table: tuple[Tensor, Tensor, Tensor]
    static: SiteCall | None
    method: str
    operand: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class DensePiece:
    """Per-sample gradients in memory: biases, norm layers, small weights, and operators without a rule."""

    values: Tensor

    def norms(self) -> Tensor:
        return self._rows().square().sum(1)

    def weighted(self, factors: Tensor) -> Tensor:
        out = factors.isnan()
        rows = self._rows().masked_fill(out[:, None], 0.0)
        scale = factors.masked_fill(out, 0.0).to(rows.dtype)
        return (scale[None] @ rows).reshape(self.values.shape[1:])

    def grads(self) -> Tensor:
        return self.values

    def _rows(self) -> Tensor:
        return self.values.reshape(self.values.shape[0], math.prod(self.values.shape[1:]))


@dataclass(frozen=True)
class KeptPiece(DensePiece):
    """Per-sample gradients in memory of the weight of a conv or a linear, by tap: [B, N, taps · C]."""

    shape: tuple[int, ...]

    def weighted(self, factors: Tensor) -> Tensor:
        return as_weight(super().weighted(factors), self.shape)

    def grads(self) -> Tensor:
        return as_weight(self.values, self.shape)


@dataclass(frozen=True)
class SitePiece:
    """The weight of a conv or a linear, from its input and output gradient, each exact and rounded."""

    x: tuple[Tensor, Tensor | None, Tensor | None]
    grad: tuple[Tensor, Tensor | None, Tensor | None]
    weight: Tensor
    table: tuple[Tensor, Tensor, Tensor]
    static: SiteCall
    method: str

    def norms(self) -> Tensor:
        norms: Tensor = torch.ops.dpquant.sample_norms(method=self.method, **self._arguments())
        return norms

    def weighted(self, factors: Tensor) -> Tensor:
        total: Tensor = torch.ops.dpquant.weighted_grad(factors=factors, **self._arguments())
        return total

    def grads(self) -> Tensor:
        return self.kept().grads()

    def kept(self) -> KeptPiece:
        """The gradients themselves."""
        grads: Tensor = torch.ops.dpquant.sample_grads(**self._arguments())
        return KeptPiece(grads, tuple(self.weight.shape))

    def factors(self) -> tuple[Tensor, Tensor]:
        """D [B, T, N] and U [B, T, K]."""
        left, right = torch.ops.dpquant.sample_factors(**self._arguments())
        return left, right

    def embedding_products(self, tokens: Tensor, rows: Tensor, turned: bool) -> tuple[Tensor, Tensor]:
        """Inner products with the gradients of an embedding, and Σₜ ‖dₜ‖‖uₜ‖, both [B]; see the operator."""
        given = {"tokens": tokens, "rows": rows, "turned": turned}
        inner, largest = torch.ops.dpquant.embedding_products(**given, **self._arguments())
        return inner, largest

    def _arguments(self) -> dict[str, Any]:
        own = dict(zip(("x", "codes", "unit"), self.x, strict=True))
        own |= zip(("grad", "grad_codes", "grad_unit"), self.grad, strict=True)
        return {**own, "weight": self.weight, **site_arguments(self.table, self.static)}


@dataclass(frozen=True)
class EmbeddingPiece:
    """An embedding table, of which each sample uses some rows: tokens [B, T], gradients [B, T, E]."""

    tokens: Tensor
    grad: Tensor
    rows: int

    def norms(self) -> Tensor:
        return pooled_norms([(self, False)])

    def weighted(self, factors: Tensor) -> Tensor:
        return self.added(self.grad.new_zeros((self.rows, self.grad.shape[-1])), factors)

    def added(self, total: Tensor, factors: Tensor) -> Tensor:
        """`total` plus the weighted sum, of which only the rows that are looked up are not zero."""
        out = factors.isnan()
        scale = factors.masked_fill(out, 0.0).to(self.grad.dtype)
        grad = self.grad.masked_fill(out[:, None, None], 0.0) * scale[:, None, None]
        return total.index_add(0, self.tokens.flatten(), grad.flatten(0, 1))

    def grads(self) -> Tensor:
        index = self.tokens[..., None].expand_as(self.grad)
        table = self.grad.new_zeros((self.grad.shape[0], self.rows, self.grad.shape[-1]))
        return table.scatter_add(1, index, self.grad)


def looked_up(piece: Piece, indices: Tensor, table: Tensor) -> EmbeddingPiece:
    """The piece of a table, from that of its rows at `indices`, which are the same for all samples."""
    grads = piece.grads()
    return EmbeddingPiece(
        indices.flatten().expand(grads.shape[0], -1),
        grads.reshape(grads.shape[0], -1, table.shape[1]),
        table.shape[0],
    )


def pooled_norms(pieces: Sequence[tuple[SitePiece | EmbeddingPiece, bool]]) -> Tensor:
    """Squared norms of the sum of several pieces of one parameter: each norm, and the products between all pairs.

    With each piece, whether it is of the transposed parameter. An embedding is a linear whose inputs are unit vectors,
    so products with it are a look-up. Only pairs of sites are multiplied from copies of their operands: the output
    gradients of a head over a whole vocabulary, tied to an embedding, are as large as all else together.

    Guarantee: never smaller than the norm of what the pieces' `weighted` add up to, as for one piece. A site's norm
    makes up for its own rounding; what the table and the products between pairs may be off by is added.
    """
    sites = [(piece, turned) for piece, turned in pieces if isinstance(piece, SitePiece)]
    tables = [piece for piece, _ in pieces if isinstance(piece, EmbeddingPiece)]
    terms, sizes, errors = [piece.norms() for piece, _ in sites], list[Tensor](), list[Tensor]()
    if tables:
        tokens, grad = (torch.cat(parts, 1) for parts in zip(*((t.tokens, t.grad) for t in tables), strict=True))
        equal = (tokens[:, :, None] == tokens[:, None, :]).to(grad.dtype)
        terms.append((equal * (grad @ grad.transpose(1, 2))).sum((1, 2)))
        sizes.append(squares(grad).sqrt().sum(1))
        errors.append(sizes[0].square())
        for piece, turned in sites:
            inner, size = piece.embedding_products(tokens, grad, turned)
            terms.append(2 * inner)
            sizes.append(size)
    if len(sites) > 1:
        parts = [piece.factors()[:: -1 if turned else 1] for piece, turned in sites]
        terms += [
            2 * ((a[0] @ b[0].transpose(1, 2)) * (a[1] @ b[1].transpose(1, 2))).sum((1, 2))
            for a, b in itertools.combinations(parts, 2)
        ]
        sizes += [] if tables else [(squares(a[0]).sqrt() * squares(a[1]).sqrt()).sum(1) for a in parts]
    errors += [2 * a * b for a, b in itertools.combinations(sizes, 2)]
    total = sum(terms[1:], terms[0]).clamp_min(0.0)
    return total + 16 * torch.finfo(total.dtype).eps * sum(errors, torch.zeros_like(total))


# Rules

Rule = Callable[[Use, UseValues], Piece]
_RULES: dict[tuple[Any, str], tuple[str, Rule]] = {}


def _rule(name: str, targets: Sequence[Any], *slots: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for key in ((target, slot) for target in targets for slot in slots):
            if key in _RULES:
                raise RegistryError(f"{key} has a rule for per-sample gradients already")
            _RULES[key] = (name, function)
        return function

    return register


def piece_kind(use: Use) -> str:
    """How the gradients of a use are split by sample: the name of a rule, or "vmap"."""
    return _rule_of(use)[0]


def make_piece(use: Use, values: UseValues) -> Piece:
    """The piece of one use."""
    return _rule_of(use)[1](use, values)


def _rule_of(use: Use) -> tuple[str, Rule]:
    name, rule = _RULES.get((use.node.target, use.slots[0] if len(use.slots) == 1 else ""), ("vmap", _by_vmap))
    if "expanded_batch" in use.node.meta and op_name(use.node) in _EXPANDS:
        return "expand", _expanded
    return name, rule


_EXPANDS = ("expand", "expand_as", "broadcast_to", "repeat", "tile")


@_rule("book-keeping", (*CONVS, F.linear), "weight")
def _product(use: Use, values: UseValues) -> Piece:
    assert values.static is not None
    codes: tuple[Any, Any] = (None, None)
    if values.operand is not None:
        rest = site_arguments(values.table, values.static)
        codes = torch.ops.dpquant.round_operand(x=values.grad, role="grad_output", **rest)
    x = (values.arguments["input"], *(values.operand or (None, None)))
    piece = SitePiece(x, (values.grad, *codes), values.constant, values.table, values.static, values.method)
    return piece.kept() if values.method == "kept" else piece


@_rule("sum", (*CONVS, F.linear), "bias")
def _bias(use: Use, values: UseValues) -> Piece:
    features = 1 if use.node.target in CONVS else values.grad.dim() - 1
    return DensePiece(_sum_places(wide(values.grad), _axis(use.node), [features]))


@_rule("norm", (F.group_norm, F.layer_norm, F.rms_norm, F.instance_norm), "weight", "bias")
def _norm(use: Use, values: UseValues) -> Piece:
    if use.node.target is F.instance_norm and not values.arguments["use_input_stats"]:
        return _by_vmap(use, values)  # with running statistics it is a fixed map
    args, grad, node = values.arguments, wide(values.grad), use.node
    if node.target is F.group_norm and can_normalise(args["input"], args["weight"], args["bias"]):
        # The compiler merges both operators with those of forward, and of the gradient of the input.
        x, weight = args["input"], args["weight"]
        norm = torch.ops.dpquant.group_norm(x, None, weight, args["bias"], args["num_groups"], args["eps"], False)
        found = torch.ops.dpquant.group_norm_grad(values.grad, None, x, norm[1], norm[2], weight, False)
        return DensePiece(_sum_places(found[1 if use.slots == ("weight",) else 2], _axis(node), [1]))
    x = wide(args["input"])
    if node.target in (F.group_norm, F.instance_norm):
        features = [1]
    else:
        features = list(range(x.dim() - len(args["normalized_shape"]), x.dim()))
    if use.slots == ("weight",):
        grad = grad * _normalised(node.target, args, x)
    return DensePiece(_sum_places(grad, _axis(node), features))


def _normalised(target: Any, args: Mapping[str, Any], x: Tensor) -> Tensor:
    """The output of a norm layer without its affine part; the compiler merges it with the forward's computation."""
    if target is F.group_norm and lies_by_pixel(x):
        return normalised_groups(x.detach(), args["num_groups"], args["eps"])
    shape = args["num_groups"] if target is F.group_norm else args.get("normalized_shape")
    given = () if target is F.instance_norm else (shape,)
    result = target(x.detach(), *given, eps=args["eps"])
    assert isinstance(result, Tensor)
    return result


@_rule("look-up", (F.embedding,), "weight")
def _embedding(use: Use, values: UseValues) -> Piece:
    args = values.arguments
    for option in ("max_norm", "scale_grad_by_freq"):
        if args.get(option):
            raise PerSampleGradientError(
                f"parameter {use.params[0]!r}: {use} has {option}={args[option]!r}, which "
                "depends on the whole batch. Fix: leave it out"
            )
    table, padding = values.constant, args.get("padding_idx")
    axis = _axis(use.node)
    grad = to_samples(wide(values.grad), axis).reshape(values.batch, -1, table.shape[1])
    given = next(value for value in use.node.all_input_nodes if value is not use.constant)
    tokens = to_samples(args["input"], _axis(given)).reshape(values.batch, -1)
    if padding is not None:
        grad = grad.masked_fill((tokens == padding % table.shape[0])[..., None], 0.0)
    return EmbeddingPiece(tokens, grad, table.shape[0])


def _expanded(use: Use, values: UseValues) -> Piece:
    """A constant that is copied to rows, one or more per sample."""
    grad = _single_rows(wide(values.grad), _axis(use.node))
    shape, name = values.constant.shape, op_name(use.node)
    lead = grad.dim() - 1 - len(shape)
    fits = lead >= 0 and all(n in (1, m) for n, m in zip(shape, grad.shape[1 + lead :], strict=True))
    repeats = name in ("repeat", "tile") and any(n != m for n, m in zip(shape, grad.shape[1 + lead :], strict=True))
    if not fits or repeats:
        raise _unknown(use, f"it makes {tuple(grad.shape[1:])} per sample of {tuple(shape)}")
    summed = grad.sum([1 + d for d in range(lead)]) if lead else grad
    spread = [1 + d for d, n in enumerate(shape) if n == 1 and summed.shape[1 + d] != 1]
    return DensePiece(summed.sum(spread, keepdim=True) if spread else summed)


def _by_vmap(use: Use, values: UseValues) -> Piece:
    """Any operator: the vector-Jacobian product of a call with one sample, by vmap or, if it is the user's, a loop."""
    node, constant = use.node, values.constant
    rows: dict[fx.Node, Tensor] = {}
    by_node = {source: values.arguments[f"node:{source.name}"] for source in node.all_input_nodes}
    for source, value in by_node.items():
        axis = axis_of(source)
        if isinstance(value, Tensor) and axis is not None:
            rows[source] = _single_rows(value, axis)
    if not rows:
        raise _unknown(use, "none of its arguments has rows")
    order = list(rows)

    def run(value: Tensor, given: Sequence[Tensor]) -> Tensor:
        own = dict(zip(order, given, strict=True))

        def read(source: fx.Node) -> Any:
            return value if source is use.constant else own.get(source, by_node[source])

        args, kwargs = fx.map_arg(node.args, read), fx.map_arg(node.kwargs, read)
        if node.op == "call_method":
            result: Tensor = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        return result

    def one(grad: Tensor, *given: Tensor) -> Tensor:
        (gradient,) = torch.func.vjp(lambda value: run(value, given), constant)[1](grad)
        assert isinstance(gradient, Tensor)
        return gradient

    def alone(grad: Tensor, *given: Tensor) -> Tensor:
        value = constant.detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(run(value, given), value, grad, materialize_grads=True)
        return gradient

    grad = _single_rows(values.grad, _axis(node))
    try:
        if isinstance(node.target, torch._ops.OpOverload) and own_rule(node.target) is not None:
            # torch.func does not differentiate operators with register_autograd, so the program holds a loop.
            grads = torch.stack([alone(*(value[i] for value in (grad, *rows.values()))) for i in range(len(grad))])
        else:
            grads = torch.func.vmap(one)(grad, *rows.values())
    except PerSampleGradientError:
        raise
    except Exception as error:  # vmap raises many types for operators it does not support
        raise _unknown(use, (str(error).strip().splitlines() or [type(error).__name__])[0]) from error
    return DensePiece(wide(grads))


def _unknown(use: Use, reason: str) -> PerSampleGradientError:
    return PerSampleGradientError(
        f"parameter {use.params[0]!r}: there is no rule for its per-sample gradient in {use}, and the generic way "
        f"fails: {reason}. Fix: write that line with operators of the support matrix, or freeze the parameter by "
        "requires_grad_(False)"
    )


def _axis(node: fx.Node) -> BatchAxis:
    axis = axis_of(node)
    assert axis is not None
    return axis


def _single_rows(value: Tensor, axis: BatchAxis) -> Tensor:
    """Reshape to [B, *shape of a batch of one]."""
    dim = axis.dim % value.dim()
    inside = (axis.outer, value.shape[dim] // (axis.outer * axis.inner), axis.inner)
    split = value.reshape(*value.shape[:dim], *inside, *value.shape[dim + 1 :])
    return split.movedim(dim + 1, 0).flatten(dim + 1, dim + 2)


def _sum_places(grad: Tensor, axis: BatchAxis, features: Sequence[int]) -> Tensor:
    """[B, *features]: the sum over all other dimensions of each sample."""
    rows = _single_rows(grad, axis)
    others = [d + 1 for d in range(grad.dim()) if d not in features]
    return rows.sum(others) if others else rows
