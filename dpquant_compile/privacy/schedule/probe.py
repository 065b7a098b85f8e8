"""Probes: what a model's per-sample losses would be under other policies, at fixed weights, forward only.

The graph runs once with no site in low precision and keeps every value. For a policy only what lies behind its sites is
run again. A weight that is rounded at random is drawn anew for each small group of samples, so that a score does not
depend on one draw. Which group a sample is in, and all its random bits, are secret and drawn for this sample alone, so
no sample can move another's loss, and nobody can tell samples by how they were rounded.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpquant_compile import pipeline
from dpquant_compile.backends.ops.site import output_shape, plain_dtypes
from dpquant_compile.backends.reference.clipped_site import site_at
from dpquant_compile.backends.registry import Shapes, SiteCall, Streams
from dpquant_compile.backends.rotated_site import arithmetic_of
from dpquant_compile.backends.sending import sent
from dpquant_compile.errors import PrivacySpecError
from dpquant_compile.numerics.random_bits import ROLES, fold
from dpquant_compile.numerics.recipe import Precision, Recipe
from dpquant_compile.passes.batch.track_batch import batch_size
from dpquant_compile.passes.canonical.canonicalize import CONVS
from dpquant_compile.passes.fx_utils import bind_inputs
from dpquant_compile.passes.precision.insert_switches import call_at
from dpquant_compile.privacy.clipping.parameter_uses import axis_of
from dpquant_compile.privacy.clipping.runtime import Session, padded, real_rows
from dpquant_compile.privacy.data.poisson_loader import PrivateLoader
from dpquant_compile.privacy.hooks import refuse_hooks, refuse_modes
from dpquant_compile.sites import BatchAxis, ConvGeometry

__all__ = ["Batch", "Probe", "draw_batch", "unpack_batch"]


@dataclass(frozen=True)
class Batch:
    """Some samples of a probe: the model's arguments, the target of the loss, dataset indices, and rounding groups.

    Samples of one group come one after the other, and share one rounding of the weights.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    ids: Tensor
    groups: Tensor


