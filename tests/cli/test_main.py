"""The command line: exit codes, messages, and that what it prints is what the library says."""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
import torch

import dpquant_compile as dpq
from dpquant_compile import lab
from dpquant_compile.cli.main import COMMANDS, main, make_parser
from dpquant_compile.cli.models import InputSpec
from dpquant_compile.cli.output import Output
from tests.support.commands import dpquant

ROOT = Path(__file__).parents[2]
PLAN = ["--delta", "1e-5", "--dataset-size", "10000", "--batch-size", "500", "--epochs", "5", "--accountant", "rdp"]

TINY = """
import torch
from torch import nn


def build():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 8 * 8, 5))


def normed(frozen=False):
    norm = nn.BatchNorm2d(4)
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm.eval() if frozen else norm)


def frozen():
    return normed(frozen=True)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.up, self.out = nn.Embedding(10, 6), nn.ConvTranspose1d(6, 6, 1), nn.Linear(6, 2)

    def forward(self, ids, mask):
        states = self.up(self.table(ids).transpose(1, 2)).transpose(1, 2)
        return self.out(states * mask[..., None])


def broken():
    raise RuntimeError("no such weights")


number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder but for a module with models."""
    (tmp_path / "tiny_models.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tiny_models", raising=False)
    return tmp_path


# All commands


@pytest.mark.heavy
def test_help_and_usage_in_a_process(tmp_path: Path) -> None:
    helped = dpquant("--help", cwd=tmp_path)
    assert helped.returncode == 0
    assert all(command.name in helped.stdout for command in COMMANDS) and "examples:" in helped.stdout
    wrong = dpquant("trian", cwd=tmp_path)
    assert wrong.returncode == 2 and "'trian'. Did you mean train?" in wrong.stderr and not wrong.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--version"], ["plan", "--version"]):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 0 and capsys.readouterr().out == f"dpquant {dpq.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_of_a_command_has_examples_that_parse(command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command.name, "--help"])
    printed = capsys.readouterr().out
    assert end.value.code == 0 and "examples:" in printed and "--json" in printed and "--version" in printed
    for line in command.examples:
        assert line in printed
        assert parsed(line).command is command


def parsed(line: str):
    """The arguments of a shell line that calls dpquant, as far as a pipe, a redirection or `--`."""
    words = shlex.split(re.split(r" \| | > ", line)[0])
    assert words[0] == "dpquant"
    return make_parser().parse_args(words[1 : words.index("--") if "--" in words else None])


def test_document_shows_commands_that_parse() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "cli.md").read_text(), re.DOTALL)
    shown = {parsed(line).command.name for block in blocks for line in block.splitlines()}
    assert shown == {command.name for command in COMMANDS}


def test_document_shows_a_grid_that_expands() -> None:
    (grid,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "cli.md").read_text(), re.DOTALL)
    assert len(lab.expand(tomllib.loads(grid))) == 3 * 3 * 3 + 3


@pytest.mark.parametrize("words", [[], ["train"], ["report"], ["sites", "a:b", "--inptu", "1x2"], ["plan", "--", "3"]])
def test_bad_usage_is_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    said = capsys.readouterr()
    assert "usage:" in said.err and not said.out


def test_an_unknown_option_names_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "cnn-digits", "--budgett=0.5", "--zzz"])
    said = capsys.readouterr().err
    assert "dpquant train" in said and "--zzz" in said and "Did you mean --budget?" in said


def test_typed_error_is_one_message_and_a_traceback_only_on_request(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["sites", "tiny_models:broken"]
    assert main(words) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.startswith(
        "dpquant sites: error: tiny_models:broken() raised RuntimeError: no such"
    )
    assert "Traceback" not in said.err
    assert main([*words, "--traceback"]) == 2
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("DPQUANT_DEBUG", "1")
    assert main(words) == 2
    assert "Traceback" in capsys.readouterr().err


def test_interrupt_is_code_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(**options):
        raise KeyboardInterrupt

    monkeypatch.setattr(dpq, "plan", stop)
    assert main(["plan", "--target-epsilon", "3", *PLAN]) == 130
    assert capsys.readouterr().err == "dpquant plan: interrupted\n"


@pytest.mark.slow
def test_reader_that_leaves_early_is_no_traceback(tmp_path: Path) -> None:
    line = f"{shlex.quote(sys.executable)} -m dpquant_compile.cli tasks --json | true"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""


def test_json_has_no_infinity_and_text_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=True).result({"a": float("inf"), "b": (1, float("nan")), "c": Path("x")})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1, None], "c": "x"}
    Output(as_json=False).result({}, "blocks[0] [bold]x[/bold]")
    assert capsys.readouterr().out == "blocks[0] [bold]x[/bold]\n"


