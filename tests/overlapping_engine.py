"""The toy engine with the halves of its batch interleaved, as two-batch overlap runs them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import devicegraph as dg
from engines import ToyEngine


class Overlapping(ToyEngine):
    """Runs the halves of a batch interleaved, with the lengths that were prepared for each."""

    def __init__(self, device: str = "cpu", tokens: int = 1, **options: Any) -> None:
        super().__init__(device, max_bs=8, tokens_per_request=tokens)
        self.tables: dict[Any, torch.Tensor] = {}
        self.prepared: list[Any] = []
        self.halves_run = 0
        self.registry = dg.build_decode_registry(
            device=device, max_bs=8, max_num_token=8 * tokens, seq_len_fill_value=1, num_tokens_per_bs=tokens, **options
        )

    def make_batch(self, views: dict[str, torch.Tensor], key: Any) -> Any:
        return SimpleNamespace(**views, batch_size=key.size)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {"cache": self.cache}

    def prepare_metadata(self, batch: Any, key: Any) -> None:
        if key is None:
            batch.lengths = batch.seq_lens
            return
        self.prepared.append(key)
        table = self.tables.setdefault(key, torch.zeros_like(batch.seq_lens))
        batch.lengths = table.copy_(batch.seq_lens)

    def forward(self, batch: Any) -> torch.Tensor:
        halves = getattr(batch, "tbo_children", None)
        if halves is None:
            return self.attend(batch, self.embed(batch))
        self.halves_run += 1
        hidden = [self.embed(half) for half in halves]
        return torch.cat([self.attend(half, each) for half, each in zip(halves, hidden, strict=True)])

    def embed(self, batch: Any) -> torch.Tensor:
        hidden = self.embedding[batch.input_ids] + self.position[batch.positions]
        self.cache.flatten(0, 1).index_copy_(0, batch.out_cache_loc, hidden)
        return hidden

    def attend(self, batch: Any, hidden: torch.Tensor) -> torch.Tensor:
        requests, lengths = (
            each.repeat_interleave(self.tokens_per_request) for each in (batch.req_pool_indices, batch.lengths)
        )
        keys = self.cache[requests]
        visible = (self.steps <= batch.positions[:, None]) & (self.steps < lengths[:, None])
        scores = (keys @ hidden[:, :, None])[:, :, 0].masked_fill(~visible, 0)
        return (scores[:, None, :] @ keys)[:, 0] @ self.head


def eager(engine: Any, batch: Any) -> torch.Tensor:
    """What the whole batch gives, on a copy of the cache."""
    kept = engine.cache.clone()
    output: torch.Tensor = Overlapping.forward(engine, batch)
    engine.cache.copy_(kept)
    return output
