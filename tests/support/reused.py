"""Compiled models that tests take over from those before them, as new: their private programs are traced already."""

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import dpquant_compile as dpq


@dataclass
class _Kept:
    """A compiled model, what it was like before its first step, and the test that has it."""

    model: dpq.CompiledModule
    policy: dpq.Policy
    generator: Tensor
    built: Hashable
    test: str


_KEPT: dict[Hashable, list[_Kept]] = {}


def as_new(
    key: Hashable, make: Callable[[], nn.Module], compiled: Callable[[nn.Module], dpq.CompiledModule]
) -> dpq.CompiledModule:
    """What `compiled` makes of `make()`, which seeds torch's generator, or one of an earlier test that is like it.

    No two models of one test are the same, so no two live engines share one. A model that a test has rebuilt, or put
    hooks on, is left alone. Without a test, as in a process that one has started, each is new.
    """
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]  # less its phase
    original = make()
    kept = _KEPT.setdefault(key, [])
    idle = next((each for each in kept if test and each.test != test and _built(each.model) == each.built), None)
    if idle is None:
        model = compiled(original)
        kept.append(_Kept(model, model.policy, torch.get_rng_state(), _built(model), test))
        return model
    idle.test, model = test, idle.model
    model.attach(None)
    model.train(original.training)
    for own, other in zip(model.original.parameters(), original.parameters(), strict=True):
        own.grad = own.summed_grad = None  # type: ignore[attr-defined]
        own.requires_grad_(other.requires_grad)
    model.load_state_dict(original.state_dict())
    model.set_policy(idle.policy)
    model.step, model.sample_ids = 0, None
    torch.set_rng_state(idle.generator)
    return model


def _built(model: dpq.CompiledModule) -> Hashable:
    """Which objects the model is made of, and how many hooks it has; what training changes is left out."""
    found: list[Any] = []
    for module in model.original.modules():
        found += [(name, id(value)) for name, value in vars(module).items() if name != "training"]
        found += [len(value) for name, value in vars(module).items() if name.endswith("_hooks")]
        found += [(name, id(value)) for name, value in (*module._parameters.items(), *module._buffers.items())]
    for parameter in model.original.parameters():
        hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        found += [len(value or ()) for value in hooks]
    return tuple(found)
