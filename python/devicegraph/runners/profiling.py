"""Profiles of captures, and ranges of steps for torch's profiler, which is there on every device.

A runner that is asked for them has its captures and steps wrapped on the instance; one that is not runs no line of it.
"""

from __future__ import annotations

import functools
import os
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import profile, record_function

from devicegraph.errors import ConfigError
from devicegraph.runners.ranges import mark_steps

if TYPE_CHECKING:
    from devicegraph.report import CaptureReport
    from devicegraph.runners.base import BaseCudaGraphRunner
    from devicegraph.runners.shape_key import ShapeKey

#: Operators in the table, by their own time on the host.
ROWS = 50


def profile_captures(runner: BaseCudaGraphRunner, folder: str | os.PathLike[str]) -> None:
    """Lets each `capture()` leave a trace and a table of its operators in a folder, and marks what a trace shows.

    Raises:
        ConfigError: `wrong-type`: no path.
    """
    given: object = folder
    if not isinstance(given, (str, os.PathLike)):
        raise ConfigError(f"profile: {given!r} is no path of a folder", code="wrong-type")
    # Bound: whoever has nothing but `runner.capture` captures. Such a runner waits for the collector when it goes.
    capture, capture_key = runner.capture, runner.capture_key
    name, phase = f"{runner.purpose}-rank{runner.hooks.rank}", runner.phase

    @functools.wraps(capture)
    def profiled() -> CaptureReport:
        # What goes wrong with a trace should do so before the minutes of a capture.
        Path(folder).mkdir(parents=True, exist_ok=True)
        with profile(record_shapes=True) as profiler:
            report = capture()
        base = _free_name(Path(folder), name)
        profiler.export_chrome_trace(f"{base}.json")
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=ROWS)
        Path(f"{base}.txt").write_text(table, encoding="utf-8")
        return report

    @functools.wraps(capture_key)
    def marked(key: ShapeKey) -> Any:
        with record_function(f"devicegraph {phase}, {key}: capture"):
            return capture_key(key)

    runner.capture, runner.capture_key = profiled, marked  # type: ignore[method-assign]
    mark_steps(runner, record_function)


def _free_name(folder: Path, name: str) -> Path:
    """The path of a profile without its ending, numbered from the second on."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(folder / each for each in names if not (folder / f"{each}.json").exists())
