"""A task trained by stock Opacus: same accountant and noise as here, and no settings that it would ignore silently."""

import warnings
from pathlib import Path

import pytest

from dpquant_compile.errors import LabError
from dpquant_compile.lab import RunConfig, train
from dpquant_compile.lab.opacus_run import train_by_opacus
from tests.support.tiny_task import tiny_task


def test_epsilon_is_that_of_the_same_run_here(tmp_path: Path) -> None:
    config = RunConfig(tiny_task(), epochs=1, budget=0.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is the")  # of another accountant's bound
        theirs = train_by_opacus(config)
    ours = train(config, tmp_path)
    assert theirs.epsilon == pytest.approx(ours.epsilon, rel=1e-6)
    assert 0 <= theirs.accuracy <= 1 and theirs.seconds > 0


@pytest.mark.parametrize("settings", [{"optimizer": "adam"}, {"target_epsilon": 4.0}])
def test_settings_that_it_cannot_follow_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(LabError, match="a run in Opacus takes optimizer='sgd' and a noise_multiplier"):
        train_by_opacus(RunConfig.from_json({"task": tiny_task(), **settings}))
