"""The engine of the long runs: small whole numbers, every kind of field, a hook and a break, failures on demand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import devicegraph as dg

WIDTH, VOCABULARY, CACHE_ROWS = 2, 16, 33
MAX_BS, MAX_TOKENS, MAX_REQUESTS = 8, 16, 4
#: What a variant adds to every row; one that no graph is captured for runs eagerly.
VARIANTS = {None: 0, "lora": 100, "unknown": 1000}


@dataclass
class Batch:
    """`bias` may be absent, a graph needs `needed`, and a batch with `late` is not for a graph. `tag` is Python's."""

    input_ids: torch.Tensor
    out_cache_loc: torch.Tensor
    read_from: torch.Tensor
    bias: torch.Tensor | None
    needed: torch.Tensor | None
    late: torch.Tensor | None
    tag: int
    variant: str | None
    batch_size: int


class SoakEngine:
    """Writes each token's row into the cache and reads another one; a row depends on no other row of its batch.

    Attributes:
        failure: what the forward raises while it is captured at so many rows, and that number.
        hook_error: what preparing metadata raises.
    """

    variants = (None, "lora")

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.limits = dg.Limits(max_bs=MAX_BS, max_num_tokens=MAX_TOKENS)
        values = [[(7 * row + 3 * column) % 11 - 5 for column in range(WIDTH)] for row in range(VOCABULARY)]
        self.values = values
        self.table = torch.tensor(values, dtype=torch.float32, device=self.device)
        self.cache = torch.zeros(CACHE_ROWS, WIDTH, device=self.device)
        self.offset = torch.zeros(1, device=self.device)
        self.failure: tuple[int, Exception] | None = None
        self.hook_error: Exception | None = None

    def registry(self, *, max_bs: int, share_pool: bool) -> dg.CudaGraphBufferRegistry:
        """The slots of either phase: a row for each token."""
        registry = dg.CudaGraphBufferRegistry(
            device=self.device, max_bs=max_bs, max_num_tokens=MAX_TOKENS, share_pool=share_pool
        )
        zero = dg.PaddingPolicy.ZERO
        for name, options in {
            "input_ids": {"padding_policy": dg.PaddingPolicy.FOREACH_COPY},
            "out_cache_loc": {"padding_policy": zero},
            "read_from": {"padding_policy": zero},
            "bias": {"padding_policy": zero, "source_device": "any"},
            "needed": {"padding_policy": dg.PaddingPolicy.FILL_SENTINEL, "pad_value": 1, "required": True},
            "late": {"padding_policy": zero},
        }.items():
            registry.register_slot(dg.GraphSlot(name, lambda bs, tokens: (tokens,), torch.int64, **options))
        return registry

    def make_batch(self, views: dict[str, torch.Tensor], key: dg.ShapeKey) -> Batch:
        fields = {name: view for name, view in views.items() if name != "late"}
        return Batch(**fields, late=None, tag=0, variant=key.variant_label, batch_size=key.size)

    def sizes(self, batch: Batch) -> tuple[int, int]:
        return batch.batch_size, len(batch.input_ids)

    def variant(self, batch: Batch) -> str | None:
        return batch.variant

    def prepare_metadata(self, batch: Batch, key: dg.ShapeKey | None) -> None:
        if self.hook_error is not None:
            raise self.hook_error
        self.offset.fill_(batch.tag)

    @dg.eager_on_graph
    def shifted(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.offset

    def forward(self, batch: Batch) -> torch.Tensor:
        if self.failure is not None and dg.get_is_capture_mode() and len(batch.input_ids) == self.failure[0]:
            raise self.failure[1]
        hidden = self.table[batch.input_ids] + VARIANTS[batch.variant]
        for field in (batch.bias, batch.needed, batch.late):
            if field is not None:
                hidden = hidden + field.to(hidden.device)[:, None]
        hidden = self.shifted(hidden)
        self.cache.index_copy_(0, batch.out_cache_loc, hidden)
        return hidden * 2 + self.cache[batch.read_from]


@dataclass
class Rows:
    """A batch in plain numbers, of which its tensors are made."""

    input_ids: list[int]
    out_cache_loc: list[int]
    read_from: list[int]
    bias: list[int] | None
    needed: list[int] | None
    late: list[int] | None
    tag: int
    variant: str | None
    batch_size: int

    def batch(self, device: torch.device) -> Batch:
        """The tensors, on the device but for `bias`, which comes from the host."""

        def tensor(values: list[int] | None, device: Any = device) -> Any:
            return None if values is None else torch.tensor(values, dtype=torch.int64, device=device)

        return Batch(
            input_ids=tensor(self.input_ids),
            out_cache_loc=tensor(self.out_cache_loc),
            read_from=tensor(self.read_from),
            bias=tensor(self.bias, "cpu"),
            needed=tensor(self.needed),
            late=tensor(self.late),
            tag=self.tag,
            variant=self.variant,
            batch_size=self.batch_size,
        )


def expected(engine: SoakEngine, cache: list[list[int]], rows: Rows) -> list[list[int]]:
    """What a step gives, number by number; it writes the cache as the step does."""
    hidden = []
    for i, token in enumerate(rows.input_ids):
        added = VARIANTS[rows.variant] + rows.tag
        added += sum(field[i] for field in (rows.bias, rows.needed, rows.late) if field is not None)
        hidden.append([value + added for value in engine.values[token]])
    for location, row in zip(rows.out_cache_loc, hidden, strict=True):
        cache[location] = row
    return [
        [2 * mine + read for mine, read in zip(row, cache[source], strict=True)]
        for row, source in zip(hidden, rows.read_from, strict=True)
    ]
