"""The README's Python runs, block after block, as a reader would paste it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.slow
def test_readme_code_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 3
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "of 3 sites in int4" in done.stdout
    assert "low_precision_site" in done.stdout
    assert (tmp_path / "graph.svg").stat().st_size > 1000
    assert (tmp_path / "graph.html").stat().st_size > 10_000
