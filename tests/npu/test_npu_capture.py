"""Captures on an NPU: what torch_npu leaves undone, shown first, and what the adapter makes of it."""

from __future__ import annotations

import gc
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import devicegraph as dg

npu: Any = getattr(torch, "npu", None)


def _zeros(size: int = 4) -> torch.Tensor:
    return torch.zeros(size, device="npu")


@pytest.fixture
def backend(adapter: dg.DeviceAdapter) -> Any:
    backend = dg.NPUCudaGraphBackend(adapter, phase="decode", graph_pool=dg.GraphMemoryPool(adapter))
    yield backend
    backend.cleanup()


def _capture(backend: Any, forward: Any, key: Any = 1) -> Any:
    with torch.no_grad(), backend.capture_session():
        return backend.capture_one(key, forward)


def _runs_on_host(number: int, size: int = 4) -> Any:
    """A forward that breaks its capture in the run with that number."""
    runs, x = [0], _zeros(size)

    def forward() -> torch.Tensor:
        runs[0] += 1
        y = x + 1
        if runs[0] == number:
            y[0].item()
        return y

    return forward


IN_THE_CAPTURE = dg.NPUCudaGraphBackend.WARMUPS + 1


def test_the_stream_and_the_dispatch_modes_are_restored_where_torch_npu_leaves_its_own(backend: Any) -> None:
    before, x = npu.current_stream(), _zeros()
    with suppress(RuntimeError), npu.graph(npu.NPUGraph(), stream=npu.Stream(), auto_dispatch_capture=True):
        x[0].item()
    left = _get_current_dispatch_mode_stack()
    assert left
    assert npu.current_stream() != before
    for mode in reversed(left):
        mode.__exit__(None, None, None)
    npu.set_stream(before)

    adapter, pool = backend.adapter, backend.graph_pool
    with (
        pytest.raises(RuntimeError, match="error code is 107027") as caught,
        adapter.capture(adapter.graph(), pool=pool, stream=adapter.stream(), capture_error_mode="thread_local"),
    ):
        x[0].item()
    assert "LocalScalarDense" in str(caught.value)  # the model's own error, and not that of the end of the capture
    assert npu.current_stream() == before
    assert _get_current_dispatch_mode_stack() == []
    with pytest.raises(dg.CaptureError):
        _capture(backend, _runs_on_host(IN_THE_CAPTURE))
    assert npu.current_stream() == before
    assert _get_current_dispatch_mode_stack() == []


def test_a_failed_capture_takes_no_memory_for_good_where_torch_npus_own_does(backend: Any) -> None:
    def reserved() -> int:
        gc.collect()
        npu.synchronize()
        npu.empty_cache()
        return int(npu.memory_reserved())

    def fail() -> None:
        before, graph = npu.current_stream(), npu.NPUGraph()
        with suppress(RuntimeError), npu.graph(graph, stream=npu.Stream()):
            _zeros(1 << 20)[0].item()
        npu.set_stream(before)
        graph.reset()

    at_first = reserved()
    fail()
    fail()
    leaked = reserved() - at_first
    assert leaked >= 2 * 4 * (1 << 20)

    x = _zeros(1 << 20)
    at_first = reserved()
    for _ in range(3):
        with pytest.raises(dg.CaptureError):
            _capture(backend, _runs_on_host(IN_THE_CAPTURE, size=1 << 20))
    _capture(backend, lambda: x + 1)  # the pool takes captures as before
    backend.replay(1, None)
    backend.cleanup()
    assert reserved() <= at_first


def test_half_a_forward_is_no_graph_where_torch_npu_would_replay_it(backend: Any) -> None:
    x, error = _zeros(), ValueError("in the forward")
    raw = npu.NPUGraph()
    with suppress(ValueError), npu.graph(raw, stream=npu.Stream()):
        y = x + 1
        raise error
    raw.replay()
    npu.synchronize()
    assert y[0].item() == 1

    runs = [0]

    def forward() -> torch.Tensor:
        runs[0] += 1
        out = x + 1
        if runs[0] == IN_THE_CAPTURE:
            raise error
        return out

    graphs: list[Any] = []
    make = backend.adapter.graph
    backend.adapter.graph = lambda: graphs.append(make()) or graphs[-1]
    with pytest.raises(dg.CaptureError) as caught:
        _capture(backend, forward)
    assert caught.value.__cause__ is error
    assert not backend.can_run(None, 1)
    with pytest.raises(RuntimeError):
        graphs[0].raw.replay()  # nobody who kept the object can launch half a forward


