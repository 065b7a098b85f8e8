"""Models that `fully_shard` has spread over the processes: whole parameters for programs, shards for the optimizer.

Each process keeps its rows of every parameter, as DTensors: they are what `model.parameters()` gives, what the
optimizer steps, and what checkpoints hold. Programs read whole parameters, since each sample's gradient is clipped as a
whole. So whole copies are gathered once per logical batch, after the step, and put in the place of the shards while the
model runs. Clipped sums are scattered: each process gets the sums of its own rows alone, with the noise of these rows.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpquant_compile.errors import DistributedError, PrivacySpecError, PrivateTrainingError
from dpquant_compile.link_table import versions
from dpquant_compile.module import CompiledModule
from dpquant_compile.privacy.accounting.replay_check import fingerprint
from dpquant_compile.privacy.distributed.world import World, buckets

__all__ = ["Shards", "local_part", "own_values", "take_off"]

# As many buckets are under way at once: one is filled while another is sent, and no more memory is held.
_UNDER_WAY = 2

# On the CPU, where messages cost little: larger buffers, and gloo's copies of them, stay in the heap of the process.
_CPU_BUCKET_BYTES = 4 * 2**20

_WIDE = torch.float32  # or wider


def own_values(shape: Sequence[int], rank: int, size: int) -> tuple[int, int]:
    """Where the values of a process begin and end in a tensor, counted in order: whole rows, as `torch.chunk` cuts."""
    rows, row = -(-shape[0] // size), math.prod(shape[1:])
    return min(rank * rows, shape[0]) * row, min((rank + 1) * rows, shape[0]) * row


def local_part(tensor: Tensor) -> Tensor:
    """What this process has of a tensor: all of it, unless it is sharded."""
    part: Tensor = getattr(tensor, "to_local", lambda: tensor)()
    return part


def take_off(module: nn.Module, world: World) -> None:
    """Take `fully_shard` off a model: its shards stay, as DTensors, and its hooks go, since programs run no modules.

    Raises `PrivacySpecError` for parameters that are spread in another way, and changes nothing then.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # slow to import, and seldom needed
    from torch.distributed.tensor import DTensor

    if any(isinstance(child, FullyShardedDataParallel) for child in module.modules()):
        raise PrivacySpecError(
            "this model is in FullyShardedDataParallel, which flattens parameters, and private programs read each by "
            "itself. Fix: fully_shard(model) from torch.distributed.fsdp, after dpquant_compile.compile"
        )
    if isinstance(module, CompiledModule) and isinstance(module.original, FSDPModule):
        raise PrivacySpecError(
            "this model was compiled after fully_shard(), whose hooks were in the way of its graph. Fix: "
            "dpquant_compile.compile(model) first, and fully_shard() its blocks, and the compiled model, after that"
        )
    wrapped: list[Any] = [child for child in module.modules() if isinstance(child, FSDPModule)]
    states = {id(child._get_fsdp_state()): child._get_fsdp_state() for child in wrapped}
    for child in wrapped:
        child.reshard()  # after a forward before make_private, whole parameters may be in their places
    managed = {
        id(one.sharded_param): one
        for state in states.values()
        for group in state._fsdp_param_groups
        for one in group.fsdp_params
    }
    for state in states.values():
        _check_policies(state)
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            _check_placement(name, parameter, id(parameter) in managed, world)
        elif wrapped and parameter.requires_grad:
            raise PrivacySpecError(
                f"parameter {name!r} is whole, and others of this model are sharded: each step would treat them in "
                "two ways. Fix: fully_shard(model) on the model itself too, without ignored_params="
            )
    for state in states.values():
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping

    for child in wrapped:
        child.__class__ = type(child).__mro__[type(child)._orig_cls_mro_index]
        for key in (STATE_KEY, REGISTRY_KEY):
            child.__dict__.pop(key, None)
        _module_state_mapping.pop(child, None)  # torch's tools for checkpoints look for the states of all modules
    for child in module.modules():
        for key in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            child.__dict__.pop(key, None)


