"""The usual fields of a serving engine's batches, declared as registries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from devicegraph._core import as_size
from devicegraph.batches import read_fields
from devicegraph.errors import SlotError
from devicegraph.layouts import fields
from devicegraph.layouts.counts import Share
from devicegraph.registry import CudaGraphBufferRegistry, Executor
from devicegraph.slots import GraphSlot, PaddingPolicy, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["build_decode_registry", "build_eager_registry", "build_prefill_registry"]


def build_decode_registry(
    *,
    device: torch.device | str | int,
    max_bs: SupportsIndex,
    max_num_token: SupportsIndex,
    seq_len_fill_value: int,
    cache_loc_dtype: torch.dtype = torch.int64,
    num_tokens_per_bs: SupportsIndex = 1,
    is_encoder_decoder: bool = False,
    encoder_len_fill_value: int = 0,
    enable_mamba_track: bool = False,
    enable_num_token_non_padded: bool = False,
    register_global_num_tokens: bool = False,
    require_gathered_buffer: bool = False,
    require_mlp_tp_gather: bool = False,
    num_dp_ranks: SupportsIndex | None = None,
    attn_tp_size: SupportsIndex = 1,
    attn_tp_rank: SupportsIndex = 0,
    pp_proxy: Mapping[str, Sequence[SupportsIndex]] | None = None,
    pp_proxy_dtype: torch.dtype | None = None,
    share_pool: bool = False,
    executor: Executor = "auto",
    source: Any = None,
) -> CudaGraphBufferRegistry:
    """The buffers of decode graphs.

    By token: `input_ids` `[T]` (rows of earlier steps as padding), `positions` `[T]`, `out_cache_loc` `[T]` and
    `mrope_positions` `[3, T]` (zeros). By request: `req_pool_indices` `[B]` (zeros), `seq_lens` `[B]`, and on the host
    `seq_lens_cpu` `[B]` (the fill value). All int64 but for the cache locations. The options add groups of fields; what
    each holds, is padded with and does without its field is in docs/slots.md.

    Args:
        device: of all buffers but the host's.
        max_bs: B, the most requests of a bucket.
        max_num_token: T, the most tokens of a bucket.
        seq_len_fill_value: the length of a padded request: what the attention backend takes for one that is not there.
        cache_loc_dtype: of `out_cache_loc`: int64, or int32 on an NPU.
        num_tokens_per_bs: tokens for each request: T holds them for B requests.
        is_encoder_decoder: adds `encoder_lens` `[B]` int32.
        encoder_len_fill_value: the encoded length of a padded request.
        enable_mamba_track: adds `mamba_track_indices` `[B]` int64, `mamba_track_mask` `[B]` bool and
            `mamba_track_seqlens` `[B]` int32, all padded with zeros.
        enable_num_token_non_padded: adds `num_token_non_padded` `[1]` int32, see `NonPaddedCount`.
        register_global_num_tokens: adds `global_num_tokens_gpu` and `global_num_tokens_for_logprob_gpu`, int32: the
            tokens of the bucket with a gathered buffer, else the batch's own values.
        require_gathered_buffer: the tokens of a bucket are spread over the attention's tensor-parallel ranks, and
            gathered: every bucket is a multiple of `attn_tp_size` tokens, the non-padded count is that of this rank's
            share, and the global counts are the bucket's.
        require_mlp_tp_gather: the global counts have a number for each of `num_dp_ranks`, else a single one.
        num_dp_ranks: data-parallel ranks; needed for that.
        attn_tp_size: the attention's tensor-parallel ranks.
        attn_tp_rank: which of them this is.
        pp_proxy: adds `pp_proxy_tensors.NAME` `[T // attn_tp_size, *shape]` for each name and shape of a row: what the
            pipeline stage before sends. Without it, those that `source` has as its `pp_proxy_tensors`.
        pp_proxy_dtype: of the proxy tensors that `pp_proxy` names; torch's default dtype by default.
        share_pool: take buffers from the input-buffer pool.
        executor: how fills are carried out: see `CudaGraphBufferRegistry`.
        source: an engine's own buffers, an object or a mapping: those that it has are adopted.

    Raises:
        SlotError: a size, or a buffer of `source` that does not fit: see `CudaGraphBufferRegistry.register_slot`;
            options that do not go together: `option-missing`, `bad-option` or `bucket-not-divisible`, before anything
            is allocated.
    """
    tokens, requests = as_size("max_num_token", max_num_token), as_size("max_bs", max_bs)
    per_request = _positive("num_tokens_per_bs", num_tokens_per_bs)
    if per_request > 1 and requests * per_request > tokens:
        message = f"`max_num_token`: {tokens} tokens are no {per_request} for each of {requests} requests"
        raise SlotError(message, code="bad-option", hint="it is `max_bs * num_tokens_per_bs`", given=str(tokens))
    slots = [
        *fields.decode_fields(PaddingPolicy.FOREACH_COPY, seq_len_fill_value, cache_loc_dtype),
        *_request_groups(is_encoder_decoder, encoder_len_fill_value, enable_mamba_track),
    ]
    counts = _Counts(tokens, require_mlp_tp_gather, num_dp_ranks, attn_tp_size, attn_tp_rank, require_gathered_buffer)
    slots += counts.slots(enable_num_token_non_padded, register_global_num_tokens)
    slots += _proxies(pp_proxy, pp_proxy_dtype, source, counts)
    return _registry("decode", slots, counts, device, max_bs, max_num_token, share_pool, executor, source)


def build_prefill_registry(
    *,
    device: torch.device | str | int,
    max_bs: SupportsIndex,
    max_num_token: SupportsIndex,
    cache_loc_dtype: torch.dtype = torch.int64,
    is_multimodal: bool = False,
    hidden_size: SupportsIndex | None = None,
    embed_dtype: torch.dtype | None = None,
    enable_num_token_non_padded: bool = False,
    register_global_num_tokens: bool = False,
    require_gathered_buffer: bool = False,
    require_mlp_tp_gather: bool = False,
    num_dp_ranks: SupportsIndex | None = None,
    attn_tp_size: SupportsIndex = 1,
    attn_tp_rank: SupportsIndex = 0,
    pp_proxy: Mapping[str, Sequence[SupportsIndex]] | None = None,
    pp_proxy_dtype: torch.dtype | None = None,
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
        enable_num_token_non_padded: as for decode, and so are all up to `pp_proxy_dtype`.
        register_global_num_tokens: see there.
        require_gathered_buffer: see there.
        require_mlp_tp_gather: see there.
        num_dp_ranks: see there.
        attn_tp_size: see there.
        attn_tp_rank: see there.
        pp_proxy: see there.
        pp_proxy_dtype: see there.
        share_pool: take buffers from the input-buffer pool.
        executor: how fills are carried out: see `CudaGraphBufferRegistry`.
        source: an engine's own buffers, an object or a mapping: those that it has are adopted.

    Raises:
        SlotError: a size, or a buffer of `source` that does not fit: see `CudaGraphBufferRegistry.register_slot`;
            options that do not go together, as for decode, and `option-missing` for a multimodal model without
            `hidden_size` or `embed_dtype`.
    """
    slots = list(fields.prefill_fields(cache_loc_dtype))
    if is_multimodal:
        if hidden_size is None or embed_dtype is None:
            raise SlotError(
                "`is_multimodal` needs `hidden_size` and `embed_dtype`, which give `input_embeds` its shape",
                code="option-missing",
                slot="input_embeds",
            )
        slots += fields.multimodal_fields(as_size("hidden_size", hidden_size), embed_dtype)
    tokens = as_size("max_num_token", max_num_token)
    counts = _Counts(tokens, require_mlp_tp_gather, num_dp_ranks, attn_tp_size, attn_tp_rank, require_gathered_buffer)
    slots += counts.slots(enable_num_token_non_padded, register_global_num_tokens)
    slots += _proxies(pp_proxy, pp_proxy_dtype, source, counts)
    return _registry("prefill", slots, counts, device, max_bs, max_num_token, share_pool, executor, source)


