"""What a capture backend is: how the graphs of one phase are captured and replayed.

A backend knows shape keys, captured graphs and outputs; it knows nothing of batches, buckets or padding, which are the
runner's.
"""

from __future__ import annotations

import threading
import traceback
import weakref
from abc import ABC, abstractmethod
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Protocol, TypeVar

import torch

from devicegraph.devices import CAPTURE_ERROR_MODES, DEFAULT_CAPTURE_ERROR_MODE, GraphMemoryPool
from devicegraph.devices.adapter import dropped_on_failure
from devicegraph.engine import StaticBatch
from devicegraph.errors import BackendError, CaptureError, RankError
from devicegraph.forking import ParentsGraphs, watch_forks

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator
    from contextlib import AbstractContextManager

    from devicegraph._core import FillNode
    from devicegraph.devices import CaptureErrorMode, DeviceAdapter
    from devicegraph.runners.capturing import CapturingRunner

#: One for each device in use; it goes with the last backend that uses it. By type as well: an adapter of another type
#: may have its memory on the same device, and its handles are its own.
_shared_pools: weakref.WeakValueDictionary[tuple[str, torch.device], GraphMemoryPool] = weakref.WeakValueDictionary()


def shared_graph_pool(adapter: DeviceAdapter) -> GraphMemoryPool:
    """The graph memory pool that all backends of a device share unless they are given another."""
    key = adapter.type, adapter.device
    pool = _shared_pools.get(key)
    if pool is None:
        pool = _shared_pools[key] = GraphMemoryPool(adapter)
    return pool


_threads = threading.local()


def _capture_stream(adapter: DeviceAdapter) -> Any:
    """The stream that this thread captures on: one for each device.

    Libraries keep a workspace for each stream that they were used on (cuBLAS 32 MiB on a large GPU), for good: a stream
    of its own for every runner would cost as much for every runner that is ever made.
    """
    streams: dict[tuple[str, torch.device], Any] = _threads.__dict__.setdefault("streams", {})
    key = adapter.type, adapter.device
    if key not in streams:
        streams[key] = adapter.stream()
    return streams[key]


class Recording(Protocol):
    """What a capture made: a graph, or several of them and what runs in between."""

    def replay(self) -> None:
        """Launches it."""

    def reset(self) -> None:
        """Drops it. Calling it twice is fine."""


_Recording = TypeVar("_Recording", bound=Recording)


@dataclass(frozen=True)
class Captured(Generic[_Recording]):
    """What a backend has for a shape key."""

    recording: _Recording
    output: Any
    #: ADDRESS: what the recording reads. The entry keeps it alive, and goes with the recording.
    inputs: Any


