"""Experiments: named tasks, resumable runs, sweeps over grids, and reports."""

from dpquant_compile.lab.config import RunConfig
from dpquant_compile.lab.results import EpochRow, RunResult, find_runs, read_run
from dpquant_compile.lab.sweep import SweepEvent, expand, sweep
from dpquant_compile.lab.tasks import Task, get_task, task_names
from dpquant_compile.lab.train import train

__all__ = [
    "EpochRow",
    "RunConfig",
    "RunResult",
    "SweepEvent",
    "Task",
    "expand",
    "find_runs",
    "get_task",
    "read_run",
    "sweep",
    "task_names",
    "train",
]
