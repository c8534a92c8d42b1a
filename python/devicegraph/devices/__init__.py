"""Device adapters: the few things that capture and replay need of a device, in one form for all of them.

Nothing outside this folder names a device. An adapter is found by the type of a `torch.device`: the ones of this
package in the table below, others through the entry point group `devicegraph.devices`, whose names are device types and
whose values are `DeviceAdapter` classes.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol, cast

import torch

from devicegraph.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from typing_extensions import Self

__all__ = [
    "Availability",
    "CaptureErrorMode",
    "DeviceAdapter",
    "DeviceGraph",
    "DeviceMemory",
    "UpdatableCall",
    "get_device_adapter",
]

CaptureErrorMode = Literal["global", "thread_local", "relaxed"]
CAPTURE_ERROR_MODES: Final = ("global", "thread_local", "relaxed")

#: The adapters of this package, by device type.
_ADAPTERS: Final = {
    "cpu": "devicegraph.devices.cpu:CpuDevice",
    "cuda": "devicegraph.devices.cuda:CudaDevice",
    "npu": "devicegraph.devices.npu:NpuDevice",
}
_ENTRY_POINTS: Final = "devicegraph.devices"


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


class GraphMemoryPool:
    """The graph memory pool of an adapter: where captures place what they allocate.

    Graphs that share a pool share memory, so that only one of them may run at a time, and each replay overwrites the
    outputs of the one before, whichever graph they came from.
    """

    def __init__(self, adapter: DeviceAdapter) -> None:
        self._adapter = adapter
        self._handle: Any = None
        self._graphs = 0

    @property
    def device(self) -> torch.device:
        """The device whose memory this is."""
        return self._adapter.device

    @property
    def handle(self) -> Any:
        """What the device's own capture call takes. It is made when first asked for, and anew after `renew`."""
        if self._handle is None:
            self._handle = self._adapter.new_pool_handle()
        return self._handle

    @property
    def graphs(self) -> int:
        """How many graphs hold memory of the current handle."""
        return self._graphs

    def hold(self) -> Callable[[], None]:
        """Counts a graph that holds memory of the current handle; what is returned uncounts it, once."""
        handle = self.handle
        self._graphs += 1
        held = True

        def release() -> None:
            nonlocal held
            if held and self._handle is handle:
                self._graphs -= 1
                if not self._graphs:
                    # Allocators refuse a handle whose last graph is gone while a tensor of it lives on.
                    self.renew()
            held = False

        return release

    def renew(self) -> None:
        """Goes on with fresh memory. Graphs captured before keep theirs, and that memory goes when they do."""
        self._handle = None
        self._graphs = 0

    def __repr__(self) -> str:
        return f"GraphMemoryPool(device={str(self.device)!r}, graphs={self.graphs})"


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
        capture.__exit__(None, None, None)
        self._on_segment(graph)


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
        raise BackendError(
            f"graphs of device `{self.type}` cannot share executables",
            code="executables-fixed",
            hint="leave `share_executables` out",
        )

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

    def declare_host(self, tensor: torch.Tensor, *, pinned: bool = False) -> None:  # noqa: B027 - most devices see it
        """Says that `tensor` is host memory, where the device could not tell by itself."""


def get_device_adapter(device: torch.device | str | int) -> DeviceAdapter:
    """The adapter of a device; a device without an index means the current one.

    Raises:
        BackendError: `unknown-device` for a type without an adapter, `device-not-available` for one that cannot be used
            here, with the reason and what to install or set.
    """
    named = device.partition(":")[0] if isinstance(device, str) else ""
    if named in device_types() and not _is_known_to_torch(named):
        # The package behind it has to be loaded first, which asking whether it is available does.
        _check_available(_adapter_class(named), device)
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise BackendError(
            f"{device!r} is no device of this torch",
            code="unknown-device",
            hint=f"known are {', '.join(device_types())}, with an index as in `cuda:1`",
        ) from error
    adapter = _adapter_class(wanted.type)
    _check_available(adapter, wanted)
    return adapter(wanted)


def _is_known_to_torch(device_type: str) -> bool:
    try:
        torch.device(device_type)
    except RuntimeError:
        return False
    return True


def _check_available(adapter: type[DeviceAdapter], device: object) -> None:
    availability = adapter.availability()
    if not availability:
        raise BackendError(
            f"device `{device}` is not available here: {availability.reason}",
            code="device-not-available",
            hint=availability.hint,
        )


def device_types() -> list[str]:
    """Every device type that has an adapter, this package's first."""
    return list(dict.fromkeys([*_ADAPTERS, *(point.name for point in entry_points(group=_ENTRY_POINTS))]))


def device_availability(device_type: str) -> Availability:
    """Whether devices of a type can be used here; an adapter that cannot be loaded is a reason like others."""
    try:
        return _adapter_class(device_type).availability()
    except BackendError as error:
        return Availability(False, error.message, error.hint)


def _adapter_class(device_type: str) -> type[DeviceAdapter]:
    if device_type in _ADAPTERS:
        module, name = _ADAPTERS[device_type].split(":")
        return cast("type[DeviceAdapter]", getattr(importlib.import_module(module), name))
    for point in entry_points(group=_ENTRY_POINTS, name=device_type):
        try:
            return cast("type[DeviceAdapter]", point.load())
        except Exception as error:
            raise BackendError(
                f"the adapter of device `{device_type}` cannot be loaded from `{point.value}`: {error}",
                code="plugin-failed",
                hint=f"repair or remove the package that provides the entry point `{point.name}` of `{_ENTRY_POINTS}`",
            ) from error
    raise BackendError(
        f"no adapter for device `{device_type}`",
        code="unknown-device",
        hint=f"known are {', '.join(device_types())}; others come through the entry point group `{_ENTRY_POINTS}`",
    )