def unpack_batch(batch: Any, given: Collection[str] = ()) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The default way to read a batch: (input, target), or a mapping of the model's arguments with its "labels".

    Labels are the target. The model gets them too if it did in training: `given` names the arguments of its calls.
    """
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return (batch[0],), {}, batch[1]
    if isinstance(batch, Mapping) and "labels" in batch:
        kwargs = {name: value for name, value in batch.items() if name != "labels" or name in given}
        return (), kwargs, batch["labels"]
    what = f"mapping with {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
    raise PrivacySpecError(
        f"the loader gives a {what}, and an analysis does not know how to call model and loss on it. Fix: give (input, "
        'target) pairs, or the model\'s arguments by name with "labels" among them; or pass unpack= to Scheduler, a '
        "function from a batch to (args, kwargs, target)"
    )


def draw_batch(
    loader: PrivateLoader,
    rate: float,
    uniform: Callable[[int], Tensor],
    limit: int,
    group_of: Callable[[Tensor], Tensor],
    unpack: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any], Any]],
    share: Callable[[Callable[[], Tensor]], Tensor] = lambda draw: draw(),
) -> Iterator[Batch]:
    """A Poisson draw of its own from the loader's dataset, in parts of at most `limit` samples, groups together.

    `share` is given the draw, and says which of its samples this process is to read. `group_of` gives the rounding
    groups of samples.
    """
    dataset: Any = loader.dataset
    ids = share(lambda: torch.nonzero(uniform(len(dataset)) < rate).flatten())
    groups, order = torch.sort(group_of(ids), stable=True)
    ids = ids[order]
    for start in range(0, len(ids), limit):
        part = ids[start : start + limit]
        rows = part.tolist()
        many = getattr(dataset, "__getitems__", None)
        items = many(rows) if many else [dataset[i] for i in rows]
        assert loader.collate_fn is not None
        args, kwargs, target = unpack(loader.collate_fn(items))
        yield Batch(args, kwargs, target, part, groups[start : start + limit])


class Probe:
    """Per-sample losses of a model in evaluation mode, under policies that quantize some of its sites.

    `losses(outputs, target)` gives [B]; `step` is the counter that random bits are drawn by: negative, so that no
    training step has the same. Batches are padded to the session's physical size: how many samples were drawn, which a
    model may look at, is then a public number.

    Guarantee: the row of a sample in `differences` is a function of this sample, the weights, and random bits that are
    its own or alike for all. What else a call is given must be a constant of the session.
    """

    def __init__(self, session: Session, losses: Callable[[Any, Any], Tensor], step: int) -> None:
        self._session = session
        self._internals = session.internals
        self._physical = session.physical
        self._losses = losses
        self._step = step
        self._batches = 0  # how many have been measured
        self._proved: dict[int, fx.GraphModule] = {}

    def differences(self, batch: Batch, policies: Sequence[frozenset[str]]) -> Tensor:
        """loss(policy) − loss(no site in low precision) for each sample and policy: [B, len(policies)]."""
        model = self._internals.original
        was = {module: module.training for module in model.modules()}
        refuse_hooks(self._session.model)
        refuse_modes()
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        model.eval()
        try:
            with (
                self._session.model.whole_parameters(),
                torch.no_grad(),
                self._session.bits.random_operators(self._step, self._batches, device),
            ):
                self._batches += 1
                run = self._baseline(batch)
                base = self._loss(run, run.values, batch)
                columns = [self._loss(run, run.under(policy), batch) - base for policy in policies]
        finally:
            for module, training in was.items():
                module.training = training
        result = torch.stack(columns, 1)
        self._session.settle()  # the row of a sample is about to be used
        return result

    def _baseline(self, batch: Batch) -> "_Run":
        programs = self._internals.programs
        args, kwargs = programs.normalise(batch.args, batch.kwargs)
        program = programs.get(args, kwargs, batch_size(args, kwargs))
        given = bind_inputs(program.base, args, kwargs)
        constants = self._session.constants
        constants.check_call(program.base, given, args, kwargs, "analysis")
        read = [str(node.target) for node in program.base.graph.nodes if node.op == "get_attr"]
        constants.check_read(program.base, read, self._session.parameters, "analysis", self._session.checks)
        if id(program) not in self._proved:
            constants.check_attributes(program.attributes)
            self._proved[id(program)] = pipeline.isolated(program.base, args, kwargs, programs.log)
        base = self._proved[id(program)]
        names = [name for name, _ in sorted(program.rows.items(), key=lambda item: item[1])]
        bits = self._session.bits
        device = next((p.device for p in self._internals.original.parameters()), torch.device("cpu"))
        keys = sent(bits.site_keys(self._step, names), device)
        recipe = str(self._internals.spec.recipe)
        size = len(batch.ids)
        if not program.any_batch and size != self._physical:
            raise PrivacySpecError(
                f"the graph of this model holds for one batch size only, so {size} samples cannot be padded to "
                f"{self._physical}: {program.bound}. Fix: take sizes from x.shape, and do not decide by them"
            )
        missing = self._physical - size
        ids = bits.sample_ids(self._step, torch.cat([batch.ids, torch.full((missing,), -1, dtype=torch.int64)]))
        # Padding is with the last group, whose rounding it then shares.
        groups = torch.cat([batch.groups, batch.groups[-1:].expand(missing)])
        run = _Run(base, program.rows, recipe, keys, sent(ids, device), groups, size)
        placeholders = [node for node in base.graph.nodes if node.op == "placeholder"]
        values = zip(placeholders, given, strict=True)
        run.start([padded(node, value, size, self._physical) for node, value in values])
        return run

    def _loss(self, run: "_Run", values: dict[fx.Node, Any], batch: Batch) -> Tensor:
        losses = self._losses(run.outputs(values), batch.target)
        return losses.to(torch.float32)


class _Run(fx.Interpreter):
    """One batch through one graph: with no site in low precision once, and then what changes under a policy."""

    def __init__(
        self,
        gm: fx.GraphModule,
        rows: dict[str, int],
        recipe: str,
        keys: Tensor,
        ids: Tensor,
        groups: Tensor,
        size: int,
    ) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.extra_traceback = False
        self._rows, self._recipe, self._keys, self._ids, self._group = rows, recipe, keys, ids, groups
        self._size = size
        self.values: dict[fx.Node, Any] = {}

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return next(self.args_iter)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in CONVS or isinstance(args[4], str) or args[0].dim() != args[1].dim():
            return super().call_function(target, args, kwargs)
        # Without the taps that only meet padding, which on small maps are most of a kernel.
        x, weight, bias, stride, padding, dilation, groups = args
        op, geometry = f"conv{CONVS.index(target) + 1}d", ConvGeometry(stride, padding, dilation, groups)
        call = SiteCall(op, Recipe.parse(self._recipe), BatchAxis(0), BatchAxis(0), geometry, -1, 0)
        return _unrounded(call, Precision.FULL, x, weight, bias)

    def start(self, inputs: Sequence[Any]) -> None:
        """No site in low precision."""
        self.run(*(_by_pixel(value) for value in inputs), enable_io_processing=False)
        self.values = dict(self.env)

    def under(self, policy: Iterable[str]) -> dict[fx.Node, Any]:
        """All values under a policy; those before its sites are the ones of the first run."""
        chosen, changed = set(policy), dict(self.values)
        dirty: set[fx.Node] = set()
        graph: Any = self.module
        for node in graph.graph.nodes:
            site = node.meta["site"].name if "site" in node.meta else None
            if site not in chosen and not any(source in dirty for source in node.all_input_nodes):
                continue
            dirty.add(node)
            if node.op == "output":
                continue
            self.env = changed
            changed[node] = self._site(node, Precision.LOW) if site in chosen else self.run_node(node)
        return changed

    def run_node(self, n: fx.Node) -> Any:
        other = Recipe.parse(self._recipe).other
        if "site" in n.meta and n.meta["site"].name in self._rows and other != Precision.FULL:
            return self._site(n, other)
        return super().run_node(n)

    def outputs(self, values: dict[fx.Node, Any]) -> Any:
        """The model's outputs, in the form it gives them."""
        gm: Any = self.module
        node = next(node for node in gm.graph.nodes if node.op == "output")
        leaves, spec = tree_flatten(node.args[0])
        flat = [self._real(leaf, values[leaf]) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        return gm.graph._codegen.process_outputs(tree_unflatten(flat, spec))

    def _real(self, node: fx.Node, value: Any) -> Any:
        return real_rows(value, axis_of(node), self._size) if isinstance(value, Tensor) else value

    def _site(self, node: fx.Node, precision: Precision) -> Tensor:
        """A site at a precision that is not full; group by group where the weight is rounded at random."""
        row = self._rows[node.meta["site"].name]
        call = call_at(node, row, self._recipe)
        spec = call.running(precision)
        x, weight, bias = self.fetch_args_kwargs_from_env(node)[0][:3]
        kernel = arithmetic_of(call, x.device)
        with plain_dtypes(x):
            x = x.to(weight.dtype)
            if spec is None:
                return _unrounded(call, precision, x, weight, bias)
            if spec.recipe.weight.rounding == "nearest":
                return kernel.forward(x, weight, bias, spec, Streams(self._keys, self._ids))
            return self._by_group(spec, partial(self._product, kernel, spec, weight, bias), x)

    def _by_group(self, spec: SiteCall, product: Callable[[int, Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
        marks = self._group.tolist()
        starts = [i for i, mark in enumerate(marks) if i == 0 or marks[i - 1] != mark] + [len(marks)]
        whole, parts = _split(x, spec.axis), []
        for first, last in itertools.pairwise(starts):
            piece = whole.narrow(spec.axis.dim + 1, first, last - first)
            piece = piece.flatten(spec.axis.dim, spec.axis.dim + 2)
            parts.append(_split(product(marks[first], piece, self._ids[first:last]), spec.output_axis))
        dim = spec.output_axis.dim
        return torch.cat(parts, dim + 1).flatten(dim, dim + 2)

    def _product(
        self, low: Any, spec: SiteCall, weight: Tensor, bias: Tensor | None, group: int, x: Tensor, ids: Tensor
    ) -> Tensor:
        keys, role = self._keys.clone(), ROLES.index("weight")
        keys[spec.site, role] = fold(keys[spec.site, role], group)  # another rounding of the weight for each group
        y: Tensor = low.forward(x, weight, bias, spec, Streams(keys, ids))
        return y


def _unrounded(call: SiteCall, precision: Precision, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The output of a site that runs by no recipe."""
    sizes = tuple(x.shape), tuple(weight.shape)
    shapes = Shapes(*sizes, output_shape(*sizes, call.geometry), x.shape[0])
    return site_at(precision).forward(x, weight, bias, shapes, call)


def _by_pixel(value: Any) -> Any:
    """Images channels-last, in which convolutions are quicker; operators pass the layout on."""
    images = isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point()
    return value.contiguous(memory_format=torch.channels_last) if images else value


def _split(x: Tensor, axis: BatchAxis) -> Tensor:
    """`x` with the dimension that holds its samples taken apart into (outer, samples, inner)."""
    parts: Tensor = x.unflatten(axis.dim, (axis.outer, -1, axis.inner))
    return parts
