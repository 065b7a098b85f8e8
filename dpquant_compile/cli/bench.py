"""`dpquant bench`: the benchmarks of the checkout."""

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import dpquant_compile
from dpquant_compile.cli.command import BAD_INPUT, DONE, Command, InputError, RunFailedError

if TYPE_CHECKING:
    from dpquant_compile.cli.output import Output

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [-h] [--json] [--traceback] [--version] [NAME] [-- ARGUMENTS]"
    parser.add_argument("name", nargs="?", metavar="NAME", help="which one to run; without it, they are listed")
    parser.description = (
        f"{parser.description} Arguments after -- go to the benchmark; `-- --help` shows which it has. With --json its "
        "figures are printed as JSON, and its own text goes to standard error."
    )


def _run(args: argparse.Namespace, output: "Output") -> int:
    found = _benchmarks()
    if args.name is None:
        if args.rest:
            raise InputError(f"arguments for a benchmark, and none is named. Fix: name one of {', '.join(found)}")
        return _list(found, output)
    if args.name not in found:
        raise InputError(f"no benchmark is named {args.name!r}. There are: {', '.join(found)}")
    command = [sys.executable, str(found[args.name]), *args.rest]
    if not output.as_json:
        return _code(args.name, subprocess.run(command, check=False).returncode)
    if "--json" in args.rest:
        raise InputError("--json is given to dpquant and to the benchmark. Fix: leave one of them out")
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        done = subprocess.run([*command, "--json", str(figures)], stdout=sys.stderr, check=False)
        code = _code(args.name, done.returncode)
        if code == DONE:
            output.result(json.loads(figures.read_text(encoding="utf-8")))
    return code


def _benchmarks() -> dict[str, Path]:
    """Benchmark files by name. They lie beside the package in a checkout, and are not in a wheel."""
    folder = Path(dpquant_compile.__file__).resolve().parents[1] / "benchmarks"
    files = {path.stem: path for path in sorted(folder.glob("*.py"))}
    if not files:
        raise InputError(
            "the benchmarks are not part of the installed package: they lie in benchmarks/ of its source. Fix: get the "
            "source of dpquant-compile, `pip install -e .` in it, and run `dpquant bench` again"
        )
    return files


def _list(found: dict[str, Path], output: "Output") -> int:
    from dpquant_compile.cli.output import table

    about = {name: _summary(path) for name, path in found.items()}
    document = {"benchmarks": [{"name": name, "summary": about[name], "path": path} for name, path in found.items()]}
    output.result(document, table(("benchmark", "what it measures"), list(about.items())))
    return DONE


def _summary(path: Path) -> str:
    """The first line of a file's docstring, without running it."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def _code(name: str, code: int) -> int:
    if code not in (DONE, BAD_INPUT):
        raise RunFailedError(f"the benchmark {name} ended with exit code {code}; its own message is above")
    return code


COMMAND = Command(
    "bench",
    "list or run the benchmarks",
    (
        "dpquant bench",
        "dpquant bench fp4_step -- --smoke",
        "dpquant bench dp_step --json -- --smoke --no-memory > figures.json",
    ),
    _add_arguments,
    _run,
)
