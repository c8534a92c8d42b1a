"""The adapter of other accelerators on an NPU: torch_npu has the functions that it asks for, and a real allocator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import devicegraph as dg
from devicegraph.devices import npu
from devicegraph.devices.accelerator import AcceleratorDevice, graph_class, missing_calls
from devicegraph.devices.npu import NpuDevice
from devicegraph.testing import check_backend

if TYPE_CHECKING:
    import pytest

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


def test_a_real_allocator_keeps_the_contract_through_the_adapter_of_all_accelerators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(npu, "NpuDevice", PlainNpu)
    module: Any = PlainNpu.module()
    assert missing_calls(module) == []
    assert graph_class(module) is module.NPUGraph
    adapter = dg.get_device_adapter("npu")
    assert type(adapter) is PlainNpu
    assert adapter.has_capture_error_modes
    assert check_backend(dg.FullCudaGraphBackend, "npu", clauses=CLAUSES) == CLAUSES
