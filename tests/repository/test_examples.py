"""The examples run on tiny settings, and print what they say that they show."""

import ast
import difflib
import gzip
import logging
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import dpquant_compile as dpq
from dpquant_compile import torchvision_compat
from dpquant_compile.numerics import formats
from tests.support.heavy import few
from tests.support.processes import on_disk

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
MINE = [
    *"plain_loop opacus_migration bert_frozen own_scheduler own_format reading_a_graph private_program".split(),
    *"resuming llm_lora opacus/imdb opacus/char_lstm".split(),
]

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Run]:
    """Runs an example in this process, which saves ten seconds of imports each, and gives what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(formats, "_FORMATS", dict(formats._FORMATS))  # own_format.py registers one

    def run_example(name: str, *options: str) -> str:
        path = str(EXAMPLES / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, *options])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    with torch.random.fork_rng(devices=[]):
        yield run_example


def percentages(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"([\d.]+)%", text)]


@pytest.mark.parametrize("name", MINE)
def test_help_says_what_it_shows(name: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(name, "--help")
    printed = " ".join(capsys.readouterr().out.split())
    first_line = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()[0].removeprefix('"""')
    assert ended.value.code == 0 and first_line in printed


def test_readme_lists_every_example() -> None:
    listed = re.findall(r"^\| \[(\w+\.py)\]\((\w+\.py)\) \|", (EXAMPLES / "README.md").read_text("utf-8"), re.MULTILINE)
    assert all(text == link for text, link in listed)
    assert sorted(text for text, _ in listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.heavy
def test_plain_loop_learns_within_its_target(run: Run) -> None:
    printed = run("plain_loop", "--epochs", "3", "--epsilon", "7", "--inner", "eager")
    epochs = re.findall(r"^epoch (\d): in FP4 (.*); test ([\d.]+)%; epsilon ([\d.]+)$", printed, re.MULTILINE)
    assert [row[0] for row in epochs] == ["1", "2", "3"]
    assert all(len(row[1].split(", ")) == 2 for row in epochs), "a budget of one half is two of four sites"
    assert float(epochs[-1][2]) > 30, "three epochs are far above chance, which is 10%"
    spent = [float(row[3]) for row in epochs]
    assert spent == sorted(spent) and 6.5 < spent[-1] <= 7, "the plan uses its target, and does not pass it"
    assert re.search(r"- training: 18 steps", printed) and re.search(r"- analysis: 1 step at", printed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Full backward hook is firing")  # stock Opacus
def test_opacus_migration_changes_five_lines_and_no_epsilon(run: Run) -> None:
    printed = run("opacus_migration", "--epochs", "2", "--inner", "eager")
    new = re.findall(r"^  \+ (.*)$", printed, re.MULTILINE)
    assert "What changes (5 lines)" in printed and len(new) == 5
    for word in ("dpq.compile(", "dpq.PrivacyEngine()", "criterion=criterion", "max_physical_batch_size=64"):
        assert sum(word in line for line in new) == 1
    rows = re.findall(r"^(before|after).*?([\d.]{10,}) +([\d.]+)%$", printed, re.MULTILINE)
    assert [row[0] for row in rows] == ["before", "after"] and rows[0][1] == rows[1][1]
    assert "The two epsilons are equal" in printed
    assert min(float(row[2]) for row in rows) > 25, "two epochs are far above chance, which is 10%"


SWAPS = [path.stem for path in sorted((EXAMPLES / "opacus").glob("*.py"))]


@pytest.mark.parametrize("name", SWAPS)
def test_the_engine_swap_changes_at_most_five_lines(name: str) -> None:
    source = (EXAMPLES / "opacus" / f"{name}.py").read_text(encoding="utf-8")
    found = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    before, after = (ast.get_source_segment(source, found[f"with_{engine}"]) for engine in ("opacus", "dpquant"))
    assert before is not None and after is not None
    changes = list(difflib.ndiff(before.splitlines()[1:], after.splitlines()[1:]))
    new = [line for line in changes if line.startswith("+ ")]
    assert 0 < len(new) <= 5 and len(new) >= sum(line.startswith("- ") for line in changes)
    assert all(f"# {number}" in line for number, line in enumerate(new, 1)), "each is numbered"
    layers = source.count("opacus.layers")  # Opacus' layers serve both engines
    assert source.count("opacus.") - layers + source.count("dpq.") == sum(
        part.count(word)
        for part in (before, after, ast.get_docstring(ast.parse(source)) or "")
        for word in ("opacus.", "dpq.")
    ), "nothing else in the program depends on the engine"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Full backward hook is firing")  # stock Opacus
@pytest.mark.parametrize("name", few(["mnist", "cifar10", "dcgan"], "mnist"))
def test_both_engines_train_for_the_same_epsilon(name: str, run: Run) -> None:
    spent = []
    for engine in ("opacus", "dpquant"):
        torch.manual_seed(0)
        printed = run(f"opacus/{name}", "--smoke", "--engine", engine)
        spent.append(re.findall(r"^epoch \d: .* epsilon ([\d.]+) at", printed, re.MULTILINE))
    assert spent[0] == spent[1] and len(spent[0]) == 2 and "0.0000" not in spent[0]


def parts_of(explanation: str) -> tuple[str, str]:
    """The table of sites, and that of per-sample gradients."""
    sites, _, gradients = explanation.partition("per-sample gradients")
    return sites, gradients


@pytest.mark.heavy
def test_bert_trains_what_is_not_frozen(run: Run) -> None:
    printed = run("bert_frozen", "--epochs", "2")
    (trained, total) = re.findall(r"([\d,]+) of ([\d,]+) parameters are trained", printed)[0]
    assert 0 < int(trained.replace(",", "")) < int(total.replace(",", "")) / 2
    sites, gradients = parts_of(printed)
    assert "bert.bert.encoder.layer.0.attention.self.query " in sites, "a frozen layer is a site all the same"
    assert "layer.1.output.dense.weight" in gradients and "classifier.bias" in gradients
    assert "layer.0." not in gradients and "embeddings" not in gradients
    assert len(set(re.findall(r"^epoch \d: (\d+of\d+:\w+);", printed, re.MULTILINE))) == 2, "a policy for each epoch"
    assert re.search(r"^epsilon [\d.]+ at delta", printed, re.MULTILINE) and "mechanics alone" in printed


@pytest.mark.heavy
def test_bert_takes_data_and_weights_from_folders(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision_compat.models()  # before transformers, which imports torchvision
    # The handler of transformers' logger holds the standard error of the test that imported it first.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    from transformers import BertConfig, BertModel, BertTokenizer

    lines = (EXAMPLES / "sentence_pairs.tsv").read_text(encoding="utf-8")
    for part in ("train20k", "dev"):
        with gzip.open(tmp_path / f"snli_{part}.tsv.gz", "wt", encoding="utf-8") as file:
            file.write(lines + "-\tno label\tleft out\n")
    words = sorted(set(lines.lower().split()))
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "weights")
    config = BertConfig(
        vocab_size=len(words) + 5,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=48,
    )
    BertModel(config).save_pretrained(tmp_path / "weights")
    options = ["--data", str(tmp_path), "--weights", str(tmp_path / "weights"), "--limit", "30", "--epochs", "1"]
    printed = run("bert_frozen", *options)
    assert printed.startswith("30 pairs, ") and "of 14 sites in int4" in printed
    assert "mechanics alone" not in printed


def schedules(printed: str) -> list[tuple[list[set[str]], str]]:
    """For each run the sites of its epochs, and the purposes that privacy was spent on."""
    found = []
    for text in printed.strip().split("\n\n"):
        epochs = [set(names.split(", ")) for names in re.findall(r"^  epoch \d: (.*)$", text, re.MULTILINE)]
        found.append((epochs, text.splitlines()[-1].partition("by purpose: ")[2]))
    return found


@pytest.mark.heavy
def test_own_scheduler_gives_turns_and_keeps_groups_together(run: Run) -> None:
    by_site, by_group, measured = schedules(run("own_scheduler", "--epochs", "3", "--inner", "eager"))
    assert by_site[0] == [{"0", "1.conv1"}, {"1.conv2", "2.conv1"}, {"2.conv2", "0"}]
    assert by_group[0] == [{"0"}, {"1.conv1", "1.conv2"}, {"2.conv1", "2.conv2"}]
    groups = ({"0"}, {"1.conv1", "1.conv2"}, {"2.conv1", "2.conv2"}, {"5"})
    assert len(measured[0]) == 3 and all(epoch in groups for epoch in measured[0])
    assert "analysis" not in by_site[1] + by_group[1] and by_site[1] == by_group[1]
    assert measured[1].startswith(f"{by_site[1]}, analysis "), "training costs the same; measuring costs something"


@pytest.mark.slow
def test_own_format_is_sound_and_in_use(run: Run) -> None:
    printed = run("own_format", "--epochs", "2", "--backend", "reference")
    assert re.search(r"^Formats now: luq_fp4, .*, square4$", printed, re.MULTILINE)
    (bias,) = re.findall(r"at most ([\d.]+) standard errors", printed)
    assert float(bias) < 5
    assert "A sample rounds the same in another batch: True" in printed
    rows = re.findall(r"^(\w+4) +([\d.]+) dB +([\d.]+) dB +([\d.]+)%$", printed, re.MULTILINE)
    decibels = {row[0]: float(row[1]) for row in rows}
    assert list(decibels) == ["luq_fp4", "uniform4", "square4"]
    assert decibels["square4"] > decibels["luq_fp4"] + 2, "its levels are closer to each other"
    assert min(float(row[3]) for row in rows) > 25, "two epochs are far above chance, which is 10%"
    assert "3 of 3 sites in square4" in printed and "reference (emulated)" in printed


def test_private_program_shows_where_clipping_happens(run: Run, tmp_path: Path) -> None:
    forward, backward = (
        run("private_program", "--out", str(tmp_path / "page")).split("== private_forward")[1].split("== ")
    )
    assert "\nnone" in forward
    found = re.findall(r"^(squared_norms|clip_factors|clipped_sum)", backward, re.MULTILINE)
    assert found == 6 * ["squared_norms"] + ["clip_factors"] + 6 * ["clipped_sum"]
    assert (tmp_path / "page" / "private.html").exists()


def test_reading_a_graph_answers_its_questions(run: Run, tmp_path: Path) -> None:
    printed = run("reading_a_graph", "--out", str(tmp_path / "pictures"))
    assert "sites that feed block.conv2: block.conv1\n" in printed
    assert "sites that feed down: block.conv2, stem\n" in printed, "by the block, and by its skip connection"
    assert "sites that feed fc: down\n" in printed, "through the transposed convolution, which is no site"
    assert "skip connections: relu → add\n" in printed
    assert "sites behind the input: 5 of 5\n" in printed
    (share,) = re.findall(r"share of the FLOPs in low precision: (\d+)%", printed)
    assert 0 < int(share) < 100
    assert re.search(r"^up +conv_transpose2d .*skipped", printed, re.MULTILINE)
    assert re.search(r"^\+.*low_precision_site", printed, re.MULTILINE), "the difference shows the new operator"
    assert "mark_sites" in printed and "track_batch" in printed
    assert "<svg" in (tmp_path / "pictures" / "graph.svg").read_text(encoding="utf-8")
    assert "block.conv1" in (tmp_path / "pictures" / "graph.html").read_text(encoding="utf-8")


@pytest.mark.heavy
def test_resuming_after_a_kill_changes_nothing(tmp_path: Path) -> None:
    """In a process of its own, from another folder and a checkout that need not be installed."""
    command = [sys.executable, EXAMPLES / "resuming.py", "--epochs", "3", "--die-in", "1", "--inner", "eager"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    printed = done.stdout
    assert "exit code -9, outcome written: False" in printed
    (saved, on_disk) = re.findall(r"in the checkpoint: (\d+), on disk: (\d+)", printed)[0]
    assert 8 <= int(saved) < int(on_disk), "the kill came in the middle of an epoch that the ledger has in part"
    assert "goes on after 1 epochs" in printed
    compared = dict(re.findall(r"^  (\w+) +(equal|DIFFERENT)$", printed, re.MULTILINE))
    assert compared == dict.fromkeys(("parameters", "policies", "scores", "ledger", "epsilon"), "equal")
    folders = [tmp_path / "out" / "resuming" / name for name in ("whole", "killed")]
    outcomes = [torch.load(folder / "outcome.pt", weights_only=True) for folder in folders]
    assert outcomes[0] == outcomes[1] and float(outcomes[0]["epsilon"]) > 0
    assert len(outcomes[0]["policies"].split()) == 3
    steps = [sum(e.steps for e in dpq.Ledger.read(folder / "ledger.json").entries) for folder in folders]
    assert steps == [3 * 8 + 2] * 2, "three epochs of eight steps, two analyses, and nothing twice"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
def test_lora_protects_the_unit_that_was_asked_for(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    printed = run("llm_lora", "--smoke", "--unit", "user", "--pieces", "2", "--out", str(tmp_path / "adapter"))
    assert "samples of 128 bytes; a sample is a user" in printed
    (trained, total) = re.findall(r"([\d,]+) of ([\d,]+) parameters are trained", printed)[0]
    assert 0 < int(trained.replace(",", "")) < int(total.replace(",", "")) / 4
    spent = [float(found) for found in re.findall(r"^epoch \d: .*epsilon ([\d.]+)$", printed, re.MULTILINE)]
    assert len(spent) == 2 and spent[0] < spent[1] <= 8 and "one user more or less" in printed
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Full backward hook is firing")  # stock Opacus
@pytest.mark.parametrize("name", few(["imdb", "char_lstm"], "imdb"))
def test_scripts_of_opacus_change_five_lines_and_train_with_both_engines(name: str, run: Run) -> None:
    text = (EXAMPLES / "opacus" / f"{name}.py").read_text(encoding="utf-8")
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    before, after = (
        [line.partition("#")[0].strip() for line in ast.get_source_segment(text, functions[f]).splitlines()[2:]]
        for f in ("with_opacus", "with_dpquant")
    )
    changed = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert 0 < len(changed) <= 5, changed
    rows = [
        re.findall(
            r"^epoch \d: test ([\d.]+)%; epsilon (.*)$", run(f"opacus/{name}", "--smoke", "--engine", engine), re.M
        )
        for engine in ("opacus", "dpquant")
    ]
    assert [row[1] for row in rows[0]] == [row[1] for row in rows[1]], "the same epsilon after every epoch"
    assert all(float(found[-1][0]) > 65 for found in rows), "far above chance"


def test_resuming_refuses_an_epoch_that_is_not_there(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("resuming", "--epochs", "2", "--die-in", "2")
    assert ended.value.code == 2 and "give an epoch from 0 to 1" in capsys.readouterr().err


@pytest.mark.heavy
@pytest.mark.parametrize("options", [[], ["--shard"]], ids=["whole", "sharded"])
def test_example_runs_under_torchrun(options: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--epochs", "2", "--inner", "eager", *options]
    done = subprocess.run(
        [*command, ROOT / "examples" / "ddp.py", *options, "--out", tmp_path / "out"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("differentially private") == 1  # said by rank 0 alone
    assert (tmp_path / "out" / "checkpoint").is_dir() and on_disk(tmp_path / "out" / "ledger.json") > 2
