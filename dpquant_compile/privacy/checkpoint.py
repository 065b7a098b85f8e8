"""Checkpoints of a private run: its whole state in tensors and plain types, written atomically."""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dpquant_compile.errors import CheckpointError
from dpquant_compile.privacy.atomic_file import write_whole
from dpquant_compile.privacy.distributed import checkpoint
from dpquant_compile.privacy.distributed.shards import local_part
from dpquant_compile.privacy.distributed.world import copy_ledger

if TYPE_CHECKING:
    from dpquant_compile.privacy.engine import PrivacyEngine
    from dpquant_compile.privacy.run import Run

__all__ = ["load_into", "read", "save", "state_of"]

VERSION = 1


def config_of(engine: "PrivacyEngine") -> dict[str, Any]:
    """The settings that must be equal for a run to be resumed."""
    run = engine.run
    session, spec = run.session, run.session.internals.spec
    scheduler = engine.scheduler
    return {
        "parameters": [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in session.parameters.items()],
        "recipe": str(spec.recipe),
        "seed": spec.seed,
        "clipping": run.clipping.mode,
        "max_grad_norm": list(run.clipping.bounds),
        "max_physical_batch_size": run.physical,
        "sample_rate": run.loader.sample_rate,
        "dataset size": run.loader.size,
        "optimizer": type(run.optimizer.original_optimizer).__name__,
        "noise_multiplier": run.noise_multiplier,
        "loss_reduction": run.loss_reduction,
        "loader": type(run.loader).__name__,
        "secure_mode": engine.secure_mode,
        "scheduler": None if scheduler is None else scheduler.config(),
    }


