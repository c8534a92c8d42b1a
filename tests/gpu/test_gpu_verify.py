"""Verification and borrowed outputs on a GPU, where poison and what it moves are in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devicegraph as dg
from devicegraph.testing import check_runner
from engines import ToyEngine, ToyPrefill, config
from leaks import FORMS, KINDS, USUAL, captured, leaky


@pytest.fixture(scope="module")
def stage() -> Any:
    engine = leaky("cuda")
    with captured(engine, bs=[2, 4]) as runner:
        yield engine, runner


def slots_found(report: dg.VerifyReport) -> set[tuple[str, ...]]:
    return {finding.slots for finding in report.findings if finding.proof == "padding"}


def test_rows_that_are_each_requests_own_leak_nothing(stage: Any) -> None:
    engine, runner = stage
    engine.turn_on()
    before = [engine.cache.clone(), *(slot.buffer.clone() for slot in runner.buffer_registry.slots)]
    report = check_runner(runner, engine.batches(), state=engine.state())
    assert set(report.poisons) == {*KINDS, *USUAL, "state cache"}
    after = [engine.cache, *(slot.buffer for slot in runner.buffer_registry.slots)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("name", [*KINDS, *USUAL, *FORMS])
def test_a_leak_is_found_by_its_slot(name: str, stage: Any) -> None:
    engine, runner = stage
    engine.turn_on(name)
    report = dg.verify(runner, engine.batches()[:2], state=engine.state())
    assert slots_found(report) == {("ZERO_float32" if name in FORMS else name,)}


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_a_capture_is_verified_on_live_and_on_idle_batches(backend: str) -> None:
    engine = ToyEngine("cuda", max_bs=8)
    engine.cache.copy_(torch.randint(-2, 3, engine.cache.shape, generator=torch.Generator().manual_seed(1)))
    for batches in (None, lambda: [engine.batch([3, 5, 2]), engine.batch([9], 1, rows=[4])]):
        engine.verify_batches = batches
        engine.state_tensors = lambda: {"cache": engine.cache}
        runner = dg.DecodeCudaGraphRunner(engine, config=config(backend=backend), verify_on_capture=True)
        with runner:
            runner.capture()
            batch = engine.batch([3, 4])
            want = engine.forward(batch)
            assert torch.equal(runner.run(batch), want)


def test_prefill_that_looks_at_all_tokens_is_found() -> None:
    class Leaky(ToyPrefill):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch) + batch.positions.sum()

    for kind, slots in ((ToyPrefill, set()), (Leaky, {("positions",)})):
        engine = kind("cuda")
        buckets = dg.CudaGraphConfig(prefill={"backend": "breakable", "bs": [8, 16]})
        with dg.PrefillCudaGraphRunner(engine, config=buckets) as runner:
            runner.capture()
            batches = [engine.chunks([(1, 0, 3), (2, 0, 2)]), engine.chunks([(3, 0, 9)], 1)]
            assert slots_found(dg.verify(runner, batches, state={"cache": engine.cache})) == slots


def test_an_output_that_was_overwritten_is_not_read() -> None:
    engine = ToyEngine("cuda", max_bs=4)
    with dg.DecodeCudaGraphRunner(engine, config=config(bs=[4]), debug_outputs=True) as runner:
        runner.capture()
        output = runner.run(engine.batch([3, 5]))
        row, owned = output[0], output.cpu()
        assert torch.equal(row.cpu(), owned[0])
        runner.run(engine.batch([7, 7]))
        for read in (row.sum, output.cpu, row.tolist):
            with pytest.raises(dg.ReplayError, match="stale-output"):
                read()
        assert owned.shape == (2, 32)
