"""`devicegraph buckets`: which sizes are captured, and why others are not; or which would pad the least."""

from __future__ import annotations

import json

from devicegraph._core import read_argument
from devicegraph.buckets import Buckets, decode_buckets, optimize_buckets, prefill_buckets, read_histogram
from devicegraph.commands.explain import read_config
from devicegraph.config import Backend, Phase
from devicegraph.errors import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from devicegraph.buckets import OptimizedBuckets

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command: those of `decode_buckets` and `prefill_buckets`."""
    parser.add_argument(
        "phase",
        nargs="?",
        default=Phase.DECODE,
        choices=Phase.ALL,
        help="sizes are requests in decode (the default), tokens in prefill",
    )
    parser.add_argument("maximum", nargs="?", type=read_argument, metavar="MAX", help="the largest size")
    for name, about in (
        ("--limit", "the largest size that the engine can run"),
        ("--alignment", "what every size is a multiple of (default: 1)"),
        ("--num-tokens-per-bs", "tokens for each request, in decode (default: 1)"),
        ("--token-alignment", "what the tokens of every size are a multiple of, in decode (default: 1)"),
        ("--max-graphs", "keep so many sizes"),
        ("--max-bytes", "keep what takes no more bytes together"),
        ("--bytes-per-size", "the bytes of one graph"),
        ("--bytes-per-row", "and for each of its rows, with `--optimize`"),
    ):
        parser.add_argument(name, type=read_argument, metavar="N", help=about)
    parser.add_argument(
        "--bs", type=read_argument, nargs="*", metavar="N", help="these sizes instead of a default list"
    )
    parser.add_argument("--preset", help="which default list: `default`, or `dense` for less padding with more graphs")
    parser.add_argument("--no-padding", action="store_true", help="pad no size to the next larger one")
    parser.add_argument("--config", metavar="CONFIG", help="sizes and padding from a JSON or TOML file, or JSON text")
    parser.add_argument(
        "--optimize",
        metavar="FILE",
        help="find the list that pads the least for the live sizes in a CSV file with the header `size,count`; "
        "without a budget, of as many sizes as the default list",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints what was asked, kept and dropped, and why; with `--optimize` the best list and what it saves."""
    if arguments.optimize is not None:
        return _optimize(arguments)
    if arguments.bytes_per_row is not None:
        raise ConfigError("`--bytes-per-row` goes with `--optimize`", code="unknown-option")
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
    buckets = _buckets(arguments, maximum, bs=bs, padding=padding, **options)
    print(json.dumps(_as_data(arguments.phase, buckets), indent=2) if arguments.json else buckets)
    return 0


def _buckets(arguments: argparse.Namespace, maximum: Any, **options: Any) -> Buckets:
    of_decode = {name: getattr(arguments, name) for name in ("num_tokens_per_bs", "token_alignment")}
    if arguments.phase == Phase.DECODE:
        return decode_buckets(maximum, **options, **of_decode)
    for name, value in of_decode.items():
        if value is not None:
            raise ConfigError(f"`--{name.replace('_', '-')}` is for decode only", code="unknown-option")
    return prefill_buckets(maximum, **options)


def _optimize(arguments: argparse.Namespace) -> int:
    for name in ("bs", "no_padding", "config", "token_alignment"):
        if getattr(arguments, name) not in (None, False):
            raise ConfigError(f"`--{name.replace('_', '-')}` does not go with `--optimize`", code="unknown-option")
    histogram = read_histogram(arguments.optimize)
    bytes_per_size, bytes_per_row = arguments.bytes_per_size, arguments.bytes_per_row
    if type(bytes_per_row) is int and type(bytes_per_size or 0) is int:
        each = bytes_per_size or 0
        bytes_per_size = lambda size: each + bytes_per_row * size  # noqa: E731
    elif bytes_per_row is not None:
        raise ConfigError(f"bytes_per_row: `{bytes_per_row}` is not a number of bytes", code="wrong-type")
    options = {"maximum": arguments.maximum, "alignment": arguments.alignment, "limit": arguments.limit}
    # Its largest size is that of any list for these sizes.
    one = optimize_buckets(histogram, 1, **options)
    default = _buckets(arguments, one.sizes[-1], alignment=arguments.alignment, preset=arguments.preset)
    max_graphs = arguments.max_graphs
    if max_graphs is None and arguments.max_bytes is None:
        max_graphs = len(default)
    best = optimize_buckets(histogram, max_graphs, arguments.max_bytes, bytes_per_size=bytes_per_size, **options)
    print(json.dumps(_comparison(best, default), indent=2) if arguments.json else _compare(best, default))
    return 0


def _compare(best: OptimizedBuckets, default: Buckets) -> str:
    data = _comparison(best, default)
    saved, of = data["saved_rows"], data["default"]["padded_rows"]
    lines = [
        str(best),
        f"default  {of} rows ({_share(of, best):.1%}) with {len(default)} graphs: {repr(default)[9:-1]}",
        f"saving   {saved} padded rows against the default list" + (f" ({saved / of:.1%})" if of else ""),
        "",
        "graphs  padded rows",
    ]
    width = len(str(best.curve[0]))
    for graphs, padded in enumerate(best.curve[: max(len(best.sizes), len(default))], start=1):
        lines.append(f"{graphs:6}  {padded:{width}}  {_share(padded, best):6.1%}")
    return "\n".join(lines)


def _share(padded_rows: int, best: OptimizedBuckets) -> float:
    return padded_rows / (padded_rows + best.raw_rows) if padded_rows else 0.0


def _comparison(best: OptimizedBuckets, default: Buckets) -> dict[str, Any]:
    padded = best.padded_rows_with(default.sizes)
    return {
        "sizes": best.sizes,
        "steps": best.steps,
        "eager_steps": best.eager_steps,
        "raw_rows": best.raw_rows,
        "padded_rows": best.padded_rows,
        "waste": best.waste,
        "total_bytes": best.total_bytes,
        "default": {"sizes": default.sizes, "padded_rows": padded, "waste": _share(padded, best)},
        "saved_rows": padded - best.padded_rows,
        "curve": best.curve,
    }


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
