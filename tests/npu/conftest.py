"""Tests that need an NPU, or the simulated device library: DEVICEGRAPH_NPU says which, else none is collected.

`tests/test_npu_simulated.py` runs them in the simulation, in processes of its own. Every result has the word in its
name. On hardware: `DEVICEGRAPH_NPU=hardware TORCH_DEVICE_BACKEND_AUTOLOAD=0 pytest tests/npu`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

import devicegraph as dg

if TYPE_CHECKING:
    from collections.abc import Iterator

WHERE = os.environ.get("DEVICEGRAPH_NPU")
#: They import torch_npu, and this process may not be able to.
collect_ignore_glob = ["test_*.py"] if WHERE is None else []

if WHERE is not None:
    dg.get_device_adapter("npu")  # torch_npu warns of its own things when it is loaded, which no test is about


@pytest.fixture(autouse=True, params=[WHERE])
def where(request: pytest.FixtureRequest) -> str:
    """`simulated` or `hardware`, in the name of every result."""
    return str(request.param)


@pytest.fixture
def adapter() -> Iterator[dg.DeviceAdapter]:
    adapter = dg.get_device_adapter("npu")
    yield adapter
    adapter.synchronize()
