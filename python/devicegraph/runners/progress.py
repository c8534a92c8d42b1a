"""Showing how far a capture is, on rank 0: a bar in a terminal, else log records; or what a callback makes of it."""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from devicegraph.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable

    from devicegraph.report import CaptureReport
    from devicegraph.runners.shape_key import ShapeKey

__all__ = ["CaptureProgress", "json_progress"]


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

    def to_dict(self) -> dict[str, Any]:
        """The event as plain values; the key as a dictionary of what is set in it."""
        return {**self._asdict(), "key": self.key.to_dict()}

    def __str__(self) -> str:
        return f"capture {self.phase}: {self.done}/{self.total}, {_describe(self)}"


def show_progress(rank: int) -> Callable[[CaptureProgress], None]:
    """The default, on rank 0: a bar if standard error is a terminal, tqdm's where it is installed; else log records."""
    if rank != 0:
        return lambda event: None
    if not sys.stderr.isatty():
        return _log
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
            bar = None  # the next capture has a bar of its own

    return update


def json_progress(file: TextIO | None = None) -> Callable[[CaptureProgress], None]:
    """Progress for programs, for a runner's `progress`: a line of JSON for each graph, with what `CaptureProgress` has.

    Args:
        file: where to; standard error unless given. Each line is flushed.
    """

    def write(event: CaptureProgress) -> None:
        print(json.dumps({"event": "captured", **event.to_dict()}), file=file or sys.stderr, flush=True)

    return write


def log_report(report: CaptureReport, rank: int) -> None:
    """Logs what a capture came to: on rank 0 the sum of it, on every rank what went another way than was asked for."""
    fields = report.to_dict()
    if rank == 0:
        log(logging.INFO, "capture", report.summary, fields)
    if report.fallback is not None:
        message = f"{report.phase}: `tc_piecewise` is captured by `{report.backend}`: {report.fallback}"
        log(logging.WARNING, "fallback", message, {"phase": report.phase, "reason": report.fallback})
    for drop in report.dropped:
        message = f"{report.phase}: dropped {drop.key}: {drop.reason}"
        log(logging.WARNING, "dropped", message, {"key": drop.key.to_dict(), "reason": drop.reason})
    for left_out in report.left_out_by_reason:
        message = f"{report.phase}: left out {left_out}"
        log(logging.WARNING, "left-out", message, {"phase": report.phase, "left_out": fields["left_out"]})


def _log(event: CaptureProgress) -> None:
    log(logging.INFO, "captured", str(event), event.to_dict())


def _print_line(event: CaptureProgress) -> None:
    end = "\n" if event.done == event.total else ""
    sys.stderr.write(f"\r{event}{end}")
    sys.stderr.flush()


def _describe(event: CaptureProgress) -> str:
    free = "" if event.free_bytes is None else f", {event.free_bytes / 2**30:.1f} GiB free"
    return f"{event.key}, {event.seconds:.2f} s{free}"
