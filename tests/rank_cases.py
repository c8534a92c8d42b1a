"""What `test_distributed.py` looks at: ranks that vote, differ, fail, come late and die. Prints what each of them saw.

Each function is one rank of a group of processes; the cases follow one another, so that few processes do for all.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce

import devicegraph as dg
import tp_ranks
from engines import ToyEngine, config, eager
from rank_processes import held_by, run_ranks

#: Sizes of the four ranks' batches. Bucket 16 is not there.
STEPS = ([5, 0, 0, 2], [0, 0, 0, 0], [1, 1, 1, 1], [9, 1, 0, 0], [8, 0, 3, 7])
#: How long ranks wait for one that does not come. All that do come have just met at a barrier.
IMPATIENT_S = 2


class Rank(ToyEngine):
    """The toy engine as one of several, which fails as told in the capture of one bucket.

    Args:
        ranks: how it asks the others.
        fails: the bucket, in which run of the forward there (the third one is captured), and by what.
    """

    def __init__(self, ranks: dg.RankGroup, fails: tuple[int, int, Exception] | None = None) -> None:
        super().__init__(max_bs=16)
        self.vote, self.barrier, self.rank = ranks.vote, ranks.barrier, ranks.rank
        self.fails = fails

    def forward(self, batch: Any) -> Any:
        output = super().forward(batch)
        if self.fails is not None and (batch.batch_size, self.forwards.count(batch.batch_size)) == self.fails[:2]:
            raise self.fails[2]
        return output


def runner_of(engine: Rank, bs: list[int], backend: str = "full", **options: Any) -> dg.DecodeCudaGraphRunner:
    return dg.DecodeCudaGraphRunner(engine, config=config(bs=bs, backend=backend), **options)


def failure(do: Any) -> dict[str, Any]:
    """What a call raises, with its causes, and whether that came at once."""
    began = time.monotonic()
    try:
        do()
    except Exception as error:
        chain: list[BaseException] = [error]
        while chain[-1].__cause__ is not None:
            chain.append(chain[-1].__cause__)
        return {
            "codes": [getattr(e, "code", type(e).__name__) for e in chain],
            "text": str(error),
            "ranks": [list(e.ranks) for e in chain if isinstance(e, dg.RankError)],
            "seconds": time.monotonic() - began,
        }
    return {"codes": []}


def step(runner: dg.DecodeCudaGraphRunner, size: int) -> dict[str, Any]:
    """One step of so many requests: how it was decided, and whether it gave what the forward gives."""
    engine = runner.model_runner
    batch = engine.batch([3 + row % 5 for row in range(size)], seed=size)
    decisions: list[dg.Decision] = []
    decide = runner._decide
    runner._decide = lambda *args: decisions.append(decide(*args)) or decisions[-1]  # type: ignore[method-assign]
    try:
        is_right = torch.equal(runner.run(batch), eager(engine, batch))
    finally:
        del runner._decide
    (decision,) = decisions
    return {"code": decision.code, "bucket": decision.key.size if decision.key else None, "is_right": is_right}


def data_parallel() -> dict[str, Any]:
    """Four ranks: all goes well; then one thing after the other does not; the last one is a rank that dies."""
    dist.init_process_group("gloo")
    ranks = dg.RankGroup(limit_s=30)
    me, found = ranks.rank, {}

    # The plan.
    differing = runner_of(Rank(ranks), [1, 4] if me == 2 else [1, 4, 8], order="ascending" if me == 3 else "descending")
    found["plans differ"] = failure(lambda: ranks.check_plan(differing))

    # A bucket that does not fit into the memory of one rank; then steps.
    engine = Rank(ranks, (16, 1, torch.OutOfMemoryError("tried to allocate 2 GiB")) if me == 3 else None)
    runner = runner_of(engine, [1, 4, 8, 16])
    found["plans agree"] = failure(lambda: ranks.check_plan(runner))
    report = runner.capture()
    found["captured"] = [bucket.key.size for bucket in report.captured]
    found["dropped"] = [(drop.key.size, drop.reason) for drop in report.dropped]
    found["steps"] = [step(runner, sizes[me]) for sizes in STEPS]

    found["phases"] = ranks.vote(dg.Proposal(True, 2, phase="prefill" if me == 1 else "decode")).graph

    # A forward that fails on one rank: the others are at a barrier, at the vote, at the barrier behind a segment.
    for name, run, backend in (
        ("fails in a warm-up", 1, "full"),
        ("fails in the capture", 3, "full"),
        ("fails in a segment", 3, "breakable"),
    ):
        engine = Rank(ranks, (4, run, ValueError("broken")) if me == 1 else None)
        with runner_of(engine, [1, 4, 8], backend=backend) as other:
            found[name] = failure(other.capture)
            engine.fails = None
            found[f"{name}, again"] = [bucket.key.size for bucket in other.capture().captured]

    # A rank that leaves because it failed elsewhere.
    def part_early() -> None:
        with dg.RankGroup(limit_s=30) as others:
            if me == 3:
                raise ValueError("elsewhere")
            others.barrier()

    found["leaves"] = failure(part_early)

    # A rank that does not come to its vote while the others wait, goes on without them, and comes then.
    late = dg.RankGroup(limit_s=30)
    engine = Rank(late)
    with runner_of(engine, [1, 4]) as slow:
        slow.capture()
        late.barrier()
        late.limit_s = IMPATIENT_S
        if me == 1:
            ranks.barrier()
        found["late"] = failure(lambda: step(slow, 3))
        found["late, again"] = failure(lambda: step(slow, 3))
        late.leave()
        found["late, then alone"] = step(slow, 3)
        if me != 1:
            ranks.barrier()

    # A rank that dies.
    last = dg.RankGroup(limit_s=30)
    engine = Rank(last)
    dying = runner_of(engine, [1, 4, 8])
    last.barrier()
    last.limit_s = IMPATIENT_S
    if me == 2:
        engine.after_warmup = lambda: os._exit(3)
        dying.hooks.after_warmup = engine.after_warmup
    found["dies"] = failure(dying.capture)
    last.leave()
    found["dies, then alone"] = step(dying, 3)
    found["graphs left"] = len(dying.graphs)
    last.close(dying, runner, communicators=[dist.group.WORLD])
    found["closed"] = [failure(lambda: dying.capture())["codes"], dist.is_initialized()]
    return found


def without_launcher() -> dict[str, Any]:
    """Two ranks, of which the one that holds the store dies."""
    me = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=held_by(0), rank=me, world_size=2)
    ranks = dg.RankGroup(limit_s=30)
    if me == 0:
        ranks.barrier()
        os._exit(3)
    return failure(lambda: (ranks.barrier(), ranks.barrier()))


def functional_collective() -> list[Any]:
    """Two ranks whose forward returns what a functional all-reduce gives, whose data may still be on its way."""
    dist.init_process_group("gloo")
    ranks = dg.RankGroup(limit_s=30)

    class Engine:
        device, limits = torch.device("cpu"), dg.Limits(max_bs=4, max_num_tokens=4)
        vote, barrier, rank = ranks.vote, ranks.barrier, ranks.rank

        def forward(self, batch: Any) -> Any:
            return [all_reduce(batch.input_ids * (1 + ranks.rank), "sum", dist.group.WORLD)]

    runner = dg.DecodeCudaGraphRunner(Engine(), config=config(bs=[4]))
    runner.capture()
    batches = [dg.StaticBatch(batch_size=3, input_ids=torch.arange(3) + first) for first in (0, 5)]
    found = [runner.run(batch)[0].tolist() for batch in batches]
    assert runner.metrics().hit_rate == 1.0
    ranks.close(runner, communicators=[dist.group.WORLD])
    return found


def tensor_parallel() -> dict[str, Any]:
    return tp_ranks.main(["--device", "cpu"])


if __name__ == "__main__":
    # What a capture imports and makes once is there when the ranks are forked.
    with dg.DecodeCudaGraphRunner(ToyEngine(max_bs=2), config=config(bs=[1, 2])) as first:
        first.capture()
    gc.collect()
    gc.freeze()  # a collection would touch, and so copy, all of it in every rank
    groups = ((data_parallel, 4), (without_launcher, 2), (functional_collective, 2), (tensor_parallel, 2))
    json.dump({ranks.__name__: run_ranks(ranks, size) for ranks, size in groups}, sys.stdout)
