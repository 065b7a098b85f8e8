"""What the tests of several processes run on each of them.

As a script, under torchrun, it is a run that kills one of its own processes once and goes on from its checkpoint.
"""

import hashlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import dpquant_compile as dpq
from dpquant_compile.privacy.accounting import ledger_file
from dpquant_compile.privacy.distributed import world as distributed
from dpquant_compile.privacy.distributed.shards import local_part
from dpquant_compile.privacy.distributed.world import World, call_roll
from dpquant_compile.privacy.mechanism import gaussian
from dpquant_compile.privacy.mechanism import optimizer as optimizer_module
from dpquant_compile.privacy.mechanism.gaussian import GaussianStream, Part
from tests.support.private import coarsest
from tests.support.processes import Raised, meet, settle_down

EPOCHS, DELTA = 3, 1e-5

# Options of a run without noise, whose sums are those of low precision.
ALL_LOW: dict[str, Any] = {"policy": "all", "noise_multiplier": 0.0}


# The run


class Net(nn.Module):
    """Four sites; images [B, 1, 4, 4] to 3 classes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.body, self.side, self.fc = nn.Linear(64, width), nn.Linear(16, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.fc(torch.relu(self.body(hidden) + self.side(x.flatten(1))))


def rank() -> int:
    return World.current().rank


def records(samples: int = 48) -> TensorDataset:
    x = torch.randn(samples, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x[:, 0, 0, 0] > 0).long() + (x[:, 0, 1, 1] > 1).long())


def engine_of(
    *,
    width: int = 8,
    samples: int = 48,
    batch: int = 12,
    secure: bool = False,
    ledger_path: Path | None = None,
    lr: float = 0.2,
    policy: Any = None,
    schedule: dict[str, Any] | None = None,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    spec: dict[str, Any] | None = None,
    loader: dict[str, Any] | None = None,
    data: Any = None,
    target: dict[str, float] | None = None,
    **options: Any,
) -> dpq.PrivacyEngine:
    """A run before its first step. Seeds differ by rank: what processes have in common must not hang on them."""
    torch.manual_seed(5 + rank())
    model = dpq.compile(Net(width), **{"budget": 2, "backend": "reference", "inner": "eager", **coarsest(spec or {})})
    model.train()
    given = {"batch_size": batch, "generator": torch.Generator().manual_seed(2 + rank()), **(loader or {})}
    engine = dpq.PrivacyEngine(accountant="rdp", secure_mode=secure, ledger_path=ledger_path, **(target or {}))
    made = engine.make_private(
        module=wrap(model),
        optimizer=torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data or records(samples), **given),
        **{"noise_multiplier": 1.0, "max_grad_norm": 0.5, "max_physical_batch_size": 4, **options},
        **({} if secure else {"noise_generator": torch.Generator().manual_seed(3 + rank())}),
    )
    assert made[0] is model
    if policy is not None:
        model.set_policy(policy)
    if schedule is not None:
        dpq.Scheduler(engine, **{"epochs": EPOCHS, "n_interval": 1, "n_sample": 6, **schedule})
    return engine


def epoch(engine: dpq.PrivacyEngine, each: Callable[[], object] = lambda: None) -> list[list[int]]:
    """One epoch and the scheduler's step: the samples of each step on this process. `each` is called after steps."""
    made, drawn = engine.run, []
    for x, y in made.loader:
        micro = made.session.micro
        drawn += [[]] if micro.first else []
        drawn[-1] += micro.ids.tolist()
        made.optimizer.zero_grad()
        made.criterion(made.session.model(x), y).backward()
        made.optimizer.step()
        if micro.last:
            each()
    if engine.scheduler is not None:
        engine.scheduler.step()
    return drawn


def outcome(engine: dpq.PrivacyEngine) -> dict[str, Any]:
    """What runs are compared by."""
    scheduler = engine.scheduler
    return {
        "parameters": {n: whole(p) for n, p in engine.session.model.named_parameters()},
        "policies": None if scheduler is None else [record.policy for record in scheduler.history],
        "scores": None if scheduler is None else scheduler.scores,
        "epsilon": engine.get_epsilon(DELTA),
        "entries": [repr(entry) for entry in engine.ledger.entries],
        "sampler": hashlib.sha256(engine.run.loader.generator.get_state().numpy().tobytes()).hexdigest(),
    }


def sharded(model: nn.Module) -> nn.Module:
    """The model of rank 0, by `fully_shard` on all processes; as it is without a group."""
    if dist.is_initialized():
        from torch.distributed.fsdp import fully_shard

        for tensor in model.parameters():  # seeds differ, and no process sees the whole model of another later on
            dist.broadcast(tensor.data, 0)
        for block in (model.conv, model.body):
            fully_shard(block)
        fully_shard(model)
    return model


