"""`selftest`: it finds nothing where all is equal, and what differs; a device that is missing is told."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dpquant_compile.backends.reference.emulated import EmulatedSite
from dpquant_compile.cli.main import main
from dpquant_compile.errors import CompileSpecError
from dpquant_compile.lab import selftest as module
from dpquant_compile.lab.selftest import Check, Report, Timing, device_of, kernel_checks, noise_checks
from dpquant_compile.privacy.mechanism import normals

CPU = torch.device("cpu")


@pytest.mark.slow
def test_the_quick_one_finds_nothing_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    assert main(["selftest", "--quick", "--json", "--out", str(page)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] and document["environment"]["torch"] == torch.__version__
    kinds = {check["part"] for check in document["checks"]}
    assert kinds == {"Kernels against the reference", "Noise", "One private step"}
    assert all(check["passed"] is not False for check in document["checks"])
    ran = {(check["subject"], check["what"]) for check in document["checks"] if check["passed"]}
    assert ran >= {("compiled", "int8 linear"), ("reference", "int8 conv2d"), ("a small CNN", "all sites in int8")}
    assert [timing["what"] for timing in document["timings"]][:2] == ["not private, eager", "private float32"]
    text = page.read_text()
    assert (
        text.startswith("# dpquant selftest\n\nAll equal.\n")
        and "| compiled | ✓ | equal bit for bit | int8 linear, int8 conv2d |" in text
    )


def test_a_kernel_that_is_off_by_one_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = EmulatedSite.product

    def wrong(self: Any, *args: Any) -> torch.Tensor:
        y = right(self, *args)
        if self is module.REFERENCE_SITE:
            return y
        y.view(-1)[7] = torch.nextafter(y.view(-1)[7], torch.tensor(torch.inf))
        return y

    monkeypatch.setattr(EmulatedSite, "product", wrong)
    monkeypatch.setattr(module, "backend_names", lambda: ("auto", "compiled"))
    (linear, conv) = kernel_checks(CPU, ["int8"])
    for check in (linear, conv):
        assert check.passed is False and "packed forward by" in check.result and "weighted" not in check.result


def test_noise_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [check.passed for check in noise_checks(CPU)] == [True]
    right = normals.draw_normals
    monkeypatch.setattr(normals, "draw_normals", lambda key, counter, std, out: right(key, counter + 1, std, out))
    assert [check.passed for check in noise_checks(CPU)] == [False]


@pytest.mark.parametrize("recipe", ["int4", "int8", "int4_w8", "luq", "luq_fp4"])
def test_recipes_of_whole_numbers_are_compared_bit_for_bit(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "backend_names", lambda: ("auto", "reference"))
    assert [check.result for check in kernel_checks(CPU, [recipe])] == ["equal bit for bit"] * 2


def test_a_difference_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(
        {"torch": "x"}, [Check("Noise", "a", "x", "differs", False), Check("Noise", "b", "x", "not here", None)]
    )
    report.timings.append(Timing("m", "private float32", (2.0, 0.5), (1.0, 0.0)))
    report.timings.append(Timing("m", "private int8", (1.0, 0.0), (1.0, 0.0)))
    monkeypatch.setattr(module, "selftest", lambda *args, **options: report)
    assert main(["selftest"]) == 1
    page = capsys.readouterr().out
    assert "**1 of 2 differ.**" in page and "| a | ✗ | differs | x |" in page
    assert "| m | private int8 | 1.0 ± 0.0 | 1.0 ± 0.0 | 2.00× |" in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_missing_is_told_with_the_fix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--device", "cuda"]) == 2
    said = capsys.readouterr().err
    assert "--device cuda" in said and "build without CUDA" in said and "install a CUDA build" in said
    for name in ("mps", "meta", "gpu"):
        with pytest.raises(CompileSpecError, match=f"--device {name}.*Fix: cpu or cuda"):
            device_of(name)
