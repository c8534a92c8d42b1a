"""First come, first served: requests wait for a row of the cache, run until they are done, and give the row back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from devicegraph.demo.engine import Chunk, DecodeBatch, PrefillBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from devicegraph.demo.engine import Cache


@dataclass(eq=False)
class Request:
    """One prompt and what was generated for it.

    Attributes:
        prompt: the text.
        token_ids: the prompt's tokens, and behind them those generated.
        prompt_tokens: how many of them are the prompt's.
        row: its row of the cache while it runs.
        cached: tokens whose keys and values are in the cache, or are written there by the step under way.
    """

    prompt: str
    token_ids: list[int]
    prompt_tokens: int
    row: int = 0
    cached: int = 0

    @property
    def generated(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.prompt_tokens :]

    @property
    def prompt_left(self) -> int:
        """Tokens of the prompt that are still to be prefilled."""
        return max(self.prompt_tokens - self.cached, 0)


class Scheduler:
    """Who runs now: as long as there are prompts and rows for them, they are prefilled; else the requests decode.

    Args:
        requests: all requests, in order of arrival.
        cache: the engine's; requests get its rows from 1 on, since row 0 is the padding's.
        max_prefill_tokens: tokens of a prefill step; a prompt that does not fit in goes on in the next step.
        max_new_tokens: tokens generated for a request at most.
        eos_token_ids: what ends a request.

    Attributes:
        running: the requests that have a row, in the order of the batch.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        cache: Cache,
        max_prefill_tokens: int,
        max_new_tokens: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.running: list[Request] = []
        self._waiting = deque(requests)
        self._cache = cache
        self._free_rows = deque(range(1, cache.rows))
        self._max_prefill_tokens = max_prefill_tokens
        self._max_new_tokens = max_new_tokens
        self._eos_token_ids = eos_token_ids

    def next_batch(self) -> tuple[PrefillBatch | DecodeBatch, list[Request | None]] | None:
        """The next step, or None when every request is done.

        Returns:
            The batch, and for each of its chunks or rows the request that its last token's logits decide for: None
            for a chunk that does not end its prompt.
        """
        while self._waiting and self._free_rows:
            request = self._waiting.popleft()
            request.row = self._free_rows.popleft()
            self.running.append(request)
        if any(request.prompt_left for request in self.running):
            return self._prefill()
        return self._decode() if self.running else None

    def append(self, request: Request, token_id: int) -> None:
        """Adds a token to a running request, which leaves and gives its row back when it is done."""
        request.token_ids.append(token_id)
        full = len(request.generated) >= self._max_new_tokens or len(request.token_ids) >= self._cache.max_length
        if full or token_id in self._eos_token_ids:
            self.running.remove(request)
            self._free_rows.append(request.row)

    def _prefill(self) -> tuple[PrefillBatch, list[Request | None]]:
        chunks: list[Chunk] = []
        deciding: list[Request | None] = []
        token_ids: list[int] = []
        for request in self.running:
            length = min(request.prompt_left, self._max_prefill_tokens - len(token_ids))
            if length:
                token_ids += request.token_ids[request.cached : request.cached + length]
                chunks.append(Chunk(request.row, request.cached, length))
                request.cached += length
                deciding.append(None if request.prompt_left else request)
        input_ids, positions, out_cache_loc = self._to_device(
            token_ids,
            [start + i for _, start, length in chunks for i in range(length)],
            [self._location(row, start + i) for row, start, length in chunks for i in range(length)],
        )
        return PrefillBatch(input_ids, positions, out_cache_loc, tuple(chunks), len(chunks), self._cache), deciding

    def _decode(self) -> tuple[DecodeBatch, list[Request | None]]:
        running = list(self.running)
        input_ids, positions, out_cache_loc, seq_lens, rows = self._to_device(
            [request.token_ids[-1] for request in running],
            [request.cached for request in running],
            [self._location(request.row, request.cached) for request in running],
            [request.cached + 1 for request in running],
            [request.row for request in running],
        )
        for request in running:
            request.cached += 1
        batch = DecodeBatch(input_ids, positions, out_cache_loc, seq_lens, rows, len(running), self._cache)
        return batch, [*running]

    def _location(self, row: int, position: int) -> int:
        return row * self._cache.max_length + position

    def _to_device(self, *columns: list[int]) -> tuple[torch.Tensor, ...]:
        """A tensor of each list, in one transfer."""
        return torch.tensor(columns).to(self._cache.device).unbind()
