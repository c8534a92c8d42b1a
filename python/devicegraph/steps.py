"""Prepared steps: what a fill does for given sizes and sources, checked, planned and compiled once.

On a warm step nothing is planned, hashed or allocated: the sources are compared with those that the step was prepared
for, and their addresses with the buffers'.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch

from devicegraph.registration import span_bytes
from devicegraph.slots import GraphSlot, buffer_of, fault, has_memory, name_of, row_major, unmovable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from devicegraph._core import FillPlanner
    from devicegraph.fill import FillExecutor, FillProgram

__all__ = ["CACHE_SIZE", "PreparedSteps", "remember"]

#: What a cache of steps, or of views, holds. Decode has a step for each live size, of which engines have a few hundred.
CACHE_SIZE = 1024

#: Live and padded requests, live and padded tokens, and whether there is no batch to read.
Sizes: TypeAlias = tuple[int, int, int, int, bool]
#: All that is checked of a source but its address: class, dtype, shape, device, strides, and the bytes that it spans.
Known: TypeAlias = "tuple[type[torch.Tensor], torch.dtype, torch.Size, torch.device, tuple[int, ...], int] | None"


class _Step(NamedTuple):
    known: tuple[Known, ...]
    program: FillProgram


class PreparedSteps:
    """The steps of a set of slots."""

    def __init__(self, slots: Sequence[GraphSlot], planner: FillPlanner, executor: FillExecutor) -> None:
        """No step yet.

        Args:
            slots: registered, all of the planner.
            planner: checks and plans.
            executor: compiles plans.
        """
        self._slots = slots
        self._planner = planner
        self._executor = executor
        self._steps: dict[object, _Step] = {}
        #: The step that was prepared or found last for each sizes, which is nearly always the one that is wanted.
        self._latest: dict[object, _Step] = {}
        # Where each buffer starts and ends, in order of address, with a fence at either end.
        spans = sorted((buffer_of(slot).data_ptr(), span_bytes(buffer_of(slot))) for slot in slots)
        self._starts = [*(start for start, _ in spans), math.inf]
        # What has no memory starts at 0, before the first buffer: the first fence stops it.
        self._ends = [1, *(start + span for start, span in spans)]

    def program(self, sizes: Sizes, sources: Sequence[Any]) -> FillProgram:
        """What carries out a step with sources like these.

        Args:
            sizes: plain integers and the flag.
            sources: one for each slot; None where there is none.

        Raises:
            SlotError: a size or a source that does not fit: see `CudaGraphBufferRegistry.fill_from`.
        """
        try:
            step = self._latest.get(sizes)
            if step is not None and self._is_for(step, sources):
                return step.program
        except (AttributeError, RuntimeError, TypeError, Warning):
            pass  # something is no dense tensor (reading a fake one's address may warn): preparing the step says what
        return self._prepare(sizes, sources)

    def _is_for(self, step: _Step, sources: Sequence[Any]) -> bool:
        starts, ends = self._starts, self._ends
        for source, known in zip(sources, step.known, strict=True):
            if source is None or known is None:
                if source is not known:
                    return False
                continue
            kind, dtype, shape, device, strides, span = known
            if type(source) is not kind or source.dtype is not dtype or source.shape != shape:
                return False
            if source.device != device or source.stride() != strides or source.is_neg():
                return False
            start = source.data_ptr()
            after = bisect_right(starts, start)
            if (start < ends[after] or start + span > starts[after]) and span > 0:
                self._check_memory(sources)
        return True

    def _prepare(self, sizes: Sizes, sources: Sequence[Any]) -> FillProgram:
        for slot, source in zip(self._slots, sources, strict=True):
            kind = None if source is None else unmovable(source)
            if kind is not None:
                raise fault(slot.name, "not-a-tensor", f"the source is a `{kind}`", hint="pass a dense tensor")
        known: tuple[Known, ...] = tuple(
            None
            if source is None
            else (type(source), source.dtype, source.shape, source.device, source.stride(), span_bytes(source))
            for source in sources
        )
        step = self._steps.get((sizes, known))
        if step is None:
            step = _Step(known, self._compiled(sizes, known))
            remember(self._steps, (sizes, known), step)
        self._check_memory(sources)
        remember(self._latest, sizes, step)
        return step.program

    def _compiled(self, sizes: Sizes, known: Sequence[Known]) -> FillProgram:
        described = [
            None if each is None else (name_of(each[1]), each[2], str(each[3]), list(each[4]) == row_major(each[2]))
            for each in known
        ]
        raw_bs, padded_bs, raw_num_tokens, padded_num_tokens, is_unread = sizes
        plan = self._planner.plan(
            described,
            raw_bs=raw_bs,
            padded_bs=padded_bs,
            raw_num_tokens=raw_num_tokens,
            padded_num_tokens=padded_num_tokens,
            unread=is_unread,
        )
        with torch.inference_mode(False), torch.no_grad():
            return self._executor.compile(plan, self._slots)

    def _check_memory(self, sources: Sequence[torch.Tensor | None]) -> None:
        """Refuses sources without memory, and those in memory that the fill writes, but for a slot's own rows.

        Copies of one fill run in any order, or at once: a source that another copy or padding writes has no defined
        value.
        """
        for slot, source in zip(self._slots, sources, strict=True):
            if source is None or source.numel() == 0:
                continue
            if not has_memory(source):
                raise fault(slot.name, "not-a-tensor", "the source has no memory", hint="pass a dense tensor")
            for other in self._slots:
                buffer = buffer_of(other)
                starts = (source.data_ptr(), buffer.data_ptr())
                ends = (starts[0] + span_bytes(source), starts[1] + span_bytes(buffer))
                if max(starts) < min(ends) and not (other is slot and _is_in_place(source, slot)):
                    what = f"the source shares memory with slot `{other.name}`"
                    raise fault(slot.name, "source-overlap", what, hint="pass a copy, or the slot's own rows")


def _is_in_place(source: torch.Tensor, slot: GraphSlot) -> bool:
    """Whether a source is the rows of its own slot, so that copying them changes nothing."""
    buffer = buffer_of(slot)
    steps = zip(source.shape, source.stride(), buffer.stride(), strict=True)
    return (
        source.data_ptr() == buffer.data_ptr()
        and source.dtype == buffer.dtype
        and all(size == 1 or given == own for size, given, own in steps)
        # Rows shorter than the slot's are padded before they are copied.
        and (slot.trailing == "exact" or source.shape[-1] == buffer.shape[-1])
    )


_Value = TypeVar("_Value")


def remember(cache: dict[object, _Value], key: object, value: _Value) -> None:
    """Keeps a value, in place of the oldest where the cache is full."""
    if len(cache) >= CACHE_SIZE and key not in cache:
        del cache[next(iter(cache))]
    cache[key] = value
