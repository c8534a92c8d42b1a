"""The usual registries as tables of their slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from devicegraph import CudaGraphBufferRegistry

SIZES: dict[str, Any] = {"device": "cpu", "max_bs": 4, "max_num_token": 8}
DECODE = {
    "input_ids": ("[8] int64 by tokens", "FOREACH_COPY"),
    "positions": ("[8] int64 by tokens", "ZERO"),
    "out_cache_loc": ("[8] int64 by tokens", "ZERO"),
    "mrope_positions": ("[3, 8] int64 by tokens", "ZERO"),
    "req_pool_indices": ("[4] int64 by bs", "ZERO"),
    "seq_lens": ("[4] int64 by bs", "FILL_SENTINEL 1"),
    "seq_lens_cpu": ("[4] int64 by bs", "FILL_SENTINEL 1"),
}
PREFILL = dict.fromkeys(("input_ids", "positions", "out_cache_loc"), ("[8] int64 by tokens", "ZERO"))


def table(registry: CudaGraphBufferRegistry) -> dict[str, tuple[str, str]]:
    return {
        slot.name: (
            f"{list(slot.buffer.shape)} {str(slot.buffer.dtype).removeprefix('torch.')} by {slot.axis}",
            slot.padding_policy.name + (f" {slot.pad_value}" if slot.padding_policy.name == "FILL_SENTINEL" else ""),
        )
        for slot in registry.slots
    }
