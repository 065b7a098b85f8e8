"""Every benchmark of private training runs on its small setting and prints what it is to print."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("dp_step", ["--no-memory"], ("eager bfloat16", "hooks", "ghost", "functorch", "ours bfloat16")),
        pytest.param(
            "dp_step",
            ["--no-memory", "--config", "small_gpt2,8,4", "--kinds", "eager,ghost,ours,ours int4"],
            ("small_gpt2 8, batch 4", "ghost          cannot train this model", "ours int4"),
            marks=pytest.mark.heavy,
        ),
        ("analysis_cost", ["--out", "out"], ("per_sample", "paper", "0 recompiles")),
        pytest.param("first_step", [], ("small,8,4", "cold", "warm", "own CPU"), marks=pytest.mark.heavy),
        pytest.param("beside_opacus", [], ("Opacus", "float32", "int8", "int4", "1 epochs"), marks=pytest.mark.heavy),
        ("norm_ways", ["--fit"], ("gram", "direct", "int8", "_SHIFT_COST")),
        ("layer_rates", [], ("int8 peak", "ResNet18", "transformer", "grad_output")),
        (
            "fp4_step",
            [],
            (
                *("private fp32", "private int4 90 %", "private int8 90 %", "private luq_fp4 90 %"),
                *("private bfloat16", "eager bfloat16", "torch.compile bfloat16"),
            ),
        ),
        ("private_variants", [], ("2 of 3 sites low", "link table", "direct", "written", "fused", "equal")),
        pytest.param("fp4_step", ["--scaling", "--out", "out"], ("batch    4",), marks=pytest.mark.heavy),
    ],
)
def test_smoke_run(name: str, options: list[str], words: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / f"{name}.py", "--smoke", "--threads", "1", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(word in done.stdout for word in words), done.stdout


@pytest.mark.slow
def test_benchmark_runs_on_its_small_setting(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "ddp.py", "--smoke", "--json", tmp_path / "figures.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(
        word in done.stdout for word in ("1 process", "2 processes, sharded", "samples/s", "communication", "peak")
    )
    assert (tmp_path / "figures.json").exists()
