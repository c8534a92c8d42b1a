"""What a capture did: for each graph its seconds and bytes, and what was dropped and why."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from devicegraph.runners.shape_key import ShapeKey

__all__ = ["CaptureReport", "CapturedBucket", "DroppedCapture"]


@dataclass(frozen=True)
class CapturedBucket:
    """One captured graph.

    Attributes:
        key: the graph's key.
        seconds: warm-ups and capture, wall clock.
        reserved_bytes: what the allocator's reserved memory grew by.
        device_bytes: what the device's free memory shrank by, the graph's executable included; None where the device
            does not tell.
    """

    key: ShapeKey
    seconds: float
    reserved_bytes: int
    device_bytes: int | None


@dataclass(frozen=True)
class DroppedCapture:
    """A graph that is not there, and why."""

    key: ShapeKey
    reason: str


@dataclass(frozen=True)
class CaptureReport:
    """What one `capture()` did; printing it gives a table.

    Attributes:
        phase: the phase.
        backend: the backend's word.
        captured: the graphs, in the order of capture.
        dropped: graphs that could not be captured, or that another rank could not.
        note: why there is no graph at all, where there is none.
        fallback: why the backend is `breakable` where `tc_piecewise` is configured: `no-split-ops` where there is
            nothing to split at, or `torch-too-old`.
        traces: how often torch.compile traced the forward for these graphs; 0 where nothing is compiled.
        executor: how a step fills the buffers: `node`, `native` or `foreach`; None where there is no graph.
        executor_reason: why not in a faster way, where that was not asked for.
    """

    phase: str
    backend: str
    captured: tuple[CapturedBucket, ...] = ()
    dropped: tuple[DroppedCapture, ...] = field(default=())
    note: str | None = None
    fallback: str | None = None
    traces: int = 0
    executor: str | None = None
    executor_reason: str | None = None

    @property
    def seconds(self) -> float:
        """All captures together."""
        return sum(bucket.seconds for bucket in self.captured)

    @property
    def reserved_bytes(self) -> int:
        """All captures together."""
        return sum(bucket.reserved_bytes for bucket in self.captured)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values; keys as dictionaries of what is set in them."""
        return {
            "phase": self.phase,
            "backend": self.backend,
            "seconds": self.seconds,
            "reserved_bytes": self.reserved_bytes,
            "captured": [
                {
                    "key": plain_key(b.key),
                    "seconds": b.seconds,
                    "reserved_bytes": b.reserved_bytes,
                    "device_bytes": b.device_bytes,
                }
                for b in self.captured
            ],
            "dropped": [{"key": plain_key(d.key), "reason": d.reason} for d in self.dropped],
            "note": self.note,
            "fallback": self.fallback,
            "traces": self.traces,
            "executor": self.executor,
            "executor_reason": self.executor_reason,
        }

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        title = f"{self.phase}, backend `{self.backend}`" + (f" ({self.fallback})" if self.fallback else "")
        if self.note is not None:
            return f"{title}: no graphs, {self.note}"
        rows = [("graph", "seconds", "reserved", "device")]
        rows += [
            (str(b.key), f"{b.seconds:.3f}", format_bytes(b.reserved_bytes), format_bytes(b.device_bytes))
            for b in self.captured
        ]
        rows.append((f"{len(self.captured)} graphs", f"{self.seconds:.3f}", format_bytes(self.reserved_bytes), ""))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        if self.executor is not None:
            lines.append(f"filled by `{self.executor}`" + (f": {self.executor_reason}" if self.executor_reason else ""))
        return "\n".join([title, *lines, *(f"dropped {d.key}: {d.reason}" for d in self.dropped)])


def format_bytes(count: int | None) -> str:
    """A number of bytes for people: `1.5 MiB`; a dash where it is not known."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def plain_key(key: ShapeKey) -> dict[str, Any]:
    """What is set in a key, by name."""
    return {name: value for name, value in key._asdict().items() if value is not None}
