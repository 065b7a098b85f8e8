"""Requests for gradients of values that need none: `output.requires_grad_(True)` in hooks and speech encoders.

Transformers and peft put such hooks on embeddings, and encoders of sound (Wav2Vec2, HuBERT) do the same in forward().
They serve activation checkpointing in eager mode, which gives no gradients where no input requires one. Captured graphs
need no such help, and Dynamo does not capture them.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from dpquant_compile.passes.fx_utils import package_of

__all__ = ["asks_for_gradients", "without_gradient_requests"]

# In transformers: whether an encoder's forward() sets requires_grad on its input. It does nothing else.
_SWITCH = "_requires_grad"


def _hook(module: Any, input: Any, output: Any) -> None:
    output.requires_grad_(True)


def asks_for_gradients(hook: object) -> bool:
    """Whether a forward hook has the code of such a hook, instruction by instruction."""
    code, own = getattr(hook, "__code__", None), _hook.__code__
    return code is not None and (code.co_code, code.co_names, code.co_consts) == (
        *(own.co_code, own.co_names, own.co_consts),
    )


@contextmanager
def without_gradient_requests(model: nn.Module) -> Iterator[None]:
    """Take these hooks away from all modules of `model` for a while, and switch off encoders' requests; others stay."""
    kept = [(module, module._forward_hooks) for module in model.modules()]
    switched = [module for module in model.modules() if _asks_in_forward(module)]
    try:
        for module, hooks in kept:
            if any(map(asks_for_gradients, hooks.values())):
                own = OrderedDict((key, hook) for key, hook in hooks.items() if not asks_for_gradients(hook))
                module.__dict__["_forward_hooks"] = own
        for module in switched:
            module.__dict__[_SWITCH] = False
        yield
    finally:
        for module, hooks in kept:
            module.__dict__["_forward_hooks"] = hooks
        for module in switched:
            module.__dict__[_SWITCH] = True


def _asks_in_forward(module: nn.Module) -> bool:
    return package_of(type(module)) == "transformers" and module.__dict__.get(_SWITCH) is True
