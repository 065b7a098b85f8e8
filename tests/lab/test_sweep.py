"""Tasks, configurations, archives, run folders and sweeps."""

import dataclasses
import json
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpquant_compile import torchvision_compat
from dpquant_compile.errors import LabError
from dpquant_compile.lab import RunConfig, data, expand, find_runs, get_task, read_run, sweep, task_names
from dpquant_compile.lab.archive import read_archive
from dpquant_compile.lab.tasks import register_task
from dpquant_compile.lab.train import Run, train
from dpquant_compile.privacy.accounting.planning import plan
from tests.support.tiny_task import tiny_model, tiny_task

PUBLISHED = (
    "resnet18-cifar10 resnet18-gtsrb resnet50-gtsrb densenet121-cifar10 densenet121-gtsrb resnet18-emnist bert-snli"
)
SMALL = "cnn-digits cnn-gtsrb-small resnet18-gtsrb-small resnet18-gtsrb-tuned cnn-cifar10-small minilm-snli-small"


@pytest.fixture(scope="module")
def tiny() -> str:
    return tiny_task()


# Tasks and configurations


def test_the_tasks_that_were_promised_are_there() -> None:
    assert set(f"{PUBLISHED} {SMALL}".split()) <= set(task_names())
    assert all(get_task(name).small == (name in SMALL.split()) for name in f"{PUBLISHED} {SMALL}".split())


def test_a_name_is_taken_once_and_an_unknown_one_lists_the_others() -> None:
    with pytest.raises(LabError, match="already"):
        register_task(get_task("cnn-digits"))
    with pytest.raises(LabError, match=r"no task 'cnn-digit'\. Did you mean cnn-digits\? Tasks: "):
        get_task("cnn-digit")


def test_a_task_fills_in_what_is_not_given() -> None:
    config = RunConfig("cnn-digits", lr=0.25).resolved()
    assert (config.lr, config.epochs, config.noise_multiplier) == (0.25, 12, 1.3)
    assert RunConfig("cnn-digits", optimizer="adam").resolved().lr == 0.01
    assert RunConfig("cnn-digits", target_epsilon=2.0).resolved().noise_multiplier is None


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("budget", 1.5, "from 0 to 1"),
        ("budget", True, "give a number"),
        ("format", "fp5", "luq_fp4"),
        ("scheduler", "best", "dpquant, pls"),
        ("epochs", 0, "from 1 up"),
        ("epochs", 2.0, "from 1 up"),
        ("seed", -1, "from 0 up"),
        ("lr", float("nan"), "give a number"),
        ("target_epsilon", 0.0, "above 0"),
        ("privacy", "clip", "makes no private analyses"),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: object, message: str) -> None:
    with pytest.raises(LabError, match=message) as caught:
        RunConfig.from_json({"task": "cnn-digits", field: value})
    assert field in str(caught.value)


def test_fields_that_do_not_exist_are_refused() -> None:
    with pytest.raises(LabError, match="bugdet: no such field"):
        RunConfig.from_json({"task": "cnn-digits", "bugdet": 0.5})
    with pytest.raises(LabError, match="write high = … in a field of its own"):
        RunConfig.from_json({"task": "cnn-digits", "recipe": "int4.nearest/none/auto/int8"})
    with pytest.raises(LabError, match="quantize_outputs='flow' contradicts"):
        RunConfig.from_json({"task": "cnn-digits", "recipe": "paper", "quantize_outputs": "flow"})
    key = RunConfig.from_json({"task": "cnn-digits", "recipe": "int4.nearest,int8,luq_fp4/flow"}).key
    assert key.startswith("cnn-digits-dp-int4.nearest_int8_luq_fp4_flow-0.75-")  # the name of a folder
    with pytest.raises(LabError, match=r"recipe='cnn-digits' is none of int4, .*; no format is named 'cnn-digits'"):
        RunConfig.from_json({"task": "cnn-digits", "recipe": "cnn-digits"})
    with pytest.raises(LabError, match="recipe='int8' and format='luq_fp4' contradict: give one"):
        RunConfig.from_json({"task": "cnn-digits", "recipe": "int8", "format": "luq_fp4"})
    with pytest.raises(LabError, match="recipe=None: write a name"):
        RunConfig.from_json({"task": "cnn-digits", "recipe": None})
    with pytest.raises(LabError, match="needs a task"):
        RunConfig.from_json({"seed": 1})


