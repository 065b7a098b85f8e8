"""`explain()`: what every site runs as, by which kernel, and why the rest is not a site."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from dpquant_compile.backends.registry import Choice, SiteCall, choose_kernel
from dpquant_compile.backends.triton.capabilities import tensor_cores_for
from dpquant_compile.errors import KernelError
from dpquant_compile.numerics.recipe import Precision
from dpquant_compile.passes.precision.insert_switches import axes_of
from dpquant_compile.policy import Policy
from dpquant_compile.sites import BatchAxis, Site, SiteTable
from dpquant_compile.spec import CompileSpec

__all__ = ["Explanation", "Row", "explain", "kernel_of", "kernels_of"]


@dataclass(frozen=True)
class Row:
    """One line of the table. `precision` is "low", "full" (or what `high` says), or "skipped" for what is no site."""

    site: str
    op: str
    shape: str
    precision: str
    kernel: str
    native: bool
    note: str


@dataclass(frozen=True)
class Explanation:
    """A table of all sites, and of what looks like one and stays in full precision."""

    title: str
    rows: tuple[Row, ...]
    private: tuple[tuple[str, str, str], ...] = ()

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        head = ("site", "op", "weight", "precision", "kernel", "note")
        body = [(row.site, row.op, row.shape, row.precision, row.kernel, row.note) for row in self.rows]
        lines = [self.title, *_table(head, body)]
        if self.private:
            lines += ["", "per-sample gradients", *_table(("parameter", "used by", "way"), self.private)]
        return "\n".join(lines)

    __repr__ = __str__


def _table(head: tuple[str, ...], body: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head) - 1)]
    rule = tuple("─" * width for width in (*widths, 4))
    for line in (head, rule, *body):
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        yield "  ".join([*cells, line[-1]]).rstrip()


def kernel_of(
    site: Site,
    spec: CompileSpec,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    axes: tuple[BatchAxis, BatchAxis] = (BatchAxis(0), BatchAxis(0)),
) -> Choice:
    """The kernel that runs a call of `site` in low precision; raises `KernelError` where the backend has none.

    `dtype` is the weight's, `axes` are the batch axes of input and output.
    """
    call = SiteCall(site.op, spec.recipe, *axes, site.geometry, site.index, 0)
    try:
        return choose_kernel(call, device, dtype)
    except KernelError as error:
        raise KernelError(f"site {site.name!r}: {error}") from None


def kernels_of(
    spec: CompileSpec, device: torch.device, dtypes: Mapping[str, torch.dtype], graph: fx.GraphModule | None = None
) -> Callable[[Site], Choice]:
    """A function from a site to the kernel that runs it; of several calls, to the one of lowest priority.

    `dtypes` are those of the parameters by name; `graph` is the captured graph, which has the calls and their batch
    axes. A site that it does not have is taken to be called on a plain batch.
    """
    calls: dict[str, list[tuple[BatchAxis, BatchAxis]]] = {}
    for node in graph.graph.nodes if graph is not None else ():
        if "site" in node.meta:
            calls.setdefault(node.meta["site"].name, []).append(axes_of(node))

    def kernel(site: Site) -> Choice:
        dtype = dtypes.get(site.weight or "", torch.float32)
        if site.name not in calls:
            return kernel_of(site, spec, device, dtype)
        found = [kernel_of(site, spec, device, dtype, axes) for axes in dict.fromkeys(calls[site.name])]
        return min(found, key=lambda choice: choice.kernel.priority)

    return kernel


def explain(
    sites: SiteTable,
    policy: Policy,
    spec: CompileSpec,
    device: torch.device,
    training: bool,
    kernel_for: Callable[[Site], Choice],
    dtypes: Mapping[str, torch.dtype],
    lost: Mapping[str, str] | None = None,
    private: Sequence[tuple[str, str, str]] = (),
) -> Explanation:
    """The table for a model in its present state. `kernel_for` says what runs a site, see `kernels_of`; `dtypes` are
    those of the parameters by name.

    `lost` are sites that the last call could not quantize, and why. `private` says for each trainable parameter under a
    privacy engine: its name, the operators that use it, and the way its per-sample gradients are taken.
    """
    rows = []
    active = training or spec.quantize_eval
    for site in sites:
        shape = "×".join(map(str, site.weight_shape)) if site.weight_shape else "?"
        if lost and site.name in lost:
            reason = f"in the last call: {lost[site.name]}"
            rows.append(Row(site.name, site.op, shape, "skipped", "torch (full precision)", False, reason))
            continue
        low = site.name in policy
        if not active or (not low and spec.recipe.other == Precision.FULL):
            rows.append(Row(site.name, site.op, shape, "full", "torch (full precision)", False, ""))
            continue
        if not low and spec.recipe.other == Precision.BFLOAT16:
            dtype = dtypes.get(site.weight or "", torch.float32)
            if dtype == torch.float32:
                row = Row(site.name, site.op, shape, "bfloat16", "torch (bfloat16)", True, "weight gradient in float32")
            else:
                row = Row(site.name, site.op, shape, "full", "torch (full precision)", False, f"its weight is {dtype}")
            rows.append(row)
            continue
        choice = kernel_for(site)
        passed = [f"not {name}: {reason}" for name, reason in choice.passed_over]
        note = "; ".join(part for part in (choice.kernel.note, *passed) if part)
        precision = "low" if low else spec.recipe.high
        rows.append(Row(site.name, site.op, shape, precision, str(choice), choice.kernel.native, note))
    for skip in sites.skipped:
        where = f" [{skip.source}]" if skip.source else ""
        kernel = "torch (full precision)"
        rows.append(Row(skip.name, skip.op, "", "skipped", kernel, False, skip.reason + where))
    mode = "train()" if training else "eval(), quantized" if active else "train(); now eval(): all in full precision"
    recipe = spec.recipe
    others = "" if recipe.other == Precision.FULL else f", the others in {recipe.high}"
    what = f"{recipe.name}, outputs {recipe.outputs!r}{others}"
    title = f"{len(policy)} of {len(sites)} sites in {what}, {mode}, on {device}"
    if recipe.name != recipe.numbers:
        title += f"\n{recipe.name}: {recipe.in_words}"
    if recipe.hadamard:
        title += "\nHadamard transform of the operands of linears' weight gradients"
    if recipe.rotated:
        title += "\ninput and weight of linears rotated before rounding, where 16 divides their features"
    if device.type == "cuda":
        cores = tensor_cores_for(torch.cuda.get_device_capability(device), spec.recipe.input.format)
        if not cores.used:
            title += f"\nnot used yet: {cores.name} by {cores.call}: {cores.reason}; {cores.status}"
    return Explanation(title, tuple(rows), tuple(private))