def whole(tensor: Any) -> Tensor:
    """A tensor, or all of one that is spread over the processes."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def several(*jobs: tuple[Any, ...]) -> list[Any]:
    """Some works one after the other, `(work, *args)` each, in one group: what each gave, or how it ended."""
    results: list[Any] = []
    for work, *args in jobs:
        try:
            results.append(work(*args))
        except Exception as error:
            results.append(Raised(type(error).__name__, str(error), traceback.format_exc()))
    return results


# What the tests run


def gradients(options: dict[str, Any]) -> dict[str, Any]:
    """The gradients of each step of an epoch, at weights that stay, and the samples."""
    engine, seen = engine_of(**{"lr": 0.0, **options}), []
    parameters = engine.session.stored
    drawn = epoch(engine, lambda: seen.append({n: whole(p.grad) for n, p in parameters.items()}))
    return {"gradients": seen, "drawn": drawn, "expected": engine.run.loader.expected_batch_size}


def whole_run(options: dict[str, Any]) -> dict[str, Any]:
    """All epochs with their analyses."""
    engine = engine_of(**{"schedule": {}, **options})
    drawn = [epoch(engine) for _ in range(EPOCHS)]
    return {**outcome(engine), "drawn": drawn}


def with_a_twist(options: dict[str, Any], twist: str) -> dict[str, Any]:
    """Two epochs, in the first of which something happens on rank 1 that should not."""
    engine, first = engine_of(**options), rank() == 0
    model, made = engine.session.model, engine.run

    def each() -> None:
        if first:
            return
        if twist == "parameters":
            model.fc.bias.data[0] += 1e-3
        elif twist == "mode":
            model.norm.eval()
        elif twist == "frozen":
            model.fc.bias.requires_grad_(False)
        elif twist == "policy":
            model.set_policy("none")
        elif twist == "ledger":
            engine.ledger.spend("training", q=0.5, sigma=2.0)
        elif twist == "noise":
            made.optimizer.noise_multiplier = 3.0
        elif twist == "scores":
            engine.scheduler._state.scores["fc"] += 1.0
        elif twist == "sampler":
            made.loader.generator.manual_seed(99)

    epoch(engine, each)
    epoch(engine)
    return outcome(engine)


def by_hand() -> None:
    """A step on a batch that on rank 1 did not come from the loader."""
    made = engine_of().run
    for x, y in made.loader:
        if rank() == 1:
            made.session.announce(None)
        made.criterion(made.session.model(x), y).backward()
        made.optimizer.step()


def settings(per_rank: Sequence[dict[str, Any]]) -> Any:
    """`make_private` with other settings on each rank."""
    engine = engine_of(**per_rank[rank()])
    return {n: p.detach().clone() for n, p in engine.session.model.named_parameters()}


def subsets() -> None:
    """Each process has split the data by a seed of its own."""
    order = torch.randperm(48, generator=torch.Generator().manual_seed(rank()))
    engine_of(data=Subset(records(), order.tolist()))


def wrapped(kind: str) -> dict[str, Any]:
    """A model in one of torch's wrappers."""
    wraps: dict[str, Callable[[nn.Module], nn.Module]] = {"plain": lambda model: model}
    if kind == "ddp":
        wraps["ddp"] = nn.parallel.DistributedDataParallel
    engine = engine_of(wrap=wraps[kind])
    epoch(engine)
    return outcome(engine)


def sampler_of_torch() -> None:
    data = records()
    engine_of(loader={"sampler": torch.utils.data.DistributedSampler(data)}, data=data)


def chosen_by_rank() -> Any:
    """A chooser that would choose otherwise on each process."""
    mode = SimpleNamespace(choose=lambda epoch, sites, k: list(sites)[rank() : rank() + k])
    engine = engine_of(schedule={"mode": mode})
    return [sorted(engine.session.model.policy)] + [outcome(engine)["policies"] for _ in [epoch(engine)]]


class Mean:
    """An estimator of one's own, which knows nothing of processes: how many samples it was given."""

    sigma = 1e-9
    clip = 1.0

    def sensitivity(self, adjacency: str) -> float:
        return 1.0

    def measure(self, setting: Any, policies: Sequence[Any], batches: Any) -> Tensor:
        return torch.full((len(policies),), float(sum(len(batch.ids) for batch in batches)), dtype=torch.float64)

    def divisor(self, setting: Any) -> float:
        return 1.0


