"""The breakable backend: a forward as it is, captured between the breaks that are marked in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from devicegraph.backends.breaks import Break, BreakRecorder, CalledBreaks, recording_breaks
from devicegraph.backends.segmented import SegmentedBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from devicegraph.backends.segmented import Steps
    from devicegraph.devices import DeviceGraph
    from devicegraph.runners.capturing import CapturingRunner

__all__ = ["BreakableCudaGraphBackend"]


class BreakableCudaGraphBackend(SegmentedBackend):
    """Captures the segments of a forward between its breaks; see `eager_on_graph`.

    Args:
        barrier_fn: called whenever a segment was captured, to align ranks before breaks that communicate; the engine's
            `barrier`, where a runner makes the backend.
        debug: capture nothing: the whole forward is one break, called anew on every replay. What is wrong with `debug`
            is not wrong because of a graph.

    The other arguments are those of `BaseCudaGraphBackend`.
    """

    name: ClassVar[str] = "breakable"

    def __init__(
        self, *args: Any, barrier_fn: Callable[[], None] | None = None, debug: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.debug = debug
        self._barrier_fn = barrier_fn

    @classmethod
    def options_from(cls, runner: CapturingRunner) -> dict[str, Any]:
        """See `BaseCudaGraphBackend.options_from`."""
        return {"barrier_fn": runner.hooks.barrier}

    def _capture(self, forward_fn: Callable[[], Any], steps: Steps) -> Any:
        def forward() -> Any:
            return self._shared.store(forward_fn())

        if self.debug:
            breaks = CalledBreaks()
            steps.add_break(Break(breaks.run, (forward,), {}, None, name="the whole forward"))
            return breaks.run(forward)

        def keep(graph: DeviceGraph) -> None:
            steps.add_graph(graph)
            if self._barrier_fn is not None:
                self._barrier_fn()

        with self.adapter.capture_segments(
            pool=self.graph_pool, stream=self._stream, capture_error_mode=self.capture_error_mode, on_segment=keep
        ) as segments:
            recorder = BreakRecorder(segments, steps)
            with recording_breaks(recorder):
                output = forward()
            recorder.check()
            return output
