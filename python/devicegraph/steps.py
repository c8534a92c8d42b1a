"""Prepared steps: what a fill does for given sizes and sources, checked, planned and compiled once.

On a warm step nothing is planned, hashed or allocated: the sources are compared with those that the step was prepared
for, and their addresses with the buffers'.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from devicegraph.fill import ForeachExecutor, is_captured
from devicegraph.native import EXCHANGE, KINDS, compiled, tables_of
from devicegraph.registration import span_bytes
from devicegraph.slots import GraphSlot, buffer_of, fault, has_memory, layout_of, name_of, row_major, unmovable

if TYPE_CHECKING:
    from devicegraph._core import FillNode, FillPlanner, FillTable
    from devicegraph.fill import FillProgram, HostValues
    from devicegraph.native import NativeExecutor, NativeProgram

__all__ = ["CACHE_SIZE", "PreparedSteps", "Step", "remember"]

#: What a cache of steps, or of views, holds. Decode has a step for each live size, of which engines have a few hundred.
CACHE_SIZE = 1024

#: Live and padded requests, live and padded tokens, and whether there is no batch to read.
Sizes: TypeAlias = tuple[int, int, int, int, bool]
#: All that is checked of a source but its address: class, dtype, shape, device, strides, and the bytes that it spans.
Known: TypeAlias = (
    "tuple[type[torch.Tensor], torch.dtype, torch.Size, torch.device, tuple[int, ...], int] | Number | None"
)
#: What the core is told of a source: dtype, shape, device, strides, and whether it is a number.
Described: TypeAlias = tuple[str, Sequence[int], str, Sequence[int], bool]


class Number:
    """In the place of what is checked of a tensor: a plain number that the slot holds."""


NUMBER: Final = Number()


class Step(NamedTuple):
    """What carries out a step of some sizes with sources of some forms."""

    known: tuple[Known, ...]
    program: FillProgram
    #: The core's program, where it carries the step out.
    native: NativeProgram | None
    #: Where calls carry it out: by which the core tells whether sources are those that it was made for; None where
    #: Python has to look.
    check: FillTable | None


class PreparedSteps:
    """The steps of a set of slots."""

    def __init__(
        self,
        slots: Sequence[GraphSlot],
        planner: FillPlanner,
        calls: ForeachExecutor,
        native: NativeExecutor | None,
        values: HostValues,
    ) -> None:
        """No step yet.

        Args:
            slots: registered, all of the planner.
            planner: checks and plans.
            calls: carries steps out by calls.
            native: carries them out in the core, where that can be.
            values: makes tensors of numbers.
        """
        self._slots = slots
        self._planner = planner
        self._calls = calls
        self.native = native
        self._values = values
        # A table is good for telling whether sources are those of a step, also where calls carry the step out.
        self._checks = tables_of(slots, planner, None) if native is None and EXCHANGE is not None else None
        self._numbers = [(index, slot) for index, slot in enumerate(slots) if slot.value_fn is not None]
        self._devices = {buffer_of(slot).device for slot in slots}
        self._steps: dict[object, Step] = {}
        #: The step that was prepared or found last for each sizes, which is nearly always the one that is wanted.
        self.latest: dict[Sizes, Step] = {}
        # Where each buffer starts and ends, in order of address, with a fence at either end.
        spans = sorted((buffer_of(slot).data_ptr(), span_bytes(buffer_of(slot))) for slot in slots)
        self._starts = [*(start for start, _ in spans), math.inf]
        # What has no memory starts at 0, before the first buffer: the first fence stops it.
        self._ends = [1, *(start + span for start, span in spans)]

    def run(self, sizes: Sizes, sources: list[Any]) -> None:
        """Carries out a step.

        Args:
            sizes: plain integers and the flag.
            sources: one for each slot: None where there is none, what `value_fn` gave where there is one.

        Raises:
            SlotError: a size or a source that does not fit: see `CudaGraphBufferRegistry.fill_from`.
        """
        step = self.latest.get(sizes)
        native = None if step is None else step.native
        if native is None or native.attempt is None or not native.attempt(sources):
            self._step(sizes, sources).program(sources)

    def run_in(self, node: FillNode, sizes: Sizes, sources: list[Any]) -> None:
        """Carries out a step, but leaves what it writes on the device to the next launch of a graph's node.

        Raises:
            SlotError: as `run` does.
        """
        step = self.latest.get(sizes)
        native = None if step is None else step.native
        if native is None or not native.fits_node or not native.table.attempt_in(sources, node):
            step = self._step(sizes, sources)
            native = step.native
            if native is None or not native.fits_node:
                node.clear()
                step.program(sources)
            else:
                native.table.carry_out_in(sources, node)

    def _step(self, sizes: Sizes, sources: list[Any]) -> Step:
        for index, slot in self._numbers:
            value = sources[index]
            if isinstance(value, torch.Tensor) and value.dtype == slot.dtype:
                continue
            if self.native is None or not self.native.takes(slot, value):
                sources[index] = self._values.tensor(slot, value, _live_rows(slot, sizes))
        try:
            step = self.latest.get(sizes)
            if step is not None and (
                (step.check is not None and step.check.matches(sources)) or self._is_for(step, sources)
            ):
                return step
        except (AttributeError, RuntimeError, TypeError, Warning):
            pass  # something is no dense tensor (reading a fake one's address may warn): preparing the step says what
        _lay_bare(sources)
        return self._prepare(sizes, sources)

    def _is_for(self, step: Step, sources: Sequence[Any]) -> bool:
        starts, ends = self._starts, self._ends
        for source, known in zip(sources, step.known, strict=True):
            if isinstance(known, Number):
                if isinstance(source, torch.Tensor):
                    return False
                continue
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

    def _prepare(self, sizes: Sizes, sources: Sequence[Any]) -> Step:
        known = tuple(map(_known, self._slots, sources))
        step = self._steps.get((sizes, known))
        is_kept = True
        if step is None:
            # In a capture with constants of its own, which go with the capture.
            is_kept = not any(map(is_captured, self._devices))
            step = self._compiled(sizes, known, self._calls if is_kept else ForeachExecutor())
            if is_kept:
                remember(self._steps, (sizes, known), step)
        self._check_memory(sources)
        if is_kept:
            remember(self.latest, sizes, step)
        return step

    def _compiled(self, sizes: Sizes, known: tuple[Known, ...], calls: ForeachExecutor) -> Step:
        described = [_described(slot, sizes, each) for slot, each in zip(self._slots, known, strict=True)]
        # Constants and views are kept: they are real, whoever records the fill.
        with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
            if self.native is not None:
                native = self.native.compile(sizes, described, calls)
                return Step(known, native, native, None)
            raw_bs, padded_bs, raw_num_tokens, padded_num_tokens, is_unread = sizes
            plan = self._planner.plan(
                [None if each is None else (each[0], each[1], each[2], each[3]) for each in described],
                raw_bs=raw_bs,
                padded_bs=padded_bs,
                raw_num_tokens=raw_num_tokens,
                padded_num_tokens=padded_num_tokens,
                unread=is_unread,
            )
            check = None if self._checks is None else compiled(self._checks, sizes, described)[0]
            program = calls.compile(plan, self._slots)
            return Step(known, program, None, check if check is not None and check.checks else None)

    def _check_memory(self, sources: Sequence[torch.Tensor | None]) -> None:
        """Refuses sources without memory, and those in memory that the fill writes, but for a slot's own rows.

        Copies of one fill run in any order, or at once: a source that another copy or padding writes has no defined
        value.
        """
        for slot, source in zip(self._slots, sources, strict=True):
            if not isinstance(source, torch.Tensor) or source.numel() == 0:
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


def _lay_bare(sources: list[Any]) -> None:
    """Replaces tensors of subclasses by plain ones on the same memory: what a subclass says of itself may be anything.

    Those that carry out operators themselves are left: they may have no memory of their elements.
    """
    for index, source in enumerate(sources):
        kind = type(source)
        if kind in KINDS or not issubclass(kind, torch.Tensor):
            continue
        if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
            with torch._C.DisableTorchFunctionSubclass():
                sources[index] = torch.Tensor.as_subclass(source, torch.Tensor)


def _known(slot: GraphSlot, source: Any) -> Known:
    if source is None:
        return None
    if slot.value_fn is not None and not isinstance(source, torch.Tensor):
        return NUMBER
    kind = unmovable(source)
    if kind is not None:
        raise fault(slot.name, "not-a-tensor", f"the source is a `{kind}`", hint="pass a dense tensor")
    return type(source), source.dtype, source.shape, source.device, source.stride(), span_bytes(source)


def _described(slot: GraphSlot, sizes: Sizes, known: Known) -> Described | None:
    if known is None:
        return None
    if isinstance(known, Number):
        buffer = buffer_of(slot)
        shape = buffer.shape if slot.axis == "none" else (min(_live_rows(slot, sizes), buffer.shape[0]),)
        return name_of(slot.dtype), shape, str(buffer.device), row_major(shape), True
    return name_of(known[1]), known[2], str(known[3]), known[4], False


def _live_rows(slot: GraphSlot, sizes: Sizes) -> int:
    return layout_of(slot).live_rows(sizes[0], sizes[2])


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


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def remember(cache: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Keeps a value, in place of the oldest where the cache is full."""
    if len(cache) >= CACHE_SIZE and key not in cache:
        del cache[next(iter(cache))]
    cache[key] = value
