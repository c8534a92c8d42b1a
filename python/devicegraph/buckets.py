"""Buckets: which sizes are captured, and which of them a live size is padded to. The arithmetic is in the core."""

from __future__ import annotations

import csv

from devicegraph._core import (
    Buckets,
    DroppedBucket,
    OptimizedBuckets,
    decode_buckets,
    optimize_buckets,
    prefill_buckets,
)
from devicegraph.errors import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

__all__ = [
    "Buckets",
    "DroppedBucket",
    "OptimizedBuckets",
    "decode_buckets",
    "optimize_buckets",
    "prefill_buckets",
    "read_histogram",
    "write_histogram",
]

_HEADER = ["size", "count"]


def read_histogram(path: str | PathLike[str]) -> dict[int, int]:
    """Reads the steps of each live size from a CSV file with the header `size,count`.

    Sizes may come in any order, and more than once: their counts are added up, so that the files of several ranks or
    days can be joined.

    Raises:
        ConfigError: `csv-syntax`, with every line that is wrong.
        OSError: the file cannot be read.
    """
    histogram: dict[int, int] = {}
    problems = []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file)
            header = [cell.strip() for cell in next(lines, [])]
            if header != _HEADER:
                problems.append(f"line 1: `{','.join(header)}` is not the header `size,count`")
            for cells in lines:
                if cells and cells != _HEADER:
                    problem = _add(histogram, cells)
                    problems += [f"line {lines.line_num}: {problem}"] if problem else []
    except (csv.Error, UnicodeDecodeError) as error:
        problems.append(f"it is no CSV text: {error}")
    if problems:
        raise ConfigError(f"{path}: " + "\n".join(problems), code="csv-syntax")
    return histogram


def _add(histogram: dict[int, int], cells: list[str]) -> str | None:
    """Adds a line, or says what is wrong with it."""
    if len(cells) != 2:
        return f"{len(cells)} cells, not a size and a count"
    size, count = (cell.strip() for cell in cells)
    for name, cell, least in (("size", size, 1), ("count", count, 0)):
        # `int` takes more than a table should hold: signs, underscores, the digits of other scripts, thousands of them.
        if not (cell.isascii() and cell.isdigit() and len(cell) < 19) or int(cell) < least:
            return f"{name}: `{cell}` is not an integer of at least {least}"
    histogram[int(size)] = histogram.get(int(size), 0) + int(count)
    return None


def write_histogram(path: str | PathLike[str], histogram: Mapping[int, int]) -> None:
    """Writes the steps of each live size as `read_histogram` and `devicegraph buckets --optimize` read them.

    Raises:
        OSError: the file cannot be written.
    """
    with open(path, "w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(_HEADER)
        lines.writerows(sorted(histogram.items()))