def _check_policies(state: Any) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    policy = state._mp_policy
    if policy.param_dtype is not None or policy.output_dtype is not None or policy.reduce_dtype not in (None, _WIDE):
        raise PrivacySpecError(
            f"fully_shard(mp_policy={policy}): a private program adds up in float32 or wider, and casts nothing "
            "behind its back. Fix: leave mp_policy= out; dpquant_compile.compile(model, high='bfloat16') computes in "
            "bfloat16, with sums in float32"
        )
    if any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in state._fsdp_param_groups):
        raise PrivacySpecError(
            "fully_shard(offload_policy=CPUOffloadPolicy()): programs, sums and shards are on one device. Fix: leave "
            "offload_policy= out"
        )


def _check_placement(name: str, parameter: Any, managed: bool, world: World) -> None:
    """Refuse a DTensor that is not cut by rows over all processes."""
    from torch.distributed.tensor import Shard

    mesh, what = parameter.device_mesh, f"parameter {name!r} is a DTensor"
    if not managed:
        raise PrivacySpecError(
            f"{what} that fully_shard() does not manage, as in tensor parallelism or in a model that another "
            "make_private has taken. Fix: leave it out, and give the compiled model itself, or fully_shard of it"
        )
    if mesh.ndim != 1 or mesh.mesh.tolist() != list(range(world.size)):
        raise PrivacySpecError(
            f"{what} on the mesh {mesh.mesh.tolist()}, and private training runs on all {world.size} processes, each "
            "with samples of its own: neither replicas of shards (HSDP) nor tensor parallelism. Fix: leave mesh= of "
            f"fully_shard() out, or give init_device_mesh(device, ({world.size},))"
        )
    if parameter.placements != (Shard(0),):
        raise PrivacySpecError(f"{what} placed {parameter.placements}, not by rows. Fix: no shard_placement_fn=")
    if parameter.device.type == "meta":
        raise PrivacySpecError(f"{what} without values. Fix: model.to_empty(device=...), and initialise it")
    start, stop = own_values(parameter.shape, world.rank, world.size)
    assert local_part(parameter).numel() == stop - start, name


@dataclass(frozen=True)
class _Shard:
    """A parameter: its shard, the whole, and where modules hold it."""

    stored: nn.Parameter
    whole: nn.Parameter
    places: list[tuple[dict[str, Any], str]]


