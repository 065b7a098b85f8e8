"""Refuse hooks and modes around a private model: they run outside the graph that was proved to isolate samples."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dpquant_compile.errors import IsolationError

__all__ = ["refuse_hooks", "refuse_modes"]

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


def refuse_modes() -> None:
    """Raise `IsolationError`, naming it, if a mode or a saved-tensor hook is active: it may change any tensor.

    What is active when a program is built would become part of it. `torch.set_default_device` is a mode, too, and
    harmless.
    """
    hooks: object = torch._C._autograd._top_saved_tensors_default_hooks(True)
    modes: list[object] = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    found = [type(mode).__qualname__ for mode in modes if not isinstance(mode, DeviceContext)]
    if hooks is not None:
        found.append("torch.autograd.graph.saved_tensors_hooks")
    if found:
        raise IsolationError(
            f"{found[0]!r} is active around the private model. It sees, and may change, tensors of the whole batch, "
            "outside of what is proved to keep samples apart. Fix: leave it before model(...) and loss.backward(); a "
            "private program decides by itself what it keeps for its backward"
        )


def _hooks(module: nn.Module) -> Iterator[tuple[str, object]]:
    for attribute, kind in _KINDS.items():
        for hook in getattr(module, attribute).values():
            yield kind, hook
        for hook in getattr(nn_module, f"_global{attribute}").values():
            yield f"global {kind}", hook
