"""The loop over the shapes of a capture: each one is measured, voted on and reported; then rows are found."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from devicegraph.errors import CaptureError, RankError
from devicegraph.outputs import check_row_axes, infer_row_axes, shapes_of, unclear_rows
from devicegraph.parallel import Proposal, named
from devicegraph.report import CapturedBucket, DroppedCapture
from devicegraph.runners.progress import CaptureProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from devicegraph.outputs import RowAxis
    from devicegraph.runners.capturing import CapturingRunner
    from devicegraph.runners.shape_key import ShapeKey

    Shapes = dict[ShapeKey, list[tuple[int, ...]]]


#: What a capture may run out of, with fewer graphs as the way out.
_DROPPED: Final = ("out-of-memory", "out-of-graph-resources")


def capture_shapes(
    runner: CapturingRunner, keys: Sequence[ShapeKey], progress: Callable[[CaptureProgress], None]
) -> tuple[tuple[CapturedBucket, ...], tuple[DroppedCapture, ...]]:
    """Captures the graphs of `keys` in order, inside the backend's session; what was captured, and what was dropped.

    Raises:
        CaptureError: a forward that cannot be captured, or, with `on_error="raise"`, one that ran out of memory.
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
        progress(CaptureProgress(runner.phase, key, done, len(keys), seconds, after.free))
    if runner.hooks.vote is not None:
        # Ranks agree on a size, and each takes its own variant of it: one that only some variants have would send ranks
        # to graphs of different sizes.
        sizes = {drop.key.size for drop in dropped}
        for bucket in [bucket for bucket in captured if bucket.key.size in sizes]:
            captured.remove(bucket)
            runner.drop_graph(bucket.key)
            dropped.append(DroppedCapture(bucket.key, "another variant of it could not be captured"))
    for label in runner.hooks.variants:
        find_rows(runner, label, {key.size: found for key, found in shapes.items() if key.variant_label == label})
    return tuple(captured), tuple(dropped)


def _capture_one(runner: CapturingRunner, key: ShapeKey, shapes: Shapes) -> str | None:
    """Captures one graph on all ranks, and returns None, or why there is none."""
    error: CaptureError | None = None
    try:
        shapes[key] = shapes_of(runner.capture_key(key))
    except CaptureError as caught:
        error = caught
    is_dropped = error is not None and error.code in _DROPPED and runner.on_error == "drop"
    # At a barrier a rank learns that others are at their vote already. What has failed there is theirs to say.
    other = error.__cause__ if error is not None and error.code == "rank-out-of-step" else None
    # A graph that is missing on one rank must not be chosen on any, and a rank that gives up must not leave the others
    # waiting in their next capture: so all of them are asked, also before an error ends the capture here.
    has_failed = error is not None and not is_dropped and other is None
    proposal = Proposal(error is None, key.size, has_failed, runner.purpose)
    agreed = ask_ranks(runner, proposal, error, f"capturing {key}", key)
    if isinstance(other, RankError):
        return f"it could not be captured on {named(other.ranks)}"
    if error is not None:
        return error.message
    return None if agreed.graph else f"it could not be captured on {_others(agreed)}"


def ask_ranks(
    runner: CapturingRunner, proposal: Proposal, error: Exception | None, doing: str, key: ShapeKey | None = None
) -> Proposal:
    """What all ranks make of a proposal; raises where this one has failed, by its error, or another one."""
    try:
        agreed = proposal if runner.hooks.vote is None else runner.hooks.vote(proposal)
    except Exception as lost:
        if error is None:
            raise
        raise lost from error  # what has failed here may be why the ranks cannot vote
    if error is not None and proposal.failed:
        raise error
    if agreed.failed:
        raise CaptureError(
            f"{runner.phase}: {doing} failed on {_others(agreed)}",
            code="other-rank-failed",
            hint="its error is in the log of that rank; no rank has graphs now",
            phase=runner.phase,
            shape_key=key,
        )
    return agreed


def _others(agreed: Proposal) -> str:
    """Whose doing it is that there is no graph."""
    return named(agreed.against) if agreed.against else "another rank"


def find_rows(runner: CapturingRunner, label: str | None, shapes: dict[int, list[tuple[int, ...]]]) -> None:
    """Tells the graphs of a variant where the rows of their outputs are: as the engine says, or from two sizes.

    Args:
        runner: the runner.
        label: the variant.
        shapes: the shapes of the output at each size whose graph is to be told.

    Raises:
        CaptureError: `output-rows`.
    """
    graphs = {graph.key.size: graph for graph in runner.graphs.values() if graph.key.variant_label == label}
    shapes = {size: found for size, found in shapes.items() if size in graphs}
    if not shapes:
        return
    older = [graph for size, graph in graphs.items() if size not in shapes]
    axes = runner.output_axes
    if axes is None:
        axes = next((graph.axes for graph in older if graph.axes is not None), None)
    if axes is None:
        axes = _infer(runner, label, shapes.copy())
    if axes is not None:
        for size, found in shapes.items():
            check_row_axes(axes, found, size)
    for size in shapes:
        graphs[size].find_rows(axes)
    for graph in older:
        if graph.axes is None and axes is not None and graph.has_rows(axes):
            graph.find_rows(axes)


def _infer(
    runner: CapturingRunner, label: str | None, shapes: dict[int, list[tuple[int, ...]]]
) -> Sequence[RowAxis | None] | None:
    largest = max(shapes)
    first = shapes.pop(largest)
    if largest == 1:
        return None  # one unit has all rows
    if not shapes:
        smaller, found = _run_smaller(runner, label, largest)
        shapes[smaller] = found
    share = runner.share_rows
    told = {
        infer_row_axes(first, largest, second, size, shares=(share(largest), share(size))): size
        for size, second in shapes.items()
    }
    if len(told) > 1:
        raise unclear_rows(f"sizes {', '.join(map(str, told.values()))} and {largest} have no rule in common")
    return next(iter(told))


def _run_smaller(runner: CapturingRunner, label: str | None, size: int) -> tuple[int, list[tuple[int, ...]]]:
    """A size below the only captured one and the shapes there: a run of the forward shows what follows the size."""
    failure: Exception | None = None
    unit = runner.bucket_unit
    if size <= unit:
        raise unclear_rows(f"only size {size} is captured, and no smaller one is a multiple of {unit}")
    for smaller in dict.fromkeys((size - unit, max(size // 2 // unit, 1) * unit)):
        try:
            return smaller, shapes_of(runner.run_idle(smaller, label))
        except Exception as error:
            failure = error
    raise CaptureError(
        f"the rows of the output cannot be told: only size {size} is captured, and the forward fails at {smaller}: "
        f"{failure}",
        code="output-rows",
        hint="give the runner `output_axes`, one `RowAxis` or None for each tensor of the output",
        phase=runner.phase,
    ) from failure
