"""The paged attention kernel: one for decode, verification and prefill, with grouped query heads.

A program takes a tile of queries of one request and one head of keys. The query heads that share the head of keys are
rows of the tile, so that a single token already gives the tensor cores more than one row. It walks over the request's
own blocks with a running softmax. Where few programs would be left, several share the walk, and a second kernel puts
together what they found.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

#: Queries of a request in a tile of prefill.
PREFILL_TILE: Final = 16
#: The least rows that a tensor core takes.
_LEAST_ROWS: Final = 16
#: Keys of a round of the walk.
_KEYS: Final = 64
#: Programs that keep a large device busy, and the most that share a walk.
_PROGRAMS: Final = 256
_MOST_SPLITS: Final = 16


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]  # Triton reads annotations
    query,
    output,
    keys,
    values,
    block_tables,
    seq_lens,
    starts,
    tiles,
    partial,
    log_totals,
    scale,
    table_stride,
    token_stride,
    head_stride,
    per_request: tl.constexpr,
    group: tl.constexpr,
    heads: tl.constexpr,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    block_size: tl.constexpr,
    tile_tokens: tl.constexpr,
    padded_rows: tl.constexpr,
    keys_at_once: tl.constexpr,
    splits: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    if per_request > 0:
        tiles_of_request: tl.constexpr = (per_request + tile_tokens - 1) // tile_tokens
        request = tile // tiles_of_request
        first = tile % tiles_of_request * tile_tokens
        begin = request * per_request
        count = per_request
    else:
        request = tl.load(tiles + tile * 2)
        first = tl.load(tiles + tile * 2 + 1)
        begin = tl.load(starts + request)
        count = tl.load(starts + request + 1) - begin
    # Positions of the request's first query, and one past the last key that the tile sees.
    before = tl.load(seq_lens + request).to(tl.int32) - count
    end = before + tl.minimum(first + tile_tokens, count)

    rows = tl.arange(0, padded_rows)
    columns = tl.arange(0, padded_width)
    token = first + rows // group
    is_live = (rows < tile_tokens * group) & (token < count)
    query_head = head * group + rows % group
    within = is_live[:, None] & (columns < width)[None, :]
    place = (begin + token).to(tl.int64) * token_stride + query_head * head_stride
    q = tl.load(query + place[:, None] + columns[None, :], mask=within, other=0.0)

    best = tl.full([padded_rows], float("-inf"), tl.float32)
    total = tl.zeros([padded_rows], tl.float32)
    result = tl.zeros([padded_rows, padded_width], tl.float32)
    # Of the walk, a whole number of rounds; what is left for the last ones may be nothing.
    span = (end + splits * keys_at_once - 1) // (splits * keys_at_once) * keys_at_once
    key_begin = tl.program_id(2) * span
    end = tl.minimum(end, key_begin + span)
    for key_start in range(key_begin, end, keys_at_once):
        position = key_start + tl.arange(0, keys_at_once)
        is_there = position < end
        block = tl.load(block_tables + request * table_stride + position // block_size, mask=is_there, other=0)
        at = (block.to(tl.int64) * block_size + position % block_size) * (heads * width) + head * width
        k = tl.load(
            keys + at[None, :] + columns[:, None], mask=is_there[None, :] & (columns < width)[:, None], other=0.0
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        is_seen = position[None, :] <= (before + token)[:, None]
        scores = tl.where(is_seen & is_there[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen nothing yet has no maximum, and nothing to weigh.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - base[:, None])
        decay = tl.exp(best - base)
        total = total * decay + tl.sum(weights, 1)
        v = tl.load(
            values + at[:, None] + columns[None, :], mask=is_there[:, None] & (columns < width)[None, :], other=0.0
        )
        result = result * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = higher
    result = result / tl.where(total > 0, total, 1.0)[:, None]
    row = (begin + token).to(tl.int64) * (heads * group) + query_head
    if splits == 1:
        tl.store(output + row[:, None] * width + columns[None, :], result.to(output.dtype.element_ty), mask=within)
    else:
        row = row * splits + tl.program_id(2)
        tl.store(partial + row[:, None] * width + columns[None, :], result, mask=within)
        log_total = tl.where(total > 0, best + tl.log(total), float("-inf"))
        tl.store(log_totals + row, log_total, mask=is_live)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    partial,
    log_totals,
    output,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    splits: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, padded_width)
    parts = row * splits + tl.arange(0, splits)
    log_total = tl.load(log_totals + parts)
    weights = tl.exp(log_total - tl.max(log_total, 0))
    found = tl.load(partial + parts[:, None] * width + columns[None, :], mask=(columns < width)[None, :], other=0.0)
    result = tl.sum(found * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(output + row * width + columns, result.to(output.dtype.element_ty), mask=columns < width)


def launch(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    starts: torch.Tensor | None = None,
    tiles: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queues the kernel on the current stream; see `attend_uniform` and `attend_chunks` for what it computes.

    Args:
        query: `[tokens, heads, width]`, the last dimension contiguous.
        keys: `[blocks, block_size, kv_heads, width]`, contiguous.
        values: like `keys`.
        block_tables: `[requests, blocks]` int32, rows contiguous.
        seq_lens: `[requests]` int32 or int64.
        scale: of the scores.
        starts: where each request's queries begin, and where the last ones end, `[requests + 1]` int32; None where all
            requests have the same number.
        tiles: request and first query, counted within the request, of each tile of `PREFILL_TILE` queries, `[tiles, 2]`
            int32; needed with `starts`.

    Returns:
        `[tokens, heads, width]`, contiguous; rows of no request are 0.
    """
    tokens, query_heads, width = query.shape
    heads = keys.shape[2]
    group = query_heads // heads
    padded_width = max(16, triton.next_power_of_2(width))
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    splits = 1
    if starts is None or tiles is None:
        requests = seq_lens.shape[0]
        count = tokens // requests
        tile = max(_LEAST_ROWS // group, 1)
        grid = (requests * -(-count // tile), heads)
        starts = tiles = seq_lens  # not read
        # By sizes that a graph has for good, and not by lengths.
        longest = block_tables.shape[1] * keys.shape[1]
        while grid[0] * heads * splits < _PROGRAMS and splits < min(_MOST_SPLITS, longest / (2 * _KEYS)):
            splits *= 2
    else:
        output.zero_()
        count = 0
        tile = PREFILL_TILE
        grid = (tiles.shape[0], heads)
    partial = log_totals = output  # not written
    if splits > 1:
        partial = torch.empty((tokens, query_heads, splits, width), dtype=torch.float32, device=query.device)
        log_totals = torch.empty((tokens, query_heads, splits), dtype=torch.float32, device=query.device)
    # Triton launches on the current device; on the CPU, where it is interpreted, there is none.
    with torch.cuda.device_of(query):
        _attend[(grid[0], grid[1], splits)](
            query,
            output,
            keys,
            values,
            block_tables,
            seq_lens,
            starts,
            tiles,
            partial,
            log_totals,
            scale,
            block_tables.stride(0),
            query.stride(0),
            query.stride(1),
            per_request=count,
            group=group,
            heads=heads,
            width=width,
            padded_width=padded_width,
            block_size=keys.shape[1],
            tile_tokens=tile,
            padded_rows=max(_LEAST_ROWS, triton.next_power_of_2(tile * group)),
            keys_at_once=_KEYS,
            splits=splits,
        )
        if splits > 1:
            _merge[(tokens * query_heads,)](
                partial, log_totals, output, width=width, padded_width=padded_width, splits=splits
            )
    return output