def noise_alone(options: dict[str, Any], fault: str = "", epochs: int = 2, load: Path | None = None) -> Tensor:
    """The gradients of all steps, `[steps, values]`, without anything of the data: zero sums, and noise.

    A fault is that of rank 1 alone. `load` is a checkpoint to go on from.
    """
    engine, seen = engine_of(**{"lr": 0.0, "policy": "none", "width": 150, **options}), []
    made, parameters = engine.run, engine.session.stored
    add, part_of = optimizer_module.add_part, Part.of
    if fault and rank() == 1:
        if fault == "no noise":
            optimizer_module.add_part = lambda noise, sums, std, part: add(noise, sums, 0.0, part)
        elif fault == "the part of another":
            optimizer_module.add_part = lambda noise, sums, std, part: add(noise, sums, std, part_of(part.whole, 0, 2))
        elif fault == "a part that is told":
            Part.of = lambda whole, rank, size: part_of(whole, 0, size)
        elif fault == "another place":
            made.noise.skip(1)
    if load is not None and load.exists():
        engine.load_checkpoint(path=load)
    for _ in range(epochs):
        for x, y in made.loader:
            last = made.session.micro.last
            made.optimizer.zero_grad()
            (made.criterion(made.session.model(x), y) * 0).backward()
            made.optimizer.step()
            if last:
                seen.append(torch.cat([whole(p.grad).flatten() for p in parameters.values()]))
    if load is not None and not load.exists():
        engine.save_checkpoint(path=load)
    return torch.stack(seen)


def own_noise() -> tuple[bytes, Tensor]:
    """In secure mode: a digest of this process' key, and what it drew itself."""
    keys, drawn = set(), []
    draw = GaussianStream.normal_like

    def noted(self: GaussianStream, tensors: Sequence[Tensor], std: float, part: Part) -> list[Tensor]:
        result = draw(self, tensors, std, part)
        keys.add(hashlib.sha256(self._key).digest())
        drawn.append(torch.cat([one.flatten() for one in result]))
        return result

    GaussianStream.normal_like = noted  # in a process of its own
    noise_alone({"secure": True})
    (key,) = keys
    return key, torch.cat(drawn)


def same_entropy() -> None:
    """As on machines that are copies of one another."""
    gaussian.os = SimpleNamespace(urandom=bytes)
    engine_of(secure=True)


def stale_world() -> None:
    """The run was made on as many processes as there are, and believes in more."""
    engine = engine_of()
    engine.run.optimizer.world.size += 1
    engine.run.optimizer.world.differing = lambda facts: {}
    epoch(engine)


def own_estimator() -> tuple[dict[str, float], float]:
    engine = engine_of(schedule={"estimator": Mean(), "ema": 1.0})
    epoch(engine)
    return engine.scheduler.scores, engine.get_epsilon(DELTA)


def secure_run() -> dict[str, Any]:
    """An epoch in secure mode, with noise that can be told from the sums by its size."""
    found = gradients({"secure": True, "noise_multiplier": 100.0, "width": 300})
    engine = engine_of(secure=True, schedule={})
    epoch(engine)
    return {**found, **outcome(engine)}


def dying(folder: Path, victim: int, at: int, options: dict[str, Any] | None = None) -> Any:
    """A run of which one process is killed after its step number `at`, before the next."""
    engine, steps = engine_of(ledger_path=folder / "ledger.json", schedule={}, **(options or {})), [0]
    before = [local_part(p).clone() for p in engine.session.model.parameters()]

    def each() -> None:
        steps[0] += 1
        if steps[0] == at:
            before[:] = [local_part(p).clone() for p in engine.session.model.parameters()]
            if rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        for _ in range(EPOCHS):
            epoch(engine, each)
    except dpq.errors.DistributedError as error:
        now = map(local_part, engine.session.model.parameters())
        same = all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        return str(error), steps[0], same
    return "it never noticed", steps[0], False


def slow_ledger(folder: Path) -> list[float]:
    """When each step had its entry on disk (rank 0, which takes its time), and when it was done (the others)."""
    moments: list[float] = []
    write = ledger_file.write_whole

    def slowly(*args: Any) -> None:
        time.sleep(0.3)
        write(*args)
        moments.append(time.monotonic())

    engine = engine_of(ledger_path=folder / "ledger.json")
    if rank() == 0:
        ledger_file.write_whole = slowly
        epoch(engine)
    else:
        assert engine.ledger.path is None
        epoch(engine, lambda: moments.append(time.monotonic()))
    return moments


