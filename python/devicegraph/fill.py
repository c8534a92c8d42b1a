"""Carrying out fills: plans as calls on views that are made once, and the grouped copy that they end in.

An executor compiles a plan into a program; a program takes one source for each slot and runs the step. The plan has
checked everything by then, so that a program only reads tensors and calls copies. `native.py` has the other way.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch.utils._python_dispatch import _disable_current_modes

from devicegraph._core import LARGE_PAD_BYTES, CopyGroup, FillPlan
from devicegraph.errors import SlotError
from devicegraph.slots import (
    GraphSlot,
    HostValue,
    as_held,
    buffer_of,
    fault,
    fits,
    has_memory,
    kind_of,
    name_of,
    row_major,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FillProgram", "ForeachExecutor", "HostValues", "grouped_foreach_copy_"]

#: One source for each slot, in order of registration; None where the plan reads none.
FillProgram: TypeAlias = "Callable[[list[Any]], None]"

#: Found once; None where torch has no grouped copy.
_foreach_copy = getattr(torch, "_foreach_copy_", None)


def grouped_foreach_copy_(dsts: Sequence[torch.Tensor], srcs: Sequence[torch.Tensor]) -> None:
    """Copies each source into its destination, in one call for each pair of dtypes and pair of devices.

    Copies within one device are queued on its current stream. Between the host and a device they wait for it.

    Args:
        dsts: written; each of its source's shape.
        srcs: read; cast where the dtypes differ.

    Raises:
        SlotError: `length-mismatch`, `not-a-tensor` or `wrong-shape`; `unsupported-dtype` where torch does not cast one
            dtype to the other; `shared-elements`, `bound-inference` or `bound-grad` for a destination that cannot be
            written. Nothing was copied.
    """
    if len(dsts) != len(srcs):
        message = f"{len(dsts)} destinations for {len(srcs)} sources"
        raise SlotError(message, code="length-mismatch", expected=str(len(dsts)), given=str(len(srcs)))
    groups: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for index, (dst, src) in enumerate(zip(dsts, srcs, strict=True)):
        for side, tensor in (("destination", dst), ("source", src)):
            if (kind := kind_of(tensor)) is not None:
                raise SlotError(f"{side} {index} is a `{kind}`", code="not-a-tensor", hint="pass dense tensors")
        if dst.shape != src.shape:
            sides = {"expected": str(list(dst.shape)), "given": str(list(src.shape))}
            message = f"source {index} has shape {sides['given']}, its destination {sides['expected']}"
            raise SlotError(message, code="wrong-shape", **sides)
        _check_copy(index, dst, src)
        group = groups.setdefault((dst.dtype, src.dtype, dst.device, src.device), ([], []))
        group[0].append(dst)
        group[1].append(src)
    for group_dsts, group_srcs in groups.values():
        _copy_group(group_dsts, group_srcs)


def _check_copy(index: int, dst: torch.Tensor, src: torch.Tensor) -> None:
    """Refuses what torch would in the middle of a group."""
    if type(dst).__torch_dispatch__ is type(src).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        for side, tensor in (("destination", dst), ("source", src)):
            if not dst.is_meta and not has_memory(tensor):
                raise SlotError(f"{side} {index} has no memory", code="not-a-tensor", hint="pass dense tensors")
    if dst.is_neg() or dst.is_conj():
        raise SlotError(f"destination {index} is a lazy view", code="not-a-tensor", hint="pass dense tensors")
    if any(size > 1 and stride == 0 for size, stride in zip(dst.shape, dst.stride(), strict=True)):
        raise SlotError(f"elements of destination {index} share memory", code="shared-elements", hint="pass a copy")
    if dst.is_inference() and not torch.is_inference_mode_enabled():
        what = f"destination {index} was made in `inference_mode` and cannot be written outside it"
        raise SlotError(what, code="bound-inference", hint="make it under `torch.inference_mode(False)`")
    if not _casts(dst.dtype, src.dtype):
        what = f"source {index} is `{name_of(src.dtype)}`, which torch does not cast to `{name_of(dst.dtype)}`"
        raise SlotError(what, code="unsupported-dtype", hint="pass a source of the destination's dtype")
    leaf = dst._base if dst._is_view() else dst
    if torch.is_grad_enabled() and leaf is not None and leaf.is_leaf and leaf.requires_grad:
        raise SlotError(f"destination {index} requires grad", code="bound-grad", hint="pass `tensor.detach()`")


@cache
def _casts(to: torch.dtype, source: torch.dtype) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a complex number, the imaginary part is dropped
            torch.empty(1, dtype=to, device="cpu").copy_(torch.empty(1, dtype=source, device="cpu"))
    except (NotImplementedError, RuntimeError):
        return to is source
    return True


def _copy_group(dsts: list[torch.Tensor], srcs: list[torch.Tensor]) -> None:
    if _foreach_copy is not None:
        _foreach_copy(dsts, srcs)
    else:
        for dst, src in zip(dsts, srcs, strict=True):
            dst.copy_(src)


class _Head(NamedTuple):
    """How the source of a slot enters a group."""

    slot: int
    #: The shape to view it in first: a row for each run, or one element for a source without dimensions.
    shape: tuple[int, ...] | None
    #: The dtype to read its bytes as.
    carrier: torch.dtype | None
    #: Each row is a source of its own.
    is_split: bool


class _Group(NamedTuple):
    dsts: list[torch.Tensor]
    #: The sources of the first destinations, which are padding.
    constants: list[torch.Tensor]
    #: Picks the sources that come next, as they are.
    plain: Callable[[list[Any]], Sequence[Any]]
    heads: tuple[_Head, ...]


def is_captured(device: torch.device) -> bool:
    """Whether this thread's current stream is being captured, of a device that something is on.

    A tensor that is made then is the capture's: its memory is used again, and it has no value before a replay.
    """
    asked = getattr(getattr(torch, device.type, None), "is_current_stream_capturing", None)
    return asked is not None and asked()


def _picker(slots: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    if len(slots) > 1:
        return itemgetter(*slots)
    return lambda sources: [sources[slot] for slot in slots]


class ForeachExecutor:
    """Fills by torch's grouped copy: one call for all same-dtype copies and small tails of a device.

    Grouped copies are fast only for contiguous tensors of one dtype. Buffers and sources of several dtypes are
    therefore viewed as the integers that the plan names, and padding is copied from constants, kept for each value.
    """

    def __init__(self) -> None:
        self._constants: dict[object, torch.Tensor] = {}

    def compile(self, plan: FillPlan, slots: Sequence[GraphSlot]) -> FillProgram:
        """What runs a step of this plan on the slots' buffers.

        Args:
            plan: for these slots; it refers to them by position.
            slots: registered, all of the planner.
        """
        buffers = [buffer_of(slot) for slot in slots]
        pads = [slot.pad_value for slot in slots]
        fills = [
            (_block(buffers[slot], offset, shape, strides), 0 if is_zero else pads[slot])
            for (slot, offset, shape, strides), is_zero in plan.fills
        ]
        groups = [self._group(group, buffers, pads) for group in plan.groups]
        copy_group = _foreach_copy or _copy_group
        copies = [(slot, _block(buffers[slot], offset, shape, strides)) for slot, offset, shape, strides in plan.copies]

        def run(sources: list[Any]) -> None:
            for target, value in fills:
                target.fill_(value)
            for dsts, constants, plain, heads in groups:
                srcs = [*constants, *plain(sources)]
                for slot, shape, carrier, is_split in heads:
                    source = sources[slot]
                    if shape is not None:
                        source = source.view(shape)
                    if carrier is not None:
                        source = source.view(carrier)
                    if is_split:
                        srcs += source.unbind(0)
                    else:
                        srcs.append(source)
                copy_group(dsts, srcs)
            for slot, target in copies:
                # What a capture records reads the source when it is replayed: nothing to wait for.
                is_recorded = target.is_cuda and torch.cuda.is_current_stream_capturing()
                target.copy_(sources[slot], non_blocking=is_recorded)

        return run

    def _group(self, group: CopyGroup, buffers: Sequence[torch.Tensor], pads: Sequence[HostValue]) -> _Group:
        writes, reads = getattr(torch, group.writes), getattr(torch, group.reads)
        dsts, constants, plain, heads = [], [], [], []
        others: list[torch.Tensor] = []
        for slot, offsets, length, is_zero in group.tails:
            runs = [_block(buffers[slot], offset, [length], [1]).view(writes) for offset in offsets]
            constant = self._constant(buffers[slot], 0 if is_zero else pads[slot]).view(writes)
            dsts += runs
            constants += [constant[: run.numel()] for run in runs]
        for slot, shape, offsets, length in group.heads:
            # One run is written in the source's own shape: the two then have the same strides, and the source needs no
            # view of it. A source without dimensions is one element.
            view = [len(offsets), length] if len(offsets) > 1 else shape or [1]
            block = view[1:] if len(offsets) > 1 else view
            targets = [_block(buffers[slot], offset, block, row_major(block)).view(writes) for offset in offsets]
            # Where the group casts, sources are of the type that it reads; else their bytes are moved.
            is_carried = group.writes == group.reads and buffers[slot].dtype != reads
            if view == shape and not is_carried and len(offsets) == 1:
                plain.append(slot)
                dsts += targets
            else:
                heads.append(
                    _Head(slot, tuple(view) if view != shape else None, reads if is_carried else None, len(offsets) > 1)
                )
                others += targets
        return _Group([*dsts, *others], constants, _picker(plain), tuple(heads))

    def _constant(self, buffer: torch.Tensor, value: HostValue) -> torch.Tensor:
        """As many bytes of one value as the longest tail of a group has, in the buffer's dtype and on its device."""
        # By its text, as 0.0 and -0.0 are equal and NaN is not.
        key = (buffer.device, buffer.dtype, repr(value))
        constant = self._constants.get(key)
        if constant is None:
            length = LARGE_PAD_BYTES // buffer.element_size()
            constant = torch.full((length,), value, dtype=buffer.dtype, device=buffer.device)
            self._constants[key] = constant  # ADDRESS: programs hold views of it
        return constant


