"""`check_closure`: lets Lightning's trainer step a private optimizer only where `PrivateTraining` attends the run.

Without that callback the trainer divides losses before they are clipped, counts micro-batches as steps, and drops
batches that are paid for.
"""

import sys
from collections.abc import Callable
from typing import Any

from dpquant_compile.errors import IntegrationError

__all__ = ["check_closure"]

_PACKAGES = ("lightning", "pytorch_lightning")


def check_closure(closure: Callable[[], Any], optimizer: Any) -> None:
    """Refuse the closure of a Lightning trainer that has no `PrivateTraining` for the run of `optimizer`."""
    # Lightning's precision plugin gives partial(self._wrap_closure, module, …) to every optimizer.
    plugin = getattr(getattr(closure, "func", None), "__self__", None)
    if not any(kind.__module__.split(".")[0] in _PACKAGES for kind in type(plugin).__mro__):
        return
    integration = sys.modules.get("dpquant_compile.integrations.lightning")  # else there is no such callback
    module = next(iter(getattr(closure, "args", ())), None)
    callbacks = getattr(getattr(module, "trainer", None), "callbacks", ())
    if integration is not None and any(
        isinstance(each, integration.PrivateTraining) and each.engine.run.optimizer is optimizer for each in callbacks
    ):
        return
    raise IntegrationError(
        "Lightning's Trainer steps a private optimizer without the callback PrivateTraining: it would divide losses "
        "before they are clipped, and its steps would not be those of the engine. Nothing was released for this "
        "batch. Fix: Trainer(callbacks=[PrivateTraining(engine)]), from dpquant_compile.integrations.lightning, with "
        "the Trainer of the package lightning (docs/lightning.md)"
    )
