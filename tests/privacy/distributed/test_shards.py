"""Models by `fully_shard`: the sums, the noise and ε of one process, in shards; and what cannot be made right, refused.

Each group of processes runs several checks, since starting one costs more than a check.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dpquant_compile.privacy.distributed.shards import own_values
from tests.support import distributed_workers as workers
from tests.support import sharded_workers
from tests.support.distributed_workers import ALL_LOW, sharded
from tests.support.heavy import few
from tests.support.noise_checks import check_one_draw, in_units
from tests.support.processes import Raised, alone, close, on_disk, same, succeeded, together

SHARDED: dict[str, Any] = {"wrap": sharded}
SCHEDULE: dict[str, Any] = {"schedule": {"sigma_measure": 1.0}}
SHAPES = [(3, 5), (1,), (7, 2), (4, 4), (2,), (1, 3), (50, 3)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_own_values_are_those_of_torch_chunk(shape: tuple[int, ...], size: int) -> None:
    tensor = torch.arange(math.prod(shape)).view(shape)
    cuts = [own_values(shape, rank, size) for rank in range(size)]
    assert [0, *(b for _, b in cuts)] == [*(a for a, _ in cuts), tensor.numel()]
    rows = [tensor.flatten()[a:b] for a, b in cuts if a < b]
    assert all(torch.equal(a, b.flatten()) for a, b in zip(rows, tensor.chunk(size), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("size", few([2, 4], 2))
def test_runs_are_those_of_one_process(size: int, tmp_path: Path) -> None:
    """Sums in low precision, noise bit for bit, analyses, policies, ε, and parameters; at odd shapes too."""
    jobs: list[tuple[Any, ...]] = [
        (workers.gradients, {**ALL_LOW, **SHARDED}),
        (workers.noise_alone, SHARDED),
        (workers.whole_run, {**SCHEDULE, **SHARDED}),
        (sharded_workers.scattered, size, SHAPES),
    ]
    results = [succeeded(each) for each in succeeded(together(size, workers.several, *jobs, folder=tmp_path))]
    sums, noise, runs, tables = (list(each) for each in zip(*results, strict=True))
    one = alone(workers.gradients, ALL_LOW, folder=tmp_path)
    for step, expected in enumerate(one["gradients"]):
        assert sorted(i for result in sums for i in result["drawn"][step]) == one["drawn"][step]
        assert all(close(result["gradients"][step], expected) for result in sums)
    assert any(float(grad.norm()) > 1e-3 for grad in one["gradients"][0].values())
    only_noise = alone(workers.noise_alone, {}, folder=tmp_path)
    check_one_draw(in_units(only_noise))
    assert all(torch.equal(found, only_noise) for found in noise)
    whole = alone(workers.whole_run, SCHEDULE, folder=tmp_path)
    assert all(same(runs, name) for name in ("parameters", "policies", "scores", "epsilon", "entries", "sampler"))
    assert runs[0]["policies"] == whole["policies"] and len(set(whole["policies"])) > 1
    assert runs[0]["epsilon"] == whole["epsilon"] < math.inf and runs[0]["entries"] == whole["entries"]
    assert close(runs[0]["parameters"], whole["parameters"], 1e-4)
    assert all(gathered and scattered for gathered, scattered in tables)


@pytest.mark.heavy
def test_analyses_of_the_paper_are_those_of_one_process(tmp_path: Path) -> None:
    """They step the optimizer, and take the step back."""
    options = {"schedule": {"estimator": "paper", "sigma_measure": 1.0}}
    many = succeeded(together(2, workers.whole_run, {**options, **SHARDED}, folder=tmp_path))
    one = alone(workers.whole_run, options, folder=tmp_path)
    assert same(many, "parameters") and same(many, "scores") and many[0]["policies"] == one["policies"]
    assert close(many[0]["parameters"], one["parameters"], 1e-4)


@pytest.fixture(scope="module")
def behaviour(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Many checks on two processes of one group, by name: for each process what it gave, or how it raised."""
    faults = ("no noise", "the part of another", "less than its part", "one more process", "another place")
    jobs: dict[str, tuple[Any, ...]] = {
        "forms": (sharded_workers.forms,),
        **{f"fault: {fault}": (sharded_workers.faulty, fault) for fault in faults},
        "written": (sharded_workers.written_before_the_step,),
        "stray": (sharded_workers.stray,),
        "cleared": (sharded_workers.stray_and_cleared,),
        "replaced": (sharded_workers.replaced,),
        **{f"refused: {kind}": (sharded_workers.refused, kind) for kind in sharded_workers.REFUSED},
    }
    folder = tmp_path_factory.mktemp("shards")
    results = succeeded(together(2, workers.several, *jobs.values(), folder=folder, seconds=280))
    return dict(zip(jobs, map(list, zip(*results, strict=True)), strict=True))