class BaseCudaGraphBackend(ABC):
    """Captures and replays the graphs of one phase.

    Args:
        adapter: the device.
        phase: `decode` or `prefill`, for messages.
        graph_pool: the graph memory pool to capture into; by default the one that all backends of the device share.
        capture_error_mode: which unsafe calls break a capture: `global` any thread's, `thread_local` this thread's,
            `relaxed` none. It reaches every capture of every segment. A device whose captures have no error modes takes
            the default only, and does as it does.
        barrier: aligns the ranks before each warm-up, where there are several.
    """

    #: The configuration's word for it.
    name: ClassVar[str]
    #: Runs before each capture: the first one sizes workspaces, the second one finds them in place.
    WARMUPS: ClassVar[int] = 2
    #: Whether it is to be told how large an output can be; see `size_outputs`.
    wants_largest_output: ClassVar[bool] = False
    #: Whether its graphs can begin with the fill kernel: see `fill_node`. Replays must not look at the batch then.
    can_fill: bool = False

    def __init__(
        self,
        adapter: DeviceAdapter,
        *,
        phase: str,
        graph_pool: GraphMemoryPool | None = None,
        capture_error_mode: CaptureErrorMode = "thread_local",
        barrier: Callable[[], None] | None = None,
    ) -> None:
        if capture_error_mode not in CAPTURE_ERROR_MODES:
            raise BackendError(
                f"capture_error_mode: {capture_error_mode!r} is not one of {', '.join(CAPTURE_ERROR_MODES)}",
                code="capture-error-mode-unknown",
            )
        if capture_error_mode != DEFAULT_CAPTURE_ERROR_MODE and not adapter.has_capture_error_modes:
            raise BackendError(
                f"capture_error_mode: `{capture_error_mode}`: captures on device `{adapter.type}` have no error modes",
                code="capture-error-mode-unsupported",
                hint=f"leave it at `{DEFAULT_CAPTURE_ERROR_MODE}`; the device decides what breaks a capture",
            )
        self.adapter = adapter
        #: How often torch.compile has traced the forward.
        self.traces = 0
        #: Whether the graphs that are captured from now on begin with the fill kernel.
        self.fills = False
        self.phase = phase
        self.graph_pool = shared_graph_pool(adapter) if graph_pool is None else graph_pool
        self.capture_error_mode: CaptureErrorMode = capture_error_mode
        self._barrier = barrier
        self._stream: Any = None
        self._captured: dict[Hashable, Captured[Any]] = {}
        #: Whose graphs these are, where they are a runner's, weakly: another's would have the same keys.
        self.owner: Callable[[], Any] = lambda: None
        watch_forks(self)

    def leave_to_parent(self) -> None:
        """See `forking`: whoever asks for a graph in a child gets a `ReplayError` (`forked`)."""
        self._captured = ParentsGraphs(f"the {self.phase} backend", self._captured)

    @contextmanager
    def capture_session(self, stream: Any = None) -> Iterator[Any]:
        """Makes `stream`, or this thread's capture stream, current for a series of captures and yields it.

        Waits for the device at both ends, so that a capture sees what was written before the session and whoever comes
        after sees what the warm-ups wrote. What the warm-ups left in the allocator's cache is given back at the end:
        it is the capture stream's, and nobody else's tensors could use it. What the pools of earlier graphs left on the
        host is given back at the beginning.
        """
        self._stream = _capture_stream(self.adapter) if stream is None else stream
        self.adapter.synchronize()
        self.adapter.empty_cache()
        self.adapter.empty_host_cache()
        with self.adapter.stream_context(self._stream):
            try:
                yield self._stream
            finally:
                self.adapter.synchronize()
                self.adapter.empty_cache()

    @abstractmethod
    def capture_one(
        self,
        shape_key: Hashable,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> Any:
        """Warms up and captures one graph inside a `capture_session`, and returns its output.

        Args:
            shape_key: the graph's name from now on; a graph of the same key is replaced.
            forward_fn: the forward on the static batch. It is run for each warm-up, and once more to be captured.
            capture_inputs: anything that holds what the graph reads; kept until the graph is dropped.
            post_warmup_hook: called after every warm-up, never inside the capture.

        Returns:
            The output of `forward_fn`, whose tensors lie in the graph memory pool and are overwritten by each replay
            there.

        Raises:
            CaptureError: with the phase, the key, and the cause chained. There is no graph for the key then, and
                the pool, the current stream and the collector are as they were.
        """

    def can_run(self, forward_batch: Any, shape_key: Hashable) -> bool:
        """Whether a graph for the key is captured, and nothing in the batch speaks against it."""
        return shape_key in self.captured

    @property
    def captured(self) -> dict[Any, Any]:
        """What is captured, by shape key."""
        return self._captured

    def launcher(self, shape_key: Hashable) -> Callable[[], None] | None:
        """What replays the graph of the key where nothing else matters: no session, no batch, no question asked.

        None where a replay has to go through `can_run`, `replay_session` and `replay`.
        """
        return None

    def fill_node(self, shape_key: Hashable) -> FillNode | None:
        """The fill kernel that the graph of the key begins with, where `fills` was set before it was captured."""
        return None

    def replay_session(self) -> AbstractContextManager[None]:
        """What replays run in; a backend that needs nothing does nothing."""
        return nullcontext()

    @abstractmethod
    def replay(self, shape_key: Hashable, static_forward_batch: Any, **kwargs: Any) -> Any:
        """Launches the graph of the key on the current stream and returns its output, without waiting for the device.

        Raises:
            KeyError: no graph for the key; runners ask `can_run` first.
        """

    def discard(self, shape_key: Hashable) -> None:
        """Drops the graph of the key and what it held, if it is there."""
        captured = self._captured.get(shape_key)
        if captured is not None:
            captured.recording.reset()  # where it fails, the entry stays, to be dropped by whoever comes next
            del self._captured[shape_key]

    def cleanup(self) -> None:
        """Waits for the device, then drops every graph and what it held.

        Calling it twice is fine, capturing again afterwards too.
        """
        if self._captured:
            self.adapter.synchronize()
        # The latest first: a graph whose executable others share would have to hand it on.
        for shape_key in reversed(list(self._captured)):
            self.discard(shape_key)

    @classmethod
    def options_from(cls, runner: CapturingRunner) -> dict[str, Any]:
        """What the constructor takes from a runner beside what all backends take."""
        return {}

    def mark_rows(self, tensor: torch.Tensor, axis: int) -> None:  # noqa: B027 - most backends have no use for it
        """Hears along which axis an input's size differs from bucket to bucket, before a forward reads it."""

    def wrap_forward(self, forward: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """What a runner calls instead of the engine's forward to warm up and capture; eager steps call the engine's."""
        return forward

    def wrap_prepare(self, prepare: Callable[..., None]) -> Callable[..., None]:
        """What a runner calls instead of the engine's `prepare_in_graph` to warm up and capture."""
        return prepare

    def size_outputs(self, output: Any) -> None:  # noqa: B027 - most backends have no use for it
        """Hears what an output of the largest shape looks like, before the first capture of a series.

        Only backends with `wants_largest_output` are told.
        """

    @contextmanager
    def _dropped_on_failure(self, shape_key: Hashable, recording: Recording) -> Iterator[None]:
        """Drops what is being captured where the block fails: an error is a `CaptureError`, an interrupt passes."""
        try:
            with dropped_on_failure(recording):
                yield
        except Exception as error:
            raise capture_failed(self.phase, shape_key, error) from as_cause(error)

    def _warm_up(self, forward_fn: Callable[[], Any], post_warmup_hook: Callable[[], None] | None) -> Any:
        """Runs the forward as often as it takes for lazily made things to be there, and returns its output."""
        output: Any = None
        for _ in range(self.WARMUPS):
            self.adapter.synchronize()
            if self._barrier is not None:
                self._barrier()
            output = forward_fn()
            if post_warmup_hook is not None:
                post_warmup_hook()
        return output

    def _end_warm_up(self) -> None:
        """Waits for the warm-ups, whose output nobody holds any longer unless it is needed.

        What they left in the allocator's cache, which is about as much as the graph needs, is given back: a capture
        cannot take it from there, and would run out of memory beside it.
        """
        self.adapter.empty_cache()
        self.adapter.synchronize()


_HINTS: Final = {
    "out-of-memory": "capture fewer or smaller buckets (`max_bs`, `bs`), or leave the graphs more memory",
    "forward-failed": "the error above is the engine's, from its forward or a hook; there is no graph for this key",
    "capture-failed": "the error above is the device's, or a hook's, from before, between or behind the graphs",
}


def _chained(error: BaseException) -> list[BaseException]:
    """An error and all that caused it or were handled when it was raised; each once, as they may be in a circle."""
    found = [error]
    for each in found:
        for other in (each.__cause__, each.__context__):
            if other is not None and all(other is not known for known in found):
                found.append(other)
    return found


def _one_line(error: Exception) -> str:
    try:
        text = str(error).strip().splitlines()
    except Exception:  # an engine's own error may be one that cannot be printed
        text = []
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def as_cause(error: Exception) -> Exception:
    """What an error is to be chained to another as: itself, but for a `StopIteration`.

    A context manager takes an error that is raised because of one for Python's own, and lets the `StopIteration` out.
    """
    if not isinstance(error, StopIteration):
        return error
    cause = RuntimeError("a forward or a hook raised StopIteration")
    cause.__cause__ = error
    return cause


def capture_failed(phase: str, shape_key: Hashable | None, cause: Exception) -> CaptureError:
    """The error for a capture that failed because of `cause`, to be raised from it; without a key, that of no graph."""
    # The frames of the failed forward hold its tensors, and with them memory of the pool, as long as anybody keeps the
    # error. What they show of the source stays.
    for error in _chained(cause):
        traceback.clear_frames(error.__traceback__)
    if isinstance(cause, CaptureError):
        code, message, hint, operator = cause.code, cause.message, cause.hint, cause.operator
    elif isinstance(cause, RankError):
        code, message, hint, operator = cause.code, cause.message, cause.hint, None
    else:
        code = "capture-failed" if shape_key is None else "forward-failed"
        if isinstance(cause, (torch.OutOfMemoryError, MemoryError)):
            code = "out-of-memory"
        message, hint, operator = _one_line(cause), _HINTS[code], None
        if isinstance(cause, AttributeError) and isinstance(cause.obj, StaticBatch):
            hint = f"a static batch has what slots are registered for, and what `make_batch` adds: not `{cause.name}`"
    return CaptureError(
        f"{phase}: {'the capture' if shape_key is None else f'capturing {shape_key}'} failed: {message}",
        code=code,
        hint=hint,
        phase=phase,
        shape_key=shape_key,
        operator=operator,
    )
