"""Capture and replay on a GPU: a decoder bit for bit, failures that leave nothing, memory that comes back."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

import devicegraph as dg
from engines import ToyEngine, eager


def runner_for(engine: Any, *, bs: list[int] | None = None, **options: Any) -> dg.DecodeCudaGraphRunner:
    config = dg.CudaGraphConfig(decode={"bs": bs} if bs else {})
    options.setdefault("graph_pool", dg.GraphMemoryPool(dg.get_device_adapter("cuda")))
    return dg.DecodeCudaGraphRunner(engine, config=config, **options)


@pytest.mark.parametrize("tokens_per_request", [1, 3])
def test_replays_equal_eager_at_every_size_whatever_ran_before(tokens_per_request: int, reserved: None) -> None:
    engine = ToyEngine("cuda", max_bs=16, tokens_per_request=tokens_per_request)
    with runner_for(engine, num_tokens_per_bs=tokens_per_request) as runner:
        runner.capture()
        for step, bs in enumerate([16, 1, 3, 16, 2, 5, 7, 12, 6, 1, 0, 9]):
            batch = engine.batch([tokens_per_request + (i + step) % 7 for i in range(bs)], seed=step)
            assert torch.equal(runner.run(batch), eager(engine, batch))
        assert runner.metrics().eager == {"idle": 1}


def test_padded_rows_touch_no_parked_request() -> None:
    engine = ToyEngine("cuda", max_bs=8)
    engine.cache.random_(-2, 3)
    parked = engine.cache[4:].clone()
    with runner_for(engine, bs=[8]) as runner:
        runner.capture()
        runner.run(engine.batch([3, 5, 2]))
    assert torch.equal(engine.cache[4:], parked)


def test_a_smaller_bucket_reuses_the_memory_of_a_larger_one_and_outputs_are_not_copied() -> None:
    class Wide(ToyEngine):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch).repeat(1, 16384)

    def reserved_by(bs: list[int]) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        with runner_for(Wide("cuda", max_bs=64), bs=bs) as runner:
            runner.capture()
            return torch.cuda.memory_reserved() - before

    alone, together = reserved_by([64]), reserved_by([1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64])
    assert together <= alone * 1.05


def test_graphs_captured_in_any_order_give_the_same(reserved: None) -> None:
    engine = ToyEngine("cuda", max_bs=8)
    batches = [engine.batch([3] * bs, seed=bs) for bs in (8, 2, 8, 4, 8)]
    want = [eager(engine, batch).clone() for batch in batches]
    for order in ("descending", "ascending"):
        with runner_for(engine, bs=[2, 4, 8], order=order) as runner:
            runner.capture()
            for batch, expected in zip(batches, want, strict=True):
                assert torch.equal(runner.run(batch), expected)


class Fails(ToyEngine):
    """Fails at one bucket, inside the capture, in one of the ways that leave a device in different states."""

    def __init__(self, how: str) -> None:
        super().__init__("cuda", max_bs=8)
        self.how, self.armed = how, True
        self.side = torch.cuda.Stream()

    def forward(self, batch: Any) -> Any:
        output = super().forward(batch) @ torch.ones(32, 1 << 20, device="cuda")
        if self.armed and batch.batch_size == 4 and torch.cuda.is_current_stream_capturing():
            if self.how == "host-read":
                output.sum().item()
            if self.how == "exception":
                raise ValueError("from the model")
            if self.how == "unjoined":
                self.side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.side):
                    self.kept = output * 2
            if self.how == "host-copy":
                output.cpu()
        return output[:, :1] * 1


@pytest.mark.parametrize("how", ["host-read", "exception", "unjoined", "host-copy"])
def test_a_failed_capture_leaks_nothing_and_a_second_one_succeeds(how: str, reserved: None) -> None:
    engine = Fails(how)
    stream = torch.cuda.current_stream()
    with runner_for(engine, bs=[2, 4, 8]) as runner:
        levels = []
        for _ in range(3):
            with pytest.raises(dg.CaptureError) as caught:
                runner.capture()
            assert caught.value.shape_key == dg.ShapeKey(4)
            assert caught.value.__cause__ is not None
            assert torch.cuda.current_stream() == stream
            assert not runner.graphs
            caught = None
            engine.kept = None
            gc.collect()
            torch.cuda.empty_cache()
            levels.append(torch.cuda.memory_reserved())
        assert levels[0] == levels[1] == levels[2]
        engine.armed = False
        assert len(runner.capture().captured) == 3
        batch = engine.batch([3, 5, 2])
        assert torch.equal(runner.run(batch), eager(engine, batch))


def test_the_cause_of_a_failed_capture_is_the_models_own_error() -> None:
    with runner_for(Fails("exception"), bs=[4]) as runner, pytest.raises(dg.CaptureError) as caught:
        runner.capture()
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.code == "forward-failed"


def test_out_of_memory_at_a_bucket_drops_it_and_the_others_serve(reserved: None) -> None:
    class Hungry(ToyEngine):
        def forward(self, batch: Any) -> Any:
            output = super().forward(batch)
            if torch.cuda.is_current_stream_capturing():
                held = torch.empty(batch.batch_size << 28, dtype=torch.uint8, device="cuda")
                held[:1].fill_(1)
            return output

    engine = Hungry("cuda", max_bs=8)
    total = torch.cuda.mem_get_info()[1]
    # Room for buckets of up to 4 (1 GiB), not for 8 (2 GiB).
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (3 << 29)) / total)
    try:
        with runner_for(engine, bs=[1, 2, 4, 8]) as runner:
            report = runner.capture()
            assert [d.key.size for d in report.dropped] == [8]
            assert "out of memory" in report.dropped[0].reason.lower()
            assert [b.key.size for b in report.captured] == [4, 2, 1]
            batch = engine.batch([3, 5, 2])
            assert torch.equal(runner.run(batch), eager(engine, batch))
            assert runner.can_run(engine.batch([3] * 5)).code == "bucket-dropped"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_memory_comes_back_after_close_however_often_runners_are_made(reserved: None) -> None:
    engine = ToyEngine("cuda", max_bs=8)
    levels = []
    for _ in range(6):
        with runner_for(engine) as runner:
            runner.capture()
            runner.run(engine.batch([3, 5]))
        del runner
        gc.collect()
        torch.cuda.empty_cache()
        levels.append(torch.cuda.memory_reserved())
    # The first one brings the workspaces that libraries keep for the capture stream.
    assert len(set(levels[1:])) == 1


@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_another_thread_may_allocate_while_a_graph_is_captured(mode: Any) -> None:
    engine = ToyEngine("cuda", max_bs=4)
    errors: list[BaseException] = []

    def allocate() -> None:
        try:
            for _ in range(20):
                torch.empty(1 << 26, dtype=torch.uint8, device="cuda").fill_(1)
        except BaseException as error:
            errors.append(error)

    class Meanwhile(ToyEngine):
        def forward(self, batch: Any) -> Any:
            if torch.cuda.is_current_stream_capturing():
                thread = threading.Thread(target=allocate)
                thread.start()
                thread.join()
            return super().forward(batch)

    engine = Meanwhile("cuda", max_bs=4)
    with runner_for(engine, capture_error_mode=mode) as runner:
        runner.capture()
        batch = engine.batch([3, 5, 2])
        assert torch.equal(runner.run(batch), eager(engine, batch))
    assert not errors


def test_a_runner_made_and_captured_in_inference_mode_serves_outside_of_it_and_the_reverse() -> None:
    for make, use in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
        engine = ToyEngine("cuda", max_bs=4)
        with make():
            runner = runner_for(engine)
            runner.capture()
        with use():
            batch = engine.batch([3, 5, 2])
            assert torch.equal(runner.run(batch), eager(engine, batch))
        runner.close()


def test_ranges_of_nvtx_change_no_result_and_name_each_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    push = torch.cuda.nvtx.range_push
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: (opened.append(name), push(name))[1])
    engine = ToyEngine("cuda", max_bs=4)
    with runner_for(engine, bs=[4], nvtx=True) as runner:
        runner.capture()
        batch = engine.batch([3, 5])
        want = eager(engine, batch)
        opened.clear()
        assert torch.equal(runner.run(batch), want)
    assert opened == [f"devicegraph decode, bucket 4: {part}" for part in ("fill", "replay")]


def test_an_estimate_gives_back_what_it_captured_and_comes_near_the_capture() -> None:
    engine = ToyEngine("cuda", max_bs=64)
    with runner_for(engine) as runner:
        runner.estimate_capture()  # libraries take their workspaces in the first one
        before = runner.adapter.memory()
        estimate = runner.estimate_capture()
        assert runner.adapter.memory().reserved <= before.reserved
        report = runner.capture()
        assert report.estimate is estimate
        assert estimate.graphs == len(report.captured)
        assert estimate.device_bytes is not None
        # Segments of the allocator are 2 MiB: a graph takes none or one of them.
        assert abs(estimate.reserved_bytes - report.reserved_bytes) <= 2 * len(report.captured) << 20
