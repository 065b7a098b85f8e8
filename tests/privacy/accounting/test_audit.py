"""One-run audits: the bound itself, then of the engine, and of engines with a fault, which the audit must find."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dpquant_compile as dpq
from dpquant_compile.backends.reference.emulated import EmulatedSite
from dpquant_compile.backends.registry import SiteCall, Streams
from dpquant_compile.errors import PrivacySpecError
from dpquant_compile.privacy.accounting.audit import Audit, epsilon_lower_bound, one_run_audit, p_value
from dpquant_compile.privacy.clipping.bounds import Clipping
from dpquant_compile.privacy.mechanism.gaussian import GaussianStream

pytestmark = pytest.mark.slow  # audits train many models

DELTA = 1e-5
BOUND = 0.5
SIGMA = 1.5

# The bound


def binomial_tail(v: int, r: int, q: float) -> float:
    return sum(math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(v, r + 1))


def test_without_delta_the_p_value_is_a_binomial_tail() -> None:
    for v, r, epsilon in ((7, 10, 0.0), (60, 100, 0.3), (1, 5, 1.0), (40, 40, 3.0)):
        q = 1 / (1 + math.exp(-epsilon))
        assert p_value(v, r, r, epsilon, 0.0) == pytest.approx(binomial_tail(v, r, q), rel=1e-9)


def test_delta_enters_as_in_theorem_5_2() -> None:
    v, r, m, epsilon, delta = 15, 20, 50, 0.7, 1e-3
    q = 1 / (1 + math.exp(-epsilon))
    chances = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    steepest = max(sum(chances[v - i : v]) / i for i in range(1, v + 1))
    expected = sum(chances[v:]) + 2 * m * delta * steepest
    assert p_value(v, r, m, epsilon, delta) == pytest.approx(expected, rel=1e-9)


def test_all_right_gives_the_log_odds() -> None:
    # q^r = 0.05 for r right guesses out of r.
    for r in (10, 100, 5000):
        q = 0.05 ** (1 / r)
        assert epsilon_lower_bound(r, r, r, 0.0) == pytest.approx(math.log(q / (1 - q)), abs=1e-6)


def test_a_large_sample_gives_its_own_log_odds() -> None:
    bound = epsilon_lower_bound(75_000, 100_000, 100_000, 0.0)
    assert math.log(3) - 0.02 < bound < math.log(3)


def test_right_half_of_the_time_shows_nothing() -> None:
    assert epsilon_lower_bound(500, 1000, 1000, 0.0) == 0
    assert epsilon_lower_bound(500, 1000, 1000, 1e-5) == 0
    assert epsilon_lower_bound(0, 1000, 1000, 1e-5) == 0
    assert epsilon_lower_bound(0, 0, 10, 1e-5) == 0


def test_bounds_fall_with_delta_confidence_and_canaries() -> None:
    best = epsilon_lower_bound(90, 100, 100, 0.0)
    assert best > epsilon_lower_bound(90, 100, 100, 1e-3) > epsilon_lower_bound(90, 100, 1000, 1e-3)
    assert best > epsilon_lower_bound(90, 100, 100, 0.0, confidence=0.99) > epsilon_lower_bound(85, 100, 100, 0.0)


def test_the_bound_holds_as_often_as_it_says() -> None:
    # Randomized response at ε = 1 is the worst case: a bound above 1 must come up in one of 20 audits at most.
    generator = torch.Generator().manual_seed(0)
    right = 1 / (1 + math.exp(-1.0))
    correct = (torch.rand(200, 300, generator=generator) < right).sum(1)
    bounds = [epsilon_lower_bound(int(v), 300, 300, 0.0) for v in correct]
    over = sum(bound > 1.0 for bound in bounds)
    assert over <= 200 * 0.05 + 3 * math.sqrt(200 * 0.05)
    assert sum(bounds) / len(bounds) > 0.6


@pytest.mark.parametrize("numbers", [(3, 2, 5), (1, 6, 5), (-1, 2, 5)])
def test_numbers_that_make_no_sense_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(PrivacySpecError, match="correct"):
        epsilon_lower_bound(*numbers, 1e-5)
    with pytest.raises(PrivacySpecError, match="confidence"):
        epsilon_lower_bound(1, 2, 3, 1e-5, confidence=1.0)
    with pytest.raises(PrivacySpecError, match="guesses"):
        one_run_audit(lambda coins: coins.float(), 10, delta=0.0, guesses=[11])
    with pytest.raises(PrivacySpecError, match="one number per canary"):
        one_run_audit(lambda coins: coins[1:].float(), 10, delta=0.0, guesses=[4])


def test_guesses_are_the_two_ends_of_the_scores() -> None:
    told = one_run_audit(lambda coins: coins.float(), 200, delta=0.0, guesses=[40, 100])
    assert (told.correct, told.guesses, told.confidence) == (100, 100, 0.95)
    q = 0.025 ** (1 / 100)  # a union bound over two numbers of guesses
    assert told.epsilon == pytest.approx(math.log(q / (1 - q)), abs=1e-6)
    assert "100 of 100 guesses" in str(told)
    blind = one_run_audit(lambda coins: torch.arange(200.0), 200, delta=0.0, guesses=[40, 100])
    assert blind.epsilon < 0.5


# The engine


class Canaries(Dataset[Any]):
    """Groups of a canary and `victims`. A canary that is out is a sample of zeros, which has no gradient.

    The gradient of all samples of group g lies in one element of the weight, its own: input feature g // outputs,
    output g % outputs. Canaries push against the victims, and have inputs that are a million times larger.
    """

    def __init__(self, included: Tensor, victims: int, outputs: int) -> None:
        self.included, self.victims, self.outputs = included, victims, outputs

    def __len__(self) -> int:
        return len(self.included) * (1 + self.victims)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        x = torch.zeros(len(indices), len(self.included) // self.outputs)
        y = torch.zeros(len(indices), self.outputs)
        for row, index in enumerate(indices):
            group, member = divmod(index, 1 + self.victims)
            if member > 0 or self.included[group]:
                x[row, group // self.outputs] = 1.0 if member else 1e6
                y[row, group % self.outputs] = 100.0 if member else -100.0
        return list(zip(x, y, strict=True))


def audit(
    canaries: int, guesses: Sequence[int], *, victims: int = 0, physical: int = 500, steps: int = 1, policy: str = "all"
) -> tuple[Audit, float]:
    """Audit the engine at noise SIGMA·√steps; also what its accountant says of the same steps."""
    outputs, lr = 8, 1e-12  # so small that the weights, and with them the gradients, stay what they are
    engine = dpq.PrivacyEngine(accountant="rdp")  # Opacus' "prv" divides by zero without subsampling

    def train(included: Tensor) -> Tensor:
        torch.manual_seed(1)
        model = nn.Linear(canaries // outputs, outputs, bias=False)
        nn.init.zeros_(model.weight)
        model = dpq.compile(model, budget=0, backend="reference")
        model.train()
        data = Canaries(included, victims, outputs)
        model, optimizer, criterion, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=lr),
            criterion=nn.MSELoss(reduction="sum"),
            data_loader=DataLoader(data, batch_size=len(data)),
            noise_multiplier=SIGMA * math.sqrt(steps),
            max_grad_norm=BOUND,
            max_physical_batch_size=physical,
        )
        model.set_policy(policy)
        for _ in range(steps):
            for x, y in loader:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
        (weight,) = model.parameters()
        return -weight.detach().T.flatten() / lr  # canaries push their elements down

    found = one_run_audit(train, canaries, delta=DELTA, guesses=guesses, generator=torch.Generator().manual_seed(3))
    return found, engine.get_epsilon(DELTA)


# Few guesses are sharpest for the true engine, many for the faulty ones: chosen on theory, paid for by a union bound.
GUESSES = (100, 400, 1600)
CANARIES = 8000
GROUPS, GROUP_GUESSES = 800, (50, 400)


@pytest.mark.parametrize("policy", ["none", "all"])
def test_the_engine_keeps_its_promise(policy: str) -> None:
    found, epsilon = audit(CANARIES, GUESSES, policy=policy)
    assert 0.3 * epsilon < found.epsilon < epsilon, f"{found}; accountant {epsilon:.3f}"


def test_the_engine_keeps_its_promise_over_steps() -> None:
    found, epsilon = audit(CANARIES, GUESSES, steps=4)
    assert 0.3 * epsilon < found.epsilon < epsilon, f"{found}; accountant {epsilon:.3f}"


def test_canaries_tell_nothing_through_other_samples() -> None:
    found, epsilon = audit(GROUPS, GROUP_GUESSES, victims=7, physical=8)
    assert 0 < found.epsilon < epsilon, f"{found}; accountant {epsilon:.3f}"


# Engines with a fault


def no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = GaussianStream.normal_like
    monkeypatch.setattr(GaussianStream, "normal_like", lambda self, tensors, std, part: draw(self, tensors, 0.0, part))


def less_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = GaussianStream.normal_like
    monkeypatch.setattr(
        GaussianStream, "normal_like", lambda self, tensors, std, part: draw(self, tensors, std / 4, part)
    )


def loose_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = Clipping.factors
    monkeypatch.setattr(Clipping, "factors", lambda self, norms, bounds, *rest: clip(self, norms, 4 * bounds, *rest))


def batch_wide_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample is rounded on the grid of the largest number in its batch; its bits stay its own."""

    def shared(self: EmulatedSite, x: Tensor, role: str, call: SiteCall, streams: Streams, axis: Any) -> Tensor:
        rows = x.flatten(1)
        wider = torch.cat([rows, rows.abs().amax().expand(len(rows), 1)], 1)
        result = rounded(self, wider, role, call, streams, axis)
        return result[:, :-1].reshape(x.shape)

    rounded = EmulatedSite._activation
    monkeypatch.setattr(EmulatedSite, "_activation", shared)


@pytest.mark.parametrize("fault", [no_noise, less_noise, loose_bound])
def test_an_audit_finds_the_fault(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    found, epsilon = audit(CANARIES, GUESSES)
    assert found.epsilon > 1.25 * epsilon, f"{found}; accountant {epsilon:.3f}"


def test_an_audit_finds_a_batch_wide_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_wide_scale(monkeypatch)
    found, epsilon = audit(GROUPS, GROUP_GUESSES, victims=7, physical=8)
    assert found.epsilon > 1.25 * epsilon, f"{found}; accountant {epsilon:.3f}"
    harmless, _ = audit(GROUPS, GROUP_GUESSES, victims=7, physical=8, policy="none")  # nothing is rounded
    assert harmless.epsilon < epsilon
