"""`dpquant`: reads the command line, runs a command, and turns errors into messages and exit codes."""

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import TextIO

from dpquant_compile import __version__
from dpquant_compile.cli import bench, demo, plan, report, selftest, sites, sweep, tasks, train
from dpquant_compile.cli.command import BAD_INPUT, FAILED, INTERRUPTED, Command, RunFailedError
from dpquant_compile.cli.interrupt import raise_again
from dpquant_compile.errors import DPQuantError, did_you_mean

__all__ = ["COMMANDS", "main", "make_parser"]

COMMANDS: tuple[Command, ...] = (
    demo.COMMAND,
    tasks.COMMAND,
    sites.COMMAND,
    plan.COMMAND,
    train.COMMAND,
    sweep.COMMAND,
    report.COMMAND,
    bench.COMMAND,
    selftest.COMMAND,
)

_EPILOG = """examples:
  dpquant demo
  dpquant sites torchvision.models:resnet18 --input 1x3x224x224
  dpquant plan --target-epsilon 8 --delta 1e-5 --dataset-size 50000 --batch-size 1024 --epochs 60
  dpquant train cnn-digits --budget 0.75 --out out/runs
  dpquant report out/runs -o report.html

exit codes: 0 done, 1 a run failed, 2 bad usage or input, 130 interrupted.
A command prints its result on standard output, and progress on standard error."""


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; it sets `args.command` to the `Command`."""
    common = argparse.ArgumentParser(add_help=False)
    everywhere = common.add_argument_group("everywhere")
    everywhere.add_argument("--json", action="store_true", help="print the result as one JSON document")
    everywhere.add_argument(
        "--traceback", action="store_true", help="show where an error comes from; also by DPQUANT_DEBUG=1"
    )
    _add_version(everywhere)
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="dpquant", description="Private training in low precision.", epilog=_EPILOG, formatter_class=form
    )
    _add_version(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        examples = "\n".join(["examples:", *(f"  {line}" for line in command.examples)])
        own = commands.add_parser(
            command.name,
            parents=[common],
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            epilog=examples,
            formatter_class=form,
            allow_abbrev=False,
        )
        own.set_defaults(command=command, parser=own)
        command.add_arguments(own)
    return parser


def _unknown(words: Sequence[str], args: argparse.Namespace) -> str:
    """The error for unrecognized arguments, with the option that may have been meant."""
    known = [option for action in args.parser._actions for option in action.option_strings]
    command: Command = args.command
    names = [word.split("=")[0] for word in words]
    hints = (command.removed[name] if name in command.removed else did_you_mean(name, known) for name in names)
    return f"unrecognized arguments: {' '.join(words)}." + "".join(hints)


def _add_version(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    parser.add_argument("--version", action="version", version=f"dpquant {__version__}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of the process, and return its exit code.

    `--help`, `--version` and usage that argparse refuses end in SystemExit, as argparse does.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = make_parser()
    names = [command.name for command in COMMANDS]
    if words and not words[0].startswith("-") and words[0] not in names:
        hint = did_you_mean(words[0], names)
        parser.error(f"there is no command {words[0]!r}.{hint} Commands: {', '.join(names)}")
    args, unknown = parser.parse_known_args(words[:cut])
    if unknown:
        args.parser.error(_unknown(unknown, args))
    args.rest = words[cut + 1 :]
    if args.rest and args.command is not bench.COMMAND:
        parser.error(f"dpquant {args.command.name} takes no arguments after --; `dpquant bench` does")
    from dpquant_compile.cli.output import Output  # rich: not for --help

    output = Output(as_json=args.json)
    command: Command = args.command
    with warnings.catch_warnings():
        warnings.showwarning = _one_line
        try:
            raise_again()
            code = command.run(args, output)
            sys.stdout.flush()
        except KeyboardInterrupt:
            output.note(f"dpquant {command.name}: interrupted")
            return INTERRUPTED
        except BrokenPipeError:
            # The reader of the output closed it early. Python would report that again when it closes the stream.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FAILED
        except (DPQuantError, OSError) as error:  # the latter: a file that cannot be read or written
            if args.traceback or os.environ.get("DPQUANT_DEBUG", "0") not in ("", "0"):
                traceback.print_exception(error)
            else:
                output.note(f"dpquant {command.name}: error: {error}")
            return FAILED if isinstance(error, RunFailedError) else BAD_INPUT
    return code


def _one_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show a warning without its source line, which is not the user's code."""
    print(f"warning: {message}", file=file or sys.stderr)
