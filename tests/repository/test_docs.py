"""The documents: every Python block runs, what tables say is so, every page can be found, and the site builds."""

import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile.backends.cpu_int8 import build as native
from dpquant_compile.backends.ops.site import axis_list, site_call
from dpquant_compile.backends.registry import backend_names, choose_kernel
from dpquant_compile.errors import KernelError
from dpquant_compile.privacy.accounting.accountants import ACCOUNTANTS
from dpquant_compile.privacy.clipping.bounds import CLIPPING
from dpquant_compile.privacy.clipping.grad_rules import _RULES
from dpquant_compile.privacy.schedule.scheduler import MODES
from dpquant_compile.sites import BatchAxis
from dpquant_compile.torch_compile import _OPTIONS
from tests.support.forked import Forks, forks
from tests.support.heavy import few

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def fences(text: str) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return re.findall(r"^ *```(\S*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def server() -> Iterator[Forks]:
    with forks() as found:
        yield found


PROGRAMS = [path for path in DOCS if BLOCK.search(path.read_text())]
# The tests of the trainer train as its page does.
SHOWN = few(PROGRAMS, *(path.stem for path in PROGRAMS if path.stem != "trainer"), name=lambda path: path.stem)


@pytest.mark.slow
@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.stem)
def test_document_runs(path: Path, tmp_path: Path, server: Forks) -> None:
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(BLOCK.findall(path.read_text())))
    assert server.run(script) == 0, (tmp_path / "stderr").read_text()[-3000:]


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.stem)
def test_no_block_goes_unchecked(path: Path) -> None:
    """Blocks are Python, which runs, shell, whose targets and files exist, or no code at all."""
    found = fences(path.read_text())
    assert {language for language, _ in found} <= {"python", "sh", "text", "json", "toml"}
    assert sum(language == "python" for language, _ in found) == len(BLOCK.findall(path.read_text()))
    shell = "\n".join(text for language, text in found if language == "sh")
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", shell, re.MULTILINE)) <= targets
    for script in re.findall(r"\b(?:examples|benchmarks)/\w+\.py", shell):
        assert (ROOT / script).exists(), script


# Every page can be found


def test_the_index_links_to_every_page() -> None:
    assert {path.name for path in DOCS} - {"README.md"} == set(re.findall(r"\((\w+\.md)\)", page("README.md")))


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == [path.name for path in DOCS]


