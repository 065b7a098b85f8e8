"""Kernels: one record each, one registry, and the choice of a kernel for a site."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dpquant_compile.errors import KernelError, RegistryError, listing
from dpquant_compile.numerics.hadamard import Rotation, rotate_features
from dpquant_compile.numerics.recipe import Recipe
from dpquant_compile.sites import BatchAxis, ConvGeometry

__all__ = [
    "Arithmetic",
    "Choice",
    "Kernel",
    "Operand",
    "Shapes",
    "SiteCall",
    "Streams",
    "backend_names",
    "choose_kernel",
    "register_kernel",
]


@dataclass(frozen=True)
class SiteCall:
    """All that is fixed about one call of a site: what a kernel is chosen by, and told.

    site   the row of the site in the link table; -1 for a layer that is no site and stays in full precision
    call   counts the calls of a layer that is used more than once

    Operators take it as plain arguments: `site_call` and `static_arguments` of `backends/ops/site.py`.
    """

    op: str
    recipe: Recipe
    axis: BatchAxis
    output_axis: BatchAxis
    geometry: ConvGeometry | None
    site: int
    call: int

    def running(self, precision: int) -> "SiteCall | None":
        """The call as it runs at this precision, see `Precision`; None where no recipe rounds its operands."""
        recipe = self.recipe.running(precision)
        return self if recipe is self.recipe else None if recipe is None else replace(self, recipe=recipe)

    @property
    def groups(self) -> int:
        """Groups of a conv; 1 for a linear."""
        return 1 if self.geometry is None else self.geometry.groups


@dataclass(frozen=True)
class Streams:
    """Where the random bits of one step come from: a key per site and role, an id per sample of the batch."""

    keys: Tensor
    samples: Tensor


class Operand(NamedTuple):
    """An input or an output gradient as a kernel keeps it: numbers in a form of its own, and one unit per sample."""

    codes: Tensor
    unit: Tensor


@dataclass(frozen=True)
class Shapes:
    """The sizes of one call of a site: its input, weight and output, and how many samples there are."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    y: tuple[int, ...]
    batch: int


class Arithmetic(Protocol):
    """One way to compute a quantized site. Results come in full precision unless the recipe's `outputs` says else."""

    # A step without clipping

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: SiteCall, streams: Streams) -> Tensor: ...

    def grad_input(self, grad: Tensor, x: Tensor, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor: ...

    def grad_weight(self, grad: Tensor, x: Tensor, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor: ...

    # Operands that are rounded once and used several times. `role` is "input" or "grad_output".

    def operand(self, x: Tensor, role: str, call: SiteCall, streams: Streams) -> Operand: ...

    def packed(self, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor: ...

    def empty_operand(self, x: Tensor, call: SiteCall, batch: int) -> Operand:
        """Tensors like those of `operand`, with nothing in them."""

    def empty_packed(self, weight: Tensor, call: SiteCall) -> Tensor:
        """A tensor like that of `packed`, with nothing in it."""

    # Products of such operands

    def product(
        self, x: Operand, packed: Tensor, bias: Tensor | None, shapes: Shapes, call: SiteCall, streams: Streams
    ) -> Tensor: ...

    def product_grad_input(
        self, grad: Operand, packed: Tensor, shapes: Shapes, call: SiteCall, streams: Streams
    ) -> Tensor: ...

    def sample_norms(
        self, x: Operand, grad: Operand, shapes: Shapes, method: str, call: SiteCall, streams: Streams
    ) -> Tensor:
        """‖Gᵢ‖² [B] of the per-sample weight gradients, never less than what `weighted_grad` takes of a sample."""

    def sample_grads(self, x: Operand, grad: Operand, shapes: Shapes, call: SiteCall, streams: Streams) -> Tensor:
        """Gᵢ by tap: [B, N, taps · C], for a weight [N, C, *taps]."""

    def weighted_grad(
        self, x: Operand, grad: Operand, factors: Tensor, shapes: Shapes, call: SiteCall, streams: Streams
    ) -> Tensor:
        """Σᵢ factorᵢ Gᵢ; a sample whose factor is NaN is left out, whatever its values are."""

    def sample_factors(self, x: Operand, grad: Operand, shapes: Shapes, call: SiteCall) -> tuple[Tensor, Tensor]:
        """D [B, T, N] and U [B, T, K] with Gᵢ = Dᵢᵀ Uᵢ, for a conv of one group or a linear."""


@dataclass(frozen=True)
class Kernel:
    """One way to run quantized sites.

    backend    family name, as in `compile(backend=…)`
    supports   None if it can run a call on a device, else the reason why not
    native     False if low precision is emulated by full-precision products of rounded numbers
    reference  the backend that its results are tested against; None for the reference itself
    priority   "auto" takes the highest that supports the call
    note       one line for `explain()`
    dtypes     of weights that its arithmetic computes with; it leaves others to that of its reference. None: all
    rotate     `rotate_features` of numerics/hadamard.py, with the same bits
    """

    backend: str
    arithmetic: Arithmetic
    supports: Callable[[SiteCall, torch.device], str | None]
    native: bool
    reference: str | None
    priority: int
    note: str
    dtypes: tuple[torch.dtype, ...] | None = None
    rotate: Rotation = rotate_features


@dataclass(frozen=True)
class Choice:
    """The kernel taken for a call, and why not the ones before it."""

    kernel: Kernel
    passed_over: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        kind = "native" if self.kernel.native else "emulated"
        return f"{self.kernel.backend} ({kind})"


_KERNELS: dict[str, Kernel] = {}


def register_kernel(kernel: Kernel) -> Kernel:
    """Make a kernel known. A backend name that is taken is refused."""
    if kernel.backend in _KERNELS or kernel.backend == "auto":
        raise RegistryError(f"backend {kernel.backend!r} is already registered: choose another name")
    if kernel.reference is not None and kernel.reference not in _KERNELS:
        raise RegistryError(f"backend {kernel.backend!r}: its reference {kernel.reference!r} is not registered")
    _KERNELS[kernel.backend] = kernel
    choose_kernel.cache_clear()
    return kernel


def backend_names() -> tuple[str, ...]:
    """What `backend=` may be."""
    return ("auto", *_KERNELS)


@lru_cache(maxsize=4096)
def choose_kernel(call: SiteCall, device: torch.device, dtype: torch.dtype = torch.float32) -> Choice:
    """The kernel that runs `call` on `device`; raises `KernelError` if the asked-for backend cannot.

    Both sides of the switch run by the same kernel, since one program serves every policy. `dtype` is the weight's, for
    `explain()`: operators leave it out, and the arithmetic that they get passes such tensors on by itself.
    """
    asked = call.recipe.backend
    if asked not in backend_names():
        raise KernelError(f"no backend is named {asked!r}. Choose one of: {listing(backend_names())}")
    ranked = sorted(_KERNELS.values(), key=lambda kernel: -kernel.priority)
    reasons: list[tuple[str, str]] = []
    for kernel in ranked if asked == "auto" else [_KERNELS[asked]]:
        other = call.running(call.recipe.other)
        reason = kernel.supports(call, device) or (None if other is None else kernel.supports(other, device))
        if reason is None:
            if kernel.reference is None or kernel.dtypes is None or dtype in kernel.dtypes:
                return Choice(kernel, tuple(reasons))
            return Choice(_KERNELS[kernel.reference], (*reasons, (kernel.backend, f"its weight is {dtype}")))
        reasons.append((kernel.backend, reason))
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons)
    raise KernelError(f"no kernel runs {call.op} in {call.recipe} on {device}. {why}. Try backend='auto'")
