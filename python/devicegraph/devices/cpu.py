"""The CPU as a graph device: every rule of a capture on a machine without an accelerator.

Operators run at once, so that streams and events have nothing to order; they exist to be checked. A stream belongs to a
capture when it was forked from the capturing one, must be joined before the capture ends, and may not wait for outside
work meanwhile: what CUDA refuses is refused here, with the same meaning of the capture error modes.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from devicegraph.devices.adapter import Availability, CaptureErrorMode, DeviceAdapter, DeviceMemory, GraphMemoryPool
from devicegraph.devices.recorder import Recorder
from devicegraph.devices.tape_memory import TapeMemory
from devicegraph.devices.tape_rules import HostMemory, HostReads, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from devicegraph.devices.tape import Tape
    from devicegraph.errors import CaptureError


class _Capture:
    """A capture under way."""

    def __init__(self, stream: TapeStream, error_mode: CaptureErrorMode) -> None:
        self.origin = stream
        self.error_mode = error_mode
        self.work: dict[TapeStream, int] = {stream: 0}
        """The streams that take part, with the number of operators recorded on each."""
        self.joined: dict[TapeStream, int] = {}
        """For each side stream, how many of its operators the capturing stream waits for."""
        self.refusal: CaptureError | None = None
        """The first of what was refused. The capture ends with it, as a device's does, even where the model caught it:
        what it did instead is not what a step would do."""

    def note(self, refusal: CaptureError) -> None:
        """Keeps the refusal that the capture is going to end with; of several the first."""
        if self.refusal is None:
            self.refusal = refusal

    def refuse(self, code: str, operator: str) -> CaptureError:
        """The error for what the capture refuses; it is noted."""
        refusal = refuse(code, operator)
        self.note(refusal)
        return refusal

    def record(self, operator: str) -> None:
        """Counts an operator on the current stream, which must take part."""
        stream = _current_stream()
        if stream not in self.work:
            raise self.refuse("foreign-stream", operator)
        self.work[stream] += 1

    def join(self) -> None:
        """Makes the capturing stream wait for all others."""
        self.joined = dict(self.work)

    def check_end(self) -> None:
        """Refuses to end a capture in which something was refused, or whose side streams were not joined."""
        if self.refusal is not None:
            raise self.refusal
        if any(work > self.joined.get(s, 0) for s, work in self.work.items() if s is not self.origin):
            raise refuse("unjoined-stream", "")


#: The capture of each thread that captures, and what records it.
_captures: dict[int, _Capture] = {}
_recorders: dict[int, Recorder] = {}
_thread = threading.local()


def _current_stream() -> TapeStream:
    stream: TapeStream = getattr(_thread, "stream", _DEFAULT_STREAM)
    return stream


def _capture_here() -> _Capture | None:
    return _captures.get(threading.get_ident())


def _wait_for_device(what: str) -> None:
    """The check of everything that waits for work on the device: refused beside a capture, as its error mode says."""
    on_wait: Callable[[str], None] | None = getattr(_thread, "on_wait", None)
    if on_wait is not None:
        on_wait(what)
    here = _capture_here()
    if here is not None:
        raise here.refuse("synchronize", what)
    for capture in list(_captures.values()):
        if capture.error_mode == "global":
            capture.refuse("synchronize", what)
            raise refuse("synchronize", what)  # an error of its own: the other one is raised in the capture's thread


class TapeEvent:
    """A point on a stream. Work on the CPU is done when it was launched, so that waiting only checks the rules."""

    def __init__(self) -> None:
        self._stream: TapeStream | None = None
        self._capture: _Capture | None = None
        self._work = 0

    def record(self, stream: TapeStream | None = None) -> None:
        """Marks the point after what `stream` has been given so far."""
        self._stream = stream or _current_stream()
        capture = _capture_here()
        self._capture = capture if capture is not None and self._stream in capture.work else None
        self._work = 0 if self._capture is None else self._capture.work[self._stream]

    def wait(self, stream: TapeStream | None = None) -> None:
        """Makes `stream` wait for the point."""
        waiting = stream or _current_stream()
        capture = _capture_here()
        if self._stream is None or capture is None:
            return
        if self._capture is not capture:
            if waiting in capture.work:
                raise capture.refuse("uncaptured-event", "wait_event")
            return
        capture.work.setdefault(waiting, 0)
        # Whoever waits carries the streams that the event's stream had joined, too: joining can be transitive.
        if waiting is capture.origin or waiting in capture.work:
            capture.joined[self._stream] = max(capture.joined.get(self._stream, 0), self._work)

    def query(self) -> bool:
        """Whether the point was passed."""
        _wait_for_device("event.query")
        return True

    def synchronize(self) -> None:
        """Waits on the host for the point."""
        _wait_for_device("event.synchronize")


class TapeStream:
    """An order of work. See the module's text: on the CPU it is there to be checked."""

    def record_event(self, event: TapeEvent | None = None) -> TapeEvent:
        """Records `event`, or a new one, on this stream."""
        event = event or TapeEvent()
        event.record(self)
        return event

    def wait_event(self, event: TapeEvent) -> None:
        """Makes this stream wait for `event`."""
        event.wait(self)

    def wait_stream(self, stream: TapeStream) -> None:
        """Makes this stream wait for everything given to `stream` so far."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Waits on the host for everything given to this stream."""
        _wait_for_device("stream.synchronize")


