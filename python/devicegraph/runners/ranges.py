"""Ranges of a step for a profiler, named by phase and graph: fill, prepare, replay.

A runner that is asked for them has its steps wrapped on the instance; one that is not runs no line of this.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from devicegraph.errors import BackendError
from devicegraph.runners.wrapping import unheld

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from devicegraph.runners.captured import CapturedGraph
    from devicegraph.runners.shape_key import ShapeKey


def nvtx_ranges(runner: Any) -> Callable[[str], AbstractContextManager[Any]]:
    """What opens an NVTX range.

    Raises:
        BackendError: `nvtx-not-available`: the device has no such ranges.
    """
    ranges = runner.adapter.profiler_ranges()
    if ranges is None:
        raise BackendError(
            f"nvtx: device `{runner.adapter.device}` has no ranges for a profiler",
            code="nvtx-not-available",
            hint="leave `nvtx` out; ranges are for CUDA",
        )
    push, pop = ranges

    @contextmanager
    def open_range(name: str) -> Iterator[None]:
        push(name)
        try:
            yield
        finally:
            pop()

    return open_range


def mark_steps(runner: Any, open_range: Callable[[str], AbstractContextManager[Any]]) -> None:
    """Wraps what a step of a `BaseCudaGraphRunner` consists of, each part in a range of its own."""
    phase: str = runner.phase

    def range_of(what: str, key: ShapeKey | None) -> AbstractContextManager[Any]:
        return open_range(f"devicegraph {phase}, {'eager' if key is None else key}: {what}")

    fill, prepare, launch = map(unheld, (runner._fill, runner._prepare_metadata, runner._launch))

    @functools.wraps(fill)
    def marked_fill(forward_batch: Any, key: ShapeKey, *sizes: Any) -> None:
        with range_of("fill", key):
            fill(forward_batch, key, *sizes)

    @functools.wraps(prepare)
    def marked_prepare(batch: Any, key: ShapeKey | None) -> None:
        with range_of("prepare", key):
            prepare(batch, key)

    @functools.wraps(launch)
    def marked_launch(graph: CapturedGraph, static_batch: Any) -> None:
        with range_of("replay", graph.key):
            launch(graph, static_batch)

    runner._fill, runner._prepare_metadata, runner._launch = marked_fill, marked_prepare, marked_launch
