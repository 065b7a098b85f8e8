"""Probes: loss differences against a brute force with the same bits, and samples that leave each other alone."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from dpquant_compile.errors import PrivacySpecError
from dpquant_compile.numerics.quantize import quantize_values
from dpquant_compile.numerics.random_bits import ROLES, fold
from dpquant_compile.privacy.clipping.runtime import Session
from dpquant_compile.privacy.data.poisson_loader import private_loader
from dpquant_compile.privacy.schedule.probe import Batch, Probe, draw_batch, unpack_batch
from dpquant_compile.sites import BatchAxis
from tests.support import models
from tests.support.private_loops import made
from tests.support.probes import OUTLIERS, STEP, batch_of, cross_entropy, group_of, ordered, rows


def internals_of(model: nn.Module, shape: Sequence[int], **options: Any) -> Any:
    """A private model's internals, which a probe works on. `inner` is eager: nothing here is about compiled code."""
    data = TensorDataset(torch.randn(24, *shape), torch.zeros(24, dtype=torch.int64))
    run = made(model, data=data, compile_options={"inner": "eager", **options})
    run.model(data.tensors[0][:2])  # the model captures, and knows its sites
    return run


# Against a brute force


class Convs(nn.Module):
    """Two convs of different make and a linear; images [B, 2, 6, 6] to 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.tanh(self.second(x))
        return self.fc(x.mean((2, 3)))


class Twice(nn.Module):
    """A linear that is called twice, on a sequence [B, T, 4]; the head reads the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.mix(x))
        x = x + self.mix(x)
        return self.head(x.mean(1))


class Rounding:
    """One sample's rounded operands, from the counters that the documentation names and nothing of the probe's."""

    def __init__(self, session: Session, names: Sequence[str], policy: frozenset[str], sample: int, fmt: str) -> None:
        keys, own = session.bits.site_keys(STEP, list(names)), torch.tensor([sample])
        self.keys = {name: keys[row] for row, name in enumerate(names)}
        self.model, self.policy, self.fmt = session.internals.original, policy, fmt
        self.ids, self.group = session.bits.sample_ids(STEP, own), int(group_of(own))
        self.calls: dict[str, int] = {}

    def site(self, name: str, x: Tensor, product: Callable[[Tensor, Tensor], Tensor], features: int) -> Tensor:
        layer: Any = self.model.get_submodule(name)
        call = self.calls[name] = self.calls.get(name, -1) + 1
        weight = layer.weight
        if name in self.policy:
            key = fold(self.keys[name][ROLES.index("input")], call)
            x = quantize_values(x, self.fmt, key, self.ids, BatchAxis(0), features)
            key = fold(self.keys[name][ROLES.index("weight")], self.group)
            rows = quantize_values(weight.flatten(1), self.fmt, key, torch.zeros(1, dtype=torch.int64), None, 1)
            weight = rows.reshape(weight.shape)
        y = product(x, weight)
        if layer.bias is None:
            return y
        return y + (layer.bias if features == -1 else layer.bias.view(-1, 1, 1))


def convs(r: Rounding, x: Tensor) -> Tensor:
    x = torch.relu(r.site("first", x, lambda a, w: F.conv2d(a, w, padding=1), 1))
    x = torch.tanh(r.site("second", x, lambda a, w: F.conv2d(a, w, stride=2, groups=2), 1))
    return r.site("fc", x.mean((2, 3)), F.linear, -1)


def twice(r: Rounding, x: Tensor) -> Tensor:
    x = torch.tanh(r.site("mix", x, F.linear, -1))
    x = x + r.site("mix", x, F.linear, -1)
    return r.site("head", x.mean(1), F.linear, -1)


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[Rounding, Tensor], Tensor]]] = {
    "convs": (Convs, (2, 6, 6), convs),
    "twice": (Twice, (5, 4), twice),
}
IDS = [3, 17, 4, 1001, 8, 50, 0, 23]


@pytest.mark.parametrize("fmt", ["luq_fp4", "uniform4", "fp4_e2m1", "int8.nearest", "int4.nearest.block"])
@pytest.mark.parametrize("net", NETS)
def test_differences_are_those_of_a_whole_run_under_each_policy(net: str, fmt: str) -> None:
    make, shape, forward = NETS[net]
    model = models.seeded(make)
    run = internals_of(model, shape, format=fmt)
    names = run.model.sites.names
    batch = ordered(batch_of(torch.randn(len(IDS), *shape), IDS))
    policies = [frozenset({name}) for name in names] + [frozenset(names[:2]), frozenset(names), frozenset()]
    got = Probe(run.engine.session, cross_entropy, STEP).differences(batch, policies)
    for i, sample in enumerate(batch.ids.tolist()):
        for j, policy in enumerate(policies):
            with torch.no_grad():
                low, base = (
                    cross_entropy(
                        forward(Rounding(run.engine.session, names, p, sample, fmt), batch.args[0][i : i + 1]),
                        batch.target[i : i + 1],
                    )
                    for p in (policy, frozenset[str]())
                )
            torch.testing.assert_close(got[i, j], (low - base)[0], rtol=1e-4, atol=2e-6)
    assert not got[:, -1].any() and (got[:, :-1].abs() > 1e-4).any(0).all()


