"""Checkpoints that do not fit, or are not whole, are refused, and leave everything as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from resuming import Net, engine_of, epoch, result_of, same
from torch import Tensor

import dpquant_compile as dpq
from dpquant_compile.errors import CheckpointError, LedgerError

OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": lambda: Net(width=6)}, "body.0.weight"),
    "buffer": ({"model": lambda: Net(frozen=5)}, "table"),
    "optimizer": ({"optimizer": lambda p: torch.optim.Adam(p, lr=0.1)}, "'SGD' saved, 'Adam' here"),
    "format": ({"compile_options": {"format": "uniform4"}}, "recipe: 'luq_fp4.*uniform4"),
    "rounding seed": ({"compile_options": {"seed": 8}}, "seed: 0 saved, 8 here"),
    "clipping": ({"max_grad_norm": 1.0}, r"max_grad_norm: \[0.5\] saved, \[1.0\] here"),
    "noise": ({"noise_multiplier": 2.0}, "noise_multiplier: 1.0 saved, 2.0 here"),
    "data": ({"samples": 49}, "dataset size: 48 saved, 49 here"),
    "micro-batches": ({"max_physical_batch_size": 12}, "max_physical_batch_size: 8 saved, 12 here"),
    "schedule": ({"schedule": {"beta": 3.0}}, r"What differs: scheduler\.beta: 10\.0 saved, 3\.0 here$"),
    "no schedule": ({"schedule": None}, "scheduler"),
    "secure mode": ({"secure": True}, "secure_mode: False saved, True here"),
}


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    engine = engine_of(schedule={})
    epoch(engine)
    return engine.state_dict()


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_run_is_refused_and_says_what_differs(name: str, trained: dict[str, Any]) -> None:
    options, message = OTHERS[name]
    engine = engine_of(**{"schedule": {}, **options})
    before = result_of(engine)
    with pytest.raises(CheckpointError, match=message):
        engine.load_state_dict(trained)
    after = result_of(engine)
    assert same(before, after)


def test_broken_checkpoints_are_refused(tmp_path: Path, trained: dict[str, Any]) -> None:
    engine = engine_of(schedule={})
    before = result_of(engine)
    with pytest.raises(CheckpointError, match="version 99"):
        engine.load_state_dict({**trained, "version": 99})
    for missing in ("optimizer", "noise", "config"):
        with pytest.raises(CheckpointError):
            engine.load_state_dict({key: value for key, value in trained.items() if key != missing})
    source = engine_of(schedule={})
    source.save_checkpoint(path=tmp_path / "c.pt")
    data = (tmp_path / "c.pt").read_bytes()
    for size in (0, 10, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.pt").write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"cut\.pt"):
            engine.load_checkpoint(path=tmp_path / "cut.pt")
    torch.save({"weights": 1}, tmp_path / "other.pt")
    for path in (tmp_path / "other.pt", tmp_path / "nowhere.pt"):
        with pytest.raises(CheckpointError, match=path.name):
            engine.load_checkpoint(path=path)
    assert same(result_of(engine), before)


def test_a_ledger_of_another_run_is_refused(tmp_path: Path, trained: dict[str, Any]) -> None:
    engine = engine_of(tmp_path, schedule={})
    before = models_state(engine)
    with pytest.raises((LedgerError, CheckpointError), match="different runs"):
        engine.load_state_dict(trained)
    assert same(models_state(engine), before)


def models_state(engine: dpq.PrivacyEngine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.run.session.model.state_dict().items()}


def test_a_failing_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    engine.save_checkpoint(path=tmp_path / "c.pt")
    old = (tmp_path / "c.pt").read_bytes()
    epoch(engine)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space left"):
        engine.save_checkpoint(path=tmp_path / "c.pt")
    assert (tmp_path / "c.pt").read_bytes() == old
