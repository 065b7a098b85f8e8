"""`dpquant selftest`: whether this machine computes what the tests say, and how fast."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dpquant_compile.cli.command import DONE, FAILED, Command

if TYPE_CHECKING:
    from dpquant_compile.cli.output import Output

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu (the default), cuda or cuda:1")
    parser.add_argument("--quick", action="store_true", help="one recipe and a small model: shows that everything runs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page here as well, as markdown")


def _run(args: argparse.Namespace, output: "Output") -> int:
    from rich.text import Text

    from dpquant_compile.lab.selftest import device_of, selftest

    report = selftest(device_of(args.device), quick=args.quick, log=lambda line: output.note(f"selftest: {line} …"))
    page = report.markdown()
    if args.out is not None:
        args.out.write_text(page, encoding="utf-8")
    checks, timings = ([asdict(entry) for entry in part] for part in (report.checks, report.timings))
    document = {"passed": report.passed, "environment": report.environment, "checks": checks, "timings": timings}
    output.result(document, Text(page, no_wrap=True, overflow="ignore", end=""))
    return DONE if report.passed else FAILED


COMMAND = Command(
    "selftest",
    "compare kernels, noise and private steps on a device with the reference, and time them",
    (
        "dpquant selftest --quick",
        "dpquant selftest --device cuda --out selftest.md",
        "dpquant selftest --json > selftest.json",
    ),
    _add_arguments,
    _run,
)
