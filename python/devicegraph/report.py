"""What a capture did: each graph's seconds and bytes, what was expected, what was dropped and why; and a plot."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from devicegraph.errors import BackendError

if TYPE_CHECKING:
    from os import PathLike

    from matplotlib.figure import Figure

    from devicegraph.buckets import DroppedBucket
    from devicegraph.runners.shape_key import ShapeKey

__all__ = ["CaptureEstimate", "CaptureReport", "CapturedBucket", "DroppedCapture", "InputBuffer"]


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
class InputBuffer:
    """A static input buffer of a runner.

    Attributes:
        name: the slot.
        bytes: of the whole buffer.
        shared_with: the other users of its memory, by the labels that the input-buffer pool prints; empty where it is
            the runner's own.
    """

    name: str
    bytes: int
    shared_with: tuple[str, ...] = ()


@dataclass(frozen=True)
class CaptureEstimate:
    """What a capture is going to take, from three graphs that were captured and dropped again; prints as one line.

    The first graph in order of capture pays for the memory that all of them share: its bytes are taken as they were
    measured. Those of the others lie on the line through the second graph and the last, by size. So do the seconds of
    all: what the first one took besides was for what is loaded once in a process.

    Attributes:
        graphs: how many graphs it is about.
        seconds: all of them together.
        reserved_bytes: what the allocator's reserved memory is going to grow by.
        device_bytes: what the device's free memory is going to shrink by; None where the device does not tell.
        sampled: what was measured: the first graph, the second one and the last, or all where there are no more.
    """

    graphs: int
    seconds: float
    reserved_bytes: int
    device_bytes: int | None
    sampled: tuple[CapturedBucket, ...]

    @classmethod
    def of(cls, sampled: tuple[CapturedBucket, ...], sizes: list[int]) -> CaptureEstimate:
        """The estimate for graphs of these sizes, in order of capture; the first, second and last were measured."""
        measured = [b.key.size for b in sampled]
        reserved = _extrapolate([b.reserved_bytes for b in sampled], measured, sizes)
        on_device = [b.device_bytes for b in sampled if b.device_bytes is not None]
        device = round(_extrapolate(on_device, measured, sizes)) if len(on_device) == len(sampled) else None
        # What is loaded once was loaded for the first sample, and will not be again.
        later = [b.seconds for b in sampled[1:]] or [sampled[0].seconds]
        constant, slope = _line(later, measured[1:] or measured)
        seconds = sum(max(constant + slope * size, 0.0) for size in sizes)
        return cls(len(sizes), seconds, round(reserved), device, sampled)

    def bytes_per_size(self, size: int) -> int:
        """What the graph of a size takes besides what all share, as `optimize_buckets` and `Buckets` take it.

        Of the device's memory where that is known, else of the allocator's. It does not fall as the size grows.
        """
        values = [b.reserved_bytes if self.device_bytes is None else b.device_bytes or 0 for b in self.sampled]
        if len(values) < 2:
            return 0
        constant, per_row = _line(values[1:], [b.key.size for b in self.sampled[1:]])
        if per_row < 0:
            constant, per_row = max(values[1:]), 0.0
        return max(round(constant + per_row * size), 0)

    def __str__(self) -> str:
        memory = f"reserved {format_bytes(self.reserved_bytes)}, device {format_bytes(self.device_bytes)}"
        return f"{self.graphs} graphs: {self.seconds:.3f} s, {memory}; estimated from {len(self.sampled)}"

    def to_dict(self) -> dict[str, Any]:
        """The estimate as plain values."""
        return {
            "graphs": self.graphs,
            "seconds": self.seconds,
            "reserved_bytes": self.reserved_bytes,
            "device_bytes": self.device_bytes,
            "sampled": [b.key.to_dict() for b in self.sampled],
        }


def _line(values: list[Any], sizes: list[int]) -> tuple[float, float]:
    """The constant and the slope of the line through the first and the last of these values."""
    if sizes[0] == sizes[-1]:
        return sum(values) / len(values), 0.0
    slope = (values[0] - values[-1]) / (sizes[0] - sizes[-1])
    return values[0] - slope * sizes[0], slope


def _extrapolate(values: list[Any], sampled: list[int], sizes: list[int]) -> float:
    total = float(values[0])
    if len(sizes) > 1:
        constant, slope = _line(values[1:], sampled[1:])
        total += sum(max(constant + slope * size, 0.0) for size in sizes[1:])
    return total


@dataclass(frozen=True)
class CaptureReport:
    """What one `capture()` did; printing it gives a table.

    Attributes:
        phase: the phase.
        backend: the backend's word.
        captured: the graphs, in the order of capture.
        dropped: graphs that could not be captured, or that another rank could not.
        left_out: sizes that were asked for and are no buckets here, with the codes of `DroppedBucket`.
        note: why there is no graph at all, where there is none.
        fallback: why the backend is `breakable` where `tc_piecewise` is configured: `no-split-ops` where there is
            nothing to split at, `torch-too-old`, or `not-on-device`.
        traces: how often torch.compile traced the forward for these graphs; 0 where nothing is compiled.
        executor: how a step fills the buffers: `node`, `native` or `foreach`; None where there is no graph.
        executor_reason: why it is no faster one, where nothing was asked for.
        estimate: what `estimate_capture()` had said, where it was asked.
        inputs: the static input buffers, and who shares each.
    """

    phase: str
    backend: str
    captured: tuple[CapturedBucket, ...] = ()
    dropped: tuple[DroppedCapture, ...] = field(default=())
    left_out: tuple[DroppedBucket, ...] = ()
    note: str | None = None
    fallback: str | None = None
    traces: int = 0
    executor: str | None = None
    executor_reason: str | None = None
    estimate: CaptureEstimate | None = None
    inputs: tuple[InputBuffer, ...] = ()

    @property
    def seconds(self) -> float:
        """All captures together."""
        return sum(bucket.seconds for bucket in self.captured)

    @property
    def reserved_bytes(self) -> int:
        """All captures together."""
        return sum(bucket.reserved_bytes for bucket in self.captured)

    @property
    def device_bytes(self) -> int | None:
        """All captures together; None where the device does not tell."""
        known = [bucket.device_bytes for bucket in self.captured if bucket.device_bytes is not None]
        return sum(known) if len(known) == len(self.captured) > 0 else None

    @property
    def summary(self) -> str:
        """The report in one line."""
        title = f"{self.phase}, backend `{self.backend}`" + (f" ({self.fallback})" if self.fallback else "")
        if self.note is not None:
            return f"{title}: no graphs, {self.note}"
        dropped = f", {len(self.dropped)} dropped" if self.dropped else ""
        figures = f"{self.seconds:.2f} s, {format_bytes(self.reserved_bytes)} reserved"
        return f"{title}: {len(self.captured)} graphs in {figures}{dropped}"

    @property
    def left_out_by_reason(self) -> list[str]:
        """`left_out` as text, an entry for each code; `runner.buckets` says more."""
        sizes: dict[str, list[str]] = {}
        for bucket in self.left_out:
            sizes.setdefault(bucket.code, []).append(str(bucket.size))
        return [f"{', '.join(those)}: `{code}`" for code, those in sizes.items()]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values; keys as dictionaries of what is set in them."""
        return {
            "phase": self.phase,
            "backend": self.backend,
            "seconds": self.seconds,
            "reserved_bytes": self.reserved_bytes,
            "captured": [
                {
                    "key": b.key.to_dict(),
                    "seconds": b.seconds,
                    "reserved_bytes": b.reserved_bytes,
                    "device_bytes": b.device_bytes,
                }
                for b in self.captured
            ],
            "dropped": [{"key": d.key.to_dict(), "reason": d.reason} for d in self.dropped],
            "left_out": [{"size": bucket.size, "code": bucket.code} for bucket in self.left_out],
            "note": self.note,
            "fallback": self.fallback,
            "traces": self.traces,
            "executor": self.executor,
            "executor_reason": self.executor_reason,
            "estimate": None if self.estimate is None else self.estimate.to_dict(),
            "inputs": [{"name": i.name, "bytes": i.bytes, "shared_with": list(i.shared_with)} for i in self.inputs],
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
        lines += [f"dropped {d.key}: {d.reason}" for d in self.dropped]
        lines += [f"left out {text}" for text in self.left_out_by_reason]
        if self.estimate is not None:
            lines.append(self._compare(self.estimate))
        if self.inputs:
            lines.append(f"{len(self.inputs)} input buffers, {format_bytes(sum(i.bytes for i in self.inputs))}")
            lines += [f"  `{i.name}` is shared with {', '.join(i.shared_with)}" for i in self.inputs if i.shared_with]
        return "\n".join([title, *lines])

    def _compare(self, estimate: CaptureEstimate) -> str:
        """The estimate against what it came to: how far off it was, in hundredths of what it came to."""
        parts = [f"{estimate.seconds:.3f} s{_error(estimate.seconds, self.seconds)}"]
        for name, expected, actual in (
            ("reserved", estimate.reserved_bytes, self.reserved_bytes),
            ("device", estimate.device_bytes, self.device_bytes),
        ):
            if expected is not None and actual is not None:
                parts.append(f"{name} {format_bytes(expected)}{_error(expected, actual)}")
        return f"estimate from {len(estimate.sampled)} graphs: {', '.join(parts)}"

    def plot(self, path: str | PathLike[str]) -> None:
        """Draws memory and seconds by graph, ascending by size; the suffix of the file says the format, as `.png`.

        Raises:
            BackendError: `matplotlib-missing`.
            OSError: the file cannot be written.
        """
        self._figure().savefig(path)

    def _figure(self) -> Figure:
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise BackendError(
                f"a report is drawn with matplotlib, which cannot be loaded: {error}",
                code="matplotlib-missing",
                hint="run `pip install matplotlib`, or `pip install devicegraph[plot]`",
            ) from error
        buckets = sorted(self.captured, key=lambda b: (b.key.size, str(b.key)))
        places, names = range(len(buckets)), [str(b.key).removeprefix("bucket ") for b in buckets]
        # A figure of its own: pyplot would keep it, and pick a window system.
        figure = Figure(figsize=(max(6.0, 2.0 + 0.25 * len(buckets)), 6.0), layout="constrained")
        figure.suptitle(self.summary)
        memory, seconds = figure.subplots(2, 1, sharex=True)
        memory.bar(places, [b.reserved_bytes / 2**20 for b in buckets], 0.8, label="reserved by the allocator")
        if self.device_bytes is not None:
            on_device = [(b.device_bytes or 0) / 2**20 for b in buckets]
            memory.bar(places, on_device, 0.4, label="of the device's free memory")
        memory.set_ylabel("MiB")
        memory.legend()
        seconds.bar(places, [b.seconds for b in buckets], 0.8)
        seconds.set_ylabel("seconds")
        seconds.set_xlabel("tokens" if self.phase == "prefill" else "requests")
        seconds.set_xticks(list(places), names, rotation=90)
        return figure


def _error(expected: float, actual: float) -> str:
    return f" ({(expected - actual) / actual:+.0%})" if actual > 0 else ""


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
