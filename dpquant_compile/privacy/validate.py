"""Checks of the arguments of `make_private`: the module, its parameters, the loss, sizes and options."""

import inspect
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from opacus.accountants.utils import get_noise_multiplier
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpquant_compile.errors import IsolationError, PerSampleGradientError, PrivacySpecError
from dpquant_compile.module import CompiledModule
from dpquant_compile.privacy.data.criterion import CONSTANT_PREFIX, PrivateCriterion
from dpquant_compile.privacy.data.loss_gradient import DIVIDED
from dpquant_compile.privacy.data.poisson_loader import holds_batch
from dpquant_compile.privacy.distributed.shards import Shards, take_off
from dpquant_compile.privacy.distributed.world import World
from dpquant_compile.privacy.run import Step
from dpquant_compile.spec import CompileSpec

__all__ = [
    "DRAWS_RANDOM",
    "caveats",
    "check_world",
    "compiled_module",
    "divided_by_loop",
    "least_noise",
    "own_rules",
    "pin_criterion",
    "reduction_of",
    "refuse_layers",
    "refuse_unknown",
    "refuse_variants",
    "roomy",
    "trainable",
    "whole_batch",
]


def compiled_module(module: nn.Module, world: World) -> CompiledModule:
    """`module` as a CompiledModule: another module is compiled with budget 0, and wrappers for devices are taken off.

    The hooks of DistributedDataParallel wait for gradients from autograd, which a private program does not give: the
    optimizer adds up. So do those of `fully_shard`, whose shards stay. DataParallel without several devices does
    nothing.
    """
    if isinstance(module, nn.DataParallel):
        if len(module.device_ids) > 1:
            raise PrivacySpecError(
                f"nn.DataParallel over {len(module.device_ids)} devices: it copies a model in each forward, which a "
                "private program cannot be. Fix: one process per device under DistributedDataParallel, started by "
                "torchrun; or give the model inside, model.module, to train on one device"
            )
        module = module.module
    if isinstance(module, DistributedDataParallel):
        if module.process_group.size() != dist.get_world_size():
            raise PrivacySpecError(
                f"DistributedDataParallel over {module.process_group.size()} of {dist.get_world_size()} processes: "
                "private training runs on all processes of the default group. Fix: leave process_group= out"
            )
        module = module.module
    sharded = isinstance(module, CompiledModule) and module.storage is not None  # by an earlier make_private
    if not sharded:
        take_off(module, world)
    if isinstance(module, torch._dynamo.OptimizedModule):
        inside = isinstance(module._orig_mod, CompiledModule)
        fix = (
            "leave torch.compile out, since dpquant_compile.compile has compiled it"
            if inside
            else "give the original to dpquant_compile.compile(model, budget=k), which compiles it"
        )
        raise PrivacySpecError(f"this model was compiled by torch.compile. Fix: {fix}")
    refuse_layers(module)
    model = module if isinstance(module, CompiledModule) else CompiledModule(module, CompileSpec.build(0))
    if not sharded and (shards := Shards.of(model, world)):
        model.keep_in(shards)
    return model


def refuse_variants(model: CompiledModule) -> None:
    """Refuse a model with variants that training alone would run: no session runs them, and a thread may compile on."""
    if model.internals().precompiled:
        raise PrivacySpecError(
            "precompile() was called on this model, and private training runs no variants: one program serves all its "
            "policies, and programs for one policy gain too little there (docs/performance.md, 'Variants in private "
            "training'). Fix: leave precompile() out; if the variants have served training without privacy until now, "
            "drop them by model.recapture()"
        )


def check_world(world: World, poisson_sampling: bool) -> None:
    """Refuse options that several processes do not support."""
    if world.size > 1 and not poisson_sampling:
        raise PrivacySpecError(
            f"poisson_sampling=False with {world.size} processes: your own samplers would have to give each sample to "
            "one process only, which cannot be checked. Fix: poisson_sampling=True, or one process"
        )


