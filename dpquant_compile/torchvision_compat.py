"""Import torchvision's models beside a CPU build of torch.

A torchvision built for CUDA cannot load its compiled operators beside a CPU torch. Then its import fails, because it
describes `torchvision::nms` and `torchvision::qnms` to the compiler and neither exists. The models use neither
operator, so this module declares both, without an implementation, and tries the import again. Where the real operators
load, nothing is declared.
"""

import importlib
import sys
from types import ModuleType
from typing import Final

import torch

from dpquant_compile.errors import DPQuantError

__all__ = ["TorchvisionMissingError", "models"]

_SIGNATURE: Final = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS: Final = ("nms", "qnms")

# A Library unregisters its operators when it is collected, so this one lives as long as the module.
_library: torch.library.Library | None = None


class TorchvisionMissingError(DPQuantError, ImportError):
    """torchvision is not installed."""


def models() -> ModuleType:
    """The module `torchvision.models`, importable beside a CPU torch as well.

    Raises `TorchvisionMissingError`, an `ImportError`, if torchvision is not installed. Any other failure of the import
    is raised unchanged, and leaves no operator declared. If torchvision is installed, transformers imports it for its
    own models, so call this before importing those.
    """
    try:
        return importlib.import_module("torchvision.models")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise TorchvisionMissingError(
            "torchvision is not installed. Fix: pip install torchvision, in the version that fits your torch",
            name="torchvision",
        ) from error
    except RuntimeError as error:
        if not any(f"operator torchvision::{name} does not exist" in str(error) for name in _OPERATORS):
            raise
    _forget_failed_import()
    _declare_operators()
    try:
        return importlib.import_module("torchvision.models")
    except BaseException:
        _forget_failed_import()
        _withdraw_operators()
        raise


def _declare_operators() -> None:
    """Declare all missing operators or, if that fails, none."""
    global _library
    if _library is not None:
        return
    # A fragment, since another library's fragment may already hold one of the two.
    library = torch.library.Library("torchvision", "FRAGMENT")
    try:
        for name in _OPERATORS:
            if not hasattr(torch.ops.torchvision, name):
                library.define(name + _SIGNATURE)
    except BaseException:
        library._destroy()
        raise
    _library = library


def _withdraw_operators() -> None:
    global _library
    if _library is not None:
        _library._destroy()
        _library = None


def _forget_failed_import() -> None:
    """Drop the submodules that a failed import left behind: the next import would not bind them to the package."""
    if "torchvision" not in sys.modules:
        for name in [name for name in sys.modules if name.startswith("torchvision.")]:
            del sys.modules[name]
