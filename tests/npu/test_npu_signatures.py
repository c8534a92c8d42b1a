"""Everything of `torch_npu` that is called here, with the arguments that it is called with."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch_npu

npu: Any = getattr(torch, "npu", None)

#: What the adapter and the backend call: positional arguments as many, and keywords.
CALLS: dict[str, tuple[Any, int, tuple[str, ...]]] = {
    "graph": (npu.graph, 0, ("npu_graph", "pool", "stream", "auto_dispatch_capture", "capture_error_mode")),
    "NPUGraph.update": (npu.NPUGraph.update, 1, ("cpu_update_input",)),
    "NPUGraph.replay": (npu.NPUGraph.replay, 1, ()),
    "NPUGraph.reset": (npu.NPUGraph.reset, 1, ()),
    "graph_task_update_end": (npu.graph_task_update_end, 1, ()),
    "is_current_stream_capturing": (npu.is_current_stream_capturing, 0, ()),
    "is_available": (npu.is_available, 0, ()),
    "current_device": (npu.current_device, 0, ()),
    "current_stream": (npu.current_stream, 1, ()),
    "set_stream": (npu.set_stream, 1, ()),
    "stream": (npu.stream, 1, ()),
    "device": (npu.device, 1, ()),
    "synchronize": (npu.synchronize, 1, ()),
    "empty_cache": (npu.empty_cache, 0, ()),
    "mem_get_info": (npu.mem_get_info, 1, ()),
    "memory_allocated": (npu.memory_allocated, 1, ()),
    "memory_reserved": (npu.memory_reserved, 1, ()),
    "memory_snapshot": (npu.memory_snapshot, 0, ()),
    "MemPool": (npu.MemPool, 0, ()),
    "MemPool.use_count": (npu.MemPool.use_count, 1, ()),
    "handler.get_update_specs": (torch_npu.npu.NpuGraphOpHandler.get_update_specs, 1, ()),
}


@pytest.mark.parametrize("name", CALLS)
def test_torch_npu_takes_what_it_is_called_with(name: str) -> None:
    function, positional, keywords = CALLS[name]
    inspect.signature(function).bind(*range(positional), **dict.fromkeys(keywords))


def test_the_graph_context_differs_from_that_of_cuda_by_position() -> None:
    assert list(inspect.signature(npu.graph).parameters)[3] == "auto_dispatch_capture"
    assert list(inspect.signature(torch.cuda.graph).parameters)[3] == "capture_error_mode"


def test_a_graph_takes_no_arguments_and_has_what_is_read_of_it() -> None:
    with pytest.raises(TypeError):
        npu.NPUGraph(keep_graph=True)
    graph = npu.NPUGraph()
    mode = graph.graph_dispatch_mode
    assert mode.graph_dispatch_records == []
    assert isinstance(mode.update_stream, torch.Stream)
    record = inspect.signature(type_of_records()).parameters
    assert {"event", "args", "kwargs", "op_cache_entry"} <= set(record)


def type_of_records() -> Any:
    from torch_npu.npu import graphs

    return graphs._GraphDispatchRecord


def test_a_pool_is_named_by_its_id() -> None:
    pool = npu.MemPool()
    assert isinstance(pool.id, tuple)
    with pytest.raises(TypeError):
        npu.NPUGraph().capture_begin(pool=pool)


def test_the_bindings_that_the_adapter_calls_are_there() -> None:
    for name in ("_weak_ref_tensor", "_npu_endAllocateToPool", "_npu_releasePool"):
        assert callable(getattr(torch_npu._C, name))


def test_streams_and_events_have_what_their_users_call() -> None:
    stream, event = npu.Stream(device=torch.device("npu", 0)), npu.Event()
    event.record(stream)
    event.synchronize()
    event.wait(stream)
    assert event.query() in (True, False)
    stream.wait_stream(npu.current_stream())
    stream.synchronize()
