"""The specification of a fill, one row at a time: what the planner and every executor must equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from devicegraph import GraphSlot, PaddingPolicy

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Declared:
    """A slot, with what its functions do said once more in plain values."""

    slot: GraphSlot
    dim: int
    rows: Callable[[int], int]


def naive_fill(
    declared: Declared, buffer: torch.Tensor, source: torch.Tensor | None, raw: int, padded: int, is_unread: bool
) -> None:
    """Does to `buffer` what a fill must do, `source` being what the batch or the slot's function gave."""
    slot, dim = declared.slot, declared.dim
    is_function = slot.source_fn is not None or slot.value_fn is not None
    if not slot.copy_from_fb:
        head = declared.rows(raw)
    elif source is not None:
        head = source.shape[dim] if source.ndim else 0
    elif is_function and not is_unread:
        return
    else:
        head = 0
    if source is not None and slot.axis == "none":
        _write(slot, buffer, source)
    if slot.axis == "none":
        return
    for row in range(buffer.shape[dim]):
        here = buffer.select(dim, row)
        if row < head:
            if source is not None:
                _write(slot, here, source.select(dim, row))
        elif row < declared.rows(padded):
            if slot.padding_policy is PaddingPolicy.ZERO:
                here.copy_(torch.zeros_like(here))
            elif slot.padding_policy is PaddingPolicy.FILL_SENTINEL:
                here.copy_(torch.full_like(here, slot.pad_value))


def _write(slot: GraphSlot, here: torch.Tensor, live: torch.Tensor) -> None:
    if slot.trailing == "prefix":
        here.copy_(torch.full_like(here, slot.pad_value))
        here = here[..., : live.shape[-1]]
    here.copy_(live.to(here.dtype))
