"""What a private training loop may not do: count twice, or reach a parameter or a disk around the noise."""

import copy
import io
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dpquant_compile.errors import PrivateTrainingError
from tests.support import models
from tests.support.private_loops import (
    FEATURES,
    Net,
    Run,
    dataset,
    made,
    train,
)


@pytest.fixture
def batch() -> Iterator[tuple[Run, Tensor, Tensor]]:
    """A run in the middle of its first epoch."""
    run = made(noise_multiplier=0.0, max_physical_batch_size=4, sampler=1)
    for x, y in run.loader:
        run.optimizer.zero_grad()
        yield run, x, y
        break


Batch = tuple[Run, Tensor, Tensor]


def test_second_backward_on_a_micro_batch_is_refused(batch: Batch) -> None:
    run, x, y = batch
    run.criterion(run.model(x), y).backward()
    sums = {name: p.summed_grad.clone() for name, p in run.model.named_parameters()}
    with pytest.raises(PrivateTrainingError, match=r"second backward.*Fix: one forward and one backward"):
        run.criterion(run.model(x), y).backward()
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter.summed_grad, sums[name])


def test_two_views_of_a_batch_are_refused(batch: Batch) -> None:
    run, x, y = batch
    first, second = run.model(x), run.model(x + 0.1)
    with pytest.raises(PrivateTrainingError, match=r"not the model's last one.*torch\.no_grad\(\)"):
        (run.criterion(first, y) + run.criterion(second, y)).backward()
    with pytest.raises(PrivateTrainingError, match=rf"gave {len(x)} samples.*on {2 * len(x)} rows|holds? 4"):
        run.model(torch.cat([x, x]))


def test_backward_through_a_kept_graph_is_refused(batch: Batch) -> None:
    run, x, y = batch
    loss = run.criterion(run.model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(PrivateTrainingError, match="has had its backward"):
        loss.backward()


def test_output_of_an_earlier_micro_batch_is_refused() -> None:
    run = made(max_physical_batch_size=4)
    kept: Tensor | None = None
    for x, y in run.loader:
        loss = run.criterion(run.model(x), y)
        if kept is not None:
            with pytest.raises(PrivateTrainingError, match="not the model's last one"):
                (loss + kept).backward()
            break
        kept = loss


def test_other_numbers_of_rows_are_refused(batch: Batch) -> None:
    run, x, _ = batch
    with pytest.raises(PrivateTrainingError, match=rf"gave {len(x)} samples.*on {len(x) - 1} rows.*as it comes"):
        run.model(x[1:])
    with pytest.raises(PrivateTrainingError, match=rf"gave {len(x)} samples.*on 9 rows.*as it comes"):
        run.model(torch.randn(9, FEATURES))


def test_input_that_requires_a_gradient_is_refused(batch: Batch) -> None:
    run, x, _ = batch
    with pytest.raises(PrivateTrainingError, match=r"requires a gradient.*detach it"):
        run.model(x.requires_grad_())


def test_gradient_around_the_program_does_not_reach_a_step() -> None:
    run = made(noise_multiplier=0.0)
    x, y = next(iter(run.loader))
    loss = run.criterion(run.model(x), y) + run.model.fc.weight.square().sum()
    loss.backward()
    with pytest.raises(PrivateTrainingError, match=r"'fc\.weight' has a gradient that did not come through.*Fix"):
        run.optimizer.step()


def test_second_step_does_not_take_the_sum_again() -> None:
    run = made(noise_multiplier=0.0)
    x, y = next(iter(run.loader))
    run.criterion(run.model(x), y).backward()
    run.optimizer.step()
    before = models.state(run.model)
    try:
        run.optimizer.step()
    except PrivateTrainingError:
        assert len(run.engine.accountant.history) == 1
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())


def test_training_in_eval_mode_is_refused() -> None:
    run = made()
    run.model.eval()
    x, y = next(iter(run.loader))
    run.criterion(run.model(x), y).backward()
    with pytest.raises(PrivateTrainingError, match="did not come through the private program"):
        run.optimizer.step()


def loose(n: int = 4) -> tuple[Any, Tensor, Tensor]:
    run = made(max_physical_batch_size=8)
    x, y = dataset(n).tensors
    return run, x, y