def test_a_pool_outlives_its_last_graph_where_torch_npu_takes_its_id_for_a_fault(adapter: dg.DeviceAdapter) -> None:
    x, handle, stream = _zeros(), npu.graph_pool_handle(), npu.Stream()
    raw = npu.NPUGraph()
    with npu.graph(raw, pool=handle, stream=stream):
        kept = x + 1
    del raw
    gc.collect()
    before = npu.current_stream()
    with pytest.raises(RuntimeError, match="use_count > 0"):
        npu.graph(npu.NPUGraph(), pool=handle, stream=stream).__enter__()
    npu.set_stream(before)
    del kept

    pool: Any = dg.GraphMemoryPool(adapter)
    anchor = pool.handle
    outputs = []
    for _ in range(3):
        graph: Any = adapter.graph()
        with adapter.capture(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            outputs.append(x + 1)
        assert graph.raw.pool() == anchor.id
        graph.raw.reset()  # the last graph is gone, what it made is not
    del graph


def test_a_key_that_is_captured_again_has_the_calls_of_the_new_graph_only(backend: Any) -> None:
    from lengths import lengths_scale_once

    raw, counts = npu.NPUGraph(), []
    for _ in range(2):
        with npu.graph(raw, stream=npu.Stream(), auto_dispatch_capture=True):
            lengths_scale_once([1, 2])
        counts.append(len(raw.graph_dispatch_mode.graph_dispatch_records))
        raw.reset()
    assert counts == [1, 2]

    for _ in range(2):
        _capture(backend, lambda: lengths_scale_once([1, 2]))
        assert len(backend.updatable_calls(1)) == 1


def test_any_number_of_sessions_takes_one_stream_where_torch_npu_has_thirty_two(backend: Any) -> None:
    assert len({npu.Stream().npu_stream for _ in range(40)}) == 32
    seen = set()
    for _ in range(40):
        with backend.capture_session() as stream:
            seen.add(stream.npu_stream)
    assert len(seen) == 1


@pytest.mark.parametrize(("mode", "survives"), [("global", False), ("thread_local", True), ("relaxed", True)])
def test_who_may_wait_beside_a_capture_is_what_the_error_mode_says(
    adapter: dg.DeviceAdapter, mode: Any, survives: bool
) -> None:
    x, pool = _zeros(), dg.GraphMemoryPool(adapter)

    def wait() -> None:
        with suppress(RuntimeError):
            npu.current_stream().synchronize()

    def capture() -> Any:
        graph = adapter.graph()
        with adapter.capture(graph, pool=pool, stream=adapter.stream(), capture_error_mode=mode):
            x.add_(1)
            thread = threading.Thread(target=wait)
            thread.start()
            thread.join()
        return graph

    if survives:
        graph = capture()
        graph.replay()
        adapter.synchronize()
        assert x[0].item() == 1
        graph.reset()
    else:
        with pytest.raises(RuntimeError):
            capture()
    assert not adapter.is_capturing()


def test_a_capture_inside_another_one_is_refused_and_the_outer_one_survives(adapter: dg.DeviceAdapter) -> None:
    x, pool = _zeros(), dg.GraphMemoryPool(adapter)
    graph, stream = adapter.graph(), adapter.stream()
    with adapter.capture(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        x.add_(1)
        with pytest.raises(dg.CaptureError) as caught:
            adapter.capture(
                adapter.graph(), pool=pool, stream=adapter.stream(), capture_error_mode="thread_local"
            ).__enter__()
    assert caught.value.code == "nested-capture"
    graph.replay()
    adapter.synchronize()
    assert x[0].item() == 1
    graph.reset()


def test_side_streams_that_are_joined_take_part(adapter: dg.DeviceAdapter) -> None:
    x, y, side = _zeros(), _zeros(), adapter.stream()
    graph = adapter.graph()
    pool = dg.GraphMemoryPool(adapter)
    with adapter.capture(graph, pool=pool, stream=adapter.stream(), capture_error_mode="thread_local"):
        side.wait_stream(npu.current_stream())
        with npu.stream(side):
            y.copy_(x)
            y.mul_(2)
        npu.current_stream().wait_stream(side)
        y.add_(x)
    x.fill_(5)
    graph.replay()
    adapter.synchronize()
    assert y.tolist() == [15] * 4
    graph.reset()
