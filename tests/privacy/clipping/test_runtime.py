"""Private training loops: what a step is made of, whatever the micro-batches, and what a loop may not do."""

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpquant_compile.errors import PrivateTrainingError
from dpquant_compile.privacy.clipping import runtime as session_module
from dpquant_compile.privacy.mechanism.gaussian import GaussianStream
from tests.privacy.test_engine import CLASSES, FEATURES, Net, Run, dataset, made, train
from tests.support import models


def sums_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.summed_grad.clone() for n, p in model.named_parameters() if p.summed_grad is not None}


def logical_sums(run: Run, epochs: int = 1) -> list[dict[str, Tensor]]:
    """The clipped sums of every logical batch, as they lie in the parameters just before its step."""
    found = []
    for _ in range(epochs):
        for x, y in run.loader:
            run.optimizer.zero_grad()
            run.criterion(run.model(x), y).backward()
            if run.engine.session.micro.last:  # type: ignore[union-attr]
                found.append(sums_of(run.model))
            run.optimizer.step()
    return found


def by_hand(model: nn.Module, samples: Any, criterion: nn.Module, bound: float = 1.0) -> dict[str, Tensor]:
    """Σ of clipped gradients by plain autograd, one sample at a time; parameters without a gradient have zeros."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    totals = {name: torch.zeros_like(p) for name, p in trainable.items()}
    for x, y in samples:
        loss = criterion(model(x[None]), y[None]).sum()
        grads = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
        own = {n: g for n, g in zip(trainable, grads, strict=True) if g is not None}
        norm = float(torch.stack([g.norm() for g in own.values()]).norm())
        for name, grad in own.items():
            totals[name] += grad * min(1.0, bound / max(norm, 1e-30))
    return totals


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def still(parameters: Any) -> torch.optim.Optimizer:
    """Steps that change nothing, so that two runs see the same parameters to the last bit."""
    return torch.optim.SGD(parameters, lr=0.0)


# Micro-batches


@pytest.mark.parametrize("policy", ["none", "all"])
@pytest.mark.parametrize("physical", [1, 3, 5])
def test_micro_batches_sum_up_to_the_logical_batch(physical: int, policy: str) -> None:
    whole, parts = (
        made(optimizer=still, policy=policy, max_physical_batch_size=size, batch=8) for size in (24, physical)
    )
    expected, actual = logical_sums(whole, epochs=2), logical_sums(parts, epochs=2)
    assert len(expected) == len(actual) == 6
    for a, b in zip(actual, expected, strict=True):
        assert_same(a, b)


def test_sums_are_those_by_hand() -> None:
    run, twin = made(optimizer=still, max_physical_batch_size=3), models.seeded(Net)
    data = dataset(24)
    batches: list[list[int]] = []
    for x, y in run.loader:
        micro = run.engine.session.micro  # type: ignore[union-attr]
        batches += [[]] if micro.first else []
        batches[-1] += micro.ids.tolist()
        run.criterion(run.model(x), y).backward()
        if micro.last:
            assert_same(sums_of(run.model), by_hand(twin, [data[i] for i in batches[-1]], nn.CrossEntropyLoss()))
        run.optimizer.step()
    assert len(batches) == 4


def test_one_step_one_draw_of_noise_and_one_spend_per_logical_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    draws: list[float] = []
    own = GaussianStream.normal_like

    def counted(stream: GaussianStream, tensors: Any, std: float) -> list[Tensor]:
        draws.append(std)
        return own(stream, tensors, std)

    monkeypatch.setattr(GaussianStream, "normal_like", counted)
    run = made(max_physical_batch_size=2, noise_multiplier=1.5, max_grad_norm=0.5)
    acted = []
    for x, y in run.loader:
        before, last = models.state(run.model), run.engine.session.micro.last  # type: ignore[union-attr]
        run.optimizer.zero_grad()
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
        moved = not torch.equal(run.model.fc.weight, before["fc.weight"])
        assert moved == last
        acted.append(moved)
    assert len(acted) > 4 and sum(acted) == 4
    assert draws == [0.75] * 4 and run.engine.accountant.history == [(1.5, 0.25, 4)]


def test_divisor_is_the_expected_batch_size() -> None:
    run = made(noise_multiplier=0.0)
    sizes = []
    for x, y in run.loader:
        run.optimizer.zero_grad()
        run.criterion(run.model(x), y).backward()
        sums = sums_of(run.model)
        run.optimizer.step()
        sizes.append(len(x))
        assert_same({n: p.grad * 6 for n, p in run.model.named_parameters()}, sums, 1e-6)
    assert len(set(sizes)) > 1  # or it proves nothing


def test_sum_losses_are_not_divided() -> None:
    run = made(noise_multiplier=0.0, criterion=nn.CrossEntropyLoss(reduction="sum"))
    for x, y in run.loader:
        run.optimizer.zero_grad()
        run.criterion(run.model(x), y).backward()
        sums = sums_of(run.model)
        run.optimizer.step()
        assert_same({n: p.grad for n, p in run.model.named_parameters()}, sums, 0.0)


@pytest.mark.parametrize("rand_on_empty", [False, True])
def test_empty_batches_step_with_noise_alone(rand_on_empty: bool) -> None:
    run = made(n=6, batch=1, rand_on_empty=rand_on_empty, policy="all")
    empty = 0
    for epoch in range(3):
        for x, y in run.loader:
            before, none = models.state(run.model), len(run.engine.session.micro.ids) == 0  # type: ignore[union-attr]
            run.optimizer.zero_grad()
            loss = run.criterion(run.model(x), y)
            loss.backward()
            if none:
                empty += 1
                assert all(not total.any() for total in sums_of(run.model).values())
            run.optimizer.step()
            for name, parameter in run.model.named_parameters():
                assert parameter.isfinite().all() and not torch.equal(parameter, before[name]), (epoch, name)
    assert empty > 1 and run.engine.accountant.history == [(1.0, 1 / 6, 18)]


def test_first_batch_of_all_may_be_empty() -> None:
    run = next(run for seed in range(20) if len(next(iter((run := made(n=4, batch=1, sampler=seed)).loader))[0]) == 0)
    assert train(run, epochs=3) == 12


def test_left_batch_does_not_leak_into_the_next_step() -> None:
    run, twin, data = made(optimizer=still, max_physical_batch_size=2), models.seeded(Net), dataset(24)
    for x, y in run.loader:
        run.optimizer.zero_grad()
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
        assert not run.engine.session.micro.last  # type: ignore[union-attr]
        break
    ids: list[int] = []
    for x, y in run.loader:
        ids += run.engine.session.micro.ids.tolist()  # type: ignore[union-attr]
        run.criterion(run.model(x), y).backward()
        if run.engine.session.micro.last:  # type: ignore[union-attr]
            assert_same(sums_of(run.model), by_hand(twin, [data[i] for i in ids], nn.CrossEntropyLoss()))
            break
        run.optimizer.step()
    assert run.engine.accountant.history == [(1.0, 0.25, 2)]  # paid for when their data was read, step or not


# Losses


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_of_every_reduction(reduction: str, weighted: bool) -> None:
    weight = torch.tensor([0.2, 1.0, 3.0]) if weighted else None
    run = made(optimizer=still, criterion=nn.CrossEntropyLoss(weight, reduction=reduction), max_grad_norm=0.7)
    data = dataset(24)
    own = nn.CrossEntropyLoss(weight, reduction="none")  # the mean of one sample would divide its weight out
    for x, y in run.loader:
        run.optimizer.zero_grad()
        run.criterion(run.model(x), y).mean().backward()  # of "none" it is a mean, of a scalar itself
        ids = run.engine.session.micro.ids.tolist()  # type: ignore[union-attr]
        assert_same(sums_of(run.model), by_hand(models.seeded(Net), [data[i] for i in ids], own, 0.7))
        run.optimizer.step()


def test_criterion_serves_for_validation_as_well() -> None:
    run = made()
    train(run)
    x, y = torch.randn(17, FEATURES), torch.randint(0, CLASSES, (17,))
    run.model.eval()
    assert torch.equal(run.model(x), run.model(x))
    loss = run.criterion(run.model(x), y)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(run.model(x), y))
    run.model.train()
    with torch.no_grad():
        run.criterion(run.model(x), y)
    train(run)


@pytest.mark.parametrize("policy", ["none", "all"])
def test_samples_that_are_not_finite_add_nothing(policy: str) -> None:
    data, bad = dataset(24), [3, 7, 11]
    x, y = data.tensors
    broken = x.clone()
    broken[3], broken[7, 2], broken[11, 0] = torch.nan, torch.inf, -torch.inf
    run = made(data=TensorDataset(broken, y), optimizer=still, policy=policy, batch=24)
    for inputs, labels in run.loader:
        assert len(inputs) == 24  # q = 1: everyone is in
        run.criterion(run.model(inputs), labels).backward()
        found = sums_of(run.model)
        run.optimizer.step()
    assert run.engine.session is not None and run.engine.session.dropped == 3
    assert all(p.isfinite().all() for p in run.model.parameters())
    others = made(optimizer=still, policy=policy, max_physical_batch_size=24)
    others.model.sample_ids = torch.tensor([i for i in range(24) if i not in bad])
    others.criterion(others.model(x[others.model.sample_ids]), y[others.model.sample_ids]).backward()
    assert_same(found, sums_of(others.model))


# Precision


def test_weights_are_rounded_once_per_step_and_site(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = []
    own = session_module.pack_weight

    def counted(weight: Tensor, keys: Tensor, call: Any) -> Tensor:
        rounded.append(tuple(weight.shape))
        return own(weight, keys, call)

    monkeypatch.setattr(session_module, "pack_weight", counted)
    run = made(policy="all", max_physical_batch_size=2)
    micro = train(run, epochs=2)
    assert len(run.model.sites) == 2 and micro > 8
    assert sorted(rounded) == [(3, 8)] * 8 + [(8, 6)] * 8


def test_policy_between_epochs_takes_effect() -> None:
    first, second = (made(optimizer=still, policy=policy) for policy in ("none", "all"))
    low = logical_sums(second)
    high = logical_sums(first)
    assert any(not torch.equal(a["fc.weight"], b["fc.weight"]) for a, b in zip(low, high, strict=True))
    second.model.set_policy("none")
    first.model.set_policy("none")
    for a, b in zip(logical_sums(second), logical_sums(first), strict=True):
        assert_same(a, b, 0.0)


def test_forwards_without_gradients_do_not_disturb_a_batch() -> None:
    plain, busy = (made(policy="all", max_physical_batch_size=3) for _ in range(2))
    train(plain)
    for x, y in busy.loader:
        with torch.no_grad():
            busy.model(torch.randn(11, FEATURES))
        busy.optimizer.zero_grad()
        out = busy.model(x)
        busy.model.eval()
        busy.model(torch.randn(7, FEATURES))
        busy.model.train()
        with torch.no_grad():
            busy.model(x[:1] if len(x) else x)
        busy.criterion(out, y).backward()
        busy.optimizer.step()
    for a, b in zip(plain.model.parameters(), busy.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_eval_runs_unprivately_in_full_precision() -> None:
    run, twin = made(policy="all"), models.seeded(Net)
    x = torch.randn(40, FEATURES)  # more than the programs hold
    run.model.eval()
    torch.testing.assert_close(run.model(x), twin(x))


# What a training loop may not do


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
    with pytest.raises(PrivateTrainingError, match=r"on 9 samples.*hold 4.*raise max_physical_batch_size"):
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


# What would count twice, or reach a parameter or a disk around the noise


def loose(n: int = 4) -> tuple[Any, Tensor, Tensor]:
    run = made(max_physical_batch_size=8)
    x, y = dataset(n).tensors
    return run, x, y


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


CHANGES: dict[str, Any] = {
    "weights": lambda run: run.model.load_state_dict(run.model.state_dict()),
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
    with pytest.raises(PrivateTrainingError, match="between two micro-batches"):
        run.model(x)


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
