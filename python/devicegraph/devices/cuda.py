"""CUDA and HIP devices, through `torch.cuda`, which serves both."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from devicegraph import _core
from devicegraph.devices import (
    Availability,
    CaptureErrorMode,
    CaptureSegments,
    DeviceAdapter,
    DeviceMemory,
    GraphMemoryPool,
)
from devicegraph.devices.cuda_streams import SideStreams, installed, watched
from devicegraph.errors import BackendError, CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


#: What makes a snapshot of the allocator one of a pool alone, where this torch can: all of an engine's memory is long.
_SNAPSHOT: dict[str, Any] = {
    name: value
    for name, value in (("mempool_id", None), ("include_traces", False))
    if name in inspect.signature(torch.cuda.memory_snapshot).parameters
}


class CudaGraph:
    """One `torch.cuda.CUDAGraph` and its hold on the pool that its memory is in."""

    def __init__(self, raw: Any = None) -> None:
        self.raw: Any = torch.cuda.CUDAGraph() if raw is None else raw
        #: Whether nothing was recorded.
        self.is_empty = False
        self._release: Callable[[], None] | None = None
        #: Launches the graph. The bound method itself, so that a step pays for no wrapper.
        self.replay: Callable[[], None] = self.raw.replay

    def end(self) -> None:
        """Ends the capture of the current stream."""
        with warnings.catch_warnings(record=True) as caught:
            # A segment between two breaks may well be empty: torch warns, and has no other way to tell.
            warnings.simplefilter("always")
            self.raw.capture_end()
        self.is_empty = any("CUDA Graph is empty" in str(warning.message) for warning in caught)

    def keep(self, pool: GraphMemoryPool) -> None:
        """Counts a finished capture on its pool."""
        self._release = pool.hold()

    def reset(self) -> None:
        """Drops the recording."""
        self.raw.reset()
        if self._release is not None:
            self._release()


class UpdatableCudaGraph(CudaGraph):
    """A recording that torch keeps, for an executable that the driver updates.

    Args:
        driver: has `graph_exec_update(executable, graph)`, which says whether the graph has the executable's form.
        raw: torch's graph, made with `keep_graph`.
    """

    def __init__(self, driver: Any, raw: Any) -> None:
        super().__init__(raw)
        self._driver = driver

    def instantiate(self) -> None:
        """See `UpdatableGraph`."""
        self.raw.instantiate()

    def launch(self) -> None:
        """See `UpdatableGraph`. Launches that are queued keep what the executable did when they were made."""
        self.raw.replay()

    def update(self, recorded: UpdatableCudaGraph) -> bool:
        """See `UpdatableGraph`."""
        executable, graph = self.raw.raw_cuda_graph_exec(), recorded.raw.raw_cuda_graph()
        return bool(self._driver.graph_exec_update(executable, graph))


class _Segments(CaptureSegments):
    """Segments whose side streams are joined and forked again where the capture is interrupted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sides = SideStreams(self._stream)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """See `SegmentedCapture`."""
        current = torch.cuda.current_stream(self._adapter.device)
        with watched(None), super().pause():
            yield
        torch.cuda.set_stream(current)

    def _begin(self) -> None:
        super()._begin()
        self.sides.fork()

    def _end(self) -> None:
        self.sides.join()
        super()._end()


