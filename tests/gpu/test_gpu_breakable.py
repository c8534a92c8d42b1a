"""Breakable captures on a GPU: the cases that the CPU tape keeps, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from break_cases import CASES

if TYPE_CHECKING:
    import devicegraph as dg


@pytest.mark.parametrize("case", CASES)
def test_the_case_holds_on_a_gpu(case: Any, adapter: dg.DeviceAdapter, reserved: None) -> None:
    case(adapter)
