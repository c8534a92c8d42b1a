"""The tape's graph memory: blocks that are given back when the last tensor on them is gone, in segments that never
move.

This is what a device's private pool does: what a capture frees is reused later in the same capture and by the captures
that follow, which is safe because graphs of one pool never replay at the same time. It also means that the tape shows
the same fault as a device when somebody keeps an address instead of a tensor.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import torch

from devicegraph._core import Arena

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What the widest vector loads of CPU kernels ask for, in bytes.
ALIGNMENT = 64
#: The least size of a segment in bytes. Pages cost nothing until they are written, so that it can be generous.
SEGMENT_BYTES = 32 * 1024 * 1024

_memories: weakref.WeakSet[TapeMemory] = weakref.WeakSet()


class TapeMemory:
    """Segments of host memory and the arena that lays blocks out in them."""

    def __init__(self) -> None:
        self._arena = Arena(alignment=ALIGNMENT, segment_bytes=SEGMENT_BYTES)
        self._segments: list[torch.Tensor] = []
        self._addresses: list[int] = []
        _memories.add(self)

    @staticmethod
    def all() -> list[TapeMemory]:
        """Every memory that is alive in this process."""
        return list(_memories)

    @property
    def reserved_bytes(self) -> int:
        """Bytes in all segments."""
        return self._arena.reserved_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes under tensors that are alive now."""
        return self._arena.live_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were under tensors at once."""
        return self._arena.peak_bytes

    def new(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on a block of its own, given back when its storage dies. Its values are whatever lies there.

        Normal (not inference) tensors, so that a graph captured in one mode can be read in the other.
        """
        extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if all(size) else 0
        segment, offset, reserved = self._arena.allocate(extent * dtype.itemsize)
        if segment == len(self._segments):
            self._open_segment()
        block: Any = (ctypes.c_char * reserved).from_address(self._addresses[segment] + offset)
        # ADDRESS: a tensor may outlive its graph and this object; its storage owns the block, and the block the
        # segment.
        block.segment = self._segments[segment]
        weakref.finalize(block, self._arena.release, segment, offset, reserved).atexit = False
        with torch.inference_mode(False):
            # The storage owns `block`, and the finalizer of `block` is what gives the memory back.
            storage = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
            return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, size, stride)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in one of the segments."""
        return self._segment_of(tensor) is not None

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the same bytes that does not keep `tensor`'s block, only the segment.

        A tensor that lies elsewhere is returned detached: what replaces it later is not seen, as on a device.
        """
        segment = self._segment_of(tensor)
        if segment is None:
            return tensor.detach()
        # Blocks begin at multiples of ALIGNMENT, hence of every item size.
        distance = tensor.untyped_storage().data_ptr() - self._addresses[segment]
        offset = distance // tensor.itemsize + tensor.storage_offset()
        storage = self._segments[segment].untyped_storage()
        with torch.inference_mode(False):
            view = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage, offset, tensor.shape, tensor.stride())
            if tensor.is_conj():
                view = view.conj()
            return torch._neg_view(view) if tensor.is_neg() else view

    def _segment_of(self, tensor: torch.Tensor) -> int | None:
        address = tensor.untyped_storage().data_ptr()
        for index, (start, segment) in enumerate(zip(self._addresses, self._segments, strict=True)):
            if start <= address < start + segment.nbytes:
                return index
        return None

    def _open_segment(self) -> None:
        with torch.inference_mode(False):
            segment = torch.empty(self._arena.segments[-1], dtype=torch.uint8, device="cpu")
        self._segments.append(segment)
        self._addresses.append(segment.data_ptr())
