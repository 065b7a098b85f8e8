"""`train`: one run of a task, from a configuration to a run folder; an interrupted run continues."""

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import dpquant_compile
from dpquant_compile.api import compile as compile_model
from dpquant_compile.errors import LabError
from dpquant_compile.lab.config import RunConfig
from dpquant_compile.lab.data import Split
from dpquant_compile.lab.models import seeded
from dpquant_compile.lab.results import MODEL, RESULT, EpochRow, RunResult, read_run, write_json, write_run
from dpquant_compile.lab.tasks import Task, get_task
from dpquant_compile.module import CompiledModule
from dpquant_compile.numerics.recipe import Recipe
from dpquant_compile.policy import resolve_budget
from dpquant_compile.privacy.accounting.planning import plan
from dpquant_compile.privacy.atomic_file import write_whole
from dpquant_compile.privacy.engine import PrivacyEngine
from dpquant_compile.privacy.logging import JsonlLog
from dpquant_compile.privacy.schedule.scheduler import Scheduler

__all__ = ["Run", "learning_rate", "train"]

EVALUATION_BATCH = 512
NO_BOUND = 1e6  # a clipping norm that no gradient of these models reaches, for the control without clipping


def train(
    config: RunConfig,
    folder: Path,
    *,
    progress: Callable[[EpochRow], None] | None = None,
    threads: int | None = None,
) -> RunResult:
    """Run `config` in `folder`, or the rest of it if it was interrupted; a finished run is only read.

    The folder holds config.json, log.jsonl, ledger.json, checkpoint.pt after every epoch and, at the end, model.pt (the
    state_dict) and result.json. A folder of another configuration is refused. `progress` is called after every epoch.

    Guarantee: a resumed run makes the steps since its last checkpoint again with new randomness, and the ledger counts
    both; so a run with a target ε may end before its last epoch, with PrivacyBudgetError. A reproducible run repeats
    those steps bit for bit, and they count once.
    """
    config = config.resolved()
    if (folder / RESULT).is_file():
        done = read_run(folder)
        if done.key != config.key:
            raise LabError(f"{folder} holds another run, {done.key}: give {config.key} a folder of its own")
        return done
    if threads is not None:
        torch.set_num_threads(threads)
    run = Run(config, folder)
    try:
        for row in run.epochs():
            if progress is not None:
                progress(row)
        return run.finish()
    finally:
        run.engine.close()  # a sweep may use this folder again, in this process or another


