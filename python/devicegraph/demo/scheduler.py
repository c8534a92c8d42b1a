"""First come, first served: requests wait for a row of the cache, run until they are done, and give the row back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from devicegraph.demo.engine import DecodeBatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(eq=False)
class Request:
    """One prompt and what was generated for it.

    Attributes:
        prompt: the text.
        token_ids: the prompt's tokens, and behind them those generated.
        prompt_tokens: how many of them are the prompt's.
        row: its row of the cache while it runs.
    """

    prompt: str
    token_ids: list[int]
    prompt_tokens: int
    row: int = 0

    @property
    def generated(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.prompt_tokens :]


class Scheduler:
    """Who runs now.

    Args:
        requests: all requests, in order of arrival.
        max_requests: how many run at once; they get the rows from 1 on, since row 0 is the padding's.
        max_new_tokens: tokens generated for a request at most.
        max_length: tokens of a request at most, prompt included.
        eos_token_ids: what ends a request.

    Attributes:
        running: the requests that have a row, in the order of the batch.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        max_requests: int,
        max_new_tokens: int,
        max_length: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.running: list[Request] = []
        self._waiting = deque(requests)
        self._free_rows = deque(range(1, max_requests + 1))
        self._max_new_tokens = max_new_tokens
        self._max_length = max_length
        self._eos_token_ids = eos_token_ids

    def admit(self) -> Iterator[Request]:
        """Gives a row to each waiting request that there is one for, and yields it, to be prefilled."""
        while self._waiting and self._free_rows:
            request = self._waiting.popleft()
            request.row = self._free_rows.popleft()
            self.running.append(request)
            yield request

    def append(self, request: Request, token_id: int) -> None:
        """Adds a token to a running request, which leaves and gives its row back when it is done."""
        request.token_ids.append(token_id)
        full = len(request.generated) >= self._max_new_tokens or len(request.token_ids) >= self._max_length
        if full or token_id in self._eos_token_ids:
            self.running.remove(request)
            self._free_rows.append(request.row)

    def batch(self, device: torch.device) -> DecodeBatch:
        """The decode step of the running requests."""
        rows = [request.row for request in self.running]
        lengths = [len(request.token_ids) for request in self.running]
        columns = [
            [request.token_ids[-1] for request in self.running],
            [length - 1 for length in lengths],
            lengths,
            rows,
            [row * self._max_length + length - 1 for row, length in zip(rows, lengths, strict=True)],
        ]
        input_ids, positions, seq_lens, req_pool_indices, out_cache_loc = torch.tensor(columns).to(device)
        return DecodeBatch(input_ids, positions, seq_lens, req_pool_indices, out_cache_loc, len(rows))
