"""Side streams of a CUDA capture that is made in segments.

A capture ends only when every stream that was forked in it has been joined, and a model whose forward is interrupted
between fork and join has not done so yet. CUDA does not tell which streams take part in a capture. But a stream joins a
capture by waiting for an event of it, so the waits are watched while a segmented capture is made in the thread.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_here: ContextVar[SideStreams | None] = ContextVar("devicegraph.side_streams", default=None)


class SideStreams:
    """The streams that were forked from a capturing one.

    Args:
        origin: the capturing stream.
    """

    def __init__(self, origin: torch.cuda.Stream) -> None:
        self._origin = origin
        self._forked: dict[torch.cuda.Stream, None] = {}
        self._segment = 0
        #: The segment that each event was recorded in. ADDRESS: the events are held, not referred to weakly: those of
        #: torch 2.11 die without telling who refers to them, who then reads freed memory.
        self._recorded: dict[torch.cuda.Event, int] = {}

    def join(self) -> None:
        """Makes the capturing stream, current from now on, wait for all others, so that a segment can end."""
        torch.cuda.set_stream(self._origin)
        for stream in self._forked:
            self._origin.wait_stream(stream)
        self._segment += 1

    def fork(self) -> None:
        """Makes the streams of the segments before take part in the one that has begun."""
        for stream in self._forked:
            stream.wait_stream(self._origin)

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream | None) -> None:
        """Stands for `event.record(stream)`."""
        _record(event, stream)
        self._recorded[event] = self._segment

    def wait(self, event: torch.cuda.Event, stream: torch.cuda.Stream | None) -> None:
        """Stands for `event.wait(stream)`."""
        stream = torch.cuda.current_stream() if stream is None else stream
        if self._recorded.get(event, self._segment) != self._segment:
            # Its segment ended with everything joined, so that this one's beginning comes after what it marked.
            event = torch.cuda.Event()
            _record(event, self._origin)
        _wait(event, stream)
        if stream != self._origin and _is_capturing(stream):
            self._forked[stream] = None


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


_record = torch.cuda.Event.record
_wait = torch.cuda.Event.wait
_lock = threading.Lock()
_watches = 0


def _watched_record(event: Any, stream: Any = None) -> None:
    sides = _here.get()
    if sides is None:
        _record(event, stream)
    else:
        sides.record(event, stream)


def _watched_wait(event: Any, stream: Any = None) -> None:
    sides = _here.get()
    if sides is None:
        _wait(event, stream)
    else:
        sides.wait(event, stream)


def _install(record: Any, wait: Any) -> None:
    event: Any = torch.cuda.Event
    event.record, event.wait = record, wait


@contextmanager
def installed() -> Iterator[None]:
    """Has events of `torch.cuda` ask in their thread for the capture that is watched, for the block."""
    global _watches
    with _lock:
        _watches += 1
        _install(_watched_record, _watched_wait)
    try:
        yield
    finally:
        with _lock:
            _watches -= 1
            if not _watches:
                _install(_record, _wait)


@contextmanager
def watched(sides: SideStreams | None) -> Iterator[None]:
    """Has `sides` hear of this thread's events for the block; with None nobody does."""
    token = _here.set(sides)
    try:
        yield
    finally:
        _here.reset(token)
