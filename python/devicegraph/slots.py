"""Slots: the declaration of one static input buffer each, and the rule for its padding."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, SupportsIndex, TypeAlias

import torch

from devicegraph._core import as_size, is_slot_dtype
from devicegraph.errors import SlotError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from devicegraph._core import SlotLayout

__all__ = ["FillContext", "GraphSlot", "PaddingPolicy"]

Axis: TypeAlias = Literal["bs", "tokens", "none"]
HostValue: TypeAlias = bool | int | float


class PaddingPolicy(Enum):
    """What a fill does with the rows `[raw, padded)` of a slot. Rows from `padded` on are never touched.

    Two kinds of consumers read padded rows: one skips a sentinel that it knows, the other reads or writes whatever row
    it is pointed at. A sentinel such as -1 is safe with the first kind only: as a plain index it is the last row. Where
    a padded value is read as an index, use `ZERO` and keep row 0 reserved for it. The sentinel is the slot's own
    `pad_value`; nothing in this package reads it as an index.

    | policy          | buffer starts as | rows `[raw, padded)`        | batch lacks the field |
    | --------------- | ---------------- | --------------------------- | --------------------- |
    | `KEEP_PAD`      | 0                | untouched                   | untouched             |
    | `FILL_SENTINEL` | `pad_value`      | `pad_value`                 | `pad_value`           |
    | `ZERO`          | 0                | 0                           | 0                     |
    | `FOREACH_COPY`  | 0                | rows of earlier fills       | untouched             |
    | `FILL_ONCE`     | `pad_value`      | untouched                   | untouched             |
    """

    KEEP_PAD = "keep_pad"
    FILL_SENTINEL = "fill_sentinel"
    ZERO = "zero"
    FOREACH_COPY = "foreach_copy"
    FILL_ONCE = "fill_once"


class FillContext(NamedTuple):
    """The sizes of one fill, as the functions of a slot get them.

    Attributes:
        raw_bs: live requests.
        padded_bs: requests of the bucket.
        raw_num_tokens: live tokens.
        padded_num_tokens: tokens of the bucket.
        pp_proxy_tensors: what the previous pipeline stage sent, as it was given to `fill_from`.
    """

    raw_bs: int
    padded_bs: int
    raw_num_tokens: int
    padded_num_tokens: int
    pp_proxy_tensors: Any = None

    @property
    def forward_batch(self) -> Any:
        """The batch that is filled in, for a `value_fn` that needs it; an empty mapping outside of a fill."""
        return {}


class StepContext(FillContext):
    """The context of a fill, which knows its batch; as a tuple it is no other than `FillContext`."""

    _batch: Any

    @property
    def forward_batch(self) -> Any:
        return self._batch

    def _replace(self, **sizes: Any) -> StepContext:
        # The inherited one makes a context without a batch.
        return context_of(self._batch, super()._replace(**sizes))

    __replace__ = _replace


def context_of(batch: Any, fields: Iterable[Any]) -> StepContext:
    """The context of a fill.

    Args:
        batch: what `fill_from` was given.
        fields: in the order of the context.
    """
    context = StepContext._make(fields)
    context._batch = batch
    return context


@dataclass(frozen=True, eq=False, repr=False)
class GraphSlot:
    """The declaration of one static input buffer.

    A slot is checked when it is made, gets its memory when a registry registers it, and does not change after that. The
    live rows of a plain slot are the batch's field of the slot's name; `source_fn`, `value_fn` and `copy_from_fb=False`
    name another origin, and at most one of them.

    Attributes:
        name: the batch's field. With `source_fn`, `value_fn` or `copy_from_fb=False` it may be dotted; a dotted slot is
            no field of a batch and shows in no view.
        shape_fn: `(max_bs, max_num_tokens)` to the whole buffer's shape: a sequence of integers.
        dtype: of the buffer. Complex and quantized types are not supported.
        axis: what the rows follow: requests (`"bs"`), `"tokens"`, or `"none"`: the buffer is live as a whole.
        device: of the buffer; None for the registry's. A slot that names `"cpu"` is a declared host slot (`is_host`).
        padding_policy: see `PaddingPolicy`. `axis="none"` allows only `KEEP_PAD`.
        pad_value: what `FILL_SENTINEL` and `FILL_ONCE` pad with, and `trailing="prefix"` under any policy. Kept as the
            plain number that the dtype has: a float where it is one of floats.
        post_fill: `(buffer, forward_batch, context)`, called with the whole buffer after everything is copied.
        slice_fn: `(buffer, size)` to the buffer's rows at that size, where they are not its first `size` rows: a prefix
            along one dimension, whose length is `base + step * (size // unit)` for some whole numbers. Registration
            finds them; a bucket must be a multiple of `unit`. `lambda buffer, size: buffer[:, :size]` cuts
            `[3, tokens]`.
        source_fn: `(forward_batch, context)` to a tensor of n rows, n at most the bucket's, which are copied into
            `[0, n)` while `[n, padded)` is padded; or to None, which leaves the slot as it is.
        copy_from_fb: False where the model or a hook writes the live rows: a fill then writes the padding only.
        enabled: a slot that is not enabled is left out by registration: no memory, no look-up.
        buffer: the memory. Given here, it is adopted as with `register_slot(slot, bind=buffer)`.
        required: a step whose batch lacks the field is refused (`field-missing`), unless it is idle.
        source_device: where the source may be: None for the slot's own device, `"cpu"`, or `"any"`. A source on another
            device is copied by a call of its own, which waits for the device where the copy is from or to the host.
        allow_narrowing: cast sources whose dtype holds values that the slot's does not. int64 into int32 then wraps.
        trailing: `"exact"`, or `"prefix"`: a source may be shorter along the last dimension, and the rest of each live
            row gets `pad_value`.
        value_fn: `context` to a small host value that the fill writes itself: a number for all live rows, or a sequence
            of numbers, at least one for each live row and at most one for each row of the bucket. The slot has at most
            one dimension. No launch of its own once a value was seen. Called in an idle step too. What is known on the
            device only may be given as a tensor of the slot's dtype, which is copied as what `source_fn` gives is.
    """

    name: str
    shape_fn: Callable[[int, int], Sequence[SupportsIndex]]
    dtype: torch.dtype
    axis: Axis = "tokens"
    device: torch.device | str | int | None = None
    padding_policy: PaddingPolicy = PaddingPolicy.KEEP_PAD
    pad_value: HostValue = 0
    post_fill: Callable[[torch.Tensor, Any, FillContext], object] | None = None
    slice_fn: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    source_fn: Callable[[Any, FillContext], torch.Tensor | None] | None = None
    copy_from_fb: bool = True
    enabled: bool = True
    buffer: torch.Tensor | None = None
    _: KW_ONLY
    required: bool = False
    source_device: Literal["cpu", "any"] | None = None
    allow_narrowing: bool = False
    trailing: Literal["exact", "prefix"] = "exact"
    value_fn: Callable[[FillContext], HostValue | Sequence[HostValue] | torch.Tensor] | None = None
    _layout: SlotLayout | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for option in ("copy_from_fb", "enabled", "required", "allow_narrowing"):
            value = getattr(self, option)
            if not isinstance(value, bool):
                what = f"`{option}`: `{shown(value)}` is no flag"
                raise fault(self.name, "bad-option", what, hint="use True or False")
        origins = [self.source_fn is not None, self.value_fn is not None, not self.copy_from_fb]
        name, dtype, policy = unchecked(self.name), unchecked(self.dtype), unchecked(self.padding_policy)
        parts = name.split(".") if isinstance(name, str) else [""]
        if not all(part.isidentifier() for part in parts):
            raise fault(self.name, "bad-name", "the name is no identifier", hint="name a field, as `input_ids`")
        if name == "batch_size":
            raise fault(self.name, "bad-name", "the name is the batch's own size", hint="name a field, as `input_ids`")
        if not _is_word(self.axis, "bs", "tokens", "none"):
            raise fault(self.name, "bad-axis", f"`{worded(self.axis)}` is no axis", hint="use `bs`, `tokens` or `none`")
        if not isinstance(dtype, torch.dtype):
            raise fault(self.name, "bad-dtype", f"`{worded(dtype)}` is no dtype", hint="use a torch dtype")
        if not is_slot_dtype(name_of(dtype)):
            raise fault(self.name, "unsupported-dtype", f"`{name_of(dtype)}` is no slot dtype")
        if not isinstance(policy, PaddingPolicy):
            allowed = ", ".join(f"`{known.name}`" for known in PaddingPolicy)
            raise fault(self.name, "bad-policy", f"`{worded(policy)}` is no padding policy", hint=f"use {allowed}")
        if self.axis == "none" and self.padding_policy is not PaddingPolicy.KEEP_PAD:
            what = f"a slot without rows has nothing to pad by `{self.padding_policy.name}`"
            raise fault(self.name, "bad-policy", what, hint='use `KEEP_PAD` with `axis="none"`')
        if self.axis == "none" and self.slice_fn is not None:
            raise fault(self.name, "bad-option", "a slot without rows has nothing to slice", hint="drop `slice_fn`")
        if not fits(self.pad_value, self.dtype):
            raise fault(self.name, "bad-pad-value", f"`{shown(self.pad_value)}` is no `{name_of(self.dtype)}`")
        object.__setattr__(self, "pad_value", as_held(self.pad_value, self.dtype))
        if self.device is not None and not _is_device(self.device):
            what = f"`{worded(self.device)}` is no device"
            raise fault(self.name, "bad-device", what, hint="write it as `cuda:0` or `cpu`")
        for option in ("shape_fn", "post_fill", "slice_fn", "source_fn", "value_fn"):
            value = getattr(self, option)
            if not callable(value) and (value is not None or option == "shape_fn"):
                raise fault(self.name, "bad-option", f"`{option}` is not callable")
        if sum(origins) > 1:
            what = "`source_fn`, `value_fn` and `copy_from_fb=False` are three origins of the live rows"
            raise fault(self.name, "bad-option", what, hint="give at most one")
        if self.required and any(origins):
            raise fault(self.name, "bad-option", "`required` is for a field of the batch", hint="drop `required`")
        if len(parts) > 1 and not any(origins):
            what = "a dotted name is no field of a batch"
            raise fault(self.name, "bad-name", what, hint="say where the rows come from, with `source_fn`")
        if self.source_device is not None and not _is_word(self.source_device, "cpu", "any"):
            what = f"`{worded(self.source_device)}` is no place for a source"
            raise fault(self.name, "bad-option", what, hint="use None, `cpu` or `any`")
        if not _is_word(self.trailing, "exact", "prefix"):
            what = f"`{worded(self.trailing)}` is no rule for the last dimension"
            raise fault(self.name, "bad-option", what, hint="use `exact` or `prefix`")

    def __repr__(self) -> str:
        made = "not registered" if self.buffer is None else f"{list(self.buffer.shape)} on {self.buffer.device}"
        policy = self.padding_policy.name
        return f"<GraphSlot {self.name}: {made}, {name_of(self.dtype)}, axis={self.axis}, {policy}>"

    @property
    def is_plain(self) -> bool:
        """Whether the live rows are the batch's field of this name."""
        return self.copy_from_fb and self.source_fn is None and self.value_fn is None

    @property
    def is_host(self) -> bool:
        """Whether the slot itself names the CPU as its device, rather than being on a registry that is there."""
        return self.device is not None and torch.device(self.device).type == "cpu"

    @property
    def start_value(self) -> HostValue:
        """What every element of a new buffer holds."""
        starts_padded = self.padding_policy in (PaddingPolicy.FILL_SENTINEL, PaddingPolicy.FILL_ONCE)
        return self.pad_value if starts_padded else 0

    def slice_for(self, padded_bs: SupportsIndex, padded_num_tokens: SupportsIndex) -> torch.Tensor:
        """The buffer's rows at a bucket, as a view: the same address for every bucket.

        Raises:
            SlotError: `not-registered`, or a bucket that the slot has no rows for (`above-capacity`,
                `bucket-not-divisible`, `negative-size`, `not-a-size`).
        """
        buffer = buffer_of(self)
        padded_bs, padded_num_tokens = as_size("padded_bs", padded_bs), as_size("padded_num_tokens", padded_num_tokens)
        layout_of(self).padded_rows(padded_bs, padded_num_tokens)
        if self.axis == "none":
            return buffer
        size = padded_bs if self.axis == "bs" else padded_num_tokens
        return buffer[:size] if self.slice_fn is None else self.slice_fn(buffer, size)


