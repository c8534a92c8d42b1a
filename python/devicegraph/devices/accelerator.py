"""Accelerators whose torch module has the graph functions of `torch.cuda`.

`torch.cuda` (CUDA and HIP), `torch.xpu`, `torch.musa` and `torch.npu` have the same functions, around a graph class of
their own name. They differ in what is there and in what it takes, which is asked of the module itself: a device of this
kind is a class with a type and the package that brings it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from devicegraph.devices.adapter import Availability, CaptureErrorMode, DeviceAdapter, DeviceMemory
from devicegraph.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from devicegraph.devices.graph_pool import GraphMemoryPool

#: What tells the allocator that a capture has ended: its name, and that in torch 2.6.
END_BINDINGS: Final = ("endAllocateToPool", "endAllocateCurrentStreamToPool")
#: What is called of a module: how many positional arguments, and which keywords.
MODULE_CALLS: Final = {
    "Event": 0,
    "Stream": 1,
    "current_device": 0,
    "current_stream": 1,
    "device": 1,
    "empty_cache": 0,
    "graph_pool_handle": 0,
    "is_available": 0,
    "is_current_stream_capturing": 0,
    "memory_allocated": 1,
    "memory_reserved": 1,
    "set_stream": 1,
    "stream": 1,
    "synchronize": 1,
}
#: What is called of a graph; `capture_begin` takes a pool, and an error mode where the device has them.
GRAPH_CALLS: Final = ("capture_begin", "capture_end", "replay", "reset")


@functools.cache
def import_error(package: str) -> Exception | None:
    """Imports a package, once: a second try after a failure would meet what the first one left."""
    try:
        importlib.import_module(package)
    except Exception as error:
        return error
    return None


def first_line(error: Exception) -> str:
    """The first line of what an error says, or its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@functools.cache
def _options(function: Any) -> frozenset[str]:
    """The parameters of a function: what makes a snapshot one of a pool alone, where the module can, is faster."""
    return frozenset(inspect.signature(function).parameters)


def _spans(snapshot: Callable[..., list[dict[str, Any]]], pool: tuple[int, ...]) -> list[tuple[int, int]]:
    """Where the segments of a pool begin and end, by an allocator's snapshot."""
    options = {"mempool_id": pool, "include_traces": False}
    # ADDRESS: torch (2.11, 2.13) gives back a reference to each of these values that it never took: they would be freed
    # while they are in use. With a torch that counts well a few bytes are lost for each pool.
    for value in (*pool, False):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    return [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in snapshot(**{name: value for name, value in options.items() if name in _options(snapshot)})
        if tuple(segment.get("segment_pool_id", ())) == pool
    ]


@functools.cache
def graph_class(module: Any) -> type[Any] | None:
    """The class of a module's graphs, whatever its name; None where it has none."""
    for name, value in vars(module).items():
        if name.endswith("Graph") and isinstance(value, type) and all(hasattr(value, call) for call in GRAPH_CALLS):
            return value
    return None


def missing_calls(module: Any) -> list[str]:
    """What a module lacks to capture graphs."""
    missing = [name for name in MODULE_CALLS if not hasattr(module, name)]
    return missing if graph_class(module) is not None else ["graph class", *missing]


class AcceleratorGraph:
    """One graph of a torch module and its hold on the pool that its memory is in.

    Attributes:
        raw: the module's graph.
        is_empty: whether nothing was recorded; False where the device does not tell.
        replay: launches the graph; the bound method itself, so that a step pays for no wrapper.
    """

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.is_empty = False
        self.replay: Callable[[], None] = raw.replay
        self._release: Callable[[], None] | None = None

    def end(self) -> None:
        """Ends the capture of the current stream."""
        self.raw.capture_end()

    def keep(self, pool: GraphMemoryPool) -> None:
        """Counts a finished capture on its pool."""
        self._release = pool.hold()

    def reset(self) -> None:
        """Drops the recording."""
        self.raw.reset()
        if self._release is not None:
            self._release()


