"""The suite of all backends on an NPU."""

from __future__ import annotations

import pytest

import devicegraph as dg
from devicegraph.testing import CLAUSES, check_backend
from mutants import ReplaysAfterTheCapture


def test_the_backend_keeps_every_clause_on_an_npu() -> None:
    assert check_backend(dg.NPUCudaGraphBackend, "npu") == list(CLAUSES)


def test_a_backend_that_breaks_a_clause_is_found_out_on_an_npu() -> None:
    with pytest.raises(AssertionError, match="clause `captures_execute_nothing` is broken"):
        check_backend(ReplaysAfterTheCapture, "npu", clauses=["captures_execute_nothing"])
