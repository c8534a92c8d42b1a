"""A device that has streams for three graphs: the fourth capture fails as it does on a device that has none left."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import devicegraph as dg
from lengths import LengthsEngine, decode

if os.environ.get("SIMULATED_CANN_GRAPHS") != "3":
    pytest.skip("needs a device with streams for three graphs", allow_module_level=True)

npu: Any = getattr(torch, "npu", None)


def test_the_buckets_that_have_no_streams_are_dropped_and_the_others_serve() -> None:
    engine = LengthsEngine()
    with dg.DecodeCudaGraphRunner(engine, config=decode(max_bs=8)) as runner:
        report = runner.capture()
        assert [bucket.key.size for bucket in report.captured] == [8, 4, 2]
        (dropped,) = report.dropped
        assert dropped.key.size == 1
        assert "the device has no stream left for another graph: " in dropped.reason
        for lengths in ([5], [3, 4], [1] * 7):
            batch = engine.batch(lengths)
            assert torch.equal(runner.run(batch).cpu(), engine.expected(batch))
    with dg.DecodeCudaGraphRunner(engine, config=decode(bs=[1, 2, 4])) as runner:
        assert len(runner.capture().captured) == 3  # closing the first runner gave the streams back


def test_the_error_says_what_to_do_and_leaves_nothing_behind() -> None:
    engine = LengthsEngine()
    pool = dg.GraphMemoryPool(dg.get_device_adapter("npu"))
    before, handle = npu.current_stream(), pool.handle
    with dg.DecodeCudaGraphRunner(engine, config=decode(max_bs=8), graph_pool=pool, on_error="raise") as runner:
        with pytest.raises(dg.CaptureError) as caught:
            runner.capture()
        assert caught.value.code == "out-of-graph-resources"
        assert caught.value.phase == "decode"
        assert caught.value.hint == (
            "capture fewer buckets (`max_bs`, `bs`), say what a graph takes (the engine's `streams_per_graph`), or end "
            "other processes that capture on this device"
        )
        assert isinstance(caught.value.__cause__, dg.CaptureError)
        assert "207008" in str(caught.value.__cause__.__cause__)
        assert npu.current_stream() == before
        assert handle.use_count() == 1
        assert runner.graphs == {}


def test_a_pool_takes_captures_again_after_one_that_could_not_begin() -> None:
    adapter = dg.get_device_adapter("npu")
    pool, stream = dg.GraphMemoryPool(adapter), adapter.stream()
    graphs: list[Any] = []
    x = torch.zeros(4, device="npu")

    def capture() -> None:
        graph: Any = adapter.graph()
        with adapter.capture(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            x.add_(1)
        graphs.append(graph)

    for _ in range(3):
        capture()
    with pytest.raises(dg.CaptureError):
        capture()
    graphs.pop().reset()
    capture()  # torch_npu still believed that it was recording into the pool
    for graph in graphs:
        graph.replay()
    adapter.synchronize()
    assert x.tolist() == [3] * 4
    for graph in graphs:
        graph.reset()
