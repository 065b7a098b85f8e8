"""The command line: training, sweeps and reports."""

import csv
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import dpquant_compile as dpq
from dpquant_compile import lab
from dpquant_compile.cli import report as report_command
from dpquant_compile.cli import train as train_command
from dpquant_compile.cli.main import main
from dpquant_compile.lab import tasks
from dpquant_compile.lab.data import Split
from dpquant_compile.lab.train import Run
from tests.support.commands import dpquant


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a task that trains in a second, without a compiler."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(96, 1, 4, 4, generator=generator), torch.randint(3, (96,), generator=generator)
    made = tasks.Task(
        "tiny",
        "noise",
        lambda folder: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 3)),
        lambda folder: Split(x[:64], y[:64], x[64:], y[64:]),
        "nothing",
        dict(lr=0.1, batch_size=16, epochs=3, physical=8, n_sample=1, n_interval=1, delta=1e-3),
        sample=(1, 4, 4),
        small=True,
        inner="eager",
    )
    monkeypatch.setitem(tasks._TASKS, "tiny", made)
    return "tiny"


# train


def test_every_field_of_a_run_is_an_option() -> None:
    fields = {field.name for field in dataclasses.fields(lab.RunConfig)}
    assert {option.field for option in train_command.OPTIONS} | {"task"} == fields