class Shards:
    """The sharded parameters of a model, on one process.

    Guarantee: wholes are equal on all processes, bit for bit, and change only in `gather`, where every process passes.
    """

    def __init__(self, found: "list[_Shard]", world: World) -> None:
        self.world = world
        self._shards = found
        self._depth = 0
        self._seen: int | None = None
        self.gather()

    @classmethod
    def of(cls, model: nn.Module, world: World) -> "Shards | None":
        """The shards of a model that `take_off` has seen; None if it has none."""
        found = _find(model)
        return cls(found, world) if found else None

    def whole(self, stored: Tensor) -> nn.Parameter:
        """The whole parameter of a shard."""
        return next(one.whole for one in self._shards if one.stored is stored)

    @property
    def stored(self) -> list[nn.Parameter]:
        """The shards, as the optimizer and `model.parameters()` have them."""
        return [one.stored for one in self._shards]

    @property
    def changed(self) -> bool:
        """Whether shards have changed since they were gathered last."""
        return self._seen != versions(self.stored)

    def refresh(self) -> None:
        """Gather anew where something else than a step has changed shards, which must be so on every process."""
        if self.changed:
            self.gather()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the model holds whole parameters, as they were gathered last."""
        if self._depth == 0:
            self._check_held()
            for one in self._shards:
                one.whole.requires_grad_(one.stored.requires_grad)
                for held, key in one.places:
                    held[key] = one.whole
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                for one in self._shards:
                    for held, key in one.places:
                        held[key] = one.stored

    def _check_held(self) -> None:
        other = next((key for one in self._shards for held, key in one.places if held.get(key) is not one.stored), None)
        if other is not None:
            raise PrivateTrainingError(
                f"a parameter {other!r} of the model is not the shard that make_private took: it was replaced, as "
                "load_state_dict(assign=True) and model.to(dtype) do. Fix: load_state_dict without assign=, or "
                "fully_shard, a new optimizer and make_private after the change"
            )

    def gather(self) -> None:
        """Fill the wholes from the shards of all processes; a collective."""
        locals_ = [local_part(one.stored.detach()) for one in self._shards]
        wholes = [one.whole.detach() for one in self._shards]
        size = self.world.size

        def pack(table: _Table) -> tuple[Tensor, Tensor]:
            mine = wholes[table.places[0]].new_zeros(table.width)
            for i, columns in table:
                mine[columns][: locals_[i].numel()] = locals_[i].reshape(-1)
            return mine.new_empty(size * table.width), mine

        def unpack(table: _Table, gathered: Tensor) -> None:
            for i, columns in table:
                for where, values in _by_process(wholes[i].view(-1), columns):
                    values.copy_(gathered.view(size, -1)[where])

        self._each_bucket(wholes, pack, dist.all_gather_single, unpack, "for the parameters of the others")
        self._seen = versions(self.stored)

    def scatter(self, sums: Sequence[Tensor], noise: Sequence[Tensor], cuts: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Of tensors like whole parameters, the sums over all processes of this process' own values, with noise, flat.

        `noise` was drawn for the values of each tensor from the first up to the second of its `cuts`: this process'
        own. It is added before anything is sent, so that no process ever holds a sum over all without it.

        Guarantee: raises `DistributedError` on every process, and sends nothing, unless every value of each tensor has
        got noise from one process, and from one alone.
        """
        self._check(sums, noise, cuts)
        size, rank = self.world.size, self.world.rank
        result = list(sums)

        def pack(table: _Table) -> tuple[Tensor, Tensor]:
            sent = sums[table.places[0]].new_zeros((size, table.width))
            for i, columns in table:
                for where, values in _by_process(sums[i].reshape(-1), columns):
                    sent[where] = values
                sent[rank, columns][: noise[i].numel()] += noise[i].reshape(-1)
            return sent.new_empty(table.width), sent.view(-1)

        def unpack(table: _Table, summed: Tensor) -> None:
            for i, columns in table:
                result[i] = summed[columns][: noise[i].numel()]

        self._each_bucket(sums, pack, dist.reduce_scatter_single, unpack, "for sums of clipped gradients")
        return result

    def like(self, stored: Tensor, own: Tensor) -> Tensor:
        """The values of this process, as a DTensor like `stored`."""
        from torch.distributed.tensor import DTensor

        shard: Any = stored
        local = own.view(local_part(stored).shape)
        options = {"run_check": False, "shape": shard.shape, "stride": shard.stride()}
        made: Tensor = DTensor.from_local(local, shard.device_mesh, shard.placements, **options)
        return made

    def cut(self, stored: Tensor, whole: Tensor) -> Tensor:
        """The shard, like `stored`, of a whole tensor of its shape; a copy."""
        first, last = own_values(whole.shape, self.world.rank, self.world.size)
        return self.like(stored, whole.detach().reshape(-1)[first:last].to(stored.device, copy=True))

    def printed(self, shards: Sequence[Tensor]) -> Tensor:
        """A fingerprint of tensors that are spread over all processes; equal on each. A collective."""
        prints = self.world.gathered(fingerprint([local_part(shard) for shard in shards]))
        return torch.tensor(list(bytes.fromhex("".join(prints))), dtype=torch.uint8, device="cpu")

    def _check(self, sums: Sequence[Tensor], noise: Sequence[Tensor], cuts: Sequence[tuple[int, int]]) -> None:
        """Refuse parts of the noise that do not make up all values, each where its process' rows are; a collective."""
        self.world.check_group()
        sizes = [total.numel() for total in sums]
        told = torch.zeros(self.world.size, len(sizes), 2, dtype=torch.int64, device="cpu")
        own = [own_values(total.shape, self.world.rank, self.world.size) for total in sums]
        fits = own == list(cuts) and [one.numel() for one in noise] == [last - first for first, last in cuts]
        told[self.world.rank] = torch.tensor(own, device="cpu").view(-1, 2) if fits else -1
        (told,) = self.world.sum([told])
        starts, stops = told.unbind(2)
        before = torch.cat([torch.zeros_like(stops[:1]), stops[:-1]])  # of each process, where the one before ends
        whole = torch.tensor(sizes, dtype=torch.int64, device="cpu")
        good = (starts == before).all(0) & (starts <= stops).all(0) & (stops[-1] == whole)
        if not bool(good.all()):
            bad = int(good.logical_not().nonzero()[0])
            raise DistributedError(
                f"the parts of the noise that the processes add do not make up all values: {told[:, bad].tolist()} of "
                f"the {sizes[bad]} of a parameter, as first and last by rank. Nothing was released. Fix: run the same "
                "release of dpquant_compile on every process, and go on from the last checkpoint"
            )

    def _each_bucket(
        self,
        tensors: Sequence[Tensor],
        pack: "Callable[[_Table], tuple[Tensor, Tensor]]",
        send: Callable[..., Any],
        unpack: "Callable[[_Table, Tensor], None]",
        what: str,
    ) -> None:
        """For each bucket of the tensors: pack it, send it, and unpack what arrives; a few are under way at once."""
        started = time.perf_counter()
        running: list[tuple[_Table, Tensor, Tensor, Any]] = []

        def arrive() -> None:
            table, received, _, work = running.pop(0)  # what is sent must live until it is
            work.wait()
            unpack(table, received)

        with self.world.guarded(what), torch.no_grad():
            on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
            for places in buckets(tensors, _CPU_BUCKET_BYTES if on_cpu else None):
                if len(running) == _UNDER_WAY:
                    arrive()
                table = _Table(places, [_chunk(tensors[i].shape, self.world.size) for i in places])
                received, sent = pack(table)
                running.append((table, received, sent, send(received, sent, async_op=True)))
                self.world.traffic.bytes += max(received.nbytes, sent.nbytes)
            while running:
                arrive()
        self.world.traffic.moving += time.perf_counter() - started