def _differences(saved: Mapping[str, Any], own: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """A few words on each difference; of a setting with parts, such as the scheduler, only the parts that differ."""
    for key, here in own.items():
        there, name = saved.get(key), f"{within}{key}"
        if here == there:
            continue
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            yield from _differences(there, {**dict.fromkeys(there), **here}, f"{name}.")
        elif isinstance(here, list) and isinstance(there, list):
            lost, new = [v for v in there if v not in here], [v for v in here if v not in there]
            yield f"{name}: {lost or there} saved, {new or here} here"
        else:
            yield f"{name}: {there!r} saved, {here!r} here"


def state_of(engine: "PrivacyEngine") -> dict[str, Any]:
    """The state of model, optimizer, ledger, scheduler, and every source of randomness."""
    if engine.run.session.shards is not None and engine.run.world.size > 1:
        raise CheckpointError(
            "state_dict() of a sharded run: no process has the whole state. Fix: save_checkpoint() on every process"
        )
    if not engine.run.world.first:
        raise CheckpointError(
            f"state_dict() on rank {engine.run.world.rank}: only rank 0 has noise and ledger. Fix: save_checkpoint() "
            "on every process, or state_dict() on rank 0"
        )
    return {**_small(engine), **_large(engine)}


def _large(engine: "PrivacyEngine") -> dict[str, Any]:
    """State that is equal on all processes, or sharded over them; copied, since training goes on."""
    run = engine.run
    state = {
        "model": copy.deepcopy(dict(run.session.model.state_dict())),
        "optimizer": copy.deepcopy(run.optimizer.state_dict()),
    }
    # Shards of one process are whole: a file has plain tensors only.
    return tree_map(local_part, state) if run.world.size == 1 else state


def _small(engine: "PrivacyEngine") -> dict[str, Any]:
    """State that only rank 0 has."""
    run = engine.run
    if run.world.size == 1:  # its end is a collective, and rank 0 alone is here
        run.end_epoch()
    if run.session.micro is not None:
        raise CheckpointError(
            "the loop over the loader has not ended. A resumed run starts the epoch again, with other batches but the "
            "same noise. Fix: make checkpoints between epochs, after the loop"
        )
    generator = run.loader.generator
    return {
        "version": VERSION,
        "config": config_of(engine),
        "world": run.world.size,
        "sharded": run.session.shards is not None,
        "ledger": engine.ledger.state_dict(),
        "noise": run.noise.state_dict(),
        "sampler": None if generator is None else generator.get_state(),
        "torch": torch.get_rng_state(),
        "noise_multiplier": run.optimizer.noise_multiplier,
        "max_grad_norm": run.optimizer.max_grad_norm,
        "default_physical": run.default_physical is not None,
        "step": run.session.model.step,
        "policy": sorted(run.session.model.policy),
        "scheduler": None if engine.scheduler is None else engine.scheduler.state_dict(),
    }


def load_into(engine: "PrivacyEngine", state: Mapping[str, Any], replay: bool) -> None:
    """Load a state, or raise `CheckpointError` and change nothing.

    With `replay` the run repeats, bit for bit, what it released after the checkpoint, and a ledger on disk that is
    ahead is not charged again. Without it, randomness is new and everything is charged. Every process of a run must
    call this with the same state.

    Guarantee: where releases may go uncounted, or noise may be used twice, the ledger's statement gets a caveat.
    """
    if state.get("version") != VERSION:
        raise CheckpointError(
            f"this is a checkpoint of version {state.get('version')!r}, not {VERSION}. Fix: load it with the release "
            "that made it"
        )
    wanted = "config model optimizer ledger noise sampler torch noise_multiplier max_grad_norm step policy scheduler"
    if missing := [key for key in wanted.split() if key not in state]:
        raise CheckpointError(f"this checkpoint is incomplete: it has no {', '.join(missing)}")
    run, world = engine.run, engine.run.world
    if replay and (reason := run.noise.cannot_continue(state["noise"])):
        raise CheckpointError(reason)
    if world.on_first("the place in the noise, at load_checkpoint", lambda: run.noise.position) > 0:
        raise CheckpointError(
            "this engine has trained already, and going back would leave its releases uncounted. Fix: load a "
            "checkpoint right after make_private, into a new engine"
        )
    own, saved = config_of(engine), dict(state["config"])
    if run.default_physical and state.get("default_physical") and state.get("world", 1) != world.size:
        saved["max_physical_batch_size"] = run.physical  # not chosen by the user: depends on the number of processes
    if differing := list(_differences(saved, own)):
        raise CheckpointError(f"this checkpoint belongs to another run. What differs: {'; '.join(differing)}")
    shapes = {name: tuple(value.shape) for name, value in run.session.model.state_dict().items()}
    if shapes != (held := {name: tuple(value.shape) for name, value in state["model"].items()}):
        names = sorted(name for name in {*shapes, *held} if shapes.get(name) != held.get(name))
        raise CheckpointError(f"this checkpoint belongs to another model. Tensors that differ: {', '.join(names)}")
    own_spends = {name: engine.ledger.state_dict()[name] for name in ("entries", "runs")}
    world.agree("at load_checkpoint", {"ledger": own_spends})
    replay = world.on_first("the ledger, at load_checkpoint", lambda: _load_ledger(engine, state, replay))
    copy_ledger(world, engine.ledger)
    _load_tensors(run, state)
    if state["sampler"] is not None and run.loader.generator is not None and not engine.secure_mode:
        run.loader.generator.set_state(state["sampler"])
    if replay:
        run.noise.load_state_dict(state["noise"])
    else:
        engine.renew()
    states = state["torch"].reshape(-1, state["torch"].shape[-1])  # one per process, where several wrote them
    if world.rank < len(states):
        torch.set_rng_state(states[world.rank].clone())  # a copy: it reads from the start of the storage
    run.optimizer.noise_multiplier = state["noise_multiplier"]
    run.optimizer.max_grad_norm = state["max_grad_norm"]
    run.session.drop_sums()
    run.session.model.set_policy(state["policy"])
    run.session.model.step = state["step"]
    if engine.scheduler is not None:
        engine.scheduler.load_state_dict(state["scheduler"])


def _load_tensors(run: "Run", state: Mapping[str, Any]) -> None:
    """Load whole tensors into model and optimizer; of sharded ones each process takes its own values."""
    model, shards = dict(state["model"]), run.session.shards
    optimizer = {**state["optimizer"], "state": dict(state["optimizer"]["state"])}
    if shards is not None:
        stored = {id(parameter) for parameter in shards.stored}
        for name, parameter in run.session.model.named_parameters(remove_duplicate=False):
            if id(parameter) in stored and name in model:
                model[name] = shards.cut(parameter, model[name])
        held = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
        for number, values in optimizer["state"].items():
            if id(parameter := held[number]) in stored:
                alike = {n for n, v in values.items() if isinstance(v, Tensor) and v.shape == parameter.shape}
                cut = {name: shards.cut(parameter, values[name]) for name in alike}
                optimizer["state"][number] = {**values, **cut}
    run.session.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    if shards is not None:
        shards.gather()


_UNCOUNTED = (
    "the run went on from a checkpoint with new noise and without a ledger on disk: releases that were made after the "
    "checkpoint are not counted here"
)


_UNCHECKED = (
    "the run went on from a checkpoint with the noise of then, and without a ledger on disk: if it had gone on before, "
    "nothing shows that its releases since the checkpoint were the same, and noise may have been used twice"
)


def _load_ledger(engine: "PrivacyEngine", state: Mapping[str, Any], replay: bool) -> bool:
    """Restore the ledger of a state; returns whether the run repeats what came after it.

    Another number of processes, or the same with shards or without, adds up in another order: the same noise on a sum
    with other last bits would reveal the difference of the two sums. Such a run keeps the saved noise only if the file
    shows that none was used since.
    """
    ledger, releases, size = engine.ledger, engine.releases, engine.run.world.size
    ledger.load_state_dict(state["ledger"], replays=replay)
    releases.forget()
    run, done = ledger.position
    form = (size, engine.run.session.shards is not None)
    same = (state.get("world", 1), state.get("sharded", False)) == form
    same = same and not releases.went_on_elsewhere(run, done, size)
    if replay and not same and (ledger.path is None or ledger.repeating):
        ledger.depart()
        replay = False
    elif replay and not same:
        releases.go_on(run, done, size)
    if replay and ledger.path is None:
        ledger.add_caveat(_UNCHECKED)
    # Checkpoints from before ledgers recorded caveats have "uncounted" instead.
    if state.get("uncounted") or (ledger.path is None and not replay):
        ledger.add_caveat(_UNCOUNTED)
    return replay


def save(engine: "PrivacyEngine", path: str | Path, extra: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically: a file, or a folder if there are several processes."""
    world = engine.run.world
    if world.size == 1:
        state = {**extra, "dpquant": state_of(engine)}
        write_whole(Path(path), lambda file: torch.save(state, file))
        return
    engine.agree("at a checkpoint")
    small = {**_small(engine), "torch": torch.stack(world.gathered(torch.get_rng_state()))}
    checkpoint.save_folder(world, Path(path), {**extra, "dpquant": small}, _large(engine))


def read(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint. The file of one process has only tensors and plain types, so reading it runs no code."""
    try:
        if Path(path).is_dir():
            state, large = checkpoint.read_folder(Path(path))
            return {**state, "dpquant": {**state["dpquant"], **large}}
        state = torch.load(path, weights_only=True)
    except Exception as error:  # torch raises whatever its unpickler met
        raise CheckpointError(f"{path} is no checkpoint that can be read: {error}") from error
    if not isinstance(state, dict) or "dpquant" not in state:
        raise CheckpointError(f"{path} was not written by PrivacyEngine.save_checkpoint")
    return state