@pytest.mark.slow
def test_a_policy_costs_the_same_in_any_company() -> None:
    """What lies before a site is taken from the run in full precision; no policy leaves its values to the next."""
    run = internals_of(models.seeded(models.GroupNormNet), (3, 8, 8))
    policies = [frozenset({name}) for name in run.model.sites.names]
    batch = ordered(batch_of(torch.randn(8, 3, 8, 8), IDS, 5))
    probe = Probe(run.engine.session, cross_entropy, STEP)
    together = probe.differences(batch, policies)
    alone = torch.cat([probe.differences(batch, [policy]) for policy in policies], 1)
    backwards = probe.differences(batch, policies[::-1]).flip(1)
    assert torch.equal(together, alone) and torch.equal(together, backwards)
    assert torch.equal(together, probe.differences(batch, policies)), "the same bits each time"


def test_another_step_rounds_anew() -> None:
    run = internals_of(models.seeded(Convs), (2, 6, 6))
    batch, everything = ordered(batch_of(torch.randn(8, 2, 6, 6), IDS)), [frozenset(run.model.sites.names)]
    first, second = (Probe(run.engine.session, cross_entropy, step).differences(batch, everything) for step in (-7, -8))
    assert (first != second).all()


def test_fast_kernels_measure_what_the_reference_measures() -> None:
    x, found = torch.randn(8, 2, 6, 6), []
    for backend in ("reference", "auto"):
        run = internals_of(models.seeded(Convs), (2, 6, 6), backend=backend)
        policies = [frozenset({name}) for name in run.model.sites.names]
        probe = Probe(run.engine.session, cross_entropy, STEP)
        found.append(probe.differences(ordered(batch_of(x, IDS)), policies))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=2e-5)


# Samples leave each other alone


