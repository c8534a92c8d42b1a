"""Fills that the core carries out itself: one kernel launch on CUDA, a loop in host memory.

The core reads the sources, checks them against what the step was made for, and writes everything in one go, whatever
the dtypes, casts, layouts and padding. What its table has no entry for is left to grouped copies.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

from devicegraph._core import FillKernel, FillTables, HostRing
from devicegraph.errors import BackendError
from devicegraph.fill import PLAIN
from devicegraph.registration import span_bytes
from devicegraph.slots import GraphSlot, buffer_of, fits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from devicegraph._core import FillPlan, FillPlanner, FillTable
    from devicegraph.fill import FillProgram, ForeachExecutor
    from devicegraph.steps import Described, Sizes

__all__ = [
    "EXCHANGE",
    "KINDS",
    "NativeExecutor",
    "NativeProgram",
    "compiled",
    "kernel_on",
    "tables_of",
    "why_no_kernel",
    "why_not_native",
]

#: The most bytes of one slot's host source that are staged. Beyond, a copy by the device's engine is faster than a
#: kernel that reads host memory.
LARGEST_STAGED_BYTES: Final = 256 << 10

#: Steps that can be on their way to the device before the host waits to stage another.
RING_BLOCKS: Final = 4

#: The dtypes that the core can write a number in.
_NUMBER_DTYPES: Final = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float32,
        torch.float64,
    }
)

#: How torch lets tensors be read without their attributes; None where it does not.
EXCHANGE: Final = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)

#: Objects of these classes are read by their memory; subclasses may mean something else by it.
KINDS: Final = (torch.Tensor, torch.nn.Parameter)


def why_not_native(slots: Sequence[GraphSlot]) -> str | None:
    """Why the core cannot fill these slots' buffers; None where it can."""
    devices = {buffer_of(slot).device for slot in slots} - {torch.device("cpu")}
    if not devices:
        return None
    if len(devices) > 1:
        return f"the slots are on {len(devices)} devices"
    return why_no_kernel(devices.pop())


def why_no_kernel(device: torch.device) -> str | None:
    """Why there is no fill kernel for a device; None where there is one."""
    if device.type != "cuda":
        return f"there is no fill kernel for `{device.type}`"
    if torch.version.hip is not None:
        return "there is no fill kernel for HIP"
    try:
        kernel_on(device.index)
    except BackendError as error:
        return error.message
    return None


@cache
def kernel_on(index: int) -> FillKernel:
    """The fill kernel of the CUDA device of that number, loaded once.

    Raises:
        BackendError: `cuda-driver`.
    """
    return FillKernel(index)


class NativeProgram:
    """A step as a table, and calls for what the table has no entry for."""

    def __init__(self, table: FillTable, rest: FillProgram | None) -> None:
        self.table = table
        self._rest = rest
        #: Checks the sources, and runs the step if they are those that it was made for; None where the core cannot.
        self.attempt = (table.attempt if rest is None else self._attempt) if table.checks else None
        #: The table, where it does all of the step and reads the sources itself; else None.
        self.whole = table if table.checks and rest is None else None
        #: Whether a graph's node can do all that it writes on the device.
        self.fits_node = rest is None and table.launches <= 1

    def __call__(self, sources: list[Any]) -> None:
        """Runs the step with sources that were checked."""
        self.table.carry_out(sources)
        if self._rest is not None:
            self._rest(sources)

    def _attempt(self, sources: list[Any]) -> bool:
        if not self.table.attempt(sources):
            return False
        if self._rest is not None:
            self._rest(sources)
        return True


class NativeExecutor:
    """Makes the tables of a set of slots."""

    def __init__(self, slots: Sequence[GraphSlot], planner: FillPlanner) -> None:
        """For slots for which there is nothing against it.

        Args:
            slots: registered, all of the planner.
            planner: checks and plans.
        """
        self._slots = slots
        # ADDRESS: what tables write, also where somebody gives a buffer other memory.
        self._memory = [buffer_of(slot).untyped_storage() for slot in slots]
        device = next((buffer_of(slot).device for slot in slots if buffer_of(slot).device.type == "cuda"), None)
        self._tables = tables_of(slots, planner, None if device is None else device.index)

    def takes(self, slot: GraphSlot, value: object) -> bool:
        """Whether what a slot's `value_fn` gave can be written as it is."""
        return type(value) in PLAIN and slot.dtype in _NUMBER_DTYPES and fits(value, slot.dtype)

    def compile(self, sizes: Sizes, described: Sequence[Described | None], calls: ForeachExecutor) -> NativeProgram:
        """What runs a step of these sizes with sources like these.

        Args:
            sizes: of the step.
            described: the sources.
            calls: carries out what tables have no entries for.

        Raises:
            SlotError: see `CudaGraphBufferRegistry.fill_from`.
        """
        table, rest = compiled(self._tables, sizes, described)
        return NativeProgram(table, calls.compile(rest, self._slots) if rest.calls else None)


def tables_of(slots: Sequence[GraphSlot], planner: FillPlanner, cuda: int | None) -> FillTables:
    """The tables of registered slots, for the kernel of a CUDA device where one is given."""
    own = None if cuda is None else (cuda, kernel_on(cuda))
    return FillTables(
        planner,
        [(buffer_of(slot).data_ptr(), span_bytes(buffer_of(slot)), _pad_bits(slot)) for slot in slots],
        fields=[slot.name if slot.is_plain else None for slot in slots],
        kinds=KINDS,
        exchange=EXCHANGE,
        kernel=own,
        stream_of=getattr(torch._C, "_cuda_getCurrentRawStream", None),
        ring=None if own is None else _ring(slots, own[1]),
    )


def compiled(tables: FillTables, sizes: Sizes, described: Sequence[Described | None]) -> tuple[FillTable, FillPlan]:
    """The table of a step, and the plan of what it has no entry for.

    Raises:
        SlotError: see `CudaGraphBufferRegistry.fill_from`.
    """
    raw_bs, padded_bs, raw_num_tokens, padded_num_tokens, is_unread = sizes
    return tables.compile(
        described,
        raw_bs=raw_bs,
        padded_bs=padded_bs,
        raw_num_tokens=raw_num_tokens,
        padded_num_tokens=padded_num_tokens,
        unread=is_unread,
    )


def _pad_bits(slot: GraphSlot) -> int:
    value = torch.full((1,), slot.pad_value, dtype=slot.dtype, device="cpu")
    return int.from_bytes(value.view(torch.uint8).tolist(), "little")


def _ring(slots: Sequence[GraphSlot], kernel: FillKernel) -> HostRing | None:
    """Pinned memory for the sources that come from the host; None where no slot has one."""
    sizes = [
        min(buffer_of(slot).numel() * max(slot.dtype.itemsize, 8), LARGEST_STAGED_BYTES)
        for slot in slots
        if slot.source_device is not None and buffer_of(slot).device.type == "cuda"
    ]
    if not sizes:
        return None
    block_bytes = sum(-(-size // 16) * 16 for size in sizes)
    with torch.inference_mode(False):
        memory = torch.empty(RING_BLOCKS * block_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return HostRing(memory, memory.data_ptr(), block_bytes=block_bytes, blocks=RING_BLOCKS, kernel=kernel)
