"""Watching a run: logs, the progress bar and the history show policies and ε, and nothing that was not noised."""

import itertools
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

import dpquant_compile as dpq
from dpquant_compile.errors import PrivacySpecError
from dpquant_compile.privacy.logging import JsonlLog, TensorBoardLog, progress
from dpquant_compile.privacy.schedule.history import History
from tests.support.schedules import SITES, Constant, engine_of, run_epochs

FIELDS = {"epoch", "policy", "probabilities", "scores", "analysed", "spent", "epsilon", "epsilons", "delta"}


# What is kept


def numbers_in(value: Any) -> list[float]:
    """Every number in nested plain data and tensors."""
    if isinstance(value, Tensor):
        return value.double().flatten().tolist()
    if isinstance(value, dict):
        return [n for v in value.values() for n in numbers_in(v)]
    if isinstance(value, list | tuple):
        return [n for v in value for n in numbers_in(v)]
    return [float(value)] if isinstance(value, int | float) else []


def test_only_noised_values_are_kept_logged_or_saved(tmp_path: Path) -> None:
    raw = [1234.56789 + i for i in range(6)]
    engine = engine_of()
    log = JsonlLog(tmp_path / "log.jsonl")
    scheduler = dpq.Scheduler(engine, estimator=Constant(raw, 5.0), n_interval=1, ema=1.0, logs=[log])
    for _ in range(3):
        scheduler.step()
    state = engine.state_dict()
    places = [state["scheduler"], state, scheduler.history.state_dict(), list(scheduler.scores.values())]
    text = log.path.read_text()
    for value in raw:
        assert str(value) not in text
        assert all(abs(number - value) > 1e-4 for place in places for number in numbers_in(place))
    fields = {"epoch", "scores", "analyses", "history", "policy"}
    assert set(state["scheduler"]) == fields and set(state["scheduler"]["history"][0]) == {
        *("epoch", "policy", "probabilities", "scores", "analysed", "spent")
    }


@pytest.mark.slow
def test_history_is_drawn_and_kept(tmp_path: Path) -> None:
    engine = engine_of()
    scheduler = dpq.Scheduler(engine, epochs=4, estimator=Constant([0.1 * i for i in range(6)], 1.0), n_interval=1)
    for _ in range(4):
        for _ in engine.run.loader:
            pass
        scheduler.step()
    history = scheduler.history
    drawn = [history.heat_map(tmp_path / "a.png"), history.probability_plot(tmp_path / "b.png")]
    drawn.append(history.privacy_plot(tmp_path / "c.png", 1e-5))
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in drawn)
    again = History(SITES)
    again.load_state_dict(history.state_dict())
    assert list(again) == list(history) and again[2].spent[-1] == ("analysis", 1 / 8, 1.0, 1)
    other = dpq.Scheduler(engine_of(), epochs=4, estimator=Constant(0.0, 1.0), n_interval=1)
    other.load_state_dict(scheduler.state_dict())
    assert other.state_dict() == scheduler.state_dict() and other.scores == scheduler.scores
    with pytest.raises(PrivacySpecError, match="other policies"):
        dpq.Scheduler(engine_of(), policies={"a": ["0"]}).load_state_dict(scheduler.state_dict())


# Logs


def test_jsonl_has_one_line_per_epoch_with_public_fields_only(tmp_path: Path) -> None:
    engine, log = engine_of(), JsonlLog(tmp_path / "log.jsonl")
    scheduler = dpq.Scheduler(engine, epochs=3, estimator=Constant(0.1, 1.0), n_interval=1, logs=[log], delta=1e-6)
    run_epochs(scheduler, 3)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in log.path.read_text(encoding="utf-8").splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    for line, record in zip(lines, scheduler.history, strict=True):
        assert set(line) == FIELDS and tuple(line["policy"]) == record.policy and line["scores"] == record.scores
    epsilons = [line["epsilon"] for line in lines]
    assert 0 < epsilons[0] < epsilons[1] < epsilons[2] == engine.get_epsilon(1e-6)
    assert set(lines[0]["epsilons"]) == {"training"} and set(lines[2]["epsilons"]) == {"training", "analysis"}


