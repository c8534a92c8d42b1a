"""Who runs in a step: requests wait for blocks, run until they are done, and may have to step back for older ones."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from devicegraph.demo.batches import DecodeBatch, PrefillBatch
from devicegraph.demo.blocks import BlockManager
from devicegraph.demo.sampling import Sampling
from devicegraph.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from devicegraph.demo.blocks import Cache


@dataclass(eq=False)
class Request:
    """One prompt and what was generated for it.

    Attributes:
        token_ids: the prompt's tokens, and behind them those generated.
        prompt_tokens: how many of them are the prompt's.
        max_new_tokens: generated at most.
        eos_token_ids: what ends it.
        sampling: how its tokens are chosen.
        finish: why it ended: `stop` by one of its last tokens, `length` by their number; None while it is not done.
        preemptions: how often it had to give its blocks to an older one.
        blocks: those that it holds, in order.
        cached: tokens of a prompt whose keys and values are in the cache.
        row: its row of the decode batch, or None.
    """

    token_ids: list[int]
    prompt_tokens: int
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    finish: Literal["stop", "length"] | None = None
    preemptions: int = 0
    blocks: list[int] = field(default_factory=list, repr=False)
    cached: int = 0
    row: int | None = None
    source: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.source = random.Random(self.sampling.seed)

    @property
    def generated(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.prompt_tokens :]

    @property
    def limit(self) -> int:
        """Tokens that it has at most."""
        return self.prompt_tokens + self.max_new_tokens


class Scheduler:
    """Prompts and decoding take turns, so that a long prompt, which goes in chunks, holds nobody up for long.

    Args:
        cache: whose blocks it gives to requests.
        max_requests: that run at once.
        max_length: tokens of a request, generated ones included.
        max_prefill_tokens: tokens of a prefill step; a prompt that does not fit in goes on in a later one.
        proposals: tokens that a step may verify for each request.

    Attributes:
        running: the requests that hold blocks, in order of admission.
        decoding: those of them whose prompts are cached, in the order of the decode batch.
    """

    def __init__(
        self, cache: Cache, *, max_requests: int, max_length: int, max_prefill_tokens: int, proposals: int = 0
    ) -> None:
        self.running: list[Request] = []
        self.decoding: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._cache = cache
        self._manager = BlockManager(cache.blocks)
        self._max_requests = max_requests
        self._max_length = max_length
        self._max_prefill_tokens = max_prefill_tokens
        self._proposals = proposals
        self._has_prefilled = False
        #: What the last step of prompts writes: how many tokens of whom.
        self._written: list[tuple[Request, int]] = []
        #: Blocks that a row of the decode batch has room for; what verification looks at behind a request's end is 0.
        self.table_width = -(-(max_length + proposals) // cache.block_size)
        self._tables = torch.zeros(max_requests, self.table_width, dtype=torch.int32)
        self._ahead = torch.arange(proposals + 1)

    def submit(self, request: Request) -> None:
        """Lets a request wait for its turn.

        Raises:
            ConfigError: `prompt-empty`; `limit-invalid` for no number of new tokens; `prompt-too-long` for one that
                could never run to its end.
        """
        if not request.token_ids:
            raise ConfigError("the prompt has no token", code="prompt-empty")
        new: object = request.max_new_tokens
        if not isinstance(new, int) or new < 1:
            raise ConfigError(f"max_new_tokens: {new!r} is not an integer from 1 on", code="limit-invalid")
        room = min(self._max_length, self._manager.total * self._cache.block_size)
        if request.limit > room:
            raise ConfigError(
                f"a prompt of {request.prompt_tokens} tokens and {request.max_new_tokens} new ones take "
                f"{request.limit}, a request has {room}",
                code="prompt-too-long",
                hint="shorten the prompt, lower `max_new_tokens`, or give the engine more blocks or a larger length",
            )
        self._waiting.append(request)

    @property
    def is_idle(self) -> bool:
        """Whether every request is done."""
        return not self.running and not self._waiting

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._manager.free

    def prefill_batch(self) -> tuple[PrefillBatch, list[Request]] | None:
        """A step of prompts, where there are any and it is their turn. Once it is done, `prefilled` counts it.

        Returns:
            The batch, and the requests whose prompts end in it, for which it decides the next token.
        """
        self._admit()
        prompts = [request for request in self.running if request.row is None]
        if not prompts or (self._has_prefilled and self.decoding):
            self._has_prefilled = False
            return None
        self._has_prefilled = True
        token_ids: list[int] = []
        chunks: list[tuple[int, int]] = []
        decides: list[int] = []
        deciding: list[Request] = []
        self._written.clear()
        for request in prompts:
            length = min(len(request.token_ids) - request.cached, self._max_prefill_tokens - len(token_ids))
            if length == 0:
                break
            token_ids += request.token_ids[request.cached : request.cached + length]
            chunks.append((request.cached, length))
            self._written.append((request, length))
            if request.cached + length == len(request.token_ids):
                decides.append(len(token_ids) - 1)
                deciding.append(request)
        tables = _padded([request.blocks for request in prompts[: len(chunks)]])
        owners = torch.arange(len(chunks)).repeat_interleave(torch.tensor([length for _, length in chunks]))
        positions = torch.cat([torch.arange(start, start + length) for start, length in chunks])
        batch = PrefillBatch(
            torch.tensor(token_ids),
            positions,
            self._cache.locations(tables[owners], positions[:, None])[:, 0],
            tables,
            chunks,
            len(chunks),
            self._cache,
            decides,
        )
        return batch, deciding

    def prefilled(self) -> None:
        """Counts what the step of `prefill_batch` has written; one that failed is made again."""
        for request, length in self._written:
            request.cached += length
        self._written.clear()

    def make_room(self, tokens: int) -> None:
        """Gives each request of `decoding` the blocks for so many more tokens, its last one included.

        Where none are free the youngest request gives its own back: it waits first in line, to go through the model
        again from its start.
        """
        size = self._cache.block_size
        for request in self.running.copy():
            if len(request.token_ids) + tokens - 1 <= len(request.blocks) * size:
                continue
            wanted = self._blocks_for(min(len(request.token_ids) + tokens - 1, request.limit))
            while request.row is not None and len(request.blocks) < wanted:
                if self._manager.free:
                    (block,) = self._manager.take(1)
                    self._tables[request.row, len(request.blocks)] = block
                    request.blocks.append(block)
                else:
                    self._preempt(self.running[-1])

    def decode_batch(self, proposals: Sequence[Sequence[int]] | None = None) -> DecodeBatch:
        """A step of `decoding`, for which there is room.

        Args:
            proposals: what may follow the last token of each request, as many tokens as the scheduler was made for;
                None to decode one token.
        """
        requests = self.decoding
        count = len(requests)
        if proposals is None:
            token_ids = [request.token_ids[-1] for request in requests]
            ahead = self._ahead[:1]
        else:
            token_ids = []
            for request, proposed in zip(requests, proposals, strict=True):
                token_ids += [request.token_ids[-1], *proposed]
            ahead = self._ahead
        lengths = torch.tensor([len(request.token_ids) for request in requests])
        positions = lengths[:, None] - 1 + ahead
        tables = self._tables[:count]
        return DecodeBatch(
            torch.tensor(token_ids),
            positions.flatten(),
            self._cache.locations(tables, positions).flatten(),
            lengths + (len(ahead) - 1),
            tables,
            count,
            self._cache,
        )

    def append(self, request: Request, token_ids: Sequence[int]) -> list[int]:
        """Adds what was decided for a running request, which leaves when it is done; a first token lets it decode.

        Returns:
            The tokens up to the request's end.
        """
        added: list[int] = []
        for token_id in token_ids:
            added.append(token_id)
            request.token_ids.append(token_id)
            if token_id in request.eos_token_ids:
                request.finish = "stop"
            elif len(request.token_ids) == request.limit:
                request.finish = "length"
            if request.finish is not None:
                self._leave(request)
                return added
        if request.row is None:
            request.row = len(self.decoding)
            self.decoding.append(request)
            self._tables[request.row, : len(request.blocks)] = torch.tensor(request.blocks)
        return added

    def _admit(self) -> None:
        while self._waiting and len(self.running) < self._max_requests:
            wanted = self._blocks_for(len(self._waiting[0].token_ids) + 1)
            if wanted > self._manager.free:
                break
            request = self._waiting.popleft()
            request.blocks += self._manager.take(wanted)
            self.running.append(request)

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.cached = 0
        request.preemptions += 1
        self._waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._manager.give_back(request.blocks)
        if request.row is not None:
            # The rows of the batch stay without gaps: the last one takes the place.
            last = self.decoding.pop()
            if last is not request:
                self.decoding[request.row] = last
                self._tables[request.row] = self._tables[len(self.decoding)]
                last.row = request.row
            self._tables[len(self.decoding)] = 0
            request.row = None

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._cache.block_size)


def _padded(rows: Sequence[list[int]]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int32)
