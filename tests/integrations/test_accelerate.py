"""accelerate: a loop over what `prepare` returned takes the steps of the plain loop, or is refused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from dpquant_compile.errors import IntegrationError
from tests.support.private_loops import dataset
from tests.support.trainers import EPOCHS, Trained, begun, train_plainly, validate

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def accelerator_of() -> Iterator[Callable[..., Any]]:
    """Makes accelerators; their settings are those of the process until they are reset."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    yield lambda **options: Accelerator(cpu=True, **options)
    reset()


def by_integration(accelerator: Any, trained: Trained) -> Any:
    from dpquant_compile.integrations.accelerate import prepare

    return prepare(accelerator, trained.run.engine)


def by_accelerate(accelerator: Any, trained: Trained) -> Any:
    return accelerator.prepare(trained.run.model, trained.run.optimizer, trained.run.loader)


WAYS = pytest.mark.parametrize("prepare", [by_integration, by_accelerate])


def train(accelerator: Any, trained: Trained, parts: Any, epochs: int = EPOCHS) -> None:
    """A loop as accelerate's documents write it."""
    model, optimizer, loader = parts
    rates, held_out = accelerator.prepare(trained.rates, DataLoader(dataset(9), batch_size=4))
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(trained.run.criterion(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1e-3)  # there are no gradients before the step
                optimizer.step()
                rates.step()
                optimizer.zero_grad()
        trained.scheduler.step()
        assert sum(len(y) for _, y in held_out) == 9
        validate(trained.run)


@WAYS
@pytest.mark.parametrize("physical", [3, None])
def test_a_loop_is_the_plain_one_to_the_last_bit(
    physical: int | None, prepare: Callable[..., Any], accelerator_of: Callable[..., Any]
) -> None:
    plain, trained, accelerator = train_plainly(begun(physical)), begun(physical), accelerator_of()
    parts = prepare(accelerator, trained)
    assert all(got is own for got, own in zip(parts, (trained.run[0], trained.run[1], trained.run[3]), strict=True))
    train(accelerator, trained, parts)
    assert trained.steps == plain.steps == 12
    assert trained.outcome() == plain.outcome()


def test_a_resumed_loop_is_the_uninterrupted_one(accelerator_of: Callable[..., Any], tmp_path: Path) -> None:
    plain, first, again = train_plainly(begun()), begun(), begun()
    accelerator = accelerator_of()
    train(accelerator, first, by_integration(accelerator, first), 1)
    accelerator.save_state(str(tmp_path))
    accelerator = accelerator_of()
    parts = by_integration(accelerator, again)
    accelerator.prepare(again.rates)
    accelerator.load_state(str(tmp_path))
    train(accelerator, again, parts, EPOCHS - 1)
    assert again.steps == plain.steps - first.steps
    assert again.outcome() == plain.outcome()


@WAYS
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(gradient_accumulation_steps=2), "gradient_accumulation_steps=2"),
        (dict(mixed_precision="bf16"), "mixed_precision='bf16'"),
        (dict(dynamo_backend="eager"), "dynamo_backend='EAGER'"),
    ],
)
def test_settings_that_would_change_steps_or_gradients_are_refused(
    options: dict[str, Any], message: str, prepare: Callable[..., Any], accelerator_of: Callable[..., Any]
) -> None:
    with pytest.raises(IntegrationError, match=message):
        prepare(accelerator_of(**options), begun())


@pytest.mark.parametrize("prepared", ["nothing", "model", "all, before it was set"])
def test_accumulation_that_prepare_does_not_see_is_refused_at_the_first_step(
    prepared: str, accelerator_of: Callable[..., Any]
) -> None:
    trained, late = begun(), prepared.startswith("all")
    accelerator = accelerator_of(gradient_accumulation_steps=1 if late else 4)
    if late:
        by_accelerate(accelerator, trained)
        accelerator.gradient_accumulation_steps = 4
    elif prepared == "model":
        accelerator.prepare(trained.run.model)
    x, y = next(iter(trained.run.loader))
    accelerator.backward(trained.run.criterion(trained.run.model(x), y))
    with pytest.raises(IntegrationError, match="gradient_accumulation_steps=4"):
        trained.run.optimizer.step()
    assert trained.steps == 0


def test_several_processes_are_refused(accelerator_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.state import PartialState

    accelerator = accelerator_of()
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    with pytest.raises(IntegrationError, match=r"2 processes.*torchrun"):
        by_accelerate(accelerator, begun())


def test_a_loader_that_accelerate_makes_anew_is_refused(accelerator_of: Callable[..., Any]) -> None:
    from accelerate.data_loader import prepare_data_loader

    from dpquant_compile.errors import PrivateTrainingError

    trained = begun()
    made = prepare_data_loader(trained.run.loader)
    assert made is not trained.run.loader
    with pytest.raises(PrivateTrainingError, match="another data loader was made of a private one"):
        next(iter(made))
    assert not trained.run.engine.ledger.entries


def test_without_an_accelerator_nothing_is_checked() -> None:
    assert begun().run.loader._is_accelerate_prepared
    assert isinstance(begun().run.optimizer, torch.optim.Optimizer)
