"""Poison for static input buffers: values that are wrong and valid, and the rows that may hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from devicegraph.batches import read_fields
from devicegraph.errors import SlotError
from devicegraph.registration import row_dimension
from devicegraph.slots import (
    FillContext,
    GraphSlot,
    HostValue,
    PaddingPolicy,
    as_held,
    fault,
    fits,
    layout_of,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from devicegraph.registry import CudaGraphBufferRegistry

__all__ = ["Pair", "Poisons", "SlotRows", "rows_of"]

Pair = tuple[HostValue, HostValue]

#: Padding that a fill writes itself, in every step.
WRITTEN = (PaddingPolicy.ZERO, PaddingPolicy.FILL_SENTINEL)


class SlotRows(NamedTuple):
    """The rows of one slot in one step; views of its buffer.

    Attributes:
        slot: the slot.
        live: the rows that are the batch's, or the whole of a slot without rows; None where the batch has none.
        padding: the rows behind them, up to the bucket; None where there are none.
        refreshed: what the fill of the step has to write.
        is_engines: whether the live rows are the engine's to write, before the fill or in the graph.
    """

    slot: GraphSlot
    live: torch.Tensor | None
    padding: torch.Tensor | None
    refreshed: tuple[torch.Tensor, ...]
    is_engines: bool


def rows_of(registry: CudaGraphBufferRegistry, batch: Any, context: FillContext) -> list[SlotRows]:
    """The rows of every slot in a step; functions of slots are asked as a fill asks them."""
    return [_rows_of(slot, registry, batch, context) for slot in registry.slots]


def _rows_of(slot: GraphSlot, registry: CudaGraphBufferRegistry, batch: Any, context: FillContext) -> SlotRows:
    view = slot.slice_for(context.padded_bs, context.padded_num_tokens)
    is_written = slot.padding_policy in WRITTEN
    has_source = slot.value_fn is not None
    source = None
    if slot.is_plain:
        source = read_fields(batch, [slot.name])[0]
        has_source = source is not None
    elif slot.source_fn is not None:
        source = slot.source_fn(batch, context)
        has_source = source is not None
    is_engines = not slot.copy_from_fb
    if slot.axis == "none":
        return SlotRows(slot, view, None, (view,) if has_source else (), is_engines)
    capacity = registry.max_bs if slot.axis == "bs" else registry.max_num_tokens
    dim = row_dimension(slot, capacity)
    if not has_source and not is_engines:
        # The fill pads all rows, where it pads at all, and the forward takes them for values.
        return SlotRows(slot, None, None, (view,) if is_written and slot.is_plain else (), False)
    rows = layout_of(slot).live_rows(context.raw_bs, context.raw_num_tokens)
    if slot.source_fn is not None and source is not None:
        rows = source.shape[dim]
    live, padding = view.narrow(dim, 0, rows), view.narrow(dim, rows, view.shape[dim] - rows)
    refreshed = ((live,) if has_source else ()) + ((padding,) if is_written else ())
    return SlotRows(slot, live, padding if padding.numel() else None, refreshed, is_engines)


class Poisons:
    """Two values for each slot that none of its rows may depend on, and that everything which reads them can take.

    Numbers with a point are far from what models compute with. Booleans are both. Integers may be indices or lengths:
    they are taken from what the slot was seen with, the least and the greatest, and what its buffer starts as.
    """

    def __init__(self, registry: CudaGraphBufferRegistry, given: Mapping[str, Sequence[HostValue]]) -> None:
        """Nothing seen yet.

        Args:
            registry: its slots.
            given: by slot, two values to use, or none to leave its rows as they are.

        Raises:
            SlotError: `unknown-slot`, or `bad-value` for values that are not two, or do not fit the slot's dtype.
        """
        self._given: dict[str, Pair | None] = {}
        self._seen: dict[str, tuple[HostValue, HostValue]] = {}
        for name, values in given.items():
            slot = registry.get_slot(name)
            pair = tuple(values)
            if len(pair) not in (0, 2) or not all(fits(value, slot.dtype) for value in pair) or len(set(pair)) == 1:
                what = f"`{shown(values)}` are no two values for its padded rows"
                raise fault(name, "bad-value", what, hint="give two that the dtype holds and readers take, or none")
            self._given[name] = (as_held(pair[0], slot.dtype), as_held(pair[1], slot.dtype)) if pair else None

    def see(self, rows: Iterable[SlotRows]) -> None:
        """Takes note of the values that are live in a step. Waits for the device."""
        for each in rows:
            live, name = each.live, each.slot.name
            if live is not None and live.numel() and not live.dtype.is_floating_point and live.dtype != torch.bool:
                # In int64, as devices have no reductions of the rarer integers.
                low, high = (int(value) for value in torch.aminmax(live.reshape(-1).to(torch.int64)))
                before = self._seen.get(name, (low, high))
                self._seen[name] = (min(low, before[0]), max(high, before[1]))

    def pair(self, slot: GraphSlot) -> Pair | None:
        """The two values; None where only one is known to be valid, or they are not wanted."""
        if slot.name in self._given:
            return self._given[slot.name]
        if slot.dtype == torch.bool:
            return False, True
        if slot.dtype.is_floating_point:
            return float_pair(slot.dtype)
        known = {slot.start_value, slot.pad_value, *self._seen.get(slot.name, ())}
        return (min(known), max(known)) if len(known) > 1 else None

    def marks(self, slot: GraphSlot) -> Pair:
        """Two values to tell what a fill wrote from what it left; next to what is valid where that is only one."""
        pair = self.pair(slot)
        if pair is not None:
            return pair
        start = int(slot.start_value)
        return start, start + 1 if fits(start + 1, slot.dtype) else start - 1

    def is_given(self, slot: GraphSlot) -> bool:
        """Whether the caller has named the values, or that there are none."""
        return slot.name in self._given


def float_pair(dtype: torch.dtype) -> Pair:
    """Two numbers that a floating-point dtype holds exactly or nearly, of either sign and not the same size."""
    info = torch.finfo(dtype)
    return max(-960.0, info.min / 4), min(832.0, info.max / 4)


def may_be_target(slot: GraphSlot) -> bool:
    """Whether padded rows may point somewhere by their values, which the fill writes for that very reason."""
    is_integer = not slot.dtype.is_floating_point and slot.dtype != torch.bool
    return is_integer and slot.padding_policy in WRITTEN


def check_state(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """State as names and tensors with rows.

    Raises:
        SlotError: `bad-state`.
    """
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0 or not tensor.shape[0]:
            raise SlotError(
                f"state `{name}`: `{shown(tensor)}` is no tensor with rows",
                code="bad-state",
                hint="give tensors, or views of them, whose first dimension has the rows, the reserved one first",
            )
    return dict(state)