@pytest.mark.slow
def test_the_site_builds_strictly_and_needs_no_network(tmp_path: Path) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material")):
        pytest.skip("mkdocs and mkdocs-material are not installed: pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    built = {file.stem for file in tmp_path.glob("*.html")} - {"404", "index"}
    assert built == {path.stem for path in DOCS} - {"README"}
    for file in tmp_path.rglob("*.html"):
        # Links that are followed may lead elsewhere; what a page loads may not.
        loaded = re.findall(
            r"<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)=\"?([^\"\s>]+)", file.read_text()
        )
        assert [url for url in loaded if url.startswith(("http:", "https:", "//"))] == [], file.name


# What tables say is so


def test_the_api_page_has_every_public_name() -> None:
    said: dict[str, list[str]] = {}
    for section in page("api.md").split("\n## ")[1:]:
        module = re.match(r"`([\w.]+)`", section)
        said.setdefault(module[1] if module else "dpquant_compile", []).extend(
            re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
        )
    for name, names in said.items():
        public = set(importlib.import_module(name).__all__)
        top = set(dpq.__all__) if name != "dpquant_compile" else set()  # what is at the top is listed there alone
        assert sorted(names) == sorted(public - top), name


def test_the_api_page_names_attributes_that_exist() -> None:
    for name, said in re.findall(r"^\| `(\w+)` \| [^|]*?: (`[^|]*)\|$", page("api.md"), re.MULTILINE):
        for attribute in re.findall(r"`(?:\w+\.)?(\w+)`", said):
            owner = getattr(dpq, name)
            slots = {"ledger", "history"}  # set when an object is made
            assert hasattr(owner, attribute) or attribute in slots, f"{name}.{attribute}"


class Ways(nn.Module):
    """Parameters whose per-sample gradients are taken in as many ways as fit into a small model."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds, self.first = (
            nn.Embedding(20, 8),
            nn.Embedding(20, 8),
            nn.Parameter(torch.zeros(1, 1, 8)),
        )
        self.norm, self.twice, self.slope = nn.LayerNorm(8), nn.Linear(8, 8), nn.PReLU()
        self.out, self.unused = nn.Linear(56, 8), nn.Linear(3, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.kinds(tokens)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1)
        x = self.slope(self.twice(self.twice(self.norm(x))))
        return self.out(x.flatten(1)) @ self.words.weight.t()


def test_the_glossary_has_every_way_of_explain() -> None:
    rows = set(re.findall(r"^\| `([^`]+)` \|", page("glossary.md"), re.MULTILINE))
    assert {name for name, _ in _RULES.values()} | {"book-keeping (direct)"} <= rows
    data = TensorDataset(torch.randint(20, (8, 6)), torch.randint(20, (8,)))
    model = dpq.compile(Ways(), budget=1, inner="eager").train()
    model, _, criterion, loader = dpq.PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for tokens, target in loader:
        criterion(model(tokens), target).backward()
    said = {re.sub(r"^(kept, added up over 2 uses: ).*", r"\1…", way) for _, _, way in model.explain().private}
    assert said - {"book-keeping (gram)", "book-keeping"} == {row for row in rows if not row.startswith("book-keeping")}


def test_the_support_matrix_says_which_kernel_runs() -> None:
    if native.unavailable() is not None:
        pytest.skip("no native kernels on this machine")
    row = r"^\| `([\w.]+)`[^|]*\| `(\w+)`, (\w+) \| `(\w+)`, (\w+) \| (.) [^|]*\| (.) [^|]*\| (.) [^|]*\| (.) [^|]*\|"
    rows = re.findall(row, page("support.md"), re.MULTILINE)
    assert [row[0] for row in rows] == [
        "luq_fp4",
        "uniform4",
        "int4",
        "int4.block",
        "int8",
        "fp8_e4m3",
        "fp8_e5m2",
        "fp4_e2m1",
        "fp4_e2m1_nv",
    ]
    for name, plain, plain_kind, rounded, rounded_kind, *marks in rows:
        for backend, mark in zip(("reference", "compiled", "cpu_int8", "triton"), marks, strict=True):
            call = site_call("linear", 0, 0, f"{name}/none/{backend}", axis_list(BatchAxis(0), BatchAxis(0)))
            with nullcontext() if mark in "✓◐" else pytest.raises(KernelError, match="no kernel runs"):
                choose_kernel(call, torch.device("cpu"))
        for outputs, said in (("none", (plain, plain_kind)), ("flow", (rounded, rounded_kind)), ("all", None)):
            call = site_call("linear", 0, 0, f"{name}/{outputs}/auto", axis_list(BatchAxis(0), BatchAxis(0)))
            kernel = choose_kernel(call, torch.device("cpu")).kernel
            found = (kernel.backend, "native" if kernel.native else "emulated")
            assert found == (said or (rounded, rounded_kind)), f"{name}, outputs {outputs}"


def test_the_table_of_torch_compile_has_every_option() -> None:
    first = re.findall(r"^\| (`.*?) \|", page("torch_compile.md"), re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(first))) == sorted(_OPTIONS)


@pytest.mark.slow
def test_the_support_matrix_has_every_choice() -> None:
    text = page("support.md")
    choices = {*CLIPPING, *ACCOUNTANTS, *MODES, "per_sample", "paper", *backend_names()} - {"auto"}
    assert [choice for choice in sorted(choices) if f"`{choice}`" not in text and f'`"{choice}"`' not in text] == []
