"""Captures without the cache that language models of transformers return for generation.

Such a model returns the keys and values of its attention by default (`config.use_cache`), in an object that no graph
can hold. A training forward does not need it: the field `past_key_values` of its output is then None.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["holds_object", "may_cache", "without_cache"]

_SWITCH = "use_cache"
_PLAIN = (Tensor, bool, int, float, complex, str, type(None))


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Switch off the cache that a model returns by default; a cache that a call asks for explicitly stays."""
    switched = [config for config in _configs(model) if getattr(config, _SWITCH, None) is True]
    try:
        for config in switched:
            setattr(config, _SWITCH, False)
        yield
    finally:
        for config in switched:
            setattr(config, _SWITCH, True)


def may_cache(model: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Whether a call may return a cache: it asks for one, gives one, or leaves that to the configuration."""
    given = arguments.get(_SWITCH, arguments.get("kwargs", {}).get(_SWITCH))
    if given is not None:
        return bool(given)
    return holds_object(arguments) or any(getattr(config, _SWITCH, None) is True for config in _configs(model))


def holds_object(values: Any) -> bool:
    """Whether arguments or results hold an object, such as a cache, that is neither a tensor nor a plain value."""
    return not all(isinstance(leaf, _PLAIN) for leaf in tree_leaves(values))


def _configs(model: nn.Module) -> list[Any]:
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return list(configs.values())
