"""The README's Python runs, block after block, as a reader would paste it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked import forks

README = Path(__file__).parents[2] / "README.md"
# What leaves Inductor out, which takes most of the time; the compiler's own passes all run.
UNCOMPILED = {
    r"(dpq\.compile\(model, budget=0\.75)\)": r'\1, inner="aot_eager")',
}


def blocks() -> str:
    found = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found
    return "\n".join(found)


def check(folder: Path, printed: str) -> None:
    assert "of 3 sites in int4" in printed
    assert "training: 12 steps" in printed and "analysis: 1 step at" in printed
    assert (folder / "graph.html").stat().st_size > 10_000


@pytest.mark.slow
def test_readme_code_runs_without_inductor(tmp_path: Path) -> None:
    text, compiled = blocks(), len(re.findall(r"\bcompile\(", blocks()))
    for pattern, replacement in UNCOMPILED.items():
        text, count = re.subn(pattern, replacement, text)
        assert count > 0, pattern
    assert text.count("aot_eager") == compiled, "a model of the README is compiled by Inductor"
    script = tmp_path / "readme.py"
    script.write_text(text)
    with forks() as server:
        assert server.run(script) == 0, (tmp_path / "stderr").read_text()[-3000:]
    check(tmp_path, (tmp_path / "stdout").read_text())


@pytest.mark.heavy
def test_readme_code_runs(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text(blocks())
    done = subprocess.run([sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    check(tmp_path, done.stdout)


def test_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 120
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    assert [link for link in links if not (README.parent / link).exists()] == []


def test_pictures_of_documents_are_small() -> None:
    pictures = list((README.parent / "docs" / "assets").glob("*.png"))
    assert pictures and all(path.stat().st_size <= 150_000 for path in pictures)
