"""What capture and replay need of a device, in one form for all devices.

An adapter names what it makes (streams, events, graphs) as the device's own module does; whoever uses it only hands
these around.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol

import torch

from devicegraph.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from typing_extensions import Self

    from devicegraph._core import FillNode
    from devicegraph.devices.graph_pool import GraphMemoryPool
    from devicegraph.devices.tape_rules import HostMemory

CaptureErrorMode = Literal["global", "thread_local", "relaxed"]
CAPTURE_ERROR_MODES: Final = ("global", "thread_local", "relaxed")
DEFAULT_CAPTURE_ERROR_MODE: Final = "thread_local"


@dataclass(frozen=True)
class Availability:
    """Whether something can be used on this machine; if not, why, and what would change it."""

    available: bool
    reason: str = ""
    hint: str | None = None

    def __bool__(self) -> bool:
        return self.available


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device in bytes.

    Attributes:
        allocated: under live tensors, as the allocator counts them.
        reserved: held by the allocator, live or not.
        free: free on the device for anybody; None where the device does not tell.
        total: on the device; None where the device does not tell.
    """

    allocated: int
    reserved: int
    free: int | None
    total: int | None


@dataclass(frozen=True)
class UpdatableCall:
    """A captured call of an operator whose host arguments can be updated.

    Attributes:
        operator: its name without overload.
        captured: the host arguments by update key, as they were captured.
    """

    operator: str
    captured: Mapping[str, Any]


class DeviceGraph(Protocol):
    """One captured graph. It can be replayed from any stream and thread, one replay at a time in its memory pool."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was recorded, so that a replay would do nothing."""

    def replay(self) -> None:
        """Launches the recording on the current stream, without waiting for it where the device is asynchronous."""

    def reset(self) -> None:
        """Drops the recording and its hold on the memory pool. Calling it twice is fine."""


class SegmentedCapture(Protocol):
    """A capture under way that can be interrupted."""

    def pause(self) -> AbstractContextManager[None]:
        """Ends the segment, runs the block as it is, and begins the next segment.

        Side streams that were forked in the segment are joined at its end and forked again in the next one, so that a
        model need not know where its forward is interrupted.
        """


class CaptureSegments:
    """The segmented capture of a device whose captures can be begun and ended anywhere."""

    def __init__(
        self,
        adapter: DeviceAdapter,
        pool: GraphMemoryPool,
        stream: Any,
        capture_error_mode: CaptureErrorMode,
        on_segment: Callable[[DeviceGraph], None],
    ) -> None:
        self._adapter = adapter
        self._pool = pool
        self._stream = stream
        self._error_mode = capture_error_mode
        self._on_segment = on_segment
        self._open: tuple[DeviceGraph, AbstractContextManager[None]] | None = None

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._end()
        elif self._open is not None:
            _, capture = self._open
            self._open = None
            capture.__exit__(kind, error, traceback)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """See `SegmentedCapture`."""
        self._end()
        yield
        self._begin()

    def _begin(self) -> None:
        graph = self._adapter.graph()
        capture = self._adapter.capture(
            graph, pool=self._pool, stream=self._stream, capture_error_mode=self._error_mode
        )
        capture.__enter__()
        self._open = (graph, capture)

    def _end(self) -> None:
        assert self._open is not None
        graph, capture = self._open
        self._open = None
        with dropped_on_failure(graph):
            capture.__exit__(None, None, None)
            self._on_segment(graph)


class Droppable(Protocol):
    """A graph, or several."""

    def reset(self) -> None:
        """Drops what was captured. Calling it twice is fine."""


@contextmanager
def dropped_on_failure(graph: Droppable) -> Iterator[None]:
    """Resets a graph where the block fails: whoever is to keep it does not have it yet."""
    try:
        yield
    except BaseException:
        graph.reset()
        raise


def executables_fixed(why: str) -> BackendError:
    """The error where graphs cannot share executables."""
    message = f"graphs cannot share executables: {why}"
    return BackendError(message, code="executables-fixed", hint="leave `share_executables` out")


