"""Held values: the numbers, texts, arrays and tensors that a model's code can read beside its arguments.

They are constants of a captured graph, so two captures are of the same model only if these values are equal. They lie
in attributes of modules and of other objects, in class attributes, in closures, and in globals that `forward` reads.
"""

import dis
import functools
import hashlib
import sys
import types
from argparse import Namespace
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Set
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

__all__ = ["MODULE_INTERNALS", "held_values", "same_values", "value_key", "values_in"]

MODULE_INTERNALS = frozenset(vars(nn.Module()))  # what torch keeps in every module: hooks, modes, parameters
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, range, slice)
_CONTAINERS = (list, tuple, deque)
_LONG = 64  # longer lists of plain values count as one value
# Objects of these packages are compared by identity: they hold caches and counters that change on their own.
_CLOSED = sys.stdlib_module_names | {"torch", "torchvision", "numpy", "opacus", "dpquant_compile", "passes", "backends"}
_OPEN = (types.SimpleNamespace, Namespace, torch.distributions.Distribution)
_IMPLICIT = ("__call__", "__getattr__", "__getattribute__")


def held_values(root: Any) -> dict[str, Any]:
    """By name, what the code of a module, a function or another callable can read beside its arguments.

    Parameters and buffers of a module are left out: a graph reads them at each call. A tensor or an array is
    represented by a digest of its bytes, a set by its sorted elements, and an object that is not inspected by itself.
    Global variables and class attributes are included if their names occur in code that is reachable from `forward` and
    belongs to no library.
    """
    walk = _Walk()
    if isinstance(root, nn.Module):
        walk.module_tree(root)
    else:
        walk.visit(getattr(root, "__name__", type(root).__name__), root)
    return walk.finished()


def values_in(value: Any) -> dict[str, Any]:
    """The same for one value, such as an argument, by path within it. Code is not inspected."""
    walk = _Walk(code=False)
    walk.visit("", value)
    return walk.finished()