def test_a_key_tells_runs_apart_and_nothing_else() -> None:
    base = RunConfig("cnn-digits")
    assert base.key == base.resolved().key, "a default that is written out is the same run"
    assert base.key == dataclasses.replace(base, data="somewhere").key, "where the data lie is not part of a run"
    others = [dict(seed=1), dict(budget=0.5), dict(beta=3.0), dict(lr=0.1), dict(target_epsilon=1.0), dict(epochs=3)]
    keys = {dataclasses.replace(base, **change).key for change in others}
    assert len(keys | {base.key}) == len(others) + 1


# Archives


def packed(images: np.ndarray, labels: np.ndarray, path: Path, chunk: int) -> None:
    """Write an archive, pixel by pixel, as its description says."""
    shift, streams = 128, []
    for start in range(0, len(images), chunk):
        part = images[start : start + chunk].astype(int)
        red, green, blue = (part[..., c] for c in range(3))
        for plane in (green, (red - green + shift) % 256, (blue - green + shift) % 256):
            out = np.zeros_like(plane)
            for n, r, c in np.ndindex(*plane.shape):
                left = plane[n, r, c - 1] if c else None
                above = plane[n, r - 1, c] if r else None
                guess = 0
                if left is not None and above is not None:
                    guess = sorted((left, above, left + above - plane[n, r - 1, c - 1]))[1]
                elif left is not None or above is not None:
                    guess = left if left is not None else above
                out[n, r, c] = (plane[n, r, c] - guess) % 256
            streams.append(zlib.compress(out.astype(np.uint8).tobytes()))
    data = np.frombuffer(b"".join(streams), np.uint8)
    np.savez(path, data=data, sizes=[len(s) for s in streams], shape=images.shape, chunk=chunk, y=labels)


def test_an_archive_gives_back_every_pixel(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (7, 5, 6, 3), dtype=np.uint8)
    labels = np.arange(7, dtype=np.uint8)
    packed(images, labels, tmp_path / "a.npz", chunk=3)
    found, classes = read_archive(tmp_path / "a.npz")
    assert np.array_equal(found, images)
    assert np.array_equal(classes, labels)


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"nothing of the kind")
    with pytest.raises(LabError, match=r"a\.npz is no archive"):
        read_archive(tmp_path / "a.npz")


# Runs


@pytest.mark.slow
def test_a_run_leaves_a_folder_that_can_be_read(tiny: str, tmp_path: Path) -> None:
    seen = []
    result = train(RunConfig(tiny), tmp_path / "run", progress=seen.append)
    assert read_run(tmp_path / "run") == result
    assert tuple(seen) == result.epochs and len(seen) == 4
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {
        "config.json",
        "log.jsonl",
        "ledger.json",
        "checkpoint.pt",
        "model.pt",
        "result.json",
    }
    held, last = (torch.load(tmp_path / "run" / name, weights_only=True) for name in ("model.pt", "checkpoint.pt"))
    assert list(held) == list(tiny_model(None).state_dict()), "the names are those of the task's own model"
    assert all(torch.equal(value, last["dpquant"]["model"][name]) for name, value in held.items())
    assert all(len(row.policy) == 2 for row in result.epochs), "three quarters of three sites, rounded"
    assert set(result.epsilons) == {"training", "analysis"}
    assert result.epsilon is not None and result.epsilons["training"] < result.epsilon
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [tuple(line["policy"]) for line in log] == [row.policy for row in result.epochs]
    assert [line["epoch"] for line in log] == [row.epoch for row in result.epochs] == [1, 2, 3, 4]


def test_a_second_run_of_one_process_is_not_touched_by_the_first(tiny: str, tmp_path: Path) -> None:
    """Runs of a process share a compiled model; a run must not depend on what ran before it."""
    config = RunConfig(tiny, seed=5, reproducible=True)
    alone = train(config, tmp_path / "a")
    train(RunConfig(tiny, seed=6, budget=1.0), tmp_path / "b")
    again = train(config, tmp_path / "c")
    assert [row.accuracy for row in again.epochs] == [row.accuracy for row in alone.epochs]
    assert (again.schedule, again.scores, again.epsilon) == (alone.schedule, alone.scores, alone.epsilon)
    states = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["dpquant"]["model"] for name in "ac"]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.slow
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tiny: str, tmp_path: Path, stop: int) -> None:
    config = RunConfig(tiny, seed=stop, reproducible=True).resolved()
    whole = train(config, tmp_path / "whole")
    run = Run(config, tmp_path / "cut")
    for row in run.epochs():
        if row.epoch == stop:
            break
    else:
        pytest.fail("the run was not stopped") if stop else None
    if not stop:  # in the middle of the first epoch: spent, and nothing saved since
        run = Run(config, tmp_path / "early")
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
            run.optimizer.step()
            break
    run.engine.close()
    resumed = train(config, run.folder)
    assert (resumed.epsilon, resumed.schedule, resumed.scores) == (whole.epsilon, whole.schedule, whole.scores)
    assert [row.accuracy for row in resumed.epochs] == [row.accuracy for row in whole.epochs]