@pytest.mark.slow
def test_train_writes_a_run_folder_and_prints_it(task: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", task, "--budget", "0.5", "--epochs", "2", "--seed", "3", "--out", "runs", "--json"]
    assert main(words) == 0
    said = capsys.readouterr()
    shown = json.loads(said.out)
    folder = here / shown["folder"]
    assert folder.parent == here / "runs" and folder.name == shown["key"]
    for name in ("config.json", "log.jsonl", "ledger.json", "checkpoint.pt", "model.pt", "result.json"):
        assert (folder / name).exists(), name
    assert here / shown["model"] == folder / "model.pt"
    held = lab.read_run(folder)
    assert (held.config.seed, held.config.budget, held.config.epochs) == (3, 0.5, 2)
    assert shown["accuracy"] == held.accuracy and shown["epsilons"] == dict(held.epsilons)
    assert (
        re.search(r"epoch +accuracy +low +ε +seconds", said.err) and len(re.findall(r"^ +[12]  ", said.err, re.M)) == 2
    )
    assert "dropped" not in said.out and "loss" not in said.out + said.err

    assert main(words[:-1]) == 0  # again: nothing is trained
    again = capsys.readouterr()
    assert "done before" in again.err and "epoch " not in again.err
    assert re.search(rf"ε at δ = 0.001 +{held.epsilon:.3f}", again.out)
    assert "analysis by itself" in again.out and "training by itself" in again.out


@pytest.mark.slow
def test_train_that_is_interrupted_goes_on(
    task: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def impatient(config, output):
        def stop(row):
            raise KeyboardInterrupt

        yield stop

    words = ["train", task, "--budget", "0.5", "--reproducible", "--json"]
    with monkeypatch.context() as patched:
        patched.setattr(train_command, "_progress", impatient)
        assert main([*words, "--out", "stopped"]) == 130
    stopped = capsys.readouterr()
    assert "same command" in stopped.err and not stopped.out
    assert main([*words, "--out", "stopped"]) == 0
    said = capsys.readouterr()
    resumed = json.loads(said.out)
    assert "count again" not in stopped.err + said.err, "a reproducible run repeats what it lost, and is charged once"
    assert "going on" in said.err and len(re.findall(r"^ +\d  ", said.err, re.M)) == 2
    assert main([*words, "--out", "whole"]) == 0
    whole = json.loads(capsys.readouterr().out)
    same = ("key", "accuracy", "accuracy_low", "epsilon", "epsilons", "scores", "probabilities")
    assert {name: resumed[name] for name in same} == {name: whole[name] for name in same}
    assert [row["policy"] for row in resumed["epochs"]] == [row["policy"] for row in whole["epochs"]]


@pytest.mark.heavy
def test_a_run_that_was_stopped_says_what_going_on_costs(
    task: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """New randomness, so lost steps count again: a target ε is reached before the last epoch is over."""
    words = ["train", task, "--budget", "0.5", "--target-epsilon", "8"]
    with monkeypatch.context() as patched:
        patched.setattr(Run, "_accuracy", lambda self, policy: signal.raise_signal(signal.SIGINT))
        assert main(words) == 130  # the first epoch was trained, and not saved
    said = capsys.readouterr().err
    assert "same command" in said and "made again with new randomness, and count again in ε" in said
    assert "may reach it before its last epoch, and end there with an error" in said
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "going on from its last checkpoint. Steps since then are made again" in said
    assert "may reach it before its last epoch" in said
    assert "ends before its last epoch" in said and "past the target 8" in said and "checkpoint.pt" in said
    assert "Traceback" not in said and not list((here / "out").rglob("result.json"))


@pytest.mark.parametrize("reproducible", [False, True])
def test_the_claim_says_what_it_rests_on(
    reproducible: bool, task: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", task, "--epochs", "1", "--seed", "1", *(["--reproducible"] if reproducible else [])]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert ("from the operating system's entropy" in printed) is not reproducible
    assert bool(re.search("it holds if +nobody knows the seed", printed)) is reproducible
    (folder,) = (here / "out" / "runs").iterdir()
    state = torch.load(folder / "checkpoint.pt", weights_only=True)["dpquant"]
    assert state["noise"]["kind"] == ("seeded" if reproducible else "secure")
    assert main(["report", "out/runs", "--no-graph"]) == 0
    page = Path("report.html").read_text()
    assert ("came from the operating system's entropy" in page) is not reproducible
    assert ("ε holds only as long as nobody knows the seeds" in page) is reproducible


def test_an_option_that_is_the_default_now_is_explained(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", task, "--secure-mode"])
    assert end.value.code == 2
    assert "--secure-mode is the default now: leave it out. Its opposite is --reproducible" in capsys.readouterr().err


@pytest.mark.slow
def test_a_lost_checkpoint_is_told_and_its_attempt_counted(
    task: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", task, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    folder = here / first["folder"]
    for name in ("result.json", "checkpoint.pt"):
        (folder / name).unlink()
    assert main(["train", task, "--json"]) == 0
    said = capsys.readouterr()
    assert "starting again; its ledger holds an earlier attempt" in said.err
    assert json.loads(said.out)["epsilon"] > first["epsilon"]


def test_train_of_a_control_is_not_called_private(task: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", task, "--privacy", "clip", "--scheduler", "pls", "--epochs", "1"]) == 0
    printed = capsys.readouterr().out
    assert "none: a control" in printed and "ε at" not in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such-task"], "no task 'no-such-task'. Tasks:"),
        (["tiny", "--budget", "1.5"], "budget=1.5"),
        (["tiny", "--format", "fp3"], "no format is named 'fp3'. Choose one of"),
        (["tiny", "--epochs", "0"], "epochs=0"),
        (["tiny", "--scheduler", "dpquant", "--privacy", "none"], "Fix:"),
        (["tiny", "--data", "nowhere"], "nowhere"),
        (["tiny", "--target-epsilon", "0.0001"], "No noise multiplier"),
    ],
)
def test_train_refuses_bad_input_before_it_writes(
    words: list[str], said: str, task: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words, "--out", "runs"]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and "Traceback" not in printed.err and not printed.out
    assert not (here / "runs").exists()


def test_train_that_fails_is_code_1(
    task: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args, **options):
        raise dpq.errors.KernelError("site 'fc' has no kernel")

    monkeypatch.setattr(lab, "train", fail)
    assert main(["train", task]) == 1
    assert "site 'fc' has no kernel" in capsys.readouterr().err


# sweep


GRID = """
[base]
task = "tiny"
epochs = 1

[[grids]]
scheduler = ["pls", "static"]
budget = 0.5
seed = [0, 1]
"""


def test_sweep_lists_its_runs(task: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("grid.toml").write_text(GRID)
    train = ["train", task, "--epochs", "1", "--scheduler", "pls", "--budget", "0.5", "--seed", "1", "--out", "runs"]
    assert main(train) == 0
    capsys.readouterr()
    assert main(["sweep", "grid.toml", "--out", "runs", "--dry-run", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["runs"]
    assert [run["state"] for run in listed] == ["new", "done", "new", "new"]
    assert [run["config"]["seed"] for run in listed] == [0, 1, 0, 1]
    assert main(["sweep", "grid.toml", "--out", "runs", "--dry-run"]) == 0
    assert "4 runs, 3 to do" in capsys.readouterr().out
    assert len(list((here / "runs").iterdir())) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read as a grid"),
        ("base = [", "cannot be read as a grid"),
        ("[bse]\ntask = 'tiny'", "bse"),
        ("[base]\ntask = 'tiny'\nbudgett = 1", "budgett: no such field of a run"),
        ("[base]\ntask = 'none'", "there is no task 'none'"),
        ("[base]\ntask = 'tiny'\ndata = 'nowhere'", "nowhere"),
    ],
)
def test_sweep_refuses_a_bad_grid(
    text: str | None, said: str, task: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        Path("grid.toml").write_text(text)
    assert main(["sweep", "grid.toml", "--out", "runs"]) == 2
    assert said in capsys.readouterr().err and not (here / "runs").exists()


@pytest.mark.heavy
def test_stop_and_go_on_in_processes(tmp_path: Path) -> None:
    epochs = 12  # many more than one, or a quick machine is done before the signal comes
    tiny = "import sys; from tests.support.tiny_task import tiny_task; tiny_task(); "
    start = tiny + "from dpquant_compile.cli.main import main; sys.exit(main())"
    words = ["train", "tiny", "--budget", "0.5", "--epochs", str(epochs), "--out", "runs", "--json"]
    command = [sys.executable, "-c", start, *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job is born ignoring it
    with subprocess.Popen(command, cwd=tmp_path, preexec_fn=heed, **pipes) as process:
        assert any(re.match(r" +1  ", line) for line in process.stderr)
        # Once: rich prints a line again that it was writing when the signal came.
        process.send_signal(signal.SIGINT)
        printed, notes = process.communicate(timeout=60)
        assert (process.returncode, printed) == (130, "") and "interrupted" in notes, notes
    done = subprocess.run(command, cwd=tmp_path, check=False, timeout=280, **pipes)
    assert done.returncode == 0 and "going on" in done.stderr, done.stderr
    result = json.loads(done.stdout)
    assert len(result["epochs"]) == epochs and result["epsilon"] > 0


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_digits_sweep_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that fails does not stop the other, and a second sweep has nothing left to do for that one."""
    base = {"task": "cnn-digits", "epochs": 2, "batch_size": 512, "budget": 0.5}
    impossible = {"n_interval": 1, "target_epsilon": 0.0001}
    (tmp_path / "grid.json").write_text(json.dumps({"base": base, "grids": [{}, impossible]}))
    swept = dpquant("sweep", "grid.json", "--out", "runs", "--json", cwd=tmp_path)
    assert swept.returncode == 1, swept.stderr
    runs = json.loads(swept.stdout)
    assert (runs["skipped"], runs["done"], runs["failed"]) == (0, 1, 1)
    (failed,) = [run for run in runs["runs"] if run["status"] == "failed"]
    assert "No noise multiplier" in failed["message"] and failed["key"] in swept.stderr
    (done,) = [run for run in runs["runs"] if run["status"] == "done"]
    assert done["result"]["accuracy"] == lab.read_run(tmp_path / done["folder"]).accuracy

    out, page = str(tmp_path / "runs"), tmp_path / "report.html"
    (tmp_path / "one.json").write_text(json.dumps({"base": base}))
    assert main(["sweep", str(tmp_path / "one.json"), "--out", out]) == 0
    assert "0 done, 1 skipped, 0 failed" in " ".join(capsys.readouterr().out.split())  # a narrow terminal wraps it
    assert main(["report", out, "-o", str(page)]) == 0
    assert done["key"] in page.read_text() and "fc2" in page.read_text()


# report


@pytest.fixture
def runs(task: str, here: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    for scheduler in ("pls", "static"):
        for seed in ("0", "1"):
            words = ["--scheduler", scheduler, "--seed", seed, "--epochs", "1", "--budget", "0.5", "--out", "runs"]
            assert main(["train", task, *words]) == 0
    capsys.readouterr()
    return here / "runs"


def test_report_writes_a_page_and_tables(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = lab.find_runs([runs])
    words = ["-o", "new/report.html", "--csv", "runs.csv", "--markdown", "tables.md", "--title", "Tiny & small"]
    assert main(["report", "runs", *words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["runs"] == 4 and [group["runs"] for group in shown["groups"]] == [2, 2]
    page = Path("new/report.html").read_text()
    assert "Tiny &amp; small" in page and all(run.key in page for run in found)
    with open("runs.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["key"] for line in lines] == [run.key for run in found]
    assert [float(line["accuracy"]) for line in lines] == [run.accuracy for run in found]
    assert not {"data", "dropped"} & set(lines[0])
    tables = Path("tables.md").read_text()
    assert "| static |" in tables and "static runs" in tables
    assert main(["report", "runs", "-o", "again.html", "--no-graph"]) == 0
    printed = capsys.readouterr().out
    assert "4 runs" in printed and "report: again.html" in printed
    assert len(Path("again.html").read_text()) < len(page)


def test_report_publishes_times_only_if_asked(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The threat model says that the adversary does not see them."""
    words = ["report", "runs", "--csv", "runs.csv", "--markdown", "tables.md", "--no-graph"]
    files = [Path(name) for name in ("report.html", "runs.csv", "tables.md")]
    for switch, expected in (([], False), (["--times"], True)):
        assert main([*words, *switch]) == 0
        said = capsys.readouterr()
        assert main([*words, *switch, "--json"]) == 0
        texts = [said.out, capsys.readouterr().out, *(file.read_text() for file in files)]
        assert ["seconds" in text for text in texts] == [expected] * len(texts)
        assert ("not covered by ε" in said.err) is expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere is not there"),
        (["empty"], "no finished run in empty"),
        (["runs", "-o", "empty"], "empty is a folder"),
        (["runs", "--csv", "report.html"], "one file for two things"),
        (["runs", "--graph", "no-such-task"], "is no task"),
    ],
)
def test_report_refuses_bad_input_before_it_writes(
    words: list[str], said: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    assert main(["report", *words]) == 2
    assert said in capsys.readouterr().err and not Path("report.html").exists()


def test_report_of_a_run_whose_model_is_not_to_be_had(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*args, **options):
        raise dpq.errors.LabError("the weights are not to be had")

    monkeypatch.setattr(report_command, "capture", gone)
    assert main(["report", "runs"]) == 0
    assert "no graph of tiny: the weights" in capsys.readouterr().err and Path("report.html").exists()
    assert main(["report", "runs", "--graph", "tiny", "-o", "other.html"]) == 2
    assert not Path("other.html").exists()