def unchecked(value: object) -> object:
    """A value as callers really give it, whatever its annotation promises."""
    return value


def _is_word(value: object, *words: str) -> bool:
    # Not every object can be compared with text: an array is, element by element.
    return isinstance(value, str) and value in words


def _is_device(value: torch.device | str | int) -> bool:
    try:
        torch.device(value)
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def shown(value: object) -> str:
    """A value as Python writes it, cut where it would drown the sentence that it is in."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # not everything can be printed: an integer may have too many digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else f"{text[:60]}..."


def worded(value: object) -> str:
    """What stands where a word should: text as it is, all else as `shown` has it."""
    return value if isinstance(value, str) else shown(value)


def fault(
    slot: object,
    code: str,
    what: str,
    *,
    hint: str | None = None,
    expected: object = None,
    given: object = None,
) -> SlotError:
    """The error of one slot: `what` follows its name."""
    sides = {key: None if side is None else str(side) for key, side in {"expected": expected, "given": given}.items()}
    return SlotError(f"slot `{slot}`: {what}", code=code, hint=hint, slot=str(slot), **sides)


def buffer_of(slot: GraphSlot) -> torch.Tensor:
    """The buffer of a registered slot."""
    if slot.buffer is None:
        raise fault(slot.name, "not-registered", "has no buffer yet", hint="register it first")
    return slot.buffer


def layout_of(slot: GraphSlot) -> SlotLayout:
    """What the planner knows of a registered slot."""
    if slot._layout is None:
        raise fault(slot.name, "not-registered", "has no buffer yet", hint="register it first")
    return slot._layout


def name_of(dtype: torch.dtype) -> str:
    """The dtype's name without the module, as messages have it."""
    return str(dtype).removeprefix("torch.")


