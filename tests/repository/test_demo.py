"""The example runs as printed in the README: a short run of it, in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_demo_learns_and_writes_its_files(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "examples" / "demo.py", "--epochs", "2", "--reproducible"]
    done = subprocess.run(
        [*command, "--out", tmp_path / "out"],
        cwd=tmp_path,
        # The demo must also run from a checkout that is not installed.
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

    (spent,) = re.findall(r"epsilon ([\d.]+) at delta", done.stdout)
    assert 0.5 < float(spent) < 8
    (printed,) = re.findall(r"^Test accuracy, .* in four bits: ([\d.]+)% evaluated", done.stdout, re.MULTILINE)
    (baseline,) = re.findall(r"Trained in float32: ([\d.]+)%", done.stdout)
    assert float(printed) > 25 and float(baseline) > 25, "two epochs should be far above chance, which is 10%"
    assert re.search(r"^ +1  6 of 8, not \S+", done.stdout, re.MULTILINE), "a budget of 0.75 is six of the eight sites"
    for site in ("stem", "block1.conv1", "block2.conv2", "fc2"):
        assert site in done.stdout, f"explain() does not mention {site}"

    for name in ("accuracy.png", "schedule.png", "privacy.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG"), name
    assert "<svg" in (tmp_path / "out" / "graph.svg").read_text(encoding="utf-8")
    for name in ("graph.html", "report.html"):
        assert "<html" in (tmp_path / "out" / name).read_text(encoding="utf-8").lower(), name
