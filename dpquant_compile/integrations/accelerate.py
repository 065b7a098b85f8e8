"""accelerate: `prepare` hands a private run to an `Accelerator`, with the engine's state in its checkpoints."""

from typing import Any

from dpquant_compile.errors import IntegrationError
from dpquant_compile.module import CompiledModule
from dpquant_compile.privacy.accelerate_guard import check_accelerator
from dpquant_compile.privacy.data.poisson_loader import PrivateLoader
from dpquant_compile.privacy.engine import PrivacyEngine
from dpquant_compile.privacy.mechanism.optimizer import PrivateOptimizer

try:
    from accelerate import Accelerator
except ImportError as missing:
    raise IntegrationError("accelerate is not installed. Fix: pip install accelerate") from missing

__all__ = ["prepare"]


def prepare(accelerator: Accelerator, engine: PrivacyEngine) -> tuple[CompiledModule, PrivateOptimizer, PrivateLoader]:
    """Model, optimizer and loader of the engine's run, for a loop with `accelerator.backward`.

    `accelerator.save_state` and `load_state` then include the engine: ledger, noise, sampling, schedule. Other loaders
    and learning-rate schedulers go to `accelerator.prepare` as usual; such a scheduler steps once per logical batch,
    however often its `step` is called.

    Guarantee: model, optimizer and loader are the private ones themselves. `accelerator.prepare` of them does the same;
    settings of the accelerator that would change gradients or steps are refused either way.
    """
    check_accelerator()
    run = engine.run
    made: tuple[Any, Any, Any] = accelerator.prepare(run.session.model, run.optimizer, run.loader)
    accelerator.register_for_checkpointing(engine)
    return made
