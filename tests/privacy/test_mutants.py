"""Faults of the kind that break DP-SGD without a sound, each put into the library, and the check that must find it.

A test that never failed proves little. Here each fault is one monkeypatch, and the replay of neighbouring batches, the
comparison with plain autograd, or the variance of the noise must fail under it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile.backends.ops import private_site as private_ops
from dpquant_compile.backends.reference import per_sample
from dpquant_compile.backends.reference.emulated import EmulatedSite
from dpquant_compile.backends.registry import SiteCall, Streams
from dpquant_compile.errors import PrivateTrainingError
from dpquant_compile.privacy.clipping import joint_graph as trace
from dpquant_compile.privacy.clipping.bounds import Clipping
from dpquant_compile.privacy.clipping.program import PrivateProgram
from dpquant_compile.privacy.clipping.runtime import Session
from dpquant_compile.privacy.mechanism.gaussian import GaussianStream, Part
from tests.support.neighbouring_batches import BOUND, Mixed, Replay, check_replay, make_replay
from tests.support.private import assert_close, clipped_sums, made_private, reference_sums

pytestmark = pytest.mark.slow  # each case traces a private program

Patch = pytest.MonkeyPatch
SIGMA = 1.3


class Wide(nn.Module):
    """Enough parameters to measure the noise on; [B, 40]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 60), nn.Linear(60, 30, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Twice(nn.Module):
    """A weight that is used at two places which agree, so that the cross terms of its norm are large; [B, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.fc(2 * x)


# Checks


def check_noise(**options: Any) -> None:
    """A step without a gradient leaves N(0, σ²C²) in every parameter, and no two steps the same."""
    torch.manual_seed(0)
    model, optimizer, _ = made_private(Wide(), 4, bound=BOUND, noise_multiplier=SIGMA, **options)
    draws = []
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 40)).mul(0).sum().backward()
        optimizer.step()
        grads = [p.grad for p in model.parameters()]
        assert all(grad is not None for grad in grads)
        draws.append(torch.cat([grad.flatten() for grad in grads if grad is not None]))
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            share = float(parameter.grad.double().square().mean().sqrt()) / (SIGMA * BOUND)
            spread = 5 / math.sqrt(2 * parameter.numel())  # five standard deviations
            assert 1 - spread < share < 1 + spread, f"the noise of {name} is {share:.3f} of what it should be"
    alike = float(torch.corrcoef(torch.stack(draws))[0, 1])
    assert abs(alike) < 5 / math.sqrt(draws[0].numel()), "two steps have the same noise"


def check_equal(policy: str = "none", **options: Any) -> None:
    """Clipped sums of a padded batch equal those of plain autograd, sample by sample."""
    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(5, 2, 6, 6)
    compiled, _, _ = made_private(model, 8, policy=policy, bound=BOUND, **options)
    assert_close(clipped_sums(compiled, [x]), reference_sums(model, [x], policy=policy, bound=BOUND))


class Squared(nn.Module):
    """Gradients that turn round with the weight; [B, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.fc.weight, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).square()


def flipped_sum(samples: Tensor) -> float:
    """The clipped sum of a loop that turns the weight round after each micro-batch, as if that were no change."""
    model = dpq.compile(Squared(), budget=0, backend="reference", inner="eager").train()
    model, optimizer, loader = dpq.PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(samples), batch_size=len(samples)),
        noise_multiplier=0.0,
        max_grad_norm=BOUND,
        max_physical_batch_size=2,
        loss_reduction="sum",
    )
    total = 0.0
    for (x,) in loader:
        model(x).sum().backward()
        total = float(model.fc.weight.summed_grad)
        optimizer.step()
        model.fc.weight.data.neg_()
    return total


def check_micro_batches() -> None:
    """A record without a gradient moves the others to other micro-batches: the sum stays, or the loop is refused."""
    samples = torch.tensor([1.0, 1.0, 0.0, 0.0] * 4)[:, None]
    try:
        sums = [flipped_sum(rows) for rows in (samples, torch.cat([torch.zeros(1, 1), samples]))]
    except PrivateTrainingError as error:
        if "between two micro-batches" in str(error):
            return
        raise
    moved = abs(sums[0] - sums[1])
    assert moved <= BOUND * (1 + 1e-5), f"f moved by {moved / BOUND:.1f} C"


def mixed(**options: Any) -> Replay:
    return make_replay("mixed", **{"policy": "all", **options})


# Faults of rounding


def _shared_scale(self: EmulatedSite, x: Tensor, role: str, call: SiteCall, streams: Streams, axis: Any) -> Tensor:
    """One more element per sample, the largest of the batch, puts all samples on its grid; the bits stay."""
    rows = x.flatten(1)
    wider = torch.cat([rows, rows.abs().amax().expand(len(rows), 1)], 1)
    key = streams.keys[call.site, 0]
    rounded = self.quantizer(wider, call.recipe.of(role), key, streams.samples, axis, -1)
    return rounded[:, :-1].reshape(x.shape)


