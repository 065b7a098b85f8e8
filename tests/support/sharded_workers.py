"""What the tests of `fully_shard` run on each process, beside what they share with those of several processes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dpquant_compile as dpq
from dpquant_compile.privacy.distributed import shards as shards_module
from dpquant_compile.privacy.distributed.shards import Shards, own_values, take_off
from dpquant_compile.privacy.distributed.world import World
from dpquant_compile.privacy.mechanism import optimizer as optimizer_module
from dpquant_compile.privacy.mechanism.gaussian import GaussianStream
from tests.support import distributed_workers as workers
from tests.support.distributed_workers import engine_of, epoch, rank, sharded, whole


def kept(value: Tensor) -> tuple[str, tuple[int, ...], int]:
    """The type of a tensor, its shape, and how many values this process keeps."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return type(value).__name__, tuple(value.shape), local.numel()


def forms() -> dict[str, Any]:
    """What is sharded after an epoch, as users and tools see it; and an evaluation that rank 0 runs by itself."""
    engine = engine_of(wrap=sharded)
    epoch(engine)
    made, model = engine.run, engine.session.model
    inner = made.optimizer.original_optimizer
    found: dict[str, Any] = {
        "parameters": {n: kept(p) for n, p in model.named_parameters()},
        "gradients": {n: kept(p.grad) for n, p in model.named_parameters()},
        "states": [{n: kept(v) for n, v in state.items()} for state in inner.state.values()],
        "model": {n: kept(v) for n, v in model.state_dict().items()},
        "hooks": [name for name, module in model.named_modules() if module._forward_pre_hooks or module._forward_hooks],
        "types": [type(module).__name__ for module in model.modules()],
        "sums": [getattr(p, "summed_grad", None) for p in model.parameters()],
        "moved": made.world.traffic.bytes,
    }
    tensors, states = get_state_dict(model, inner)  # by torch's own tools
    found["tools"] = {n: kept(v) for n, v in tensors.items()}, sorted(states["state"])
    x = torch.ones(2, 1, 4, 4)
    model.eval()
    if rank() == 0:
        with torch.no_grad():
            found["alone"] = model(x)
    with torch.no_grad():
        found["evaluation"] = model(x)
        for p in model.parameters():
            p.mul_(2.0)
        found["changed"] = model(x)
        plain = workers.Net()
        plain.load_state_dict({n: whole(p) for n, p in model.named_parameters()})
        found["plain"] = plain(x)
    try:
        engine.state_dict()
    except dpq.errors.CheckpointError as error:
        found["state_dict"] = str(error)
    return found


def faulty(fault: str) -> Any:
    """The noise of a run in which rank 1 errs."""
    normals, own = GaussianStream.normals_at, optimizer_module.own_values

    def without(self: GaussianStream, cuts: Any, whole: int, std: float) -> list[Tensor]:
        return normals(self, cuts, whole, 0.0)

    try:
        if rank() == 1 and fault == "no noise":
            GaussianStream.normals_at = without
        elif rank() == 1 and fault == "less than its part":
            GaussianStream.normals_at = lambda self, *args: [one[1:] for one in normals(self, *args)]
        elif rank() == 1 and fault == "the part of another":
            optimizer_module.own_values = lambda shape, rank, size: own(shape, 0, size)
        elif fault == "one more process":
            optimizer_module.own_values = lambda shape, rank, size: own(shape, rank, size + 1)
        return workers.noise_alone({"wrap": sharded}, "another place" if fault == "another place" else "")
    finally:
        GaussianStream.normals_at, optimizer_module.own_values = normals, own


def written_before_the_step() -> None:
    """Rank 1 writes to its shards between backward and step."""
    made = engine_of(wrap=sharded).run
    for x, y in made.loader:
        made.criterion(made.session.model(x), y).backward()
        if rank() == 1 and made.session.micro.last:
            with torch.no_grad():
                made.session.model.fc.weight.add_(1.0)
        made.optimizer.step()


def stray() -> None:
    """A penalty on parameters, which goes around clipping."""
    engine = engine_of(wrap=sharded)
    model, made = engine.session.model, engine.run
    for x, y in made.loader:
        made.criterion(model(x), y).backward()
        model.eval()
        model(x).sum().backward()
        made.optimizer.step()


def stray_and_cleared() -> bool:
    """A gradient that autograd has left, which `zero_grad` clears as the message says; whether a step was taken."""
    engine = engine_of(wrap=sharded)
    model, made = engine.session.model, engine.run
    model.eval()
    model(torch.ones(2, 1, 4, 4)).sum().backward()
    model.train()
    made.optimizer.zero_grad()
    epoch(engine)
    return made.world.step > 0


