"""The CPU as a graph device: every rule of a capture on a machine without an accelerator."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from devicegraph.devices.adapter import (
    Availability,
    CaptureErrorMode,
    DeviceAdapter,
    DeviceMemory,
    dropped_on_failure,
)
from devicegraph.devices.host_reads import HostReads
from devicegraph.devices.recorder import Recorder
from devicegraph.devices.tape_memory import TapeMemory
from devicegraph.devices.tape_rules import HostMemory, refuse
from devicegraph.devices.tape_streams import (
    DEFAULT_STREAM,
    TapeCapture,
    TapeEvent,
    TapeStream,
    capture_here,
    captures,
    current_stream,
    thread,
    wait_for_device,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from devicegraph.devices.graph_pool import GraphMemoryPool
    from devicegraph.devices.tape import Tape


#: What records the capture of each thread that captures.
_recorders: dict[int, Recorder] = {}


class TapeGraph:
    """A recorded tape and its hold on the pool that its memory is in."""

    def __init__(self) -> None:
        self._tape: Tape | None = None
        self._release: Callable[[], None] | None = None

    def keep(self, tape: Tape, pool: GraphMemoryPool) -> None:
        """Takes a finished recording."""
        self._tape, self._release = tape, pool.hold()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was recorded."""
        return not self._tape

    @property
    def tape(self) -> Tape | None:
        """The recording, or None before a capture and after a reset."""
        return self._tape

    def replay(self) -> None:
        """Runs the recording; done when it returns.

        Raises:
            RuntimeError: nothing was captured, or it was reset.
        """
        _replay(self._tape)

    def reset(self) -> None:
        """Drops the recording."""
        self._tape = None
        if self._release is not None:
            self._release()
            self._release = None  # it knows the memory that it releases


class UpdatableTapeGraph(TapeGraph):
    """A tape, and apart from it what runs; one form is the same operators in the same order."""

    _runs: Tape | None = None

    def instantiate(self) -> None:
        """See `UpdatableGraph`."""
        self._runs = self._tape

    def launch(self) -> None:
        """See `UpdatableGraph`."""
        _replay(self._runs)

    def update(self, recorded: UpdatableTapeGraph) -> bool:
        """See `UpdatableGraph`."""
        if self._runs is None or recorded.tape is None or self._runs.operators() != recorded.tape.operators():
            return False
        self._runs = recorded.tape
        return True

    def reset(self) -> None:
        """Drops the recording and what runs."""
        self._runs = None
        super().reset()


def _replay(tape: Tape | None) -> None:
    if tape is None:
        raise RuntimeError("replay of a graph that holds no capture")
    here = capture_here()
    if here is not None:
        raise here.refuse("nested-capture", "replay")
    tape.replay()


class _Recording:
    """The modes of a capture, and what they have recorded since the last segment ended."""

    def __init__(self, capture: TapeCapture, recorder: Recorder, reads: HostReads, pool: GraphMemoryPool) -> None:
        self._capture = capture
        self._recorder = recorder
        self._reads = reads
        self._pool = pool

    def resume(self) -> None:
        """Records from here on."""
        captures[threading.get_ident()] = self._capture
        _recorders[threading.get_ident()] = self._recorder
        self._recorder.active = self._reads.active = True

    def stop(self) -> None:
        """Records nothing from here on: operators run."""
        # The modes stay on their stacks. The model may have entered modes of its own since, which must be left first.
        self._recorder.active = self._reads.active = False
        captures.pop(threading.get_ident(), None)
        _recorders.pop(threading.get_ident(), None)

    def finish(self, graph: TapeGraph) -> None:
        """Gives what was recorded to a graph."""
        self._capture.check_end()
        graph.keep(self._recorder.take(), self._pool)


class _TapeSegments:
    """A segmented capture on the tape."""

    def __init__(self, recording: _Recording, capture: TapeCapture, on_segment: Callable[[TapeGraph], None]) -> None:
        self._recording = recording
        self._capture = capture
        self._on_segment = on_segment

    @contextmanager
    def pause(self) -> Iterator[None]:
        """See `SegmentedCapture`."""
        self.end()
        yield
        self._recording.resume()

    def end(self) -> None:
        """Ends a segment."""
        self._capture.join()
        graph = TapeGraph()
        self._recording.finish(graph)
        self._recording.stop()
        with dropped_on_failure(graph):
            self._on_segment(graph)


