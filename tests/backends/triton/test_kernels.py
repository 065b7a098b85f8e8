"""Every kernel compiles for real GPUs: int8 instructions of the tensor cores in each product, no spills, and no float
instruction that would round in another way than the reference.

No GPU is needed, and none has run them. The benchmark compiles, in a process of its own: here Triton interprets.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PRODUCTS = ("product", "norms", "weighted", "gradients")
# All that Triton 3.7 answers for Turing, whose tensor cores multiply int8.
REFUSED = "'arith.extf' op operand #0 must be floating-point-like"

pytestmark = pytest.mark.slow  # the compiler takes seconds for a kernel


def table(folder: Path, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, ROOT / "benchmarks" / "triton_kernels.py", "--json", folder / "table.json", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "never run on hardware" in done.stdout
    rows: list[dict[str, Any]] = json.loads((folder / "table.json").read_text())["rows"]
    return rows


def check(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        product = row["kernel"].startswith(PRODUCTS)
        if row["target"] < 80 and product:
            assert row["refused"] == REFUSED, row
            continue
        assert not row["refused"] and 0 < row["registers"] <= 255 and row["spills"] == 0, row
        assert not row["inexact"], row
        if product:
            assert "MMA." in row["matrix"] and "S8.S8" in row["matrix"], row


@pytest.mark.timeout(600)
def test_a_product_compiles_to_int8_tensor_cores(tmp_path: Path) -> None:
    rows = table(tmp_path, "--smoke")
    assert [(row["kernel"].split()[0], row["target"]) for row in rows] == [
        (kernel, target) for kernel in ("quantize", "product") for target in (75, 80, 90)
    ]
    check(rows)
    assert "IGMMA" in rows[-1]["matrix"], "Hopper has instructions of its own"


@pytest.mark.heavy
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", [75, 80, 90, 100])
def test_all_kernels_compile_without_spills(target: int, tmp_path: Path) -> None:
    rows = table(tmp_path, "--targets", str(target))
    assert {row["kernel"].split()[0] for row in rows} == {"largest", "quantize", *PRODUCTS}
    check(rows)