@dataclass(frozen=True)
class _Table:
    """How the tensors of a bucket are sent: a row for each process, in it columns for its values of each tensor.

    All rows are as wide as the first, which has the most values; the others end in zeros.
    """

    places: list[int]
    widths: list[int]

    @property
    def width(self) -> int:
        """The values of a row."""
        return sum(self.widths)

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """The index of each tensor, and its columns."""
        start = 0
        for place, width in zip(self.places, self.widths, strict=True):
            yield place, slice(start, start + width)
            start += width


def _by_process(flat: Tensor, columns: slice) -> Iterator[tuple[Any, Tensor]]:
    """Where the values of a tensor lie in a table of all processes: rows of full width at once, and the last values."""
    width = columns.stop - columns.start
    full = flat.numel() // max(width, 1)
    if full:
        yield (slice(0, full), columns), flat[: full * width].view(full, width)
    if rest := flat.numel() - full * width:
        yield (full, slice(columns.start, columns.start + rest)), flat[full * width :]


def _chunk(shape: Sequence[int], size: int) -> int:
    """How many values of a parameter the first process has; others have as many, or fewer."""
    return own_values(shape, 0, size)[1]


def _find(model: nn.Module) -> list[_Shard]:
    """The DTensors among the parameters of a model, and the modules that hold each."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    from torch.distributed.tensor import DTensor

    found: dict[int, _Shard] = {}
    seen: set[int] = set()  # a compiled model and its original share one dict
    for module in model.modules():
        held: dict[str, Any] = module._parameters
        if id(held) in seen:
            continue
        seen.add(id(held))
        for key, parameter in held.items():
            if isinstance(parameter, DTensor):
                if id(parameter) not in found:
                    local = local_part(parameter)
                    whole = nn.Parameter(local.new_zeros(parameter.shape), parameter.requires_grad)
                    found[id(parameter)] = _Shard(parameter, whole, [])  # type: ignore[arg-type]
                found[id(parameter)].places.append((held, key))
    return list(found.values())