class AcceleratorDevice(DeviceAdapter):
    """A device whose torch module `torch.<type>` has the graph functions of `torch.cuda`.

    A subclass needs a `type`, and where torch does not bring the module itself, the `package` that does. What the
    module lacks of error modes, memory figures and allocator bindings is done without.
    """

    #: The package that brings the module when it is imported; None where torch does.
    package: ClassVar[str | None] = None
    #: The module with the allocator's bindings, whose names begin with `_` and the device type.
    bindings: ClassVar[str] = "torch._C"

    def __init__(self, device: torch.device) -> None:
        index = device.index
        if index is None:  # torch declares an int, and gives None for a device without one
            index = self.module().current_device()  # type: ignore[unreachable]
        super().__init__(torch.device(self.type, index))

    @classmethod
    def module(cls) -> Any:
        """`torch.<type>`, which torch's own types do not know; None where it is missing."""
        return getattr(torch, cls.type, None)

    @classmethod
    def availability(cls) -> Availability:
        """Whether the package can be loaded, captures graphs, and finds a device. Loads it."""
        kind, package = cls.type, cls.package
        if package is not None:
            if importlib.util.find_spec(package) is None:
                return Availability(False, f"{package} is not installed", f"install the {package} for this torch")
            error = import_error(package)
            if error is not None:
                return Availability(
                    False, f"{package} cannot be loaded: {first_line(error)}", f"run `python -c 'import {package}'`"
                )
        module = cls.module()
        if module is None:
            return Availability(False, f"{package or 'torch'} has no `torch.{kind}`", f"update {package or 'torch'}")
        is_compiled = getattr(module, "_is_compiled", None)
        if is_compiled is not None and not is_compiled():
            return Availability(
                False, f"this torch was built without {kind.upper()}", f"install a torch built for {kind.upper()}"
            )
        if missing := missing_calls(module):
            return Availability(
                False,
                f"`torch.{kind}` cannot capture graphs: it has no {', '.join(missing)}",
                f"update {package or 'torch'}",
            )
        if not module.is_available():
            return Availability(
                False, f"{package or 'torch'} finds no {kind.upper()} device or no driver", "check the driver"
            )
        return Availability(True)

    @property
    def has_capture_error_modes(self) -> bool:
        """Whether `capture_begin` of the module's graphs takes one."""
        kind: Any = graph_class(self.module())
        return _takes_error_mode(kind)

    def new_pool_handle(self) -> Any:
        """A pool id that no graph uses yet."""
        return tuple(self.module().graph_pool_handle())

    def pool_id(self, handle: Any) -> tuple[int, int]:
        """What the allocator knows a pool by."""
        return handle  # type: ignore[no-any-return]

    def graph(self) -> Any:
        """An empty graph."""
        kind: Any = graph_class(self.module())
        with self.module().device(self.device):
            return AcceleratorGraph(kind())

    @contextmanager
    def capture(
        self, graph: Any, *, pool: GraphMemoryPool, stream: Any, capture_error_mode: CaptureErrorMode
    ) -> Iterator[None]:
        """Records the block; see `DeviceAdapter.capture`.

        The module's `graph` context is not used: it synchronises and empties the allocator's cache at each capture, and
        after a failure leaves its stream current, keeps the pool's memory, and hides the model's error behind its own.
        """
        module = self.module()
        self.check_not_nested()
        modes = {"capture_error_mode": capture_error_mode} if self.has_capture_error_modes else {}
        with module.device(self.device), module.stream(stream):
            handle = pool.handle
            try:
                graph.raw.capture_begin(pool=self.pool_id(handle), **modes)
                try:
                    yield
                except BaseException:
                    # Ending an invalidated capture fails, too; the model's own error is the one to be told.
                    with contextlib.suppress(Exception):
                        module.set_stream(stream)
                        graph.end()
                    raise
                module.set_stream(stream)
                graph.end()
            except BaseException:
                self._abandon(graph, pool, handle)
                raise
            graph.keep(pool)

    def check_not_nested(self) -> None:
        """Refuses a capture inside another one.

        Raises:
            CaptureError: `nested-capture`.
        """
        if self.module().is_current_stream_capturing():
            raise CaptureError(
                "a capture was begun inside another capture of this thread",
                code="nested-capture",
                hint="capture one graph after the other",
            )

    def _abandon(self, graph: Any, pool: GraphMemoryPool, handle: Any) -> None:
        """Gives back what a failed capture had allocated.

        A capture that ended well enough is dropped by `reset`. Where its end failed, torch believes that it goes on:
        the device's allocator can be told otherwise, the allocator of pinned memory cannot, and refuses the handle from
        then on. Nor does torch take a handle again whose last graph is gone. In both cases the pool goes on with
        another one; graphs that were captured before keep the old one's memory.
        """
        graph.raw.reset()
        end = next(filter(None, map(self.binding, END_BINDINGS)), None)
        release = self.binding("releasePool")
        is_usable = False
        if end is not None and release is not None:
            try:
                end(self.device.index, self.pool_id(handle))
            except RuntimeError:  # it had ended
                is_usable = pool.graphs > 0
            else:
                release(self.device.index, self.pool_id(handle))
        if not is_usable:
            pool.renew()

    def binding(self, name: str) -> Any:
        """A binding of the device's allocator; None where it has no such."""
        return getattr(importlib.import_module(self.bindings), f"_{self.type}_{name}", None)

    def weak_outputs(self, tensors: Sequence[torch.Tensor], pool: GraphMemoryPool) -> list[torch.Tensor]:
        """See `DeviceAdapter.weak_outputs`; the tensors themselves where the allocator does not tell its pools."""
        snapshot = getattr(self.module(), "memory_snapshot", None)
        if snapshot is None:
            return list(tensors)
        spans = _spans(snapshot, tuple(self.pool_id(pool.handle)))
        return [self.weak_tensor(t) if any(a <= t.data_ptr() < b for a, b in spans) else t for t in tensors]

    def weak_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same view of the same memory, which does not keep it."""
        storage = tensor.untyped_storage()
        # ADDRESS: the memory is the pool's, and the pool lives as long as the graph that writes it.
        weak = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
        with torch.inference_mode(False), torch.no_grad():
            view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return view.set_(weak, tensor.storage_offset(), tensor.shape, tensor.stride())

    def stream(self) -> Any:
        """A stream of torch's pool."""
        return self.module().Stream(self.device)

    def current_stream(self) -> Any:
        """This thread's current stream on the device."""
        return self.module().current_stream(self.device)

    @contextmanager
    def stream_context(self, stream: Any) -> Iterator[Any]:
        """Makes `stream`, and its device, current for the block."""
        with self.module().device(self.device), self.module().stream(stream):
            yield stream

    def event(self) -> Any:
        """An event without timing."""
        with self.module().device(self.device):
            return self.module().Event()

    def synchronize(self) -> None:
        """Waits for everything launched on the device."""
        self.module().synchronize(self.device)

    def is_capturing(self) -> bool:
        """Whether this thread's current stream is being captured."""
        with self.module().device(self.device):
            return bool(self.module().is_current_stream_capturing())

    def memory(self) -> DeviceMemory:
        """The caching allocator's figures, and the driver's where it tells them."""
        module = self.module()
        free = total = None
        if hasattr(module, "mem_get_info"):
            with contextlib.suppress(RuntimeError):  # some drivers of a kind tell, and others do not
                free, total = module.mem_get_info(self.device)
        return DeviceMemory(
            allocated=module.memory_allocated(self.device),
            reserved=module.memory_reserved(self.device),
            free=free,
            total=total,
        )

    def empty_cache(self) -> None:
        """Gives cached blocks back to the driver, so that a graph's pool can have them."""
        with self.module().device(self.device):
            self.module().empty_cache()

    def empty_host_cache(self) -> None:
        """See `DeviceAdapter.empty_host_cache`; torch has a call for all kinds of devices since 2.13."""
        empty = getattr(torch.accelerator, "empty_host_cache", None)
        if empty is not None:
            current = torch.accelerator.current_accelerator()
            if current is not None and current.type == self.type:
                empty()


@functools.cache
def _takes_error_mode(kind: Any) -> bool:
    return "capture_error_mode" in inspect.signature(kind.capture_begin).parameters


class XpuDevice(AcceleratorDevice):
    """An Intel GPU, through torch itself. Its captures have no error modes."""

    type: ClassVar[str] = "xpu"
    phases: ClassVar[tuple[str, ...]] = ("decode",)


class MusaDevice(AcceleratorDevice):
    """A Moore Threads GPU, through `torch_musa`."""

    type: ClassVar[str] = "musa"
    package: ClassVar[str | None] = "torch_musa"
    bindings: ClassVar[str] = "torch_musa._MUSAC"
