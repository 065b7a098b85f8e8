"""GroupNorm in place of BatchNorm, whose statistics over the batch rule out private training."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from dpquant_compile.errors import CompileSpecError

__all__ = ["replace_batch_norm"]

_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


class _GroupNormThen(nn.GroupNorm):
    """A GroupNorm, and then its submodules in their order: what timm's BatchNorms do, dropout and activation."""

    def forward(self, input: Tensor) -> Tensor:
        result = super().forward(input)
        for module in self.children():
            result = module(result)
        return result


def replace_batch_norm(model: nn.Module, groups: int | Callable[[int], int] = 32) -> nn.Module:
    """Replace each BatchNorm of `model`, of any dimension and SyncBatchNorm, by a GroupNorm; returns the model.

    `groups` is the number of groups of channels, or a function from the number of channels to it. It is lowered to the
    next divisor of the number of channels, and for BatchNorm1d until a group has two channels. Weight and bias are the
    same `Parameter` objects, so an optimizer still holds them, and keep their names in the state_dict; the running
    statistics are removed. Epsilon, device, dtype and training mode stay. A module that is used at two places is
    replaced by one that is used at both.
    timm's BatchNorms end with a dropout and an activation: they are kept, under their names.
    Requires: lazy modules have run once. Ensures: if `model` is itself a BatchNorm, the GroupNorm is returned.
    Numerics: another function, which normalises each sample by its own statistics; train the model again.
    Raises `CompileSpecError`, and replaces nothing, for a lazy BatchNorm without a shape, for a class of BatchNorm with
    a forward() of its own, since what else it computes is not known, and for groups below 1.

        >>> from torch import nn
        >>> replace_batch_norm(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48)))[1].num_groups
        24
    """
    # All are made before the first one is inserted. Names with duplicates: a shared module has several.
    new: dict[int, nn.GroupNorm] = {}
    places: list[tuple[nn.Module, str, nn.GroupNorm]] = []
    for path, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, _BatchNorm):
            continue
        if id(module) not in new:
            new[id(module)] = _group_norm(path, module, groups)
        if path:
            owner, _, name = path.rpartition(".")
            places.append((model.get_submodule(owner), name, new[id(module)]))
    for parent, name, norm in places:
        parent._modules[name] = norm
    return new.get(id(model), model)


def _group_norm(path: str, module: _BatchNorm, groups: int | Callable[[int], int]) -> nn.GroupNorm:
    where = f"module {path!r}" if path else "the model"
    if isinstance(module, _LazyNormBase):
        raise CompileSpecError(
            f"{where} ({type(module).__name__}) does not know its channels yet: run the lazy model once on a batch, "
            "then replace its BatchNorms"
        )
    then = dict(module.named_children())
    if type(module).forward not in _FORWARDS and not (_is_from_timm(module) and list(then) == ["drop", "act"]):
        raise CompileSpecError(
            f"{where} ({type(module).__name__}) is a BatchNorm with a forward() of its own, and what else that "
            "computes is not known: replace it by hand, by a GroupNorm followed by the rest"
        )
    channels = int(module.num_features)
    wanted: Any = groups(channels) if callable(groups) else groups
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise CompileSpecError(f"groups={wanted!r} for {where} with {channels} channels; give an integer of at least 1")
    # On [B, C] a group of one channel would be one number, which normalises to 0.
    most = max(1, channels // 2) if isinstance(module, nn.BatchNorm1d) else channels
    count = next(n for n in range(min(wanted, most), 0, -1) if channels % n == 0)
    norm = (_GroupNormThen if then else nn.GroupNorm)(count, channels, eps=module.eps, affine=False)
    if module.affine:
        norm.affine, norm.weight, norm.bias = True, module.weight, module.bias
    norm.train(module.training)
    for name, child in then.items():
        norm.add_module(name, child)
    return norm


def _is_from_timm(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "timm"
