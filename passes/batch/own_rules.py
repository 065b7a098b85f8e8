"""Batch rules for operators of users, which the project has no proof for."""

from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from dpquant_compile.errors import RegistryError
from dpquant_compile.passes.batch.batch_rules import Axis, Lost, OpCall, has_rule
from dpquant_compile.sites import BatchAxis

__all__ = ["Operator", "OwnRule", "backward_names", "name_of", "own_axis", "own_rule", "register_batch_rule"]

Operator = OpOverload | OpOverloadPacket | CustomOpDef
OwnRule = Callable[[OpCall], BatchAxis | str | None]

_RULES: dict[str, OwnRule] = {}


def register_batch_rule(op: Operator, rule: OwnRule) -> None:
    """Say how an operator of yours carries the samples of its inputs to its output.

    op    `torch.ops.<library>.<name>`, or what `torch.library.custom_op` returned
    rule  takes the call of the operator: `call.args`, `call.kwargs`, `call.output`, and `call.axis_of(tensor)`, the
          place of the samples in an argument, which is None for one that does not depend on the batch. It returns the
          place of the samples in the output, or a sentence that says why they may be mixed.

    Guarantee: none by the project. Whatever the rule claims is taken for proved, in forward and in backward, so a wrong
    rule lets one sample change the gradients of others, and ε is then wrong. `check_batch_rule` looks for
    counterexamples. The ledger of a run that relies on the rule says so in its statement.
    Raises `RegistryError` for an operator that has a rule, or that writes into its arguments.
    """
    name = name_of(op)
    if name in _RULES:
        raise RegistryError(f"{name} has a batch rule already")
    library, _, short = name.partition("::")
    overloads = _overloads(op)
    if library in ("prims", "dpquant") or any(has_rule(overload) for overload in overloads):
        raise RegistryError(f"{name} has a batch rule of this library already: {short} needs no other")
    if any(overload._schema.is_mutable for overload in overloads):
        raise RegistryError(f"{name} writes into its arguments. Fix: let it return new tensors")
    _RULES[name] = rule


def own_rule(op: Operator) -> OwnRule | None:
    """The rule that a user registered for an operator."""
    return _RULES.get(name_of(op))


def own_axis(func: OpOverload, call: OpCall) -> Axis:
    """The batch axis of the output by a user's rule; a `Lost` where it gives up, or where it claims nonsense."""
    name = name_of(func)
    claimed = _RULES[name](call)
    if isinstance(claimed, str):
        return Lost(claimed)
    if not isinstance(claimed, BatchAxis):
        return Lost(f"the rule of {name} found no samples")
    rank, size = call.output.dim(), claimed.outer * call.batch * claimed.inner
    if not 0 <= claimed.dim < rank or call.output.shape[claimed.dim] != size:
        return Lost(f"the rule of {name} claims {claimed}, but the output has the shape {tuple(call.output.shape)}")
    return claimed


def backward_names() -> tuple[str, ...]:
    """Prefixes of the autograd nodes of operators with a rule, whose backward the rule answers for."""
    return tuple(f"GeneratedBackwardFor_{name.replace('::', '_')}_" for name in _RULES)


def name_of(op: Any) -> str:
    """`library::name` of an operator, without its overload."""
    if isinstance(op, CustomOpDef):
        op = op._opoverload
    if isinstance(op, OpOverload):
        op = op.overloadpacket
    if not isinstance(op, OpOverloadPacket):
        raise RegistryError(
            f"{op!r} is no operator. Fix: give torch.ops.<library>.<name>, or what torch.library.custom_op returned"
        )
    return str(op._qualified_op_name)


def _overloads(op: Operator) -> list[OpOverload]:
    packet = getattr(torch.ops, name_of(op).split("::")[0])
    packet = getattr(packet, name_of(op).split("::")[1])
    return [getattr(packet, name) for name in packet.overloads()]
