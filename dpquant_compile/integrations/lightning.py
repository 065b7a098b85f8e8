"""Lightning: `PrivateTraining` is a callback that makes `Trainer.fit` train as the plain private loop does."""

import contextlib
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dpquant_compile import torchvision_compat
from dpquant_compile.errors import CheckpointError, IntegrationError, PrivateTrainingError
from dpquant_compile.privacy.engine import PrivacyEngine

with contextlib.suppress(torchvision_compat.TorchvisionMissingError):
    torchvision_compat.models()  # imported below by others, and a CPU build of torch needs help with it
try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ImportError as missing:
    raise IntegrationError("Lightning is not installed. Fix: pip install lightning") from missing

__all__ = ["PrivateTraining"]


class PrivateTraining(Callback):
    """`Trainer(callbacks=[PrivateTraining(engine)])`, for a module that holds what `make_private` returned.

    `configure_optimizers` returns the private optimizer, `training_step` uses the private model and criterion, and
    `fit` gets the private loader. Then

    - the trainer accumulates over the micro-batches of a logical batch, so `global_step`, `max_steps` and learning
      rates with interval "step" count optimizer steps, and the loss is not divided by their number;
    - the engine's scheduler, if it has one, steps at the end of each epoch;
    - ε at `delta` is logged as "epsilon" at the end of each epoch;
    - checkpoints hold the engine's state, and `fit(ckpt_path=…)` goes on from it.

    Guarantee: it changes nothing of what the engine's own loop releases. Settings of the trainer under which steps or
    gradients would not be those of that loop are refused.
    """

    def __init__(self, engine: PrivacyEngine, *, delta: float = 1e-5) -> None:
        self.engine = engine
        self.delta = delta
        self._within = False  # an epoch that has not ended
        self._whole = False  # the last batch of the epoch was trained on
        self._loaded: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the trainer's settings, and let it accumulate over micro-batches."""
        if stage != "fit":
            return
        run = self.engine.run
        pieces = run.loader.micro_batches_per_step
        if pieces is None:
            raise IntegrationError(
                "the private loader has no length, since the sizes of its batches are not known. Fix: give your batch "
                "sampler an attribute batch_size, the most samples of a batch"
            )
        if trainer.world_size > 1 or not isinstance(trainer.strategy, SingleDeviceStrategy):
            raise IntegrationError(
                f"strategy {type(trainer.strategy).__name__} on {trainer.world_size} processes: such strategies wrap "
                "the model and add up gradients before they are clipped. Fix: Trainer(devices=1); for several "
                "processes torchrun and a plain loop (docs/distributed.md)"
            )
        if trainer.precision != "32-true":
            raise IntegrationError(
                f"precision={trainer.precision!r}: autocast, loss scaling and casts change what is clipped. Fix: "
                "Trainer(precision='32-true'); low precision comes from dpquant_compile.compile(model, budget=k)"
            )
        if trainer.gradient_clip_val:
            raise IntegrationError(
                f"gradient_clip_val={trainer.gradient_clip_val!r}: the trainer would clip before there are gradients, "
                "and private training clips each sample's. Fix: leave it out, and give max_grad_norm to make_private"
            )
        if not pl_module.automatic_optimization:
            raise IntegrationError(
                "automatic_optimization=False: the trainer would count each micro-batch as a step. Fix: leave "
                "automatic optimization on, or train in a plain loop"
            )
        if trainer.overfit_batches:  # type: ignore[attr-defined]  # which Lightning sets elsewhere
            raise IntegrationError(
                "overfit_batches replaces the sampler, and with it the privacy amplification by sampling. Fix: leave "
                "it out, and give a smaller dataset to make_private"
            )
        if trainer.accumulate_grad_batches not in (1, pieces):
            raise IntegrationError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches}: a step belongs to one logical batch, "
                f"which has {pieces} micro-batches here. Fix: leave it out; batch_size= of the DataLoader is the size "
                "of a step, and max_physical_batch_size= of make_private what fits into memory"
            )
        if not any(module is run.session.model for module in pl_module.modules()):
            raise IntegrationError(
                "the private model is not part of this LightningModule. Fix: assign the model that make_private "
                "returned in its __init__, as self.model = model"
            )
        _check_callbacks(trainer)
        trainer.accumulate_grad_batches = pieces

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check what the trainer works on, and load the engine's state after all that the trainer restores."""
        run = self.engine.run
        if trainer.train_dataloader is not run.loader:
            raise IntegrationError(
                "the training loader is not the one that make_private returned, or the trainer has made a new one of "
                "it. Fix: trainer.fit(module, loader) with the private loader"
            )
        if len(trainer.optimizers) != 1 or trainer.optimizers[0] is not run.optimizer:
            raise IntegrationError(
                "configure_optimizers() does not return the private optimizer alone, so steps would have no noise, or "
                "no gradients. Fix: return the optimizer that make_private returned"
            )
        if trainer.num_training_batches % trainer.accumulate_grad_batches:
            raise IntegrationError(
                f"an epoch of {trainer.num_training_batches} micro-batches would end within a logical batch, which has "
                f"{trainer.accumulate_grad_batches}. Fix: leave out limit_train_batches and fast_dev_run, or give "
                "limit_train_batches a multiple"
            )
        if self._loaded is not None:
            self.engine.load_state_dict(self._loaded)
            self._loaded = None
        self._attend(trainer, pl_module)

    def _attend(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check monitors between the module's own end of an epoch and the callbacks that choose right after it."""
        own = pl_module.on_train_epoch_end

        def on_train_epoch_end() -> None:
            own()
            _check_monitors(trainer)

        pl_module.__dict__["on_train_epoch_end"] = on_train_epoch_end

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the module as it was."""
        pl_module.__dict__.pop("on_train_epoch_end", None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same, where the trainer is interrupted."""
        self.teardown(trainer, pl_module, "fit")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin an epoch."""
        self._within, self._whole = True, False

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Undo the trainer's division of the loss, exactly: gradients are clipped, so their size matters."""
        _check_monitors(trainer)
        pieces = trainer.accumulate_grad_batches
        if pieces > 1:
            loss.register_hook(lambda grad: grad * pieces)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Refuse a step within a logical batch, which would do nothing and be counted."""
        if self.engine.run.step.incomplete:
            raise _out_of_step("is about to step within a logical batch")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Refuse to go on where the trainer made no step at the end of a logical batch."""
        step = self.engine.run.step
        if not step.incomplete and step.paid is not None:
            raise _out_of_step("made no step at the end of a logical batch")
        self._whole = batch_idx + 1 == trainer.num_training_batches

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the loop over the loader, choose the next epoch's policy, log ε."""
        run, scheduler = self.engine.run, self.engine.scheduler
        run.end_epoch()
        run.loader.leave()  # where max_steps or limit_train_batches ended it before
        if self._whole and scheduler is not None:
            scheduler.step()
        self._within = False
        pl_module.log("epsilon", self.engine.get_epsilon(self.delta), prog_bar=True)

    def state_dict(self) -> dict[str, Any]:
        """The engine's state, for a checkpoint between epochs."""
        if self._within:
            raise CheckpointError(
                "a checkpoint within an epoch: a resumed run would start the epoch again, with other batches but the "
                "same noise. Fix: ModelCheckpoint(save_on_train_epoch_end=True), or save_weights_only=True"
            )
        return self.engine.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the engine's state until the trainer has restored its own."""
        self._loaded = state_dict


def _check_callbacks(trainer: Trainer) -> None:
    """Refuse callbacks that take steps of their own, or would ask for the engine's state within an epoch."""
    for each in trainer.callbacks:  # type: ignore[attr-defined]  # which Lightning sets elsewhere
        if isinstance(each, LearningRateFinder | BatchSizeFinder):
            raise IntegrationError(
                f"{type(each).__name__} trains on private data before the run, and chooses by losses without noise. "
                "Fix: leave it out; choose the learning rate on public data, and max_physical_batch_size= of "
                "make_private by memory"
            )
        if isinstance(each, ModelCheckpoint) and not each.save_weights_only:
            asked = (
                ("every_n_train_steps", each._every_n_train_steps),
                ("train_time_interval", each._train_time_interval),
            )
            for name, value in asked:
                if value:
                    raise CheckpointError(
                        f"{name}={value!r} of ModelCheckpoint: a run that is resumed within an epoch would start the "
                        "epoch again, with other batches but the same noise. Fix: every_n_epochs= with "
                        "save_on_train_epoch_end=True, or save_weights_only=True"
                    )


# The beginnings of the names of all hooks that may log while the trainer trains.
_IN_TRAINING = (
    *("training_step", "on_train_", "on_before_", "on_after_backward", "backward"),
    *("optimizer_", "configure_gradient_clipping", "clip_gradients"),
)
_EPSILON = ("epsilon", "on_train_epoch_end")  # which `PrivateTraining` logs


def _check_monitors(trainer: Trainer) -> None:
    """Refuse choices that depend on what training logs: it depends on the data and has no noise. ε may be monitored."""
    held: Any = trainer._results
    logged = [(metric.meta.name, metric.meta.fx) for metric in held.values()] if held else []
    within = [(name, fx) for name, fx in logged if fx.startswith(_IN_TRAINING) and (name, fx) != _EPSILON]
    names = {name + end: fx for name, fx in within for end in ("", "_step", "_epoch")}
    choosing = [*trainer.callbacks, *trainer.lr_scheduler_configs]  # type: ignore[attr-defined]
    for each in choosing:
        monitor = getattr(each, "monitor", None)
        if monitor in names and getattr(each, "reduce_on_plateau", True):  # other schedulers do not read it
            what = type(getattr(each, "scheduler", each)).__name__
            raise IntegrationError(
                f"{what} monitors {monitor!r}, which {names[monitor]} logs: it is computed from private data without "
                "noise, so what is chosen by it tells of the data, and ε does not cover that. Fix: monitor a metric "
                "of validation_step, on public data, under a name that training does not log"
            )


def _out_of_step(what: str) -> PrivateTrainingError:
    return PrivateTrainingError(
        f"the trainer {what}, so it no longer counts as the engine does. Either something has changed "
        "trainer.accumulate_grad_batches, or a Poisson batch did not fit into its micro-batches, which has a "
        "probability below 1e-12. Nothing was released for this batch. Fix: leave accumulate_grad_batches to "
        "PrivateTraining; else go on from the last checkpoint"
    )
