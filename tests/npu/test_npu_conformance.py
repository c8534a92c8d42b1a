"""The suite of all backends on an NPU."""

from __future__ import annotations

from typing import Any

import pytest

import devicegraph as dg
from devicegraph.testing import CLAUSES, check_backend
from mutants import ReplaysAfterTheCapture


@pytest.mark.parametrize("backend", [dg.FullCudaGraphBackend])
def test_the_backend_keeps_every_clause_on_an_npu(backend: Any) -> None:
    assert check_backend(backend, "npu") == list(CLAUSES)


def test_a_backend_that_breaks_a_clause_is_found_out_on_an_npu() -> None:
    with pytest.raises(AssertionError, match="clause `captures_execute_nothing` is broken"):
        check_backend(ReplaysAfterTheCapture, "npu", clauses=["captures_execute_nothing"])