class CpuDevice(DeviceAdapter):
    """The CPU, through the tape."""

    type: ClassVar[str] = "cpu"
    #: What `declare_host` was told, in the whole process: a slot may be declared through another adapter than captures
    #: it.
    _host: ClassVar[HostMemory] = HostMemory()

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("cpu"))

    @classmethod
    def availability(cls) -> Availability:
        """Always."""
        return Availability(True)

    def new_pool_handle(self) -> TapeMemory:
        """An empty tape memory."""
        return TapeMemory()

    def graph(self) -> TapeGraph:
        """An empty graph."""
        return TapeGraph()

    def updatable_graph(self) -> UpdatableTapeGraph:
        """An empty graph that can share what runs it."""
        return UpdatableTapeGraph()

    @contextmanager
    def capture(
        self, graph: TapeGraph, *, pool: GraphMemoryPool, stream: TapeStream, capture_error_mode: CaptureErrorMode
    ) -> Iterator[None]:
        """Records the block; see `DeviceAdapter.capture`."""
        with self._record(pool, stream, capture_error_mode) as (recording, _):
            yield
            recording.finish(graph)

    @contextmanager
    def capture_segments(
        self,
        *,
        pool: GraphMemoryPool,
        stream: TapeStream,
        capture_error_mode: CaptureErrorMode,
        on_segment: Callable[[Any], None],
    ) -> Iterator[_TapeSegments]:
        """Records the block in segments; see `DeviceAdapter.capture_segments`."""
        with self._record(pool, stream, capture_error_mode) as (recording, capture):
            segments = _TapeSegments(recording, capture, on_segment)
            yield segments
            segments.end()

    @contextmanager
    def _record(
        self, pool: GraphMemoryPool, stream: TapeStream, error_mode: CaptureErrorMode
    ) -> Iterator[tuple[_Recording, TapeCapture]]:
        here = capture_here()
        if here is not None:
            raise here.refuse("nested-capture", "capture")
        if stream is DEFAULT_STREAM:
            raise refuse("foreign-stream", "capture")
        capture = TapeCapture(stream, error_mode)
        reads = HostReads(self._host, capture.note)
        recorder = Recorder(pool.handle, self._host, reads, capture.record, capture.note)
        recording = _Recording(capture, recorder, reads, pool)
        with self.stream_context(stream), reads, recorder:
            recording.resume()
            try:
                yield recording, capture
            finally:
                recording.stop()
                # Its traceback holds this frame, and so would keep itself and the tensors of the forward.
                capture.refusal = None

    def opaque_call(self, function: Callable[..., Any], args: Sequence[Any], *, shapes: Callable[..., Any]) -> Any:
        """Records the call as one; see `DeviceAdapter.opaque_call`."""
        recorder = _recorders.get(threading.get_ident())
        return function(*args) if recorder is None else recorder.record_opaque(function, args, shapes)

    def weak_outputs(self, tensors: Sequence[torch.Tensor], pool: GraphMemoryPool) -> list[torch.Tensor]:
        """See `DeviceAdapter.weak_outputs`."""
        memory: TapeMemory = pool.handle
        return [memory.alias(tensor) if memory.owns(tensor) else tensor for tensor in tensors]

    def stream(self) -> TapeStream:
        """A new stream."""
        return TapeStream()

    def current_stream(self) -> TapeStream:
        """This thread's current stream."""
        return current_stream()

    @contextmanager
    def stream_context(self, stream: TapeStream) -> Iterator[TapeStream]:
        """Makes `stream` this thread's current stream for the block."""
        previous = current_stream()
        thread.stream = stream
        try:
            yield stream
        finally:
            thread.stream = previous

    def event(self) -> TapeEvent:
        """A new event."""
        return TapeEvent()

    def synchronize(self) -> None:
        """Nothing to wait for; refused inside a capture."""
        wait_for_device("synchronize")

    def is_capturing(self) -> bool:
        """Whether this thread's current stream takes part in a capture."""
        capture = capture_here()
        return capture is not None and current_stream() in capture.work

    def memory(self) -> DeviceMemory:
        """Bytes of all tapes' memory in the process; the machine's own figures are not told."""
        memories = TapeMemory.all()
        return DeviceMemory(
            allocated=sum(memory.live_bytes for memory in memories),
            reserved=sum(memory.reserved_bytes for memory in memories),
            free=None,
            total=None,
        )

    def declare_host(self, tensor: torch.Tensor, *, pinned: bool = False) -> None:
        """Declares `tensor`'s memory host memory for as long as it lives; see `tape_rules`."""
        self._host.declare(tensor, pinned=pinned)

    def host_memory(self) -> HostMemory:
        """What was declared."""
        return self._host

    @contextmanager
    def watch_waits(self, on_wait: Callable[[str], None]) -> Iterator[None]:
        """Calls `on_wait` for what this thread waits for; see `DeviceAdapter.watch_waits`."""
        previous = getattr(thread, "on_wait", None)
        thread.on_wait = on_wait
        try:
            yield
        finally:
            thread.on_wait = previous
