"""The usual fields of a serving engine's batches, declared as registries: a field is one slot line.

Values that are read as indices (positions, locations, request rows) are `ZERO`: a padded row points at row 0, which the
engine reserves. Lengths are `FILL_SENTINEL` with the attention backend's own fill value. Token ids keep what an earlier
step left, or are `ZERO`.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from devicegraph._core import as_size
from devicegraph.batches import read_fields
from devicegraph.errors import SlotError
from devicegraph.registry import CudaGraphBufferRegistry, Executor
from devicegraph.slots import GraphSlot, HostValue, PaddingPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["build_decode_registry", "build_eager_registry", "build_prefill_registry"]

INT64 = torch.int64
ZERO, SENTINEL = PaddingPolicy.ZERO, PaddingPolicy.FILL_SENTINEL


def build_decode_registry(
    *,
    device: torch.device | str | int,
    max_bs: SupportsIndex,
    max_num_token: SupportsIndex,
    seq_len_fill_value: int,
    cache_loc_dtype: torch.dtype = torch.int64,
    share_pool: bool = False,
    executor: Executor = "auto",
    source: Any = None,
) -> CudaGraphBufferRegistry:
    """The buffers of decode graphs.

    By token: `input_ids` `[T]` (rows of earlier steps as padding), `positions` `[T]`, `out_cache_loc` `[T]` and
    `mrope_positions` `[3, T]` (zeros). By request: `req_pool_indices` `[B]` (zeros), `seq_lens` `[B]`, and on the host
    `seq_lens_cpu` `[B]` (the fill value). All int64 but for the cache locations.

    Args:
        device: of all buffers but the host's.
        max_bs: B, the most requests of a bucket.
        max_num_token: T, the most tokens of a bucket.
        seq_len_fill_value: the length of a padded request: what the attention backend takes for one that is not there.
        cache_loc_dtype: of `out_cache_loc`: int64, or int32 on an NPU.
        share_pool: take buffers from the input-buffer pool.
        executor: how fills are carried out: see `CudaGraphBufferRegistry`.
        source: an engine's own buffers, an object or a mapping: those that it has are adopted.

    Raises:
        SlotError: a size, or a buffer of `source` that does not fit: see `CudaGraphBufferRegistry.register_slot`.
    """
    slots = _decode_slots(PaddingPolicy.FOREACH_COPY, seq_len_fill_value, cache_loc_dtype)
    return _registry("decode", slots, device, max_bs, max_num_token, share_pool, executor, source)


def build_prefill_registry(
    *,
    device: torch.device | str | int,
    max_bs: SupportsIndex,
    max_num_token: SupportsIndex,
    cache_loc_dtype: torch.dtype = torch.int64,
    is_multimodal: bool = False,
    hidden_size: SupportsIndex | None = None,
    embed_dtype: torch.dtype | None = None,
    share_pool: bool = False,
    executor: Executor = "auto",
    source: Any = None,
) -> CudaGraphBufferRegistry:
    """The buffers of prefill graphs: `input_ids`, `positions`, `out_cache_loc`, each `[T]` and padded with zeros.

    A multimodal model has two more, padded with zeros too: `mrope_positions` `[3, T]`, and `input_embeds`
    `[T, hidden_size]`, whose live rows are the engine's to write (a fill leaves them alone).

    Args:
        device: of all buffers.
        max_bs: the most requests of a step.
        max_num_token: T, the most tokens of a bucket.
        cache_loc_dtype: of `out_cache_loc`; positions and ids are int64.
        is_multimodal: whether rotary positions have planes, and embeddings come from outside of the model.
        hidden_size: columns of `input_embeds`; needed for a multimodal model.
        embed_dtype: of `input_embeds`; needed for a multimodal model.
        share_pool: take buffers from the input-buffer pool.
        executor: how fills are carried out: see `CudaGraphBufferRegistry`.
        source: an engine's own buffers, an object or a mapping: those that it has are adopted.

    Raises:
        SlotError: a size, or a buffer of `source` that does not fit: see `CudaGraphBufferRegistry.register_slot`;
            `option-missing` for a multimodal model without `hidden_size` or `embed_dtype`.
    """
    slots = _prefill_slots(cache_loc_dtype)
    if is_multimodal:
        if hidden_size is None or embed_dtype is None:
            raise SlotError(
                "`is_multimodal` needs `hidden_size` and `embed_dtype`, which give `input_embeds` its shape",
                code="option-missing",
                slot="input_embeds",
            )
        slots = chain(slots, _multimodal_slots(as_size("hidden_size", hidden_size), embed_dtype))
    return _registry("prefill", slots, device, max_bs, max_num_token, share_pool, executor, source)


def build_eager_registry(
    *,
    device: torch.device | str | int,
    max_bs: SupportsIndex,
    max_num_token: SupportsIndex,
    seq_len_fill_value: int = 1,
    cache_loc_dtype: torch.dtype = torch.int64,
    share_pool: bool = False,
    executor: Executor = "auto",
    source: Any = None,
) -> CudaGraphBufferRegistry:
    """Buffers for steps that run without a graph, of either phase: decode's fields, at prefill's sizes.

    An eager step has few padded rows or none; those that it has are all safe to compute on: token ids are padded with
    zeros too.

    Args:
        device: of all buffers but the host's.
        max_bs: B, the most requests of a step.
        max_num_token: T, the most tokens of a step of either phase.
        seq_len_fill_value: the length of a padded request, as for decode.
        cache_loc_dtype: of `out_cache_loc`; the others are int64.
        share_pool: take buffers from the input-buffer pool.
        executor: how fills are carried out: see `CudaGraphBufferRegistry`.
        source: an engine's own buffers, an object or a mapping: those that it has are adopted.

    Raises:
        SlotError: a size, or a buffer of `source` that does not fit: see `CudaGraphBufferRegistry.register_slot`.
    """
    slots = _decode_slots(ZERO, seq_len_fill_value, cache_loc_dtype)
    return _registry("eager", slots, device, max_bs, max_num_token, share_pool, executor, source)


# The fields. What an option adds is a function like these two, and a `yield from` in those that it is for.


def _decode_slots(
    token_padding: PaddingPolicy, seq_len_fill_value: int, cache_loc_dtype: torch.dtype
) -> Iterator[GraphSlot]:
    yield _by_token("input_ids", INT64, token_padding)
    yield _by_token("positions", INT64, ZERO)
    yield _by_token("out_cache_loc", cache_loc_dtype, ZERO)
    yield _planes("mrope_positions")
    yield _by_request("req_pool_indices", INT64, ZERO)
    yield _by_request("seq_lens", INT64, SENTINEL, seq_len_fill_value)
    yield _by_request("seq_lens_cpu", INT64, SENTINEL, seq_len_fill_value, device="cpu")


def _prefill_slots(cache_loc_dtype: torch.dtype) -> Iterator[GraphSlot]:
    yield _by_token("input_ids", INT64, ZERO)
    yield _by_token("positions", INT64, ZERO)
    yield _by_token("out_cache_loc", cache_loc_dtype, ZERO)


def _multimodal_slots(hidden_size: int, embed_dtype: torch.dtype) -> Iterator[GraphSlot]:
    yield _planes("mrope_positions")
    # The engine computes embeddings into the buffer: a fill clears what is behind them and leaves them alone.
    yield GraphSlot(
        "input_embeds",
        lambda _, tokens: (tokens, hidden_size),
        embed_dtype,
        padding_policy=ZERO,
        copy_from_fb=False,
    )


def _planes(name: str) -> GraphSlot:
    return GraphSlot(name, lambda _, tokens: (3, tokens), INT64, slice_fn=_columns, padding_policy=ZERO)


def _by_token(name: str, dtype: torch.dtype, policy: PaddingPolicy) -> GraphSlot:
    return GraphSlot(name, lambda _, tokens: (tokens,), dtype, axis="tokens", padding_policy=policy)


def _by_request(
    name: str, dtype: torch.dtype, policy: PaddingPolicy, pad_value: HostValue = 0, device: str | None = None
) -> GraphSlot:
    return GraphSlot(
        name, lambda bs, _: (bs,), dtype, axis="bs", device=device, padding_policy=policy, pad_value=pad_value
    )


def _columns(buffer: torch.Tensor, size: int) -> torch.Tensor:
    return buffer[:, :size]


def _registry(
    label: str,
    slots: Iterable[GraphSlot],
    device: torch.device | str | int,
    max_bs: SupportsIndex,
    max_num_token: SupportsIndex,
    share_pool: bool,
    executor: Executor,
    source: Any,
) -> CudaGraphBufferRegistry:
    registry = CudaGraphBufferRegistry(
        device=device, max_bs=max_bs, max_num_tokens=max_num_token, share_pool=share_pool, executor=executor
    )
    registry.label = label
    for slot in slots:
        registry.register_slot(slot, bind=None if source is None else read_fields(source, [slot.name])[0])
    return registry