def test_a_folder_belongs_to_one_run(tiny: str, tmp_path: Path) -> None:
    Run(RunConfig(tiny).resolved(), tmp_path).engine.close()
    with pytest.raises(LabError, match="what differs: seed"):
        train(RunConfig(tiny, seed=1), tmp_path)
    train(RunConfig(tiny), tmp_path)
    with pytest.raises(LabError, match="another run"):
        train(RunConfig(tiny, seed=1), tmp_path)


@pytest.mark.slow
def test_equal_epsilon_counts_the_analyses(tiny: str, tmp_path: Path) -> None:
    config = RunConfig(tiny, target_epsilon=12.0)
    result = train(config, tmp_path / "dpquant")
    pls = train(dataclasses.replace(config, scheduler="pls"), tmp_path / "pls")
    assert result.epsilon is not None and pls.epsilon is not None
    assert 11.5 < result.epsilon <= 12 and 11.5 < pls.epsilon <= 12
    planned = plan(
        target_epsilon=12.0,
        delta=1e-3,
        dataset_size=120,
        batch_size=40,
        epochs=4,
        n_sample=2,
        max_physical_batch_size=24,
    )
    assert result.epsilon == pytest.approx(planned.epsilon, rel=1e-6)
    assert "analysis" not in pls.epsilons


def test_controls_are_marked_as_not_private(tiny: str, tmp_path: Path) -> None:
    for privacy in ("clip", "none"):
        result = train(RunConfig(tiny, privacy=privacy, budget=1.0), tmp_path / privacy)
        assert result.epsilon is None and not result.epsilons
        assert not (tmp_path / privacy / "ledger.json").exists()


def test_the_control_without_clipping_is_plain_sgd(tiny: str, tmp_path: Path) -> None:
    """One step of privacy="none" in full precision against autograd on the same Poisson batch."""
    config = RunConfig(tiny, privacy="none", budget=0.0, lr=0.1, reproducible=True).resolved()
    run = Run(config, tmp_path)
    plain = tiny_model(None)
    plain.load_state_dict(run.model.state_dict())
    run.model.train()
    total = 0
    for x, y in run.loader:
        run.optimizer.zero_grad()
        run.criterion(run.model(x), y).backward()
        nn.functional.cross_entropy(plain(x), y, reduction="sum").backward()
        total += len(x)
        run.optimizer.step()
        if run.engine.session.micro.last:
            break
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            wanted = parameter - 0.1 * parameter.grad / 40
            assert torch.allclose(dict(run.model.named_parameters())[name], wanted, atol=1e-6), name


def test_low_precision_is_evaluated_in_low_precision(tiny: str, tmp_path: Path) -> None:
    full = train(RunConfig(tiny, budget=0.0, reproducible=True), tmp_path / "full")
    assert all(row.accuracy == row.accuracy_low for row in full.epochs)
    low = train(RunConfig(tiny, budget=1.0, format="luq_fp4", reproducible=True), tmp_path / "low")
    assert any(row.accuracy != row.accuracy_low for row in low.epochs)


# Sweeps


def test_a_grid_is_a_product_of_its_lists() -> None:
    grid = {
        "base": {"task": "cnn-digits", "epochs": 1},
        "grids": [{"budget": [0.5, 0.75], "seed": [0, 1]}, {"budget": 0.5, "seed": [1, 2]}],
    }
    configs = expand(grid)
    assert sorted((c.budget, c.seed) for c in configs) == [(0.5, 0), (0.5, 1), (0.5, 2), (0.75, 0), (0.75, 1)]
    zipped = expand(
        {"base": {"task": "cnn-digits"}, "grids": [{"zip": ["lr", "seed"], "lr": [1.0, 2.0], "seed": [3, 4]}]}
    )
    assert [(c.lr, c.seed) for c in zipped] == [(1.0, 3), (2.0, 4)]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"bases": {}}, "bases: a grid has"),
        ({"base": {"task": "cnn-digits"}, "grids": [{"zip": ["lr"]}]}, "zip names lr"),
        ({"base": {"task": "cnn-digits"}, "grids": [{"zip": ["lr", "seed"], "lr": [1.0], "seed": [1, 2]}]}, "length"),
        ({"base": {"task": "cnn-digits"}, "grids": [{"sed": [1]}]}, "sed: no such field"),
    ],
)
def test_grids_with_mistakes_are_refused(grid: dict[str, object], message: str) -> None:
    with pytest.raises(LabError, match=message):
        expand(grid)


