"""Models that are named on the command line: a task's, or `package.module:callable`."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpquant_compile.cli.command import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dpquant_compile import CompiledModule

__all__ = ["InputSpec", "build_model", "capture"]

_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


@dataclass(frozen=True)
class InputSpec:
    """The shape and dtype of an argument of a forward call: "1x3x32x32", "8x128:int64"."""

    sizes: tuple[int, ...]
    dtype: str = "float32"

    @classmethod
    def parse(cls, text: str) -> "InputSpec":
        """Parse an argument of the command line; ArgumentTypeError if it is no shape."""
        sizes, colon, dtype = text.partition(":")
        if not all(size.isdecimal() and int(size) > 0 for size in sizes.split("x")):
            raise argparse.ArgumentTypeError(f"{text!r} is not a shape such as 1x3x32x32 or 8x128:int64")
        if colon and dtype not in _DTYPES:
            raise argparse.ArgumentTypeError(f"{dtype!r} in {text!r} is not one of {', '.join(_DTYPES)}")
        return cls(tuple(map(int, sizes.split("x"))), dtype or "float32")

    def make(self) -> "Tensor":
        """A tensor of this shape: noise; zeros for integers, an index that every table has; True for masks."""
        import torch

        dtype = getattr(torch, self.dtype)
        if dtype.is_floating_point:
            return torch.randn(self.sizes, generator=torch.Generator().manual_seed(0)).to(dtype)
        return torch.full(self.sizes, dtype == torch.bool, dtype=dtype)


def capture(name: str, inputs: Sequence[InputSpec] | None = None, data: Path | None = None) -> "CompiledModule":
    """The model of this name with its graph captured, no site in low precision, and nothing compiled.

    A task has its own input, and takes local weights from the folder `data`. Without any input, a graph that only
    Dynamo can capture is not captured, and shapes are unknown.
    """
    import dpquant_compile as dpq

    if ":" in name:
        model = build_model(name)
    else:
        from dpquant_compile import lab

        if name not in lab.task_names():
            raise InputError(
                f"{name!r} is no task. Tasks: {', '.join(lab.task_names())}. Fix: take one of them, or write "
                "package.module:callable for a model of your own"
            )
        task = lab.get_task(name)
        model = task.model(data)
        inputs = inputs or (InputSpec((2, *task.sample), "int64" if task.kind == "text" else "float32"),)
    given = None if inputs is None else tuple(spec.make() for spec in inputs)
    return dpq.compile(model, budget=0, backend="reference", inner="eager", example_inputs=given)


def build_model(name: str) -> "nn.Module":
    """The model that `package.module:callable` builds; the working folder is on the path.

    Any error of the user's code becomes an InputError that quotes it.
    """
    from torch import nn

    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        if module_name.partition(".")[0] == "torchvision":
            from dpquant_compile import torchvision_compat

            torchvision_compat.models()  # without this it cannot be imported beside a CPU torch
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise InputError(f"{name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if callable(found) and not isinstance(found, nn.Module):
        try:
            found = found()
        except Exception as error:
            raise InputError(
                f"{name}() raised {type(error).__name__}: {error}. Fix: name a callable that needs no arguments and "
                "returns a torch.nn.Module"
            ) from error
    if not isinstance(found, nn.Module):
        raise InputError(f"{name} gives a {type(found).__name__}, not a torch.nn.Module. Fix: name what builds one")
    return found
