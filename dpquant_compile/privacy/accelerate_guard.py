"""`PreparedForAccelerate`: lets accelerate take private loaders and optimizers as they are, or refuses its settings.

accelerate's `prepare` makes a new data loader of each loader, which would lose the sampling, and wraps each optimizer.
It returns what has a true `_is_accelerate_prepared` unchanged.
"""

import sys

from dpquant_compile.errors import IntegrationError

__all__ = ["PreparedForAccelerate", "check_accelerator", "check_accumulation"]


class PreparedForAccelerate:
    """`accelerator.prepare` returns it as it is, and raises `IntegrationError` where that would not be right."""

    @property
    def _is_accelerate_prepared(self) -> bool:
        check_accelerator()
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """Ignored: accelerate marks what it has seen."""


def check_accelerator() -> None:
    """Refuse settings of the process' `Accelerator`, if there is one, that would change gradients or steps."""
    accelerate = sys.modules.get("accelerate")  # else nothing of it runs, and nothing needs a check
    if accelerate is None or not accelerate.state.is_initialized():
        return
    state = accelerate.state.AcceleratorState()
    if state.num_processes > 1:
        raise IntegrationError(
            f"accelerate with {state.num_processes} processes: its wrappers add up gradients by themselves, before "
            "they are clipped, and it steps learning rates once per process. Fix: train on several processes without "
            "accelerate, by torchrun and dpq.init_process_group (docs/distributed.md)"
        )
    if state.mixed_precision != "no":
        raise IntegrationError(
            f"mixed_precision={state.mixed_precision!r}: autocast and loss scaling change what is clipped, and the "
            "private program chooses its own precision. Fix: Accelerator(mixed_precision='no'); low precision comes "
            "from dpquant_compile.compile(model, budget=k)"
        )
    if state.dynamo_plugin.backend.value != "NO":
        raise IntegrationError(
            f"dynamo_backend={state.dynamo_plugin.backend.value!r}: accelerate would compile the compiled model once "
            "more. Fix: Accelerator without dynamo_backend"
        )
    check_accumulation()


def check_accumulation() -> None:
    """Refuse an `Accelerator` that would divide losses, whenever its setting was made and whatever was prepared."""
    accelerate = sys.modules.get("accelerate")
    if accelerate is None or not accelerate.state.is_initialized():
        return
    gradients = accelerate.state.GradientState()
    if gradients.num_steps != 1:
        raise IntegrationError(
            f"gradient_accumulation_steps={gradients.num_steps}: accelerate divides each loss by it, before gradients "
            "are clipped, and sums over several private batches do not add up. Fix: leave it at 1; batch_size= of the "
            "DataLoader is the size of a step, and max_physical_batch_size= of make_private what fits into memory"
        )
