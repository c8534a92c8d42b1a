"""The prefill runner on a GPU, with each of its backends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devicegraph as dg
from devicegraph.backends import split_ops
from engines import CompiledPrefill, ToyPrefill

BACKENDS = [
    {"backend": "breakable"},
    {"backend": "tc_piecewise", "tc_compiler": "eager"},
    {"backend": "tc_piecewise", "tc_compiler": "inductor"},
]
STEPS = [
    [(1, 0, 5), (2, 0, 3)],
    [(3, 0, 1)],
    [(1, 0, 16), (2, 0, 16), (4, 0, 3)],
    [(5, 0, 2)],
    [(1, 0, 9)],
    [(6, 0, 4)],
    [(6, 4, 8), (2, 0, 7)],
]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_ops, "_registered", {})
    dg.register_split_op("devicegraph_tests::attend")
    torch._dynamo.reset()


@pytest.mark.filterwarnings("default")  # torch.compile and its compilers warn of things of their own
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: "-".join(backend.values()))
def test_prompts_and_chunks_of_them_equal_eager(backend: dict[str, Any]) -> None:
    # Attention is a break in the one, and a split operator in the other.
    kind = ToyPrefill if backend["backend"] == "breakable" else CompiledPrefill
    engine, oracle = kind("cuda"), kind("cuda")
    disabled = dg.CudaGraphConfig(prefill={"backend": "disabled"})
    with (
        dg.PrefillCudaGraphRunner(
            engine, config=dg.CudaGraphConfig(prefill={**backend, "bs": [1, 2, 4, 8, 16, 64]})
        ) as runner,
        dg.PrefillCudaGraphRunner(oracle, config=disabled) as plain,
    ):
        report = runner.capture()
        assert (report.backend, len(report.captured)) == (backend["backend"], 6)
        for seed, requests in enumerate(STEPS * 3):
            batch = engine.chunks(requests, seed)
            want = plain.run(oracle.chunks(requests, seed))
            assert torch.equal(runner.run(batch), want)
            assert torch.equal(engine.cache[1:], oracle.cache[1:])
        assert runner.metrics().hit_rate == 1.0
        assert report.traces == (kind is CompiledPrefill)
        assert runner.metrics().recompiles == 0
