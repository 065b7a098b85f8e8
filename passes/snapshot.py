"""Undo the side effects of a capture: on attributes and containers, random generators, and tensors it writes into.

A trace runs forward() on placeholders, and a check of the trace runs it on a batch. Both also run the side effects of
forward(): it may assign attributes, append to lists, draw random numbers, write into tensors. All of that is undone.

Guarantee: after a capture no object that the model can reach by attributes, or by names in the code of its modules,
holds a value that was computed from the batch.
"""

import inspect
import os
import random
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dpquant_compile.passes.fx_utils import package_of

__all__ = ["Change", "Snapshot", "Writes", "storage_of"]

# Attributes of modules that captures themselves change.
_BY_CAPTURE = ("_forward_hooks", "_forward_pre_hooks", "_is_torch_compile")
_NO_OBJECTS = {*sys.stdlib_module_names, "torch", "numpy", "dpquant_compile"}  # packages whose own state is left alone


@dataclass(frozen=True)
class Change:
    """Side effects of forward(): an attribute that it assigned, and a generator that it drew from."""

    assigned: str | None
    drew: str | None


class Snapshot:
    """The state of a model before a trace: attributes of its modules, what they hold, and random generators."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            (name, module.__dict__, dict(module.__dict__), [(d, dict(d)) for d in _tensor_dicts(module)])
            for name, module in model.named_modules()
        ]
        self._functions: dict[int, types.FunctionType] = {}
        self._containers: list[tuple[str, Any, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._generators: list[tuple[str, _Generator]] = []
        self._labels: dict[int, str] = {}
        self._seen = {id(module) for module in model.modules()}
        self._walk([("Python's random", random._inst)])  # behind random.random()
        if "numpy" in sys.modules:
            self._walk([("numpy.random", sys.modules["numpy"].random.mtrand._rand)])
        for name, _, attributes, _ in self._modules:
            self._walk([(f"{name}.{key}" if name else f"self.{key}", value) for key, value in attributes.items()])
        for kind in {type(module): None for module in model.modules()}:
            own = [c for c in kind.__mro__ if package_of(c) != "torch"]
            self._walk([(c.__name__, value) for c in own for value in vars(c).values() if inspect.isfunction(value)])

    def label(self, tensor: Tensor) -> str | None:
        """The name of a tensor that existed before, found by its memory."""
        return self._labels.get(storage_of(tensor))

    def settings(self) -> dict[tuple[int, str], Any] | None:
        """Plain values that modules assign to attributes of theirs, by module and name, and nothing else.

        None if anything else has changed, such as a tensor, a container or an object.
        """
        found: dict[tuple[int, str], Any] = {}
        for place, (_, now, then, tensors) in enumerate(self._modules):
            if any(_different(held, before) for held, before in tensors):
                return None
            for key, value in _different(now, then).items():
                if key in _BY_CAPTURE:
                    continue
                if key not in now or type(value) not in (bool, int, float, str):
                    return None
                found[place, key] = value
        return None if any(_different(held, before) for _, held, before in self._containers) else found

    def assign(self, settings: Mapping[tuple[int, str], Any]) -> None:
        """Assign what `settings` gave; `restore` undoes it."""
        for (place, key), value in settings.items():
            self._modules[place][1][key] = value

    def restore(self) -> Change:
        """Restore everything, and return what had changed."""
        changed = None
        for name, now, then, tensors in self._modules:
            for held, before in ((now, then), *tensors):
                for key in _different(held, before):
                    if key not in _BY_CAPTURE:
                        changed = changed or self._named(f"{name}.{key}" if name else f"self.{key}")
                _put_back(held, before)
        for label, container, before in self._containers:
            if different := _different(container, before):
                if any(_holds_data(value) for value in different.values()):
                    key = next(key for key, value in different.items() if _holds_data(value))
                    changed = changed or self._named(f"{label}.{key}" if isinstance(key, str) else label)
                _put_back(container, before)
        for scope, name, value in self._globals:
            if scope.get(name) is not value:
                changed = changed or (self._named(name) if _holds_data(scope.get(name)) else None)
                scope[name] = value
        drew = None
        for label, generator in self._generators:
            drew = (generator.put_back() and (drew or label)) or drew
        return Change(changed, drew)

    def _named(self, label: str) -> str:
        """An attribute with the line that changes it, if that line is found."""
        word = re.escape(label.rpartition(".")[2])
        assigns, calls = r"(?:\[.*\]\s*)?(?:[-+*/@|&]|//|\*\*)?=[^=]", r"\.(?:append|add|extend|update|insert)\("
        write = re.compile(rf"\b{word}\s*(?:{assigns}|{calls})")
        for function in self._functions.values():
            try:
                lines, start = inspect.getsourcelines(function)
            except (OSError, TypeError):
                continue
            for number, line in enumerate(lines, start):
                if write.search(line) and function.__name__ != "__init__":
                    return f"{label} ({os.path.basename(function.__code__.co_filename)}:{number}: {line.strip()})"
        return label

    def _walk(self, values: list[tuple[str, Any]]) -> None:
        """Record everything reachable: containers, the user's objects, functions and what these name."""
        stack = values
        while stack:
            label, value = stack.pop()
            if id(value) in self._seen or isinstance(value, type | types.ModuleType | str | int | float | None):
                continue
            self._seen.add(id(value))
            if isinstance(value, Tensor):
                self._labels.setdefault(storage_of(value), label)
            elif (generator := _generator(value)) is not None:
                self._generators.append((label, generator))
            elif isinstance(value, types.FunctionType | types.MethodType):
                stack.extend(self._of_function(value))
            elif isinstance(value, dict | list | set | deque):
                self._containers.append((label, value, _copied(value)))
                items = dict.items(value) if isinstance(value, dict) else enumerate(value)
                stack.extend((f"{label}[{key!r}]", item) for key, item in items)
            elif isinstance(value, tuple | frozenset):
                stack.extend((f"{label}[{key}]", item) for key, item in enumerate(value))
            elif not isinstance(value, nn.Module) and package_of(type(value)) not in _NO_OBJECTS:
                held = getattr(value, "__dict__", None)
                if isinstance(held, dict):
                    self._seen.add(id(held))
                    self._containers.append((label, held, held.copy()))
                    stack.extend((f"{label}.{key}", item) for key, item in held.items())

    def _of_function(self, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, types.MethodType):
            yield "self", value.__self__
            value = value.__func__
        if not isinstance(value, types.FunctionType) or (value.__module__ or "").split(".")[0] in _NO_OBJECTS:
            return
        self._functions[id(value)] = value
        for name in _names(value.__code__):
            if name in value.__globals__:
                self._globals.append((value.__globals__, name, value.__globals__[name]))
                yield name, value.__globals__[name]
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not bound yet
                continue
        yield from ((value.__name__, default) for default in value.__defaults__ or ())


