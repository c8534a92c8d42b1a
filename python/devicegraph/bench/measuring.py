"""How everything is measured: ways that take turns in one run, medians, and ratios with their spread.

A ratio is the median of the rounds' ratios, with the quartiles as its spread. A round measures every way once, each
time beginning with another one, so that a machine that is busy or clocks down is so for all of them.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from devicegraph._core import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from devicegraph.devices import DeviceAdapter

#: Times of each way, one for each round.
Times = dict[str, list[float]]


@dataclass(frozen=True)
class Spread:
    """A median between the quartiles."""

    low: float
    median: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of one value or more."""
        if len(values) == 1:
            return Spread(values[0], values[0], values[0])
        return Spread(*statistics.quantiles(values, n=4, method="inclusive"))

    @staticmethod
    def ratio(times: Sequence[float], base: Sequence[float]) -> Spread:
        """Of the ratios of two ways, round by round."""
        return Spread.of([time / other for time, other in zip(times, base, strict=True)])

    @staticmethod
    def difference(times: Sequence[float], base: Sequence[float]) -> Spread:
        """Of what one way takes more than another, round by round."""
        return Spread.of([time - other for time, other in zip(times, base, strict=True)])

    def __str__(self) -> str:
        digits = 3 if abs(self.median) < 10 else 1
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def take_turns(ways: Mapping[str, Callable[[], float]], rounds: int) -> Times:
    """Measures all ways in every round.

    Args:
        ways: each runs a block of steps and returns what one of them took.
        rounds: how often; a first one, which loads and makes what is missing, is not counted.
    """
    names = list(ways)
    times: Times = {name: [] for name in names}
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            measured = ways[name]()
            if turn:
                times[name].append(measured)
    return times


def host_microseconds(adapter: DeviceAdapter, step: Callable[[], Any], steps: int) -> float:
    """Host time of a step: until the call returns. What it queued on the device is waited for outside of the clock."""
    adapter.synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    elapsed = time.perf_counter() - begun
    adapter.synchronize()
    return elapsed / steps * 1e6


def device_microseconds(step: Callable[[], Any], steps: int) -> float:
    """Device time of a step on CUDA, without the gaps that a slow host leaves between its kernels.

    The device is kept busy until all steps are queued, so that what lies between the two events is theirs alone. Steps
    that make the host wait for the device undo that, and show their gaps.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begun = time.perf_counter()
    step()
    seconds = time.perf_counter() - begun
    torch.cuda.synchronize()
    # About two billion cycles a second; twice what the host needs, and no more than a fifth of a second.
    torch.cuda._sleep(int(min(2 * steps * seconds + 1e-4, 0.2) * 2e9))
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / steps * 1e3


def queued_microseconds(adapter: DeviceAdapter, step: Callable[[], Any], steps: int) -> float:
    """Time of a step among others that follow at once, the host's part of each hidden behind the one before."""
    adapter.synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    adapter.synchronize()
    return (time.perf_counter() - begun) / steps * 1e6


def lone_microseconds(adapter: DeviceAdapter, step: Callable[[], Any], steps: int) -> float:
    """Time of a step that begins on an idle device, until its last kernel is done; the median of several."""
    times = []
    for _ in range(steps):
        adapter.synchronize()
        begun = time.perf_counter()
        step()
        adapter.synchronize()
        times.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(times)


@dataclass
class Table:
    """Rows of the same columns; printing it aligns them.

    Attributes:
        title: what is in it, for people.
        rows: what it says, by column.
        case: what all rows have in common, for programs.
    """

    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    case: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.rows:
            return f"{self.title}: nothing to show"
        cells = [list(self.rows[0]), *([_cell(value) for value in row.values()] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        is_text = [isinstance(value, str) for value in self.rows[0].values()]
        lines = [
            "  ".join(
                cell.ljust(width) if text else cell.rjust(width)
                for cell, width, text in zip(row, widths, is_text, strict=True)
            ).rstrip()
            for row in cells
        ]
        return "\n".join([self.title, *lines])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


@dataclass
class Result:
    """What one benchmark found.

    Attributes:
        name: the benchmark.
        device: what it ran on.
        tables: the figures.
        notes: what was left out and why, and what the figures come to.
    """

    name: str
    device: str
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values; a spread has `low`, `median` and `high`."""
        return {
            "benchmark": self.name,
            **about(self.device),
            "tables": [
                {"title": t.title, "case": t.case, "rows": [_plain_row(row) for row in t.rows]} for t in self.tables
            ],
            "notes": self.notes,
        }

    def __str__(self) -> str:
        data = about(self.device)
        head = [
            f"# {self.name} on {data['device']}",
            f"# {', '.join(f'{what} {value}' for what, value in data['versions'].items() if value is not None)}",
            f"# {data['date']}: {data['command']}",
        ]
        return "\n\n".join(["\n".join(head), *map(str, self.tables), *(["\n".join(self.notes)] if self.notes else [])])

    def write(self, folder: Path) -> None:
        """Writes the result into a folder, as text and as JSON."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.txt").write_text(f"{self}\n", encoding="utf-8")
        (folder / f"{self.name}.json").write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")


def _plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: vars(value) if isinstance(value, Spread) else value for name, value in row.items()}


def about(device: str) -> dict[str, Any]:
    """Where, when and with what something was measured."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{device}, {_processor()}"
    return {
        "device": name,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": {
            "devicegraph": __version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
    }


def _processor() -> str:
    return f"{platform.machine()} with {os.cpu_count()} processors"


def rows_of(times: Times, base: str) -> list[tuple[str, float, Spread]]:
    """Each way with its median, and its ratio to the base."""
    return [(name, statistics.median(each), Spread.ratio(each, times[base])) for name, each in times.items()]
