"""Stand-ins for the torch modules of accelerators: the graph functions of `torch.cuda`, over the CPU tape.

A stand-in has the functions and arguments of the real module and keeps the rules of its allocator: a pool is counted by
its graphs, a capture that could not end goes on recording into it, and a pool whose last graph is gone is refused.
A capture ends on the stream that it began on.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

import devicegraph as dg
from devicegraph.devices.cpu import CpuDevice, TapeGraph
from devicegraph.devices.tape_streams import TapeEvent, TapeStream, thread

if TYPE_CHECKING:
    from typing_extensions import Self

CPU: Any = CpuDevice(torch.device("cpu"))
_ids = itertools.count(1)


class Pool:
    """What the allocator has for a pool id."""

    def __init__(self) -> None:
        self.memory = dg.GraphMemoryPool(CPU)
        self.memory.hold()  # its handle stays; when it goes is for the counts here
        self.uses = 0
        self.was_used = False
        self.is_recording = False


POOLS: dict[Any, Pool] = {}


def begin(pool: Any) -> Pool:
    if pool not in POOLS:
        POOLS[pool] = Pool()
    known = POOLS[pool]
    if known.is_recording:
        raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
    if known.uses == 0 and known.was_used:
        raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
    known.uses, known.was_used, known.is_recording = known.uses + 1, True, True
    return known


def end(device: int, pool: Any) -> None:
    if pool not in POOLS or not POOLS[pool].is_recording:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
    POOLS[pool].is_recording = False


def release(device: int, pool: Any) -> None:
    POOLS[pool].uses -= 1


#: As `torch._C` names them.
globals().update(_xpu_endAllocateToPool=end, _xpu_releasePool=release)


class _Graph:
    """What the graph classes have in common. It holds a tape."""

    def __init__(self, *_: object) -> None:
        self._tape = TapeGraph()
        self._pool: Any = None
        self._stream: Any = None
        self._capture: AbstractContextManager[None] | None = None
        self._has_ended = False

    def _begin(self, pool: Any, mode: Any) -> None:
        self._pool = graph_pool_handle() if pool is None else pool
        memory = begin(self._pool).memory
        self._stream = CPU.current_stream()
        self._capture = CPU.capture(self._tape, pool=memory, stream=self._stream, capture_error_mode=mode)
        self._capture.__enter__()

    def capture_end(self) -> None:
        if CPU.current_stream() is not self._stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        capture, self._capture = self._capture, None
        assert capture is not None
        try:
            capture.__exit__(None, None, None)
        except dg.CaptureError as error:
            raise RuntimeError(f"capture invalidated: {error.message}") from error
        end(0, self._pool)
        self._has_ended = True

    def replay(self) -> None:
        self._tape.replay()

    def reset(self) -> None:
        self._tape.reset()
        if self._has_ended:
            release(0, self._pool)
        self._has_ended = False

    def pool(self) -> Any:
        return self._pool


class XPUGraph(_Graph):
    def __new__(cls, keep_graph: bool = False) -> Self:
        return super().__new__(cls)

    def capture_begin(self, pool: Any = None) -> None:
        self._begin(pool, "no modes")


class MUSAGraph(_Graph):
    def __new__(cls) -> Self:
        return super().__new__(cls)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._begin(pool, capture_error_mode)


class ACMEGraph(MUSAGraph):
    pass


class Stream(TapeStream):
    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Self:
        return super().__new__(cls)

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        super().__init__()


class Event(TapeEvent):
    def __new__(cls, enable_timing: bool = False) -> Self:
        return super().__new__(cls)

    def __init__(self, enable_timing: bool = False) -> None:
        super().__init__()


def graph_pool_handle() -> tuple[int, int]:
    return 0, next(_ids)


def is_available() -> bool:
    return True


def is_current_stream_capturing() -> bool:
    return bool(CPU.is_capturing())


def current_device() -> int:
    return 0


def device(device: Any) -> AbstractContextManager[None]:
    return nullcontext()


def current_stream(device: Any = None) -> Any:
    return CPU.current_stream()


def set_stream(stream: Any) -> None:
    thread.stream = stream


def stream(stream: Any) -> AbstractContextManager[Any]:
    return CPU.stream_context(stream)  # type: ignore[no-any-return]


def synchronize(device: Any = None) -> None:
    CPU.synchronize()


def empty_cache() -> None:
    for pool, known in list(POOLS.items()):
        if known.uses == 0 and not known.memory.handle.live_bytes:
            del POOLS[pool]


def memory_allocated(device: Any = None) -> int:
    return int(CPU.memory().allocated)


def memory_reserved(device: Any = None) -> int:
    return int(CPU.memory().reserved)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return 3 << 30, 4 << 30


def memory_snapshot(mempool_id: tuple[int, int] | None = None) -> list[dict[str, Any]]:
    return [
        {"address": address, "total_size": segment.nbytes, "segment_pool_id": pool}
        for pool, known in POOLS.items()
        for address, segment in zip(known.memory.handle._addresses, known.memory.handle._segments, strict=True)
    ]


FUNCTIONS = (
    Stream,
    Event,
    graph_pool_handle,
    is_available,
    is_current_stream_capturing,
    current_device,
    device,
    current_stream,
    set_stream,
    stream,
    synchronize,
    empty_cache,
    memory_allocated,
    memory_reserved,
    mem_get_info,
    memory_snapshot,
)


def make_module(kind: type[_Graph], without: tuple[str, ...] = ()) -> Any:
    """A module with graphs of a class, and all functions but those left out."""
    module: Any = ModuleType(f"torch.{kind.__name__[:-5].lower()}")
    for function in (kind, *FUNCTIONS):
        if function.__name__ not in without:
            setattr(module, function.__name__, function)
    return module
