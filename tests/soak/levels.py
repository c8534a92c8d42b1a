"""What a process holds: what must be the same again when every runner is closed."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import devicegraph as dg
from devicegraph.devices.tape_memory import TapeMemory


class _Heap(ctypes.Structure):
    """The C library's `mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def heap_in_use() -> int:
    """Bytes that the C library's allocator has given out; 0 where it does not tell (glibc does, since 2.33)."""
    tell = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if tell is None:
        return 0
    tell.restype = _Heap
    heap = tell()
    return int(heap.uordblks + heap.hblkhd)


class Levels(NamedTuple):
    """Figures at one moment; bytes where nothing else is said.

    Attributes:
        rss: of the process.
        heap: see `heap_in_use`; Python's larger objects are among it.
        objects: that the garbage collector follows.
        blocks: of Python's allocator, a count.
        threads: of Python.
        files: descriptors that are open, a count.
        tapes: memories of the CPU tape, a count, and the bytes under live tensors in them.
        pooled: memories in the input-buffer pool, a count.
        device: allocated and reserved on the GPU.
        pinned: pinned host memory, with what is kept for reuse: torch 2.11 miscounts what is in use.
    """

    rss: int
    heap: int
    objects: int
    blocks: int
    threads: int
    files: int
    tapes: tuple[int, int]
    pooled: int
    device: tuple[int, int]
    pinned: int

    @classmethod
    def now(cls) -> Levels:
        """The figures once garbage is collected and caches are given back."""
        FakeTensorMode.cache_clear()  # torch keeps what it knows of every shape that was ever captured
        gc.collect()
        device, pinned = (0, 0), 0
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.empty(1, pin_memory=True)  # its allocator looks what is free when it is asked for some
            device = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
        memories = TapeMemory.all()
        return cls(
            rss=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            heap=heap_in_use(),
            objects=len(gc.get_objects()),
            blocks=sys.getallocatedblocks(),
            threads=threading.active_count(),
            files=len(list(Path("/proc/self/fd").iterdir())),
            tapes=(len(memories), sum(memory.live_bytes for memory in memories)),
            pooled=len(dg.input_buffer_pool),
            device=device,
            pinned=pinned,
        )

    def check(
        self,
        earlier: Levels,
        *,
        rss: int = 24 << 20,
        heap: int = 2 << 20,
        objects: int = 200,
        blocks: int = 2000,
        pinned: int = 1 << 16,
    ) -> None:
        """What the package accounts for has not changed; what others keep beside it has grown by no more than caches.

        Args:
            earlier: the same place of the same loop, once everything that is made once was made.
            rss: how much of it the allocators of the process may have taken since.
            heap: how much of it caches of torch and the interpreter may have taken since.
            objects: how many of them torch and the interpreter may keep.
            blocks: likewise.
            pinned: how much of it torch may keep for reuse since, in blocks of other sizes.
        """
        same = ("threads", "files", "tapes", "pooled", "device")
        assert [getattr(self, name) for name in same] == [getattr(earlier, name) for name in same], (earlier, self)
        most = {"rss": rss, "heap": heap, "objects": objects, "blocks": blocks, "pinned": pinned}
        grown = {name: getattr(self, name) - getattr(earlier, name) for name in most}
        assert all(grown[name] <= most[name] for name in most), (grown, earlier, self)