def _one_sample(self: EmulatedSite, x: Tensor, role: str, call: SiteCall, streams: Streams, axis: Any) -> Tensor:
    return self.quantizer(x, call.recipe.of(role), streams.keys[call.site, 0], streams.samples[:1], None, 1)


@pytest.mark.parametrize("rounding", [_shared_scale, _one_sample])
def test_batch_wide_scale(rounding: Callable[..., Tensor], monkeypatch: Patch) -> None:
    monkeypatch.setattr(EmulatedSite, "_activation", rounding)
    with pytest.raises(AssertionError, match="f moved by"):
        check_replay(mixed(), ["large"])


def test_bits_by_place_instead_of_id(monkeypatch: Patch) -> None:
    def by_place(keys: Tensor, samples: Tensor, x: Tensor, axis: Any) -> Streams:
        return Streams(keys, torch.arange(x.shape[axis.dim] // (axis.outer * axis.inner)))

    monkeypatch.setattr(private_ops, "streams_of", by_place)
    with pytest.raises(AssertionError, match=r"f moved by|outputs moved"):
        check_replay(mixed(), ["no gradient"])


def test_rounding_after_clipping(monkeypatch: Patch) -> None:
    def rounded(call: SiteCall, x: Tensor, grad: Tensor, shape: tuple[int, ...], scale: Tensor) -> Tensor:
        grads = per_sample.as_weight(per_sample.sample_grads(call, x, grad, shape), shape)
        grads = grads * scale.reshape(-1, *(1 for _ in shape))
        bits = torch.zeros(len(grads), dtype=torch.int64)  # the same for all: what a sample becomes is still its own
        return dpq.quantize(grads, "luq_fp4", samples=bits).sum(0)

    monkeypatch.setattr(per_sample, "weighted_sum", rounded)
    monkeypatch.setattr(trace, "choose_method", lambda *args: "direct")
    with pytest.raises(AssertionError, match="f moved by"):
        check_replay(mixed(), ["large", "steep", "constant"])


# Faults of clipping


def _clip_with(monkeypatch: Patch, change: Callable[[list[Tensor]], list[Tensor]]) -> None:
    original = Clipping.factors

    def factors(self: Clipping, *given: Any) -> tuple[list[Tensor], Tensor]:
        result, dropped = original(self, *given)
        return change(result), dropped

    monkeypatch.setattr(Clipping, "factors", factors)


def test_clip_after_the_sum(monkeypatch: Patch) -> None:
    finish = Session.finish

    def clipped(self: Session, call: Any, sums: Sequence[Tensor], dropped: Tensor) -> None:
        total = math.sqrt(sum(float(value.square().sum()) for value in sums))
        finish(self, call, [value * min(1.0, BOUND / total) for value in sums], dropped)

    _clip_with(monkeypatch, lambda factors: [torch.ones_like(factor) for factor in factors])
    monkeypatch.setattr(Session, "finish", clipped)
    with pytest.raises(AssertionError, match="f moved by"):
        check_replay(mixed(), ["large", "steep"])


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
def test_twice_the_bound(clipping: str, monkeypatch: Patch) -> None:
    original = Clipping.factors
    monkeypatch.setattr(Clipping, "factors", lambda self, n, bounds, *rest: original(self, n, 2 * bounds, *rest))
    with pytest.raises(AssertionError, match="f moved by"):
        check_replay(mixed(clipping=clipping), ["large"])


def test_the_whole_bound_for_each_layer(monkeypatch: Patch) -> None:
    def build(mode: str, bound: float, names: Sequence[str]) -> Clipping:
        return Clipping(mode, (bound,) * len(names))

    monkeypatch.setattr(Clipping, "build", staticmethod(build))
    with pytest.raises(AssertionError, match="f moved by"):
        check_replay(mixed(clipping="per_layer"), ["large"])


@pytest.mark.parametrize("left_out", ["conv.weight", "places.bias", "fc.weight"])
def test_a_parameter_left_out_of_the_norm(left_out: str, monkeypatch: Patch) -> None:
    original = trace.Tracing._norms

    def norms(self: trace.Tracing, name: str, *rest: Any) -> Tensor:
        value = original(self, name, *rest)
        return torch.zeros_like(value) if name == left_out else value

    monkeypatch.setattr(trace.Tracing, "_norms", norms)
    with pytest.raises(AssertionError, match="f moved by"):
        check_replay(mixed(), ["steep"])


def test_a_sample_that_is_not_finite_is_not_left_out(monkeypatch: Patch) -> None:
    _clip_with(monkeypatch, lambda factors: [factor.nan_to_num(0.0) for factor in factors])
    for outlier in ("nan", "inf gradient"):
        with pytest.raises(AssertionError, match="not finite"):
            check_replay(mixed(), [outlier])


def test_a_weight_used_twice_without_cross_terms(monkeypatch: Patch) -> None:
    original = trace.pooled_norms
    check_replay(Replay(Twice(), (5,)), ["steep"])
    monkeypatch.setattr(trace, "pooled_norms", lambda pieces: sum(original([piece]) for piece in pieces))
    with pytest.raises(AssertionError, match="f moved by"):
        check_replay(Replay(Twice(), (5,)), ["steep"])


@pytest.mark.parametrize("name", ["linear over places", "conv valid", "conv conv1d"])
def test_gram_norms_without_slack(name: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(trace, "choose_method", lambda *args: "gram")
    check_replay(make_replay(name), ["cancelling", "cancelling more", "alternating"])
    monkeypatch.setattr(per_sample, "_SLACK", 0.0)
    with pytest.raises(AssertionError, match="f moved by"):
        check_replay(make_replay(name), ["cancelling", "cancelling more", "alternating"])


# Faults of micro-batches


def test_contents_of_parameters_are_not_pinned(monkeypatch: Patch) -> None:
    check_micro_batches()
    monkeypatch.setattr(Session, "contents", lambda self: None)
    with pytest.raises(AssertionError, match=r"f moved by 8\.0 C"):
        check_micro_batches()


# Faults of padding: two lines of defence, either of which is enough


def _padding_is_live(monkeypatch: Patch) -> None:
    original = Clipping.factors
    monkeypatch.setattr(
        Clipping, "factors", lambda self, n, bounds, live, at: original(self, n, bounds, torch.ones_like(live), at)
    )


def _padding_has_gradients(monkeypatch: Patch) -> None:
    original = PrivateProgram.run_backward

    def repeated(self: PrivateProgram, saved: list[Any], tangents: Sequence[Tensor]) -> Any:
        filled = []
        for tangent in tangents:
            empty = (tangent == 0).flatten(1).all(1)
            filled.append(torch.where(empty.reshape(-1, *(1 for _ in tangent.shape[1:])), tangent[:1], tangent))
        return original(self, saved, filled)

    monkeypatch.setattr(PrivateProgram, "run_backward", repeated)


@pytest.mark.parametrize("fault", [_padding_is_live, _padding_has_gradients])
def test_padding_is_guarded_twice(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    check_replay(mixed(), ["large", "zeros"])
    check_equal()


def test_padding_that_counts(monkeypatch: Patch) -> None:
    _padding_is_live(monkeypatch)
    _padding_has_gradients(monkeypatch)
    with pytest.raises(AssertionError, match=r"off by"):
        check_equal()
    with pytest.raises(AssertionError, match=r"f moved by|not x's own"):
        check_replay(mixed(), ["large"])


# Faults of noise


def test_the_checks_pass_without_a_fault() -> None:
    check_noise()
    check_equal()
    check_equal("all")


def _no_noise(self: GaussianStream, tensors: Sequence[Tensor], std: float, part: Part) -> list[Tensor]:
    return [torch.zeros_like(tensor) for tensor in tensors]


def _half_noise(self: GaussianStream, tensors: Sequence[Tensor], std: float, part: Part) -> list[Tensor]:
    return [torch.randn_like(tensor) * std / 2 for tensor in tensors]


def _noise_for_some(self: GaussianStream, tensors: Sequence[Tensor], std: float, part: Part) -> list[Tensor]:
    return [torch.randn_like(tensor) * (std if tensor.dim() > 1 else 0.0) for tensor in tensors]


def _same_noise(self: GaussianStream, tensors: Sequence[Tensor], std: float, part: Part) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn_like(tensor) * std for tensor in tensors]


def _noise_of_layers(self: GaussianStream, tensors: Sequence[Tensor], std: float, part: Part) -> list[Tensor]:
    """As if each parameter had the whole multiplier, and its share of the bound as its own sensitivity."""
    return [torch.randn_like(tensor) * std / math.sqrt(len(tensors)) for tensor in tensors]


@pytest.mark.parametrize("fault", [_no_noise, _half_noise, _noise_for_some, _same_noise, _noise_of_layers])
def test_faults_of_noise(fault: Callable[..., list[Tensor]], monkeypatch: Patch) -> None:
    monkeypatch.setattr(GaussianStream, "normal_like", fault)
    with pytest.raises(AssertionError, match="noise"):
        check_noise()


def test_noise_by_the_parameter_bound(monkeypatch: Patch) -> None:
    # Under per-layer clipping the sensitivity is that of all layers together.
    monkeypatch.setattr(Session, "sensitivity", property(lambda self: self.clipping.bounds[0]))
    with pytest.raises(AssertionError, match="noise"):
        check_noise(clipping="per_layer")
