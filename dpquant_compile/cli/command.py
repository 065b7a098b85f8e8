"""`Command`: the interface of a subcommand, its exit codes and its errors."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dpquant_compile.errors import DPQuantError

if TYPE_CHECKING:
    from dpquant_compile.cli.output import Output

__all__ = ["BAD_INPUT", "DONE", "FAILED", "INTERRUPTED", "Command", "InputError", "RunFailedError"]

# Exit codes. argparse's own errors also have code 2.
DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class Command:
    """One subcommand.

    summary        a line for the list of commands
    examples       lines for the end of its help, each a command that works
    add_arguments  adds its options to a parser; it imports nothing heavy, so that `--help` is quick
    run            runs it, and returns the exit code
    removed        options of earlier releases, and what replaces them
    """

    name: str
    summary: str
    examples: tuple[str, ...]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: "Callable[[argparse.Namespace, Output], int]"
    removed: Mapping[str, str] = field(default_factory=dict)


class InputError(DPQuantError, ValueError):
    """An argument of the command line names something that does not exist, or cannot be used."""


class RunFailedError(DPQuantError, RuntimeError):
    """Valid input, but the run failed: exit code 1, where other typed errors have 2."""
