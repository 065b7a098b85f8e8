"""Several processes: the sums, the noise, the policies and ε of one process, and no process that comes apart unseen."""

import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from dpquant_compile.privacy.data.poisson_loader import SharedUniform
from dpquant_compile.privacy.distributed import world as distributed
from dpquant_compile.privacy.distributed.world import World, apart
from tests.support import distributed_workers as workers
from tests.support.distributed_workers import ALL_LOW, EPOCHS, engine_of, epoch
from tests.support.heavy import few
from tests.support.noise_checks import check_one_draw, in_units
from tests.support.processes import Raised, alone, close, on_disk, same, succeeded, together

pytestmark = pytest.mark.slow  # each test starts processes


@pytest.mark.parametrize("size", [2, 4])
def test_clipped_sums_are_those_of_one_process(size: int, tmp_path: Path) -> None:
    """In low precision, where every rounding hangs on the step, the site and the sample; micro-batches of up to 4."""
    one = alone(workers.gradients, ALL_LOW, folder=tmp_path)
    many = succeeded(together(size, workers.gradients, ALL_LOW, folder=tmp_path))
    assert {result["expected"] for result in many} == {one["expected"]} == {12}
    for step, drawn in enumerate(one["drawn"]):
        shares = [result["drawn"][step] for result in many]
        assert sorted(i for share in shares for i in share) == drawn  # one Poisson draw, each sample once
        assert all(i % size == rank for rank, share in enumerate(shares) for i in share)
        for result in many:
            assert close(result["gradients"][step], one["gradients"][step])
            for name, grad in result["gradients"][step].items():
                assert torch.equal(grad, many[0]["gradients"][step][name])  # the same bits on every process
    assert any(float(grad.norm()) > 1e-3 for grad in one["gradients"][0].values())


def test_a_process_without_samples_takes_part(tmp_path: Path) -> None:
    """Six samples in batches of one or so: most shares are empty."""
    few = {**ALL_LOW, "samples": 6, "batch": 1}
    one = alone(workers.gradients, few, folder=tmp_path)
    many = succeeded(together(4, workers.gradients, few, folder=tmp_path))
    shares = [share for result in many for share in result["drawn"]]
    assert sum(not share for share in shares) > len(shares) / 2 and any(shares)
    for step in range(len(one["drawn"])):
        assert all(close(result["gradients"][step], one["gradients"][step]) for result in many)


WORLDS = [(2, "per_sample"), (4, "per_sample"), (2, "paper")]


@pytest.mark.parametrize(("size", "estimator"), few(WORLDS, (2, "per_sample")), ids=lambda value: str(value))
def test_runs_are_those_of_one_process(size: int, estimator: str, tmp_path: Path) -> None:
    """With noise, analyses and policies; and on all processes alike to the last bit."""
    options = {"schedule": {"estimator": estimator, "sigma_measure": 1.0}}
    one = alone(workers.whole_run, options, folder=tmp_path)
    many = succeeded(together(size, workers.whole_run, options, folder=tmp_path))
    assert all(same(many, name) for name in ("parameters", "policies", "scores", "epsilon", "entries", "sampler"))
    result = many[0]
    assert result["policies"] == one["policies"] and len(set(one["policies"])) > 1
    assert result["epsilon"] == one["epsilon"] < math.inf and result["entries"] == one["entries"]
    assert sum("analysis" in entry for entry in one["entries"]) >= 1
    assert result["scores"] == pytest.approx(one["scores"], rel=1e-4, abs=1e-6)
    assert close(result["parameters"], one["parameters"], 1e-4)


@pytest.mark.parametrize("size", few([2, 4], 2))
def test_noise_has_the_variance_of_one_draw(size: int, tmp_path: Path) -> None:
    wide: dict[str, Any] = {"width": 300, "policy": "none"}
    noisy = succeeded(together(size, workers.gradients, {**wide, "noise_multiplier": 2.0}, folder=tmp_path))[0]
    bare = succeeded(together(size, workers.gradients, {**wide, "noise_multiplier": 0.0}, folder=tmp_path))[0]
    noise = []
    for with_noise, without in zip(noisy["gradients"], bare["gradients"], strict=True):
        parts = [(with_noise[name] - without[name]).flatten() for name in without]
        noise.append(torch.cat(parts).double() * noisy["expected"] / (2.0 * 0.5))  # in units of σ·C
    check_one_draw(torch.stack(noise))


