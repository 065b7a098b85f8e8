"""Refuse a torch that this release was not made for, when the package is imported.

The compiler uses internals of torch that change between minor releases. With another one it might fail far from the
cause, or build a wrong program.
"""

import re

import torch

from dpquant_compile.errors import TorchVersionError

__all__ = ["SUPPORTED", "check"]

SUPPORTED = "2.13"  # pyproject.toml has the same bound, and a test compares them


def check(version: str) -> None:
    """Raise TorchVersionError unless `version` is of the supported minor release; local and patch parts are free."""
    if re.match(rf"{re.escape(SUPPORTED)}(\D|$)", version):
        return
    major, minor = SUPPORTED.split(".")
    raise TorchVersionError(
        f"dpquant-compile needs torch {SUPPORTED}, and torch {version} is installed. Fix: pip install "
        f"'torch>={SUPPORTED},<{major}.{int(minor) + 1}', or a release of dpquant-compile for your torch"
    )


check(str(torch.__version__))