_DEFAULT_STREAM = TapeStream()


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
    here = _capture_here()
    if here is not None:
        raise here.refuse("nested-capture", "replay")
    tape.replay()


class _Recording:
    """The modes of a capture, and what they have recorded since the last segment ended."""

    def __init__(self, capture: _Capture, recorder: Recorder, reads: HostReads, pool: GraphMemoryPool) -> None:
        self._capture = capture
        self._recorder = recorder
        self._reads = reads
        self._pool = pool

    def resume(self) -> None:
        """Records from here on."""
        _captures[threading.get_ident()] = self._capture
        _recorders[threading.get_ident()] = self._recorder
        self._recorder.active = self._reads.active = True

    def stop(self) -> None:
        """Records nothing from here on: operators run."""
        # The modes stay on their stacks. The model may have entered modes of its own since, which must be left first.
        self._recorder.active = self._reads.active = False
        _captures.pop(threading.get_ident(), None)
        _recorders.pop(threading.get_ident(), None)

    def finish(self, graph: TapeGraph) -> None:
        """Gives what was recorded to a graph."""
        self._capture.check_end()
        graph.keep(self._recorder.take(), self._pool)


class _TapeSegments:
    """A segmented capture on the tape."""

    def __init__(self, recording: _Recording, capture: _Capture, on_segment: Callable[[TapeGraph], None]) -> None:
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
    ) -> Iterator[tuple[_Recording, _Capture]]:
        here = _capture_here()
        if here is not None:
            raise here.refuse("nested-capture", "capture")
        if stream is _DEFAULT_STREAM:
            raise refuse("foreign-stream", "capture")
        capture = _Capture(stream, error_mode)
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
        return _current_stream()

    @contextmanager
    def stream_context(self, stream: TapeStream) -> Iterator[TapeStream]:
        """Makes `stream` this thread's current stream for the block."""
        previous = _current_stream()
        _thread.stream = stream
        try:
            yield stream
        finally:
            _thread.stream = previous

    def event(self) -> TapeEvent:
        """A new event."""
        return TapeEvent()

    def synchronize(self) -> None:
        """Nothing to wait for; refused inside a capture."""
        _wait_for_device("synchronize")

    def is_capturing(self) -> bool:
        """Whether this thread's current stream takes part in a capture."""
        capture = _capture_here()
        return capture is not None and _current_stream() in capture.work

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
        previous = getattr(_thread, "on_wait", None)
        _thread.on_wait = on_wait
        try:
            yield
        finally:
            _thread.on_wait = previous