class CudaDevice(DeviceAdapter):
    """A CUDA or HIP device."""

    type: ClassVar[str] = "cuda"

    def __init__(self, device: torch.device) -> None:
        index = device.index
        if index is None:  # torch declares an int, and gives None for `cuda`
            index = torch.cuda.current_device()  # type: ignore[unreachable]
        super().__init__(torch.device("cuda", index))

    @classmethod
    def availability(cls) -> Availability:
        """Whether torch was built for CUDA or HIP and finds a device."""
        if not torch.cuda._is_compiled():
            return Availability(
                False, "this torch was built without CUDA and HIP", "install a torch built for your GPU"
            )
        if not torch.cuda.is_available():
            return Availability(False, "torch finds no GPU or no driver", "check `nvidia-smi` and CUDA_VISIBLE_DEVICES")
        return Availability(True)

    def new_pool_handle(self) -> tuple[int, int]:
        """A pool id that no graph uses yet."""
        return tuple(torch.cuda.graph_pool_handle())  # type: ignore[return-value]

    def graph(self) -> CudaGraph:
        """An empty graph."""
        with torch.cuda.device(self.device):
            return CudaGraph()

    def updatable_graph(self) -> UpdatableCudaGraph:
        """An empty graph that can share an executable; see `DeviceAdapter.updatable_graph`."""
        missing = None
        make_driver: Any = getattr(_core, "cuda_driver", None)
        if torch.version.hip is not None or make_driver is None:
            missing = "the CUDA driver is not called on this platform"
        elif not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec"):
            missing = f"torch {torch.__version__} does not show the executables of its graphs"
        if missing is not None:
            raise BackendError(
                f"graphs cannot share executables: {missing}",
                code="executables-fixed",
                hint="leave `share_executables` out",
            )
        with torch.cuda.device(self.device):
            return UpdatableCudaGraph(make_driver(), torch.cuda.CUDAGraph(keep_graph=True))

    @contextmanager
    def capture(
        self,
        graph: CudaGraph,
        *,
        pool: GraphMemoryPool,
        stream: torch.cuda.Stream,
        capture_error_mode: CaptureErrorMode,
    ) -> Iterator[None]:
        """Records the block; see `DeviceAdapter.capture`.

        `torch.cuda.graph` is not used: it synchronises and empties the allocator's cache at each capture, and after a
        failure leaves its stream current, keeps the pool's memory, and hides the model's error behind its own.
        """
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "a capture was begun inside another capture of this thread",
                code="nested-capture",
                hint="capture one graph after the other",
            )
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            handle = pool.handle
            graph.raw.capture_begin(pool=handle, capture_error_mode=capture_error_mode)
            try:
                yield
            except BaseException:
                # Ending an invalidated capture fails, too; the model's own error is the one to be told.
                with contextlib.suppress(Exception):
                    torch.cuda.set_stream(stream)
                    graph.end()
                self._abandon(graph, pool, handle)
                raise
            try:
                torch.cuda.set_stream(stream)
                graph.end()
            except BaseException:
                self._abandon(graph, pool, handle)
                raise
            graph.keep(pool)

    @contextmanager
    def capture_segments(
        self,
        *,
        pool: GraphMemoryPool,
        stream: torch.cuda.Stream,
        capture_error_mode: CaptureErrorMode,
        on_segment: Callable[[Any], None],
    ) -> Iterator[_Segments]:
        """Records the block in segments; see `DeviceAdapter.capture_segments`."""
        segments = _Segments(self, pool, stream, capture_error_mode, on_segment)
        with installed(), watched(segments.sides), segments:
            yield segments

    def _abandon(self, graph: CudaGraph, pool: GraphMemoryPool, handle: Any) -> None:
        """Gives back what a failed capture had allocated.

        A capture that ended well enough is dropped by `reset`. Where its end failed, torch believes that it goes on:
        the device's allocator can be told otherwise, the allocator of pinned memory cannot, and refuses the handle from
        then on. Nor does torch take a handle again whose last graph is gone. In both cases the pool goes on with
        another one; graphs that were captured before keep the old one's memory.
        """
        graph.raw.reset()
        try:
            torch._C._cuda_endAllocateToPool(self.device.index, handle)
        except RuntimeError:  # it had ended
            is_usable = pool.graphs > 0
        else:
            torch._C._cuda_releasePool(self.device.index, handle)
            is_usable = False
        if not is_usable:
            pool.renew()

    def weak_outputs(self, tensors: Sequence[torch.Tensor], pool: GraphMemoryPool) -> list[torch.Tensor]:
        """See `DeviceAdapter.weak_outputs`."""
        options = {name: pool.handle if name == "mempool_id" else value for name, value in _SNAPSHOT.items()}
        spans = [
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in torch.cuda.memory_snapshot(**options)
            if tuple(segment["segment_pool_id"]) == pool.handle
        ]
        return [_weak(t) if any(a <= t.data_ptr() < b for a, b in spans) else t for t in tensors]

    def stream(self) -> torch.cuda.Stream:
        """A stream of torch's pool."""
        return torch.cuda.Stream(self.device)

    def current_stream(self) -> torch.cuda.Stream:
        """This thread's current stream on the device."""
        return torch.cuda.current_stream(self.device)

    @contextmanager
    def stream_context(self, stream: torch.cuda.Stream) -> Iterator[torch.cuda.Stream]:
        """Makes `stream`, and its device, current for the block."""
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield stream

    def event(self) -> torch.cuda.Event:
        """An event without timing."""
        with torch.cuda.device(self.device):
            return torch.cuda.Event()

    def synchronize(self) -> None:
        """Waits for everything launched on the device."""
        torch.cuda.synchronize(self.device)

    def is_capturing(self) -> bool:
        """Whether this thread's current stream is being captured."""
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def memory(self) -> DeviceMemory:
        """The caching allocator's figures, and the driver's."""
        free, total = torch.cuda.mem_get_info(self.device)
        # One reading for both figures; the flat form of it takes longer than the reading itself.
        stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self.device)
        allocated, reserved = (
            stats.get(figure, {}).get("all", {}).get("current", 0) for figure in ("allocated_bytes", "reserved_bytes")
        )
        return DeviceMemory(allocated=allocated, reserved=reserved, free=free, total=total)

    def empty_cache(self) -> None:
        """Gives cached blocks back to the driver, so that a graph's pool can have them."""
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()


def _weak(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    metadata = {
        "size": tensor.shape,
        "stride": tensor.stride(),
        "storage_offset": tensor.storage_offset(),
        "dtype": tensor.dtype,
        "device": tensor.device,
    }
    # ADDRESS: the memory is the pool's, and the pool lives as long as the graph that writes it.
    weak = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, weak)
