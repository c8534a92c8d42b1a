"""Attention over the paged cache: by one Triton kernel on a GPU, in plain torch elsewhere.

Query `j` of a request's last `k` tokens sees the first `seq_len - k + j + 1` tokens of the request. That is all of
decode (`k` is 1), of verification (a few) and of prefill (a chunk of a prompt).
"""

from __future__ import annotations

import importlib.util
import itertools
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812

if TYPE_CHECKING:
    from collections.abc import Sequence

    from devicegraph.demo.blocks import Cache


def attend_uniform(
    query: torch.Tensor, cache: Cache, layer: int, block_tables: torch.Tensor, seq_lens: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of requests that have the same number of tokens in the step, one behind the other.

    Reads each request's own blocks only, launches the same grid whatever the lengths are, and does not synchronise: it
    can be captured.

    Args:
        query: `[requests * k, heads, width]`.
        cache: holds keys and values of all tokens, those of the step included.
        layer: whose.
        block_tables: `[requests, blocks]` int32.
        seq_lens: `[requests]`, tokens of each, those of the step included.
        scale: of the scores.

    Returns:
        The same shape, contiguous.
    """
    if uses_kernel(query.device):
        from devicegraph.demo.kernels import launch

        return launch(query, cache.keys[layer], cache.values[layer], block_tables, seq_lens, scale)
    requests = seq_lens.shape[0]
    per_request = query.shape[0] // requests
    places = torch.arange(block_tables.shape[1] * cache.block_size, device=query.device)
    # Whoever had the blocks before may have left numbers that are none, and no weight of 0 takes these away.
    foreign = (places >= seq_lens[:, None])[..., None, None]
    keys, values = (
        held[layer][block_tables].flatten(1, 2).masked_fill_(foreign, 0) for held in (cache.keys, cache.values)
    )
    ends = seq_lens[:, None] - per_request + torch.arange(per_request, device=query.device)
    visible = places <= ends[..., None]
    by_request = query.unflatten(0, (requests, per_request))
    return _attend_dense(by_request, keys, values, visible[:, None], scale).flatten(0, 1)


def attend_chunks(
    query: torch.Tensor,
    cache: Cache,
    layer: int,
    block_tables: torch.Tensor,
    plan: ChunkPlan,
    scale: float,
) -> torch.Tensor:
    """Attention of chunks of prompts, which differ in length.

    Args:
        query: `[tokens, heads, width]`; tokens behind the last chunk are padding.
        cache: as in `attend_uniform`.
        layer: whose.
        block_tables: `[chunks, blocks]` int32.
        plan: of the chunks.
        scale: of the scores.

    Returns:
        The same shape, zeros for padding.
    """
    if plan.on_device is not None:
        from devicegraph.demo.kernels import launch

        seq_lens, starts, tiles = plan.on_device
        return launch(
            query, cache.keys[layer], cache.values[layer], block_tables, seq_lens, scale, starts=starts, tiles=tiles
        )
    output = torch.zeros_like(query)
    begin = 0
    for row, (start, length) in enumerate(plan.chunks):
        end = start + length
        held = block_tables[row, : -(-end // cache.block_size)]
        keys, values = (tensors[layer][held].flatten(0, 1)[None, :end] for tensors in (cache.keys, cache.values))
        visible = torch.ones(length, end, dtype=torch.bool, device=query.device).tril(start)
        tokens = slice(begin, begin + length)
        output[tokens] = _attend_dense(query[None, tokens], keys, values, visible, scale)[0]
        begin += length
    return output


class ChunkPlan:
    """Where the queries of a prefill step begin and end, for all its layers.

    Args:
        chunks: where each starts in its prompt, and how long it is.
        device: where attention runs.
    """

    def __init__(self, chunks: Sequence[tuple[int, int]], device: torch.device) -> None:
        self.chunks = chunks
        #: `seq_lens`, `starts` and `tiles` of the kernel; None without it.
        self.on_device: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if uses_kernel(device):
            from devicegraph.demo.kernels import PREFILL_TILE

            ends = [start + length for start, length in chunks]
            starts = [0, *itertools.accumulate(length for _, length in chunks)]
            tiles = [
                number
                for row, (_, length) in enumerate(chunks)
                for first in range(0, length, PREFILL_TILE)
                for number in (row, first)
            ]
            packed = torch.tensor([*ends, *starts, *tiles], dtype=torch.int32).to(device)
            seq_lens, starts_there, tiles_there = packed.split([len(ends), len(starts), len(tiles)])
            self.on_device = seq_lens, starts_there, tiles_there.view(-1, 2)


@cache
def uses_kernel(device: torch.device) -> bool:
    """Whether attention on a device is the Triton kernel's."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def _attend_dense(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """`[batch, tokens, heads, width]` all of them."""
    query, keys, values = (tensor.transpose(1, 2) for tensor in (query, keys, values))
    output = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=scale, enable_gqa=True)
    return output.transpose(1, 2)
