"""`examples/demo.py` on its small setting, in a process of its own: what it prints, and the pages that it writes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_demo_learns_and_writes_its_pages(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py", "--quick", "--out", tmp_path / "out"],
        cwd=tmp_path,
        # The demo must also run from a checkout that is not installed. Workers of pytest set a width.
        env={**{k: v for k, v in os.environ.items() if k != "COLUMNS"}, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "warning" not in done.stderr, done.stderr

    rows = re.findall(r"^(Opacus|dpquant-compile), .*?([\d.]+) %.* (\d\.\d\d)$", done.stdout, re.MULTILINE)
    assert [name for name, *_ in rows] == ["Opacus", "dpquant-compile", "dpquant-compile"]
    assert all(float(accuracy) > 25 for _, accuracy, _ in rows), "two epochs are far above chance, which is 10 %"
    assert all(0.5 < float(spent) < 8 for *_, spent in rows)
    assert "int4 in 6 of 8 layers" in done.stdout, "a budget of 0.75 is six of the eight sites"
    assert len(re.findall(r"^(?:Opacus|dpquant-compile|not private), .* [\d.]+×$", done.stdout, re.MULTILINE)) == 5

    pages = {name: (tmp_path / "out" / f"{name}.html").read_text(encoding="utf-8") for name in ("report", "graph")}
    assert pages["report"].index('id="opening"') < pages["report"].index('id="results"')
    for site in ("stem", "block1.conv1", "block2.conv2", "fc2"):
        assert site in pages["graph"]
