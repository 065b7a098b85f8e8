"""Refuse hooks around a private model: they run outside the graph that was proved to isolate samples."""

from collections.abc import Iterator

from torch import nn
from torch.nn.modules import module as nn_module

from dpquant_compile.errors import IsolationError

__all__ = ["refuse_hooks"]

_KINDS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


def refuse_hooks(module: nn.Module, what: str = "model") -> None:
    """Raise `IsolationError`, naming the hook, if calling `module` runs one: its own, or one of all modules.

    Hooks of inner layers are part of the captured graph, and refused there.
    """
    for kind, hook in _hooks(module):
        name = getattr(hook, "__qualname__", type(hook).__name__)
        raise IsolationError(
            f"the {kind} {name!r} runs whenever the {what} is called, outside of what is proved or checked to keep "
            "samples apart: it may use the whole batch. Fix: remove it for private training (handle.remove()), and do "
            "its work in the model's forward() or, sample by sample, in the dataset"
        )


def _hooks(module: nn.Module) -> Iterator[tuple[str, object]]:
    for attribute, kind in _KINDS.items():
        for hook in getattr(module, attribute).values():
            yield kind, hook
        for hook in getattr(nn_module, f"_global{attribute}").values():
            yield f"global {kind}", hook
