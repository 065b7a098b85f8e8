"""Private training loops: what a step is made of, whatever the micro-batches, and what a loop may not do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpquant_compile.errors import PrivateTrainingError
from dpquant_compile.privacy.clipping import runtime as session_module
from dpquant_compile.privacy.clipping.program import PrivateProgram
from dpquant_compile.privacy.contents import Contents
from dpquant_compile.privacy.mechanism.gaussian import GaussianStream, Part
from tests.support import models
from tests.support.private import assert_close, clipped_sums, made_private, reference_sums
from tests.support.private_loops import (
    CLASSES,
    FEATURES,
    Net,
    assert_same,
    by_hand,
    dataset,
    logical_sums,
    made,
    still,
    sums_of,
    train,
)

# Micro-batches


@pytest.mark.parametrize(("physical", "times"), [(24, 0), (12, 4)])
def test_contents_of_parameters_are_read_only_where_a_batch_is_divided(
    physical: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in each forward and once in each backward."""
    run = made(n=24, batch=24, max_physical_batch_size=physical)
    trained = {id(parameter) for parameter in run.model.parameters()}
    read = []

    def noted(values: Any, checks: Any) -> Contents:
        read.extend(values)
        return Contents(values, checks)

    monkeypatch.setattr(session_module, "Contents", noted)
    assert train(run) == 24 // physical
    assert len(read) == times * len(trained) and {id(value) for value in read} <= trained


def test_micro_batches_without_samples_run_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(max_physical_batch_size=3, optimizer=still)
    sizes, programs = [], []
    forward = PrivateProgram.run_forward
    monkeypatch.setattr(PrivateProgram, "run_forward", lambda own, inputs: programs.append(1) or forward(own, inputs))
    for x, y in run.loader:
        run.optimizer.zero_grad()
        output = run.model(x)
        assert output.shape == (len(x), CLASSES) and output.requires_grad and output.dtype == torch.float32
        loss = run.criterion(output.mul_(2.0), y)
        loss.backward()
        assert len(x) > 0 or loss == 0
        run.optimizer.step()
        sizes.append(len(x))
    assert len(sizes) == len(run.loader) and 0 in sizes
    assert len(programs) == sum(size > 0 for size in sizes) + (sizes[0] == 0)


@pytest.mark.slow
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

    def counted(stream: GaussianStream, tensors: Any, std: float, part: Part) -> list[Tensor]:
        draws.append(std)
        return own(stream, tensors, std, part)

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


@pytest.mark.slow
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

    def counted(weight: Tensor, keys: Tensor, call: Any, precision: int) -> Tensor:
        rounded.append(tuple(weight.shape))
        return own(weight, keys, call, precision)

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


# What would count twice, or reach a parameter or a disk around the noise


def test_an_input_made_of_the_batch_is_refused() -> None:
    class Context(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, context: Tensor) -> Tensor:
            return self.fc(x) + context

    compiled, _, _ = made_private(Context(), 5)
    x = torch.randn(5, 4)
    with pytest.raises(PrivateTrainingError, match=r"'context'.*without a row per sample"):
        compiled(x, x.mean(0))


# Shapes


class Flattened(nn.Module):
    """Gives the rows of all positions in one dimension, so that a sample has as many rows as it has positions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).reshape(-1, 3)


def test_lengths_may_vary_where_positions_are_rows_of_the_output() -> None:
    model, _, _ = made_private(Flattened(), 5, inner="eager", private={"varying_shapes": True})
    for samples, length in ((3, 7), (4, 9), (3, 7), (5, 2), (4, 9)):
        x = torch.randn(samples, length, 4)
        y = model(x)
        torch.testing.assert_close(y, nn.functional.linear(x, model.fc.weight, model.fc.bias).reshape(-1, 3))
        model.__dict__["_private"].drop_sums()


def test_a_model_that_decides_by_its_batch_size_is_refused_with_its_line() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).relu() if x.shape[0] < 16 else self.fc(x)

    model, _, _ = made_private(Deciding(), 5, inner="eager")
    with pytest.raises(PrivateTrainingError, match=r"by its batch size \(test_runtime.py:\d+: .*\[0\] < 16"):
        model(torch.randn(3, 4))


def test_a_region_without_gradients_gives_no_gradient_and_no_noise() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.scale = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = self.scale(x)
            return self.fc(x) * scale

    model, _, engine = made_private(Partly(), 5, inner="eager")
    model(torch.randn(3, 4)).sum().backward()
    assert engine.session.used == {"fc.weight", "fc.bias"}
    with torch.no_grad():
        model(torch.randn(3, 4))
        assert not torch.is_grad_enabled()


def test_parameters_that_were_swapped_are_refused() -> None:
    """Others may be made of the batch."""
    run = made()
    x, y = next(iter(run.loader))
    bias = run.model.fc.bias.detach() + x.mean()
    with pytest.raises(PrivateTrainingError, match=r"parameter 'fc\.bias' .*functional_call"):
        torch.func.functional_call(run.model, {"fc.bias": bias}, (x,))
    run.criterion(run.model(x), y).backward()
    run.optimizer.step()


def test_torch_compile_around_a_private_model_changes_nothing() -> None:
    results = []
    for wrap in (lambda model: model, lambda model: torch.compile(model, backend="aot_eager")):
        run = made()
        model = wrap(run.model)
        for x, y in run.loader:
            run.optimizer.zero_grad()
            run.criterion(model(x), y).backward()
            run.optimizer.step()
        results.append(models.state(run.model))
    assert_same(*results)


class Pairs(nn.Module):
    """A discriminator of pairs: a record and what a generator made beside it; gives [B, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = Net()

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        return torch.cat((self.judge(real)[:, :1], self.judge(fake)[:, :1]), 1)


def test_a_pair_of_real_and_generated_rows_is_one_record() -> None:
    model, pair = models.seeded(Pairs), [torch.randn(5, FEATURES), torch.randn(5, FEATURES)]
    private, _, _ = made_private(model, 6)
    assert_close(clipped_sums(private, pair), reference_sums(model, pair))


def test_a_generator_learns_from_the_plain_model_between_private_steps() -> None:
    """What its backward leaves in the parameters is cleared by zero_grad(), or refused."""
    generator = nn.Linear(2, FEATURES)
    run = made(models.seeded(Pairs), criterion=nn.BCEWithLogitsLoss())
    batches = iter(run.loader)

    def discriminate() -> None:
        x, _ = next(batches)
        fake = generator(torch.randn(len(x), 2))
        with pytest.raises(PrivateTrainingError, match=r"model\.original"):
            run.model(x, fake)
        run.criterion(run.model(x, fake.detach()), torch.tensor([1.0, 0.0]).expand(len(x), 2)).backward()
        run.optimizer.step()

    discriminate()
    run.model.original.judge(generator(torch.randn(4, 2))).sum().backward()
    assert generator.weight.grad is not None and generator.weight.grad.any()
    with pytest.raises(PrivateTrainingError, match=r"has a gradient that did not come through the private program"):
        discriminate()
    run.optimizer.zero_grad()
    discriminate()


def test_generated_rows_appended_to_the_batch_are_refused() -> None:
    run = made(max_physical_batch_size=24)
    batches = iter(run.loader)  # held: who drops it leaves the loop, and goes on by hand
    x = next(batch for batch, _ in batches if len(batch) > 1)
    for more in (1, 24):
        with pytest.raises(PrivateTrainingError, match=r"each row of a private batch is one sample"):
            run.model(torch.cat([x, torch.randn(more, FEATURES)]))