def same_values(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """The name of a value that differs or that one side lacks; None if all are the same."""
    for name in {**a, **b}:
        if name not in a or name not in b or not _same(a[name], b[name]):
            return name
    return None


def value_key(values: Any) -> Hashable:
    """The part of arguments for which a program is compiled: shapes and types of tensors, and all other values."""
    leaves, spec = tree_flatten(values)

    def describe(leaf: Any) -> Hashable:
        if isinstance(leaf, Tensor):
            return tuple(leaf.shape), leaf.dtype, leaf.device
        return tuple((name, type(value), repr(value)) for name, value in values_in(leaf).items())

    return spec, tuple(map(describe, leaves))


class _Itself:
    """Wraps an object that is equal only to itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"<{type(self.value).__qualname__} at {id(self.value):#x}>"


class _Walk:
    """One walk over values. It uses a list instead of recursion, since objects may be nested deeply."""

    def __init__(self, code: bool = True) -> None:
        self.found: dict[str, Any] = {}
        self._code = code
        self._todo: deque[tuple[str, Any]] = deque()
        self._first: dict[int, str] = {}  # the name under which an object was found first
        self._kept: list[Any] = []  # keeps objects alive, so that no id is reused
        self._owned: dict[int, str] = {}  # modules, parameters and buffers that have their own names
        self._names: set[str] = set()  # attribute names in the code seen so far
        self._globals: set[str] = set()
        self._classes: dict[type, None] = {}
        self._partly: list[tuple[str, Mapping[str, Any]]] = []  # objects of which only attributes that code reads count
        self._looked_at: set[tuple[Any, str]] = set()

    def module_tree(self, root: nn.Module) -> None:
        named = dict(root.named_modules(remove_duplicate=False))
        held = (*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False))
        self._owned = {id(value): name for name, value in (*named.items(), *held)}
        for prefix, module in named.items():
            self._class(type(module))
            for name, value in vars(module).items():
                if name not in MODULE_INTERNALS:
                    self._todo.append((f"{prefix}.{name}".lstrip("."), value))
        self._names.add("forward")

    def visit(self, name: str, value: Any) -> None:
        self._todo.append((name, value))

    def finished(self) -> dict[str, Any]:
        """All values, after the walk has ended."""
        while self._todo or self._queue_named():
            while self._todo:
                self._look(*self._todo.popleft())
        return self.found

    def _note(self, name: str, value: Any) -> None:
        while name in self.found:
            name += "'"
        self.found[name] = value

    def _look(self, name: str, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self._note(name, value)
        elif id(value) in self._owned:
            self._note(name, f"{type(value).__name__} {self._owned[id(value)]!r}")
        elif id(value) in self._first:
            self._note(name, f"the same as {self._first[id(value)]!r}")
        else:
            self._first[id(value)] = name
            self._kept.append(value)
            if isinstance(value, Tensor):
                self._note(name, _tensor(value))
            elif isinstance(value, np.ndarray | np.generic):
                self._array(name, value)
            else:
                self._container(name, value)

    def _array(self, name: str, value: Any) -> None:
        if value.dtype.hasobject:
            self.visit(f"{name}.tolist()", value.tolist())
        else:
            self._note(name, (str(value.dtype), value.shape, _digest(np.ascontiguousarray(value).tobytes())))

    def _container(self, name: str, value: Any) -> None:
        kind = type(value).__qualname__
        if isinstance(value, Mapping):
            self._note(name, (kind, len(value)))
            for key in value:
                self.visit(f"{name}[{key!r}]", value[key])
        elif isinstance(value, Set):
            self._note(name, (kind, tuple(sorted((type(v).__qualname__, repr(v)) for v in value))))
        elif isinstance(value, bytearray | memoryview):
            self._note(name, (kind, _digest(bytes(value))))
        elif isinstance(value, _CONTAINERS) and len(value) > _LONG and all(isinstance(v, _PLAIN) for v in value):
            self._note(name, (kind, tuple((type(v), v) for v in value)))
        elif isinstance(value, _CONTAINERS):
            self._note(name, (kind, len(value)))
            for i, entry in enumerate(value):
                self.visit(f"{name}[{i}]", entry)
        else:
            self._object(name, value, kind)

    def _object(self, name: str, value: Any, kind: str) -> None:
        if isinstance(value, functools.partial):
            self._note(name, kind)
            for part in ("func", "args", "keywords"):
                self.visit(f"{name}.{part}", getattr(value, part))
        elif isinstance(value, types.MethodType):
            self._note(name, kind)
            self.visit(f"{name}.__func__", value.__func__)
            self._behind_method(f"{name}.__self__", value.__self__)
        elif isinstance(value, property | staticmethod | classmethod | functools.cached_property):
            function = {property: "fget", functools.cached_property: "func"}.get(type(value), "__func__")
            self.visit(name, getattr(value, function, None))
        elif isinstance(value, types.FunctionType):
            self._note(name, _Itself(value))
            self._function(name, value)
        elif isinstance(value, type):
            self._note(name, _Itself(value))
            self._class(value)
        elif not hasattr(value, "__dict__") and not hasattr(type(value), "__slots__"):
            self._note(name, _Itself(value))
        elif (
            isinstance(value, nn.Module) and _root(type(value)) != "dpquant_compile"
        ):  # a module that is hidden from the model, in a list or another object
            self._note(name, kind)
            self._class(type(value))
            self._names.add("forward")
            held = ("_parameters", "_buffers", "_modules", "training")
            self._attributes(name, {k: v for k, v in vars(value).items() if k not in MODULE_INTERNALS or k in held})
        elif _root(type(value)) in _CLOSED and not isinstance(value, _OPEN) and not is_dataclass(value):
            self._note(name, _Itself(value))
        else:
            self._note(name, kind)
            self._class(type(value))
            self._attributes(name, dict(_slots(value)) | dict(getattr(value, "__dict__", {})))

    def _behind_method(self, name: str, value: Any) -> None:
        """The object of a method. Of a plain object, such as a trainer, only what code reads: the rest may change."""
        if not self._code or isinstance(value, nn.Module | type) or not hasattr(value, "__dict__"):
            self.visit(name, value)
        else:
            self._note(name, type(value).__qualname__)
            self._class(type(value))
            self._partly.append((name, vars(value)))

    def _attributes(self, name: str, attributes: Mapping[str, Any]) -> None:
        for key, entry in attributes.items():
            self.visit(f"{name}.{key}", entry)

    def _function(self, name: str, function: types.FunctionType) -> None:
        if not self._code:
            return
        if not _is_user_code(function.__module__):
            self.visit(f"{name}.__wrapped__", getattr(function, "__wrapped__", None))
            return
        for part in ("__defaults__", "__kwdefaults__"):
            if getattr(function, part):
                self.visit(f"{name}.{part}", getattr(function, part))
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                self.visit(f"variable {function.__qualname__}.{variable}", cell.cell_contents)
            except ValueError:  # not bound yet
                continue
        read, attributes = _names_in(function.__code__)
        self._names |= attributes
        for path in read:
            if path[0] in function.__globals__:
                self._global(f"global {function.__module__}", function.__globals__[path[0]], path)

    def _global(self, name: str, value: Any, path: tuple[str, ...]) -> None:
        """A global variable; of a user's module, the attribute of it that the code reads."""
        name = f"{name}.{path[0]}"
        for attribute in path[1:]:
            if not isinstance(value, types.ModuleType):
                break
            if not _is_user_code(value.__name__) or not hasattr(value, attribute):
                return
            name, value = f"{name}.{attribute}", getattr(value, attribute)
        if not isinstance(value, types.ModuleType) and name not in self._globals:
            self._globals.add(name)
            self.visit(name, value)

    def _class(self, cls: type) -> None:
        if self._code:
            self._classes |= dict.fromkeys(c for c in cls.__mro__ if _is_user_code(c.__module__))

    def _queue_named(self) -> bool:
        """Queue class attributes, such as methods, whose names occur in the code seen so far; whether any was new."""
        held: list[tuple[str, Any, Mapping[str, Any]]]
        held = [(f"class {cls.__qualname__}", cls, vars(cls)) for cls in self._classes]
        held += [(name, name, attributes) for name, attributes in self._partly]
        for within, key, attributes in held:
            for name, value in attributes.items():
                implicit = name.startswith("__") and name.endswith("__")
                wanted = name in _IMPLICIT if implicit else name in self._names
                if wanted and (key, name) not in self._looked_at:
                    self._looked_at.add((key, name))
                    self.visit(f"{within}.{name}", value)
        return bool(self._todo)


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[tuple[tuple[str, ...], ...], frozenset[str]]:
    """The global variables that code reads, with the attributes that it reads of them; and attribute names.

    String constants count as attribute names, since getattr() takes them.
    """
    read: dict[tuple[str, ...], None] = {}
    names: set[str] = {c for c in code.co_consts if isinstance(c, str) and c.isidentifier()}
    path: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        attribute = instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
        if attribute:
            names.add(instruction.argval)
        if path and attribute:
            path += (instruction.argval,)
            continue
        if path:
            read[path] = None
        path = (instruction.argval,) if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ()
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            more, others = _names_in(inner)
            read |= dict.fromkeys(more)
            names |= others
    return tuple(read), frozenset(names)


@functools.lru_cache(maxsize=4096)
def _is_user_code(module: str | None) -> bool:
    """Whether a module belongs neither to Python, torch or this package, nor to an installed package."""
    if module is None or module.partition(".")[0] in _CLOSED:
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


def _root(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _tensor(value: Tensor) -> Any:
    if value.is_meta or value.layout is not torch.strided or value.is_quantized:
        return _Itself(value)
    try:
        contents = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    except (RuntimeError, TypeError):  # a subclass without bytes of its own
        return _Itself(value)
    return str(value.dtype), tuple(value.shape), str(value.device), _digest(contents)


def _digest(contents: bytes) -> str:
    return hashlib.blake2b(contents, digest_size=16).hexdigest()


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a is b or bool(a == b) or (a != a and b != b))
