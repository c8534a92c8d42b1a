"""TASK_QUEUE_ENABLE=2, under which torch_npu captures nothing."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import devicegraph as dg

if os.environ.get("TASK_QUEUE_ENABLE") != "2":
    pytest.skip("needs TASK_QUEUE_ENABLE=2", allow_module_level=True)

npu: Any = getattr(torch, "npu", None)


def test_the_backend_refuses_it_before_anything_is_captured() -> None:
    x, before = torch.zeros(4, device="npu"), npu.current_stream()
    with pytest.raises(RuntimeError, match="TASK_QUEUE_ENABLE = 2"), npu.graph(npu.NPUGraph(), stream=npu.Stream()):
        x.add_(1)
    npu.set_stream(before)
    with pytest.raises(dg.BackendError) as caught:
        dg.NPUCudaGraphBackend(dg.get_device_adapter("npu"), phase="decode")
    assert str(caught.value) == (
        "TASK_QUEUE_ENABLE is 2, and torch_npu captures no graph then [task-queue]\n\n"
        "hint: set TASK_QUEUE_ENABLE=1 before the process starts, or use the backend `disabled`"
    )


def test_blocking_launches_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "1")
    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "1")
    with pytest.warns(UserWarning, match="ASCEND_LAUNCH_BLOCKING is 1"):
        dg.NPUCudaGraphBackend(dg.get_device_adapter("npu"), phase="decode")
