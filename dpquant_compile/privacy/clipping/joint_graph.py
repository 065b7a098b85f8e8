"""The computation of a private program on tensors: forward, backward, norms, clip factors and weighted sums."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from dpquant_compile.backends.ops.group_norm import can_normalise
from dpquant_compile.backends.ops.site import site_arguments
from dpquant_compile.backends.reference.group_norm import group_norm, lies_by_pixel
from dpquant_compile.backends.reference.per_sample import choose_method, wide
from dpquant_compile.backends.registry import SiteCall
from dpquant_compile.backends.site_args import signature_of
from dpquant_compile.errors import PerSampleGradientError
from dpquant_compile.numerics.recipe import Recipe
from dpquant_compile.passes.canonical.canonicalize import CONVS
from dpquant_compile.passes.canonical.rewrite_products import stored_weight
from dpquant_compile.passes.fx_utils import draws_random, node_source, op_name, read_attribute
from dpquant_compile.passes.precision.insert_switches import call_at
from dpquant_compile.privacy.clipping.bounds import Clipping
from dpquant_compile.privacy.clipping.grad_rules import (
    DensePiece,
    EmbeddingPiece,
    Piece,
    SitePiece,
    UseValues,
    looked_up,
    make_piece,
    piece_kind,
    pooled_norms,
)
from dpquant_compile.privacy.clipping.parameter_uses import Use, Uses, axis_of, named_arguments
from dpquant_compile.sites import ConvGeometry

__all__ = ["Inputs", "JointSpec", "Tracing", "packed_key"]


def packed_key(node: fx.Node, row: int | None) -> str | None:
    """Key of the packed weight of a site; None for a weight that forward computes.

    Sites of different geometry may pack the same weight differently.
    """
    held, _ = stored_weight(node.args[1])
    return f"{row}:{held.target}" if isinstance(held, fx.Node) and held.op == "get_attr" else None


# Limit in bytes on the per-sample gradients of one parameter, where they must be in memory.
_LARGEST = 1 << 30


@dataclass(frozen=True)
class Inputs:
    """The inputs of one run of a program, beside the model's own tensors.

    args      one value per placeholder, padded to the program's batch
    packed    weights in the form that this step's low-precision products take, by `packed_key`
    table     policy, keys, sample ids
    bounds    clipping bounds; `live` [B] tells samples from padding
    """

    args: Sequence[Any]
    packed: Mapping[str, Tensor]
    table: tuple[Tensor, Tensor, Tensor]
    bounds: Tensor
    live: Tensor


@dataclass(frozen=True)
class JointSpec:
    """Describes a private program: the graph, its uses, its clipping, and how each site is called."""

    base: fx.GraphModule
    uses: Uses
    clipping: Clipping
    order: tuple[str, ...]
    places: tuple[int, ...]
    rows: Mapping[str, int]
    recipe: str
    batch: int

    @cached_property
    def attributes(self) -> tuple[str, ...]:
        """The model's tensors that the program reads, by the targets of their get_attr nodes."""
        targets = dict.fromkeys(str(node.target) for node in self.base.graph.find_nodes(op="get_attr"))
        return tuple(target for target in targets if isinstance(read_attribute(self.base, target), Tensor))

    @cached_property
    def packed_weights(self) -> tuple[str, ...]:
        """The keys of the packed weights that the program is given."""
        sites = (node for node in self.base.graph.nodes if self.row(node) is not None)
        return tuple(dict.fromkeys(key for node in sites if (key := self.packed(node)) is not None))

    def flat(self, inputs: Inputs) -> list[Any]:
        """The tensors of a run in the order of the program's inputs; see `flat_names`."""
        read = [read_attribute(self.base, target).detach() for target in self.attributes]
        packed = [inputs.packed[key] for key in self.packed_weights]
        leaves = [leaf for leaf in tree_leaves(list(inputs.args)) if isinstance(leaf, Tensor)]
        return [*read, *packed, *inputs.table, inputs.bounds, inputs.live, *leaves]

    @property
    def flat_names(self) -> tuple[str, ...]:
        """Names of the first tensors of `flat`; the tensors of the batch follow them."""
        packed = (f"packed {key.partition(':')[2]}" for key in self.packed_weights)
        return (*self.attributes, *packed, "policy", "keys", "samples", "bounds", "live")

    def packed(self, node: fx.Node) -> str | None:
        """The key of a site's packed weight; None for a weight that forward computes."""
        return packed_key(node, self.row(node))

    def row(self, node: fx.Node) -> int | None:
        """The row of a site in the link table; None for other nodes."""
        return self.rows.get(node.meta["site"].name) if "site" in node.meta else None

    def static(self, node: fx.Node) -> SiteCall | None:
        """The static arguments of a conv or a linear; None where its operators cannot be used."""
        row = self.row(node)
        if row is not None:
            return call_at(node, row, self.recipe)
        if node.target not in CONVS and node.target is not F.linear:
            return None
        x = node.args[0]
        axis, output = (axis_of(x) if isinstance(x, fx.Node) else None), axis_of(node)
        if axis is None or output is None:
            return None
        geometry = None
        if node.target in CONVS:
            stride, padding, dilation, groups = node.args[3:]
            if isinstance(padding, str):
                padding = self._padding(node, padding)
                if padding is None:
                    return None
            geometry = ConvGeometry(stride, padding, dilation, groups)  # type: ignore[arg-type]
        op = "linear" if geometry is None else f"conv{CONVS.index(node.target) + 1}d"
        return SiteCall(op, Recipe.parse(self.recipe), axis, output, geometry, site=-1, call=0)

    def _padding(self, node: fx.Node, word: str) -> tuple[int, ...] | None:
        """ "same" or "valid" as numbers, for a conv whose weight is no parameter; None if it is not symmetric."""
        weight: Any = node.args[1]
        dilation: Any = node.args[5]
        spans = [d * (k - 1) for d, k in zip(dilation, weight.meta["shape"][2:], strict=True)]
        if word == "valid":
            return tuple(0 for _ in spans)
        return None if any(span % 2 for span in spans) else tuple(span // 2 for span in spans)


class Tracing(fx.Interpreter):
    """One run of a spec on given tensors.

    attributes  tensors behind the get_attr nodes, by target; parameters are constants here
    packed      weights of the sites as low-precision products take them, by `packed_key`
    table       policy, keys and sample ids
    """

    def __init__(
        self,
        spec: JointSpec,
        attributes: Mapping[str, Tensor],
        packed: Mapping[str, Tensor],
        table: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        super().__init__(spec.base, garbage_collect_values=False)
        self.extra_traceback = False
        self.spec = spec
        self.attributes, self.packed, self.table = attributes, packed, table
        self._operands: dict[fx.Node, tuple[Tensor, Tensor]] = {}
        self._frontier = {use.node for use in spec.uses.uses}
        self.ways: tuple[tuple[str, str, str], ...] = ()
        self.computed: dict[str, Tensor] = {}  # norms and clip factors, by what they are

    def outputs(self, inputs: Sequence[Any]) -> list[Any]:
        """Run forward; the results may require grad."""
        return tree_leaves(self.run(*inputs, enable_io_processing=False))

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return next(self.args_iter)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.attributes[target] if target in self.attributes else super().get_attr(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        result = self._site(n) if self.spec.row(n) is not None else super().run_node(n)
        if n in self._frontier:
            if not isinstance(result, Tensor):
                raise PerSampleGradientError(
                    f"node {n.name!r} takes a parameter and gives {type(result).__name__}, no tensor"
                )
            if not result.requires_grad and result.is_floating_point() and torch.is_grad_enabled():
                # First layers: no node before them has a gradient, so autograd starts here.
                result = result.detach().requires_grad_()
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is F.group_norm and lies_by_pixel(args[0] if args else kwargs["input"]):
            return _group_norm(**signature_of(F.group_norm).bind(args, kwargs))
        return super().call_function(target, args, kwargs)

    def _site(self, node: fx.Node) -> Tensor:
        x, weight, bias = self.fetch_args_kwargs_from_env(node)[0][:3]
        target, static = self.spec.packed(node), self.spec.static(node)
        assert static is not None
        rest = site_arguments(self.table, static)
        if target is not None:
            packed = self.packed[target]
        else:
            packed = torch.ops.dpquant.packed_weight(weight=weight.detach(), **rest)
        codes, unit = self._operands[node] = torch.ops.dpquant.round_operand(x=x.detach(), role="input", **rest)
        y: Tensor = torch.ops.dpquant.private_site(
            x=x, codes=codes, unit=unit, weight=weight, packed=packed, bias=bias, **rest
        )
        return y

    def private(
        self, outputs: Sequence[Any], tangents: Sequence[Tensor], bounds: Tensor, live: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """The sums of clipped gradients, from the gradients of the outputs; and how many samples were left out."""
        ends = [value for value in outputs if isinstance(value, Tensor) and value.requires_grad]
        # A comparison takes a parameter too, but passes no gradient to it.
        nodes = [n for n in dict.fromkeys(use.node for use in self.spec.uses.uses) if self.env[n].requires_grad]
        grads = torch.autograd.grad(ends, [self.env[node] for node in nodes], list(tangents), allow_unused=True)
        by_node: dict[fx.Node, Any] = dict(zip(nodes, grads, strict=True))
        with torch.no_grad():
            found = ((use, by_node.get(use.node)) for use in self.spec.uses.uses)
            reached = [(use, grad) for use, grad in found if grad is not None]
            pieces = {use: self._piece(use, grad) for use, grad in reached}
            held = {name: self._held(name, pieces) for name in self.spec.order}
            self.ways = tuple(self._way(name, pieces, held[name]) for name in self.spec.order)
            norms = [self._norms(name, pieces, held[name], live) for name in self.spec.order]
            factors, dropped = self.spec.clipping.factors(norms, bounds, live, self.spec.places)
            self.computed |= {f"squared_norms {n}": v for n, v in zip(self.spec.order, norms, strict=True)}
            self.computed |= {f"clip_factors {n}": v for n, v in zip(self.spec.order, factors, strict=True)}
            sums = [
                self._sum(name, pieces, held[name], factor)
                for name, factor in zip(self.spec.order, factors, strict=True)
            ]
        return sums, dropped

    def _piece(self, use: Use, grad: Tensor) -> Piece:
        if piece_kind(use) == "vmap":
            self._check_memory(", ".join(use.params), self.env[use.constant].shape, str(use))
        piece = make_piece(use, self._values(use, grad))
        return (
            piece if use.indices is None else looked_up(piece, self.env[use.indices], self.attributes_of(use.params[0]))
        )

    def _check_memory(self, name: str, shape: Sequence[int], uses: str) -> None:
        """Raise if the per-sample gradients of a value of this shape do not fit."""
        size = 4 * self.spec.batch * math.prod(shape)
        if size > _LARGEST:
            raise PerSampleGradientError(
                f"parameter {name!r} is used in ways ({uses}) that need its per-sample gradients in memory: "
                f"{size >> 20} MiB at a physical batch of {self.spec.batch}. Fix: a smaller max_physical_batch_size, "
                "or freeze it"
            )

    def _values(self, use: Use, grad: Tensor) -> UseValues:
        arguments = {
            name: self.env[value] if isinstance(value, fx.Node) else value
            for name, value in named_arguments(use.node).items()
        }
        arguments |= {f"node:{source.name}": self.env[source] for source in use.node.all_input_nodes}
        constant = self.env[use.constant]
        static = self.spec.static(use.node)
        detached = {k: v.detach() if isinstance(v, Tensor) else v for k, v in arguments.items()}
        method, operand = self._method(use, constant, grad), self._operands.get(use.node)
        return UseValues(detached, constant, grad, self.spec.batch, self.table, static, method, operand)

    def _method(self, use: Use, constant: Tensor, grad: Tensor) -> str:
        if use.slots != ("weight",) or piece_kind(use) != "book-keeping":
            return "kept"
        static = self.spec.static(use.node)
        if static is None:
            raise PerSampleGradientError(f"parameter {use.params[0]!r}: the samples of {use} cannot be told apart")
        shape = tuple(constant.shape)
        count = grad.numel() // (self.spec.batch * shape[0])
        x = self.env[use.node.args[0]]  # type: ignore[index]
        pixels = x.numel() // (self.spec.batch * shape[1] * static.groups)
        method = choose_method(shape, static.groups, count, pixels, self.spec.batch)
        pooled = any(name not in self.spec.uses.separate for name in use.params)
        return "gram" if pooled and method == "kept" else method

    # One parameter

    def _pieces(self, name: str, pieces: Mapping[Use, Piece]) -> list[tuple[Use, Piece]]:
        return [(use, pieces[use]) for use in self.spec.uses.of(name) if use in pieces]

    def _held(self, name: str, pieces: Mapping[Use, Piece]) -> Tensor | None:
        """The per-sample gradients of a parameter, where its uses cannot be handled one by one."""
        own = self._pieces(name, pieces)
        if name in self.spec.uses.separate or not own or self._pooled(own):
            return None
        self._check_memory(name, self.attributes_of(name).shape, "; ".join(str(use) for use, _ in own))
        total: Tensor | None = None
        for use, piece in own:
            grads = piece.grads()
            if not use.whole or use.turned:
                grads = torch.func.vmap(self._pull(use, name))(grads)
            total = grads if total is None else total + grads
        return total

    def _way(self, name: str, pieces: Mapping[Use, Piece], held: Tensor | None) -> tuple[str, str, str]:
        own = self._pieces(name, pieces)
        used = ", ".join(dict.fromkeys(op_name(use.node) for use, _ in own))
        if held is not None:
            return name, used, f"kept, added up over {len(own)} uses: {', '.join(piece_kind(use) for use, _ in own)}"
        if name not in self.spec.uses.separate:
            return name, used, f"gram over {len(own)} uses"
        ways = (p.method if isinstance(p, SitePiece) else "" for _, p in own)
        kinds = ("look-up" if use.indices is not None else piece_kind(use) for use, _ in own)
        names = (f"{kind}{f' ({way})' if way else ''}" for kind, way in zip(kinds, ways, strict=True))
        return name, used, ", ".join(dict.fromkeys(names))

    def _pooled(self, own: Sequence[tuple[Use, Piece]]) -> bool:
        def simple(use: Use, piece: Piece) -> bool:
            if isinstance(piece, SitePiece):
                return use.whole and piece.static.groups == 1 and piece.static.recipe.outputs != "all"
            return use.whole and isinstance(piece, EmbeddingPiece)

        return all(simple(use, piece) for use, piece in own)

    def _norms(self, name: str, pieces: Mapping[Use, Piece], held: Tensor | None, live: Tensor) -> Tensor:
        own = self._pieces(name, pieces)
        if not own:
            return torch.zeros(live.shape, device=live.device)
        if held is not None:
            return DensePiece(held).norms()
        if name in self.spec.uses.separate:
            norms = [piece.norms() for _, piece in own]
            return norms[0] if len(norms) == 1 else torch.stack(norms).sum(0)
        return pooled_norms([(piece, use.turned) for use, piece in own])  # type: ignore[misc]

    def _sum(self, name: str, pieces: Mapping[Use, Piece], held: Tensor | None, factor: Tensor) -> Tensor:
        shape = self.attributes_of(name).shape
        if held is not None:
            return DensePiece(held).weighted(factor).reshape(shape)
        total: Tensor | None = None
        # Look-ups last: they add their rows to what is there.
        own = sorted(self._pieces(name, pieces), key=lambda pair: isinstance(pair[1], EmbeddingPiece))
        for use, piece in own:
            if isinstance(piece, EmbeddingPiece) and use.whole and total is not None:
                total = piece.added(total.reshape(shape), factor)
                continue
            part = piece.weighted(factor)
            part = part if use.whole and not use.turned else self._pull(use, name)(part).contiguous()
            total = part if total is None else total + part
        parameter = self.attributes_of(name)
        return torch.zeros_like(wide(parameter)) if total is None else total.reshape(shape)

    def attributes_of(self, name: str) -> Tensor:
        """The value of a parameter, by its canonical name."""
        return next(self.attributes[target] for target, own in self.spec.uses.names.items() if own == name)

    def _pull(self, use: Use, name: str) -> Callable[[Tensor], Tensor]:
        """The linear map from a gradient of the use's constant to one of the parameter."""
        chain = self._between(use.constant, name)

        def constant(parameter: Tensor) -> Tensor:
            values: dict[fx.Node, Any] = {}

            def read(node: fx.Node) -> Any:
                if node.op == "get_attr" and self.spec.uses.names.get(str(node.target)) == name:
                    return parameter
                return values.get(node, self.env[node])

            for node in chain:
                args, kwargs = fx.map_arg(node.args, read), fx.map_arg(node.kwargs, read)
                if node.op == "call_method":
                    values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            result = read(use.constant)
            assert isinstance(result, Tensor)
            return result

        # In float32 even for a model in half precision: the input may be a clipped sum, which must not be rounded.
        back = torch.func.vjp(lambda parameter: wide(constant(parameter)), wide(self.attributes_of(name)))[1]

        def pull(grad: Tensor) -> Tensor:
            (result,) = back(grad.reshape(self.env[use.constant].shape))
            assert isinstance(result, Tensor)
            return result

        return pull

    def _between(self, constant: fx.Node, name: str) -> list[fx.Node]:
        """The nodes between a parameter and a constant, in order. The constant's other inputs keep their values."""
        wanted: set[fx.Node] = set()
        stack = [constant]
        while stack:
            node = stack.pop()
            inside = node.op in ("call_function", "call_method") and name in self.spec.uses.made_of.get(node, ())
            if inside and node not in wanted:
                wanted.add(node)
                stack.extend(node.all_input_nodes)
        chain = [node for node in self.spec.base.graph.nodes if node in wanted]
        if drawn := next((node for node in chain if draws_random(node)), None):
            raise PerSampleGradientError(
                f"parameter {name!r} goes through {op_name(drawn)} ({node_source(drawn) or drawn.name}), which draws "
                "random numbers: its gradient needs the draw of the forward. Fix: first draw a mask or noise, then "
                "multiply the parameter by it or add it"
            )
        return chain


def _group_norm(input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`F.group_norm` of a map that lies by pixel."""
    if not can_normalise(input, weight, bias):
        return group_norm(input, num_groups, weight, bias, eps)
    y: Tensor = torch.ops.dpquant.group_norm(input, None, weight, bias, num_groups, eps, False)[0]
    return y
