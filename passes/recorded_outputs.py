"""The hooks by which transformers returns hidden states, put on for a capture.

A model that is asked for hidden states, by its caller, its configuration or its own code (Wav2Vec2), puts hooks on its
layers at the first call. It does so under a lock, which Dynamo cannot enter. With the hooks in place it does not.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["lacks_recorders", "with_recorders"]

_MODULE, _INSTALL = "transformers.utils.output_capturing", "maybe_install_capturing_hooks"
_INSTALLED = "_output_capturing_hooks_installed"


def lacks_recorders(error: Exception) -> bool:
    """Whether Dynamo failed where transformers puts its hooks on."""
    return _MODULE in sys.modules and _INSTALL in str(error)


@contextmanager
def with_recorders(model: nn.Module) -> Iterator[None]:
    """Put transformers' own hooks on the parts of `model` that have any, and take them away afterwards."""
    install = getattr(sys.modules[_MODULE], _INSTALL)
    recording = [module for module in model.modules() if hasattr(module, "_can_record_outputs")]
    hooks = [(module, module._forward_hooks) for module in model.modules()]
    marked = [(module, module.__dict__.get(_INSTALLED)) for module in model.modules()]
    try:
        for module, held in hooks:
            module.__dict__["_forward_hooks"] = OrderedDict(held)
        for module in recording:
            install(module)
        yield
    finally:
        for module, held in hooks:
            module.__dict__["_forward_hooks"] = held
        for module, mark in marked:
            if mark is None:
                module.__dict__.pop(_INSTALLED, None)
