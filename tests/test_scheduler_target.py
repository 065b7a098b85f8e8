"""`Scheduler` and a target ε: a run that will not stay within it is told so before it begins."""

import re
import warnings
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from test_scheduler import Constant, Numbers, engine_of, six, zeros
from test_watch import run_epochs
from torch import nn
from torch.utils.data import DataLoader

import dpquant_compile as dpq
from dpquant_compile.errors import PrivacyBudgetError

DELTA = 1e-5


def calibrated(epochs: int = 4, accountant: str = "rdp", **options: Any) -> dpq.PrivacyEngine:
    """An engine whose noise is the least for so many epochs within ε = 8: 64 samples in batches of 8."""
    model = dpq.compile(models.seeded(six), budget=2, backend="reference", inner="eager").train()
    engine = dpq.PrivacyEngine(accountant=accountant)
    engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(Numbers(64), batch_size=8, collate_fn=zeros),
        target_epsilon=8.0,
        target_delta=DELTA,
        epochs=epochs,
        max_grad_norm=1.0,
        max_physical_batch_size=8,
        **options,
    )
    return engine


def test_analyses_beyond_the_target_are_warned_of_at_the_start() -> None:
    engine = calibrated()
    with pytest.warns(UserWarning, match=r"epochs: 4, analyses: 1\).* past the target 8: .*dpq\.plan") as told:
        scheduler = dpq.Scheduler(engine, epochs=4)
    assert told[0].filename == __file__
    ledger, made = dpq.Ledger("rdp"), engine.run
    ledger.spend("training", q=1 / 8, sigma=made.noise_multiplier, steps=32)
    ledger.spend("analysis", q=scheduler.sample_rate, sigma=2.0)
    planned = re.search(r"ε = ([\d.]+) at δ = 1e-05", str(told[0].message))
    assert planned is not None and 8 < float(planned[1]) == pytest.approx(ledger.epsilon(DELTA), rel=1e-5)
    with pytest.raises(PrivacyBudgetError):  # and so it comes
        run_epochs(scheduler, 4)


def test_a_run_with_its_analyses_planned_is_not_warned_of() -> None:
    plan = dpq.plan(
        target_epsilon=8,
        delta=DELTA,
        dataset_size=64,
        batch_size=8,
        epochs=4,
        max_physical_batch_size=8,
        accountant="rdp",
    )
    engine = engine_of(target_epsilon=8, target_delta=DELTA)
    engine.run.optimizer.noise_multiplier = plan.noise_multiplier
    run_epochs(dpq.Scheduler(engine, epochs=4), 4)
    assert 7.9 < plan.epsilon <= 8 and engine.get_epsilon(DELTA) == pytest.approx(plan.epsilon)


@pytest.mark.parametrize("given", [{"mode": "pls"}, {"mode": "static"}, {"k": 0}, {"k": 6}, {"n_interval": 4}])
def test_without_analyses_the_calibrated_noise_will_do(given: dict[str, Any]) -> None:
    engine = calibrated()
    run_epochs(dpq.Scheduler(engine, epochs=4, **given), 4)
    assert engine.get_epsilon(DELTA) <= 8


def test_the_length_of_the_run_is_that_of_the_scheduler_or_of_the_noise() -> None:
    with pytest.warns(UserWarning, match="epochs: 6, analyses: 0"):
        dpq.Scheduler(calibrated(), epochs=6, mode="pls")
    with pytest.warns(UserWarning, match="epochs: 4, analyses: 2"):  # one after the last, too
        dpq.Scheduler(calibrated())
    dpq.Scheduler(engine_of(target_epsilon=1e-3, target_delta=DELTA))  # nobody knows how long
    dpq.Scheduler(engine_of(), epochs=1000)  # no target
    dpq.Scheduler(calibrated(epochs=60), epochs=4)  # noise enough


def test_batches_that_are_no_poisson_draws_count_in_full() -> None:
    with pytest.warns(UserWarning, match="analyses: 0"):
        dpq.Scheduler(calibrated(poisson_sampling=False), epochs=4, mode="pls")


def test_gdp_leaves_it_to_the_spend() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="GDP accounting is experimental")
        engine = calibrated(accountant="gdp")
    dpq.Scheduler(engine, epochs=4)


def test_a_resumed_run_is_not_counted_twice(tmp_path: Path) -> None:
    planned = dpq.Ledger("rdp")
    planned.spend("training", q=1 / 8, sigma=1.0, steps=32)
    planned.spend("analysis", q=1 / 8, sigma=3.0)

    def start() -> dpq.Scheduler:
        target = planned.epsilon(DELTA)
        engine = engine_of(target_epsilon=target, target_delta=DELTA, ledger_path=tmp_path / "ledger.json")
        return dpq.Scheduler(engine, epochs=4, estimator=Constant(0.0, sigma=3.0))

    first = start()
    run_epochs(first, 4)
    first.engine.close()
    assert start().engine.ledger.epsilon(DELTA) == planned.epsilon(DELTA)
