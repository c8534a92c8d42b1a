"""Ascend NPUs, through `torch_npu`.

The package is imported when an NPU is first asked for, since importing it changes torch. What it leaves undone when a
capture fails is done here: the current stream, the dispatch mode that notes operators, and the memory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from devicegraph.devices.accelerator import AcceleratorDevice, AcceleratorGraph, first_line, import_error
from devicegraph.devices.adapter import Availability, CaptureErrorMode, UpdatableCall
from devicegraph.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from devicegraph.devices.graph_pool import GraphMemoryPool

#: What torch_npu says when the device has no stream left for another graph; error numbers, and a text of the driver.
_OUT_OF_STREAMS: Final = ("207005", "207008", "Stream resources are insufficient", "Alloc sq cq fail")


class NpuGraph(AcceleratorGraph):
    """One `torch.npu.NPUGraph`, and the memory pool that it anchors."""

    def __init__(self, raw: Any) -> None:
        super().__init__(raw)
        # ADDRESS: the memory of a pool goes with its anchor, and the pool may have been renewed since the capture. It
        # stands behind the graph, so that it also goes after it.
        self._anchor: Any = None

    @property
    def update_stream(self) -> Any:
        """The stream that torch_npu updates on: one for the whole process."""
        return self.raw.graph_dispatch_mode.update_stream

    def updatable_calls(self) -> list[UpdatableCall]:
        """The captured calls of operators that torch_npu has a handler for, in the order of the capture."""
        return [_call(record) for record in self.raw.graph_dispatch_mode.graph_dispatch_records]

    def update(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Puts values into the host arguments of the calls, one mapping by key for each call.

        Each update has to be followed, or was preceded, by exactly one replay.
        """
        self.raw.update(cpu_update_input=list(values))

    def end_update(self) -> None:
        """Ends an update that failed in the middle of a call, so that others can follow."""
        _npu().graph_task_update_end(self.update_stream)

    def release(self) -> None:
        """Lets a replay pass that waits for an update. The graph is of no use afterwards."""
        for record in self.raw.graph_dispatch_mode.graph_dispatch_records:
            record.event.record(self.update_stream)

    def keep(self, pool: GraphMemoryPool) -> None:
        """Counts a finished capture on its pool."""
        self._anchor = pool.handle
        super().keep(pool)

    def reset(self) -> None:
        """Drops the recording."""
        super().reset()
        self._anchor = None


