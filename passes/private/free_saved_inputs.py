"""Savings: what a program's forward keeps for backward, less the float32 inputs of sites that have kept codes.

Which sites read codes is the policy's to say, and so not known when a program is compiled: it saves the inputs of all
of them. When forward has returned, those that backward will not look at are let go, and stand-ins take their places.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dpquant_compile.backends.site_args import site_args

__all__ = ["Savings", "find_savings", "sites_reading", "users_of"]

# Operators that are given a site's input twice, as numbers and in another form, and read one of them.
_READERS = frozenset(
    getattr(torch.ops.dpquant, name).default
    for name in ("sample_norms", "sample_grads", "weighted_grad", "sample_factors")
)

_RESHAPING = frozenset(
    getattr(torch.ops.aten, name).default for name in ("view", "clone", "permute", "unsqueeze", "alias", "detach")
)


@dataclass(frozen=True)
class Savings:
    """Places in the list of saved tensors that only certain sites read, with the rows of those sites."""

    places: tuple[tuple[int, tuple[int, ...]], ...]

    def let_go(self, saved: list[Any], policy: Tensor) -> None:
        """Replace what this policy leaves unread by stand-ins of the same shape and layout that hold nothing."""
        low = policy.tolist() if self.places else []
        for place, sites in self.places:
            if all(low[site] for site in sites):
                saved[place] = _stand_in(saved[place])


def find_savings(backward: fx.GraphModule) -> Savings:
    """See which of the tensors that backward is given are inputs of sites and nothing else."""
    given = enumerate(backward.graph.find_nodes(op="placeholder"))
    return Savings(tuple((place, sites) for place, node in given if (sites := _sites(node))))


def users_of(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Who uses a tensor, and as what: itself, or laid out or shaped otherwise."""
    for user in node.users:
        if user.target in _RESHAPING:
            yield from users_of(user)
        else:
            yield user, node


def sites_reading(user: fx.Node, node: fx.Node) -> tuple[int, ...]:
    """The rows of the sites for which `user` reads `node` as long as one of them is in full precision; none if it
    reads it in any case. A row of -1 is a layer that always is."""
    masks = user.target is torch.ops.dpquant.relu_grad.default
    if user.target not in _READERS and not masks:
        return ()
    given = site_args(user)
    if any(value is node for name, value in vars(given).items() if name != "x"):
        return ()
    return tuple(given.sites) if masks else (given.site,)


def _sites(node: fx.Node) -> tuple[int, ...]:
    """The rows of the sites whose input this is; none if anything else reads it."""
    found = [sites_reading(user, own) for user, own in users_of(node)]
    rows = sorted({row for rows in found for row in rows})
    return tuple(rows) if all(found) and rows and rows[0] >= 0 else ()


def _stand_in(x: Tensor) -> Tensor:
    """A tensor of this shape and layout in memory that all stand-ins share: nobody reads it, so it takes no place."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    held = _ROOMS.get((x.dtype, x.device))
    if held is None or held.numel() < size:
        with torch.inference_mode(False):
            held = _ROOMS[x.dtype, x.device] = torch.empty(size, dtype=x.dtype, device=x.device)
    return held.as_strided(x.shape, x.stride())


_ROOMS: dict[tuple[torch.dtype, torch.device], Tensor] = {}
