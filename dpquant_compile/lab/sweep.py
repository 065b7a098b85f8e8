"""Sweeps: a grid of runs in parallel processes. Finished runs are skipped, so a sweep that was stopped can continue."""

import itertools
import json
import multiprocessing
import os
import threading
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpquant_compile.errors import DPQuantError, LabError
from dpquant_compile.lab.config import RunConfig
from dpquant_compile.lab.results import RESULT, RunResult, read_run

__all__ = ["SweepEvent", "expand", "read_grid", "sweep"]


@dataclass(frozen=True)
class SweepEvent:
    """A run of a sweep has ended: "done", "skipped" since it was done before, or "failed" with a message."""

    config: RunConfig
    folder: Path
    status: str
    seconds: float
    message: str = ""


def read_grid(path: Path) -> dict[str, Any]:
    """A grid file, TOML or JSON by its ending."""
    try:
        text = path.read_text(encoding="utf-8")
        grid: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise LabError(f"{path} cannot be read as a grid: {error}") from error
    if not isinstance(grid, dict):
        raise LabError(f"{path} holds no table: a grid has `base` and `grids`")
    return grid


def expand(grid: Mapping[str, Any]) -> list[RunConfig]:
    """The runs of a grid, each once.

    `base` holds fields that all runs share; each table of `grids` is a product: a field with a list takes each of its
    values. `zip` in such a table names fields whose lists are paired instead.

    >>> [c.seed for c in expand({"base": {"task": "cnn-digits"}, "grids": [{"seed": [0, 1]}]})]
    [0, 1]
    """
    if unknown := sorted(set(grid) - {"base", "grids"}):
        raise LabError(f"{', '.join(unknown)}: a grid has `base` and `grids`, and nothing else")
    base, tables = dict(grid.get("base", {})), list(grid.get("grids", [{}]))
    found: dict[str, RunConfig] = {}
    for table in tables:
        for values in _product(dict(table)):
            config = RunConfig.from_json({**base, **values})
            found.setdefault(config.key, config)
    return list(found.values())


def _product(table: dict[str, Any]) -> Iterable[dict[str, Any]]:
    together = list(table.pop("zip", []))
    lists = {name: value if isinstance(value, list) else [value] for name, value in table.items()}
    if missing := [name for name in together if name not in lists]:
        raise LabError(f"zip names {', '.join(missing)}, which the table does not have")
    lengths = {len(lists[name]) for name in together}
    if len(lengths) > 1:
        raise LabError(f"zip: the lists of {', '.join(together)} differ in length")
    side = [dict(zip(together, row, strict=True)) for row in zip(*(lists.pop(name) for name in together), strict=True)]
    for values in itertools.product(*lists.values()):
        for row in side or [{}]:
            yield {**dict(zip(lists, values, strict=True)), **row}


def sweep(
    configs: Sequence[RunConfig],
    out: Path,
    *,
    workers: int = 1,
    threads: int = 1,
    on_done: Callable[[SweepEvent], None] = lambda event: None,
) -> list[RunResult]:
    """Run each configuration in `out/<key>`, `workers` at a time; returns the results of all that succeeded.

    Each worker is one process with `threads` threads, and keeps what it has compiled, so runs that differ in budget,
    scheduler or seed compile once per worker. A failed run is reported by `on_done`, and does not stop the others.
    """
    if workers < 1 or threads < 1:
        raise LabError(f"workers={workers}, threads={threads}: give at least 1 of each")
    results: dict[str, RunResult] = {}
    waiting: list[RunConfig] = []
    for config in configs:
        folder = out / config.key
        if (folder / RESULT).is_file():
            results[config.key] = read_run(folder)
            on_done(SweepEvent(config, folder, "skipped", 0.0))
        else:
            waiting.append(config)
    waiting.sort(
        key=lambda c: (c.task, c.precision, c.high, c.quantize_outputs, c.physical or 0)
    )  # a stable sort: neighbours share programs
    context = multiprocessing.get_context("spawn")
    count = min(workers, len(waiting)) or 1
    with ProcessPoolExecutor(count, context, initializer=_end_with_parent) as pool:
        futures: dict[Future[tuple[float, str]], RunConfig] = {
            pool.submit(_work, config, out / config.key, threads): config for config in waiting
        }
        try:
            for future in as_completed(futures):
                config = futures[future]
                event = _event(future, config, out / config.key)
                if event.status == "done":
                    results[config.key] = read_run(event.folder)
                on_done(event)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [results[config.key] for config in configs if config.key in results]


def _event(future: "Future[tuple[float, str]]", config: RunConfig, folder: Path) -> SweepEvent:
    try:
        seconds, message = future.result()
    except BrokenProcessPool:
        return SweepEvent(config, folder, "failed", 0.0, "its process died, perhaps out of memory; sweep again")
    return SweepEvent(config, folder, "failed" if message else "done", seconds, message)


def _end_with_parent() -> None:
    """In a worker: end when the sweep is killed; else its runs would continue beside those of the next sweep."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(config: RunConfig, folder: Path, threads: int) -> tuple[float, str]:
    """In a worker: one run. Returns its time and its error as text, since not all exceptions can be pickled."""
    from dpquant_compile.lab.train import train

    begun = time.perf_counter()
    try:
        train(config, folder, threads=threads)
    except DPQuantError as error:
        return time.perf_counter() - begun, f"{type(error).__name__}: {error}"
    except Exception:
        return time.perf_counter() - begun, traceback.format_exc(limit=-4)
    return time.perf_counter() - begun, ""
