"""transformers' Trainer: `train` takes the steps of the plain loop, or is refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dpquant_compile as dpq
from dpquant_compile.errors import CheckpointError, IntegrationError
from tests.support.heavy import few
from tests.support.trainers import DELTA, EPOCHS, Records, Trained, begun, train_plainly

# The trainer is imported by the tests, since that takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def arguments(folder: Path, **options: Any) -> Any:
    from dpquant_compile.integrations.transformers import TrainingArguments

    common = dict(num_train_epochs=EPOCHS, use_cpu=True, report_to=[], disable_tqdm=True, max_grad_norm=0)
    common |= dict(eval_strategy="steps", eval_steps=3, save_strategy="no", logging_steps=2)
    return TrainingArguments(output_dir=str(folder), **{**common, **options})


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


def trainer_of(trained: Trained, folder: Path, given: dict[str, Any] | None = None, **options: Any) -> Any:
    from dpquant_compile.integrations.transformers import PrivateTrainer

    return PrivateTrainer(
        engine=trained.run.engine,
        delta=DELTA,
        args=arguments(folder, **options),
        eval_dataset=Records(9),
        compute_metrics=accuracy,
        **{"optimizers": (None, trained.rates), **(given or {})},
    )


@pytest.mark.parametrize("physical", few([3, None], 3))
def test_train_is_the_plain_loop_to_the_last_bit(physical: int | None, tmp_path: Path) -> None:
    plain = train_plainly(begun(physical, records=True))
    trained = begun(physical, records=True)
    trainer = trainer_of(trained, tmp_path)
    result = trainer.train()
    assert trained.steps == plain.steps == result.global_step == EPOCHS * trained.run.loader.steps == 12
    assert trained.outcome() == plain.outcome()
    shown = {name for entry in trainer.state.log_history for name in entry}
    assert {"eval_loss", "eval_accuracy", "epsilon"} <= shown and not shown & {"loss", "train_loss", "grad_norm"}
    assert trainer.state.log_history[-1]["epsilon"] == plain.run.engine.get_epsilon(DELTA)
    assert math.isnan(result.training_loss) and "train_loss" not in result.metrics


def test_max_steps_counts_optimizer_steps(tmp_path: Path) -> None:
    trained = begun(records=True)
    assert trainer_of(trained, tmp_path, max_steps=6).train().global_step == trained.steps == 6
    assert trained.scheduler.epoch == 1  # the second epoch has not ended
    assert sum(e.steps for e in trained.run.engine.ledger.entries if e.purpose == "training") == 6


def test_a_resumed_train_is_the_uninterrupted_one(tmp_path: Path) -> None:
    plain, first, again = train_plainly(begun(records=True)), begun(records=True), begun(records=True)

    trainer_of(first, tmp_path, save_strategy="epoch", num_train_epochs=1).train()
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["total_flos"] == 0  # it would tell the sizes of batches
    trainer = trainer_of(again, tmp_path, save_strategy="epoch")
    assert trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4")).global_step == plain.steps
    assert again.steps == plain.steps - first.steps
    assert again.outcome() == plain.outcome()


def test_a_checkpoint_within_an_epoch_is_not_resumed(tmp_path: Path) -> None:
    trainer_of(begun(records=True), tmp_path, save_strategy="epoch", max_steps=2).train()
    with pytest.raises(CheckpointError, match="within an epoch, after step 2"):
        trainer_of(begun(records=True), tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_grad_norm=1.0), r"max_grad_norm=1\.0.*TrainingArguments\(max_grad_norm=0\)"),
        (dict(gradient_accumulation_steps=2), "gradient_accumulation_steps=2"),
        (dict(bf16=True), "fp16 or bf16"),
        (dict(save_strategy="steps"), "save_strategy='steps'"),
        (dict(save_strategy="best", metric_for_best_model="accuracy"), "save_strategy='best'.*eval_strategy='epoch'"),
        (dict(push_to_hub=True, hub_strategy="checkpoint"), r"hub_strategy='checkpoint': it would upload dpquant\.pt"),
        (dict(push_to_hub=True, hub_strategy="all_checkpoints"), "hub_strategy='all_checkpoints'"),
        (dict(gradient_checkpointing=True), r"model\.gradient_checkpointing_enable\(\) before"),
        (dict(neftune_noise_alpha=5.0), r"neftune_noise_alpha=5\.0"),
        (
            dict(accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 2}}),
            "gradient_accumulation_steps=2: a step belongs",
        ),
        (dict(label_smoothing_factor=0.1), "label_smoothing_factor"),
        (dict(auto_find_batch_size=True), "auto_find_batch_size"),
        (dict(include_num_input_tokens_seen="all"), "include_num_input_tokens_seen"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_arguments_that_would_change_steps_or_gradients_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    trained = begun(records=True)
    with pytest.raises(IntegrationError, match=message):
        trainer_of(trained, tmp_path, **options)
    assert not trained.run.engine.ledger.entries


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", lambda run: nn.Linear(2, 2)),
        ("optimizers", lambda run: (torch.optim.SGD(run.model.parameters(), lr=0.1), None)),
        ("train_dataset", lambda run: Records(24)),
        ("compute_loss_func", lambda run: lambda outputs, labels, num_items_in_batch: outputs.sum()),
    ],
)
def test_parts_that_are_not_the_private_ones_are_refused(
    name: str, value: Callable[[Any], Any], tmp_path: Path
) -> None:
    trained = begun(records=True)
    with pytest.raises(IntegrationError, match=f"{name}= is not what make_private"):
        trainer_of(trained, tmp_path, {name: value(trained.run)})


@pytest.mark.parametrize("method", ["compute_loss", "training_step"])
@pytest.mark.parametrize("below", [True, False])
def test_a_loss_or_step_of_the_users_trainer_is_refused(method: str, below: bool, tmp_path: Path) -> None:
    from dpquant_compile.integrations.transformers import PrivateTrainer, PrivateTrainerMixin, Trainer, _check_class

    trained = begun(records=True)
    options: dict[str, Any] = dict(engine=trained.run.engine, args=arguments(tmp_path, eval_strategy="no"))
    own = type("Own", (Trainer if below else PrivateTrainer,), {method: lambda self, *args, **options: None})
    with pytest.raises(IntegrationError, match=rf"Own of .* defines {method}\(\).*criterion="):
        (type("Mixed", (PrivateTrainerMixin, own), {}) if below else own)(**options)
    from transformers import Seq2SeqTrainer  # after the integration, which mends torchvision for it

    _check_class(type("Mixed", (PrivateTrainerMixin, Seq2SeqTrainer), {"floating_point_ops": lambda self, inputs: 0}))


def test_a_plain_trainer_over_the_private_loader_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    from dpquant_compile.integrations.transformers import Trainer

    class Plain(Trainer):
        def get_train_dataloader(self) -> Any:
            return trained.run.loader

    trained = begun(records=True)
    options = dict(model=trained.run.model, args=arguments(tmp_path, eval_strategy="no"), train_dataset=Records(24))
    trainer = Plain(**options, optimizers=(trained.run.optimizer, None))
    with pytest.raises(
        IntegrationError, match=r"would count each micro-batch as a step.*PrivateTrainer\(engine=engine"
    ):
        trainer.train()
    assert not trained.run.engine.ledger.entries


def test_data_without_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrationError, match="a dataset of dicts"):
        trainer_of(begun(), tmp_path).train()


def test_a_batch_that_does_not_fit_is_trained_on_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has more micro-batches than others; the trainer counts logical batches and takes them all."""
    plain, trained = train_plainly(begun(records=True), 1), begun(records=True)
    monkeypatch.setattr(trained.run.loader._splitter, "pieces", 1)
    trainer_of(trained, tmp_path, num_train_epochs=1).train()
    assert trained.outcome()["parameters"] == plain.outcome()["parameters"]


def test_a_saved_model_is_read_by_from_pretrained(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    from dpquant_compile.integrations.transformers import PrivateTrainer

    torch.manual_seed(0)
    sizes = dict(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    model = BertForSequenceClassification(BertConfig(**sizes, max_position_embeddings=8)).train()
    data = [{"input_ids": torch.randint(20, (6,)), "labels": torch.tensor(i % 2)} for i in range(8)]
    compiled = dpq.compile(model, budget=1, inner="eager")
    engine = dpq.PrivacyEngine(accountant="rdp")
    engine.make_private(
        module=compiled,
        optimizer=torch.optim.SGD(compiled.parameters(), lr=0.1),
        criterion=dpq.losses.on_field("logits", nn.CrossEntropyLoss()),
        data_loader=torch.utils.data.DataLoader(data, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    trainer = PrivateTrainer(
        engine=engine,
        args=arguments(tmp_path, num_train_epochs=1, eval_strategy="epoch"),
        eval_dataset=data[:3],
        compute_metrics=accuracy,
    )
    assert trainer.train().global_step == 2
    trainer.save_model(str(tmp_path / "saved"))
    again = BertForSequenceClassification.from_pretrained(tmp_path / "saved")
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
