"""Memory around a capture: outputs that nothing holds, and caches that are given back where a capture needs it."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import devicegraph as dg
from devicegraph.devices.cpu import CpuDevice
from engines import ToyEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from devicegraph.devices.tape_memory import TapeMemory


INPUT = torch.ones(4)


class Watched(CpuDevice):
    """Notes what is given back and what is captured, in order."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.events: list[str] = []
        self.held: Callable[[], int] = int

    def empty_cache(self) -> None:
        self.events.append(f"empty cache, {self.held()} held")

    def capture(self, *args: Any, **kwargs: Any) -> Any:
        self.events.append("capture")
        return super().capture(*args, **kwargs)

    def capture_segments(self, *args: Any, **kwargs: Any) -> Any:
        self.events.append("capture")
        return super().capture_segments(*args, **kwargs)


@pytest.mark.parametrize("kind", [dg.FullCudaGraphBackend, dg.BreakableCudaGraphBackend])
def test_what_warm_ups_left_in_the_cache_is_given_back_before_each_capture_and_after_the_last(kind: Any) -> None:
    adapter = Watched()
    backend = kind(adapter, phase="decode", graph_pool=dg.GraphMemoryPool(adapter))
    warmed: list[weakref.ref[torch.Tensor]] = []

    def forward(size: int) -> torch.Tensor:
        output = INPUT[:size] * 2
        warmed.append(weakref.ref(output))
        return output

    with backend.capture_session():
        adapter.events.clear()
        for size in (4, 2, 1):
            warmed.clear()
            adapter.held = lambda: sum(reference() is not None for reference in warmed)
            backend.capture_one(size, partial(forward, size))
        assert adapter.events == ["empty cache, 0 held", "capture"] * 3
    assert adapter.events[6:] == ["empty cache, 0 held"]


def test_an_estimate_gives_the_cache_back_when_its_graphs_are_gone() -> None:
    pool = dg.GraphMemoryPool(dg.get_device_adapter("cpu"))
    graphs: list[int] = []
    with dg.DecodeCudaGraphRunner(ToyEngine(max_bs=4), config=dg.CudaGraphConfig(), graph_pool=pool) as runner:
        with mock.patch.object(runner.adapter, "empty_cache", side_effect=lambda: graphs.append(pool.graphs)):
            runner.estimate_capture()
        assert graphs[-2:] == [3, 0]


def pool_and_memory() -> tuple[dg.GraphMemoryPool, TapeMemory]:
    pool = dg.GraphMemoryPool(dg.get_device_adapter("cpu"))
    return pool, pool.handle


class Wide(ToyEngine):
    """Logits of 64 Ki columns, of which a few hundred rows fill more than a segment."""

    def forward(self, batch: Any) -> Any:
        return {"logits": super().forward(batch).repeat(1, 2048), "rows": [batch.input_ids]}


def memory_after(sizes: list[int], order: str) -> tuple[int, int]:
    """Bytes under live tensors and in all segments when these sizes are captured."""
    pool, memory = pool_and_memory()
    engine = Wide(max_bs=256)
    config = dg.CudaGraphConfig(decode={"bs": sizes})
    with dg.DecodeCudaGraphRunner(engine, config=config, graph_pool=pool, order=order) as runner:
        runner.capture()
        assert len(runner.graphs) == len(sizes)
        return memory.live_bytes, memory.reserved_bytes


def test_no_output_is_held_and_smaller_graphs_take_the_memory_of_the_largest() -> None:
    live, alone = memory_after([256], "descending")
    assert live == 0
    assert alone > 256 * 65536 * 4
    assert memory_after([128, 256], "descending") == (0, alone)
    assert memory_after([128, 256], "ascending")[1] > alone


def test_a_step_holds_nothing_of_the_pool_and_gives_the_same_memory_again() -> None:
    pool, memory = pool_and_memory()
    engine = ToyEngine()
    with dg.DecodeCudaGraphRunner(engine, config=dg.CudaGraphConfig(decode={"bs": [4]}), graph_pool=pool) as runner:
        runner.capture()
        first = runner.run(engine.batch([3, 2]))
        assert memory.owns(first)
        assert runner.run(engine.batch([4, 1])).data_ptr() == first.data_ptr()
        assert memory.live_bytes == 0