@pytest.mark.heavy
def test_a_sweep_skips_what_is_done_and_survives_a_run_that_fails(tmp_path: Path) -> None:
    base = dict(epochs=1, budget=1.0)
    good = [RunConfig("cnn-digits", seed=seed, **base) for seed in (0, 1)]
    bad = RunConfig("cnn-gtsrb-small", data=str(tmp_path / "nowhere"), **base)
    events = []
    results = sweep([*good, bad], tmp_path / "out", workers=1, on_done=events.append)
    assert [result.config.seed for result in results] == [0, 1]
    assert {event.config.key: event.status for event in events} == {
        good[0].key: "done",
        good[1].key: "done",
        bad.key: "failed",
    }
    (failed,) = [event for event in events if event.status == "failed"]
    assert "nowhere" in failed.message and "LabError" in failed.message
    again: list[object] = []
    assert sweep(good, tmp_path / "out", on_done=lambda event: again.append(event.status)) == results
    assert again == ["skipped", "skipped"]
    assert find_runs([tmp_path / "out"]) == sorted(results, key=lambda r: r.key)


@pytest.mark.heavy
def test_the_workers_of_a_sweep_that_is_killed_end_with_it(tmp_path: Path) -> None:
    """Else a second sweep would train in the same folders as the orphans of the first."""
    code = (
        "import sys; from pathlib import Path; from dpquant_compile.lab import RunConfig, sweep\n"
        "if __name__ == '__main__': sweep([RunConfig('cnn-digits', epochs=500)], Path(sys.argv[1]))"
    )
    (tmp_path / "go.py").write_text(code)
    process = subprocess.Popen([sys.executable, tmp_path / "go.py", tmp_path / "out"])
    try:
        until(lambda: any((tmp_path / "out").glob("*/checkpoint.pt")), 120)
        children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        assert children
    finally:
        process.kill()
        process.wait()
    until(lambda: not any(alive(pid) for pid in children), 60)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)


def test_a_folder_without_runs_is_told(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no finished run"):
        find_runs([tmp_path])
    with pytest.raises(LabError, match="is not there"):
        find_runs([tmp_path / "nowhere"])


def test_small_tasks_train_on_the_same_images_from_either_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without archives torchvision's images are taken, and as many of them."""
    images = np.arange(3 * 8 * 4, dtype=np.uint8).reshape(8, 2, 2, 3)
    monkeypatch.setattr(data, "_torchvision", lambda *args, **kwargs: (images, np.arange(8)))
    split = data.gtsrb(None, every=3, test=5)
    assert split.train_y.tolist() == [0, 3, 6] and len(split.test_y) == 5
    split = data.cifar10(None, train=4, test=2)
    assert len(split.train_y) == 4 and len(split.test_y) == 2


def test_pretrained_weights_are_read_from_the_folder(tmp_path: Path) -> None:
    source = torchvision_compat.models().resnet18(num_classes=7)
    state = {key: value.half() if value.is_floating_point() else value for key, value in source.state_dict().items()}
    torch.save(state, tmp_path / "resnet18_other_stem1.pth")
    net: Any = get_task("resnet18-gtsrb").model(tmp_path)
    assert net.conv1.stride == (1, 1) and net.fc.out_features == 43 and net.conv1.weight.dtype == torch.float32
    assert torch.equal(net.layer4[1].conv2.weight, state["layer4.1.conv2.weight"].float())
    torch.save({"fc.weight": torch.zeros(3, 4)}, tmp_path / "resnet18_other_stem1.pth")
    with pytest.raises(LabError, match="does not hold the weights of resnet18"):
        get_task("resnet18-gtsrb").model(tmp_path)


def test_settings_that_do_not_fit_the_data_are_told(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="has 120 samples"):
        Run(RunConfig(tiny, batch_size=5000).resolved(), tmp_path / "large")
    assert not (tmp_path / "large").exists()
    with pytest.warns(UserWarning, match="not below 1/N"):
        Run(RunConfig(tiny, delta=0.5).resolved(), tmp_path / "delta")
    with pytest.raises(LabError, match=r"Did you mean cnn-digits\?"):
        get_task("cnn-digit")
    with pytest.raises(LabError, match=r"Did you mean budget\?"):
        RunConfig.from_json({"task": "cnn-digits", "budgett": 0.5})
