"""The federated example: clients of a Flower simulation, and ledgers that count every round of theirs."""

import importlib.util
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from opacus.accountants import RDPAccountant

import dpquant_compile as dpq

ROOT = Path(__file__).resolve().parents[2]
SIZES = (239, 479, 719)  # records of three clients
BATCH_SIZE, NOISE, MEASURE, DELTA = 64, 1.3, 2.0, 1e-4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("flwr", "ray")),
        reason="no Flower here: pip install -e '.[federated]'",
    ),
]


def from_scratch(size: int, rounds: int, analyses: int) -> float:
    """ε of a client by Opacus' accountant, from nothing but what was to be done."""
    steps = math.ceil(size / BATCH_SIZE)
    accountant = RDPAccountant()
    accountant.history = [(NOISE, 1 / steps, rounds * steps), (MEASURE, 1 / steps, analyses)]
    return float(accountant.get_epsilon(delta=DELTA))


def test_clients_learn_together_and_count_every_round(tmp_path: Path) -> None:
    """In a process of its own, as Flower starts others from it. The smallest client has no budget for round four."""
    limit = 4.5
    assert from_scratch(SIZES[0], 3, analyses=1) < limit < from_scratch(SIZES[0], 4, analyses=1)
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "federated.py", "--rounds", "4", "--epsilon", str(limit)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "FLWR_HOME": str(tmp_path / "flower")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    printed = done.stdout

    rows = re.findall(r"^round (\d): trained (.*); test ([\d.]+)%; epsilon by client (.*)$", printed, re.MULTILINE)
    everyone = "0, 1, 2"
    assert [row[:2] for row in rows] == [("0", "none"), *((str(n), everyone) for n in (1, 2, 3)), ("4", "1, 2")]
    assert float(rows[-1][2]) > 20, "four rounds are far above chance, which is 10%"
    for n, row in enumerate(rows[1:], 1):
        rounds = (min(n, 3), n, n)
        expected = [from_scratch(size, k, analyses=int(n > 2)) for size, k in zip(SIZES, rounds, strict=True)]
        assert [float(cost) for cost in row[3].split(", ")] == pytest.approx(expected, abs=1e-3)

    pattern = r"^client (\d): (\d+) records, (\d+) steps, (\d+) analyses, epsilon ([\d.]+)$"
    clients = re.findall(pattern, printed, re.MULTILINE)
    steps = [k * math.ceil(size / BATCH_SIZE) for size, k in zip(SIZES, rounds, strict=True)]
    assert [tuple(map(int, row[:4])) for row in clients] == [(i, SIZES[i], steps[i], 1) for i in range(3)]
    assert [float(row[4]) for row in clients] == pytest.approx(expected, abs=1e-6)
    for i, epsilon in enumerate(expected):
        ledger = dpq.Ledger.read(tmp_path / "out" / "federated" / f"client-{i}" / "ledger.json")
        assert ledger.epsilon(DELTA) == pytest.approx(epsilon, rel=1e-9)
        assert sum(entry.steps for entry in ledger.entries) == steps[i] + 1
    (largest,) = re.findall(r"so all of it has epsilon ([\d.]+) at delta 0.0001", printed)
    assert float(largest) == pytest.approx(max(expected), abs=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of packages that Flower imports
def test_no_record_is_with_two_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    program = runpy.run_path(str(ROOT / "examples" / "federated.py"))
    images, _ = program["digits"]()
    parts = [program["records_of"](i, 3).tensors[0] for i in range(3)]
    assert tuple(map(len, parts)) == SIZES
    assert torch.equal(torch.cat(parts), images[program["TEST_SIZE"] :]), "all records but the test images, each once"