def train_and_save(options: dict[str, Any], path: Path, epochs: int, more: int = 0) -> dict[str, Any]:
    """Some epochs, a checkpoint, and epochs that it does not have."""
    engine = engine_of(**{"schedule": {}, **options})
    for _ in range(epochs):
        epoch(engine)
    engine.save_checkpoint(path=path, checkpoint_dict={"note": "mine", "extra": torch.arange(3)})
    for _ in range(more):
        epoch(engine)
    return outcome(engine)


def resume(options: dict[str, Any], path: Path, again: Path | None = None) -> dict[str, Any]:
    """Go on from a checkpoint to the end."""
    engine = engine_of(**{"schedule": {}, **options})
    rest = engine.load_checkpoint(path=path)
    assert rest["note"] == "mine" and rest["extra"].tolist() == [0, 1, 2]
    drawn = [epoch(engine) for _ in range(engine.scheduler.epoch, EPOCHS)]
    if again is not None:
        engine.save_checkpoint(path=again)
    return {**outcome(engine), "drawn": drawn}


def other_ledger(options: dict[str, Any], path: Path) -> None:
    """A checkpoint that does not belong to the ledger, as only rank 0 can see."""
    engine = engine_of(**{"schedule": {}, **options})
    engine.load_checkpoint(path=path)


def state_on_each() -> Any:
    engine = engine_of()
    return sorted(engine.state_dict()) if rank() == 0 else engine.state_dict()


def budget(target: dict[str, float]) -> Any:
    """Steps until the target stops the run."""
    engine, steps = engine_of(target=target), []
    try:
        for _ in range(20):
            epoch(engine, lambda: steps.append(1))
    except dpq.errors.PrivacyBudgetError:
        return len(steps), engine.get_epsilon(target["target_delta"])
    return None


def collectives() -> dict[str, Any]:
    """Each method of `World`."""
    world, results = World.current(), {}
    distributed.BUCKET_BYTES = 64
    shapes = [(3, 5), (), (40,), (0,), (2, 2, 2)]
    own = [torch.full(shape, float(world.rank + 1)) for shape in shapes] + [torch.tensor([world.rank + 1])]
    results["buckets"] = distributed.buckets(own)
    results["sums"] = world.sum(own)
    results["bytes"] = world.traffic.bytes
    layout = torch.channels_last
    tensors = [
        torch.full((2, 3, 4, 4), float(world.rank)).contiguous(memory_format=layout),
        torch.tensor([world.rank == 0, False]),
        torch.arange(5) + world.rank,
    ]
    world.copy_first(tensors)
    results["copies"] = tensors
    results["share"] = world.share(torch.arange(10)).tolist()
    results["told"] = world.on_first("a list", lambda: ["rank", world.rank])
    results["gathered"] = world.gathered(world.rank)

    class OddError(Exception):  # cannot be pickled, being local
        pass

    def fail() -> None:
        raise OddError("no")

    try:
        world.on_first("a failure", fail)
    except Exception as error:
        results["error"] = (type(error).__name__, str(error))
    results["differing"] = world.differing({"a": 1, "b": world.rank // 2})
    session: Any = SimpleNamespace(used=frozenset({"x", str(world.rank)}))
    session.add_used = lambda names: setattr(session, "used", session.used | set(names))
    call_roll(world, session, {"a": 1})
    results["used"] = session.used
    edges = [0, 32, 32, 70]
    results["parts"] = world.sum_parts([torch.ones(70)], edges[world.rank], edges[world.rank + 1], 70)
    results["wrong parts"] = []
    for wrong in ([(0, 32), (32, 32), (64, 70)], [(0, 32), (0, 32), (32, 70)], [(0, 70)] * 3, [(0, 0)] * 3):
        try:
            world.sum_parts([torch.ones(70)], *wrong[world.rank], 70)
        except dpq.errors.DistributedError as error:
            results["wrong parts"].append(str(error))
    return results


# Under torchrun


def restarted(folder: Path, form: str) -> None:
    """All epochs from the last checkpoint on; in the first life rank 1 is killed in the middle of the second epoch."""
    settle_down()
    meet()
    wraps = {"whole": lambda model: model, "sharded": sharded}
    engine = engine_of(ledger_path=folder / "ledger.json", schedule={}, wrap=wraps[form])
    path, steps = folder / "checkpoint", [0]
    if path.exists():
        engine.load_checkpoint(path=path)
    else:
        engine.save_checkpoint(path=path)

    def each() -> None:
        steps[0] += 1
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and steps[0] == 6 and rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    while engine.scheduler.epoch < EPOCHS:
        epoch(engine, each)
        engine.save_checkpoint(path=path)
    torch.save(outcome(engine), folder / f"result-{rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    restarted(Path(sys.argv[1]), sys.argv[2])
