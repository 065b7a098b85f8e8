"""generation_cache: a model's own cache is left out of captures, and its configuration stays as it was."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from dpquant_compile.passes.generation_cache import holds_object, may_cache, without_cache


class Configured(nn.Module):
    def __init__(self, use_cache: bool = True) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=use_cache)
        self.inner = nn.Linear(2, 2)
        self.inner.config = SimpleNamespace(use_cache=False)


def test_the_configuration_is_restored_also_after_an_error() -> None:
    model = Configured()
    try:
        with without_cache(model):
            assert not model.config.use_cache
            raise KeyError
    except KeyError:
        pass
    assert model.config.use_cache and not model.inner.config.use_cache


def test_which_calls_may_return_a_cache() -> None:
    cached, plain = Configured(), Configured(False)
    assert may_cache(cached, {"x": torch.ones(1)}) and not may_cache(plain, {"x": torch.ones(1)})
    assert not may_cache(cached, {"use_cache": False}) and may_cache(plain, {"use_cache": True})
    assert may_cache(plain, {"past_key_values": SimpleNamespace()})
    assert not may_cache(nn.Linear(2, 2), {})


def test_objects_are_told_from_tensors_and_plain_values() -> None:
    held: Any = {"logits": torch.ones(1), "rest": (None, 1.0, "a")}
    assert not holds_object(held) and holds_object({**held, "cache": SimpleNamespace()})