class Run:
    """A run in progress: the private objects, the clock, and the epochs so far."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.seconds = dict.fromkeys(("training", "analysis", "evaluation", "compiling"), 0.0)
        self.rows: list[EpochRow] = []
        self.split = _data(get_task(config.task), config.data)
        assert config.batch_size is not None  # tasks say which
        private, size = config.privacy == "dp", len(self.split.train_x)
        if config.batch_size > size:
            raise LabError(f"batch_size={config.batch_size}: {config.task} has {size} samples to train on")
        if private and config.delta is not None and config.delta * size >= 1:
            warnings.warn(
                f"delta={config.delta:g} is not below 1/N = {1 / size:.2g}: with such a δ a mechanism may publish a "
                "whole record and still keep its ε",
                stacklevel=2,
            )
        noise = _noise(config, size) if private else 0.0
        self._claim()  # after all checks of data and target: bad input leaves no folder behind
        torch.manual_seed(config.seed)
        self.model = _fresh(config)
        self.engine = PrivacyEngine(
            secure_mode=not config.reproducible,
            ledger_path=folder / "ledger.json" if private else None,
            target_epsilon=config.target_epsilon if private else None,
            target_delta=config.delta if private and config.target_epsilon is not None else None,
        )
        try:
            self._begin(noise)
        except BaseException:
            self.engine.close()
            raise

    def _begin(self, noise: float) -> None:
        """Make everything private, and continue from the last checkpoint."""
        config = self.config
        assert config.max_grad_norm is not None and config.batch_size is not None  # tasks say which
        parts: Any = self.engine.make_private(
            module=self.model.train(),
            optimizer=_optimizer(config, self.model),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(
                self.split.train, batch_size=config.batch_size, generator=_generator(config, config.seed)
            ),
            noise_multiplier=noise,
            max_grad_norm=NO_BOUND if config.privacy == "none" else config.max_grad_norm,
            max_physical_batch_size=config.physical,
            noise_generator=_generator(config, config.seed + 1),
        )
        self.model, self.optimizer, self.criterion, self.loader = parts
        self.scheduler = self._scheduler()
        self._resume()

    def epochs(self) -> Iterator[EpochRow]:
        """Train the epochs that are left."""
        assert self.config.epochs is not None  # tasks say how many
        while len(self.rows) < self.config.epochs:
            number = len(self.rows)
            begun, policy = time.perf_counter(), tuple(sorted(self.model.policy))
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.config, number)
            with self._clock("training"):
                self._train()
            with self._clock("evaluation"):
                full = self._accuracy("none")
                low = self._accuracy(policy) if policy else full
            epsilon = self.engine.get_epsilon(self._delta) if self.config.privacy == "dp" else None
            with self._clock("analysis"):
                self.scheduler.step()
            self.rows.append(EpochRow(number + 1, full, low, epsilon, time.perf_counter() - begun, policy))
            self._save()
            yield self.rows[-1]

    def finish(self) -> RunResult:
        """Write the model and the result. ε is that of the whole run: no analysis follows the last epoch."""
        last, private = self.rows[-1], self.config.privacy == "dp"
        result = RunResult(
            key=self.config.key,
            config=replace(self.config, data=None),  # a result must not reveal the location of the data
            sites=tuple(self.model.sites.names),
            delta=self._delta,
            epochs=tuple(self.rows),
            accuracy=last.accuracy,
            accuracy_low=last.accuracy_low,
            epsilon=self.engine.get_epsilon(self._delta) if private else None,
            epsilons=self.engine.ledger.epsilons(self._delta) if private else {},
            scores=self.scheduler.scores,
            probabilities=self.scheduler.probabilities,
            seconds=dict(self.seconds),
            versions={"torch": torch.__version__, "dpquant_compile": dpquant_compile.__version__},
        )
        write_whole(self.folder / MODEL, lambda file: torch.save(self.model.state_dict(), file))
        write_run(result, self.folder)
        return result

    @property
    def _delta(self) -> float:
        assert self.config.delta is not None  # tasks say which
        return self.config.delta

    def _claim(self) -> None:
        """Claim the folder for this run; refuse one that belongs to another."""
        path, own = self.folder / "config.json", {**self.config.to_json(), "data": None}
        self.folder.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            held = json.loads(path.read_text(encoding="utf-8"))
            if held != own:
                differing = sorted(name for name in own if own[name] != held.get(name))
                raise LabError(
                    f"{self.folder} holds a run with another configuration; what differs: {', '.join(differing)}. "
                    "Fix: another folder, or the same settings as before to go on"
                )
            return
        write_json(path, own)

    def _scheduler(self) -> Scheduler:
        config, names = self.config, self.model.sites.names
        measured = (
            "n_sample",
            "sigma_measure",
            "clip_measure",
            "repetitions",
            "beta",
            "ema",
            "normalise",
            "n_interval",
        )
        given = {name: getattr(config, name) for name in measured if getattr(config, name) is not None}
        return Scheduler(
            self.engine,
            epochs=config.epochs,
            mode=config.scheduler,
            estimator=config.estimator,
            k=resolve_budget(float(config.budget), names),
            logs=[JsonlLog(self.folder / "log.jsonl")] if config.privacy == "dp" else [],
            delta=self._delta,
            seed=config.seed if config.static_seed is None else config.static_seed,
            **given,
        )

    def _train(self) -> None:
        self.model.train()
        programs = self.engine.session.internals.programs.private
        for x, y in self.loader:
            known, begun = len(programs), time.perf_counter()
            self.optimizer.zero_grad()
            self.criterion(self.model(x), y).backward()
            self.optimizer.step()
            if len(programs) > known:
                spent = time.perf_counter() - begun
                self.seconds["compiling"] += spent
                self.seconds["training"] -= spent

    def _accuracy(self, policy: "str | tuple[str, ...]") -> float:
        """The share of right answers on the test data, with these sites in low precision.

        Low precision runs in train(); the tasks' models have no dropout or other layers that depend on the mode.
        """
        own = tuple(self.model.policy)
        self.model.train(policy != "none")
        self.model.set_policy(policy)
        right = 0
        with torch.no_grad():
            for x, y in zip(
                self.split.test_x.split(EVALUATION_BATCH), self.split.test_y.split(EVALUATION_BATCH), strict=True
            ):
                right += int((self.model(x).argmax(1) == y).sum())
        self.model.set_policy(own)
        self.model.train()
        return right / len(self.split.test_y)

    @contextmanager
    def _clock(self, what: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - begun

    def _save(self) -> None:
        rows = [asdict(row) for row in self.rows]
        self.engine.save_checkpoint(
            path=self.folder / "checkpoint.pt", checkpoint_dict={"rows": rows, "seconds": dict(self.seconds)}
        )

    def _resume(self) -> None:
        """Continue from the last checkpoint; the first is written before the first batch, so there always is one."""
        path = self.folder / "checkpoint.pt"
        if not path.is_file():
            self._save()
            return
        held = self.engine.load_checkpoint(path=path)
        self.rows = [EpochRow(**{**row, "policy": tuple(row["policy"])}) for row in held["rows"]]
        self.seconds = held["seconds"]


@lru_cache(maxsize=2)
def _data(task: Task, folder: str | None) -> Split:
    path = None if folder is None else Path(folder)
    if path is not None and not path.is_dir():
        raise LabError(f"data={folder!r} is no folder")
    return task.data(path)


@lru_cache(maxsize=2)
def _compiled(task: Task, folder: str | None, recipe: Recipe, outputs: str, high: str) -> CompiledModule:
    """A task's compiled model; the runs of one process share it, and so reuse its compiled programs."""
    model = task.model(None if folder is None else Path(folder))
    example = _data(task, folder).train_x[:2]
    return compile_model(
        model,
        budget=0,
        recipe=recipe,
        quantize_outputs=outputs if recipe.outputs == "none" else None,
        high=high,
        inner=task.inner,
        example_inputs=(example,),
    )


