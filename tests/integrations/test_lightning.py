"""Lightning: `fit` takes the steps of the plain loop, or is refused."""

import functools
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpquant_compile.errors import CheckpointError, IntegrationError, PrivateTrainingError
from tests.support.heavy import few
from tests.support.private_loops import dataset
from tests.support.trainers import DELTA, EPOCHS, Trained, begun, train_plainly

# Lightning's advice on workers and loggers; it is imported by the tests, since that takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def lightning() -> Any:
    """Imported first: it mends torchvision, which Lightning imports."""
    from dpquant_compile.integrations import lightning

    return lightning


def module_of(trained: Trained, **replaced: Any) -> Any:
    from lightning.pytorch import LightningModule

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.criterion = trained.run.model, trained.run.criterion
            self.validated: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss: Tensor = self.criterion(self.model(x), y)
            self.log("loss", loss, prog_bar=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            assert not self.model.training
            self.validated.append(self.global_step)
            self.log("accuracy", (self.model(x).argmax(1) == y).float().mean())

        def configure_optimizers(self) -> Any:
            rates = {"scheduler": trained.rates, "interval": "step"}
            own = {"optimizer": trained.run.optimizer, "lr_scheduler": rates}
            return replaced.get("optimizer", own)

    return Classifier()


def trainer_of(trained: Trained, **options: Any) -> Any:
    from lightning.pytorch import Trainer

    from dpquant_compile.integrations.lightning import PrivateTraining

    common = dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    common |= dict(max_epochs=EPOCHS, enable_checkpointing=False, num_sanity_val_steps=1)
    callbacks = [PrivateTraining(trained.run.engine, delta=DELTA), *options.pop("callbacks", ())]
    return Trainer(**{**common, "callbacks": callbacks, **options})


def fit(trained: Trained, *, loader: Any = None, ckpt_path: Any = None, **options: Any) -> tuple[Any, Any]:
    trainer, module = trainer_of(trained, **options), module_of(trained)
    trainer.fit(module, loader or trained.run.loader, DataLoader(dataset(9), batch_size=4), ckpt_path=ckpt_path)
    return trainer, module


@pytest.mark.parametrize("physical", few([3, None], 3))
def test_fit_is_the_plain_loop_to_the_last_bit(physical: int | None) -> None:
    plain = train_plainly(begun(physical))
    trained = begun(physical)
    trainer, module = fit(trained, val_check_interval=0.5)
    assert trained.steps == plain.steps == trainer.global_step == EPOCHS * trained.run.loader.steps == 12
    assert trained.outcome() == plain.outcome()
    assert len(set(module.validated)) > EPOCHS  # also within epochs
    assert float(trainer.callback_metrics["epsilon"]) == pytest.approx(plain.run.engine.get_epsilon(DELTA))


@pytest.mark.parametrize("physical", [3, None])
def test_a_trainer_without_the_callback_is_refused_at_its_first_step(physical: int | None) -> None:
    from lightning.pytorch import Trainer

    trained = begun(physical)
    options = dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = Trainer(**options, max_epochs=1, enable_checkpointing=False, accumulate_grad_batches=2)  # type: ignore[arg-type]
    with pytest.raises(IntegrationError, match=r"Trainer\(callbacks=\[PrivateTraining\(engine\)\]\)"):
        trainer.fit(module_of(trained), trained.run.loader)
    assert trained.steps == 0


def test_a_callback_of_another_run_does_not_count() -> None:
    from dpquant_compile.integrations.lightning import PrivateTraining
    from dpquant_compile.privacy.lightning_guard import check_closure

    one, other = begun(), begun()
    trainer = trainer_of(one)
    module = module_of(one)
    module.trainer = trainer
    assert isinstance(trainer.callbacks[0], PrivateTraining)
    closure = functools.partial(trainer.strategy.precision_plugin._wrap_closure, module, one.run.optimizer, int)
    check_closure(closure, one.run.optimizer)
    check_closure(int, other.run.optimizer)  # a closure of the user
    with pytest.raises(IntegrationError, match="without the callback"):
        check_closure(closure, other.run.optimizer)


def test_max_steps_counts_optimizer_steps() -> None:
    trained = begun()
    trainer, _ = fit(trained, max_steps=6, max_epochs=-1)
    assert trained.steps == trainer.global_step == 6
    assert trained.scheduler.epoch == 1  # the second epoch has not ended
    assert sum(e.steps for e in trained.run.engine.ledger.entries if e.purpose == "training") == 6


def test_a_resumed_fit_is_the_uninterrupted_one(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    plain, first = train_plainly(begun()), begun()
    keep = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    fit(first, max_epochs=1, callbacks=[keep], enable_checkpointing=True)
    again = begun()
    trainer, _ = fit(again, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert trainer.global_step == plain.steps and again.steps == plain.steps - first.steps
    assert again.outcome() == plain.outcome()


def test_a_checkpoint_within_an_epoch_is_refused(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    keep = ModelCheckpoint(dirpath=tmp_path, save_on_train_epoch_end=False)
    with pytest.raises(CheckpointError, match="save_on_train_epoch_end"):
        fit(begun(), callbacks=[keep], enable_checkpointing=True, val_check_interval=0.5)


@pytest.mark.parametrize("interval", [dict(every_n_train_steps=1), dict(train_time_interval=timedelta(minutes=1))])
def test_checkpoints_by_steps_or_time_are_refused_before_anything_is_spent(interval: Any, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    trained = begun()
    with pytest.raises(CheckpointError, match=f"{next(iter(interval))}=.*save_on_train_epoch_end=True"):
        fit(trained, callbacks=[ModelCheckpoint(dirpath=tmp_path, **interval)], enable_checkpointing=True)
    assert not trained.run.engine.ledger.entries
    weights = ModelCheckpoint(dirpath=tmp_path, save_weights_only=True, **interval)
    fit(trained, callbacks=[weights], enable_checkpointing=True, max_epochs=1)
    assert trained.steps == 4


@pytest.mark.parametrize("name", ["LearningRateFinder", "BatchSizeFinder"])
def test_callbacks_that_train_by_themselves_are_refused(name: str) -> None:
    from lightning.pytorch import callbacks

    trained = begun()
    module, trainer = module_of(trained), trainer_of(trained, callbacks=[getattr(callbacks, name)()])
    module.train_dataloader = lambda: trained.run.loader
    module.batch_size = 6
    with pytest.raises(IntegrationError, match=f"{name} trains on private data"):
        trainer.fit(module)
    assert not trained.run.engine.ledger.entries


@pytest.mark.parametrize("monitor", ["loss", "loss_step", "loss_epoch"])
@pytest.mark.parametrize("name", ["ModelCheckpoint", "EarlyStopping"])
def test_choices_by_a_metric_of_training_are_refused(name: str, monitor: str, tmp_path: Path) -> None:
    from lightning.pytorch import callbacks

    chooses = getattr(callbacks, name)(monitor=monitor, **({"dirpath": tmp_path} if name == "ModelCheckpoint" else {}))
    trained = begun()
    with pytest.raises(IntegrationError, match=f"{name} monitors '{monitor}'.*public data"):
        fit(trained, callbacks=[chooses], enable_checkpointing=True)
    assert trained.steps == 0


@pytest.mark.parametrize("name", ["ModelCheckpoint", "EarlyStopping"])
def test_choices_by_what_the_end_of_an_epoch_logs_are_refused(name: str, tmp_path: Path) -> None:
    from lightning.pytorch import callbacks

    chooses = getattr(callbacks, name)(monitor="mean", **({"dirpath": tmp_path} if name == "ModelCheckpoint" else {}))
    trained = begun()
    module = module_of(trained)
    kind = type(module)
    kind.on_train_epoch_end = lambda self: self.log("mean", torch.zeros(()))
    with pytest.raises(IntegrationError, match=f"{name} monitors 'mean', which on_train_epoch_end logs"):
        trainer_of(trained, callbacks=[chooses], enable_checkpointing=True).fit(module, trained.run.loader)
    assert not list(tmp_path.iterdir()) and "on_train_epoch_end" not in vars(module)


def test_every_hook_of_training_that_may_log_is_known() -> None:
    from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator

    from dpquant_compile.integrations.lightning import _check_monitors

    def monitored(name: str, fx: str) -> Any:
        metric = SimpleNamespace(meta=SimpleNamespace(name=name, fx=fx))
        callbacks = [SimpleNamespace(monitor=name)]
        return SimpleNamespace(_results={"": metric}, callbacks=callbacks, lr_scheduler_configs=[])

    hooks = [fx for fx, options in _FxValidator.functions.items() if options is not None]
    public = [fx for fx in hooks if fx.startswith(("validation_", "test_", "on_validation_", "on_test_"))]
    for fx in public:
        _check_monitors(monitored("metric", fx))
    _check_monitors(monitored("epsilon", "on_train_epoch_end"))
    for fx in set(hooks) - set(public):
        with pytest.raises(IntegrationError, match=f"which {fx} logs"):
            _check_monitors(monitored("metric", fx))
    with pytest.raises(IntegrationError, match="which training_step logs"):  # under the name of another
        _check_monitors(monitored("epsilon", "training_step"))


def test_a_learning_rate_by_a_metric_of_training_is_refused() -> None:
    trained = begun()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(trained.run.optimizer)
    chosen = {"optimizer": trained.run.optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss"}}
    with pytest.raises(IntegrationError, match="ReduceLROnPlateau monitors 'loss'"):
        trainer_of(trained).fit(module_of(trained, optimizer=chosen), trained.run.loader)
    assert trained.steps == 0


def test_choices_by_a_metric_of_validation_or_by_epsilon_are_made(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    best = ModelCheckpoint(dirpath=tmp_path, monitor="accuracy", mode="max")
    trainer, _ = fit(begun(), callbacks=[best, EarlyStopping("epsilon", patience=1)], enable_checkpointing=True)
    assert best.best_model_path and trainer.current_epoch == 2  # ε only grows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(accumulate_grad_batches=2), "accumulate_grad_batches=2"),
        (dict(gradient_clip_val=1.0), "gradient_clip_val"),
        (dict(precision="bf16-mixed"), "precision='bf16-mixed'"),
        (dict(precision="64-true"), "precision='64-true'"),
        (dict(overfit_batches=2), "overfit_batches"),
        (dict(limit_train_batches=4), "within a logical batch"),
        (dict(fast_dev_run=True), "within a logical batch"),
    ],
    ids=["accumulation", "clipping", "autocast", "double", "overfit", "limit", "fast"],
)
def test_settings_that_would_change_steps_or_gradients_are_refused(options: dict[str, Any], message: str) -> None:
    trained = begun()
    with pytest.raises(IntegrationError, match=message):
        fit(trained, **options)
    assert trained.steps == 0 and not trained.run.engine.ledger.entries


def test_parts_that_are_not_the_private_ones_are_refused() -> None:
    trained = begun()
    with pytest.raises(IntegrationError, match="training loader"):
        fit(trained, loader=DataLoader(dataset(24), batch_size=6))
    module = module_of(trained, optimizer=torch.optim.SGD(trained.run.model.parameters(), lr=0.1))
    with pytest.raises(IntegrationError, match="private optimizer"):
        trainer_of(trained).fit(module, trained.run.loader)
    module = module_of(trained)
    module.model = nn.Linear(2, 2)
    with pytest.raises(IntegrationError, match="private model"):
        trainer_of(trained).fit(module, trained.run.loader)
    module = module_of(trained)
    module.automatic_optimization = False
    with pytest.raises(IntegrationError, match="automatic_optimization"):
        trainer_of(trained).fit(module, trained.run.loader)


def test_a_batch_that_does_not_fit_stops_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = begun()
    monkeypatch.setattr(trained.run.loader._splitter, "pieces", 1)
    monkeypatch.setattr(trained.run.loader, "micro_batches_per_step", 1)
    with pytest.raises(PrivateTrainingError, match="no longer counts"):
        fit(trained)
    assert trained.steps == 0


def test_accumulation_that_changes_later_stops_the_trainer() -> None:
    from lightning.pytorch import Callback

    class Changed(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.accumulate_grad_batches = 2

    trained = begun()
    with pytest.raises(PrivateTrainingError, match="accumulate_grad_batches"):
        fit(trained, callbacks=[Changed()])
    assert trained.steps == 0


def test_the_comparison_sees_losses_that_were_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpquant_compile.integrations.lightning import PrivateTraining

    monkeypatch.setattr(PrivateTraining, "on_before_backward", lambda *args: None)
    trained = begun()
    fit(trained, max_epochs=1)
    assert trained.outcome()["parameters"] != train_plainly(begun(), 1).outcome()["parameters"]