def build_eager_registry(
    *,
    device: torch.device | str | int,
    max_bs: SupportsIndex,
    max_num_token: SupportsIndex,
    seq_len_fill_value: int = 1,
    cache_loc_dtype: torch.dtype = torch.int64,
    is_encoder_decoder: bool = False,
    encoder_len_fill_value: int = 0,
    enable_mamba_track: bool = False,
    enable_num_token_non_padded: bool = False,
    register_global_num_tokens: bool = False,
    require_gathered_buffer: bool = False,
    require_mlp_tp_gather: bool = False,
    num_dp_ranks: SupportsIndex | None = None,
    attn_tp_size: SupportsIndex = 1,
    attn_tp_rank: SupportsIndex = 0,
    pp_proxy: Mapping[str, Sequence[SupportsIndex]] | None = None,
    pp_proxy_dtype: torch.dtype | None = None,
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
        is_encoder_decoder: as for decode, and so are all up to `pp_proxy_dtype`.
        encoder_len_fill_value: see there.
        enable_mamba_track: see there.
        enable_num_token_non_padded: see there.
        register_global_num_tokens: see there.
        require_gathered_buffer: see there.
        require_mlp_tp_gather: see there.
        num_dp_ranks: see there.
        attn_tp_size: see there.
        attn_tp_rank: see there.
        pp_proxy: see there.
        pp_proxy_dtype: see there.
        share_pool: take buffers from the input-buffer pool.
        executor: how fills are carried out: see `CudaGraphBufferRegistry`.
        source: an engine's own buffers, an object or a mapping: those that it has are adopted.

    Raises:
        SlotError: a size, or a buffer of `source` that does not fit: see `CudaGraphBufferRegistry.register_slot`;
            options that do not go together, as for decode.
    """
    slots = [
        *fields.decode_fields(PaddingPolicy.ZERO, seq_len_fill_value, cache_loc_dtype),
        *_request_groups(is_encoder_decoder, encoder_len_fill_value, enable_mamba_track),
    ]
    tokens = as_size("max_num_token", max_num_token)
    counts = _Counts(tokens, require_mlp_tp_gather, num_dp_ranks, attn_tp_size, attn_tp_rank, require_gathered_buffer)
    slots += counts.slots(enable_num_token_non_padded, register_global_num_tokens)
    slots += _proxies(pp_proxy, pp_proxy_dtype, source, counts)
    return _registry("eager", slots, counts, device, max_bs, max_num_token, share_pool, executor, source)


def _request_groups(
    is_encoder_decoder: bool, encoder_len_fill_value: int, enable_mamba_track: bool
) -> Iterator[GraphSlot]:
    if is_encoder_decoder:
        yield from fields.encoder_fields(encoder_len_fill_value)
    if enable_mamba_track:
        yield from fields.mamba_fields()


class _Counts:
    """The options about ranks, checked, and the counts that they ask for."""

    def __init__(
        self,
        max_num_token: int,
        require_mlp_tp_gather: bool,
        num_dp_ranks: SupportsIndex | None,
        attn_tp_size: SupportsIndex,
        attn_tp_rank: SupportsIndex,
        is_gathered: bool,
    ) -> None:
        self._max_num_token = max_num_token
        #: Over how many ranks the tokens are spread.
        self.ranks = _positive("attn_tp_size", attn_tp_size)
        self._rank = as_size("attn_tp_rank", attn_tp_rank)
        self._is_gathered = is_gathered
        if not 0 <= self._rank < self.ranks:
            message = f"`attn_tp_rank`: {self._rank} is none of {self.ranks} ranks"
            hint = "number the ranks from 0 to `attn_tp_size - 1`"
            raise SlotError(message, code="bad-option", hint=hint, given=str(self._rank))
        dp_ranks = 1 if num_dp_ranks is None else _positive("num_dp_ranks", num_dp_ranks)
        if require_mlp_tp_gather and num_dp_ranks is None:
            raise SlotError(
                "`require_mlp_tp_gather` needs `num_dp_ranks`, for how many ranks there are counts",
                code="option-missing",
                slot="global_num_tokens_gpu",
            )
        self._global_ranks = dp_ranks if require_mlp_tp_gather else 1
        #: What the tokens of every bucket are a multiple of.
        self.token_alignment = 1
        if is_gathered:
            self.spread()

    def slots(self, enable_num_token_non_padded: bool, register_global_num_tokens: bool) -> Iterator[GraphSlot]:
        """The slots of the counts that are asked for."""
        if enable_num_token_non_padded:
            yield from fields.non_padded_count(Share(self._rank, self.ranks) if self._is_gathered else None)
        if register_global_num_tokens:
            yield from fields.global_counts(self._global_ranks, is_gathered=self._is_gathered)

    def spread(self, slot: str | None = None) -> None:
        """Notes that the tokens of every bucket are shared out evenly among the ranks."""
        if self._max_num_token % self.ranks:
            message = f"`max_num_token`: {self._max_num_token} tokens are no equal shares for {self.ranks} ranks"
            hint = "take a multiple of `attn_tp_size`"
            raise SlotError(message, code="bucket-not-divisible", hint=hint, slot=slot, given=str(self._max_num_token))
        self.token_alignment = self.ranks


def _positive(option: str, value: SupportsIndex) -> int:
    size = as_size(option, value)
    if size < 1:
        raise SlotError(f"`{option}`: {size} is no count", code="bad-option", hint="use 1 or more", given=str(size))
    return size


def _proxies(
    pp_proxy: Mapping[str, Sequence[SupportsIndex]] | None, dtype: torch.dtype | None, source: Any, counts: _Counts
) -> Iterator[GraphSlot]:
    """The slots of the proxy tensors; those of `source` are bound to its buffers."""
    (own,) = [None] if source is None else read_fields(source, ("pp_proxy_tensors",))
    tensors = {} if own is None else fields.proxy_tensors(own)
    if pp_proxy is None:
        rows = fields.proxy_rows(tensors)
    else:
        dtype = torch.get_default_dtype() if dtype is None else dtype
        rows = {name: (_row_shape(name, shape), dtype) for name, shape in pp_proxy.items()}
        if not rows:
            message = "`pp_proxy` names no tensor"
            raise SlotError(message, code="bad-option", hint="leave it out where no stage comes before")
    if rows:
        counts.spread("pp_proxy_tensors")
    return fields.proxy_fields(rows, counts.ranks, tensors)


def _row_shape(name: str, shape: Sequence[SupportsIndex]) -> tuple[int, ...]:
    try:
        return tuple(as_size("pp_proxy", size) for size in shape)
    except (SlotError, TypeError) as error:
        message = f"`pp_proxy`: `{name}`: `{shown(shape)}` is no shape of a row"
        raise SlotError(message, code="bad-option", hint="give a sequence of sizes, as `(4096,)`") from error


def _registry(
    label: str,
    slots: Sequence[GraphSlot],
    counts: _Counts,
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
    registry.token_alignment = counts.token_alignment
    for slot in slots:
        registry.register_slot(slot, bind=None if source is None else read_fields(source, [slot.name])[0])
    return registry