@pytest.mark.slow
def test_parameters_gradients_and_states_are_shards(behaviour: dict[str, list[Any]]) -> None:
    first, second = succeeded(behaviour["forms"])
    plain = {name: tuple(p.shape) for name, p in workers.Net().named_parameters()}
    for found in (first, second):
        for kind in ("parameters", "gradients", "model"):
            assert {name: shape for name, (_, shape, _) in found[kind].items()} == plain
            assert {form for form, _, _ in found[kind].values()} == {"DTensor"}
        assert found["tools"] == (found["model"], sorted(plain))
        assert all(state["momentum_buffer"][0] == "DTensor" for state in found["states"])
        assert not found["hooks"] and not any("FSDP" in name for name in found["types"])
        assert found["sums"] == [None] * len(plain), "no sum without noise lies where users look"
    for name, shape in plain.items():
        assert first["parameters"][name][2] + second["parameters"][name][2] == math.prod(shape)
    assert "no process has the whole state" in first["state_dict"]


@pytest.mark.slow
def test_evaluation_needs_no_other_process(behaviour: dict[str, list[Any]]) -> None:
    """Unless something else than a step has changed shards, which then is so on every process."""
    first, second = succeeded(behaviour["forms"])
    assert torch.equal(first["alone"], first["evaluation"]) and torch.equal(first["evaluation"], second["evaluation"])
    assert not torch.allclose(first["changed"], first["evaluation"])
    assert torch.allclose(first["changed"], first["plain"], atol=1e-5)


@pytest.mark.slow
def test_faults_of_the_noise_are_found(behaviour: dict[str, list[Any]], tmp_path: Path) -> None:
    found = succeeded(behaviour["fault: no noise"])[0]
    assert not torch.equal(found, alone(workers.noise_alone, {}, folder=tmp_path))
    with pytest.raises(AssertionError):
        check_one_draw(in_units(found))
    for fault in ("the part of another", "less than its part", "one more process"):
        for result in behaviour[f"fault: {fault}"]:
            assert isinstance(result, Raised) and result.kind == "DistributedError", result
            assert "do not make up all values" in result.text and "Nothing was released" in result.text
    for result in behaviour["fault: another place"]:
        assert isinstance(result, Raised) and "noise: key" in result.text and "on rank 1" in result.text


@pytest.mark.slow
def test_steps_that_would_not_be_those_of_the_gradients_are_stopped(behaviour: dict[str, list[Any]]) -> None:
    for result in behaviour["written"]:
        assert isinstance(result, Raised) and "shards written to: False on rank 0, True on rank 1" in result.text
    for result in behaviour["stray"]:
        assert isinstance(result, Raised) and result.kind == "PrivateTrainingError"
        assert "did not come through the private program" in result.text
    assert all(succeeded(behaviour["cleared"]))
    for result in behaviour["replaced"]:
        assert isinstance(result, Raised) and "is not the shard that make_private took" in result.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("placement", "not by rows. Fix: no shard_placement_fn="),
        ("part", "Fix: fully_shard(model) on the model itself too"),
        ("tensor parallel", "'body.weight' is a DTensor that fully_shard() does not manage, as in tensor parallelism"),
        ("replicas", "neither replicas of shards (HSDP) nor tensor parallelism. Fix: leave mesh= of fully_shard() out"),
        ("group", "private training runs on all 2 processes"),
        ("offload", "Fix: leave offload_policy= out"),
        ("precision", "high='bfloat16') computes in bfloat16, with sums in float32"),
        ("flat", "Fix: fully_shard(model) from torch.distributed.fsdp"),
        ("compiled last", "Fix: dpquant_compile.compile(model) first, and fully_shard"),
    ],
)
def test_other_ways_to_spread_a_model_are_refused(kind: str, words: str, behaviour: dict[str, list[Any]]) -> None:
    for result in behaviour[f"refused: {kind}"]:
        assert isinstance(result, Raised) and result.kind == "PrivacySpecError", result
        assert words in result.text


