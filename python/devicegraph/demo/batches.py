"""What a step is given: batches of decode and of prefill, made on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from devicegraph.demo.attention import ChunkPlan, attend_chunks, attend_uniform

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from devicegraph.demo.blocks import Cache


class _Batch:
    """What batches of both phases do alike."""

    cache: Cache

    def move(self, *names: str) -> None:
        """Moves fields to the cache's device; a graph's are there, since a replay fills its buffers from the host."""
        device = self.cache.device
        for name in names:
            tensor = getattr(self, name)
            if tensor.device != device:
                setattr(self, name, tensor.to(device))


@dataclass
class DecodeBatch(_Batch):
    """One step of `batch_size` requests with k tokens each: 1 to decode, more to verify proposals.

    Attributes:
        input_ids: `[batch_size * k]` int64: the token chosen last, and the proposals that follow it.
        positions: `[batch_size * k]` int64, in their requests.
        out_cache_loc: `[batch_size * k]` int64: where their keys and values go, `block * block_size + offset`.
        seq_lens: `[batch_size]` int64: tokens of each request, those of the step included.
        block_tables: `[batch_size, blocks]` int32: which blocks a request holds, in order; 0 behind them.
        batch_size: requests.
        cache: the engine's.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    batch_size: int
    cache: Cache

    def attend(self, query: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        """Attention of `[batch_size * k, heads, width]`, each over its request's blocks; the same shape."""
        return attend_uniform(query, self.cache, layer, self.block_tables, self.seq_lens, scale)


@dataclass
class PrefillBatch(_Batch):
    """One step of prompts, or chunks of them, one behind the other.

    Attributes:
        input_ids: `[tokens]` int64.
        positions: `[tokens]` int64, in their prompts.
        out_cache_loc: `[tokens]` int64, as in `DecodeBatch`.
        block_tables: `[batch_size, blocks]` int32, as in `DecodeBatch`.
        chunks: where each chunk starts in its prompt, and how long it is; under a graph there may be more tokens, which
            are padding.
        batch_size: chunks.
        cache: the engine's.
        decides: which tokens end a prompt: the next one is decided by what the model makes of them.
        plan: what attention needs beside the tables.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    block_tables: torch.Tensor
    chunks: Sequence[tuple[int, int]]
    batch_size: int
    cache: Cache
    decides: Sequence[int] = ()
    plan: ChunkPlan | None = None

    def prepare(self) -> None:
        """What all layers need of a step, before the first of them."""
        self.plan = ChunkPlan(self.chunks, self.cache.device)
        self.block_tables = self.block_tables.to(self.cache.device)

    def attend(self, query: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        """Attention of `[tokens, heads, width]`, each over what its prompt has up to it; zeros for padding."""
        assert self.plan is not None
        return attend_chunks(query, self.cache, layer, self.block_tables, self.plan, scale)
