"""Run folders: the results of a run, written and read."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpquant_compile.errors import LabError
from dpquant_compile.lab.config import RunConfig
from dpquant_compile.privacy.atomic_file import write_whole

__all__ = ["EpochRow", "RunResult", "find_runs", "read_run", "write_json", "write_run"]

VERSION = 3
RESULT = "result.json"
MODEL = "model.pt"


@dataclass(frozen=True)
class EpochRow:
    """One epoch: accuracy on test data in full and in low precision, ε so far, and the sites in low precision."""

    epoch: int
    accuracy: float
    accuracy_low: float
    epsilon: float | None
    seconds: float
    policy: tuple[str, ...]


@dataclass(frozen=True)
class RunResult:
    """A finished run. `epsilon` is None if the run was not private; `seconds` are by stage.

    epsilons holds the ε of each purpose by itself; they do not add up to `epsilon`.
    """

    key: str
    config: RunConfig
    sites: tuple[str, ...]
    delta: float
    epochs: tuple[EpochRow, ...]
    accuracy: float
    accuracy_low: float
    epsilon: float | None
    epsilons: Mapping[str, float]
    scores: Mapping[str, float]
    probabilities: Mapping[str, float]
    seconds: Mapping[str, float]
    versions: Mapping[str, str]

    @property
    def schedule(self) -> tuple[tuple[str, ...], ...]:
        """The sites in low precision, epoch by epoch."""
        return tuple(row.policy for row in self.epochs)

    def to_json(self) -> dict[str, Any]:
        """The contents of the file."""
        return {"version": VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RunResult":
        """From the contents of the file. Results up to version 2 name the task `recipe`, and are refused."""
        known = dict(values)
        if (version := known.pop("version", None)) != VERSION:
            raise LabError(
                f"a result of version {version!r}, not {VERSION}: another release wrote it. Fix: train it again, leave "
                "it out, or read it with that release"
            )
        known["config"] = RunConfig.from_json(known["config"])
        known["epochs"] = tuple(EpochRow(**{**row, "policy": tuple(row["policy"])}) for row in known["epochs"])
        known["sites"] = tuple(known["sites"])
        return cls(**known)


def write_run(result: RunResult, folder: Path) -> None:
    """Write `result.json` atomically: a folder that has it holds a finished run."""
    write_json(folder / RESULT, result.to_json())


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    text = json.dumps(values, indent=1)
    write_whole(path, lambda file: file.write(text.encode()))


def read_run(folder: Path) -> RunResult:
    """The result of a run folder."""
    path = folder / RESULT if folder.is_dir() else folder
    try:
        return RunResult.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise LabError(f"{folder} holds no {RESULT}: the run is not finished, or this is no run folder") from error
    except LabError as error:
        raise LabError(f"{path}: {error}") from error
    except (json.JSONDecodeError, TypeError, KeyError, UnicodeDecodeError) as error:
        raise LabError(f"{path} cannot be read as a result: {error}") from error


def find_runs(paths: Sequence[Path]) -> list[RunResult]:
    """Every finished run in these folders and below, each once, in the order of their names."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise LabError(f"{path} is not there")
        here = sorted(path.rglob(RESULT)) if path.is_dir() else [path]
        found.update(dict.fromkeys(p.resolve() for p in here))
    if not found:
        raise LabError(f"no finished run in {', '.join(map(str, paths))}: runs that are done hold a {RESULT}")
    return [read_run(path) for path in found]
