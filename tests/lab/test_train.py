"""Where the randomness of a run comes from: the operating system, or from the seed if the run is to be repeated."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dpquant_compile.errors import LabError
from dpquant_compile.lab import RunConfig, find_runs
from dpquant_compile.lab.train import Run, train
from tests.support.tiny_task import tiny_task


@pytest.fixture(scope="module")
def tiny() -> str:
    return tiny_task()


def parameters(run: Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()]).clone()


def trained(config: RunConfig, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The parameters at the start, and after an epoch."""
    run = Run(config.resolved(), folder)
    start = parameters(run)
    next(iter(run.epochs()))
    return start, parameters(run)


ALONE = {
    "noise": dict(batch_size=120, budget=0.0),  # all samples are in every batch, and nothing is rounded
    "batches": dict(privacy="clip", budget=0.0),  # no noise, and nothing is rounded
    "rounding": dict(privacy="clip", batch_size=120, budget=1.0),  # no noise, and all samples are in every batch
}


@pytest.mark.parametrize("settings", ALONE.values(), ids=ALONE)
def test_randomness_does_not_follow_from_the_seed(settings: dict[str, Any], tiny: str, tmp_path: Path) -> None:
    """Whoever knows the seed and the settings of a run must not know its noise, batches and rounding."""
    config = RunConfig(tiny, seed=7, **settings)
    one, other = trained(config, tmp_path / "one"), trained(config, tmp_path / "other")
    assert torch.equal(one[0], other[0]), "the weights at the start are public, and follow from the seed"
    assert not torch.equal(one[1], other[1])
    config = dataclasses.replace(config, reproducible=True)
    one, other = trained(config, tmp_path / "repeated"), trained(config, tmp_path / "repetition")
    assert torch.equal(one[1], other[1])


def test_a_checkpoint_holds_no_noise_that_comes(tiny: str, tmp_path: Path) -> None:
    train(RunConfig(tiny), tmp_path)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["dpquant"]
    assert state["noise"] == {"kind": "secure"} and state["config"]["secure_mode"] is True


@pytest.mark.slow
def test_steps_that_were_lost_count_again(tiny: str, tmp_path: Path) -> None:
    """They are made again with new randomness, so the adversary may have seen both."""
    whole = train(RunConfig(tiny), tmp_path / "whole")
    run = Run(RunConfig(tiny).resolved(), tmp_path / "cut")
    run._train()  # an epoch that is spent, and not saved
    run.engine.close()  # as the end of the process does
    resumed = train(RunConfig(tiny), tmp_path / "cut")
    assert whole.epsilon is not None and resumed.epsilon is not None
    assert resumed.epsilon > whole.epsilon and len(resumed.epochs) == len(whole.epochs)


def test_a_field_of_an_earlier_release_is_told_apart_from_a_mistake() -> None:
    for value in (True, False):
        with pytest.raises(LabError, match=r"secure_mode = true is the default now.* write reproducible = true"):
            RunConfig.from_json({"task": "cnn-digits", "secure_mode": value})
    with pytest.raises(LabError, match="reproducible='false': give true or false"):
        RunConfig("cnn-digits", reproducible="false")  # type: ignore[arg-type]


def test_a_result_of_an_earlier_release_is_refused(tiny: str, tmp_path: Path) -> None:
    train(RunConfig(tiny, epochs=1), tmp_path / "run")
    path = tmp_path / "run" / "result.json"
    held = json.loads(path.read_text())
    assert held["version"] == 3
    held["config"]["recipe"] = held["config"].pop("task")
    path.write_text(json.dumps({**held, "version": 2}))
    with pytest.raises(LabError, match=r"result\.json: a result of version 2, not 3: another release .* Fix: train it"):
        find_runs([tmp_path])