def _fresh(config: RunConfig) -> CompiledModule:
    """The compiled model at the start of a run of this seed. Training rounds by the engine's secret."""
    model = _compiled(get_task(config.task), config.data, config.numerics(), config.quantize_outputs, config.high)
    folder = None if config.data is None else Path(config.data)
    model.load_state_dict(seeded(partial(get_task(config.task).model, folder), config.seed).state_dict())
    # An evaluation in low precision draws public bits by step; runs with starts this far apart share no step.
    model.step = config.seed << 24
    return model


def _generator(config: RunConfig, seed: int) -> torch.Generator | None:
    """The generator of this seed for a reproducible run. Any other run has none: its engine uses system entropy."""
    return torch.Generator().manual_seed(seed) if config.reproducible else None


def _optimizer(config: RunConfig, model: nn.Module) -> Optimizer:
    trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    rate = learning_rate(config, 0)
    if config.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=rate)
    return (torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW)(trained, lr=rate)


def learning_rate(config: RunConfig, epoch: int) -> float:
    """The learning rate of an epoch, counted from 0, of a resolved configuration."""
    assert config.lr is not None and config.epochs is not None  # tasks say both
    left = 1 - epoch / config.epochs
    factors = {"none": 1.0, "linear": left, "cosine": 0.5 * (1 + math.cos(math.pi * (1 - left)))}
    return config.lr * factors[config.lr_decay or "none"]


def _noise(config: RunConfig, size: int) -> float:
    """The noise multiplier: as given, or the least that keeps training with its analyses within the target."""
    if config.noise_multiplier is not None:
        return config.noise_multiplier
    measures = config.scheduler in ("dpquant", "greedy") and 0 < config.budget < 1
    return _plan(
        target_epsilon=config.target_epsilon or math.inf,
        delta=config.delta or 0.0,
        dataset_size=size,
        batch_size=config.batch_size or 1,
        epochs=config.epochs or 1,
        n_interval=config.n_interval or 2,
        n_sample=config.n_sample,
        max_physical_batch_size=config.physical or 1,
        sigma_measure=config.sigma_measure,
        estimator=config.estimator if measures else None,
    ).noise_multiplier


_plan = lru_cache(plan)  # the runs of a sweep use the same few plans, and each takes seconds
