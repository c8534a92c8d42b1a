"""Faults at every step on a GPU, and memory that runs out for real."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch

import devicegraph as dg
from devicegraph.runners import capture_mode
from engines import ToyEngine, eager
from faults import COLLECTOR, SCENARIOS, SLOW, Bench, cases, inject

if TYPE_CHECKING:
    from collections.abc import Iterator

SETUPS = [("decode", "full"), ("decode", "breakable"), ("prefill", "breakable")]
BYTES_PER_ROW, SMALL = 1 << 28, 128 << 20  # small: workspaces of 32 MiB for each stream, and the engine


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_mode, "gc", COLLECTOR)


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: ", ".join(setup))
def test_a_fault_at_any_step_leaves_nothing_and_the_runner_goes_on(setup: tuple[str, str], reserved: None) -> None:
    bench, found = Bench(*setup, "cuda"), 0
    for scenario in SCENARIOS:
        if scenario == "close":
            continue
        for point, error in cases(bench, scenario, every=6 if scenario in SLOW else 2):
            try:
                inject(bench, scenario, point, error)
            except AssertionError as failure:
                raise AssertionError(f"{scenario}: {type(error).__name__} at {point}: {failure}") from failure
            found += 1
    bench.close()
    assert found > 40


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("setup", SETUPS[:2], ids=lambda setup: ", ".join(setup))
def test_a_close_that_fails_lets_go_of_everything_when_it_is_called_again(
    setup: tuple[str, str], reserved: None
) -> None:
    for point, error in list(cases(Bench(*setup, "cuda"), "close", every=2)):
        inject(Bench(*setup, "cuda"), "close", point, error)


class Hungry(ToyEngine):
    """Needs a quarter of a GiB for each row while it is warmed up and captured."""

    def forward(self, batch: Any) -> Any:
        output = super().forward(batch)
        if dg.get_is_capture_mode():
            held = torch.empty(len(output) * BYTES_PER_ROW, dtype=torch.uint8, device=output.device)
            output = output + held[:1].zero_()
        return output


@pytest.fixture
def room_for_seven_rows() -> Iterator[int]:
    """A limit of what is in use and room for seven rows more, and for small things; yields it in bytes."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    limit = torch.cuda.memory_reserved() + 7 * BYTES_PER_ROW + SMALL
    torch.cuda.set_per_process_memory_fraction(limit / total)
    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("backend", ["full", "breakable"])
@pytest.mark.parametrize("order", ["descending", "ascending"])
def test_a_bucket_that_does_not_fit_is_dropped_and_the_smaller_ones_serve(
    backend: str, order: Any, reserved: None, room_for_seven_rows: int
) -> None:
    engine = Hungry("cuda", max_bs=8)
    config = dg.CudaGraphConfig(decode={"backend": backend, "bs": [1, 2, 4, 8]})
    pool = dg.GraphMemoryPool(dg.get_device_adapter("cuda"))
    before = torch.cuda.memory_reserved()
    with dg.DecodeCudaGraphRunner(engine, config=config, graph_pool=pool, order=order) as runner:
        report = runner.capture()
        assert [drop.key.size for drop in report.dropped] == [8]
        assert "out of memory" in report.dropped[0].reason.lower()
        assert sorted(bucket.key.size for bucket in report.captured) == [1, 2, 4]
        held = torch.cuda.memory_reserved()
        assert held <= room_for_seven_rows
        # The memory of four rows is what the largest graph keeps, of which the others take theirs; ascending order has
        # to take each anew, as no smaller block holds a larger one.
        kept = 4 if order == "descending" else 1 + 2 + 4
        assert held - before <= kept * BYTES_PER_ROW + SMALL
        assert runner.can_run(engine.batch([3] * 5)).code == "bucket-dropped"
        allocated = set()
        for seed in range(50):
            batch = engine.batch([3 + (seed + i) % 5 for i in range(1 + seed % 8)], seed)
            assert torch.equal(runner.run(batch), eager(engine, batch))
            del batch
            allocated.add(torch.cuda.memory_allocated())
        assert max(allocated) - min(allocated) < 1 << 20
        assert torch.cuda.memory_reserved() <= room_for_seven_rows
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert not runner.capture().dropped  # with more room the bucket is there
