"""Memory around a capture: outputs that nothing holds, and caches that are given back where a capture needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import devicegraph as dg
from devicegraph.devices.cpu import CpuDevice
from engines import ToyEngine

if TYPE_CHECKING:
    from devicegraph.devices.tape_memory import TapeMemory


class Watched(CpuDevice):
    """Notes what is given back and what is captured, in order."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.events: list[str] = []

    def empty_cache(self) -> None:
        self.events.append("empty cache")

    def capture(self, *args: Any, **kwargs: Any) -> Any:
        self.events.append("capture")
        return super().capture(*args, **kwargs)


def test_the_cache_is_given_back_before_the_first_capture_and_after_the_last() -> None:
    adapter = Watched()
    backend = dg.FullCudaGraphBackend(adapter, phase="decode", graph_pool=dg.GraphMemoryPool(adapter))
    with backend.capture_session():
        adapter.events.clear()
        for size in (4, 2, 1):
            backend.capture_one(size, lambda size=size: torch.ones(size) * 2)
        assert adapter.events == ["empty cache", "capture", "capture", "capture"]
    assert adapter.events[4:] == ["empty cache"]


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