def test_a_loop_in_eval_is_refused_at_its_first_backward() -> None:
    """With zero_grad() for each micro-batch nothing is left for the step to find: it would be noise alone, and paid."""
    run = made(noise_multiplier=0.0, max_physical_batch_size=4, sampler=1)
    run.model.eval()
    for x, y in run.loader:
        run.optimizer.zero_grad()
        with pytest.raises(PrivateTrainingError, match=r"model was in eval\(\).*Fix: model.train\(\) before the loop"):
            run.criterion(run.model(x), y).backward()
        break


def test_a_backward_in_eval_outside_of_a_batch_is_the_users_own() -> None:
    run = made(max_physical_batch_size=4)
    x, y = dataset(4).tensors
    run.model.eval()
    run.criterion(run.model(x), y).backward()
    assert all(p.grad is not None for p in run.model.parameters())


def test_batches_by_hand_are_not_added_up() -> None:
    run, x, y = loose()
    run.criterion(run.model(x), y).backward()
    with pytest.raises(PrivateTrainingError, match=r"second backward before optimizer\.step.*Fix"):
        run.criterion(run.model(x), y).backward()
    run.optimizer.step()
    run.criterion(run.model(x), y).backward()  # a step is between them
    run.optimizer.zero_grad()
    run.criterion(run.model(x), y).backward()  # what was there is dropped
    run.optimizer.step()
    assert [(entry.q, entry.steps) for entry in run.engine.ledger.entries] == [(1.0, 2)]


def test_a_sample_is_in_a_batch_by_hand_once() -> None:
    run, x, y = loose(3)
    run.model.sample_ids = torch.tensor([4, 9, 4])
    with pytest.raises(PrivateTrainingError, match="names a sample twice"):
        run.criterion(run.model(x), y).backward()


def test_noise_that_is_added_by_hand_is_charged() -> None:
    run, x, y = loose()
    run.criterion(run.model(x), y).backward()
    run.optimizer.add_noise()
    assert [(entry.q, entry.steps) for entry in run.engine.ledger.entries] == [(1.0, 1)]
    run.optimizer.zero_grad()
    run.optimizer.add_noise()  # another release, if only of noise
    assert sum(entry.steps for entry in run.engine.ledger.entries) == 2


def test_a_hook_of_the_users_does_not_take_the_place_of_the_account() -> None:
    run, x, y = loose()
    seen: list[Any] = []
    run.optimizer.attach_step_hook(seen.append)
    run.criterion(run.model(x), y).backward()
    run.optimizer.step()
    assert seen == [run.optimizer] and run.engine.ledger.entries[0].steps == 1


@pytest.mark.parametrize("when", ["before make_private", "after it"])
def test_an_old_gradient_of_a_frozen_parameter_is_not_stepped(when: str) -> None:
    model = models.seeded(Net)
    model.body.requires_grad_(False)
    old = torch.full_like(model.body.weight, 100.0)
    if when == "before make_private":
        model.body.weight.grad = old
    run = made(model)
    if when == "after it":
        model.body.weight.grad = old
    before = model.body.weight.detach().clone()
    x, y = next(iter(run.loader))
    run.criterion(run.model(x), y).backward()
    with pytest.raises(PrivateTrainingError, match=r"'body\.weight'.*neither clipped nor noised"):
        run.optimizer.step()
    assert torch.equal(model.body.weight, before)
    run.optimizer.zero_grad()
    assert model.body.weight.grad is None


def test_sums_without_noise_are_not_saved_with_anything() -> None:
    run = made(noise_multiplier=0.0)
    x, y = next(iter(run.loader))
    run.criterion(run.model(x), y).backward()
    held = [p.summed_grad.flatten()[:4].clone() for p in run.model.parameters()]
    assert all(bool(value.any()) for value in held)
    for thing in (run.model, run.model._original, list(run.model.parameters())):
        file = io.BytesIO()
        torch.save(thing, file)
        assert not any(value.numpy().tobytes() in file.getvalue() for value in held)
        file.seek(0)
        back = torch.load(file, weights_only=False)
        parameters = back if isinstance(back, list) else list(back.parameters())
        assert all(getattr(p, "summed_grad", None) is None for p in parameters)
    assert type(run.model.fc.weight.summed_grad * 1) is Tensor  # else it is a tensor like any


def halve(run: Run) -> None:
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(0.5)


