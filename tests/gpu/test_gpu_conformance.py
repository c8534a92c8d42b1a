"""The suite of all backends on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import devicegraph as dg
from devicegraph.testing import CLAUSES, check_backend
from mutants import OnePlaceForAllBreaks, PutsOutputsIntoInputs, ReplaysAfterTheCapture, StagingForEachGraph


@pytest.mark.parametrize("backend", [dg.FullCudaGraphBackend, dg.BreakableCudaGraphBackend])
def test_the_backend_keeps_every_clause_on_a_gpu(backend: Any) -> None:
    assert check_backend(backend, "cuda") == list(CLAUSES)


@pytest.mark.filterwarnings("default")  # torch.compile and its compilers warn of things of their own
@pytest.mark.skipif(torch.__version__ < "2.11", reason="tc_piecewise is held to torch 2.11 and newer")
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_the_compiled_backend_keeps_every_clause_on_a_gpu(compiler: str) -> None:
    backend = functools.partial(dg.TcPiecewiseCudaGraphBackend, tc_compiler=compiler)
    assert check_backend(backend, "cuda") == list(CLAUSES)


@pytest.mark.parametrize(
    ("clause", "mutant"),
    [
        ("captures_execute_nothing", ReplaysAfterTheCapture),
        ("replays_equal_eager", OnePlaceForAllBreaks),
        ("outputs_stay", PutsOutputsIntoInputs),
        ("graphs_share_memory", StagingForEachGraph),
    ],
)
def test_a_backend_that_breaks_a_clause_is_found_out_on_a_gpu(clause: str, mutant: Any) -> None:
    with pytest.raises(AssertionError, match=f"clause `{clause}` is broken"):
        check_backend(mutant, "cuda", clauses=[clause])