# Layers whose products lie inside one operator, or one call, that no gradient by sample comes out of.
_ALTERNATIVES: dict[type[nn.Module], str] = {
    nn.LSTM: "opacus.layers.DPLSTM has the same arguments and parameters, and trains privately",
    nn.GRU: "opacus.layers.DPGRU has the same arguments and parameters, and trains privately",
    nn.RNN: "opacus.layers.DPRNN has the same arguments and parameters, and trains privately",
    nn.CrossMapLRN2d: "nn.LocalResponseNorm computes the same",
    nn.AdaptiveLogSoftmaxWithLoss: "return the logits of an nn.Linear, and give nn.CrossEntropyLoss as criterion",
}


def refuse_layers(module: nn.Module) -> None:
    """Refuse layers that are known to mix samples, or whose gradients cannot be taken apart by sample."""
    for name, child in module.named_modules():
        if type(child) in _ALTERNATIVES:
            raise PerSampleGradientError(
                f"layer {name!r} ({type(child).__name__}) has no gradient by sample. Fix: {_ALTERNATIVES[type(child)]}"
            )
        if isinstance(child, _BatchNorm) and child.training and module.training:
            raise IsolationError(
                f"layer {name!r} ({type(child).__name__}) normalises over the batch, so each sample's gradient depends "
                "on the others. Fix: dpquant_compile.replace_batch_norm(model) before compile() puts GroupNorm in its "
                "place, with the same parameters"
            )


def trainable(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer holds and that require a gradient, by name, in its order."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PrivacySpecError(
            f"{type(optimizer).__name__} computes the loss several times in a step, and each would be a release of its "
            "own. Fix: an optimizer that steps without a closure, such as SGD, Adam or AdamW"
        )
    names = {id(parameter): name for name, parameter in reversed(list(model.named_parameters()))}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in names for parameter in held):
        raise PrivacySpecError(
            "the optimizer holds parameters that are not the model's: make it of model.parameters(), "
            "after moving or sharding the model"
        )
    chosen = {names[id(parameter)]: parameter for parameter in held if parameter.requires_grad}
    if not chosen:
        raise PrivacySpecError("the optimizer holds no parameter that requires a gradient: there is nothing to train")
    return chosen


def reduction_of(
    criterion: Any, asked: str | None, model: nn.Module, step: Step
) -> tuple[str, PrivateCriterion | None]:
    """The reduction, "mean" or "sum", and the private criterion, which knows how many rows `model`'s outputs have."""
    if asked not in (None, "mean", "sum"):
        raise PrivacySpecError(f"loss_reduction={asked!r}: choose 'mean' or 'sum'")
    if criterion is None:
        return asked or "mean", None
    rows = partial(_rows, model, step)
    wrapped = criterion if isinstance(criterion, PrivateCriterion) else PrivateCriterion(criterion, samples=rows)
    own = {"sum": "sum", "none": asked or "mean"}.get(wrapped.reduction, "mean")
    if asked is not None and asked != own:
        raise PrivacySpecError(
            f"loss_reduction={asked!r}, but the criterion has reduction={wrapped.reduction!r}: leave loss_reduction out"
        )
    return own, wrapped


def divided_by_loop(criterion: PrivateCriterion | None, reduction: str, model: CompiledModule) -> bool:
    """Whether the loop divides losses by the size of the batch; raises if sites may be low, where that is not sound."""
    divided = reduction == "mean" and (criterion is None or criterion.reduction == "none")
    spec = model.internals().spec
    if divided and (spec.budget > 0 or spec.recipe.other):
        raise PrivacySpecError(DIVIDED)
    return divided


def _rows(model: nn.Module, step: Step) -> int | None:
    """How many samples the last training forward had; None if unknown, as in evaluation."""
    return step.rows if model.training and torch.is_grad_enabled() else None