def uncompiled() -> dict[str, Tensor]:
    """`make_private` of a sharded module that nobody has compiled; an optimizer with two states for each parameter."""
    torch.manual_seed(5)
    model = sharded(workers.Net())
    engine = dpq.PrivacyEngine(accountant="rdp")
    private, optimizer, criterion, loader = engine.make_private(
        module=model.train(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=torch.utils.data.DataLoader(
            workers.records(), batch_size=12, generator=torch.Generator().manual_seed(2)
        ),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        max_physical_batch_size=4,
        noise_generator=torch.Generator().manual_seed(3),
    )
    for x, y in loader:
        optimizer.zero_grad()
        criterion(private(x), y).backward()
        optimizer.step()
    return {name: whole(p) for name, p in private.named_parameters()}


def replaced() -> None:
    """A parameter is put in the place of a shard."""
    engine = engine_of(wrap=sharded)
    model = engine.session.model
    model.fc.bias = nn.Parameter(torch.zeros(3))
    epoch(engine)


def refused(kind: str) -> Any:
    """`make_private` of a model that is spread over the processes in a way that is not supported."""
    engine_of(wrap=REFUSED[kind])


def _placed(model: Any) -> nn.Module:
    return fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % 2 == 0 else None)


def _in_part(model: Any) -> nn.Module:
    fully_shard(model.body)
    return model  # type: ignore[no-any-return]


def _tensor_parallel(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    model.body.weight = nn.Parameter(distribute_tensor(model.body.weight.data, mesh, [Shard(0)]))
    return model  # type: ignore[no-any-return]


def _replicas(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))


def _part_of_the_group(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"])


def _compiled_last(model: Any) -> nn.Module:
    return dpq.compile(fully_shard(model.original), budget=2, inner="eager").train()


REFUSED: dict[str, Callable[[Any], nn.Module]] = {
    "placement": _placed,
    "part": _in_part,
    "tensor parallel": _tensor_parallel,
    "replicas": _replicas,
    "group": _part_of_the_group,
    "offload": lambda model: fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "precision": lambda model: fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "flat": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "compiled last": _compiled_last,
}


def saved(path: Path, options: dict[str, Any]) -> dict[str, Tensor]:
    """An epoch, and a checkpoint: the parameters and the states of the optimizer in it."""
    engine = engine_of(**options)
    epoch(engine)
    engine.save_checkpoint(path=path)
    return tensors(engine)


def loaded(path: Path, options: dict[str, Any]) -> dict[str, Tensor]:
    """The same, after loading that checkpoint."""
    engine = engine_of(**options)
    engine.load_checkpoint(path=path)
    with engine.session.model.whole_parameters():
        read = {f"read {n}": p.detach().clone() for n, p in engine.session.model.named_parameters()}
    return {**tensors(engine), **read}


def tensors(engine: dpq.PrivacyEngine) -> dict[str, Tensor]:
    """All of the parameters, and of the states of the optimizer."""
    inner = engine.run.optimizer.original_optimizer
    found = {}
    for name, parameter in engine.session.stored.items():
        found[name] = whole(parameter)
        for key, value in inner.state[parameter].items():
            found[f"{name} {key}"] = whole(value)
    return found


def scattered(size: int, shapes: Sequence[tuple[int, ...]]) -> Any:
    """`Shards` on tensors of odd shapes, in small buckets: what `scatter` gives and what `gather` restores."""
    shards_module._CPU_BUCKET_BYTES = 128
    model = nn.ParameterList([nn.Parameter(torch.arange(float(torch.Size(s).numel())).view(s)) for s in shapes])
    holder = nn.Module()
    holder.held = model
    fully_shard(holder)
    world = World.current()
    take_off(holder, world)
    shards = Shards.of(holder, world)
    assert shards is not None
    wholes = [shards.whole(p) for p in shards.stored]
    sums = [torch.full(p.shape, float(world.rank + 1)) + p.detach() for p in wholes]
    cuts = [own_values(p.shape, world.rank, size) for p in wholes]
    own = shards.scatter(sums, [torch.full((b - a,), 100.0) for a, b in cuts], cuts)
    added = sum(range(1, size + 1)) + 100.0
    expected = [size * p.detach().flatten()[a:b] + added for p, (a, b) in zip(wholes, cuts, strict=True)]
    assert dist.get_world_size() == size
    return (
        all(torch.equal(p.detach(), torch.arange(float(p.numel())).view(p.shape)) for p in wholes),
        all(torch.equal(a, b) for a, b in zip(own, expected, strict=True)),
    )