def halve_data(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.data.mul_(0.5)


def replace_data(run: Run) -> None:
    run.model.fc.weight.data = run.model.fc.weight.data * 0.5


def write_by_numpy(run: Run) -> None:
    run.model.fc.bias.detach().numpy()[0] += 1.0


def write_a_vector(run: Run) -> None:
    vector_to_parameters(0.5 * parameters_to_vector(run.model.parameters()).detach(), run.model.parameters())


def halve_and_set_the_step(run: Run) -> None:
    step = run.model.step
    halve(run)
    run.model.step = step


def replace_and_set_the_step(run: Run) -> None:
    step = run.model.step
    run.model.fc.weight = nn.Parameter(run.model.fc.weight.detach().clone())
    run.model.step = step


CHANGES: dict[str, Any] = {
    "weights": lambda run: run.model.load_state_dict(run.model.state_dict()),
    "contents": halve,
    "contents, by .data": halve_data,
    "contents, by another .data": replace_data,
    "contents, by numpy": write_by_numpy,
    "contents, by a vector": write_a_vector,
    "contents, and the step back": halve_and_set_the_step,
    "another parameter, and the step back": replace_and_set_the_step,
    "step": lambda run: setattr(run.model, "step", 77),
    "policy": lambda run: run.model.set_policy("all"),
    "mode": lambda run: run.model.norm.eval(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_changes_between_the_micro_batches_of_a_batch(change: str) -> None:
    """Which of them a sample is in depends on the others."""
    run = made(n=24, batch=24, max_physical_batch_size=4)
    batches = iter(run.loader)
    x, y = next(batches)
    run.criterion(run.model(x), y).backward()
    CHANGES[change](run)
    x, y = next(batches)
    message = "not the one that make_private took" if change.startswith("another") else "between two micro-batches"
    with pytest.raises(PrivateTrainingError, match=message):
        run.model(x)


@pytest.mark.parametrize("at", ["the first micro-batch", "the last micro-batch"])
def test_parameters_do_not_change_between_a_forward_and_its_backward(at: str) -> None:
    """The gradients of a micro-batch would be at other weights than those of the rest."""
    run = made(n=24, batch=24, max_physical_batch_size=12)
    for x, y in run.loader:
        loss = run.criterion(run.model(x), y)
        micro = run.engine.session.micro  # type: ignore[union-attr]
        assert not (micro.first and micro.last)
        if micro.last if at == "the last micro-batch" else micro.first:
            halve_data(run)
            with pytest.raises(PrivateTrainingError, match="were changed between the forward and its backward"):
                loss.backward()
            return
        loss.backward()
    pytest.fail("no such micro-batch")


def test_what_is_the_same_again_is_no_change() -> None:
    """Weights that are put in the place of others for an evaluation, as averages are, and back."""
    run = made(n=24, batch=24, max_physical_batch_size=12)
    for x, y in run.loader:
        run.criterion(run.model(x), y).backward()
        held = [parameter.data for parameter in run.model.parameters()]
        for parameter in run.model.parameters():
            parameter.data = parameter.data * 0.5
        with torch.no_grad():
            run.model(x)
        for parameter, value in zip(run.model.parameters(), held, strict=True):
            parameter.data = value
        run.model.step = run.model.step
        run.optimizer.step()


def test_a_buffer_does_not_change_between_the_micro_batches_of_a_batch() -> None:
    model = models.seeded(Net)
    model.register_buffer("scale", torch.ones(()))
    run = made(model, n=24, batch=24, max_physical_batch_size=12)
    batches = iter(run.loader)
    x, y = next(batches)
    run.criterion(run.model(x), y).backward()
    run.model.scale.data.fill_(2.0)
    with pytest.raises(PrivateTrainingError, match=r"buffer 'scale' of the model changed"):
        run.model(next(batches)[0])


LOSS_CHANGES: dict[str, Any] = {
    "weight": lambda loss: loss.criterion.weight.data.mul_(10),
    "label_smoothing": lambda loss: setattr(loss.criterion, "label_smoothing", 0.5),
    "reduction": lambda loss: setattr(loss, "reduction", "sum"),
    "mode": lambda loss: loss.criterion.eval(),
}


@pytest.mark.parametrize("change", LOSS_CHANGES)
def test_the_loss_does_not_change_between_the_micro_batches_of_a_batch(change: str) -> None:
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    run = made(n=24, batch=24, max_physical_batch_size=12, criterion=loss)
    batches = iter(run.loader)
    x, y = next(batches)
    run.criterion(run.model(x), y).backward()
    LOSS_CHANGES[change](run.criterion)
    x, y = next(batches)
    with pytest.raises(PrivateTrainingError, match=r"of the criterion changed since make_private"):
        run.criterion(run.model(x), y)


def test_the_noise_multiplier_does_not_change_within_a_batch() -> None:
    run = made(n=24, batch=24, max_physical_batch_size=12)
    batches = iter(run.loader)
    x, y = next(batches)
    run.criterion(run.model(x), y).backward()
    run.optimizer.step()
    run.optimizer.noise_multiplier = 1.5
    x, y = next(batches)
    run.criterion(run.model(x), y).backward()
    with pytest.raises(PrivateTrainingError, match=r"is 1\.5 now, but this batch was accounted for with 1"):
        run.optimizer.step()


@pytest.mark.slow
def test_evaluation_between_micro_batches_changes_nothing() -> None:
    run, other = (made(n=24, batch=24, max_physical_batch_size=4) for _ in range(2))
    train(run)
    for x, y in other.loader:
        other.optimizer.zero_grad()
        other.criterion(other.model(x), y).backward()
        other.model.eval()
        other.model(x)
        other.model.train()
        other.optimizer.step()
    assert all(map(torch.equal, run.model.parameters(), other.model.parameters()))


def test_a_loader_of_an_earlier_make_private_is_refused() -> None:
    first = made(n=24, batch=24)
    second = made(engine=first.engine, n=24, batch=1, data=first.engine.dataset)
    with pytest.raises(PrivateTrainingError, match="earlier make_private"):
        next(iter(first.loader))
    assert not first.engine.ledger.entries
    train(second)


def test_noise_is_for_the_bound_that_the_sum_was_clipped_to() -> None:
    run = made(max_physical_batch_size=8, max_grad_norm=1.0)
    x, y = dataset(4).tensors
    run.model.sample_ids = torch.arange(4)
    run.optimizer.max_grad_norm = 100.0
    loss = run.criterion(run.model(x), y)
    run.optimizer.max_grad_norm = 0.01
    with pytest.raises(PrivateTrainingError, match="3 rows"):
        run.model(x[:3])
    with pytest.raises(PrivateTrainingError, match="not the model's last"):
        loss.backward()  # it would be clipped to 100
    run.optimizer.max_grad_norm = 0.5
    loss = run.criterion(run.model(x), y)
    run.optimizer.max_grad_norm = 2.0  # for the next batch
    loss.backward()
    assert run.engine.session.sensitivity == 0.5


# Samples that a sum lacks


def skipping(run: Run) -> None:
    """A loop that leaves the second of three micro-batches out, say because its loss is not finite."""
    for place, (x, y) in enumerate(run.loader):
        loss = run.criterion(run.model(x), y)
        if place != 1:
            loss.backward()
        run.optimizer.step()


def test_a_micro_batch_that_is_skipped_stops_the_release() -> None:
    run = made(noise_multiplier=0.0, batch=24, max_physical_batch_size=8)
    before = models.state(run.model)
    with pytest.raises(PrivateTrainingError, match=r"lacks micro-batches of its logical batch.*skip none by its loss"):
        skipping(run)
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())


def test_noise_in_the_middle_of_a_logical_batch_is_refused() -> None:
    run = made(batch=24, max_physical_batch_size=8)
    for x, y in run.loader:
        run.criterion(run.model(x), y).backward()
        with pytest.raises(PrivateTrainingError, match="the step after the last"):
            run.optimizer.add_noise()
        break


def test_a_sample_without_a_finite_gradient_needs_no_skipping() -> None:
    x, y = dataset(6).tensors
    x[2] = torch.inf
    run = made(data=torch.utils.data.TensorDataset(x, y), batch=6, max_physical_batch_size=2)
    train(run)
    assert all(parameter.isfinite().all() for parameter in run.model.parameters())


def accumulating(run: Run) -> None:
    """A loop that wants to add up gradients over batches."""
    for x, y in run.loader:
        run.criterion(run.model(x), y).backward()
    run.optimizer.step()


def skipping_empty(run: Run) -> None:
    """A loop that takes no empty micro-batch, of which one is the last of most batches."""
    for x, y in run.loader:
        if len(x) == 0:
            continue
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()


def stepping_the_other(run: Run) -> None:
    """A loop with the optimizer from before make_private."""
    for x, y in run.loader:
        run.criterion(run.model(x), y).backward()
        run.optimizer.original_optimizer.step()


@pytest.mark.parametrize("loop", [accumulating, skipping_empty, stepping_the_other])
def test_batches_left_without_a_step_are_told_once_and_then_refused(loop: Any) -> None:
    run = made(max_physical_batch_size=8 if loop is skipping_empty else 24)
    with (
        pytest.warns(UserWarning, match=r"a batch was left without a step.*paid for.*Fix: step the optimizer"),
        pytest.raises(PrivateTrainingError, match=r"2 batches in a row were left without a step.*no empty one"),
    ):
        loop(run)


def test_a_batch_that_is_left_now_and_then_is_only_told() -> None:
    def every_second(run: Run) -> None:
        for place, (x, y) in enumerate(run.loader):
            run.criterion(run.model(x), y).backward()
            if place % 2:
                run.optimizer.step()

    with pytest.warns(UserWarning, match="a batch was left without a step"):
        every_second(made(max_physical_batch_size=24))


def test_zero_grad_after_a_loop_that_was_left_drops_what_was_given_by_hand() -> None:
    run = made(batch=24, max_physical_batch_size=8)
    x, y = next(batches := iter(run.loader))
    session = run.engine.session
    assert session is not None
    run.criterion(run.model(x), y).backward()
    run.optimizer.step()  # skipped: more micro-batches follow
    batches.close()
    run.criterion(run.model(x), y).backward()
    run.optimizer.zero_grad()
    assert session.step.empty
    run.criterion(run.model(x), y).backward()  # the second one, had the first been kept


def test_samples_by_hand_before_a_loop_do_not_raise_its_rate() -> None:
    run = made()
    x, y = dataset(4).tensors
    run.criterion(run.model(x), y).backward()
    train(run)
    assert {entry.q for entry in run.engine.ledger.entries} == {0.25}


# What backward needs as it was


class Squashed(nn.Module):
    """Its backward needs the input and the output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.fc(x) * self.scale)


@pytest.mark.parametrize("what", ["input 0", "output 0", "attribute 'scale'"])
def test_writing_in_place_before_backward_is_refused(what: str) -> None:
    run = made(Squashed(), max_physical_batch_size=4)
    x, y = dataset(4).tensors
    out = run.model(x)
    written = {"input 0": x, "output 0": out, "attribute 'scale'": run.model.scale}[what]
    loss = run.criterion(out * 2, y)
    with torch.no_grad():
        written.sub_(written.mean(0))
    with pytest.raises(
        PrivateTrainingError, match=rf"^{what} of the model was written to in place.*Fix: change a copy"
    ):
        loss.backward()
    assert run.engine.session is not None and run.engine.session.step.empty


def test_a_forward_without_a_backward_leaves_no_memory_behind() -> None:
    # By Inductor, which saves the very tensor that it gives as the output.
    run = made(Squashed(), max_physical_batch_size=4, compile_options={"inner": "inductor"})
    x, _ = dataset(4).tensors
    session = run.engine.session
    assert session is not None
    out = run.model(x)
    gone = weakref.ref(session.step._open)  # type: ignore[type-var]  # held by the call
    session.step.end()
    assert gone() is not None
    del out
    assert gone() is None


# Copies


def test_an_optimizer_is_neither_copied_nor_pickled() -> None:
    run = made()
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(PrivateTrainingError, match=r"neither copied nor pickled.*state_dict"):
            attempt(run.optimizer)


class FailsOnce(torch.optim.SGD):
    """A wrapped optimizer that raises in its first step."""

    failed = False

    def step(self, closure: Any = None) -> Any:
        if not self.failed:
            self.failed = True
            raise RuntimeError("out of memory")
        return super().step(closure)


def test_a_step_that_failed_in_the_wrapped_optimizer_is_paid_for_again() -> None:
    run = made(optimizer=lambda parameters: FailsOnce(parameters, lr=0.1))
    for x, y in run.loader:
        run.criterion(run.model(x), y).backward()
        with pytest.raises(RuntimeError, match="out of memory"):
            run.optimizer.step()
        run.optimizer.step()
        break
    assert sum(entry.steps for entry in run.engine.ledger.entries) == 2