# sites


@pytest.mark.heavy
def test_sites_in_a_process(here: Path) -> None:
    done = dpquant("sites", "tiny_models:build", "--input", "2x3x8x8", "--json", cwd=here)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    conv, linear = shown["sites"]
    assert (conv["name"], conv["op"], conv["weight"], conv["output"]) == ("0", "conv2d", [4, 3, 3, 3], [2, 4, 8, 8])
    assert conv["flops"] == 2 * 4 * 3 * 9 * 64 and linear["flops"] == 2 * 256 * 5
    assert shown["flops"] == conv["flops"] + linear["flops"] and conv["share"] + linear["share"] == pytest.approx(1)
    assert shown["skipped"] == []


def test_sites_as_a_table_with_what_was_skipped(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sites", "tiny_models:Words", "--input", "2x7:int64", "--input", "2x7"]) == 0
    said = capsys.readouterr().out
    assert "tiny_models:Words: 1 site, 168 FLOPs forward per sample" in said
    assert re.search(r"out +linear +2×6 +2×7×2 +168 +100.0 %", said)
    assert re.search(r"not sites.*\n.*\n *up +.*transposed", said) and "\x1b" not in said


def test_sites_without_an_input_says_what_is_missing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sites", "tiny_models:build"]) == 0
    said = capsys.readouterr()
    assert re.search(r"0 +conv2d +4×3×3×3 +– +– +–", said.out) and "--input" in said.err


@pytest.mark.parametrize(("build", "told"), [("normed", True), ("frozen", False), ("build", False)])
def test_sites_tells_of_batch_norm(build: str, told: bool, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sites", f"tiny_models:{build}", "--input", "2x3x8x8"]) == 0
    assert ("will refuse this model: layer '1' (BatchNorm2d)" in capsys.readouterr().err) == told


def test_sites_of_a_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sites", "cnn-digits", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["sites"]) == 8 and shown["flops"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such-task"], "is no task. Tasks: resnet18-cifar10"),
        (["no_such_module:build"], "ModuleNotFoundError"),
        (["tiny_models:nothing"], "AttributeError"),
        (["tiny_models:number"], "gives a int, not a torch.nn.Module"),
        (["tiny_models:Path"], "cannot be imported"),
        (["tiny_models:build", "--input", "2x5x8x8"], "expected input[2, 5, 8, 8] to have 3 channels"),
    ],
)
def test_sites_of_what_is_no_model(words, said, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sites", *words]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and not printed.out


@pytest.mark.parametrize("text", ["", "3x", "axb", "0x3", "-1x3", "2x3:int99", "2x3:", "2,3"])
def test_input_that_is_no_shape(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["sites", "a:b", f"--input={text}"])
    assert end.value.code == 2 and repr(text.partition(":")[2] or text) in capsys.readouterr().err


def test_inputs_have_their_dtype() -> None:
    assert InputSpec.parse("2x3").make().dtype == torch.float32
    assert InputSpec.parse("2x3:bool").make().all()
    ids = InputSpec.parse("8x128:int64").make()
    assert ids.shape == (8, 128) and ids.dtype == torch.int64 and not ids.any()


# plan


@pytest.mark.slow
def test_plan_says_what_the_library_says(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--n-sample", "2", "--physical", "64", "--sigma-measure", "1.5", "--n-interval", "1"]
    assert main(["plan", "--target-epsilon", "3", *PLAN, *given, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    expected = dpq.plan(
        target_epsilon=3,
        delta=1e-5,
        dataset_size=10_000,
        batch_size=500,
        epochs=5,
        n_sample=2,
        max_physical_batch_size=64,
        sigma_measure=1.5,
        n_interval=1,
        accountant="rdp",
    )
    assert shown == dataclasses.asdict(expected)
    assert expected.analyses == 4
    assert main(["plan", "--target-epsilon", "3", *PLAN, *given]) == 0
    printed = capsys.readouterr().out
    assert f"σ = {expected.noise_multiplier:g} keeps ε = 3" in printed
    assert re.search(rf"together +{expected.epsilon:.4f}", printed)


def test_plan_of_a_noise_is_the_inverse(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", *PLAN, "--estimator", "none", "--json"]
    assert main([*words, "--target-epsilon", "2"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main([*words, "--noise-multiplier", str(first["noise_multiplier"])]) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["epsilon"] == first["epsilon"] <= 2 and second["target_epsilon"] is None
    assert list(second["epsilons"]) == ["training"]


def test_plan_without_noise_has_no_finite_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", *PLAN, "--noise-multiplier", "0"]
    assert main([*words, "--json"]) == 0 and json.loads(capsys.readouterr().out)["epsilon"] is None
    assert main(words) == 0 and "ε = ∞" in capsys.readouterr().out


def test_plan_remarks_on_a_large_delta(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", *PLAN, "--noise-multiplier", "1", "--json"]
    words[words.index("1e-5")] = "0.01"
    assert main(words) == 0
    said = capsys.readouterr()
    assert "is not below 1/N" in said.err and json.loads(said.out)["delta"] == 0.01


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target-epsilon", "0.0001"], "No noise multiplier"),
        (["--noise-multiplier", "-1"], "sigma must be"),
        (["--noise-multiplier", "nan"], "sigma must be"),
        (["--noise-multiplier", "1", "--epochs", "0"], "epochs must be a whole number of at least 1"),
        (["--noise-multiplier", "1", "--delta", "2"], "delta must lie between"),
        (["--noise-multiplier", "1", "--sigma-measure", "0"], "sigma_measure must be above 0"),
    ],
)
def test_plan_of_bad_numbers(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *PLAN, *words]) == 2
    assert said in capsys.readouterr().err


def test_plan_asks_one_question() -> None:
    for words in ([], ["--target-epsilon", "1", "--noise-multiplier", "1"]):
        with pytest.raises(SystemExit) as end:
            main(["plan", *PLAN, *words])
        assert end.value.code == 2


# tasks and bench


def test_tasks_are_all_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "--json"]) == 0
    listed = {task["name"]: task for task in json.loads(capsys.readouterr().out)["tasks"]}
    assert tuple(listed) == lab.task_names() and all(task["data"] for task in listed.values())
    assert main(["tasks", "--small"]) == 0
    printed = capsys.readouterr().out
    assert "cnn-digits" in printed and "resnet50-gtsrb" not in printed and "--data" in printed


def test_bench_lists_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["benchmarks"]
    assert [each["name"] for each in listed] == sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    assert all(each["summary"] for each in listed)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout that has one benchmark, which takes no time."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "quick.py").write_text(
        '"""What nothing costs."""\nimport json, sys\nprint("running", sys.argv[1:])\n'
        'if "--json" in sys.argv:\n    open(sys.argv[-1], "w").write(json.dumps({"ms": 1.5}))\n'
        'sys.exit(int(sys.argv[sys.argv.index("--code") + 1]) if "--code" in sys.argv else 0)\n'
    )
    monkeypatch.setattr(dpq, "__file__", str(tmp_path / "dpquant_compile" / "__init__.py"))
    return tmp_path


def test_bench_runs_one_with_its_own_arguments(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "quick", "--", "--smoke", "--batch", "3"]) == 0
    assert capfd.readouterr().out == "running ['--smoke', '--batch', '3']\n"
    assert main(["bench", "quick", "--json", "--", "--smoke"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out) == {"ms": 1.5} and "running ['--smoke', '--json'" in said.err


def test_bench_that_fails(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "quick", "--", "--code", "7"]) == 1
    assert "exit code 7" in capfd.readouterr().err
    assert main(["bench", "quick", "--", "--code", "2"]) == 2


def test_bench_of_what_is_not_there(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "slow"]) == 2
    assert "There are: quick" in capsys.readouterr().err
    (checkout / "benchmarks" / "quick.py").unlink()
    assert main(["bench"]) == 2
    assert "not part of the installed package" in capsys.readouterr().err


@pytest.mark.parametrize("start", ["-m", "script"])
def test_an_interrupt_during_imports_is_one_line(start: str, tmp_path: Path) -> None:
    script = tmp_path / "dpquant"  # as pip makes it
    script.write_text("import sys\nfrom dpquant_compile.cli.main import main\nsys.exit(main())\n")
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, *(["-m", "dpquant_compile.cli"] if start == "-m" else [str(script)]), "tasks"]
    root = str(Path(dpq.__file__).parents[1])
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job is born ignoring it
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), root])},
        preexec_fn=heed,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert (process.returncode, said) == (130, "dpquant: interrupted\n")


@pytest.mark.heavy
def test_an_interrupt_of_another_program_is_not_touched() -> None:
    code = "import signal, dpquant_compile; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plan_refuses_a_batch_beyond_the_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --target-epsilon 3 --delta 1e-5 --dataset-size 100 --batch-size 101 --epochs 2".split()
    assert main(words) == 2
    assert "--batch-size 101 is more than --dataset-size 100" in capsys.readouterr().err
