"""The demo's tables and its page say what was measured."""

from dataclasses import replace
from pathlib import Path

import pytest

from dpquant_compile.errors import LabError
from dpquant_compile.lab.demo import Demo, about_steps, accuracy_table, step_table
from dpquant_compile.lab.opacus_run import OpacusRun
from dpquant_compile.lab.private_step import StepTime, StepTimes
from tests.support.runs import make_run

LOW, FULL = make_run(0.92, 0.91, budget=0.75), make_run(0.93, budget=0.0)
OPACUS = OpacusRun(accuracy=0.924, epsilon=3.9, seconds=8.0)
ROWS = (("Opacus", 2000.0), ("float32", 160.0), ("int8", 80.0), ("int4", 100.0), ("not private", 120.0))
STEPS = StepTimes(
    "ResNet18, a batch", "some CPU", 2, None, tuple(StepTime(name, ms, ms / 100, name[0] != "n") for name, ms in ROWS)
)


def test_it_begins_only_where_it_can_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(LabError, match="no C\\+\\+ compiler"):
        Demo(tmp_path)
    assert Demo(tmp_path, quick=True).config.epochs == 2


def test_ratios_are_to_opacus_and_to_private_float32() -> None:
    cells = {row[0].text: [cell.text for cell in row[1:]] for row in step_table(STEPS).body}
    assert cells["dpquant-compile, int8"] == ["80 ± 1", "25.0×", "2.00×"]
    assert cells["Opacus, float32"] == ["2000 ± 20", "1.0×", "0.08×"]
    assert cells["not private, float32"] == ["120 ± 1", "16.7×", "1.33×"]


def test_emulation_is_said() -> None:
    assert "emulated" not in about_steps(STEPS)
    slow = StepTimes(STEPS.workload, STEPS.machine, 1, "this CPU has none of it", STEPS.rows)
    assert "1 thread." in about_steps(slow) and "no faster: this CPU has none of it." in about_steps(slow)


def test_times_of_a_busy_machine_are_no_claim(tmp_path: Path) -> None:
    rows = tuple(replace(row, spread=row.milliseconds) for row in STEPS.rows)
    busy = replace(STEPS, rows=rows)
    assert "Run it again." in about_steps(busy) and "Run it again." not in about_steps(STEPS)
    Demo(tmp_path).write(LOW, FULL, OPACUS, busy)
    assert ">25×<" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_accuracies_are_those_of_the_runs() -> None:
    opacus, full, low = (tuple(cell.text for cell in row) for row in accuracy_table(LOW, FULL, OPACUS).body)
    assert opacus == ("Opacus, float32", "92.4 %", "", "3.90")
    assert full == ("dpquant-compile, float32", "93.0 %", "", "4.00")
    assert low == ("dpquant-compile, int4 in 3 of 4 layers, as scheduled", "92.0 %", "91.0 %", "4.00")


def test_the_page_opens_with_the_figures(tmp_path: Path) -> None:
    Demo(tmp_path).write(LOW, FULL, OPACUS, STEPS)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    places = [
        page.index(text) for text in ("<h1>", ">25×<", ">20×<", "Accuracy at equal noise", "25.0×", "2 training runs")
    ]
    assert places == sorted(places), "what the demo measured stands above what the report says about runs"