class HostValues:
    """What `value_fn` computed, as device tensors that are kept for the next time, unless they are a capture's."""

    #: Values kept. A value that is dropped was last read at least a hundred fills ago even where each of eight slots
    #: changes its value on every step, so that its memory cannot be given away under a copy that still reads it.
    CAPACITY = 1024

    def __init__(self) -> None:
        self._tensors: dict[object, torch.Tensor] = {}
        #: ADDRESS: those that graphs read which captured a fill.
        self._captured: dict[object, torch.Tensor] = {}

    def tensor(self, slot: GraphSlot, value: object, rows: int) -> torch.Tensor:
        """The source that holds a value.

        Args:
            slot: with a `value_fn`, registered.
            value: what that gave.
            rows: the live rows, each of which needs a number or has the single one; 0 where the slot has none.

        Raises:
            SlotError: `bad-value`: no number or sequence of numbers, one that the slot's dtype cannot hold, or fewer
                numbers than live rows.
        """
        is_sequence = False
        numbers: tuple[Any, ...] = (value,)
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            is_sequence, numbers = True, tuple(value)
        if not PLAIN.issuperset(map(type, numbers)):
            numbers = tuple(_plain(slot, number) for number in numbers)
        try:
            # By their text, as 0.0, -0.0 and False are equal and NaN is not. Plain numbers print what they are.
            key = (slot.name, repr(numbers), is_sequence, rows)
        except ValueError as error:  # an integer of more digits than Python prints
            raise _bad_value(slot, value) from error
        if is_captured(buffer_of(slot).device):
            tensor = self._captured.get(key, self._tensors.get(key))
            if tensor is None:
                return _tensor_of(slot, numbers, is_sequence, rows)
            self._captured[key] = tensor
            return tensor
        tensor = self._tensors.pop(key, None)
        if tensor is None:
            with _disable_current_modes():  # what is kept is real, whoever records the fill
                tensor = _tensor_of(slot, numbers, is_sequence, rows)
            if len(self._tensors) >= self.CAPACITY:
                del self._tensors[next(iter(self._tensors))]
        self._tensors[key] = tensor  # last again: what was not used for longest goes first
        return tensor


