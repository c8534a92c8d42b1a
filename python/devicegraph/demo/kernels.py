"""The paged attention kernel: one for decode, verification and prefill, with grouped query heads.

A program takes a tile of queries of one request and one head of keys. The query heads that share the head of keys are
rows of the tile, so that a single token already gives the tensor cores more than one row. It walks over the request's
own blocks with a running softmax.
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
    for key_start in range(0, end, keys_at_once):
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
        # Every row sees the request's first token, so that the maximum is a number from the first round on.
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        decay = tl.exp(best - higher)
        total = total * decay + tl.sum(weights, 1)
        v = tl.load(
            values + at[:, None] + columns[None, :], mask=is_there[:, None] & (columns < width)[None, :], other=0.0
        )
        result = result * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = higher
    result = result / total[:, None]
    place = (begin + token).to(tl.int64) * (heads * group * width) + query_head * width
    tl.store(output + place[:, None] + columns[None, :], result.to(output.dtype.element_ty), mask=within)


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
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if starts is None or tiles is None:
        requests = seq_lens.shape[0]
        count = tokens // requests
        tile = max(_LEAST_ROWS // group, 1)
        grid = (requests * -(-count // tile), heads)
        starts = tiles = seq_lens  # not read
    else:
        output.zero_()
        count = 0
        tile = PREFILL_TILE
        grid = (tiles.shape[0], heads)
    # Triton launches on the current device; on the CPU, where it is interpreted, there is none.
    with torch.cuda.device_of(query):
        _attend[grid](
            query,
            output,
            keys,
            values,
            block_tables,
            seq_lens,
            starts,
            tiles,
            scale,
            block_tables.stride(0),
            query.stride(0),
            query.stride(1),
            per_request=count,
            group=group,
            heads=heads,
            width=width,
            padded_width=max(16, triton.next_power_of_2(width)),
            block_size=keys.shape[1],
            tile_tokens=tile,
            padded_rows=max(_LEAST_ROWS, triton.next_power_of_2(tile * group)),
            keys_at_once=64,
        )
    return output
