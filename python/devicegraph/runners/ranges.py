"""Ranges of a step for a profiler, named by phase and graph: fill, prepare, replay.

A runner that is asked for them has its steps wrapped on the instance; one that is not runs no line of this.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from devicegraph.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from devicegraph.runners.shape_key import ShapeKey


def mark_steps(runner: Any) -> None:
    """Wraps what a step of a `BaseCudaGraphRunner` consists of.

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
    #: Whether a range of `_prepare` is open, which metadata then ends.
    filling = False

    @contextmanager
    def open_range(what: str, key: ShapeKey | None) -> Iterator[None]:
        push(f"devicegraph {runner.phase}, {'eager' if key is None else key}: {what}")
        try:
            yield
        finally:
            pop()

    prepare, prepare_metadata = runner._prepare, runner._prepare_metadata

    @functools.wraps(prepare)
    def fill(forward_batch: Any, key: ShapeKey, *sizes: int) -> Any:
        nonlocal filling
        filling = True
        try:
            with open_range("fill", key):
                return prepare(forward_batch, key, *sizes)
        finally:
            filling = False

    @functools.wraps(prepare_metadata)
    def metadata(batch: Any, key: ShapeKey | None) -> None:
        nonlocal filling
        if filling:
            # What follows the fill is beside it and not in it; `fill` closes the range that is opened here.
            filling = False
            pop()
            push(f"devicegraph {runner.phase}, {key}: prepare")
            prepare_metadata(batch, key)
        else:
            with open_range("prepare", key):
                prepare_metadata(batch, key)

    runner._prepare = fill
    runner._prepare_metadata = metadata
    if runner.backend is not None:
        runner.backend.replay = _within(runner.backend.replay, open_range)


def _within(replay: Callable[..., Any], open_range: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(replay)
    def marked(shape_key: ShapeKey, *arguments: Any, **keywords: Any) -> Any:
        with open_range("replay", shape_key):
            return replay(shape_key, *arguments, **keywords)

    return marked
