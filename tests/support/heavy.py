"""Of a test with many parameters, a few that `make test` runs; `make test-all` runs the rest too."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

HEAVY = pytest.mark.heavy


def few(values: Iterable[Any], *kept: Any, name: Callable[[Any], Any] = lambda value: value) -> list[Any]:
    """The values as parameters of a test: those whose name is not `kept` are heavy.

    A tuple is one value for each argument of the test.
    """
    values = list(values)
    names = [name(value) for value in values]
    missing = [value for value in kept if value not in names]
    assert not missing, f"{missing} are none of {names}"
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=() if each in kept else HEAVY)
        for value, each in zip(values, names, strict=True)
    ]
