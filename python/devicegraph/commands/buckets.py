"""`devicegraph buckets`: which sizes are captured, and why others are not."""

from __future__ import annotations

import json

from devicegraph._core import read_argument
from devicegraph.buckets import Buckets, decode_buckets, prefill_buckets
from devicegraph.commands.explain import read_config
from devicegraph.config import Backend, Phase
from devicegraph.errors import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command: those of `decode_buckets` and `prefill_buckets`."""
    parser.add_argument("phase", choices=Phase.ALL, help="sizes are requests in decode, tokens in prefill")
    parser.add_argument("maximum", nargs="?", type=read_argument, metavar="MAX", help="the largest size")
    for name, about in (
        ("--limit", "the largest size that the engine can run"),
        ("--alignment", "what every size is a multiple of (default: 1)"),
        ("--num-tokens-per-bs", "tokens for each request, in decode (default: 1)"),
        ("--token-alignment", "what the tokens of every size are a multiple of, in decode (default: 1)"),
        ("--max-graphs", "keep so many sizes"),
        ("--max-bytes", "keep what takes no more bytes together"),
        ("--bytes-per-size", "the bytes of one graph"),
    ):
        parser.add_argument(name, type=read_argument, metavar="N", help=about)
    parser.add_argument(
        "--bs", type=read_argument, nargs="*", metavar="N", help="these sizes instead of a default list"
    )
    parser.add_argument("--preset", help="which default list: `default`, or `dense` for less padding with more graphs")
    parser.add_argument("--no-padding", action="store_true", help="pad no size to the next larger one")
    parser.add_argument("--config", metavar="CONFIG", help="sizes and padding from a JSON or TOML file, or JSON text")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints what was asked, kept and dropped, and why."""
    maximum, bs, padding = arguments.maximum, arguments.bs, not arguments.no_padding
    if arguments.config is not None:
        config = read_config(arguments.config)
        phase = config[arguments.phase]
        if phase.backend == Backend.DISABLED:
            raise ConfigError(
                f"{arguments.phase} is disabled by the configuration: it has no sizes", code="phase-disabled"
            )
        if maximum is None and bs is None:
            maximum, bs = phase.max_bs, phase.bs
        padding = padding and config.padding
    options: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in ("limit", "alignment", "max_graphs", "max_bytes", "bytes_per_size", "preset")
    }
    of_decode = {name: getattr(arguments, name) for name in ("num_tokens_per_bs", "token_alignment")}
    if arguments.phase == Phase.DECODE:
        buckets = decode_buckets(maximum, bs=bs, padding=padding, **options, **of_decode)
    else:
        for name, value in of_decode.items():
            if value is not None:
                raise ConfigError(f"`--{name.replace('_', '-')}` is for decode only", code="unknown-option")
        buckets = prefill_buckets(maximum, bs=bs, padding=padding, **options)
    print(json.dumps(_as_data(arguments.phase, buckets), indent=2) if arguments.json else buckets)
    return 0


def _as_data(phase: str, buckets: Buckets) -> dict[str, Any]:
    return {
        "phase": phase,
        "asked": buckets.asked,
        "sizes": buckets.sizes,
        "dropped": [
            {"size": drop.size, "code": drop.code, "message": drop.message, "hint": drop.hint}
            for drop in buckets.dropped
        ],
        "maximum": buckets.maximum,
        "padding": buckets.padding,
        "total_bytes": buckets.total_bytes,
    }
