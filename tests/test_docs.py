"""Every Python block of the documents runs, in order, file by file."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("path", [p for p in DOCS if BLOCK.search(p.read_text())], ids=lambda path: path.stem)
def test_document_runs(path: Path, tmp_path: Path) -> None:
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(BLOCK.findall(path.read_text())))
    done = subprocess.run([sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_documents_link_to_each_other() -> None:
    index = (Path(__file__).parents[1] / "docs" / "README.md").read_text()
    assert {path.name for path in DOCS} - {"README.md"} == set(re.findall(r"\((\w+\.md)\)", index))
