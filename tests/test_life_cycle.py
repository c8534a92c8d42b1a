"""Pausing, closing, forking and ending with graphs alive; runners in several threads."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import devicegraph as dg
from devicegraph.runners import capture_mode
from engines import ToyEngine, eager
from faults import COLLECTOR

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_mode, "gc", COLLECTOR)


def captured(engine: ToyEngine, backend: str = "full", **options: Any) -> dg.DecodeCudaGraphRunner:
    config = dg.CudaGraphConfig(decode={"backend": backend, "bs": [2, 4]})
    options.setdefault("graph_pool", dg.GraphMemoryPool(dg.get_device_adapter("cpu")))
    runner = dg.DecodeCudaGraphRunner(engine, config=config, **options)
    runner.capture()
    return runner


def in_threads(*functions: Callable[[], None]) -> None:
    """Runs the functions at the same time; what one of them raises is raised here."""
    errors: list[BaseException] = []

    def noted(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=noted, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


def test_a_process_may_fork_and_end_with_graphs_alive_and_its_children_are_told_that_they_are_not_theirs() -> None:
    paths = [str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    run = subprocess.run(
        [sys.executable, str(HERE / "forks.py"), "cpu"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
    )
    assert (run.returncode, run.stderr) == (0, "")
    found = json.loads(run.stdout)
    assert found["parent"] == [True] * 3
    assert found["children"][0].pop("a runner of its own") == "True"
    for child in found["children"]:
        assert (child.pop("status"), child.pop("close")) == ("0", "nothing")
        assert set(child.values()) == {"ReplayError forked"}, child


def test_the_error_of_a_forked_child_says_what_to_do() -> None:
    runner = captured(ToyEngine(max_bs=4))
    runner.leave_to_parent()
    with pytest.raises(dg.ReplayError) as caught:
        runner.run(runner.model_runner.batch([3]))
    assert str(caught.value) == (
        "the decode runner was made before `os.fork`, and its graphs are the parent process's [forked]\n\n"
        "hint: make runners in the process that uses them: fork before, or start workers by `spawn`"
    )


@pytest.mark.parametrize("call", ["pause", "close"])
def test_work_in_flight_is_waited_for_before_anything_changes(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = captured(ToyEngine(max_bs=4))
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(
        runner.adapter, "synchronize", lambda: seen.append((runner._state, len(runner.backend.captured)))
    )
    getattr(runner, call)()
    assert seen == [("open", 2)]
    assert runner._state == {"pause": "paused", "close": "closed"}[call]


def test_two_runners_capture_and_step_in_two_threads_at_once() -> None:
    together = threading.Barrier(2)

    def serve(seed: int, backend: str) -> None:
        engine = ToyEngine(max_bs=4)
        together.wait()
        with torch.no_grad(), captured(engine, backend) as runner:
            for step in range(60):
                batch = engine.batch([3 + (step + i) % 5 for i in range(1 + (step + seed) % 4)], seed + step)
                assert torch.equal(runner.run(batch), eager(engine, batch))
            together.wait()
            runner.capture()
            assert torch.equal(runner.run(batch), eager(engine, batch))
            assert runner.metrics().eager == {}

    in_threads(lambda: serve(1, "full"), lambda: serve(2, "breakable"))


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_another_thread_may_allocate_and_step_while_a_graph_is_captured(mode: Any) -> None:
    other = ToyEngine(max_bs=4)
    serving = captured(other)

    def meanwhile() -> None:
        batch = other.batch([3, 5, 2])
        assert torch.equal(torch.empty(1 << 16).fill_(1) + 1, torch.full((1 << 16,), 2.0))
        assert torch.equal(serving.run(batch), eager(other, batch))

    class Interrupted(ToyEngine):
        def forward(self, batch: Any) -> Any:
            if dg.get_device_adapter("cpu").is_capturing():
                in_threads(meanwhile, meanwhile_alone)
            return super().forward(batch)

    def meanwhile_alone() -> None:
        assert not dg.get_device_adapter("cpu").is_capturing()
        assert not dg.get_is_capture_mode()

    engine, plain = Interrupted(max_bs=4), ToyEngine(max_bs=4)
    runner, alone = captured(engine, capture_error_mode=mode), captured(plain)
    for key, graph in runner.backend.captured.items():
        assert graph.recording.tape.operators() == alone.backend.captured[key].recording.tape.operators()
    batch = engine.batch([3, 5, 2])
    assert torch.equal(runner.run(batch), eager(engine, batch))


def test_inputs_that_another_stream_writes_are_read_behind_the_event_that_pre_replay_waits_for() -> None:
    adapter = dg.get_device_adapter("cpu")
    side, log = adapter.stream(), []

    class Waits(ToyEngine):
        def pre_replay(self, batch: Any) -> None:
            if "ready" in batch.extras:
                adapter.current_stream().wait_event(batch.extras["ready"])
                batch.extras.pop("write")()
                log.append("waited")

    engine = Waits(max_bs=4)
    runner = captured(engine)
    batch, late = engine.batch([3, 5, 2]), engine.batch([4, 4, 1], seed=3)
    wanted = eager(engine, late)
    with adapter.stream_context(side):
        fields = ("input_ids", "positions", "seq_lens", "out_cache_loc", "req_pool_indices")
        write = lambda: [getattr(batch, name).copy_(getattr(late, name)) for name in fields]  # noqa: E731
        batch.extras = {"ready": side.record_event(), "write": write}
    assert torch.equal(runner.run(batch), wanted)
    assert log == ["waited"]


@pytest.mark.parametrize("option", ["none", "tbo", "nvtx"])
def test_a_runner_goes_with_its_last_reference_also_where_the_collector_is_off(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = dg.get_device_adapter("cpu")
    monkeypatch.setattr(type(adapter), "profiler_ranges", lambda adapter: (lambda name: None, lambda: None))
    options: dict[str, Any] = {
        "none": {},
        "tbo": {"tbo": dg.TboCudaGraphRunnerPlugin()},
        "nvtx": {"nvtx": True},
    }[option]
    engine = ToyEngine(max_bs=4)
    runner = dg.DecodeCudaGraphRunner(engine, config=dg.CudaGraphConfig(decode={"bs": [2, 4]}), **options)
    runner.capture()
    runner.run(engine.batch([3, 4, 5]))
    gc.collect()
    gc.disable()
    try:
        runner.close()
        gone = [weakref.ref(thing) for thing in (runner, runner.backend)]
        del runner
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def test_a_backend_serves_one_runner_at_a_time() -> None:
    engine, config = ToyEngine(), dg.CudaGraphConfig(decode={"bs": [2, 4], "backend": "breakable"})
    backend = dg.BreakableCudaGraphBackend(dg.get_device_adapter("cpu"), phase="decode")
    first = dg.DecodeCudaGraphRunner(engine, config=config, backend=backend)
    with pytest.raises(dg.ConfigError, match="it has the graphs of another runner") as caught:
        dg.DecodeCudaGraphRunner(engine, config=config, backend=backend)
    assert caught.value.code == "backend-in-use"
    for close_first in (first.close, lambda: None):
        close_first()
        with dg.DecodeCudaGraphRunner(engine, config=config, backend=backend) as runner:
            runner.capture()
            batch = engine.batch([3, 1])
            assert torch.equal(runner.run(batch), eager(engine, batch))
        del runner


@pytest.mark.parametrize("backend", ["full", "breakable"])
@pytest.mark.parametrize("hook", ["make_batch", "prepare_metadata", "after_warmup"])
def test_a_runner_that_a_hook_closes_while_it_captures_keeps_no_graph(backend: str, hook: str) -> None:
    engine = ToyEngine()
    hooks = {"make_batch": engine.make_batch}

    def close(*args: Any) -> Any:
        runner.close()
        return hooks.get(hook, lambda *args: None)(*args)

    setattr(engine, hook, close)
    pool = dg.GraphMemoryPool(dg.get_device_adapter("cpu"))
    config = dg.CudaGraphConfig(decode={"backend": backend, "bs": [2]})
    runner = dg.DecodeCudaGraphRunner(engine, config=config, graph_pool=pool)
    with pytest.raises(dg.ReplayError) as caught:
        runner.capture()
    assert (caught.value.code, runner.graphs, runner.backend.captured, pool.graphs) == ("closed", {}, {}, 0)


@pytest.mark.parametrize("where", ["prepare_metadata", "upgrade_metadata", "break"])
@pytest.mark.parametrize("call", ["run", "replay", "replay_prepare", "capture", "capture_one_shape", "drop", "close"])
def test_what_would_change_the_buffers_or_the_graph_of_a_replay_is_refused_while_it_is_under_way(
    call: str, where: str
) -> None:
    errors: list[dg.ReplayError] = []

    class Nests(ToyEngine):
        is_nesting = False

        def nest(self, *of_a_hook: Any) -> None:
            if self.is_nesting:
                with pytest.raises(dg.ReplayError) as caught:
                    calls[call]()
                errors.append(caught.value)

        @dg.eager_on_graph
        def attended(self, batch: Any) -> torch.Tensor:
            self.nest()
            return super().forward(batch)

        def forward(self, batch: Any) -> Any:
            return self.attended(dg.current_batch()) + 1

    engine = Nests(max_bs=4)
    if where != "break":
        setattr(engine, where, engine.nest)
    runner = captured(engine, "breakable")
    other = engine.batch([2], seed=1)
    calls: dict[str, Callable[[], object]] = {
        "run": lambda: runner.run(other),
        "replay": lambda: runner.replay(other),
        "replay_prepare": lambda: runner.replay_prepare(other),
        "capture": runner.capture,
        "capture_one_shape": lambda: runner.capture_one_shape(2),
        "drop": lambda: runner.drop_graph(dg.ShapeKey(4)),
        "close": runner.close,
    }
    batch = engine.batch([3, 5, 2])
    with dg.DecodeCudaGraphRunner(engine, config=dg.CudaGraphConfig(decode={"backend": "disabled"})) as alone:
        want = alone.run(batch)
    engine.is_nesting = True
    assert torch.equal(runner.run(batch), want)
    assert {error.code for error in errors} == {"step-in-progress"}
    engine.is_nesting = False
    calls[call]()  # it is free again
    runner.close()


def test_a_hook_may_ask_and_run_others_and_eagerly_in_the_middle_of_a_replay() -> None:
    class Asks(ToyEngine):
        asks = False
        seen: tuple[Any, ...] = ()

        def prepare_metadata(self, batch: Any, key: dg.ShapeKey | None) -> None:
            if self.asks:
                self.asks = False
                small, large = drafts.batch([2]), self.batch([1] * 5)
                self.seen = (target.can_run(batch), target.metrics(), draft.run(small).clone(), target.run(large))

    drafts = ToyEngine(max_bs=4)
    draft, target = captured(drafts), captured(Asks(max_bs=8))
    engine: Any = target.model_runner
    engine.asks, batch = True, engine.batch([3, 5, 2])
    assert torch.equal(target.run(batch), eager(engine, batch))
    assert torch.equal(engine.seen[2], eager(drafts, drafts.batch([2])))
    assert engine.seen[3].shape[0] == 5
    draft.close()
    target.close()


def test_a_phase_that_is_disabled_uses_no_backend_that_it_is_given() -> None:
    backend = dg.FullCudaGraphBackend(dg.get_device_adapter("cpu"), phase="decode")
    engine, config = ToyEngine(max_bs=4), dg.CudaGraphConfig(decode={"backend": "disabled"})
    with dg.DecodeCudaGraphRunner(engine, config=config, backend=backend) as runner:
        assert runner.capture().backend == "disabled"
        batch = engine.batch([3, 5])
        assert runner.can_run(batch).code == "disabled"
        assert torch.equal(runner.run(batch), eager(engine, batch))
    with dg.DecodeCudaGraphRunner(engine, config=dg.CudaGraphConfig(decode={"bs": [2]}), backend=backend) as runner:
        assert len(runner.capture().captured) == 1