class DeviceAdapter(ABC):
    """What capture and replay need of one device. It holds no state but the device: instances are made freely."""

    #: The device type, as in `torch.device(type)`.
    type: ClassVar[str]
    #: The phases that can be captured on it.
    phases: ClassVar[tuple[str, ...]] = ("decode", "prefill")
    #: The dtype of cache locations that its kernels take, for engines that do not say.
    cache_loc_dtype: ClassVar[torch.dtype] = torch.int64
    #: How many streams the graphs of a process may take together; None where memory alone limits graphs.
    stream_limit: ClassVar[int | None] = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    @abstractmethod
    def availability(cls) -> Availability:
        """Whether this machine has such a device and torch can use it. Never raises."""

    @property
    def has_capture_error_modes(self) -> bool:
        """Whether a capture can be told which unsafe calls break it. Where it cannot, only the default is accepted."""
        return True

    @abstractmethod
    def new_pool_handle(self) -> Any:
        """A handle of a graph memory pool that nothing uses yet."""

    @abstractmethod
    def graph(self) -> DeviceGraph:
        """An empty graph, for `capture` to fill once."""

    def updatable_graph(self) -> Any:
        """An empty graph that can share an executable; see `devices.executables`.

        Raises:
            BackendError: `executables-fixed`: the device or this torch has none.
        """
        raise executables_fixed(f"device `{self.type}` does not update them")

    @property
    def fills_in_graphs(self) -> bool:
        """Whether a graph can begin with the fill kernel, so that a step only points that at its sources."""
        return False

    def record_fill(self) -> None:  # noqa: B027 - nothing to record where graphs do not fill
        """Launches the fill kernel on the current stream with nothing to do: what a graph begins with that fills."""

    def fill_node(self, graph: Any) -> FillNode | None:
        """The fill kernel in such a graph, once it is captured; None where it cannot be told apart."""
        return None

    @abstractmethod
    def capture(
        self, graph: Any, *, pool: GraphMemoryPool, stream: Any, capture_error_mode: CaptureErrorMode
    ) -> AbstractContextManager[None]:
        """Records what the block launches on `stream` into `graph`, without running it.

        Whatever the block raises passes through unchanged. After a failure, in the block or in ending the capture, the
        current stream is the one from before, the graph is reset, and what the capture had allocated is given back.

        Raises:
            CaptureError: `nested-capture`, and on the CPU every code of `tape_rules.REFUSALS`; at the latest when the
                capture ends, where the block caught it.
        """

    def opaque_call(self, function: Callable[..., Any], args: Sequence[Any], *, shapes: Callable[..., Any]) -> Any:
        """Calls, inside a capture, a function whose kernels do not go through torch's dispatcher.

        Args:
            function: compiled code that takes `args` and gives new tensors, or views of `args` and of one another.
            args: tensors and numbers.
            shapes: the same computation in operators that torch can propagate shapes for.
        """
        return function(*args)

    @contextmanager
    def capture_segments(
        self,
        *,
        pool: GraphMemoryPool,
        stream: Any,
        capture_error_mode: CaptureErrorMode,
        on_segment: Callable[[DeviceGraph], None],
    ) -> Iterator[SegmentedCapture]:
        """Records the block as a row of graphs, with parts in between that run at once.

        Args:
            pool: see `capture`; all segments are in it.
            stream: see `capture`.
            capture_error_mode: see `capture`; it reaches every segment.
            on_segment: called with each segment's graph when the segment ends, outside of any capture.

        Yields:
            What opens the gaps between segments: see `SegmentedCapture`.
        """
        segments = CaptureSegments(self, pool, stream, capture_error_mode, on_segment)
        with segments:
            yield segments

    @abstractmethod
    def weak_outputs(self, tensors: Sequence[torch.Tensor], pool: GraphMemoryPool) -> list[torch.Tensor]:
        """The same views of the same memory that do not keep it: later captures in the pool may place tensors there.

        The pool's memory itself stays mapped as long as one of its graphs lives. Tensors outside the pool, such as a
        slot that the forward returns, come back as they are.
        """

    @abstractmethod
    def stream(self) -> Any:
        """A new stream, not the default one."""

    @abstractmethod
    def current_stream(self) -> Any:
        """The current stream of this thread on the device."""

    @abstractmethod
    def stream_context(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes `stream` current for the block."""

    @abstractmethod
    def event(self) -> Any:
        """A new event, with `record`, `wait`, `query` and `synchronize`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for everything launched on the device."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether the current stream of this thread is being captured."""

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """Memory figures now. Does not synchronise."""

    def empty_cache(self) -> None:  # noqa: B027 - a device without a caching allocator has nothing to do
        """Gives memory that the allocator holds for nobody back to the device."""

    def empty_host_cache(self) -> None:  # noqa: B027 - a device without such an allocator has nothing to do
        """Gives pinned memory that the allocator holds for nobody back to the host, and what it knew of released pools.

        Waits for the device where there is any.
        """

    def profiler_ranges(self) -> tuple[Callable[[str], object], Callable[[], object]] | None:
        """What opens a named range for a profiler in this thread, and what closes it; None where there are none."""
        return None

    def declare_host(self, tensor: torch.Tensor, *, pinned: bool = False) -> None:  # noqa: B027 - most devices see it
        """Says that `tensor` is host memory, where the device could not tell by itself."""

    def host_memory(self) -> HostMemory:
        """Which tensors are host memory to a capture, and what it refuses of them."""
        from devicegraph.devices.host_memory import SeenHostMemory

        return SeenHostMemory(self.device)

    def watch_waits(self, on_wait: Callable[[str], None]) -> AbstractContextManager[None]:
        """Calls `on_wait` with the name of each call in the block that waits on the host for the device, or asks it."""
        from devicegraph.devices.host_memory import watched_waits

        return watched_waits(self.type, on_wait)