@pytest.mark.parametrize("size", few([2, 3], 2))
def test_noise_is_that_of_one_process(size: int, tmp_path: Path) -> None:
    """Bit for bit: each process draws its part of the one keystream."""
    one = alone(workers.noise_alone, {}, folder=tmp_path)
    check_one_draw(in_units(one))
    for many in succeeded(together(size, workers.noise_alone, {}, folder=tmp_path)):
        assert torch.equal(many, one)


@pytest.mark.parametrize(("before", "after"), few([(2, 1), (1, 2)], (2, 1)))
def test_noise_goes_on_alike_on_another_number_of_processes(before: int, after: int, tmp_path: Path) -> None:
    options = {"ledger_path": tmp_path / "ledger.json"}
    whole = alone(workers.noise_alone, {}, folder=tmp_path)
    for size, part in ((before, whole[:4]), (after, whole[4:])):
        work = (workers.noise_alone, options, "", 1, tmp_path / "checkpoint")
        assert all(torch.equal(found, part) for found in succeeded(together(size, *work, folder=tmp_path)))


@pytest.mark.parametrize("fault", ["no noise", "the part of another"])
def test_faults_of_parts_are_found(fault: str, tmp_path: Path) -> None:
    """A process leaves its part out, or takes that of another: the checks above fail."""
    faulty = succeeded(together(2, workers.noise_alone, {}, fault, folder=tmp_path))[0]
    assert not torch.equal(faulty, alone(workers.noise_alone, {}, folder=tmp_path))
    with pytest.raises(AssertionError):
        check_one_draw(in_units(faulty))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("a part that is told", r"parts of the noise .* do not make up all \d+ values: .* Nothing was released"),
        ("another place", r"noise: key \w+, block 0 on rank 0, key \w+, block 12 on rank 1"),
    ],
)
def test_processes_that_would_add_noise_to_other_parts_are_stopped(fault: str, words: str, tmp_path: Path) -> None:
    for result in together(2, workers.noise_alone, {}, fault, folder=tmp_path):
        assert isinstance(result, Raised) and result.kind == "DistributedError", result
        assert re.search(words, result.text), result.text


def test_secure_noise_of_each_process_has_a_key_of_its_own(tmp_path: Path) -> None:
    (first, one), (second, other) = succeeded(together(2, workers.own_noise, folder=tmp_path))
    assert first != second
    n = min(len(one), len(other))
    assert n > 40_000
    assert abs(float(torch.corrcoef(torch.stack([one[:n], other[:n]]).double())[0, 1])) < 5 / math.sqrt(n)
    for result in together(2, workers.same_entropy, folder=tmp_path):
        assert isinstance(result, Raised) and "same key for their noise" in result.text, result


def test_a_run_does_not_outlive_its_processes(tmp_path: Path) -> None:
    """With fewer processes than it was made on, a part of the values would get no noise."""
    for result in together(2, workers.stale_world, folder=tmp_path):
        assert isinstance(result, Raised) and "of 3 processes, and this is now rank" in result.text, result


def test_rank_0_chooses(tmp_path: Path) -> None:
    first, second = succeeded(together(2, workers.chosen_by_rank, folder=tmp_path))
    assert first == second and first[0] == ["body", "conv"]


def test_an_estimator_of_ones_own_gets_the_whole_probe_batch(tmp_path: Path) -> None:
    (one, epsilon), *many = [
        alone(workers.own_estimator, folder=tmp_path),
        *succeeded(together(2, workers.own_estimator, folder=tmp_path)),
    ]
    assert all(scores == pytest.approx(one) and spent == epsilon for scores, spent in many)
    assert min(one.values()) > 5


