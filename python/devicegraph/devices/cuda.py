"""CUDA and HIP devices, through `torch.cuda`, which serves both."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from devicegraph.devices.accelerator import AcceleratorDevice, AcceleratorGraph
from devicegraph.devices.adapter import (
    Availability,
    CaptureErrorMode,
    CaptureSegments,
    executables_fixed,
)
from devicegraph.devices.cuda_streams import SideStreams, installed, watched
from devicegraph.native import kernel_on, why_no_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from devicegraph._core import FillNode
    from devicegraph.devices.graph_pool import GraphMemoryPool


class CudaGraph(AcceleratorGraph):
    """One `torch.cuda.CUDAGraph`, which tells whether it is empty."""

    def end(self) -> None:
        """Ends the capture of the current stream."""
        with warnings.catch_warnings(record=True) as caught:
            # A segment between two breaks may well be empty: torch warns, and has no other way to tell.
            warnings.simplefilter("always")
            self.raw.capture_end()
        self.is_empty = any("CUDA Graph is empty" in str(warning.message) for warning in caught)


class UpdatableCudaGraph(CudaGraph):
    """A recording, on the device of a number, that is kept for an executable that takes turns."""

    def __init__(self, raw: Any, index: int) -> None:
        super().__init__(raw)
        self._index = index

    def keep(self, pool: GraphMemoryPool) -> None:
        """Counts a finished capture on its pool, and makes its memsets kernels."""
        super().keep(pool)
        kernel_on(self._index).replace_memsets(graph=self.raw.raw_cuda_graph())

    def instantiate(self) -> None:
        """See `UpdatableGraph`."""
        self.raw.instantiate()

    def launch(self) -> None:
        """See `UpdatableGraph`. Launches that are queued keep what the executable did when they were made."""
        self.raw.replay()

    def update(self, recorded: UpdatableCudaGraph) -> bool:
        """See `UpdatableGraph`."""
        executable, graph = self.raw.raw_cuda_graph_exec(), recorded.raw.raw_cuda_graph()
        return kernel_on(self._index).update_executable(executable=executable, graph=graph)


class KeptCudaGraph(UpdatableCudaGraph):
    """A recording that is kept beside an executable of its own, so that it can be looked into."""

    def keep(self, pool: GraphMemoryPool) -> None:
        """As for any that is kept, and makes it executable."""
        super().keep(pool)
        self.instantiate()


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


class CudaDevice(AcceleratorDevice):
    """A CUDA or HIP device."""

    type: ClassVar[str] = "cuda"

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

    def graph(self) -> CudaGraph:
        """An empty graph. Where graphs can be looked into, memsets become kernels: see `FillKernel.replace_memsets`."""
        with torch.cuda.device(self.device):
            if self.fills_in_graphs:
                return KeptCudaGraph(torch.cuda.CUDAGraph(keep_graph=True), self.device.index)
            return CudaGraph(torch.cuda.CUDAGraph())

    def updatable_graph(self) -> UpdatableCudaGraph:
        """An empty graph that can share an executable; see `DeviceAdapter.updatable_graph`."""
        if torch.version.hip is not None:
            raise executables_fixed("HIP does not update them")
        if not _shows_executables():
            raise executables_fixed(f"torch {torch.__version__} does not show the executables of its graphs")
        with torch.cuda.device(self.device):
            return UpdatableCudaGraph(torch.cuda.CUDAGraph(keep_graph=True), self.device.index)

    @property
    def fills_in_graphs(self) -> bool:
        """Whether this torch lets its graphs be looked into, and the driver has the fill kernel."""
        return _shows_executables() and why_no_kernel(self.device) is None

    def record_fill(self) -> None:
        """See `DeviceAdapter.record_fill`."""
        kernel_on(self.device.index).launch_empty(torch.cuda.current_stream(self.device).cuda_stream)

    def fill_node(self, graph: CudaGraph) -> FillNode | None:
        """See `DeviceAdapter.fill_node`."""
        raw = graph.raw
        return kernel_on(self.device.index).fill_node(graph=raw.raw_cuda_graph(), executable=raw.raw_cuda_graph_exec())

    def empty_host_cache(self) -> None:
        """See `DeviceAdapter.empty_host_cache`.

        A capture opens a pool of pinned memory beside that of the device, some 50 KB of bookkeeping, which torch drops
        nowhere else.
        """
        torch._C._host_emptyCache()

    def profiler_ranges(self) -> tuple[Callable[[str], object], Callable[[], object]]:
        """NVTX ranges; on HIP, torch maps them to those of ROCm."""
        return torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop

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

    def weak_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `AcceleratorDevice.weak_tensor`; in one call of torch, without an empty tensor first."""
        storage = tensor.untyped_storage()
        metadata = {
            "size": tensor.shape,
            "stride": tensor.stride(),
            "storage_offset": tensor.storage_offset(),
            "dtype": tensor.dtype,
            "device": tensor.device,
        }
        # ADDRESS: see there.
        weak = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
        return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, weak)


def _shows_executables() -> bool:
    return hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec")