#: Numbers that are what they print.
PLAIN = frozenset({bool, int, float})


def _plain(slot: GraphSlot, number: Any) -> HostValue:
    """A number of a subclass as what it is."""
    if isinstance(number, float):
        return float(number)
    if isinstance(number, int):
        return number if isinstance(number, bool) else int(number)
    raise _bad_value(slot, number)


def _bad_value(slot: GraphSlot, number: object) -> SlotError:
    what = f"`value_fn` gave `{shown(number)}`, which is no `{name_of(slot.dtype)}` number"
    return fault(slot.name, "bad-value", what, hint="give a Python number that the dtype holds, or a sequence")


def _tensor_of(slot: GraphSlot, numbers: Sequence[HostValue], is_sequence: bool, rows: int) -> torch.Tensor:
    buffer = buffer_of(slot)
    for number in numbers:
        if not fits(number, slot.dtype):
            raise _bad_value(slot, number)
    numbers = [as_held(number, slot.dtype) for number in numbers]
    if is_sequence:
        if len(numbers) < rows:
            live = "1 live row" if rows == 1 else f"{rows} live rows"
            what = f"`value_fn` gave a sequence of length {len(numbers)} for {live}"
            hint = "give a number for each, or a single one for all of them"
            raise fault(slot.name, "bad-value", what, hint=hint, expected=f"at least {rows}", given=len(numbers))
        # From memory that is not pinned the copy is staged before this returns: nothing is in flight when the list
        # goes.
        return torch.tensor(numbers, dtype=slot.dtype, device="cpu").to(buffer.device, non_blocking=True)
    shape = buffer.shape if slot.axis == "none" else (min(rows, buffer.shape[0]),)
    return torch.full(shape, numbers[0], dtype=slot.dtype, device=buffer.device)


def _block(buffer: torch.Tensor, offset: int, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    return buffer.as_strided(shape, strides, buffer.storage_offset() + offset)
