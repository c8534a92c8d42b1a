"""Several tokens a request: blocks whose masked tokens are denoised together, and drafts that are verified."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devicegraph as dg
from engines import LENGTH, VOCABULARY, Batch, ToyEngine, config

MASK = VOCABULARY - 1


def batch_of(engine: ToyEngine, requests: dict[int, tuple[int, list[int]]]) -> Batch:
    """A batch of requests by cache row, each with where its tokens begin, and these."""
    positions = [start + i for start, tokens in requests.values() for i in range(len(tokens))]
    rows = [row for row, (_, tokens) in requests.items() for _ in tokens]
    tensor = lambda values: torch.tensor(values, dtype=torch.int64, device=engine.device)  # noqa: E731
    return Batch(
        input_ids=tensor([token for _, tokens in requests.values() for token in tokens]),
        positions=tensor(positions),
        seq_lens=tensor([start + len(tokens) for start, tokens in requests.values()]),
        req_pool_indices=tensor(list(requests)),
        out_cache_loc=tensor([row * LENGTH + p for row, p in zip(rows, positions, strict=True)]),
        batch_size=len(requests),
    )


class Block(ToyEngine):
    """Tokens of a block see all of it, and what comes before."""

    def forward(self, batch: Any) -> torch.Tensor:
        k = self.tokens_per_request
        hidden = self.embedding[batch.input_ids] + self.position[batch.positions]
        self.cache.flatten(0, 1).index_copy_(0, batch.out_cache_loc, hidden)
        keys = self.cache[batch.req_pool_indices.repeat_interleave(k)]
        visible = self.steps < batch.seq_lens.repeat_interleave(k)[:, None]
        scores = (keys @ hidden[:, :, None])[:, :, 0].masked_fill(~visible, 0)
        return (scores[:, None, :] @ keys)[:, 0] @ self.head


class Denoiser:
    """Fills blocks of masks, the most certain tokens of each first, a few in every step; several requests at once."""

    def __init__(self, runner: Any, at_once: int) -> None:
        self.runner, self.at_once = runner, at_once
        self.block: int = runner.model_runner.tokens_per_request
        self.steps: list[tuple[int, list[int]]] = []

    def generate(self, blocks: dict[int, int]) -> dict[int, list[int]]:
        """The tokens of so many blocks for each cache row. Who is done leaves; the others go on."""
        texts: dict[int, list[int]] = {row: [] for row in blocks}
        current = {row: [MASK] * self.block for row in blocks}
        while current:
            starts = {row: (len(texts[row]), tokens) for row, tokens in current.items()}
            logits = self.runner.run(batch_of(self.runner.model_runner, starts))
            self.steps.append((len(current), [tokens.count(MASK) for tokens in current.values()]))
            for row, rows in zip(list(current), logits[:, :MASK].split(self.block), strict=True):
                if MASK not in current[row]:  # the block's last step has written its cache
                    texts[row] += current[row]
                    current[row] = [MASK] * self.block
                    if len(texts[row]) == blocks[row] * self.block:
                        del current[row]
                    continue
                certain, tokens = rows.max(dim=1)
                masked = [i for i, token in enumerate(current[row]) if token == MASK]
                # Requests are at different points of their blocks: one takes a token more in a step.
                for i in sorted(masked, key=lambda i: (-float(certain[i]), i))[: self.at_once + row % 2]:
                    current[row][i] = int(tokens[i])
        return texts


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_blocks_denoised_through_graphs_are_those_that_eager_denoises(backend: str) -> None:
    blocks = {1: 3, 2: 1, 3: 2, 4: 4, 5: 1}
    texts, steps = [], []
    for named in ("disabled", backend):
        engine = Block(max_bs=8, tokens_per_request=4)
        phase = config(backend=named, **({} if named == "disabled" else {"bs": [1, 2, 4, 8]}))
        with dg.DecodeCudaGraphRunner(engine, config=phase, mode="dllm_extend", num_tokens_per_bs=4) as runner:
            runner.capture()
            denoiser = Denoiser(runner, at_once=1)
            texts.append(denoiser.generate(blocks))
            steps.append(denoiser.steps)
            assert runner.mode == "dllm_extend"
            metrics = runner.metrics()
            assert metrics.hit_rate == (0.0 if named == "disabled" else 1.0)
        assert {row: len(text) for row, text in texts[-1].items()} == {row: 4 * n for row, n in blocks.items()}
    assert texts[0] == texts[1]
    assert steps[0] == steps[1]
    # The steps held what this is about: padded buckets, and requests with different numbers of masks left.
    assert {size for size, _ in steps[1]} >= {1, 3, 5}
    assert any(len(set(masks)) > 1 for _, masks in steps[1])


def greedy(engine: ToyEngine, count: int, firsts: dict[int, int]) -> dict[int, list[int]]:
    """One token a step for each cache row, eagerly."""
    texts = {row: [first] for row, first in firsts.items()}
    for _ in range(count):
        logits = engine.forward(batch_of(engine, {row: (len(text) - 1, text[-1:]) for row, text in texts.items()}))
        for text, token in zip(texts.values(), logits.argmax(1).tolist(), strict=True):
            text.append(token)
    return texts


@pytest.mark.parametrize("k", [2, 3])
def test_verified_drafts_give_the_tokens_of_plain_greedy_decoding(k: int) -> None:
    """Drafts are right for a while and wrong then, differently for each request, and what was wrong is overwritten."""
    count, firsts = LENGTH - k - 1, {1: 5, 2: 9, 3: 20}
    want = greedy(ToyEngine(max_bs=4), count + k, firsts)
    engine = ToyEngine(max_bs=4, tokens_per_request=k)
    with dg.DecodeCudaGraphRunner(
        engine, config=config(bs=[1, 2, 4]), mode="target_verify", num_tokens_per_bs=k
    ) as runner:
        runner.capture()
        texts = {row: [first] for row, first in firsts.items()}
        accepted: list[int] = []
        while live := {row: text for row, text in texts.items() if len(text) <= count}:
            drafts = {
                row: [(token + (i >= (row + len(text)) % k)) % VOCABULARY for i, token in enumerate(ahead)]
                for row, text in live.items()
                for ahead in [want[row][len(text) : len(text) + k - 1]]
            }
            starts = {row: (len(text) - 1, [text[-1], *drafts[row]]) for row, text in live.items()}
            logits = runner.run(batch_of(engine, starts))
            for (row, text), rows in zip(live.items(), logits.split(k), strict=True):
                tokens = rows.argmax(1).tolist()
                right = next((i for i, draft in enumerate(drafts[row]) if draft != tokens[i]), k - 1)
                text += tokens[: right + 1]
                accepted.append(right)
        assert runner.metrics().hit_rate == 1.0
    assert {row: text[:count] for row, text in texts.items()} == {row: text[:count] for row, text in want.items()}
    assert set(accepted) == set(range(k))