def pin_criterion(
    criterion: PrivateCriterion | None, constants: Mapping[str, Any], varying_shapes: bool
) -> dict[str, Any]:
    """Fix what the loss reads beside its samples; returns the constants that belong to the model instead."""
    own = {n.removeprefix(CONSTANT_PREFIX): v for n, v in constants.items() if n.startswith(CONSTANT_PREFIX)}
    if criterion is not None:
        criterion.pin(own, varying_shapes)
    elif own:
        raise PrivacySpecError(
            f"constant_inputs names {CONSTANT_PREFIX + next(iter(own))!r}, but make_private was given no criterion"
        )
    return {name: value for name, value in constants.items() if not name.startswith(CONSTANT_PREFIX)}


def least_noise(target: tuple[float, float], q: float, steps: int, accountant: str) -> float:
    """The least noise multiplier that keeps `steps` steps of training alone within (ε, δ)."""
    with warnings.catch_warnings():
        # For some multipliers that the search tries the bound is loose, but it still holds.
        warnings.filterwarnings("ignore", message="Optimal order is the")
        found = get_noise_multiplier(
            target_epsilon=target[0], target_delta=target[1], sample_rate=q, steps=steps, accountant=accountant
        )
    return float(found)


def roomy(data_loader: DataLoader[Any], processes: int = 1) -> int:
    """Mean + 4σ of one process' share of a Poisson batch: what schedulers count in, where no size was given."""
    try:
        expected = len(data_loader.dataset) / len(data_loader) / processes  # type: ignore[arg-type]
    except TypeError:
        return 1  # the loader's own checks say what is wrong with it
    return 8 * math.ceil((expected + 4 * math.sqrt(expected)) / 8)


def whole_batch(data_loader: DataLoader[Any], processes: int = 1) -> int:
    """Default physical batch: holds one process' share of every Poisson batch, but for a negligible probability.

    So every batch that a loop gets by default is a whole one.
    """
    size = roomy(data_loader, processes)
    try:
        samples, rate = math.ceil(len(data_loader.dataset) / processes), 1 / len(data_loader)  # type: ignore[arg-type]
    except TypeError:
        return size
    return next(fits for fits in itertools.count(size, 8) if holds_batch(samples, rate, fits))


DRAWS_RANDOM = (
    "the model draws random numbers, as dropout does, from torch's generators. Their states are secret and new in "
    "each forward, but they are not cryptographic: the claim takes what they draw for independent random bits"
)


def own_rules(operators: Sequence[str]) -> str:
    """The caveat about operators whose batch rule is the user's."""
    return (
        f"that {', '.join(operators)} keep{'s' * (len(operators) == 1)} samples apart is claimed by a batch rule that "
        "was registered with dpquant_compile.register_batch_rule. The library has not proved it; if it is wrong, so is "
        "this claim"
    )


VARYING_SHAPES = (
    "batches could have any shape. Where a batch is padded to its longest sample, one sample's length reaches the "
    "gradients of the others: the claim holds if shapes do not depend on private data"
)


def caveats(secure: bool, poisson: bool = True, varying_shapes: bool = False) -> tuple[str, ...]:
    """What a run's statement must say about its randomness and its batches."""
    varied = (VARYING_SHAPES,) if varying_shapes else ()
    chosen = "batches were not Poisson samples, so no step gains by sampling: each is counted with q = 1"
    shuffled = () if poisson else (chosen,)
    if secure:
        return (*shuffled, *varied)
    return (
        *shuffled,
        *varied,
        "secure_mode was off, so whoever knows or guesses the seed of this run can repeat its noise. The claim "
        "holds for those who do not; train with secure_mode=True what is to be released",
    )


def refuse_unknown(options: Mapping[str, Any]) -> None:
    """Refuse options that Opacus knows and this engine does not, and unknown ones."""
    for name, value in options.items():
        if name == "grad_sample_mode" and value is not None:
            raise PrivacySpecError(
                f"grad_sample_mode={value!r}: this engine has one mode, clipping inside the compiled program. Fix: "
                "leave it out, or use opacus.PrivacyEngine with a model that is not compiled"
            )
        if name != "wrap_model" or value is not True:
            raise PrivacySpecError(f"make_private got {name}={value!r}, which it does not know. Fix: leave it out")
