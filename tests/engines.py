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


class ShortOfMemory(ToyEngine):
    """Runs out of memory above so many requests."""

    most = 2

    def forward(self, batch: Any) -> Any:
        if batch.batch_size > self.most:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return super().forward(batch)


class CountsSteps(ToyEngine):
    """Has Python add the number of the step, which a graph does once."""

    step = 0

    def forward(self, batch: Any) -> Any:
        self.step += 1
        return super().forward(batch) + self.step


def config(**decode: Any) -> dg.CudaGraphConfig:
    return dg.CudaGraphConfig(decode=decode)


def eager(engine: ToyEngine, batch: Any) -> Any:
    """What the forward gives on the batch as it is, on a copy of the cache."""
    kept = engine.cache.clone()
    output = engine.forward(batch)
    engine.cache.copy_(kept)
    engine.forwards.pop()
    return output


@dataclass
class PrefillBatch:
    """Chunks of requests, one behind the other: `starts[i]` tokens of request i are in the cache already."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    batch_size: int
    rows: list[int]
    starts: list[int]
    lengths: list[int]
    input_embeds: torch.Tensor | None = None
    mrope_positions: torch.Tensor | None = None


class ToyPrefill(ToyEngine):
    """The toy engine on prompts: attention runs request by request, as a break where breaks are made."""

    def __init__(self, device: str | torch.device = "cpu", max_bs: int = 8, max_num_tokens: int = 64) -> None:
        super().__init__(device, max_bs)
        self.limits = dg.Limits(max_bs=max_bs, max_num_tokens=max_num_tokens)

    def make_batch(self, views: dict[str, torch.Tensor], key: dg.ShapeKey) -> Any:
        names = [name for name in PrefillBatch.__dataclass_fields__ if name in views]
        # One request has all tokens; attention over them is cut off at the length of a cache row.
        return PrefillBatch(
            **{name: views[name] for name in names}, batch_size=1, rows=[0], starts=[0], lengths=[key.size]
        )

    def forward(self, batch: Any) -> torch.Tensor:
        self.forwards.append(len(batch.input_ids))
        hidden = self.embedding[batch.input_ids] + self.position[batch.positions]
        self.cache.flatten(0, 1).index_copy_(0, batch.out_cache_loc, hidden)
        return self.attend(hidden) @ self.head

    @dg.eager_on_graph
    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, outputs, begin = dg.current_batch(), [], 0
        for row, start, length in zip(batch.rows, batch.starts, batch.lengths, strict=True):
            queries = hidden[begin : begin + length]
            keys = self.cache[row, : min(start + length, LENGTH)]
            ends = torch.arange(start, start + length, device=self.device).clamp(max=LENGTH - 1)
            visible = torch.arange(len(keys), device=self.device) <= ends[:, None]
            outputs.append((queries @ keys.t()).masked_fill(~visible, 0) @ keys)
            begin += length
        return torch.cat(outputs)

    def chunks(self, requests: list[tuple[int, int, int]], seed: int = 0) -> PrefillBatch:
        """A live batch from (row, start, length) for each request."""
        generator = torch.Generator().manual_seed(seed)
        positions = [p for _, start, length in requests for p in range(start, start + length)]
        locations = [row * LENGTH + p for row, start, length in requests for p in range(start, start + length)]
        tensor = lambda values: torch.tensor(values, dtype=torch.int64, device=self.device)  # noqa: E731
        rows, starts, lengths = ([request[i] for request in requests] for i in range(3))
        ids = torch.randint(0, VOCABULARY, (len(positions),), generator=generator).to(self.device)
        return PrefillBatch(ids, tensor(positions), tensor(locations), len(requests), rows, starts, lengths)


@torch.library.custom_op("devicegraph_tests::attend", mutates_args=())
def attend_op(hidden: torch.Tensor) -> torch.Tensor:
    """Attention of the compiled toy engine: it takes everything but the queries from the batch of the step."""
    return dg.current_batch().engine.attend_live(hidden)


@attend_op.register_fake
def _(hidden: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(hidden)


@dataclass
class CompiledBatch(PrefillBatch):
    engine: Any = None


class CompiledPrefill(ToyPrefill):
    """The toy prefill engine in a form that torch.compile takes: attention is an operator, twice."""

    batch_type = CompiledBatch

    def make_batch(self, views: dict[str, torch.Tensor], key: dg.ShapeKey) -> Any:
        batch = super().make_batch(views, key)
        return CompiledBatch(**vars(batch), engine=self)

    def chunks(self, requests: list[tuple[int, int, int]], seed: int = 0) -> CompiledBatch:
        return CompiledBatch(**vars(super().chunks(requests, seed)), engine=self)

    def attend_live(self, hidden: torch.Tensor) -> torch.Tensor:
        live = ToyPrefill.attend.__wrapped__(self, hidden)
        out = torch.zeros_like(hidden)
        out[: len(live)] = live
        return out

    def forward(self, batch: Any) -> torch.Tensor:
        hidden = self.embedding[batch.input_ids] + self.position[batch.positions]
        self.cache.flatten(0, 1).index_copy_(0, batch.out_cache_loc, hidden)
        first = torch.relu(attend_op(hidden)).clamp(max=3)
        return (attend_op(first + hidden) + hidden) @ self.head
