"""The loop over the shapes of a capture: each one is measured, voted on and reported; then rows are found."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from devicegraph.errors import CaptureError
from devicegraph.outputs import infer_row_axes, shapes_of
from devicegraph.parallel import Proposal
from devicegraph.report import CapturedBucket, DroppedCapture
from devicegraph.runners.progress import CaptureProgress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from devicegraph.outputs import RowAxis
    from devicegraph.runners.base import BaseCudaGraphRunner
    from devicegraph.runners.shape_key import ShapeKey

    Shapes = dict[ShapeKey, list[tuple[int, ...]]]


def capture_shapes(
    runner: BaseCudaGraphRunner, keys: Sequence[ShapeKey]
) -> tuple[tuple[CapturedBucket, ...], tuple[DroppedCapture, ...]]:
    """Captures the graphs of `keys` in order, inside the backend's session; what was captured, and what was dropped.

    Raises:
        CaptureError: a forward that cannot be captured, or with `on_error="raise"` one that ran out of memory.
    """
    captured: list[CapturedBucket] = []
    dropped: list[DroppedCapture] = []
    shapes: Shapes = {}
    for done, key in enumerate(keys, start=1):
        started, before = time.perf_counter(), runner.adapter.memory()
        problem = _capture_one(runner, key, shapes)
        seconds, after = time.perf_counter() - started, runner.adapter.memory()
        if problem is None:
            device_bytes = None if before.free is None or after.free is None else before.free - after.free
            captured.append(CapturedBucket(key, seconds, after.reserved - before.reserved, device_bytes))
        else:
            runner.drop_graph(key)
            dropped.append(DroppedCapture(key, problem))
        runner.progress(CaptureProgress(runner.phase, key, done, len(keys), seconds, after.free))
    for label in runner.hooks.variants:
        _find_rows(runner, label, {key.size: found for key, found in shapes.items() if key.variant_label == label})
    return tuple(captured), tuple(dropped)


def _capture_one(runner: BaseCudaGraphRunner, key: ShapeKey, shapes: Shapes) -> str | None:
    """Captures one graph on all ranks, and returns None, or why there is none."""
    error: CaptureError | None = None
    try:
        shapes[key] = shapes_of(runner.capture_one_shape(key.size, variant_label=key.variant_label))
    except CaptureError as caught:
        error = caught
    # A graph that is missing on one rank must not be chosen on any; so all of them are asked, also before an error ends
    # the capture here.
    everywhere = (
        error is None if runner.hooks.vote is None else runner.hooks.vote(Proposal(error is None, key.size)).graph
    )
    if error is None:
        return None if everywhere else "it could not be captured on another rank"
    if error.code == "out-of-memory" and runner.on_error == "drop":
        return error.message
    raise error


def _find_rows(runner: BaseCudaGraphRunner, label: str | None, shapes: dict[int, list[tuple[int, ...]]]) -> None:
    """Tells the graphs of a variant where the rows of their outputs are: as the engine says, or from two sizes."""
    graphs = [graph for graph in runner.graphs.values() if graph.key.variant_label == label]
    if not graphs:
        return
    axes: Sequence[RowAxis | None] | None = runner.output_axes
    if axes is None:
        largest, smallest = max(shapes), min(shapes)
        if smallest == largest > 1:
            # One bucket: a run of one unit less shows which axis follows.
            smallest = largest - 1
            shapes[smallest] = shapes_of(runner.run_idle(smallest, label))
        if smallest < largest:
            axes = infer_row_axes(shapes[largest], largest, shapes[smallest], smallest)
        else:
            axes = [None] * len(shapes[largest])  # a bucket of one unit is never cut
    for graph in graphs:
        graph.axes = axes
