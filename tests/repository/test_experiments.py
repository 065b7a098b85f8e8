"""The experiments behind docs/evidence.md: grids that expand, scripts that run, results that are there."""

import csv
import itertools
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpquant_compile.lab.sweep import expand, read_grid
from tests.support.tiny_task import tiny_task

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "experiments"
GRIDS = sorted(FOLDER.glob("*.toml"))
TINY = {
    "estimator_ranks.py": ["--seeds", "0", "--at", "1", "--repeats", "1", "--oracle", "1"],
    "gradient_norms.py": ["--seeds", "0", "--epochs", "1", "--batches", "24"],
    "training_signal.py": ["--epochs", "1", "--turns", "1"],
    "known_ranks.py": ["--seeds", "0", "--epochs", "1", "--oracle", "1", "--epsilon", "8"],
    "spared_sites.py": ["--seeds", "0", "--epochs", "1", "--epsilon", "8"],
}


@pytest.mark.slow
@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_a_grid_expands_to_runs_with_enough_seeds(path: Path) -> None:
    configs = expand(read_grid(path))
    for config in configs:
        same = {c.seed for c in configs if c.key.split("-s")[0] == config.key.split("-s")[0]}
        assert len(same) >= 3, f"{config.key} has {len(same)} seeds"


def test_the_evidence_can_be_repeated() -> None:
    """Schedules are compared over seeds that share batches and noise, so these must follow from the seed."""
    for path in GRIDS:
        assert all(config.reproducible for config in expand(read_grid(path))), path.name
    for name in TINY:
        assert "reproducible=True" in (FOLDER / name).read_text("utf-8"), name


@pytest.mark.parametrize("path", sorted(FOLDER.glob("results/*.csv")), ids=lambda path: path.stem)
def test_results_are_of_runs_that_the_grid_has(path: Path) -> None:
    known = {config.key for config in expand(read_grid(FOLDER / f"{path.stem}.toml"))}
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["key"] for row in rows if row["key"] not in known] == []
    assert {row["reproducible"] for row in rows} == {"True"}


def test_every_script_has_a_smoke_run() -> None:
    assert {*TINY, "figures.py"} == {path.name for path in FOLDER.glob("*.py")}


@pytest.mark.slow
def test_the_figures_are_those_of_the_results(tmp_path: Path) -> None:
    command = [sys.executable, FOLDER / "figures.py", "--results", FOLDER / "results", "--out", tmp_path]
    subprocess.run(command, check=True, timeout=120, stdin=subprocess.DEVNULL, capture_output=True)
    for name in ("evidence_schedules.svg", "evidence_tuned.svg", "evidence_ranks.svg"):
        assert "<svg" in (tmp_path / name).read_text() and (ROOT / "docs" / "assets" / name).exists()


def test_accuracies_in_the_document_are_rows_of_the_results() -> None:
    """A table that `dpquant report` made is copied, not typed."""
    known = {line for path in FOLDER.glob("results/*.md") for line in path.read_text("utf-8").splitlines()}
    lines = (ROOT / "docs" / "evidence.md").read_text("utf-8").splitlines()
    heads = [i for i, line in enumerate(lines) if "accuracy, full precision (%)" in line]
    rows = [line for i in heads for line in itertools.takewhile(lambda text: text.startswith("|"), lines[i:])]
    assert len(rows) > 10
    assert [row for row in rows if row not in known] == []


@pytest.mark.parametrize("name", TINY)
def test_scripts_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [name, "--task", tiny_task(), *TINY[name], "--out", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])  # scripts import their neighbours
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    table: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    assert table["task"] == "tiny" and table["rows"]
    numbers = [value for row in table["rows"] for value in row.values() if isinstance(value, float)]
    assert numbers and all(value == value for value in numbers), "a NaN is no result"
