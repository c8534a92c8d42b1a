"""`devicegraph bench`: rerun the measurements on this machine, and print ratios with their spread."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Final

from devicegraph.commands.arguments import positive_integer
from devicegraph.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from devicegraph.bench.fill import Peer
    from devicegraph.bench.measuring import Result

BENCHMARKS: Final = {
    "fill": "the inputs of a step into the static buffers, against copies by hand",
    "step": "whole steps, against the bare replay in them",
    "memory": "what the graphs of all buckets hold, against the largest alone",
    "capture": "seconds to capture, against a bare loop",
    "start": "import, configuration, plans and look-ups",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument(
        "benchmark", choices=BENCHMARKS, help="; ".join(f"{name}: {about}" for name, about in BENCHMARKS.items())
    )
    add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what every benchmark takes."""
    parser.add_argument("--device", help="what to measure on, such as cuda:1 or cpu (default: a GPU if there is one)")
    parser.add_argument("--rounds", type=positive_integer, help="how often every way takes its turn")
    parser.add_argument("--small", action="store_true", help="tiny models, few rounds: to see that all of it runs")
    parser.add_argument("--launches", action="store_true", help="count what each fill launches, too (fill, on a GPU)")
    parser.add_argument("--share-executables", action="store_true", help="with shared executables, too (memory)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="write the result there as text and as JSON, too")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints, and returns 0.

    Raises:
        DeviceGraphError: the device cannot be used here, or the result could not be written.
    """
    show(measure(arguments), arguments)
    return 0


def show(result: Result, arguments: argparse.Namespace) -> None:
    """Writes and prints a result as the arguments say."""
    sys.stdout.write((json.dumps(result.to_dict(), indent=2) if arguments.json else str(result)) + "\n")
    if arguments.out is not None:
        result.write(arguments.out)


def measure(arguments: argparse.Namespace, *, peers: dict[str, Peer] | None = None) -> Result:
    """Runs the benchmark that the arguments name.

    Args:
        arguments: parsed.
        peers: of `fill`: other ways to do the same, by name.

    Raises:
        ConfigError: `out-unwritable`: the result could not be written, which would show after minutes else.
    """
    if arguments.out is not None:
        try:
            arguments.out.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=arguments.out).close()
        except OSError as error:
            what = f"`--out`: nothing can be written to `{arguments.out}`: {error.strerror}"
            raise ConfigError(what, code="out-unwritable") from error
    # torch is loaded here, not where the parser is built.
    import torch

    from devicegraph.bench import capture, fill, memory, start, step
    from devicegraph.devices import get_device_adapter

    device = arguments.device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    adapter = get_device_adapter(device)
    small, rounds = arguments.small, arguments.rounds
    ways: dict[str, Callable[[], Result]] = {
        "fill": lambda: fill.measure(adapter, small=small, count=arguments.launches, rounds=rounds, peers=peers),
        "step": lambda: step.measure(adapter, small=small, rounds=rounds),
        "memory": lambda: memory.measure(adapter, small=small, share=arguments.share_executables),
        "capture": lambda: capture.measure(adapter, small=small, rounds=rounds),
        "start": lambda: start.measure(adapter, small=small, rounds=rounds),
    }
    return ways[arguments.benchmark]()
