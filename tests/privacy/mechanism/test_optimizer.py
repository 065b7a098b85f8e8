"""Steps against torch's own optimizers, the noise in them, resumed runs, and models that learn."""

import copy
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile.errors import CheckpointError, PrivateTrainingError
from dpquant_compile.privacy.mechanism.gaussian import GaussianStream, Part
from dpquant_compile.privacy.mechanism.optimizer import add_part
from tests.support import models
from tests.support.heavy import few
from tests.support.private_loops import FEATURES, Net, Run, assert_same, by_hand, dataset, made, plain_loader, train

pytestmark = pytest.mark.slow  # each test trains

# Optimizers


def two_rates(parameters: Any) -> torch.optim.Optimizer:
    first, *rest = parameters
    return torch.optim.SGD([dict(params=[first], lr=0.5), dict(params=rest, weight_decay=0.1)], lr=0.05, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "groups": two_rates,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_the_wrapped_optimizer(name: str) -> None:
    """Without noise: each step equals that of torch's own optimizer with the clipped sum over the expected size."""
    run = made(optimizer=OPTIMIZERS[name], noise_multiplier=0.0, max_physical_batch_size=4)
    twin, data = copy.deepcopy(models.seeded(Net)), dataset(24)
    own = OPTIMIZERS[name](twin.parameters())
    for _ in range(2):
        ids: list[int] = []
        for x, y in run.loader:
            run.optimizer.zero_grad()
            run.criterion(run.model(x), y).backward()
            run.optimizer.step()
            micro = run.engine.session.micro  # type: ignore[union-attr]
            ids = micro.ids.tolist() if micro.first else ids + micro.ids.tolist()
            if micro.last:
                sums = by_hand(twin, [data[i] for i in ids], nn.CrossEntropyLoss())
                for key, parameter in twin.named_parameters():
                    parameter.grad = sums[key] / 6
                assert_same({n: p.grad for n, p in run.model.named_parameters()}, {n: g / 6 for n, g in sums.items()})
                own.step()
        assert_same(dict(run.model.named_parameters()), dict(twin.named_parameters()), 1e-4)


# Noise


class Wide(nn.Module):
    """Two weights of 3000 elements each, enough for statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 500, bias=False)
        self.fc = nn.Linear(500, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.body(x)))


def noise_of(run: Run) -> dict[str, list[Tensor]]:
    """The gradients of a run whose loss is zero."""
    found: dict[str, list[Tensor]] = {name: [] for name, _ in run.model.named_parameters()}
    for x, y in run.loader:
        run.optimizer.zero_grad()
        (run.criterion(run.model(x), y) * 0).backward()
        run.optimizer.step()
        for name, parameter in run.model.named_parameters():
            found[name] += [parameter.grad.flatten() * 6] if parameter.grad is not None else []
    return found


@pytest.mark.parametrize(
    ("options", "std"),
    [
        (dict(noise_multiplier=2.0, max_grad_norm=0.5), 1.0),
        (dict(noise_multiplier=0.7, max_grad_norm=3.0, clipping="automatic"), 2.1),
        (dict(noise_multiplier=1.5, max_grad_norm=[0.3, 0.4], clipping="per_layer"), 0.75),
        (dict(noise_multiplier=1.5, max_grad_norm=2.0, clipping="per_layer"), 3.0),
    ],
    ids=["flat", "automatic", "per layer", "per layer shared"],
)
def test_noise_has_the_variance_of_the_sensitivity(options: dict[str, Any], std: float) -> None:
    noise = noise_of(made(models.seeded(Wide), **options))
    for drawn in noise.values():
        assert len(drawn) == 4
        for values in drawn:
            n = values.numel()
            assert abs(float(values.mean())) < 5 * std / n**0.5
            assert abs(float(values.var()) / std**2 - 1) < 5 * (2 / n) ** 0.5
    every = torch.stack([values for drawn in noise.values() for values in drawn])
    correlation = torch.corrcoef(every) - torch.eye(len(every))
    assert correlation.abs().max() < 5 / every.shape[1] ** 0.5  # between steps, and between parameters


def test_noise_does_not_depend_on_the_data() -> None:
    first, second = (noise_of(made(models.seeded(Wide), policy=policy)) for policy in ("none", "all"))
    for name, drawn in first.items():
        assert all(map(torch.equal, drawn, second[name]))
    other = noise_of(made(models.seeded(Wide), noise=1))
    assert not torch.allclose(first["fc.weight"][0], other["fc.weight"][0], atol=0.1)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_parts_of_processes_make_up_the_noise(size: int) -> None:
    """Each value gets noise from one process, also in tensors that several share; the sums themselves do not change."""
    shapes = [(3, 4), (), (40, 7), (0,), (5,), (2, 3, 4, 5), (64,)]
    sums = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes]
    sums[2], sums[5] = sums[2].t().contiguous().t(), sums[5].to(memory_format=torch.channels_last)
    sums[4] = sums[4].double()
    whole = sum(total.numel() for total in sums)
    kept = [total.clone() for total in sums]
    want = [n.add_(s) for n, s in zip(GaussianStream.seeded(3).normal_like(sums, 2.0), sums, strict=True)]
    touched = [torch.zeros(total.shape, dtype=torch.int64) for total in sums]
    places = set()
    for rank in range(size):
        stream = GaussianStream.seeded(3)
        noisy = add_part(stream, sums, 2.0, Part.of(whole, rank, size))
        places.add(stream.place)
        for found, total, noised, count in zip(noisy, sums, want, touched, strict=True):
            assert found.shape == total.shape and found.dtype == total.dtype
            mine = found != total
            assert torch.equal(found[mine], noised[mine])
            count += mine
    assert len(places) == 1
    assert all(bool((count == 1).all()) for count in touched)
    assert all(map(torch.equal, sums, kept))


def test_a_process_without_a_part_adds_nothing() -> None:
    stream, sums = GaussianStream.seeded(3), [torch.ones(5)]
    assert torch.equal(add_part(stream, sums, 2.0, Part.of(5, 0, 2))[0], sums[0])
    assert stream.position == 12, "it goes on where the others do"


# Saving and resuming


def resumable(noise: int, policy: Any = "all", **options: Any) -> Run:
    return made(
        optimizer=lambda p: torch.optim.Adam(p, lr=0.05),
        max_physical_batch_size=4,
        noise=noise,
        policy=policy,
        **options,
    )


@pytest.mark.parametrize("poisson", [False, True])
@pytest.mark.parametrize("file", [False, True])
def test_resumed_run_takes_the_same_steps(file: bool, poisson: bool, tmp_path: Path) -> None:
    whole = resumable(noise=1, poisson_sampling=poisson)
    resumed = resumable(noise=2, sampler=3, policy="none", poisson_sampling=poisson)
    train(whole, epochs=2)
    if file:
        path = str(tmp_path / "checkpoint.pt")
        whole.engine.save_checkpoint(path=path, module=whole.model, optimizer=whole.optimizer)
        resumed.engine.load_checkpoint(path=path, module=resumed.model, optimizer=resumed.optimizer)
    else:
        resumed.engine.load_state_dict(copy.deepcopy(whole.engine.state_dict()))
    assert resumed.model.policy == whole.model.policy and resumed.model.step == whole.model.step > 0
    train(whole)
    train(resumed)
    assert resumed.engine.accountant.history == whole.engine.accountant.history == [(1.0, 0.25 if poisson else 1.0, 12)]
    for (name, a), b in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_engine_that_has_trained_does_not_go_back() -> None:
    """It would draw other noise for steps that the older ledger does not hold."""
    run = resumable(noise=0)
    train(run)
    state = run.engine.state_dict()
    train(run)
    before, history = models.state(run.model), run.engine.accountant.history
    with pytest.raises(CheckpointError, match=r"trained already.*Fix: load a checkpoint right after make_private"):
        run.engine.load_state_dict(state)
    assert run.engine.accountant.history == history == [(1.0, 0.25, 8)]
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())


def test_state_before_the_first_step_can_be_loaded() -> None:
    first, second = resumable(noise=0), resumable(noise=1)
    second.engine.load_state_dict(first.engine.state_dict())
    for run in (first, second):
        train(run)
    assert all(map(torch.equal, first.model.parameters(), second.model.parameters()))


def test_runs_repeat_bit_for_bit_by_seed() -> None:
    def final(noise: int | None, seed: int = 0) -> list[Tensor]:
        given, model = dict(noise_generator=None) if noise is None else dict(noise=noise), models.seeded(Net)
        torch.manual_seed(seed)  # what an engine without a generator of its own takes its seed from
        run = made(model, policy="all", max_physical_batch_size=3, **given)
        train(run)
        return [p.detach() for p in run.model.parameters()]

    def same(a: list[Tensor], b: list[Tensor]) -> bool:
        return all(map(torch.equal, a, b))

    assert same(final(1), final(1)) and not same(final(1), final(2))
    assert same(final(None, 1), final(None, 1)) and not same(final(None, 1), final(None, 2))


def test_secure_runs_are_all_different_and_resume_with_new_noise() -> None:
    def started() -> Run:
        return resumable(noise=0, engine=dpq.PrivacyEngine(accountant="rdp", secure_mode=True))

    runs = [started(), started()]
    for run in runs:
        train(run)
    first, second = (run.model.fc.weight.detach() for run in runs)
    assert not torch.equal(first, second) and first.isfinite().all()
    state = runs[0].engine.state_dict()
    assert state["noise"] == {"kind": "secure"}
    resumed = started()
    resumed.engine.load_state_dict(state)
    for run in (runs[0], resumed):
        train(run)
    assert not torch.equal(runs[0].model.fc.weight, resumed.model.fc.weight)
    assert resumed.engine.accountant.history == [(1.0, 0.25, 8)]
    with pytest.raises(CheckpointError, match="secure_mode: True saved, False here"):
        resumable(noise=0).engine.load_state_dict(state)


def test_secure_poisson_batches_train() -> None:
    torch.manual_seed(0)
    runs = [made(engine=dpq.PrivacyEngine(accountant="rdp", secure_mode=True), n=64, batch=16) for _ in range(2)]
    ids = []
    for run in runs:
        for x, y in run.loader:
            ids.append(run.engine.session.micro.ids.tolist())  # type: ignore[union-attr]
            run.criterion(run.model(x), y).backward()
            run.optimizer.step()
    assert ids[:4] != ids[4:]  # neither torch's seed nor the loader's generator has a say


# Learning


class Small(nn.Module):
    """A CNN for small images; [B, channels, side, side]."""

    def __init__(self, channels: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm2 = nn.GroupNorm(4, 2 * width)
        self.fc = nn.Linear(2 * width * 16, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return self.fc(F.adaptive_avg_pool2d(x, 4).flatten(1))


def learn(
    model: nn.Module,
    parts: tuple[Tensor, Tensor, Tensor, Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    epochs: int,
    batch: int,
    budget: float = 0,
    physical: int = 128,
) -> tuple[float, float]:
    """Test accuracy and epsilon after training at a target of 8; another policy in each epoch."""
    x, y, test_x, test_y = parts
    compiled = dpq.compile(model, budget=budget, backend="auto", inner="eager").train()
    engine = dpq.PrivacyEngine(accountant="rdp")
    compiled, private, criterion, loader = engine.make_private_with_epsilon(
        module=compiled,
        optimizer=optimizer(compiled.parameters()),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=batch, generator=torch.Generator().manual_seed(0)),
        target_epsilon=8.0,
        target_delta=1e-5,
        epochs=epochs,
        max_grad_norm=1.0,
        max_physical_batch_size=physical,
        noise_generator=torch.Generator().manual_seed(0),
    )
    names = [site.name for site in compiled.sites]
    for epoch in range(epochs):
        if budget:
            compiled.set_policy([name for i, name in enumerate(names) if i != epoch % len(names)])
        for inputs, labels in loader:
            private.zero_grad()
            criterion(compiled(inputs), labels).backward()
            private.step()
    compiled.eval()
    with torch.no_grad():
        accuracy = float((compiled(test_x).argmax(1) == test_y).float().mean())
    return accuracy, engine.get_epsilon(1e-5)


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sklearn = pytest.importorskip("sklearn.datasets")
    images, labels = sklearn.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.tensor(images[order], dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    y = torch.tensor(labels[order])
    return x[:1400], y[:1400], x[1400:], y[1400:]


LEARNT = [("sgd", 0), ("adam", 0), ("adamw", 0), ("sgd", 0.75), ("adam", 0.75)]


@pytest.mark.filterwarnings("ignore:Optimal order is the")
@pytest.mark.parametrize(("name", "budget"), few(LEARNT, ("sgd", 0.75), ("adam", 0)))
def test_digits_are_learnt_within_epsilon_8(
    name: str, budget: float, digits: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    }
    model = models.seeded(lambda: Small(1, 10, 8))
    accuracy, epsilon = learn(model, digits, makers[name], epochs=6, batch=140, budget=budget, physical=160)
    assert epsilon <= 8.0 and accuracy > 0.8  # chance is a tenth; ten epochs give 0.95


def data_folder() -> Path:
    return Path(os.environ.get("DPQUANT_DATA", Path(__file__).parents[4] / "shared" / "data"))


@pytest.mark.filterwarnings("ignore:Optimal order is the")
@pytest.mark.skipif(
    not (data_folder() / "gtsrb32_train.npz").exists(),
    reason="needs the traffic signs (gtsrb32_*.npz, dpdata.py) in the folder that DPQUANT_DATA names",
)
def test_traffic_signs_are_learnt_within_epsilon_8() -> None:
    folder = data_folder()
    spec = importlib.util.spec_from_file_location("dpdata", folder / "dpdata.py")
    assert spec is not None and spec.loader is not None
    dpdata = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(dpdata)

    def read(name: str, every: int) -> tuple[Tensor, Tensor]:
        images, labels = dpdata.load(folder / name)
        x = torch.from_numpy(images[::every].transpose(0, 3, 1, 2).copy()).float() / 127.5 - 1
        return F.avg_pool2d(x, 2), torch.from_numpy(labels[::every].astype(np.int64))

    train_set, test_set = read("gtsrb32_train.npz", 3), read("gtsrb32_test.npz", 4)
    model = models.seeded(lambda: Small(3, 43, 16))
    accuracy, epsilon = learn(
        model, (*train_set, *test_set), lambda p: torch.optim.Adam(p, lr=0.01), epochs=2, batch=512, budget=0.75
    )
    assert epsilon <= 8.0 and accuracy > 0.1  # chance is 1/43


def test_an_old_optimizer_cannot_release_new_sums() -> None:
    run = made()
    dpq.PrivacyEngine(accountant="rdp").make_private(
        module=run.model,
        optimizer=torch.optim.SGD(run.model.parameters(), lr=0.1),
        data_loader=plain_loader(),
        noise_multiplier=1.0,
        max_grad_norm=1000.0,
    )
    run.model(torch.randn(4, FEATURES)).sum().backward()
    with pytest.raises(PrivateTrainingError, match="earlier make_private"):
        run.optimizer.step()


def test_a_gradient_from_outside_is_seen_after_a_first_step() -> None:
    run = made()
    run.optimizer.step()
    run.model.fc.weight.square().sum().backward()
    with pytest.raises(PrivateTrainingError, match=r"eval\(\).*zero_grad"):
        run.optimizer.step()


@pytest.mark.parametrize(("samples", "batch"), [(49, 1), (98, 2), (412, 4)])
def test_the_divisor_is_not_rounded_down(samples: int, batch: int) -> None:
    assert made(n=samples, batch=batch).optimizer.expected_batch_size == batch


# What loops do for each batch that they get


def trained_by(loop: Callable[[Run, Any], None]) -> tuple[list[Any], list[float], int]:
    """Parameters and rate after an epoch of 4 steps of 4 micro-batches, and the number of noises drawn."""
    run = made(max_physical_batch_size=4, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    rates = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    for x, y in run.loader:
        run.criterion(run.model(x), y).backward()
        loop(run, rates)
    assert len(run.loader) > run.loader.steps == 4
    parameters = [value.tolist() for value in run.model.state_dict().values()]
    return parameters, rates.get_last_lr(), run.engine.run.noise.position


def once_per_step(run: Run, rates: Any) -> None:
    run.optimizer.step()
    if not run.optimizer.step_was_skipped:
        run.optimizer.zero_grad()
        rates.step()


def always(run: Run, rates: Any) -> None:
    """Clips, steps and clears for each micro-batch, as loops that know nothing of them do."""
    nn.utils.clip_grad_norm_(run.model.parameters(), 1e-6)
    run.optimizer.step()
    if not run.optimizer.step_was_skipped:
        rates.step()
    run.model.zero_grad()
    run.optimizer.zero_grad()


def test_what_is_done_for_each_micro_batch_changes_nothing() -> None:
    one, other = trained_by(once_per_step), trained_by(always)
    assert one == other and one[1] == [0.5**5]


def test_rates_by_the_length_of_the_loader_have_the_same_shape() -> None:
    """A schedule over `len(loader)` that steps for each micro-batch, and one over `loader.steps`, end alike."""
    ends = []
    for each in (True, False):
        run = made(max_physical_batch_size=4, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
        total = len(run.loader) if each else run.loader.steps
        rates = torch.optim.lr_scheduler.LinearLR(run.optimizer, 1.0, 0.1, total_iters=total)
        for x, y in run.loader:
            run.optimizer.zero_grad()
            run.criterion(run.model(x), y).backward()
            run.optimizer.step()
            if each or not run.optimizer.step_was_skipped:
                rates.step()
        ends.append(rates.get_last_lr()[0])
    assert ends == pytest.approx([0.05, 0.05])
