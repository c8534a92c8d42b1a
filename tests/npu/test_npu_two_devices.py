"""Two devices in one process: torch_npu updates on a stream of the first one only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devicegraph as dg
from lengths import lengths_scale_once

npu: Any = getattr(torch, "npu", None)

if npu is not None and npu.device_count() < 2:
    pytest.skip("needs two devices", allow_module_level=True)


def _capture(device: int, forward: Any) -> Any:
    adapter = dg.get_device_adapter(f"npu:{device}")
    backend = dg.NPUCudaGraphBackend(adapter, phase="decode", graph_pool=dg.GraphMemoryPool(adapter))
    with torch.no_grad(), backend.capture_session():
        backend.capture_one(1, forward)
    return backend


def test_graphs_without_host_arguments_run_on_either_device() -> None:
    for device in (0, 1, 0):
        x = torch.zeros(4, device=f"npu:{device}")
        backend = _capture(device, lambda x=x: x + 1)
        x.fill_(5)
        assert backend.replay(1, None).tolist() == [6] * 4
        assert npu.current_device() == 0
        backend.cleanup()


def test_a_graph_with_host_arguments_on_the_second_device_is_refused_where_its_update_would_be_lost() -> None:
    first = _capture(0, lambda: lengths_scale_once([1, 1]))
    assert first.replay_with_input_update(1, [3, 4], "lengths", list)[:, 0].tolist() == [3, 4]
    with pytest.raises(dg.CaptureError) as caught:
        _capture(1, lambda: lengths_scale_once([1, 1]))
    assert caught.value.code == "update-stream-device"
    assert "`npu:0`" in str(caught.value)
    assert "`npu:1`" in str(caught.value)
    assert first.replay_with_input_update(1, [5, 6], "lengths", list)[:, 0].tolist() == [5, 6]
    first.cleanup()
