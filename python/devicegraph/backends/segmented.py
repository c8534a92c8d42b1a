"""What backends share that capture a forward in segments: replaying them, holding what crosses, one output for all."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from devicegraph.backends.autocast import autocast_as
from devicegraph.backends.base import BaseCudaGraphBackend, Captured
from devicegraph.backends.shared_output import SharedOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from contextlib import AbstractContextManager

    from devicegraph.backends.breaks import Break
    from devicegraph.devices import DeviceGraph

__all__ = ["Coverage", "SegmentedBackend"]


class Coverage(NamedTuple):
    """What of a forward runs captured.

    Attributes:
        segments: graphs that a replay launches.
        breaks: what it calls in between, in order.
    """

    segments: int
    breaks: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.segments} captured segments, {len(self.breaks)} breaks"]
        counted = {name: self.breaks.count(name) for name in dict.fromkeys(self.breaks)}
        return "\n".join([*lines, *(f"  {count} x {name}" for name, count in counted.items())])


class Steps:
    """What a replay does: graphs and the breaks between them, collected while a forward is captured.

    Attributes:
        calls: all of it, in order.
        graphs: the graphs among it.
        breaks: the breaks among it.
        in_inference_mode: whether a break ran in inference mode: what was made there can be written there only.
    """

    def __init__(self) -> None:
        self.in_inference_mode = False
        self.calls: list[Callable[[], Any]] = []
        self.graphs: list[DeviceGraph] = []
        self.breaks: list[Break] = []

    def add_graph(self, graph: DeviceGraph) -> None:
        """Adds a captured segment, and replays it: what follows meets real values, not what lay in fresh memory."""
        if graph.is_empty:
            graph.reset()
            return
        self.graphs.append(graph)
        self.calls.append(graph.replay)
        graph.replay()

    def add_break(self, step: Break) -> None:
        """Adds a call that was made between two segments."""
        self.breaks.append(step)
        self.calls.append(step.call)
        self.in_inference_mode |= torch.is_inference_mode_enabled()

    def replay(self) -> None:
        """Does all of it."""
        for call in self.calls:
            call()

    def modes_to_enter(self) -> list[AbstractContextManager[object]]:
        """What the caller's mode lacks to be that of the capture; nothing in an engine that serves as it captures."""
        modes: list[AbstractContextManager[object]] = []
        if self.in_inference_mode and not torch.is_inference_mode_enabled():
            modes.append(torch.inference_mode())
        elif torch.is_grad_enabled():
            # What a break computes from parameters would tie every replay to the one before.
            modes.append(torch.no_grad())
        if torch._C._is_any_autocast_enabled():
            modes.append(autocast_as({}))
        return modes

    def reset(self) -> None:
        """Drops the graphs and what the breaks hold."""
        for graph in self.graphs:
            graph.reset()
        self.calls, self.graphs, self.breaks = [], [], []


class SegmentedBackend(BaseCudaGraphBackend):
    """Captures the segments of a forward and runs what is between them eagerly.

    While a capture is made, each segment is replayed before what follows runs, so that a break meets real values.
    Outputs are copied into tensors that all buckets share, as large as the largest one.
    """

    wants_largest_output: ClassVar[bool] = True
    _captured: dict[Hashable, Captured[Steps]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shared = SharedOutput()

    def size_outputs(self, output: Any) -> None:
        """See `BaseCudaGraphBackend.size_outputs`."""
        self._shared.make_room(output)

    def coverage(self, shape_key: Hashable) -> Coverage:
        """What of the forward of a key runs captured: an attention that nobody marked is missing among the breaks.

        Raises:
            KeyError: nothing is captured for the key.
        """
        steps = self._captured[shape_key].recording
        return Coverage(len(steps.graphs), tuple(step.name for step in steps.breaks))

    def capture_one(
        self,
        shape_key: Hashable,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> Any:
        """See `BaseCudaGraphBackend.capture_one`."""
        self.discard(shape_key)
        steps = Steps()
        with self._dropped_on_failure(shape_key, steps):
            self._shared.make_room(self._warm_up(forward_fn, post_warmup_hook))
            self._end_warm_up()
            output = self._capture(forward_fn, steps)
        self._captured[shape_key] = Captured(steps, output, capture_inputs)
        return output

    @abstractmethod
    def _capture(self, forward_fn: Callable[[], Any], steps: Steps) -> Any:
        """Captures the forward into `steps`, and returns its output where it is shared."""

    def replay(self, shape_key: Hashable, static_forward_batch: Any, **kwargs: Any) -> Any:
        """See `BaseCudaGraphBackend.replay`."""
        captured = self._captured[shape_key]
        steps = captured.recording
        modes = steps.modes_to_enter()
        if modes:
            with ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                steps.replay()
        else:
            steps.replay()
        return captured.output

    def cleanup(self) -> None:
        """See `BaseCudaGraphBackend.cleanup`."""
        super().cleanup()
        self._shared.clear()