@pytest.mark.parametrize(
    ("twist", "words"),
    [
        ("parameters", r"differ at an optimizer step\. parameters: \w+ on rank 0, \w+ on rank 1\. Fix: "),
        ("policy", r"differ at an optimizer step\. policy: \['.*'\] on rank 0, \[\] on rank 1\. Fix: "),
        ("mode", r"differ at an optimizer step\. train\(\) of 'norm': True on rank 0, False on rank 1\. Fix: "),
        ("frozen", r"at an optimizer step\. requires_grad of 'fc\.bias': True on rank 0, False on rank 1\. Fix: "),
        ("ledger", r"at the end of an epoch\. ledger: \['4 training .* on rank 0, .*q=0\.5 sigma=2\.0.* on rank 1"),
        ("noise", r"differ at an optimizer step\. noise_multiplier: 1\.0 on rank 0, 3\.0 on rank 1"),
    ],
)
def test_processes_that_come_apart_are_stopped(twist: str, words: str, tmp_path: Path) -> None:
    results = together(2, workers.with_a_twist, {}, twist, folder=tmp_path)
    for result in results:
        assert isinstance(result, Raised) and result.kind == "DistributedError", result
        assert re.search(words, result.text), result.text


def test_scores_are_compared_too(tmp_path: Path) -> None:
    results = together(2, workers.with_a_twist, {"schedule": {"mode": "pls"}}, "scores", folder=tmp_path)
    assert all(isinstance(result, Raised) and "scores: {" in result.text for result in results)


def test_samplers_that_drifted_are_brought_together(tmp_path: Path) -> None:
    results = succeeded(together(2, workers.with_a_twist, {}, "sampler", folder=tmp_path))
    one = alone(workers.with_a_twist, {}, "none", folder=tmp_path)
    assert same(results, "sampler") and results[0]["sampler"] == one["sampler"]


