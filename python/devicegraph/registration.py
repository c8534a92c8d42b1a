"""What registration finds out about a slot: its shape, the rows that its functions cut, and whether a tensor fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from devicegraph._core import SlotLayout, as_size
from devicegraph.errors import SlotError
from devicegraph.slots import GraphSlot, buffer_of, fault, has_memory, name_of, shown, unmovable, worded

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["check_bound", "find_shape", "lay_out", "numbered", "row_unit", "span_bytes"]

#: Torch counts the bytes of a tensor in 64 bits with a sign.
MOST_BYTES = 2**63 - 1


def find_shape(slot: GraphSlot, max_bs: int, max_num_tokens: int) -> tuple[int, ...]:
    """The whole buffer's shape.

    Raises:
        SlotError: `bad-shape`: `shape_fn` gives no sequence of sizes, more than memory can address, or something that
            grows with the axis along another dimension than the one that is cut.
    """
    shape = _asked(slot, max_bs, max_num_tokens)
    if math.prod(shape) * slot.dtype.itemsize > MOST_BYTES:
        raise fault(slot.name, "bad-shape", f"shape {list(shape)} is more than memory can address")
    if slot.axis != "none" and slot.slice_fn is None and len(shape) > 1:
        more = _asked(slot, max_bs + (slot.axis == "bs"), max_num_tokens + (slot.axis == "tokens"))
        if len(more) != len(shape):
            what = f"`shape_fn` gave {len(shape)} dimensions, and {len(more)} for one more along `{slot.axis}`"
            raise fault(slot.name, "bad-shape", what, hint="return as many dimensions for every size")
        grown = [dim for dim, (size, larger) in enumerate(zip(shape, more, strict=True)) if size != larger]
        if grown and 0 not in grown:
            what = f"shape {list(shape)} grows with `{slot.axis}` along dimension {grown[0]}, but dimension 0 is cut"
            cut = ", ".join([":"] * grown[0] + [":size"])
            raise fault(slot.name, "bad-shape", what, hint=f"give `slice_fn=lambda buffer, size: buffer[{cut}]`")
    return shape


def lay_out(
    slot: GraphSlot,
    shape: tuple[int, ...],
    device: torch.device,
    *,
    max_bs: int,
    max_num_tokens: int,
    bound: torch.Tensor | None,
) -> SlotLayout:
    """What the planner has to know of a slot.

    Args:
        slot: to be registered.
        shape: of its whole buffer.
        device: of its buffer, with its number.
        max_bs: the most requests of a bucket.
        max_num_tokens: the most tokens of a bucket.
        bound: the buffer, where there is one already; it is not read.

    Raises:
        SlotError: the slot cannot be: see `CudaGraphBufferRegistry.register_slot`.
    """
    if slot.value_fn is not None and len(shape) > 1:
        what = f"`value_fn` has no value for shape {list(shape)}"
        raise fault(slot.name, "bad-shape", what, hint="use at most one dimension")
    # What is cut is never read: memory that is not even there yet will do.
    sample = torch.empty(shape, dtype=slot.dtype, device="cpu") if bound is None else bound
    capacity = max_bs if slot.axis == "bs" else max_num_tokens
    rows = _Rows(dim=0, base=0, step=1, unit=1) if slot.axis == "none" else _find_rows(slot, sample, capacity)
    layout = SlotLayout(
        slot.name,
        axis=slot.axis,
        policy=slot.padding_policy.value,
        dtype=name_of(slot.dtype),
        shape=shape,
        strides=sample.stride(),
        dim=rows.dim,
        rows=(rows.base, rows.step, rows.unit),
        capacity=capacity,
        feed="field" if slot.is_plain else "function" if slot.copy_from_fb else "elsewhere",
        device=str(device),
        source_device=slot.source_device or "own",
        required=slot.required,
        allow_narrowing=slot.allow_narrowing,
        prefix=slot.trailing == "prefix",
    )
    layout.padded_rows(max_bs, max_num_tokens)  # the largest bucket must be one that the slot has whole rows for
    return layout


def check_bound(
    slot: GraphSlot, bound: Any, shape: tuple[int, ...], device: torch.device, others: Iterable[GraphSlot]
) -> None:
    """Whether a tensor can be the buffer of a slot; it is not read.

    Raises:
        SlotError: `not-a-tensor`, `bound-shape`, `bound-dtype`, `bound-device`, `bound-inference`, `bound-grad` or
            `bound-overlap`.
    """
    kind = unmovable(bound)
    if kind is not None:
        raise fault(slot.name, "not-a-tensor", f"a `{kind}` cannot be its buffer", hint="bind a dense tensor")
    sides: tuple[tuple[str, object, object], ...] = (
        ("shape", list(shape), list(bound.shape)),
        ("dtype", name_of(slot.dtype), name_of(bound.dtype)),
        ("device", device, bound.device),
    )
    for what, expected, given in sides:
        if given != expected:
            text = f"the bound tensor has {what} {given}, expected {expected}"
            raise fault(slot.name, f"bound-{what}", text, expected=expected, given=given)
    if not bound.is_meta and not has_memory(bound):
        raise fault(slot.name, "not-a-tensor", "the bound tensor has no memory", hint="bind a dense tensor")
    if bound.is_inference():
        what = "the bound tensor was made in `inference_mode` and cannot be written outside it"
        raise fault(slot.name, "bound-inference", what, hint="make it under `torch.inference_mode(False)`")
    if bound.requires_grad:
        raise fault(slot.name, "bound-grad", "the bound tensor requires grad", hint="bind `tensor.detach()`")
    for other in others:
        buffer = buffer_of(other)
        starts, ends = (bound.data_ptr(), buffer.data_ptr()), (_end(bound), _end(buffer))
        if buffer.device == bound.device and max(starts) < min(ends):
            what = f"the bound tensor shares memory with slot `{other.name}`"
            raise fault(slot.name, "bound-overlap", what, hint="no two slots of a registry can share memory")


def row_dimension(slot: GraphSlot, capacity: int) -> int:
    """Which dimension of a registered slot's buffer has its rows.

    Args:
        slot: a slot with rows.
        capacity: the largest size of its axis.
    """
    return _find_rows(slot, buffer_of(slot), capacity).dim


def row_unit(slot: GraphSlot, capacity: int) -> int:
    """What a bucket has to be a multiple of, to have whole rows of a registered slot.

    Args:
        slot: a slot with rows.
        capacity: the largest size of its axis.
    """
    return _find_rows(slot, buffer_of(slot), capacity).unit


def numbered(device: torch.device | str | int) -> torch.device:
    """The device with its number: `cuda` is the current one.

    Raises:
        SlotError: `bad-device`: no device, or none that this machine and this torch have.
    """
    try:
        return torch.empty(0, device=torch.device(device)).device
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        message = f"`{worded(device)}` is no device of this machine"
        raise SlotError(message, code="bad-device", given=worded(device)) from error


def span_bytes(tensor: torch.Tensor) -> int:
    """The bytes from a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def _end(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() + span_bytes(tensor)


class _Rows(NamedTuple):
    """`base + step * (size // unit)` rows along dimension `dim`."""

    dim: int
    base: int
    step: int
    unit: int


def _asked(slot: GraphSlot, max_bs: int, max_num_tokens: int) -> tuple[int, ...]:
    shape: Any = slot.shape_fn(max_bs, max_num_tokens)
    refusal = fault(slot.name, "bad-shape", f"`shape_fn` gave `{shown(shape)}`", hint="return a tuple of sizes")
    if not isinstance(shape, Sequence):
        raise refusal
    try:
        sizes = tuple(as_size("shape", size) for size in shape)
    except SlotError as error:
        raise refusal from error
    if any(size < 0 for size in sizes):
        raise refusal
    return sizes


def _find_rows(slot: GraphSlot, buffer: torch.Tensor, capacity: int) -> _Rows:
    """The rows that `slice_fn` cuts, where there is one; else the first `size` along dimension 0.

    Args:
        slot: a slot with rows.
        buffer: any tensor of the slot's shape and strides; it is cut, never read.
        capacity: the largest size.

    Raises:
        SlotError: `slice-no-prefix`: what is cut is no prefix along one dimension, or not regular.
    """
    slice_fn = slot.slice_fn
    if slice_fn is None:
        return _Rows(dim=0, base=0, step=1, unit=1)

    def shape(size: int) -> torch.Size:
        cut = slice_fn(buffer, size)
        if not _starts_like(cut, buffer):
            raise _no_prefix(slot, f"`slice_fn` gave something else than the buffer's first rows at size {size}")
        return cut.shape

    cut = {
        dim
        for size in (0, 1, capacity)
        for dim, (given, whole) in enumerate(zip(shape(size), buffer.shape, strict=True))
        if given != whole
    }
    if len(cut) != 1:
        raise _no_prefix(slot, f"`slice_fn` cuts dimensions {sorted(cut)}" if cut else "`slice_fn` cuts nothing")
    dim = cut.pop()

    def rows(size: int) -> int:
        return shape(size)[dim]

    base = rows(0)
    if rows(capacity) <= base:
        raise _no_prefix(slot, f"`slice_fn` gives {rows(capacity)} rows at size {capacity} and {base} at size 0")
    # The smallest size with more rows than size 0 has. Where the rows are not regular, the check below tells.
    fewer, unit = 0, capacity
    while unit - fewer > 1:
        middle = (fewer + unit) // 2
        fewer, unit = (fewer, middle) if rows(middle) > base else (middle, unit)
    step = rows(unit) - base
    telling = {1, 2, 3, unit - 1, unit, unit + 1, 2 * unit - 1, 2 * unit, capacity // 2, capacity - 1, capacity}
    for size in sorted(size for size in telling if 0 < size <= capacity):
        expected = base + step * (size // unit)
        if rows(size) != expected:
            what = f"`slice_fn` gives {rows(size)} rows at size {size}, where sizes 0 and {unit} promise {expected}"
            raise _no_prefix(slot, what)
    return _Rows(dim, base, step, unit)


def _starts_like(cut: Any, buffer: torch.Tensor) -> bool:
    return (
        unmovable(cut) is None
        and cut.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        and cut.storage_offset() == buffer.storage_offset()
        and cut.dtype == buffer.dtype
        and cut.stride() == buffer.stride()
    )


def _no_prefix(slot: GraphSlot, what: str) -> SlotError:
    hint = "cut a prefix along one dimension, as `lambda buffer, size: buffer[:, :size]`"
    return fault(slot.name, "slice-no-prefix", what, hint=hint)
