"""A toy engine that goes wrong where a real one would: a cache with a reserved row, attention over live lengths."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import devicegraph as dg

VOCABULARY, WIDTH, LENGTH = 32, 8, 16


@dataclass
class Batch:
    input_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    out_cache_loc: torch.Tensor
    batch_size: int
    extras: dict[str, Any] = field(default_factory=dict)


class ToyEngine:
    """Embeds, writes the cache, attends (linearly) to the live positions of each request, and gives logits.

    The result of a row depends on its token, its position and what its cache row holds, and on no other row. All values
    are small integers in float32, so that every order of summation, on any device and at any shape, gives the same
    bits.
    """

    def __init__(self, device: str | torch.device = "cpu", max_bs: int = 8, tokens_per_request: int = 1) -> None:
        self.device = torch.device(device)
        self.limits = dg.Limits(max_bs=max_bs, max_num_tokens=max_bs * tokens_per_request)
        self.tokens_per_request = tokens_per_request
        generator = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randint(-2, 3, shape, generator=generator).float().to(self.device)  # noqa: E731
        self.embedding, self.position, self.head = draw(VOCABULARY, WIDTH), draw(LENGTH, WIDTH), draw(WIDTH, VOCABULARY)
        self.cache = torch.zeros(max_bs + 1, LENGTH, WIDTH, device=self.device)
        self.steps = torch.arange(LENGTH, device=self.device)
        self.forwards: list[int] = []

    def make_batch(self, views: dict[str, torch.Tensor], key: dg.ShapeKey) -> Any:
        names = [name for name in Batch.__dataclass_fields__ if name in views]
        return Batch(**{name: views[name] for name in names}, batch_size=key.size)

    def forward(self, batch: Any) -> Any:
        self.forwards.append(batch.batch_size)
        hidden = self.embedding[batch.input_ids] + self.position[batch.positions]
        self.cache.flatten(0, 1).index_copy_(0, batch.out_cache_loc, hidden)
        requests, lengths = batch.req_pool_indices, batch.seq_lens
        if self.tokens_per_request > 1:
            requests, lengths = (t.repeat_interleave(self.tokens_per_request) for t in (requests, lengths))
        keys = self.cache[requests]
        visible = (self.steps <= batch.positions[:, None]) & (self.steps < lengths[:, None])
        scores = (keys @ hidden[:, :, None])[:, :, 0].masked_fill(~visible, 0)
        return (scores[:, None, :] @ keys)[:, 0] @ self.head

    def batch(self, lengths: list[int], seed: int = 0, rows: list[int] | None = None) -> Batch:
        """A live batch: a request for each length, in rows 1, 2, ... of the cache, with random tokens."""
        k = self.tokens_per_request
        generator = torch.Generator().manual_seed(seed)
        rows = list(range(1, len(lengths) + 1)) if rows is None else rows
        positions = [length - k + i for length in lengths for i in range(k)]
        return Batch(
            input_ids=torch.randint(0, VOCABULARY, (len(lengths) * k,), generator=generator).to(self.device),
            positions=torch.tensor(positions, dtype=torch.int64, device=self.device),
            seq_lens=torch.tensor(lengths, dtype=torch.int64, device=self.device),
            req_pool_indices=torch.tensor(rows, dtype=torch.int64, device=self.device),
            out_cache_loc=torch.tensor(
                [row * LENGTH + length - k + i for row, length in zip(rows, lengths, strict=True) for i in range(k)],
                dtype=torch.int64,
                device=self.device,
            ),
            batch_size=len(lengths),
        )


def config(**decode: Any) -> dg.CudaGraphConfig:
    return dg.CudaGraphConfig(decode=decode)


def eager(engine: ToyEngine, batch: Any) -> Any:
    """What the forward gives on the batch as it is, on a copy of the cache."""
    kept = engine.cache.clone()
    output = engine.forward(batch)
    engine.cache.copy_(kept)
    engine.forwards.pop()
    return output