class Writes(TorchDispatchMode):
    """Records the tensors that operators make, and saves what they overwrite in others, to restore it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, Tensor] = {}  # keeps them alive, so that no address is reused
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in _written(func, args, kwargs):
            if not self.made(value):
                self._before.append((value, value.detach().clone()))
        known = {storage_of(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        result = func(*args, **kwargs)
        for value in tree_leaves(result):
            fresh = func is torch.ops.aten.lift_fresh.default  # what torch.tensor() ends on, with its own result
            if isinstance(value, Tensor) and (fresh or storage_of(value) not in known):
                self._made[storage_of(value)] = value
        return result

    def made(self, value: Tensor) -> bool:
        """Whether a tensor lies in memory that was allocated since."""
        return storage_of(value) in self._made

    def undo(self) -> bool:
        """Restore what was overwritten; whether anything was."""
        written = bool(self._before)
        with torch.no_grad():
            while self._before:
                value, before = self._before.pop()
                value.copy_(before)
        return written


class _Generator:
    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        """`get` gives a state that can be compared by ==."""
        self._get, self._put = get, put
        self._before = get()

    def put_back(self) -> bool:
        """Restore the state; whether the generator had drawn."""
        drew = bool(self._get() != self._before)
        if drew:
            self._put(self._before)
        return drew


def _generator(value: Any) -> _Generator | None:
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return _Generator(value.getstate, value.setstate)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        value = value._bit_generator
    elif numpy is not None and isinstance(value, numpy.random.Generator):
        value = value.bit_generator
    if numpy is not None and isinstance(value, numpy.random.BitGenerator):
        return _Generator(lambda: _numbers(value.state), lambda state: setattr(value, "state", state))
    if isinstance(value, torch.Generator):
        return _Generator(
            lambda: value.get_state().tolist(), lambda state: value.set_state(torch.tensor(state, dtype=torch.uint8))
        )
    return None


def _numbers(state: Any) -> Any:
    return tree_map(lambda value: value.tolist() if hasattr(value, "tolist") else value, state)


def _names(code: types.CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def _different(now: Any, then: Any) -> dict[Any, Any]:
    """The entries that changed, with their current values."""
    if isinstance(now, dict):
        held = _copied(now)
        return {k: held.get(k) for k in {*held, *then} if k not in held or k not in then or held[k] is not then[k]}
    if isinstance(now, set):
        return dict(enumerate(now)) if {*map(id, now)} != {*map(id, then)} else {}
    same = len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))
    return {} if same else dict(enumerate(now))


def _put_back(now: Any, then: Any) -> None:
    if not _different(now, then):
        return
    now.clear()
    now.extend(then) if isinstance(now, list | deque) else now.update(then)


def _copied(value: Any) -> Any:
    """A plain copy. A dict subclass may create a new item on every read."""
    if isinstance(value, dict):
        return dict(dict.items(value))
    return set(value) if isinstance(value, set) else list(value)


def _holds_data(value: Any) -> bool:
    return any(isinstance(leaf, Tensor | fx.Proxy) for leaf in tree_leaves(value))


def _tensor_dicts(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return (module._buffers, module._parameters, module._modules)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    schema = func._schema.arguments
    given = [*zip(schema, args, strict=False), *((a, kwargs[a.name]) for a in schema if a.name in kwargs)]
    written = [value for argument, value in given if argument.alias_info is not None and argument.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]


def storage_of(value: Tensor) -> int:
    """The memory that holds a tensor's numbers; 0 for a lazy parameter, which has none yet."""
    return 0 if is_lazy(value) else int(value.untyped_storage()._cdata)
