"""transformers: `PrivateTrainer`, a `Trainer` whose training loop is the private one."""

import contextlib
import inspect
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dpquant_compile import torchvision_compat
from dpquant_compile.errors import CheckpointError, IntegrationError
from dpquant_compile.privacy.accelerate_guard import check_accelerator
from dpquant_compile.privacy.data.poisson_loader import PrivateLoader
from dpquant_compile.privacy.engine import PrivacyEngine

with contextlib.suppress(torchvision_compat.TorchvisionMissingError):
    torchvision_compat.models()  # imported below by others, and a CPU build of torch needs help with it
try:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import TrainOutput
except ImportError as missing:
    raise IntegrationError("transformers is not installed. Fix: pip install transformers accelerate") from missing

__all__ = ["PrivateTrainer", "PrivateTrainerMixin"]

STATE = "dpquant.pt"  # the engine's state in the folder of a checkpoint
_NOT_PRIVATE = ("loss", "train_loss", "grad_norm")


class PrivateTrainerMixin:
    """Put it before `Trainer`, or a subclass of it: `PrivateTrainer(engine=engine, args=…, eval_dataset=…)`.

    Model, optimizer, loss and training data are those that `engine.make_private` was given; the data is a dataset of
    dicts, and the criterion is called with the model's output and the labels.

    - One step of the trainer is one logical batch, so `max_steps`, `num_train_epochs`, learning rates and intervals
      count optimizer steps.
    - The engine's scheduler, if it has one, steps at the end of each epoch.
    - ε at `delta` is logged as "epsilon". Losses on training data are not: they depend on the data and have no noise.
    - Checkpoints hold the engine's state, and `train(resume_from_checkpoint=…)` goes on from it.

    Guarantee: it changes nothing of what the engine's own loop releases. Arguments under which steps or gradients would
    not be those of that loop are refused.
    """

    # Attributes of the trainer
    model: Any
    state: Any
    label_names: list[str]
    _signature_columns: Any

    def __init__(self, *args: Any, engine: PrivacyEngine, delta: float = 1e-5, **options: Any) -> None:
        run = engine.run
        _check_class(type(self))
        if run.criterion is None:
            raise IntegrationError(
                "make_private was given no criterion=, and the model's own loss mixes samples. Fix: give it one of "
                "dpq.losses, such as criterion=dpq.losses.CausalLMLoss()"
            )
        given = inspect.signature(Trainer.__init__).bind_partial(self, *args, **options).arguments
        arguments = given.get("args") or TrainingArguments()
        _check_arguments(arguments)
        _check_given(given, engine)
        self.engine = engine
        self.delta = delta
        self._steps = _Steps(run.loader)
        _, learning_rates = given.get("optimizers", (None, None))
        kept = {name: value for name, value in given.items() if name not in ("self", "train_dataset")}
        chosen = {"model": run.session.model, "args": arguments, "optimizers": (run.optimizer, learning_rates)}
        config = getattr(run.session.model, "config", None)
        caches = getattr(config, "use_cache", None)
        super().__init__(**{**kept, **chosen})
        _check_arguments(arguments)  # accelerator_config has changed them
        check_accelerator()
        if config is not None and caches is not None:
            config.use_cache = caches  # the trainer has set it, and forward() reads it, which must stay as it was
        self.label_names = self.label_names or ["labels"]
        self.add_callback(_EndOfEpoch(self))  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> Any:
        """The private loader, a logical batch at a time."""
        return self._steps

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of every micro-batch of a logical batch; the trainer's step comes after the last."""
        step, losses, sizes = self.engine.run.step, [], []
        while True:
            losses.append(super().training_step(model, inputs))  # type: ignore[misc]
            sizes.append(0 if step.micro is None else len(step.micro.ids))
            if not step.incomplete:
                break
            inputs = self._steps.next_part()
        total: Tensor = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / max(sum(sizes), 1)
        return total

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The private criterion on the model's output and the labels, which the model does not see."""
        if not isinstance(inputs, Mapping) or any(name not in inputs for name in self.label_names):
            raise IntegrationError(
                f"a batch must be a dict with the labels {', '.join(self.label_names)}. Fix: give make_private a "
                "DataLoader over a dataset of dicts, and name other labels by TrainingArguments(label_names=…)"
            )
        labels = [inputs[name] for name in self.label_names]
        outputs = model(**{name: value for name, value in inputs.items() if name not in self.label_names})
        criterion: Any = self.engine.run.criterion
        loss = criterion(outputs, labels[0] if len(labels) == 1 else labels)
        if not return_outputs:
            return loss
        return loss, outputs if isinstance(outputs, Mapping) else {"logits": outputs}

    def floating_point_ops(self, inputs: Any) -> int:
        """None: they would be counted from the sizes of batches, and saved with the model."""
        return 0

    def train(self, *args: Any, **options: Any) -> TrainOutput:
        """What the trainer returns, without the mean loss on training data, which has no noise."""
        done: TrainOutput = super().train(*args, **options)  # type: ignore[misc]
        shown = {name: value for name, value in done.metrics.items() if name not in _NOT_PRIVATE}
        return done._replace(training_loss=math.nan, metrics=shown)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log ε in place of losses on training data."""
        shown = {name: value for name, value in logs.items() if name not in _NOT_PRIVATE}
        super().log({**shown, "epsilon": self.engine.get_epsilon(self.delta)}, start_time)  # type: ignore[misc]

    def end_epoch(self) -> None:
        """End the loop over the loader, and choose the next epoch's policy."""
        run, scheduler = self.engine.run, self.engine.scheduler
        run.end_epoch()
        run.loader.leave()  # where max_steps ended it before
        if self._steps.taken == len(self._steps) and scheduler is not None:
            scheduler.step()

    def _set_signature_columns_if_needed(self) -> None:
        # The trainer looks at forward() for the columns of an evaluation dataset; the compiled model's takes anything.
        original = self.engine.run.session.internals.original
        names = inspect.signature(original.forward).parameters
        self._signature_columns = [*names, "label", "label_ids", *self.label_names]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        # As the original, so that from_pretrained() reads it.
        compiled, self.model = self.model, self.engine.run.session.internals.original
        try:
            super()._save(output_dir, state_dict)  # type: ignore[misc]
        finally:
            self.model = compiled

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        self.engine.save_checkpoint(path=Path(output_dir) / STATE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not (Path(resume_from_checkpoint) / STATE).exists():
            raise CheckpointError(
                f"{resume_from_checkpoint} has no {STATE}: it was not written by a PrivateTrainer with a whole "
                "checkpoint. Fix: leave out save_only_model; to start from the weights, load them before make_private"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if self.state.global_step % len(self._steps):
            raise CheckpointError(
                f"{checkpoint} was written within an epoch, after step {self.state.global_step} of epochs of "
                f"{len(self._steps)} steps. Fix: resume from a checkpoint of the end of an epoch"
            )
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        self.engine.load_checkpoint(path=Path(checkpoint) / STATE)


class PrivateTrainer(PrivateTrainerMixin, Trainer):
    """A `transformers.Trainer` for what `make_private` returned: see `PrivateTrainerMixin`."""


class _Steps:
    """A private loader for a trainer that counts steps: each item is the first micro-batch of a logical batch."""

    def __init__(self, loader: PrivateLoader) -> None:
        self.loader = loader
        self.dataset = loader.dataset
        self.taken = 0  # in the current epoch
        self._parts: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return self.loader.steps

    def __iter__(self) -> Iterator[Any]:
        self.taken = 0
        self._parts = iter(self.loader)
        for _ in range(len(self)):
            first = next(self._parts)
            self.taken += 1
            yield first

    def next_part(self) -> Any:
        """The next micro-batch of the same logical batch."""
        return next(self._parts)


class _EndOfEpoch(TrainerCallback):
    def __init__(self, trainer: PrivateTrainerMixin) -> None:
        self._trainer = trainer

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._trainer.end_epoch()


def _check_class(trainer: type) -> None:
    """Refuse a loss or a step of the user's: below the mixin it would never run, above it would run in its place."""
    for kind in trainer.__mro__:
        if kind is PrivateTrainerMixin or kind.__module__.startswith("transformers."):
            continue
        for name in ("compute_loss", "training_step"):
            if name in vars(kind):
                raise IntegrationError(
                    f"{kind.__qualname__} of {kind.__module__} defines {name}(), but loss and step are those of the "
                    "private run: it would never be called, or take their place. Fix: leave it out; a loss of your "
                    "own goes to make_private as criterion="
                )


def _check_arguments(args: Any) -> None:
    """Refuse arguments of the trainer that would change gradients or steps, or publish what is secret."""
    saving, evaluating, uploading = (
        str(getattr(value, "value", value)) for value in (args.save_strategy, args.eval_strategy, args.hub_strategy)
    )
    small = (
        "batch_size= of the DataLoader is the size of a step, and max_physical_batch_size= of make_private what fits"
    )
    wrong = {
        f"max_grad_norm={args.max_grad_norm}": (
            args.max_grad_norm and args.max_grad_norm > 0,
            "the trainer would clip before there are gradients, and private training clips each sample's. Fix: "
            "TrainingArguments(max_grad_norm=0); the bound is max_grad_norm of make_private",
        ),
        f"gradient_accumulation_steps={args.gradient_accumulation_steps}": (
            args.gradient_accumulation_steps != 1,
            f"a step belongs to one logical batch. Fix: leave it at 1; {small} into memory",
        ),
        "fp16 or bf16": (
            args.fp16 or args.bf16,
            "autocast and loss scaling change what is clipped. Fix: leave them off; low precision comes from "
            "dpquant_compile.compile(model, budget=k)",
        ),
        f"{max(args.n_gpu, args.world_size)} devices": (
            args.n_gpu > 1 or args.world_size > 1,
            "the trainer's wrappers add up gradients before they are clipped. Fix: one device; for several processes "
            "torchrun and a plain loop (docs/distributed.md)",
        ),
        "deepspeed or fsdp": (
            bool(args.deepspeed) or bool(args.fsdp),
            "private programs read whole parameters, and their sums must not be added up by others. Fix: leave it out",
        ),
        "torch_compile": (args.torch_compile, "the model is compiled already. Fix: leave it out"),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            f"it would start training again, and pay again. Fix: leave it out; {small} into memory",
        ),
        f"label_smoothing_factor={args.label_smoothing_factor}": (
            args.label_smoothing_factor != 0,
            "the loss is the criterion of make_private. Fix: smooth there",
        ),
        f"include_num_input_tokens_seen={args.include_num_input_tokens_seen!r}": (
            args.include_num_input_tokens_seen not in (False, "no"),
            "the sizes of batches are secret, and it would be saved with the model. Fix: leave it out",
        ),
        f"hub_strategy={uploading!r}": (
            args.push_to_hub and uploading in ("checkpoint", "all_checkpoints") and not args.save_only_model,
            f"it would upload {STATE} of the checkpoints, which holds the keys of the noise. Fix: "
            "TrainingArguments(hub_strategy='end') or 'every_save', or save_only_model=True",
        ),
        "gradient_checkpointing": (
            args.gradient_checkpointing,
            "the trainer would turn it on in the model that is compiled already. Fix: leave it out, and call "
            "model.gradient_checkpointing_enable() before dpquant_compile.compile",
        ),
        f"neftune_noise_alpha={args.neftune_noise_alpha}": (
            args.neftune_noise_alpha is not None,
            "its hook on the embeddings is no part of the private program. Fix: leave it out",
        ),
        f"save_strategy={saving!r}": (
            (saving == "steps" or (saving == "best" and evaluating == "steps")) and not args.save_only_model,
            "a checkpoint within an epoch cannot be resumed. Fix: TrainingArguments(save_strategy='epoch') or 'no', "
            "save_only_model=True, or 'best' with eval_strategy='epoch'",
        ),
    }
    for name, (refused, reason) in wrong.items():
        if refused:
            raise IntegrationError(f"{name}: {reason}")


def _check_given(given: Mapping[str, Any], engine: PrivacyEngine) -> None:
    """Refuse arguments of the constructor that would put something else in the place of a part of the run."""
    run = engine.run
    model, (optimizer, _) = given.get("model"), given.get("optimizers") or (None, None)
    own = (
        ("model", model is None or model is run.session.model),
        ("optimizers", optimizer is None or optimizer is run.optimizer),
        ("train_dataset", given.get("train_dataset") is None or given["train_dataset"] is engine.dataset),
        *((name, given.get(name) is None) for name in ("model_init", "compute_loss_func", "optimizer_cls_and_kwargs")),
    )
    for name, right in own:
        if not right:
            raise IntegrationError(
                f"{name}= is not what make_private was given or returned: it would train something else, or around the "
                "noise. Fix: leave it out; model, optimizer, loss and training data are the engine's"
            )
