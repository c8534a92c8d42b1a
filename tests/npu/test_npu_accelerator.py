"""The adapter of other accelerators on an NPU: torch_npu has the functions that it asks for, and a real allocator."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import devicegraph as dg
from devicegraph.devices import npu
from devicegraph.devices.accelerator import AcceleratorDevice, graph_class, missing_calls
from devicegraph.devices.npu import NpuDevice
from devicegraph.testing import check_backend

#: What depends on the allocator.
CLAUSES = [
    "capture_error_mode",
    "replays_equal_eager",
    "recapture",
    "cleanup",
    "two_backends_in_one_pool",
    "forbidden_operations",
    "failing_recaptures",
    "graphs_share_memory",
    "cleanup_returns_memory",
    "failures_leak_no_memory",
]


class PlainNpu(AcceleratorDevice):
    """An NPU without what is made for NPUs; torch_npu has storages of its own."""

    type: ClassVar[str] = "npu"
    package: ClassVar[str | None] = "torch_npu"
    bindings: ClassVar[str] = "torch_npu._C"
    weak_tensor = NpuDevice.weak_tensor


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(npu, "NpuDevice", PlainNpu)
    adapter: Any = dg.get_device_adapter("npu")
    assert type(adapter) is PlainNpu
    return adapter


@pytest.mark.usefixtures("plain")
def test_a_real_allocator_keeps_the_contract_through_the_adapter_of_all_accelerators() -> None:
    assert check_backend(dg.FullCudaGraphBackend, "npu", clauses=CLAUSES) == CLAUSES


def test_the_module_of_an_npu_has_what_is_asked_for(plain: Any) -> None:
    module = plain.module()
    assert missing_calls(module) == []
    assert graph_class(module) is module.NPUGraph
    assert plain.has_capture_error_modes


def test_captures_go_on_where_a_real_allocator_ends_recording_before_the_capture_fails(plain: Any) -> None:
    # Its pool keeps the failed capture's memory then, which only the NPU's own adapter takes back.
    pool, x = dg.GraphMemoryPool(plain), torch.ones(4, device="npu")

    def capture(forward: Any) -> Any:
        graph = plain.graph()
        with plain.capture(graph, pool=pool, stream=plain.stream(), capture_error_mode="thread_local"):
            forward()
        return graph

    kept, before = capture(lambda: x.add_(1)), plain.current_stream()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="LocalScalarDense"):
            capture(lambda: (x + 1)[0].item())
        assert plain.current_stream() == before
    graphs = [kept, capture(lambda: x.add_(1))]
    for graph in graphs:
        graph.replay()
    assert x[0].item() == 3
    for graph in graphs:
        graph.reset()
