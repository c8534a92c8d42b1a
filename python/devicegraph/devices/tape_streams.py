"""The streams and events of the tape, and what they have to keep to in a capture.

Operators run at once, so that streams and events have nothing to order; they exist to be checked. A stream belongs to a
capture when it was forked from the capturing one, must be joined before the capture ends, and may not wait for outside
work meanwhile: what CUDA refuses is refused here, with the same meaning of the capture error modes.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from devicegraph.devices.tape_rules import refuse

if TYPE_CHECKING:
    from collections.abc import Callable

    from devicegraph.devices.adapter import CaptureErrorMode
    from devicegraph.errors import CaptureError


class TapeCapture:
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
        stream = current_stream()
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


#: The capture of each thread that captures.
captures: dict[int, TapeCapture] = {}
thread = threading.local()


def current_stream() -> TapeStream:
    """This thread's current stream."""
    stream: TapeStream = getattr(thread, "stream", DEFAULT_STREAM)
    return stream


def capture_here() -> TapeCapture | None:
    """This thread's capture."""
    return captures.get(threading.get_ident())


def wait_for_device(what: str) -> None:
    """The check of everything that waits for work on the device: refused beside a capture, as its error mode says."""
    on_wait: Callable[[str], None] | None = getattr(thread, "on_wait", None)
    if on_wait is not None:
        on_wait(what)
    here = capture_here()
    if here is not None:
        raise here.refuse("synchronize", what)
    for capture in list(captures.values()):
        if capture.error_mode == "global":
            capture.refuse("synchronize", what)
            raise refuse("synchronize", what)  # an error of its own: the other one is raised in the capture's thread


class TapeEvent:
    """A point on a stream. Work on the CPU is done when it was launched, so that waiting only checks the rules."""

    def __init__(self) -> None:
        self._stream: TapeStream | None = None
        self._capture: TapeCapture | None = None
        self._work = 0

    def record(self, stream: TapeStream | None = None) -> None:
        """Marks the point after what `stream` has been given so far."""
        self._stream = stream or current_stream()
        capture = capture_here()
        self._capture = capture if capture is not None and self._stream in capture.work else None
        self._work = 0 if self._capture is None else self._capture.work[self._stream]

    def wait(self, stream: TapeStream | None = None) -> None:
        """Makes `stream` wait for the point."""
        waiting = stream or current_stream()
        capture = capture_here()
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
        wait_for_device("event.query")
        return True

    def synchronize(self) -> None:
        """Waits on the host for the point."""
        wait_for_device("event.synchronize")


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
        wait_for_device("stream.synchronize")


DEFAULT_STREAM = TapeStream()
