"""Showing how far a capture is: one line on rank 0, or whatever a callback makes of the events."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from devicegraph.runners.shape_key import ShapeKey

__all__ = ["CaptureProgress"]


class CaptureProgress(NamedTuple):
    """One graph was captured or dropped.

    Attributes:
        phase: the phase.
        key: the graph's key.
        done: graphs captured or dropped so far, this one included.
        total: graphs to capture.
        seconds: what this one took.
        free_bytes: the device's free memory now; None where it does not tell.
    """

    phase: str
    key: ShapeKey
    done: int
    total: int
    seconds: float
    free_bytes: int | None


def show_progress(rank: int) -> Callable[[CaptureProgress], None]:
    """The default: a bar on rank 0 if standard error is a terminal, tqdm's where tqdm is installed; else silence."""
    if rank != 0 or not sys.stderr.isatty():
        return lambda event: None
    try:
        from tqdm import tqdm
    except ImportError:
        return _print_line
    bar: Any = None

    def update(event: CaptureProgress) -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(total=event.total, desc=f"capture {event.phase}", unit="graph")
        bar.set_postfix_str(_describe(event))
        bar.update(1)
        if event.done == event.total:
            bar.close()

    return update


def _print_line(event: CaptureProgress) -> None:
    end = "\n" if event.done == event.total else ""
    sys.stderr.write(f"\rcapture {event.phase}: {event.done}/{event.total}, {_describe(event)}{end}")
    sys.stderr.flush()


def _describe(event: CaptureProgress) -> str:
    free = "" if event.free_bytes is None else f", {event.free_bytes / 2**30:.1f} GiB free"
    return f"{event.key}, {event.seconds:.2f} s{free}"
