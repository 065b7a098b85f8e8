"""`explain()`: what every site runs as, by which kernel, and why the rest is not a site."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from dpquant_compile.backends.registry import Choice, SiteCall, choose_kernel
from dpquant_compile.backends.triton_fp4 import gpu_kernel_for
from dpquant_compile.numerics.recipe import Precision
from dpquant_compile.policy import Policy
from dpquant_compile.sites import BatchAxis, Site, SiteTable
from dpquant_compile.spec import CompileSpec

__all__ = ["Explanation", "Row", "explain", "kernel_of"]

_ROLES = ("input", "weight", "output gradient")


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


def kernel_of(site: Site, spec: CompileSpec, device: torch.device) -> Choice:
    """The kernel that runs `site` in low precision."""
    call = SiteCall(site.op, spec.recipe, BatchAxis(0), BatchAxis(0), site.geometry, site.index, 0)
    return choose_kernel(call, device)


def explain(
    sites: SiteTable,
    policy: Policy,
    spec: CompileSpec,
    device: torch.device,
    training: bool,
    lost: Mapping[str, str] | None = None,
    private: Sequence[tuple[str, str, str]] = (),
    emulated: Mapping[str, str] | None = None,
) -> Explanation:
    """The table for a model in its present state. `lost` are sites that the last call could not quantize, and why.

    `private` says for each trainable parameter under a privacy engine: its name, the operators that use it, and the
    way its per-sample gradients are taken. `emulated` are sites whose native kernel cannot take their tensors, and why.
    """
    rows = []
    active = training or spec.quantize_eval
    for site in sites:
        shape = "×".join(map(str, site.weight_shape)) if site.weight_shape else "?"
        if lost and site.name in lost:
            reason = f"in the last call: {lost[site.name]}"
            rows.append(Row(site.name, site.op, shape, "skipped", "torch (full precision)", False, reason))
            continue
        choice = kernel_of(site, spec, device)
        low = active and site.name in policy
        high = active and not low and spec.recipe.other == Precision.HIGH
        passed = "; ".join(f"not {name}: {reason}" for name, reason in choice.passed_over)
        note = "; ".join(part for part in (choice.kernel.note, passed) if part) if low or high else ""
        kernel, native = (str(choice), choice.kernel.native) if low or high else ("torch (full precision)", False)
        if native and emulated and site.name in emulated:
            kernel, native, note = "compiled (emulated)", False, f"not {choice.kernel.backend}: {emulated[site.name]}"
        rows.append(
            Row(site.name, site.op, shape, "low" if low else spec.recipe.high if high else "full", kernel, native, note)
        )
    for skip in sites.skipped:
        where = f" [{skip.source}]" if skip.source else ""
        kernel = "torch (full precision)"
        rows.append(Row(skip.name, skip.op, "", "skipped", kernel, False, skip.reason + where))
    mode = "train()" if training else "eval(), quantized" if spec.quantize_eval else "eval(): full precision"
    recipe = spec.recipe
    others = "" if recipe.other == Precision.FULL else f", the others in {recipe.high}"
    what = f"{recipe.name}, outputs {recipe.outputs!r}{others}"
    title = f"{len(policy)} of {len(sites)} sites in {what}, {mode}, on {device}"
    if recipe.name != recipe.numbers:
        title += f"\n{recipe.name}: " + "; ".join(
            f"{role} {operand}" for role, operand in zip(_ROLES, recipe.operands, strict=True)
        )
    if recipe.hadamard:
        title += "\nHadamard transform of the operands of linears' weight gradients"
    if device.type == "cuda":
        gpu = gpu_kernel_for(torch.cuda.get_device_capability(device), spec.recipe.input.format)
        title += f"\nnot used yet: {gpu.name} by {gpu.call}, since {gpu.reason}; {gpu.status}"
    return Explanation(title, tuple(rows), tuple(private))
