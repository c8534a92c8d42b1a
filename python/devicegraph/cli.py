"""The command line: a table of commands, each a module that is imported when its command is called.

Such a module has `add_arguments(parser)` and `run(arguments)`, which prints to standard output and returns the exit
code. What it raises on purpose, and a file that cannot be read, ends as one message on standard error and exit code 2,
as a wrong argument does.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from devicegraph._core import __version__
from devicegraph.errors import DeviceGraphError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

__all__ = ["COMMANDS", "main"]

#: Each command: its module, and what it does.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": (
        "devicegraph.demo.command",
        "serve prompts of a real model through captured graphs, and check every token",
    ),
    "explain": ("devicegraph.commands.explain", "what a configuration comes to, and who said what"),
    "doctor": ("devicegraph.doctor", "what this machine can do, and why not more"),
    "buckets": ("devicegraph.commands.buckets", "which sizes are captured, and why others are not"),
    "bench": ("devicegraph.bench.command", "what fills, steps, memory and captures cost here, as ratios of one run"),
}


class _Parser(argparse.ArgumentParser):
    """A parser whose error is the message alone; a usage of twenty options would hide it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the arguments, without the program's name; those of the process unless given.

    Returns:
        The exit code of the command.

    Raises:
        SystemExit: with 2 after an error, and with 0 after `--help` or `--version`.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _Parser(
        prog="devicegraph",
        description="Device-graph capture and replay for LLM serving engines.",
        epilog="commands:\n" + "\n".join(f"  {name:10} {about}" for name, (_, about) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=f"one of {', '.join(COMMANDS)}")
    # The options before the command take no values, so the first other argument is the command; the rest is its own.
    command = next((place for place, argument in enumerate(argv) if not argument.startswith("-")), len(argv))
    name = parser.parse_args(argv[: command + 1]).command
    module, about = COMMANDS[name]
    implementation = importlib.import_module(module)
    parser = _Parser(prog=f"devicegraph {name}", description=f"{about[0].upper()}{about[1:]}.")
    implementation.add_arguments(parser)
    # Intermixed, so that an argument that may be left out can stand after the options as well as before them.
    arguments = parser.parse_intermixed_args(argv[command + 1 :])
    try:
        code = int(implementation.run(arguments))
        print(end="", flush=True)  # there is no `sys.stdout` where it was closed before
        return code
    except DeviceGraphError as error:
        parser.error(str(error))
    except BrokenPipeError:
        # Whoever read the output has seen enough; what is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        parser.error(str(error) if error.filename is None else f"{error.filename}: {error.strerror}")
