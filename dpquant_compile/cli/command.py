"""`Command`: what a file of this folder has to offer, and how it says that something went wrong."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dpquant_compile.errors import DPQuantError

if TYPE_CHECKING:
    from dpquant_compile.cli.output import Output

__all__ = ["BAD_INPUT", "DONE", "FAILED", "INTERRUPTED", "Command", "InputError", "RunFailedError"]

# Exit codes. argparse's own errors have code 2 as well.
DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class Command:
    """One subcommand.

    summary        a line for the list of commands
    examples       lines for the end of its help, each a command that works
    add_arguments  adds its options to a parser; nothing heavy is imported for it, so that `--help` is quick
    run            does it, and returns the exit code
    removed        options of earlier releases, and what to do without them
    """

    name: str
    summary: str
    examples: tuple[str, ...]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: "Callable[[argparse.Namespace, Output], int]"
    removed: Mapping[str, str] = field(default_factory=dict)


class InputError(DPQuantError, ValueError):
    """An argument of the command line that names something that is not there, or cannot be used."""


class RunFailedError(DPQuantError, RuntimeError):
    """What was asked for was sound, was begun, and failed: exit code 1, where other typed errors have 2."""