def test_batches_by_hand_on_one_process_are_refused(tmp_path: Path) -> None:
    results = together(2, workers.by_hand, folder=tmp_path)
    assert all("batches from the loader: True on rank 0, False on rank 1" in result.text for result in results)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"spec": {"seed": 7}}, "seed: 0 on rank 0, 7 on rank 1"),
        ({"max_grad_norm": 0.7}, "max_grad_norm: [0.5] on rank 0, [0.7] on rank 1"),
        ({"batch": 6}, "sample_rate: 0.25 on rank 0, 0.125 on rank 1"),
        ({"samples": 60, "batch": 15}, "dataset size: 48 on rank 0, 60 on rank 1"),
        ({"width": 9}, "parameters: "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_settings_on_one_process_are_refused(other: dict[str, Any], words: str, tmp_path: Path) -> None:
    for result in together(2, workers.settings, [{}, other], folder=tmp_path):
        assert isinstance(result, Raised) and result.kind == "DistributedError"
        assert "differ in make_private" in result.text and words in result.text


def test_data_split_by_a_seed_of_each_process_is_refused(tmp_path: Path) -> None:
    """One record could be in two shares, and count twice."""
    for result in together(2, workers.subsets, folder=tmp_path):
        assert isinstance(result, Raised) and "dataset: Subset" in result.text


def test_models_begin_as_that_of_rank_0(tmp_path: Path) -> None:
    results = succeeded(together(2, workers.settings, [{}, {}], folder=tmp_path))  # seeds differ by rank
    one = alone(workers.settings, [{}], folder=tmp_path)
    assert all(torch.equal(result[name], one[name]) for result in results for name in one)


def test_distributed_data_parallel_is_taken_off(tmp_path: Path) -> None:
    plain = succeeded(together(2, workers.wrapped, "plain", folder=tmp_path))
    ddp = succeeded(together(2, workers.wrapped, "ddp", folder=tmp_path))
    assert same(plain + ddp, "parameters") and same(plain + ddp, "entries")


def test_what_several_processes_cannot_do_is_refused(tmp_path: Path) -> None:
    for result in together(2, workers.settings, [{"poisson_sampling": False}] * 2, folder=tmp_path):
        assert result.kind == "PrivacySpecError" and "poisson_sampling=False with 2 processes" in result.text
    for result in together(2, workers.sampler_of_torch, folder=tmp_path):
        assert result.kind == "PrivacySpecError" and "DistributedSampler" in result.text


def test_secure_mode(tmp_path: Path) -> None:
    runs = [succeeded(together(2, workers.secure_run, folder=tmp_path)) for _ in range(2)]
    for first, second in runs:
        assert same([first, second], "parameters") and same([first, second], "entries")
        assert len(first["drawn"]) == len(second["drawn"]) == 4
        assert all(i % 2 == 0 for share in first["drawn"] for i in share)
        assert all(i % 2 == 1 for share in second["drawn"] for i in share)
        noise = torch.cat([g.flatten() for step in first["gradients"] for g in step.values()]) * first["expected"] / 50
        assert abs(float(noise.std()) - 1) < 0.03
        assert all(
            torch.equal(a[name], b[name])
            for a, b in zip(first["gradients"], second["gradients"], strict=True)
            for name in a
        )
    assert runs[0][0]["drawn"] != runs[1][0]["drawn"]  # from the operating system, not from a seed
    assert not same([runs[0][0], runs[1][0]], "parameters")


def test_secure_draws_of_one_key_are_the_same() -> None:
    one, other = SharedUniform(), SharedUniform()
    one.take_key(bytes(range(32)))
    other.take_key(bytes(range(32)))
    drawn = [one(20_000), one(5)]
    assert torch.equal(drawn[0], other(20_000)) and torch.equal(drawn[1], other(5))
    assert drawn[0].dtype == torch.float64 and float(drawn[0].min()) >= 0 and float(drawn[0].max()) < 1
    assert abs(float(drawn[0].mean()) - 0.5) < 5 / math.sqrt(12 * 20_000)
    assert not torch.equal(drawn[0][:5], drawn[1])
    other.take_key(bytes(range(1, 33)))
    assert not torch.equal(drawn[0], other(20_000))


def test_the_target_stops_all_processes_at_the_same_step(tmp_path: Path) -> None:
    target = {"target_epsilon": 9.0, "target_delta": 1e-5}
    one = alone(workers.budget, target, folder=tmp_path)
    first, second = succeeded(together(2, workers.budget, target, folder=tmp_path))
    assert first == second == one and one[0] > EPOCHS and one[1] <= 9.0


def test_collectives(tmp_path: Path) -> None:
    results = succeeded(together(3, workers.collectives, folder=tmp_path))
    for rank, result in enumerate(results):
        assert result["buckets"] == [[0, 1], [2], [3, 4], [5]]  # 64 bytes, one dtype; a larger tensor by itself
        assert [tuple(total.shape) for total in result["sums"]] == [(3, 5), (), (40,), (0,), (2, 2, 2), (1,)]
        assert all(bool((total == 6).all()) for total in result["sums"]) and result["sums"][5].dtype == torch.int64
        assert result["bytes"] == 4 * (15 + 1 + 40 + 8) + 8
        image, flags, numbers = result["copies"]
        assert not image.any() and image.is_contiguous(memory_format=torch.channels_last)
        assert flags.tolist() == [True, False] and numbers.tolist() == [0, 1, 2, 3, 4]
        assert result["share"] == list(range(rank, 10, 3))
        assert result["told"] == ["rank", 0] and result["gathered"] == [0, 1, 2]
        kind, text = result["error"]
        assert (kind, text) == (("OddError", "no") if rank == 0 else ("DistributedError", "rank 0 raised OddError: no"))
        assert result["differing"] == {"b": [0, 0, 1]}
        assert result["used"] == {"x", "0", "1", "2"}
        assert [total.tolist() for total in result["parts"]] == [[3.0] * 70]
        assert len(result["wrong parts"]) == 4 and all("do not make up all 70" in t for t in result["wrong parts"])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_run_and_no_entry_is_lost(victim: int, tmp_path: Path) -> None:
    results = together(2, workers.dying, tmp_path, victim, 6, folder=tmp_path)
    assert results[victim] is None
    text, steps, unchanged = results[1 - victim]
    assert f"rank {1 - victim} of 2 lost touch with the other processes after 6 optimizer steps" in text
    assert "No entry of the privacy ledger is lost" in text and "--max-restarts" in text
    assert steps == 6 and unchanged, "nothing came of the step that rank 0 has not paid for, or not added to"
    # Six steps and the analysis after the first epoch, of four; rank 0 may have paid for the seventh.
    assert on_disk(tmp_path / "ledger.json") in ([7] if victim == 0 else [7, 8])


def test_no_process_gets_a_sum_before_its_entry_is_on_disk(tmp_path: Path) -> None:
    """Other processes may read data while rank 0 still writes, but what they get of a step comes after that."""
    written, done = succeeded(together(2, workers.slow_ledger, tmp_path, folder=tmp_path))
    assert len(written) == len(done) == 4
    assert all(entry < step for entry, step in zip(written, done, strict=True))
    assert on_disk(tmp_path / "ledger.json") == 4


def test_an_error_of_rank_0_is_raised_on_all_processes(tmp_path: Path) -> None:
    """Only rank 0 can see that the checkpoint is of another ledger."""
    options, path = {"ledger_path": tmp_path / "ledger.json"}, tmp_path / "checkpoint"
    succeeded(together(2, workers.train_and_save, options, path, 1, folder=tmp_path))
    other = {"ledger_path": tmp_path / "other.json"}
    for result in together(2, workers.other_ledger, other, path, folder=tmp_path):
        assert isinstance(result, Raised) and result.kind == "LedgerError" and "different runs" in result.text


def secure_epochs() -> dict[str, Any]:
    """The keys that sampling got, and the samples of two epochs."""
    keys: list[bytes] = []
    take = SharedUniform.take_key

    def noted(self: SharedUniform, key: bytes) -> None:
        keys.append(key)
        take(self, key)

    SharedUniform.take_key = noted  # type: ignore[method-assign]  # in a process of its own
    engine = engine_of(secure=True)
    return {"drawn": [epoch(engine), epoch(engine)], "keys": keys}


def apart_at(when: str, path: Path) -> None:
    """Something changes on rank 1 alone, right before a checkpoint or a step."""
    engine = engine_of(schedule={})
    if workers.rank() == 1 and when == "checkpoint":
        engine.session.model.set_policy("none")
    elif workers.rank() == 1 and when == "epoch":
        engine.session.model.fc.bias.data[0] += 1e-3
    elif workers.rank() == 1:
        engine.run.optimizer.max_grad_norm = 0.7
    if when == "step":
        epoch(engine)
    elif when == "epoch":
        engine.scheduler.step()
    engine.save_checkpoint(path=path)


def scheduler_of_rank_0(n_interval: int) -> None:
    """Rank 0 goes to the scheduler, the others to the next epoch."""
    engine = engine_of(schedule={"n_interval": n_interval})
    scheduler, engine.scheduler = engine.scheduler, None
    epoch(engine)
    if workers.rank() == 0:
        scheduler.step()
    epoch(engine)


def unpicklable() -> None:
    World.current().on_first("a function", lambda: lambda: 0)


class Buffered(workers.Net):
    """With a buffer that hangs on the seed, as each process has its own."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("scale", torch.rand(()) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


def buffered() -> dict[str, Any]:
    own: list[Tensor] = []

    def wrap(model: nn.Module) -> nn.Module:
        own.extend(buffer.clone() for buffer in model.buffers())
        return model

    workers.Net = Buffered  # type: ignore[misc]  # in a process of its own
    engine = engine_of(wrap=wrap)
    buffers = dict(engine.session.model.named_buffers())
    return {"own": own, "buffers": {name: buffer.clone() for name, buffer in buffers.items()}, "drawn": epoch(engine)}


class Forked(nn.Module):
    """A parameter that only some calls use."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc, self.side = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        y: Tensor = self.fc(x.flatten(1))
        return y if extra is None else y + self.side(extra.flatten(1))


def forked() -> dict[str, Any]:
    """An epoch in which rank 1 alone uses `side`."""
    workers.Net = Forked  # type: ignore[assignment,misc]  # in a process of its own
    made = engine_of(spec={"budget": 0}).run
    before = made.session.model.side.weight.detach().clone()
    for x, y in made.loader:
        made.optimizer.zero_grad()
        made.criterion(made.session.model(x, x) if workers.rank() == 1 else made.session.model(x), y).backward()
        made.optimizer.step()
    parameters = {name: p.detach().clone() for name, p in made.session.model.named_parameters()}
    return {"parameters": parameters, "moved": not torch.equal(before, parameters["side.weight"])}


def physical(options: dict[str, Any]) -> tuple[int, float]:
    engine = engine_of(**options)
    return engine.session.physical, engine.scheduler.sample_rate


def test_secure_sampling_has_one_key_for_all_and_a_new_one_for_every_epoch(tmp_path: Path) -> None:
    first, second = succeeded(together(2, secure_epochs, folder=tmp_path))
    assert first["keys"] == second["keys"] and len(set(first["keys"])) == 2
    for result in (first, second):
        assert result["drawn"][0] != result["drawn"][1]
    for one, other in zip(first["drawn"], second["drawn"], strict=True):
        assert len(one) == len(other) == 4
        assert not any(set(a) & set(b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("checkpoint", r"differ at a checkpoint\. policy: \['.*'\] on rank 0, \[\] on rank 1"),
        ("epoch", r"differ at the end of epoch 1\. parameters: \w+ on rank 0, \w+ on rank 1\. Fix: "),
        ("step", r"differ at an optimizer step\. max_grad_norm: 0\.5 on rank 0, 0\.7 on rank 1"),
    ],
)
def test_what_differs_is_found_before_it_is_used(when: str, words: str, tmp_path: Path) -> None:
    for result in together(2, apart_at, when, tmp_path / "checkpoint", folder=tmp_path):
        assert isinstance(result, Raised) and result.kind == "DistributedError", result
        assert re.search(words, result.text), result.text
    assert not (tmp_path / "checkpoint").exists()


def test_a_message_on_many_differences_is_short() -> None:
    error = apart("at an optimizer step", {f"train() of 'layer{i}'": [True, False] for i in range(60)})
    assert "train() of 'layer4': True on rank 0, False on rank 1; and 55 more. Fix" in str(error)
    assert "layer5" not in str(error)


@pytest.mark.parametrize(("n_interval", "told"), [(1, "the samples of an analysis"), (2, "the policy of an epoch")])
def test_a_process_out_of_step_is_told_so(n_interval: int, told: str, tmp_path: Path) -> None:
    first, second = together(2, scheduler_of_rank_0, n_interval, folder=tmp_path)
    assert isinstance(second, Raised) and second.kind == "DistributedError", second
    assert f"it waits for the batches of an epoch of rank 0, which has come to {told}" in second.text
    assert isinstance(first, Raised) and first.kind == "DistributedError", first  # it has lost the other


def test_a_value_that_cannot_be_sent_leaves_no_process_waiting(tmp_path: Path) -> None:
    for result in together(2, unpicklable, folder=tmp_path, seconds=30):
        assert isinstance(result, Raised) and "lambda" in result.text


def test_buffers_are_those_of_rank_0(tmp_path: Path) -> None:
    first, second = succeeded(together(2, buffered, folder=tmp_path))
    assert first["own"] != second["own"] and same([first, second], "buffers")
    assert list(first["buffers"].values()) == first["own"]


def test_a_parameter_that_one_process_does_not_use_is_in_use_for_all(tmp_path: Path) -> None:
    first, second = succeeded(together(2, forked, folder=tmp_path))
    assert first["moved"] and same([first, second], "parameters")


def test_the_default_physical_batch_is_that_of_a_share(tmp_path: Path) -> None:
    """It holds almost every one whole. The samples of an analysis, which ε hangs on, stay those of one process."""
    options = {"max_physical_batch_size": None, "samples": 1024, "batch": 128, "schedule": {"n_sample": 1}}
    one, *two = alone(physical, options, folder=tmp_path), *succeeded(together(2, physical, options, folder=tmp_path))
    assert one == (216, 1 / 6) and two == [(128, 1 / 6)] * 2


def test_nccl_gets_tensors_that_it_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Analyses add up on the CPU. Without a GPU, by tensors that only say where they are."""
    sent = []

    class Done:
        def wait(self) -> None:
            pass

    def take(tensor: Tensor, **options: Any) -> Done:
        sent.append(tensor.device.type)
        return Done()

    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dist, "all_reduce", take)
    monkeypatch.setattr(dist, "broadcast", take)
    with FakeTensorMode():
        tensors = [torch.zeros(3), torch.zeros(2, device="cuda:0"), torch.zeros(2, 2, dtype=torch.float64)]
        sums = World(0, 2).sum(tensors)
        World(0, 2).copy_first(tensors)
    assert [total.device.type for total in sums] == ["cpu", "cuda", "cpu"]
    assert [total.shape for total in sums] == [tensor.shape for tensor in tensors]
    assert sent == ["cuda"] * 6


def test_every_restart_of_torchrun_has_names_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one node. The torchruns of several count restarts each by itself, so that names would differ."""
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "GROUP_"))]:
        monkeypatch.delenv(name)
    assert not distributed._restarts_are_ours({})
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert not distributed._restarts_are_ours({})
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    assert distributed._restarts_are_ours({}) and distributed._restarts_are_ours({"init_method": "env://"})
    assert not distributed._restarts_are_ours({"store": object()})
    assert not distributed._restarts_are_ours({"init_method": "file:///x"})
