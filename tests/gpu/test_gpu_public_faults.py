"""Faults that only a GPU shows: addresses that others take, seeds, devices that are not current, queued work."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import devicegraph as dg
from engines import ToyEngine, config, eager
from test_public_faults import check_refuses_a_generator_of_its_own, check_seeds


def captured(engine: Any, **options: Any) -> dg.DecodeCudaGraphRunner:
    options.setdefault("graph_pool", dg.GraphMemoryPool(dg.get_device_adapter(engine.device)))
    runner = dg.DecodeCudaGraphRunner(engine, config=config(bs=[4]), **options)
    runner.capture()
    return runner


def test_what_a_graph_was_captured_with_outlives_an_eager_step_that_has_its_own(reserved: None) -> None:
    class Workspace(ToyEngine):
        def __init__(self) -> None:
            super().__init__("cuda", max_bs=8)
            self.made: list[weakref.ref[Any]] = []

        def make_batch(self, views: dict[str, torch.Tensor], key: dg.ShapeKey) -> Any:
            batch = super().make_batch(views, key)
            batch.extras["workspace"] = torch.zeros(key.size, 32, device="cuda")
            self.made.append(weakref.ref(batch.extras["workspace"]))
            return batch

        def forward(self, batch: Any) -> Any:
            logits = super().forward(batch)
            workspace = batch.extras.get("workspace")
            if workspace is None:
                workspace = torch.zeros(len(logits), 32, device="cuda")
            return workspace.copy_(logits) + 1

    engine = Workspace()
    with captured(engine) as runner:
        small = engine.batch([3, 5, 2])
        want = eager(ToyEngine("cuda", max_bs=8), small) + 1
        runner.run(engine.batch([3] * 8))
        gc.collect()
        assert engine.made[0]() is not None
        # Whatever takes freed memory now would write what the graph reads, and read what it writes.
        others = [torch.full((4, 32), float("nan"), device="cuda") for _ in range(64)]
        engine.cache.zero_()
        assert torch.equal(runner.run(small), want)
        assert all(bool(other.isnan().all()) for other in others)
    gc.collect()
    assert engine.made[0]() is None


def test_a_seed_gives_its_numbers_again_and_two_replays_never_the_same() -> None:
    check_seeds("cuda")


def test_a_generator_that_no_graph_knows_is_refused() -> None:
    check_refuses_a_generator_of_its_own("cuda")


def test_a_pause_has_waited_for_what_was_queued() -> None:
    engine = ToyEngine("cuda", max_bs=4)
    with captured(engine) as runner:
        batch = engine.batch([3, 5])
        want = eager(engine, batch)
        torch.cuda._sleep(200_000_000)
        output = runner.run(batch)
        done = torch.cuda.Event()
        done.record()
        runner.pause()
        assert done.query()
        runner.resume()
        assert torch.equal(output, want)


def test_copies_of_outputs_are_those_of_their_own_step_without_a_wait() -> None:
    engine = ToyEngine("cuda", max_bs=4)
    batches = [engine.batch([2 + step % 5] * 4, seed=step) for step in range(20)]
    wants = [engine.forward(batch).clone() for batch in batches]
    with captured(engine, clone_outputs=True) as runner:
        engine.cache.zero_()
        torch.cuda._sleep(100_000_000)
        outputs = [runner.run(batch) for batch in batches]
        for output, want in zip(outputs, wants, strict=True):
            assert torch.equal(output, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_runner_on_the_second_device_leaves_the_first_current() -> None:
    first, second = ToyEngine("cuda:0", max_bs=4), ToyEngine("cuda:1", max_bs=4)
    torch.cuda.set_device(0)
    before = torch.cuda.memory_reserved(0)
    with captured(second) as runner:
        for lengths in ([3, 5, 2], [4], [2, 2, 2, 2]):
            batch = second.batch(lengths)
            want = eager(second, batch)
            output = runner.run(batch)
            assert output.device == torch.device("cuda:1")
            assert torch.equal(output, want)
            assert torch.cuda.current_device() == 0
        assert torch.cuda.memory_reserved(0) <= before  # a capture empties caches first
        with captured(first) as other:
            step = first.batch([3, 5])
            assert torch.equal(other.run(step), eager(first, step))
            assert torch.equal(runner.run(batch), want)
