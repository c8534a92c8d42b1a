"""What the graphs of a decoder of 28 layers hold on a GPU: a budget of bytes, which no clock can blur."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import devicegraph as dg
from devicegraph.bench.memory import SHAPES, capture_each
from devicegraph.bench.step import engine_on
from devicegraph.devices import GraphMemoryPool
from engines import ToyEngine, eager

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def sharing(adapter: dg.DeviceAdapter) -> Iterator[dg.FullCudaGraphBackend]:
    try:
        backend = dg.FullCudaGraphBackend(
            adapter, phase="decode", graph_pool=GraphMemoryPool(adapter), share_executables=True
        )
    except dg.BackendError as error:
        pytest.skip(f"needs executables that can be shared: {error.message}")
    yield backend
    backend.cleanup()


@pytest.mark.parametrize("title", SHAPES)
def test_all_buckets_hold_little_more_than_the_largest_alone_and_no_output_is_held(title: str) -> None:
    shape = SHAPES[title]
    with torch.no_grad():
        engine = engine_on(torch.device("cuda"), shape)
        largest = max(shape.decode)
        capture_each(engine, [largest])  # what libraries keep for a stream is there from now on
        alone = capture_each(engine, [largest])[0]
        rows = capture_each(engine, sorted(shape.decode, reverse=True))
    assert len(rows) == 36
    assert sum(row["reserved"] for row in rows) <= 1.05 * alone["reserved"]
    # The constants that padding is copied from are made with the first bucket.
    assert sum(row["held"] for row in rows) < 1 << 20
    assert all(row["held"] == 0 for row in rows[1:])
    # What is apart from the allocator is of the driver's, and does not grow with the bucket.
    assert max(row["beside"] for row in rows) <= 64 << 20


def test_graphs_of_one_form_share_executables(sharing: dg.FullCudaGraphBackend) -> None:
    # What that saves of the device's memory shows in a fresh process only: `devicegraph bench memory`.
    shape = SHAPES["32k tokens, bfloat16 logits"]
    with torch.no_grad():
        capture_each(engine_on(torch.device("cuda"), shape), sorted(shape.decode, reverse=True), sharing)
    assert sharing.executables is not None
    assert sharing.executables.count < len(shape.decode) / 2, str(sharing.executables)


def test_graphs_on_one_executable_replay_as_eager_in_any_order(sharing: Any) -> None:
    engine = ToyEngine("cuda", max_bs=8)
    config = dg.CudaGraphConfig(decode={"bs": [1, 2, 4, 8]})
    with dg.DecodeCudaGraphRunner(engine, config=config, backend=sharing) as runner:
        runner.capture()
        assert sharing.executables.count < 4, str(sharing.executables)
        for seed, lengths in enumerate([[3] * 8, [2], [4, 1, 1], [5] * 7, [6, 2], [6, 3], [1]]):
            batch = engine.batch(lengths, seed)
            assert torch.equal(runner.run(batch), eager(engine, batch))