class Attending(nn.Module):
    """Self-attention with the batch second, as nn.MultiheadAttention has it by default; [B, T, 8] to 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.fc(x + self.attn(x, x, x, need_weights=False)[0]).mean(0)


class Folded(nn.Module):
    """Linears on [T, B, K] and on [B·T, K]; input [B, T, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.folded, self.fc = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        b, t, k = x.shape
        x = torch.tanh(self.time(x.transpose(0, 1)).transpose(0, 1))
        x = torch.tanh(self.folded(x.reshape(b * t, k))).view(b, t, k)
        return self.fc(x.mean(1))


FOLDED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{name: (make, shape) for name, (make, shape, _) in NETS.items()},
    "residual": (models.GroupNormNet, (3, 8, 8)),
    "attention": (Attending, (5, 8)),
    "folded": (Folded, (5, 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("net", FOLDED)
def test_a_sample_has_the_same_differences_in_any_batch(net: str) -> None:
    make, shape = FOLDED[net]
    run = internals_of(models.seeded(make), shape)
    names = run.model.sites.names
    policies = [*(frozenset({name}) for name in names), frozenset(names)]
    x = torch.randn(len(IDS), *shape, generator=torch.Generator().manual_seed(4))
    probe = Probe(run.engine.session, cross_entropy, STEP)
    places: dict[int, Tensor] = {}
    for change in OUTLIERS.values():
        changed = x.clone()
        changed[5] = change(x[5])
        for keep in ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 6, 7], [7, 6, 4, 3, 2, 1, 0], [5, 1, 3], [2]):
            part = ordered(rows(batch_of(changed, IDS), keep))
            for sample, vector in zip(part.ids.tolist(), probe.differences(part, policies), strict=True):
                if sample != IDS[5]:
                    torch.testing.assert_close(vector, places.setdefault(sample, vector), rtol=1e-5, atol=2e-6)
    others = torch.stack(list(places.values()))
    assert len(places) == len(IDS) - 1 and others.isfinite().all() and (others.abs() > 1e-5).any(0).all()


def test_samples_also_keep_their_differences_where_groups_do_not_lie_together() -> None:
    run = internals_of(models.seeded(Convs), (2, 6, 6))
    policies = [frozenset(run.model.sites.names)]
    probe = Probe(run.engine.session, cross_entropy, STEP)
    mixed = batch_of(torch.randn(8, 2, 6, 6), IDS)
    order = torch.argsort(mixed.groups, stable=True)
    a, b = probe.differences(mixed, policies)[order], probe.differences(rows(mixed, order.tolist()), policies)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


def test_groups_share_one_rounding_of_the_weights() -> None:
    # Inputs of ±1 lie on the grid whatever their bits, so here a difference comes from the weights' rounding alone.
    run = internals_of(models.seeded(lambda: nn.Sequential(nn.Linear(6, 3))), (6,))
    ids = torch.arange(run.engine.session.physical)
    groups = ids % 7
    batch = Batch((torch.ones(len(ids), 6),), {}, torch.zeros_like(ids), ids, groups)
    got = Probe(run.engine.session, cross_entropy, STEP).differences(batch, [frozenset({"0"})])[:, 0]
    seen = {int(g): got[groups == g] for g in range(7)}
    assert all((values - values[0]).abs().max() < 1e-6 for values in seen.values())
    assert len({round(float(values[0]), 4) for values in seen.values()}) == 7


# What stays as it was


class Dropping(nn.Module):
    """Dropout, and a layer that is kept in eval(); input [B, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.norm, self.fc = nn.Linear(6, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.drop(torch.relu(self.body(x)))))


def test_a_probe_leaves_no_trace_and_does_not_drop_out() -> None:
    model = models.seeded(Dropping)
    run = internals_of(model, (6,))
    run.model.train()
    model.norm.eval()
    run.model.set_policy(["fc"])
    batch = ordered(batch_of(torch.randn(8, 6), IDS))
    before = (
        models.state(model),
        torch.get_rng_state(),
        run.model.step,
        {n: m.training for n, m in model.named_modules()},
    )
    probe = Probe(run.engine.session, cross_entropy, STEP)
    policies = [frozenset({"body"}), frozenset({"fc"})]
    first, second = probe.differences(batch, policies), probe.differences(batch, policies)
    assert torch.equal(first, second) and first.any() and not first.requires_grad
    assert all(torch.equal(before[0][name], value) for name, value in models.state(model).items())
    assert torch.equal(torch.get_rng_state(), before[1]) and run.model.step == before[2]
    assert {n: m.training for n, m in model.named_modules()} == before[3] and run.model.training
    assert sorted(run.model.policy) == ["fc"]
    assert all(p.grad is None and getattr(p, "summed_grad", None) is None for p in model.parameters())


def test_modes_come_back_also_when_the_loss_raises() -> None:
    run = internals_of(models.seeded(Dropping), (6,))
    run.model.train()

    def fails(outputs: Tensor, target: Tensor) -> Tensor:
        raise RuntimeError("no loss today")

    with pytest.raises(RuntimeError, match="no loss today"):
        Probe(run.engine.session, fails, STEP).differences(batch_of(torch.randn(8, 6), IDS), [])
    assert all(module.training for module in run.engine.session.internals.original.modules())


# Drawing a probe batch


class Numbers(Dataset[Any]):
    """Item i is the number i; reads are kept."""

    def __init__(self, size: int) -> None:
        self.size, self.read = size, []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read.append(index)
        return torch.tensor([float(index)]), index % 3


def probe_loader(data: Any) -> Any:
    plain = torch.utils.data.DataLoader(data, batch_size=8)
    return private_loader(plain, max_physical_batch_size=8, poisson_sampling=True, listener=lambda micro: None)


def test_a_draw_takes_each_sample_with_the_rate_and_gives_it_with_its_id() -> None:
    data, rate, turns = Numbers(200), 0.1, 300
    loader, generator = probe_loader(data), torch.Generator().manual_seed(0)
    counts, sizes = torch.zeros(200), []
    for _ in range(turns):
        data.read = []
        parts = list(
            draw_batch(
                loader,
                rate,
                lambda n: torch.rand(n, generator=generator, dtype=torch.float64),
                8,
                group_of,
                unpack_batch,
            )
        )
        ids = torch.cat([part.ids for part in parts])
        assert all(len(part.ids) <= 8 for part in parts) and all(len(part.ids) == 8 for part in parts[:-1])
        assert len(set(ids.tolist())) == len(ids) and sorted(data.read) == sorted(ids.tolist())
        for part in parts:
            assert torch.equal(part.args[0][:, 0], part.ids.float()) and torch.equal(part.target, part.ids % 3)
        marks = torch.cat([part.groups for part in parts])
        assert torch.equal(marks, group_of(ids))
        assert torch.equal(marks, marks.sort().values), "the samples of a group come side by side"
        counts[ids] += 1
        sizes.append(len(ids))
    assert stats.binomtest(int(counts.sum()), 200 * turns, rate).pvalue > 1e-3
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3  # every sample alike
    # A Poisson draw's size varies: its variance is n·q·(1 − q).
    assert 0.7 < float(torch.tensor(sizes).float().var()) / (200 * rate * (1 - rate)) < 1.4


def test_a_draw_of_none_or_of_all() -> None:
    loader = probe_loader(Numbers(20))
    assert list(draw_batch(loader, 0.5, torch.ones, 8, group_of, unpack_batch)) == []
    parts = draw_batch(loader, 1.0, lambda n: torch.rand(n, dtype=torch.float64), 8, group_of, unpack_batch)
    assert sorted(i for part in parts for i in part.ids.tolist()) == list(range(20))


def test_a_batch_that_is_no_pair_needs_unpack() -> None:
    assert unpack_batch([1, 2]) == ((1,), {}, 2)
    with pytest.raises(PrivacySpecError, match=r"mapping with 'x'.*unpack="):
        unpack_batch({"x": 1})


def test_labels_of_a_batch_by_name_are_its_target() -> None:
    batch = {"input_ids": 1, "labels": 2}
    assert unpack_batch(batch) == ((), {"input_ids": 1}, 2)
    assert unpack_batch(batch, {"input_ids", "labels"}) == ((), batch, 2), "the model reads them, as in training"
    assert batch == {"input_ids": 1, "labels": 2}
