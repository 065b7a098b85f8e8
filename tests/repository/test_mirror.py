"""The tests mirror the product: a file for each module, helpers in tests/support, names that say what must hold."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FILES = sorted(path.relative_to(TESTS).as_posix() for path in TESTS.rglob("*.py"))

# Tests of what several modules do together. A file that is about one module does not belong here.
ACROSS = {
    "integrations/test_clients.py": "models of transformers through capture, private training, schedule and eval()",
    "integrations/test_vision_models.py": "families of torchvision and timm through capture and private training",
    "lab/test_report_browser.py": "reports in a real browser, which may be missing",
    "view/test_html_browser.py": "the graph page in a real browser, which may be missing",
    "privacy/test_mutants.py": "faults that are put into several modules, and the checks that must find them",
    "privacy/test_neighbouring_datasets.py": "whole runs on two datasets that differ in one sample",
    "privacy/test_refused_loops.py": "training loops that engine, session, loader and optimizer refuse together",
}
# How a fault was found says nothing about what must hold.
HISTORY = re.compile(r"(^|_)(reviews?|faults?|bugs?|issues?|regressions?|lost|found)(_|$)")


def is_test(file: str) -> bool:
    return Path(file).name.startswith("test_")


def test_every_file_stands_where_its_module_does() -> None:
    """test_module.py, or test_module_topic.py. The symlinks in dpquant_compile lead to passes/ and backends/."""
    strange = []
    for file in filter(is_test, FILES):
        folder, words = Path(file).parent, Path(file).stem.split("_")[1:]
        if folder.as_posix() == "repository" or file in ACROSS:
            continue
        names = ("_".join(words[: i + 1]) for i in range(len(words)))
        if not any((ROOT / "dpquant_compile" / folder / f"{name}.py").exists() for name in names):
            strange.append(file)
    assert not strange, "no module is tested by these; name them after one, or move their tests to its file"
    assert ACROSS.keys() <= set(FILES), "the list names files that are not there"


def test_tests_are_not_imported() -> None:
    """What two tests share stands in tests/support, under a name that says what it holds."""
    for file in FILES:
        for node in ast.walk(ast.parse((TESTS / file).read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                parts = name.split(".")
                assert parts[0] != "tests" or parts[1] == "support", f"{file}:{node.lineno} imports {name}"
                assert not parts[0].startswith("test_"), f"{file}:{node.lineno} imports {name}"


def test_helpers_stand_in_support() -> None:
    others = [file for file in FILES if not is_test(file) and Path(file).name not in ("__init__.py", "conftest.py")]
    assert {Path(file).parent.as_posix() for file in others} == {"support"}, others


def test_names_do_not_say_how_a_fault_was_found() -> None:
    assert not [file for file in FILES if HISTORY.search(Path(file).stem)]
