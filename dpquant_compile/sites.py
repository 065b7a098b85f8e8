"""Sites: the convs and linears of a model that can be switched to low precision."""

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

from dpquant_compile.errors import SiteError, listing

__all__ = ["BatchAxis", "ConvGeometry", "Site", "SiteFilter", "SiteTable", "Skipped", "renumber", "select_sites"]


@dataclass(frozen=True)
class ConvGeometry:
    """The static arguments of a convolution."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def __str__(self) -> str:
        parts = [f"s{'x'.join(map(str, self.stride))}", f"p{'x'.join(map(str, self.padding))}"]
        if any(d != 1 for d in self.dilation):
            parts.append(f"d{'x'.join(map(str, self.dilation))}")
        if self.groups != 1:
            parts.append(f"g{self.groups}")
        return " ".join(parts)


@dataclass(frozen=True)
class BatchAxis:
    """Position of the samples of a batch in a tensor: dimension `dim` runs over (outer, sample, inner).

    A plain batch is `BatchAxis(0)`. A `[B*T, K]` tensor folded batch-major is `BatchAxis(0, inner=T)`; a
    `[T, B, K]` tensor is `BatchAxis(1)`.
    """

    dim: int = 0
    outer: int = 1
    inner: int = 1

    def __str__(self) -> str:
        folded = f" ({self.outer}·B·{self.inner})" if (self.outer, self.inner) != (1, 1) else ""
        return f"dim {self.dim}{folded}"


@dataclass(frozen=True)
class Site:
    """One conv or linear layer that can run in full or in low precision.

    `name` is the qualified name of the layer in the user's model; a layer that is called several times is one
    site with several `nodes`. With `transposed`, the model keeps the weight of a linear as [in, out]; `weight_shape` is
    [out, in] all the same. Shapes of activations and `flops` (multiply-adds × 2, forward, per sample) are known
    after the first forward. `module_types` are the names of the layer's class and its bases.
    """

    name: str
    op: str
    index: int
    weight: str | None = None
    transposed: bool = False
    bias: str | None = None
    weight_shape: tuple[int, ...] | None = None
    geometry: ConvGeometry | None = None
    nodes: tuple[str, ...] = ()
    source: str | None = None
    module_types: tuple[str, ...] = ()
    input_shape: tuple[int, ...] | None = None
    output_shape: tuple[int, ...] | None = None
    flops: int | None = None

    def __str__(self) -> str:
        shape = "×".join(map(str, self.weight_shape)) if self.weight_shape else "?"
        return f"{self.name} ({self.op} {shape}{' ' + str(self.geometry) if self.geometry else ''})"


@dataclass(frozen=True)
class Skipped:
    """A conv, a linear or a similar operation that stays in full precision, and why."""

    name: str
    op: str
    reason: str
    source: str | None = None


SiteFilter = str | type | Callable[[Site], bool]


@dataclass(frozen=True)
class SiteTable(Sequence[Site]):
    """All sites of a model in graph order, and skipped layers. Index by number or by name."""

    sites: tuple[Site, ...]
    skipped: tuple[Skipped, ...] = field(default=())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __contains__(self, item: object) -> bool:
        return item in self.sites or item in self.names

    @overload
    def __getitem__(self, key: int | str) -> Site: ...

    @overload
    def __getitem__(self, key: slice) -> tuple[Site, ...]: ...

    def __getitem__(self, key: int | str | slice) -> Site | tuple[Site, ...]:
        if isinstance(key, str):
            for site in self.sites:
                if site.name == key:
                    return site
            raise SiteError(f"no site is named {key!r}. The model has {len(self)}: {listing(self.names)}")
        return self.sites[key]

    def __str__(self) -> str:
        lines = [f"{site.index:3d}  {site}" for site in self.sites]
        lines += [f"  -  {skip.name} ({skip.op}) skipped: {skip.reason}" for skip in self.skipped]
        return "\n".join(lines)


def select_sites(table: SiteTable, chosen: "SiteFilter | Iterable[SiteFilter] | None") -> SiteTable:
    """The sites that `chosen` keeps; the others move to `skipped` with the reason.

    `chosen` is a name pattern ("layer1.*"), a module type (`nn.Conv2d`), an op ("linear"), a function of a
    `Site`, or several of these, any of which may match. A pattern that matches nothing is an error.
    """
    if chosen is None:
        return table
    single = isinstance(chosen, str | type) or callable(chosen)
    if not single and not isinstance(chosen, Iterable):
        raise SiteError(
            f"sites={chosen!r} is a {type(chosen).__name__}; give a name pattern, a type, a function or a list"
        )
    rules: list[SiteFilter] = [chosen] if isinstance(chosen, str | type) or callable(chosen) else list(chosen)
    if not rules:
        raise SiteError(f"sites=[] selects nothing; the model has {len(table)} sites: {listing(table.names)}")
    kept: set[str] = set()
    for rule in rules:
        hits = {site.name for site in table if _matches(site, rule)}
        if not hits:
            raise SiteError(f"sites={rule!r} matches none of the {len(table)} sites: {listing(table.names)}")
        kept |= hits
    sites = tuple(site for site in table if site.name in kept)
    dropped = tuple(
        Skipped(site.name, site.op, "not selected by sites=", site.source) for site in table if site.name not in kept
    )
    return SiteTable(renumber(sites), table.skipped + dropped)


def renumber(sites: Iterable[Site]) -> tuple[Site, ...]:
    """The same sites with `index` counted from 0."""
    return tuple(replace(site, index=i) for i, site in enumerate(sites))


def _matches(site: Site, rule: SiteFilter) -> bool:
    if isinstance(rule, str):
        return site.op == rule or fnmatch.fnmatchcase(site.name, rule)
    if isinstance(rule, type):
        return rule.__name__ in site.module_types
    if not callable(rule):
        raise SiteError(
            f"sites={rule!r} is a {type(rule).__name__}; give a name pattern, a type or a function of a Site"
        )
    return bool(rule(site))