def test_a_resumed_run_tells_no_epoch_twice(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "log.jsonl")
    first, second = (
        dpq.Scheduler(engine_of(), epochs=4, estimator=Constant(0.1, 1.0), n_interval=1, logs=[log]) for _ in (0, 1)
    )
    run_epochs(first, 2)
    second.engine.load_state_dict(first.engine.state_dict())
    run_epochs(second, 2)
    assert [json.loads(line)["epoch"] for line in log.path.read_text().splitlines()] == [1, 2, 3, 4]


def test_tensorboard_reads_back_scalars_of_the_same_fields(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path)
    scheduler = dpq.Scheduler(engine_of(), epochs=2, estimator=Constant(0.1, 1.0), n_interval=1, logs=[log])
    run_epochs(scheduler, 2)
    events = EventAccumulator(str(tmp_path)).Reload()  # flushed after each epoch: the writer is still open
    scalars = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    assert set(scalars) == {
        *("privacy/epsilon", "privacy/epsilon of training", "privacy/epsilon of analysis"),
        *(f"{kind}/{site}" for kind in ("scores", "probabilities") for site in SITES),
        "schedule/sites in low precision",
    }
    assert set(scalars["privacy/epsilon"]) == {1, 2}
    assert scalars["privacy/epsilon"][2] == pytest.approx(scheduler.engine.get_epsilon(1e-5))
    assert scalars["schedule/sites in low precision"] == {1: 2, 2: 2}
    for site in SITES:
        assert scalars[f"scores/{site}"][2] == pytest.approx(scheduler.history[1].scores[site])


def test_tensorboard_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(PrivacySpecError, match="pip install tensorboard"):
        TensorBoardLog(tmp_path)


# The progress bar


def test_progress_gives_all_batches_and_is_silent_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    plain, watched = engine_of(), engine_of()
    expected = [(len(x), plain.session.micro.ids.tolist()) for x, _ in plain.run.loader]
    got = [(len(x), watched.session.micro.ids.tolist()) for x, _ in progress(watched, delta=1e-5)]
    assert got == expected and len(got) >= 8
    assert capsys.readouterr() == ("", "")
    assert watched.session.micro is None and watched.ledger.entries == plain.ledger.entries


def test_progress_shows_epsilon_and_policy_and_no_loss(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpquant_compile.privacy.logging._EVERY", 0.0)
    engine = engine_of()
    engine.run.session.model.set_policy(["1", "4"])
    for _ in progress(engine, delta=1e-5, title="epoch 7", show=True):
        time.sleep(0.12)  # tqdm draws at most ten times a second
    out, shown = capsys.readouterr()
    epsilons = re.findall(r"ε (\d+\.\d\d)", shown)
    assert out == "" and "epoch 7" in shown and epsilons[-1] == f"{engine.get_epsilon(1e-5):.2f}" != epsilons[0]
    assert str(engine.run.session.model.policy) in shown and "/s" in shown
    assert not any(word in shown.lower() for word in ("loss", "accura", "norm", "grad"))


def test_the_bar_tells_no_size_of_a_batch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of Poisson batches are facts about the data: the rate is that of the expected size."""
    shown = []
    for drawn in ([], list(range(8))):  # no sample, or all that one micro-batch holds
        clock = itertools.count()
        monkeypatch.setattr("dpquant_compile.privacy.logging.time.perf_counter", lambda clock=clock: float(next(clock)))
        monkeypatch.setattr(
            UniformWithReplacementSampler, "__iter__", lambda self, drawn=drawn: iter([drawn] * len(self))
        )
        for _ in progress(engine_of(), delta=1e-5, show=True):
            time.sleep(0.12)
        shown.append(re.findall(r", (\d+/s)", capsys.readouterr().err))
    assert shown[0] == shown[1] and shown[0]


def test_a_loop_that_is_left_ends_the_iteration(capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_of()
    for _ in progress(engine, delta=1e-5, show=True):
        break
    assert engine.session.micro is None
    engine.state_dict()  # no loop is under way
    capsys.readouterr()
