"""Tests that need an NPU, or the simulated device library: DEVICEGRAPH_NPU says which of the two, or they are skipped.

`tests/test_npu_simulated.py` runs them in the simulation, in a process of its own. Every result has the word in its
name. On hardware: `DEVICEGRAPH_NPU=hardware TORCH_DEVICE_BACKEND_AUTOLOAD=0 pytest tests/npu`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import devicegraph as dg

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
WHERE = os.environ.get("DEVICEGRAPH_NPU", "nowhere")

if WHERE != "nowhere":
    dg.get_device_adapter("npu")  # torch_npu warns of its own things when it is loaded, which no test is about


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if WHERE != "nowhere":
        return
    reason = (
        "needs an NPU (see tests/npu/conftest.py); tests/test_npu_simulated.py runs it on a simulated device library"
    )
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, params=[WHERE])
def where(request: pytest.FixtureRequest) -> str:
    """`simulated` or `hardware`, in the name of every result."""
    return str(request.param)


@pytest.fixture
def adapter() -> Iterator[dg.DeviceAdapter]:
    adapter = dg.get_device_adapter("npu")
    yield adapter
    adapter.synchronize()