class NpuDevice(AcceleratorDevice):
    """An Ascend NPU."""

    type: ClassVar[str] = "npu"
    package: ClassVar[str | None] = "torch_npu"
    bindings: ClassVar[str] = "torch_npu._C"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    cache_loc_dtype: ClassVar[torch.dtype] = torch.int32
    #: Of 2048 streams each graph takes one at least, and torch and the communication library have theirs.
    stream_limit: ClassVar[int | None] = 1800

    @classmethod
    def availability(cls) -> Availability:
        """Whether torch_npu can be loaded beside this torch, and finds a device. Loads it."""
        loaded = _load()
        if not loaded:
            return loaded
        if not _npu().is_available():
            return Availability(
                False, "torch_npu finds no NPU or no driver", "check `npu-smi info` and ASCEND_RT_VISIBLE_DEVICES"
            )
        return Availability(True)

    def new_pool_handle(self) -> Any:
        """A `torch.npu.MemPool` that no graph uses yet.

        Captures take its `id`; the object itself keeps the pool, so that torch_npu's allocator does not meet an id
        whose last graph is gone, which it takes for a fault of its own.
        """
        with _npu().device(self.device):
            return _npu().MemPool()

    def pool_id(self, handle: Any) -> tuple[int, int]:
        """See `AcceleratorDevice.pool_id`."""
        return handle.id  # type: ignore[no-any-return]

    def graph(self) -> NpuGraph:
        """An empty graph."""
        with _npu().device(self.device):
            return NpuGraph(_npu().NPUGraph())

    @contextmanager
    def capture(
        self, graph: NpuGraph, *, pool: GraphMemoryPool, stream: Any, capture_error_mode: CaptureErrorMode
    ) -> Iterator[None]:
        """Records the block, and notes the operators whose host arguments can be updated; see `DeviceAdapter.capture`.

        Raises:
            CaptureError: `nested-capture`; `out-of-graph-resources` where the device has no stream left.
        """
        npu = _npu()
        self.check_not_nested()
        with npu.device(self.device):
            before, depth = npu.current_stream(), len(_get_current_dispatch_mode_stack())
            handle = pool.handle
            # By keyword: the fourth argument is another one than that of `torch.cuda.graph`.
            capture = npu.graph(
                npu_graph=graph.raw,
                pool=handle.id,
                stream=stream,
                auto_dispatch_capture=True,
                capture_error_mode=capture_error_mode,
            )
            with self._restored(before, depth, graph, pool, handle):
                capture.__enter__()
                try:
                    yield
                except BaseException:
                    # It ends as a good capture of half a forward, or fails because the capture was broken: the
                    # model's own error is the one to be told.
                    with contextlib.suppress(Exception):
                        npu.set_stream(stream)
                        capture.__exit__(None, None, None)
                    raise
                npu.set_stream(stream)
                capture.__exit__(None, None, None)
                graph.keep(pool)

    @contextmanager
    def _restored(self, stream: Any, depth: int, graph: NpuGraph, pool: GraphMemoryPool, handle: Any) -> Iterator[None]:
        """Where the block raises: the stream and the dispatch modes from before, no graph, and the memory back."""
        held = handle.use_count()
        try:
            yield
        except BaseException as error:
            # torch_npu leaves both where they are when the end of a capture fails, and all that follows would be noted
            # as part of the graph.
            for mode in reversed(_get_current_dispatch_mode_stack()[depth:]):
                mode.__exit__(None, None, None)
            _npu().set_stream(stream)
            self._give_back(graph, pool, handle, held)
            if isinstance(error, RuntimeError) and _is_out_of_streams(error):
                raise _out_of_streams(error) from error
            raise

    def _give_back(self, graph: NpuGraph, pool: GraphMemoryPool, handle: Any, held: int) -> None:
        """Gives back what a failed capture had allocated.

        torch_npu does so for a capture that ended well. Where the end failed, the graph's hold on the pool stays for
        good, and with it the memory: it is taken back here.

        Args:
            graph: what was captured.
            pool: where to.
            handle: the pool's at that time.
            held: how many held the pool before the capture.
        """
        graph.raw.reset()
        with contextlib.suppress(RuntimeError):  # it has ended, unless the capture could not even begin
            self.binding("endAllocateToPool")(self.device.index, handle.id)
            # The allocator of pinned memory cannot be told, and refuses the handle from now on. Graphs that were
            # captured before keep what they have.
            pool.renew()
        for _ in range(handle.use_count() - held):
            self.binding("releasePool")(self.device.index, handle.id)

    def weak_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `AcceleratorDevice.weak_tensor`. A storage of torch_npu cannot be made by torch."""
        weak: torch.Tensor = importlib.import_module(self.bindings)._weak_ref_tensor(tensor)
        return weak

    def stream(self) -> Any:
        """A stream of torch_npu's pool, which hands the same few out again and again, but not the one for updates.

        What is launched there while another thread updates a graph would be taken for a part of the update.
        """
        reserved = self.graph().update_stream
        while True:
            stream = _npu().Stream(device=self.device)
            if stream != reserved:
                return stream


def _call(record: Any) -> UpdatableCall:
    name = record.op_cache_entry.__name__
    handlers = importlib.import_module("torch_npu.npu._npugraph_handlers.npugraph_handler")
    # torch_npu updates a keyword argument that was given under the key's name, and what the operator's handler lists.
    captured = {key: value for key, value in record.kwargs.items() if _is_on_host(value)}
    for kind, place, key in handlers._NPU_GRAPH_OP_HANDLERS[name].get_update_specs(name):
        if kind == "arg" and place < len(record.args):
            captured[key] = record.args[place]
        elif kind == "kwarg" and place in record.kwargs:
            captured[key] = record.kwargs[place]
    captured = {key: value for key, value in captured.items() if _is_on_host(value)}
    return UpdatableCall(name.rpartition(".")[0] or name, captured)


def _is_on_host(value: Any) -> bool:
    """Whether a value is a row of numbers in host memory, as lengths are."""
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu" and value.dim() == 1
    return isinstance(value, (list, tuple)) and all(isinstance(item, int) for item in value)


def _is_out_of_streams(error: BaseException) -> bool:
    """Whether an error of torch_npu means that the device has no stream left for a graph."""
    return any(text in str(error) for text in _OUT_OF_STREAMS)


def _out_of_streams(error: BaseException) -> CaptureError:
    """The typed form of such an error, to be raised from it."""
    return CaptureError(
        f"the device has no stream left for another graph: {str(error).strip().splitlines()[0]}",
        code="out-of-graph-resources",
        hint="capture fewer buckets (`max_bs`, `bs`), say what a graph takes (the engine's `streams_per_graph`), or "
        "end other processes that capture on this device",
    )


def _npu() -> Any:
    """`torch.npu`, which torch's own types do not know."""
    return torch.npu  # type: ignore[attr-defined]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


@functools.cache
def _load() -> Availability:
    """Imports torch_npu, once: a second try after a failure would meet what the first one left."""
    mine = _minor(torch.__version__)
    install = f"install the torch_npu for this torch, `pip install torch_npu=={mine}.*`"
    if importlib.util.find_spec("torch_npu") is None:
        return Availability(False, "torch_npu is not installed", install)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("torch_npu")
        # Its libraries are bound to the C++ of one torch: another one may end the process.
        if _minor(version) != mine:
            return Availability(
                False,
                f"torch_npu {version} is for torch {_minor(version)}, and this is torch {torch.__version__}",
                install,
            )
    error = import_error("torch_npu")
    if error is not None:
        return Availability(False, f"torch_npu cannot be loaded: {first_line(error)}", _advice(error))
    return Availability(True)


def _advice(error: Exception) -> str:
    if "cannot open shared object file" in str(error):
        return "install CANN and the driver, and source CANN's `set_env.sh`"
    if "Two accelerators" in str(error):
        return "use a torch that was built without CUDA"
    return "run `python -c 'import torch_npu'` with TORCH_DEVICE_BACKEND_AUTOLOAD=0 to see all of it"
