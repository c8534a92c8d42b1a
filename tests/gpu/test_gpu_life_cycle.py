"""Work in flight, other streams, other threads, forks and ends of processes, on a GPU."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import devicegraph as dg
from engines import ToyEngine, eager
from soak.levels import heap_in_use

HERE = Path(__file__).parent.parent
#: Cycles of the GPU: long enough for the host to be far ahead.
LONG = 50_000_000
FIELDS = ("input_ids", "positions", "seq_lens", "out_cache_loc", "req_pool_indices")


def captured(engine: ToyEngine, backend: str = "full", **options: Any) -> dg.DecodeCudaGraphRunner:
    config = dg.CudaGraphConfig(decode={"backend": backend, "bs": [2, 4]})
    options.setdefault("graph_pool", dg.GraphMemoryPool(dg.get_device_adapter("cuda")))
    runner = dg.DecodeCudaGraphRunner(engine, config=config, **options)
    runner.capture()
    return runner


@pytest.mark.parametrize("call", ["pause", "close"])
def test_work_in_flight_is_done_when_a_runner_is_paused_or_closed(call: str, reserved: None) -> None:
    engine = ToyEngine("cuda", max_bs=4)
    runner = captured(engine)
    batch = engine.batch([3, 5, 2])
    wanted = eager(engine, batch)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    output = runner.run(batch)
    done = torch.cuda.Event()
    done.record()
    assert not done.query()
    kept = output.clone()
    getattr(runner, call)()
    assert done.query()
    assert torch.equal(kept, wanted)
    runner.close()


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_runners_that_come_and_go_leave_nothing_on_the_heap_of_the_host(backend: str) -> None:
    def life() -> None:
        engine = ToyEngine("cuda", max_bs=4)
        with captured(engine, backend) as runner:
            runner.run(engine.batch([3, 5, 2]))

    def in_use() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return heap_in_use()

    for _ in range(3):
        life()
    before = in_use()
    for _ in range(20):
        life()
    assert in_use() - before < 20 * 5000


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_inputs_that_another_stream_writes_are_read_behind_their_event(backend: str, reserved: None) -> None:
    class Waits(ToyEngine):
        def pre_replay(self, batch: Any) -> None:
            if "ready" in batch.extras:
                torch.cuda.current_stream().wait_event(batch.extras["ready"])

    engine, side = Waits("cuda", max_bs=4), torch.cuda.Stream()
    with captured(engine, backend) as runner:
        for seed in range(5):
            batch, late = engine.batch([3, 5, 2], seed), engine.batch([4, 4, 1], seed + 7)
            wanted = eager(engine, late)
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(LONG)
                for name in FIELDS:
                    getattr(batch, name).copy_(getattr(late, name))
                ready = torch.cuda.Event()
                ready.record(side)
            batch.extras = {"ready": ready}
            output = runner.run(batch)
            assert not ready.query()  # the step was queued before its inputs were there
            assert torch.equal(output, wanted)


def test_two_runners_capture_and_step_in_two_threads_on_their_own_streams(reserved: None) -> None:
    together, errors = threading.Barrier(2), []

    def serve(seed: int, backend: str) -> None:
        try:
            engine, stream = ToyEngine("cuda", max_bs=4), torch.cuda.Stream()
            torch.cuda.synchronize()
            together.wait()
            # One captures after the other: a capture waits for the device, which breaks another one's.
            with torch.no_grad(), torch.cuda.stream(stream):
                with capturing:
                    runner = captured(engine, backend)
                together.wait()
                for step in range(300):
                    batch = engine.batch([3 + (step + i) % 5 for i in range(1 + (step + seed) % 4)], seed + step)
                    assert torch.equal(runner.run(batch), eager(engine, batch))
                assert runner.metrics().eager == {}
                together.wait()
                with capturing:
                    runner.close()
        except BaseException as error:
            errors.append(error)
            together.abort()

    capturing = threading.Lock()
    threads = [threading.Thread(target=serve, args=case) for case in ((1, "full"), (2, "breakable"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_a_thread_steps_through_its_graphs_while_another_one_captures(mode: Any, reserved: None) -> None:
    other, stream = ToyEngine("cuda", max_bs=4), torch.cuda.Stream()
    serving, errors = captured(other), []
    batch, wanted = other.batch([3, 5, 2]), None
    wanted = eager(other, batch)
    torch.cuda.synchronize()
    outputs: list[torch.Tensor] = []

    def step() -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                outputs.append(serving.run(batch).clone())
        except BaseException as error:
            errors.append(error)

    class Interrupted(ToyEngine):
        def forward(self, batch: Any) -> Any:
            if torch.cuda.is_current_stream_capturing():
                thread = threading.Thread(target=step)
                thread.start()
                thread.join()
            return super().forward(batch)

    engine = Interrupted("cuda", max_bs=4)
    with serving, captured(engine, capture_error_mode=mode) as runner:
        assert not errors, errors
        torch.cuda.synchronize()
        assert len(outputs) == 2
        assert all(torch.equal(output, wanted) for output in outputs)
        live = engine.batch([3, 5, 2])
        assert torch.equal(runner.run(live), eager(engine, live))
    outputs.clear()


def test_a_process_may_fork_and_end_with_graphs_alive_and_its_children_are_told_that_they_are_not_theirs() -> None:
    paths = [str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    run = subprocess.run(
        [sys.executable, str(HERE / "forks.py"), "cuda"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    # Python 3.12 warns of any fork of a process with threads, and CUDA starts some.
    said = [line for line in run.stderr.splitlines() if "fork" not in line]
    assert (run.returncode, said) == (0, [])
    found = json.loads(run.stdout)
    assert found["parent"] == [True] * 2
    for child in found["children"]:
        assert (child.pop("status"), child.pop("close")) == ("0", "nothing")
        assert set(child.values()) == {"ReplayError forked"}, child
