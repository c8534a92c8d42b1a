"""A Llama-like decoder on several GPUs, tensor parallel, with all-reduces in its graphs; then data-parallel ranks.

    torchrun --nproc-per-node 2 tests/gpu/tp_ranks.py                  # NCCL
    torchrun --nproc-per-node 2 tests/gpu/tp_ranks.py --device cpu     # gloo, on the tape

Every rank checks for itself, and prints nothing but the first one's summary. A rank that hangs is ended after
`--limit-s` with the stacks of all its threads.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

import devicegraph as dg

LAYERS, HEADS, KV_HEADS, WIDTH, INTERMEDIATE, VOCABULARY, LENGTH, REQUESTS = 2, 8, 4, 8, 96, 128, 32, 4
HIDDEN = HEADS * WIDTH
#: Of the largest logit: what another order of summation may make of one.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
#: Of each request: the prompt, which is fed token by token, and how many tokens there are in the end.
PROMPTS = (([3, 5, 7], 12), ([11], 9), ([2, 4, 6, 8], 7), ([90, 1], 10))
#: By its newer name, where it has one.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def full_weights() -> dict[str, torch.Tensor]:
    """The whole model in float32 on the host, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator) / shape[-1] ** 0.5  # noqa: E731
    weights = {"embedding": draw(VOCABULARY, HIDDEN) * HIDDEN**0.5, "head": draw(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        weights |= {
            f"{layer}.q": draw(HEADS * WIDTH, HIDDEN),
            f"{layer}.k": draw(KV_HEADS * WIDTH, HIDDEN),
            f"{layer}.v": draw(KV_HEADS * WIDTH, HIDDEN),
            f"{layer}.o": draw(HIDDEN, HEADS * WIDTH),
            f"{layer}.gate": draw(INTERMEDIATE, HIDDEN),
            f"{layer}.up": draw(INTERMEDIATE, HIDDEN),
            f"{layer}.down": draw(HIDDEN, INTERMEDIATE),
        }
    return weights


def shard(weights: dict[str, torch.Tensor], part: int, parts: int) -> dict[str, torch.Tensor]:
    """One rank's share: heads and columns of what comes in, rows of what goes back to the whole width."""
    axes = {"embedding": None, "o": 1, "down": 1}
    axis_of = {name: axes.get(name.split(".")[-1], 0) for name in weights}
    return {
        name: weight if axis_of[name] is None else weight.chunk(parts, axis_of[name])[part]
        for name, weight in weights.items()
    }


@dataclass
class Batch:
    input_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    out_cache_loc: torch.Tensor
    batch_size: int


class TensorParallel:
    """A decoder of which each rank has a share of the heads, of the columns and of the vocabulary.

    Args:
        device: this rank's.
        dtype: of weights, cache and logits.
        group: the ranks that share it; None for the whole model on one device.
        breaks: whether attention is a break.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup | None, *, breaks: bool = False
    ) -> None:
        self.device, self.group = device, group
        self.votes_each_step = False  # all ranks have the same batches
        self.limits = dg.Limits(max_bs=REQUESTS, max_num_tokens=REQUESTS)
        self.parts = 1 if group is None else dist.get_world_size(group)
        part = 0 if group is None else dist.get_rank(group)
        self.weights = {
            name: weight.to(device, dtype) for name, weight in shard(full_weights(), part, self.parts).items()
        }
        self.attend_layer = dg.eager_on_graph(self.attend) if breaks else self.attend
        self.keys = torch.zeros(LAYERS, REQUESTS + 1, LENGTH, KV_HEADS // self.parts, WIDTH, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.steps = torch.arange(LENGTH, device=device)
        angles = self.steps[:, None] * 100.0 ** (-torch.arange(0, WIDTH, 2, device=device) / WIDTH)
        self.cos, self.sin = angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]

    def make_batch(self, views: dict[str, torch.Tensor], key: dg.ShapeKey) -> Batch:
        return Batch(**{name: views[name] for name in Batch.__dataclass_fields__ if name in views}, batch_size=key.size)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits `[requests, vocabulary]`, the same bits on all ranks."""
        weights, positions = self.weights, batch.positions
        x = weights["embedding"][batch.input_ids]
        for layer in range(LAYERS):
            normed = F.rms_norm(x, (HIDDEN,))
            q, k, v = (F.linear(normed, weights[f"{layer}.{name}"]).unflatten(-1, (-1, WIDTH)) for name in "qkv")
            q, k = (self.rotate(heads, positions) for heads in (q, k))
            attended = F.linear(self.attend_layer(q, k, v, layer), weights[f"{layer}.o"])
            x = x + self.sum_of_ranks(attended, is_async=True)
            normed = F.rms_norm(x, (HIDDEN,))
            gated = F.silu(F.linear(normed, weights[f"{layer}.gate"])) * F.linear(normed, weights[f"{layer}.up"])
            x = x + self.sum_of_ranks(F.linear(gated, weights[f"{layer}.down"]))
        logits = F.linear(F.rms_norm(x, (HIDDEN,)), weights["head"])
        if self.group is None:
            return logits
        gathered = logits.new_empty(self.parts * len(logits), logits.shape[1])
        all_gather(gathered, logits, group=self.group)
        return gathered.unflatten(0, (self.parts, -1)).transpose(0, 1).flatten(1)

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        a, b = heads.chunk(2, dim=-1)
        cos, sin = self.cos[positions], self.sin[positions]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        """Writes keys and values to the cache, and attends to each request's row of it."""
        batch = dg.current_batch()
        keys, values = self.keys[layer], self.values[layer]
        keys.flatten(0, 1).index_copy_(0, batch.out_cache_loc, k)
        values.flatten(0, 1).index_copy_(0, batch.out_cache_loc, v)
        rows, groups = batch.req_pool_indices, q.unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("rkgw,rtkw->rkgt", groups, keys[rows]) / WIDTH**0.5
        scores = scores.masked_fill((self.steps >= batch.seq_lens[:, None])[:, None, None], float("-inf"))
        return torch.einsum("rkgt,rtkw->rkgw", scores.softmax(-1), values[rows]).flatten(1)

    def sum_of_ranks(self, partial: torch.Tensor, *, is_async: bool = False) -> torch.Tensor:
        """An asynchronous one runs on a stream of the communicator, and is waited for."""
        if self.group is not None:
            work = dist.all_reduce(partial, group=self.group, async_op=is_async)
            if work is not None:
                work.wait()
        return partial

    def batch(self, rows: list[int], tokens: list[int], lengths: list[int]) -> Batch:
        tensor = lambda values: torch.tensor(values, dtype=torch.int64, device=self.device)  # noqa: E731
        locations = [row * LENGTH + length - 1 for row, length in zip(rows, lengths, strict=True)]
        positions = [length - 1 for length in lengths]
        return Batch(tensor(tokens), tensor(positions), tensor(lengths), tensor(rows), tensor(locations), len(rows))


def decode(runner: dg.DecodeCudaGraphRunner, alone: TensorParallel, tolerance: float) -> list[list[int]]:
    """Decodes all prompts greedily through graphs, and holds each step's logits to those of the model on one device."""
    engine = runner.model_runner
    eager = dg.DecodeCudaGraphRunner(alone, config=dg.CudaGraphConfig(decode={"backend": "disabled"}))
    texts = [list(prompt) for prompt, _ in PROMPTS]
    for length in range(1, max(most for _, most in PROMPTS)):
        live = [row for row, (_, most) in enumerate(PROMPTS) if length < most]
        batch = engine.batch([row + 1 for row in live], [texts[row][length - 1] for row in live], [length] * len(live))
        logits, wanted = runner.run(batch).float(), eager.run(batch).float()
        bound = tolerance * wanted.abs().max()
        assert (logits - wanted).abs().max() <= bound, ((logits - wanted).abs().max(), bound)
        tokens, (best, second) = logits.argmax(-1), wanted.topk(2).values.unbind(-1)
        # Where two tokens are nearer to each other than rounding is, either of them is greedy.
        assert ((tokens == wanted.argmax(-1)) | (best - second <= 2 * bound)).all()
        for row, token in zip(live, tokens.tolist(), strict=True):
            if len(texts[row]) == length:
                texts[row].append(token)
    return texts


def tensor_parallel(ranks: dg.RankGroup, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Greedy tokens by backend and dtype, the same on all ranks."""
    answers = {}
    for backend in options.backend:
        for dtype in (torch.float32, torch.bfloat16):
            engine = TensorParallel(device, dtype, dist.group.WORLD, breaks=backend == "breakable")
            barriers = []
            engine.vote, engine.rank = ranks.vote, ranks.rank
            engine.barrier = lambda barriers=barriers: barriers.append(ranks.barrier())
            alone = TensorParallel(device, dtype, None)
            runner = dg.DecodeCudaGraphRunner(
                engine,
                config=dg.CudaGraphConfig(decode={"backend": backend, "bs": [1, 2, 4]}),
                capture_error_mode=options.capture_error_mode,
            )
            ranks.check_plan(runner)
            report = runner.capture()
            assert [bucket.key.size for bucket in report.captured] == [4, 2, 1], report
            # Two warm-ups each; breakable waits behind each segment, too: there is one more than layers.
            assert len(barriers) == 3 * (2 + (LAYERS + 1 if backend == "breakable" else 0))
            texts = decode(runner, alone, TOLERANCES[dtype])
            assert runner.metrics().hit_rate == 1.0
            mine = torch.tensor([token for text in texts for token in text], device=device)
            gathered = [torch.empty_like(mine) for _ in ranks.ranks]
            dist.all_gather(gathered, mine)
            assert all(torch.equal(mine, theirs) for theirs in gathered)
            answers[f"{backend} {str(dtype).removeprefix('torch.')}"] = texts
            runner.close()
    assert len({str(texts) for name, texts in answers.items() if "float32" in name}) == 1
    return answers


class DataParallel:
    """Each rank has requests of its own, and all of them share one sum, as an expert layer would."""

    def __init__(self, device: torch.device, ranks: dg.RankGroup) -> None:
        self.device, self.limits = device, dg.Limits(max_bs=16, max_num_tokens=16)
        self.vote, self.barrier, self.rank = ranks.vote, ranks.barrier, ranks.rank

    def forward(self, batch: Any) -> torch.Tensor:
        rows = torch.stack([batch.input_ids.float(), torch.ones_like(batch.weight)], dim=1) * batch.weight[:, None]
        shared = rows.sum(0)
        dist.all_reduce(shared)
        return rows + shared

    def batch(self, size: int, rank: int) -> dg.StaticBatch:
        ids = torch.arange(size, device=self.device) + 10 * rank
        return dg.StaticBatch(batch_size=size, input_ids=ids, weight=torch.ones(size, device=self.device))


#: Sizes by rank, repeated for more ranks; and what all do.
STEPS = (([5, 0, 0, 2], "graph"), ([0, 0], "idle"), ([0, 3], "graph"), ([9, 1], None), ([1, 1], "graph"))


def data_parallel(ranks: dg.RankGroup, device: torch.device, options: argparse.Namespace) -> list[str]:
    """Steps of unlike sizes: all ranks take the same graph, idle ones too, or all run eagerly."""
    engine = DataParallel(device, ranks)
    registry = dg.build_decode_registry(device=device, max_bs=8, max_num_token=8, seq_len_fill_value=1)
    zero = dg.PaddingPolicy.ZERO
    registry.register_slot(
        dg.GraphSlot("weight", lambda bs, _: (bs,), torch.float32, axis="bs", padding_policy=zero, required=True)
    )
    runner = dg.DecodeCudaGraphRunner(
        engine,
        config=dg.CudaGraphConfig(decode={"bs": [1, 4, 8]}),
        registry=registry,
        capture_error_mode=options.capture_error_mode,
    )
    ranks.check_plan(runner)
    runner.capture()
    codes = []
    for sizes, code in STEPS:
        sizes = [sizes[rank % len(sizes)] for rank in ranks.ranks]
        replays = sum(runner.metrics().replays.values())
        output = runner.run(engine.batch(sizes[ranks.rank], ranks.rank))
        rows = [[float(10 * rank + row), 1.0] for rank, size in enumerate(sizes) for row in range(size)]
        shared = torch.tensor(rows or [[0.0, 0.0]]).sum(0)
        first = sum(sizes[: ranks.rank])
        wanted = [[a + shared[0].item(), b + shared[1].item()] for a, b in rows[first : first + sizes[ranks.rank]]]
        assert output.tolist() == wanted, (sizes, output, wanted)
        assert sum(runner.metrics().replays.values()) == replays + (code == "graph")
        codes.append("graph" if code == "graph" else "eager")
    assert runner.metrics().eager == {"idle": 1, "above-largest" if ranks.rank % 2 == 0 else "voted-eager": 1}
    runner.close()
    return codes


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", nargs="+", choices=("full", "breakable"), default=("full", "breakable"))
    parser.add_argument("--capture-error-mode", choices=("thread_local", "relaxed"), default="thread_local")
    parser.add_argument("--limit-s", type=int, default=240)
    options = parser.parse_args(arguments)
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    if options.device == "cuda":
        # Multicast over NVLink wants rights that a container may lack.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        # A communicator that makes its connections first thing in a capture allocates and synchronises there.
        dist.all_reduce(torch.ones(1, device=device))
        torch.cuda.synchronize()
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    with torch.no_grad():
        ranks = dg.RankGroup(limit_s=60)
        summary = {
            "tensor parallel": tensor_parallel(ranks, device, options),
            "data parallel": data_parallel(ranks, device, options),
        }
    # Graphs that are alive to the end go before the communicator whose calls they hold.
    engine = TensorParallel(device, torch.float32, dist.group.WORLD)
    runner = dg.DecodeCudaGraphRunner(engine, config=dg.CudaGraphConfig(decode={"bs": [1, 4]}))
    runner.capture()
    ranks.barrier()
    ranks.close(runner, communicators=[dist.group.WORLD])
    assert not dist.is_initialized()
    faulthandler.cancel_dump_traceback_later()
    return summary


if __name__ == "__main__":
    found = main()
    if os.environ["RANK"] == "0":
        json.dump(found, sys.stdout)
