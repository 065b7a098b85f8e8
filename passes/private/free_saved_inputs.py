"""Free the float32 inputs of sites that have saved codes instead, between forward and backward.

The policy decides which sites read codes, so this is unknown when a program is compiled: forward saves the inputs of
all sites. After forward, `SavedInputs.free` replaces those that backward will not read by placeholders without data.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dpquant_compile.backends.site_args import site_args
from dpquant_compile.numerics.recipe import Precision
from dpquant_compile.passes.private.cut_joint import backward_of
from dpquant_compile.passes.runner import NOTE, PassResult

__all__ = ["SavedInputs", "free_saved_inputs", "sites_reading", "users_of"]

_UNREAD = "unread_if_low"  # key in a placeholder's metadata: rows of the sites that read it only in full precision

# Operators that take a site's input twice, as numbers and in another form, and read one of them.
_READERS = frozenset(
    getattr(torch.ops.dpquant, name).default
    for name in ("sample_norms", "sample_grads", "weighted_grad", "sample_factors", "embedding_products")
)

_RESHAPING = frozenset(
    getattr(torch.ops.aten, name).default for name in ("view", "clone", "permute", "unsqueeze", "alias", "detach")
)


@dataclass(frozen=True)
class SavedInputs:
    """Indices of saved tensors that only certain sites read, with the rows of those sites."""

    places: tuple[tuple[int, tuple[int, ...]], ...]

    @staticmethod
    def of(gm: fx.GraphModule) -> "SavedInputs":
        """The result of `free_saved_inputs`."""
        given = enumerate(backward_of(gm).graph.find_nodes(op="placeholder"))
        return SavedInputs(tuple((place, node.meta[_UNREAD]) for place, node in given if _UNREAD in node.meta))

    def free(self, saved: list[Any], policy: Tensor) -> None:
        """Replace tensors that are unread under this policy by placeholders of the same shape without data."""
        rounded = [Precision(entry).by_recipe for entry in policy.tolist()] if self.places else []
        for place, sites in self.places:
            if all(rounded[site] for site in sites):
                saved[place] = _stand_in(saved[place])


def free_saved_inputs(gm: fx.GraphModule) -> PassResult:
    """Record for each tensor that backward takes which sites alone read it, if they do so only in full precision.

        def backward(relu, …)   →   def backward(relu, …)  # relu: not read when low: sites 4, 7

    Requires: `cut_joint`. Ensures: `SavedInputs.of(gm)` names the tensors that a run may free, by policy.
    Numerics: unchanged; only metadata is written.
    """
    found = [(node, rows) for node in backward_of(gm).graph.find_nodes(op="placeholder") if (rows := _sites(node))]
    for node, rows in found:
        note = f"not read by backward if low: site {', '.join(map(str, rows))}"
        node.meta = {**node.meta, _UNREAD: rows, NOTE: note}  # forward's node may share the dict
    return PassResult(gm, bool(found))


def users_of(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The users of a tensor, each with the form that it uses: the tensor itself, or a view or copy of it."""
    for user in node.users:
        if user.target in _RESHAPING:
            yield from users_of(user)
        else:
            yield user, node


def sites_reading(user: fx.Node, node: fx.Node) -> tuple[int, ...]:
    """The rows of the sites for which `user` reads `node` only while one of them runs by no recipe; empty if it always
    reads it. The row -1 is a layer that is always in full precision."""
    masks = user.target is torch.ops.dpquant.relu_grad.default
    if user.target not in _READERS and not masks:
        return ()
    given = site_args(user)
    if any(value is node for name, value in vars(given).items() if name != "x"):
        return ()
    return tuple(given.sites) if masks else (given.site,)


def _sites(node: fx.Node) -> tuple[int, ...]:
    """The rows of the sites whose input this is; empty if anything else reads it."""
    found = [sites_reading(user, own) for user, own in users_of(node)]
    rows = sorted({row for rows in found for row in rows})
    return tuple(rows) if all(found) and rows and rows[0] >= 0 else ()


def _stand_in(x: Tensor) -> Tensor:
    """A tensor of this shape and layout whose memory all placeholders share: nobody reads it."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    held = _ROOMS.get((x.dtype, x.device))
    if held is None or held.numel() < size:
        with torch.inference_mode(False):
            held = _ROOMS[x.dtype, x.device] = torch.empty(size, dtype=x.dtype, device=x.device)
    return held.as_strided(x.shape, x.stride())


_ROOMS: dict[tuple[torch.dtype, torch.device], Tensor] = {}
