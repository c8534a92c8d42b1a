"""Tests that need a GPU: skipped elsewhere, with the reason."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import devicegraph as dg
from devicegraph.devices.cuda import CudaDevice

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    reason = f"needs a GPU: {CudaDevice.availability().reason}"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def adapter() -> Iterator[dg.DeviceAdapter]:
    yield dg.get_device_adapter("cuda")
    torch.cuda.synchronize()


@pytest.fixture
def reserved() -> Iterator[None]:
    """The test must leave no more memory reserved than it found."""

    def level() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # no graph is alive that was captured with one
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    before = level()
    yield
    assert level() <= before
