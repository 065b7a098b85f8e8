"""The link table that a compiled program reads (policy, random keys, sample ids), and the dispatcher that fills it."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from dpquant_compile.backends.sending import sent
from dpquant_compile.errors import CompileSpecError
from dpquant_compile.numerics.random_bits import ROLES, PublicBits, RandomBits
from dpquant_compile.numerics.recipe import Precision
from dpquant_compile.policy import Policy, resolve_policy

__all__ = ["Dispatcher", "LinkTable", "versions"]

FIRST_CAPACITY = 1 << 16  # larger batches make the table grow, and the program compile once more


class LinkTable(nn.Module):
    """What `dpquant::site` reads: `policy` (a `Precision` per site, on the CPU), `keys` (site × role), `samples` (ids).

    Changes replace the tensors and never write into them, so that a backward pass still sees what its forward saw.
    What decides on the host stays there, since the host would wait for a device that it reads from: `policy`, and the
    keys of weights once more in `weight_keys`.
    """

    policy: Tensor
    keys: Tensor
    samples: Tensor

    def __init__(self, sites: int) -> None:
        super().__init__()
        self.register_buffer("policy", torch.zeros(sites, dtype=torch.uint8), persistent=False)
        self.register_buffer("keys", torch.zeros(sites, len(ROLES), dtype=torch.int64), persistent=False)
        self.register_buffer("samples", torch.arange(FIRST_CAPACITY), persistent=False)
        self.weight_keys: tuple[int, ...] = ()


class Dispatcher:
    """Holds the policy and the step counter of one compiled model, and keeps its link table in line with them.

    The step advances when parameters changed since the last training forward (an optimizer step), so that all
    forwards between two optimizer steps see one rounding of the weights. The random bits are a function of
    (seed, step, site, role, sample, element), with its place in the batch as a sample's id unless `sample_ids` are set.
    Private training gives `begin` bits of its own, which are secret, in place of those of the seed.
    """

    def __init__(self, names: Sequence[str], seed: int, policy: Policy, other: Precision = Precision.FULL) -> None:
        self.names = tuple(names)
        self.bits: RandomBits = PublicBits(seed)
        self.table = LinkTable(len(self.names))
        self.step = 0
        self.policy = policy
        self.other = other  # of sites that are not in the policy
        self.sample_ids: Tensor | None = None
        self._versions: int | None = None
        self._shown: tuple[Any, ...] | None = None
        self._placed = True  # whether the table's ids are the places in the batch

    @property
    def rows(self) -> dict[str, int]:
        """The row of each site in the link table."""
        return {name: row for row, name in enumerate(self.names)}

    def set_policy(self, policy: "str | Iterable[str]") -> Policy:
        self.policy = resolve_policy(policy, self.names)
        return self.policy

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(
        self,
        *,
        batch: int,
        device: torch.device,
        low: bool,
        parameters: Iterable[Tensor] | None,
        bits: RandomBits | None = None,
        ids: Tensor | None = None,
    ) -> None:
        """Bring the link table up to date before a forward. `parameters` are given in training only.

        Without `low` all sites are in full precision, whatever the policy is.

        `bits` and `ids` are of private training; without them the bits are those of the seed and of `sample_ids`.
        """
        bits = bits or self.bits
        if parameters is not None:
            now = versions(parameters)
            if self._versions is not None and now != self._versions:
                self.step += 1
            self._versions = now
        wanted = (self.policy if low else None, bits, self.step, device)
        with torch.inference_mode(False):  # the table outlives this call, and may next be used where gradients are
            self._show_samples(batch, device, self.sample_ids if ids is None else ids, bits)
            if wanted != self._shown:
                mask = self.policy.mask if low else [False] * len(self.names)
                others = self.other if low else Precision.FULL
                row = [Precision.LOW if own else others for own in mask]
                self.table.policy = torch.tensor(row, dtype=torch.uint8, device="cpu")  # whatever the default is
                keys = bits.site_keys(self.step, self.names)
                self.table.weight_keys = tuple(keys[:, ROLES.index("weight")].tolist())
                self.table.keys = sent(keys, device)
                self._shown = wanted

    def extend(self, names: Sequence[str]) -> None:
        """Add sites; the rows of the others stay."""
        self.names += tuple(names)
        self.policy = Policy(self.policy, self.names)
        self._shown = None

    def set_step(self, step: int) -> None:
        """Go on from `step`, whatever was changed until now."""
        self.step, self._versions = step, None

    def changed(self, parameters: Iterable[Tensor]) -> bool:
        """Whether parameters changed since the last training forward."""
        return self._versions is not None and versions(parameters) != self._versions

    def _show_samples(self, batch: int, device: torch.device, ids: Tensor | None, bits: RandomBits) -> None:
        table, size = self.table, max(FIRST_CAPACITY, 1 << max(batch - 1, 0).bit_length())
        if ids is not None:
            if ids.shape != (batch,):
                raise CompileSpecError(
                    f"sample_ids has shape {tuple(ids.shape)} for a batch of {batch}: give one id per sample, or None "
                    "to number them by their places"
                )
            samples = torch.zeros(max(size, table.samples.shape[0]), dtype=torch.int64, device=device)
            samples[:batch] = sent(bits.sample_ids(self.step, ids), device)
            table.samples, self._placed = samples, False
        elif batch > table.samples.shape[0] or not self._placed or table.samples.device != device:
            table.samples = torch.arange(max(size, table.samples.shape[0]), device=device)
            self._placed = True


# How often each parameter was stepped by an optimizer. Fused ones write without raising the version of a tensor.
_STEPS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _count_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _STEPS[parameter] = _STEPS.get(parameter, 0) + 1


register_optimizer_step_post_hook(_count_step)


def versions(parameters: Iterable[Tensor]) -> int:
    """A number that changes with every write to one of the parameters, but for writes through `.data`."""
    return sum(p._version + _STEPS.get(p, 0) for p in parameters if not p.is_inference())
