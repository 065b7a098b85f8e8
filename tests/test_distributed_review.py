"""Several processes: what each is told and what is compared, one fault at a time."""

import os
import re
from pathlib import Path
from typing import Any

import distributed_workers as workers
import pytest
import torch
import torch.distributed as dist
from distributed_workers import engine_of, epoch, rank
from processes import Raised, alone, succeeded, together
from test_distributed import close, same
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from dpquant_compile.privacy.data.poisson_loader import SharedUniform
from dpquant_compile.privacy.distributed import world as distributed
from dpquant_compile.privacy.distributed.world import World

# What runs on each process


def secure_epochs() -> dict[str, Any]:
    """The keys that sampling got, and the samples of two epochs."""
    keys: list[bytes] = []
    take = SharedUniform.take_key

    def noted(self: SharedUniform, key: bytes) -> None:
        keys.append(key)
        take(self, key)

    SharedUniform.take_key = noted  # type: ignore[method-assign]  # in a process of its own
    engine = engine_of(secure=True)
    return {"drawn": [epoch(engine), epoch(engine)], "keys": keys}


def apart_at(when: str, path: Path) -> None:
    """Something changes on rank 1 alone, right before a checkpoint or a step."""
    engine = engine_of(schedule={})
    if rank() == 1 and when == "checkpoint":
        engine.session.model.set_policy("none")
    elif rank() == 1:
        engine.run.optimizer.max_grad_norm = 0.7
    if when == "step":
        epoch(engine)
    engine.save_checkpoint(path=path)


def scheduler_of_rank_0(n_interval: int) -> None:
    """Rank 0 goes to the scheduler, the others to the next epoch."""
    engine = engine_of(schedule={"n_interval": n_interval})
    scheduler, engine.scheduler = engine.scheduler, None
    epoch(engine)
    if rank() == 0:
        scheduler.step()
    epoch(engine)


def unpicklable() -> None:
    World.current().on_first("a function", lambda: lambda: 0)


class Buffered(workers.Net):
    """With a buffer that hangs on the seed, as each process has its own."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("scale", torch.rand(()) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


def buffered() -> dict[str, Any]:
    own: list[Tensor] = []

    def wrap(model: nn.Module) -> nn.Module:
        own.extend(buffer.clone() for buffer in model.buffers())
        return model

    workers.Net = Buffered  # type: ignore[misc]  # in a process of its own
    engine = engine_of(wrap=wrap)
    buffers = dict(engine.session.model.named_buffers())
    return {"own": own, "buffers": {name: buffer.clone() for name, buffer in buffers.items()}, "drawn": epoch(engine)}


class Forked(nn.Module):
    """A parameter that only some calls use."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc, self.side = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        y: Tensor = self.fc(x.flatten(1))
        return y if extra is None else y + self.side(extra.flatten(1))


def forked() -> dict[str, Any]:
    """An epoch in which rank 1 alone uses `side`."""
    workers.Net = Forked  # type: ignore[assignment,misc]  # in a process of its own
    made = engine_of(spec={"budget": 0}).run
    before = made.session.model.side.weight.detach().clone()
    for x, y in made.loader:
        made.optimizer.zero_grad()
        made.criterion(made.session.model(x, x) if rank() == 1 else made.session.model(x), y).backward()
        made.optimizer.step()
    parameters = {name: p.detach().clone() for name, p in made.session.model.named_parameters()}
    return {"parameters": parameters, "moved": not torch.equal(before, parameters["side.weight"])}


def physical(options: dict[str, Any]) -> tuple[int, float]:
    engine = engine_of(**options)
    return engine.session.physical, engine.scheduler.sample_rate


# The tests