@pytest.mark.heavy
def test_a_module_that_is_not_compiled_yet(tmp_path: Path) -> None:
    """It is compiled without low sites; AdamW keeps two states of each parameter in shards."""
    many = succeeded(together(2, sharded_workers.uncompiled, folder=tmp_path, seconds=280))
    one = alone(sharded_workers.uncompiled, folder=tmp_path)
    assert all(close(found, one, 1e-3) for found in many)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), few([(2, 1), (1, 2), (2, 4), (2, -2)], (2, 1)))
def test_resume_on_another_number_of_processes(before: int, after: int, tmp_path: Path) -> None:
    """Parameters and states come back bit for bit, and the noise goes on as if uninterrupted; -2 is unsharded."""
    options = {"ledger_path": tmp_path / "ledger.json"}
    then = {**options, **(SHARDED if after > 0 else {})}
    noise, state = tmp_path / "noise", tmp_path / "state"
    jobs = [(workers.noise_alone, {**options, **SHARDED}, "", 1, noise), (sharded_workers.saved, state, SHARDED)]
    results = [succeeded(each) for each in succeeded(together(before, workers.several, *jobs, folder=tmp_path))]
    jobs = [(workers.noise_alone, then, "", 1, noise), (sharded_workers.loaded, state, {**then, "ledger_path": None})]
    again = [succeeded(each) for each in succeeded(together(abs(after), workers.several, *jobs, folder=tmp_path))]
    drawn = alone(workers.noise_alone, {}, folder=tmp_path)
    assert all(torch.equal(found, drawn[:4]) for found, _ in results)
    assert all(torch.equal(found, drawn[4:]) for found, _ in again)
    kept = results[0][1]
    assert any("momentum_buffer" in name for name in kept)
    for (_, found), (name, value) in itertools.product(again, kept.items()):
        assert torch.equal(found[name], value), name
        assert torch.equal(found.get(f"read {name}", found[name]), value), f"what programs read of {name}"


@pytest.mark.heavy
def test_resume_on_as_many_processes_repeats_bit_for_bit(tmp_path: Path) -> None:
    """The ledger is ahead of the checkpoint by an epoch and an analysis, which the resumed run is not charged again."""
    options, path = {**SHARDED, "ledger_path": tmp_path / "ledger.json"}, tmp_path / "checkpoint"
    succeeded(together(2, workers.train_and_save, options, path, 1, 1, folder=tmp_path))
    ahead = on_disk(tmp_path / "ledger.json")
    results = succeeded(together(2, workers.resume, options, path, folder=tmp_path))
    whole = succeeded(together(2, workers.whole_run, SHARDED, folder=tmp_path))
    assert same(results + whole, "parameters") and same(results + whole, "epsilon")
    assert on_disk(tmp_path / "ledger.json") == 3 * 4 + 2 and ahead == 2 * 4 + 2


@pytest.mark.slow
@pytest.mark.parametrize("victim", few([0, 1], 1))
def test_a_killed_process_ends_the_run_and_no_entry_is_lost(victim: int, tmp_path: Path) -> None:
    results = together(2, workers.dying, tmp_path, victim, 6, SHARDED, folder=tmp_path)
    assert results[victim] is None
    text, steps, unchanged = results[1 - victim]
    assert f"rank {1 - victim} of 2 lost touch with the other processes after 6 optimizer steps" in text
    assert steps == 6 and unchanged
    assert on_disk(tmp_path / "ledger.json") in ([7] if victim == 0 else [7, 8])


@pytest.mark.heavy
def test_secure_noise_of_each_process_is_its_own(tmp_path: Path) -> None:
    options = {**SHARDED, "secure": True, "noise_multiplier": 100.0, "width": 300}
    first, second = succeeded(together(2, workers.gradients, options, folder=tmp_path))
    assert all(
        torch.equal(a[name], b[name])
        for a, b in zip(first["gradients"], second["gradients"], strict=True)
        for name in a
    )
    noise = torch.stack([torch.cat([g.flatten() for g in step.values()]) for step in first["gradients"]])
    check_one_draw(noise.double() * first["expected"] / (100.0 * 0.5))  # beside which the sums are nothing