def kind_of(value: object) -> str | None:
    """What a value is where it is no dense tensor; None where it is one."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if value.layout is not torch.strided:
        return f"{value.layout} tensor"
    return "nested tensor" if value.is_nested else None


def unmovable(value: object) -> str | None:
    """What a value is where its bytes are not its elements; None where they are.

    Fills move bytes, so that nothing else can be a source, and write them, so that nothing else can be a buffer.
    """
    kind = kind_of(value)
    if kind is not None or not isinstance(value, torch.Tensor):
        return kind
    # A subclass that carries out operators itself may hold its elements in any way: fake, spread, masked, scaled.
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return type(value).__name__
    if value.is_neg():
        return "lazily negated view"
    return "lazily conjugated view" if value.is_conj() else None


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether there is memory behind the elements of a dense tensor: not where it was freed, or is only declared."""
    return tensor.numel() == 0 or tensor.data_ptr() != 0


def fits(value: object, dtype: torch.dtype) -> bool:
    """Whether a buffer of that dtype can be filled with a number and hold it, up to rounding."""
    if not isinstance(value, (bool, int, float)):
        return False
    if dtype == torch.bool:
        return value in (0, 1) and not isinstance(value, float)
    if dtype.is_floating_point:
        # An integer may be too large to be made a float, though not to be compared with one.
        return abs(value) <= torch.finfo(dtype).max or (isinstance(value, float) and not math.isfinite(value))
    return not isinstance(value, float) and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


def as_held(value: HostValue, dtype: torch.dtype) -> HostValue:
    """A number that fits, as a plain one of the dtype's kind: torch takes an integer of no more than 64 bits."""
    if dtype == torch.bool:
        return bool(value)
    return float(value) if dtype.is_floating_point else int(value)


def row_major(shape: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return strides