def test_secure_sampling_has_one_key_for_all_and_a_new_one_for_every_epoch(tmp_path: Path) -> None:
    first, second = succeeded(together(2, secure_epochs, folder=tmp_path))
    assert first["keys"] == second["keys"] and len(set(first["keys"])) == 2
    for result in (first, second):
        assert result["drawn"][0] != result["drawn"][1]
    for one, other in zip(first["drawn"], second["drawn"], strict=True):
        assert len(one) == len(other) == 4
        assert not any(set(a) & set(b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("checkpoint", r"differ at a checkpoint\. policy: \['.*'\] on rank 0, \[\] on rank 1"),
        ("step", r"differ at an optimizer step\. max_grad_norm: 0\.5 on rank 0, 0\.7 on rank 1"),
    ],
)
def test_what_differs_is_found_before_it_is_used(when: str, words: str, tmp_path: Path) -> None:
    for result in together(2, apart_at, when, tmp_path / "checkpoint", folder=tmp_path):
        assert isinstance(result, Raised) and result.kind == "DistributedError", result
        assert re.search(words, result.text), result.text
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize(("n_interval", "told"), [(1, "the samples of an analysis"), (2, "the policy of an epoch")])
def test_a_process_out_of_step_is_told_so(n_interval: int, told: str, tmp_path: Path) -> None:
    first, second = together(2, scheduler_of_rank_0, n_interval, folder=tmp_path)
    assert isinstance(second, Raised) and second.kind == "DistributedError", second
    assert f"it waits for the batches of an epoch of rank 0, which has come to {told}" in second.text
    assert isinstance(first, Raised) and first.kind == "DistributedError", first  # it has lost the other


def test_a_value_that_cannot_be_sent_leaves_no_process_waiting(tmp_path: Path) -> None:
    for result in together(2, unpicklable, folder=tmp_path, seconds=30):
        assert isinstance(result, Raised) and "lambda" in result.text


def test_buffers_are_those_of_rank_0(tmp_path: Path) -> None:
    first, second = succeeded(together(2, buffered, folder=tmp_path))
    assert first["own"] != second["own"] and same([first, second], "buffers")
    assert list(first["buffers"].values()) == first["own"]


def test_a_parameter_that_one_process_does_not_use_is_in_use_for_all(tmp_path: Path) -> None:
    first, second = succeeded(together(2, forked, folder=tmp_path))
    assert first["moved"] and same([first, second], "parameters")


def test_the_default_physical_batch_is_that_of_a_share(tmp_path: Path) -> None:
    """While the samples of an analysis, which ε hangs on, stay those of one process."""
    options = {"max_physical_batch_size": None, "samples": 1024, "batch": 128, "schedule": {"n_sample": 1}}
    one, *two = alone(physical, options, folder=tmp_path), *succeeded(together(2, physical, options, folder=tmp_path))
    assert one == (176, 1 / 6) and two == [(96, 1 / 6)] * 2


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_resume_with_the_default_physical_batch(before: int, after: int, tmp_path: Path) -> None:
    schedule: dict[str, Any] = {"max_physical_batch_size": None, "schedule": {"n_sample": 1}}
    options, path = {**schedule, "ledger_path": tmp_path / "ledger.json"}, tmp_path / "checkpoint"
    succeeded(together(before, workers.train_and_save, options, path, 2, folder=tmp_path))
    results = succeeded(together(after, workers.resume, options, path, folder=tmp_path))
    whole = alone(workers.whole_run, schedule, folder=tmp_path)
    assert all(results[0][name] == whole[name] for name in ("policies", "epsilon", "entries"))
    assert close(results[0]["parameters"], whole["parameters"], 1e-4)
    chosen = {**options, "max_physical_batch_size": 4}
    for result in together(after, workers.resume, chosen, path, folder=tmp_path):
        assert isinstance(result, Raised) and "max_physical_batch_size: " in result.text


def test_nccl_gets_tensors_that_it_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Analyses add up on the CPU. Without a GPU, by tensors that only say where they are."""
    sent = []

    class Done:
        def wait(self) -> None:
            pass

    def take(tensor: Tensor, **options: Any) -> Done:
        sent.append(tensor.device.type)
        return Done()

    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dist, "all_reduce", take)
    monkeypatch.setattr(dist, "broadcast", take)
    with FakeTensorMode():
        tensors = [torch.zeros(3), torch.zeros(2, device="cuda:0"), torch.zeros(2, 2, dtype=torch.float64)]
        sums = World(0, 2).sum(tensors)
        World(0, 2).copy_first(tensors)
    assert [total.device.type for total in sums] == ["cpu", "cuda", "cpu"]
    assert [total.shape for total in sums] == [tensor.shape for tensor in tensors]
    assert sent == ["cuda"] * 6


def test_every_restart_of_torchrun_has_names_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one node. The torchruns of several count restarts each by itself, so that names would differ."""
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "GROUP_"))]:
        monkeypatch.delenv(name)
    assert not distributed._restarts_are_ours({})
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert not distributed._restarts_are_ours({})
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    assert distributed._restarts_are_ours({}) and distributed._restarts_are_ours({"init_method": "env://"})
    assert not distributed._restarts_are_ours({"store": object()})
    assert not distributed._restarts_are_ours({"init_method": "file:///x"})
