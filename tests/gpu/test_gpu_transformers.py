"""transformers' continuous batching on a GPU, on the runners and on its own graphs."""

from __future__ import annotations

import gc

import pytest
import torch

import devicegraph as dg

pytest.importorskip("transformers", reason="needs transformers")

from continuous_batching import PROMPTS, manager_of, model_of, own, serve, tokens
from devicegraph.integrations.transformers import enable

CONFIG = dg.CudaGraphConfig(decode={"bs": [1, 4, 8, 16]})


@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("attention", ["paged|sdpa", "paged|eager"])
def test_its_tokens_are_those_of_its_own_graphs_and_of_none(attention: str, is_asynchronous: bool) -> None:
    model = model_of(attention=attention, device="cuda", num_hidden_layers=4)
    batching = {"use_async_batching": is_asynchronous, "use_cuda_graph": True}
    wanted = own(model, use_cuda_graph=False, use_async_batching=False)
    assert own(model, **batching) == wanted
    manager = manager_of(model, **batching)
    with enable(manager, config=CONFIG, key_sizes=[96, 416], keep_batches=4) as graphs:
        assert graphs.report.executor == "node"
        for _ in range(3):
            assert tokens(serve(manager, keep=True)) == wanted
        metrics = graphs.runner.metrics()
        assert set(metrics.eager) == {"above-largest"}
        assert metrics.hit_rate > 0.7
        assert {key.variant_label for key in metrics.replays} == {"keys 96", "keys 416"}
        report = graphs.verify()
        assert report, report
    assert tokens(serve(manager)) == wanted


def test_managers_that_come_and_go_leave_no_memory_behind() -> None:
    model = model_of(device="cuda")
    levels = []
    for _ in range(3):
        manager = manager_of(model)
        with enable(manager, config=CONFIG) as graphs:
            serve(manager, PROMPTS)
            assert graphs.runner.metrics().replays
        del manager, graphs
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        levels.append(torch.cuda.memory_reserved())
    assert max(levels[1:]) <= levels[0]
