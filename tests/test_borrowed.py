"""Outputs in debug mode: the reads that come too late are refused, whatever reads, and no others."""

from __future__ import annotations

import copy
import gc
import pickle
import textwrap
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import devicegraph as dg
from devicegraph.borrowed import BorrowedTensor
from engines import ToyEngine, ToyPrefill, config


class Nested(ToyEngine):
    def forward(self, batch: Any) -> dict[str, Any]:
        logits = super().forward(batch)
        return {"logits": logits, "pair": (logits * 2, "label")}


@pytest.fixture(scope="module")
def engine() -> ToyEngine:
    return ToyEngine(max_bs=4)


@pytest.fixture(scope="module")
def runner(engine: ToyEngine) -> Any:
    with dg.DecodeCudaGraphRunner(engine, config=config(bs=[2, 4]), debug_outputs=True) as runner:
        runner.capture()
        yield runner


READS = {
    "operator": lambda tensor: tensor + 1,
    "function": lambda tensor: torch.softmax(tensor, -1),
    "keyword": lambda tensor: torch.argmax(input=tensor, dim=-1),
    "in a list": lambda tensor: torch.cat([torch.zeros(1, 32), tensor]),
    "grouped": lambda tensor: torch._foreach_add([tensor], 1),
    "comparison": lambda tensor: torch.equal(torch.zeros(2, 32), tensor),
    "item": lambda tensor: tensor[0, 0].item(),
    "float": lambda tensor: float(tensor[0, 0]),
    "list": lambda tensor: tensor.tolist(),
    "numpy": np.asarray,
    "array": lambda tensor: tensor.numpy(),
    "print": repr,
    "row": lambda tensor: tensor[1].sum(),
    "rows": lambda tensor: [row.sum() for row in tensor],
    "transposed": lambda tensor: tensor.T.sum(),
    "data": lambda tensor: tensor.data.sum(),
    "detached": lambda tensor: tensor.detach().sum(),
    "viewed": lambda tensor: tensor.view(torch.int32).sum(),
    "unbound": lambda tensor: tensor.unbind(0)[1].sum(),
    "strided": lambda tensor: tensor.as_strided((2,), (1,)).sum(),
    "copied from": lambda tensor: torch.zeros(2, 32).copy_(tensor),
    "copied": copy.deepcopy,
    "pickled": pickle.dumps,
    "moved": lambda tensor: tensor.to(torch.float64),
    "written": lambda tensor: tensor.zero_(),
    "written into": lambda tensor: torch.add(torch.zeros(2, 32), 1, out=tensor),
    "cloned": lambda tensor: tensor.clone(),
    "dlpack": lambda tensor: torch.from_dlpack(tensor).sum(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_any_read_is_as_of_an_ordinary_tensor_until_the_next_replay_and_refused_after_it(
    read: Any, runner: Any, engine: ToyEngine
) -> None:
    output = runner.run(engine.batch([3, 5]))
    assert isinstance(output, BorrowedTensor)
    plain = torch.empty(0).set_(output.untyped_storage(), 0, output.shape, output.stride()).clone()
    got, want = read(output), read(plain)
    assert type(got) is type(want) or isinstance(got, BorrowedTensor)
    output = runner.run(engine.batch([3, 5]))
    runner.run(engine.batch([3]))
    with pytest.raises(dg.ReplayError) as caught:
        read(output)
    assert caught.value.code == "stale-output"


def test_a_replay_that_fails_raises_what_it_met_and_may_have_overwritten_outputs(
    runner: Any, engine: ToyEngine
) -> None:
    def broken() -> None:
        raise RuntimeError("the device is gone")

    output = runner.run(engine.batch([3, 5]))
    (graph,) = (graph for key, graph in runner.graphs.items() if key.size == 2)
    with mock.patch.object(graph, "launch", broken), pytest.raises(RuntimeError, match="the device is gone"):
        runner.run(engine.batch([3, 5]))
    with pytest.raises(dg.ReplayError) as caught:
        output.sum()
    assert caught.value.code == "stale-output"


def test_views_are_borrowed_and_results_are_owned(runner: Any, engine: ToyEngine) -> None:
    output = runner.run(engine.batch([3, 5]))
    views = [output[0], output[:, 1:3], output.T, *output.split(1), output.flatten(), output.unsqueeze(0)]
    owned = [output.clone(), output + 0, output.max(-1).values, output.to(torch.float64), copy.deepcopy(output)]
    assert all(isinstance(view, BorrowedTensor) for view in views)
    assert all(type(tensor) is torch.Tensor for tensor in owned)
    kept = [tensor.clone() for tensor in owned]
    runner.run(engine.batch([7, 7]))
    for view in views:
        with pytest.raises(dg.ReplayError, match="stale-output"):
            view.sum()
    assert all(torch.equal(one, other) for one, other in zip(owned, kept, strict=True))
    assert torch.equal(pickle.loads(pickle.dumps(owned[0])), kept[0])


def test_what_is_no_element_can_be_asked_at_any_time(runner: Any, engine: ToyEngine) -> None:
    output = runner.run(engine.batch([3, 5]))
    runner.run(engine.batch([3]))
    assert (output.shape, output.dtype, output.device.type, len(output)) == ((2, 32), torch.float32, "cpu", 2)
    assert (output.dim(), output.size(0), output.numel(), output.is_contiguous()) == (2, 2, 64, True)
    assert output.data_ptr() != 0


def test_a_result_without_a_storage_is_as_of_an_ordinary_tensor(runner: Any, engine: ToyEngine) -> None:
    borrowed = runner.run(engine.batch([1, 2]))
    assert torch.equal(borrowed.to_sparse().to_dense(), borrowed)
    runner.run(engine.batch([1, 2]))
    with pytest.raises(dg.ReplayError, match=r"\[stale-output\]"):
        borrowed.to_sparse()


def test_the_error_says_whose_output_it_was_and_what_overwrote_it(runner: Any, engine: ToyEngine) -> None:
    output = runner.run(engine.batch([3, 5]))
    generation = runner.backend.graph_pool.generation
    runner.run(engine.batch([3, 5, 2]))
    with pytest.raises(dg.ReplayError) as caught:
        output.sum()
    assert str(caught.value) == textwrap.dedent(
        f"""\
        decode: an output of bucket 2 is read too late: it is of generation {generation} of its graph memory pool, and \
the pool is at {generation + 1}: a later replay or capture there has overwritten it [stale-output]

        hint: read it before the next step, copy it, or make the runner with `clone_outputs=True`"""
    )


def test_a_replay_of_another_runner_in_the_pool_ends_the_loan_debugged_or_not(runner: Any, engine: ToyEngine) -> None:
    pool = dg.GraphMemoryPool(runner.adapter)
    prefill = ToyPrefill(max_bs=4)
    prefill_config = dg.CudaGraphConfig(prefill={"backend": "breakable", "bs": [8]})
    with (
        dg.PrefillCudaGraphRunner(prefill, config=prefill_config) as other,
        dg.PrefillCudaGraphRunner(prefill, config=prefill_config, graph_pool=pool) as apart,
    ):
        output = runner.run(engine.batch([3, 5]))
        apart.capture()
        apart.run(prefill.chunks([(1, 0, 5)]))
        output.sum()
        other.capture()
        with pytest.raises(dg.ReplayError, match="stale-output"):
            output.sum()
        output = runner.run(engine.batch([3, 5]))
        other.run(prefill.chunks([(1, 0, 5)]))
        with pytest.raises(dg.ReplayError, match="stale-output"):
            output.sum()


def test_eager_steps_of_the_runner_leave_outputs_readable(runner: Any, engine: ToyEngine) -> None:
    output = runner.run(engine.batch([3, 5]))
    batch = engine.batch([3] * 5, rows=[1, 2, 3, 4, 4])
    assert runner.can_run(batch).code == "above-largest"
    assert type(runner.run(batch)) is torch.Tensor
    output.sum()


def test_an_output_cannot_be_read_once_its_graph_is_gone() -> None:
    engine = ToyEngine(max_bs=4)
    runner = dg.DecodeCudaGraphRunner(engine, config=config(bs=[4]), debug_outputs=True)
    for drop in (lambda: runner.drop_graph(dg.ShapeKey(4)), runner.close):
        runner.capture()
        output = runner.run(engine.batch([3, 5]))
        drop()
        with pytest.raises(dg.ReplayError, match="the graph was dropped since") as caught:
            output.tolist()
        assert caught.value.code == "stale-output"


def test_an_output_stays_readable_when_a_graph_that_ran_before_it_is_dropped() -> None:
    engine = ToyEngine(max_bs=4)
    with dg.DecodeCudaGraphRunner(engine, config=config(bs=[2, 4]), debug_outputs=True) as runner:
        runner.capture()
        for _ in range(2):
            runner.run(engine.batch([3]))
        batch = engine.batch([3, 5, 2])
        output, want = runner.run(batch), engine.forward(batch)
        runner.drop_graph(dg.ShapeKey(2))
        assert torch.equal(output, want)


def test_an_output_stays_readable_when_another_runner_of_the_pool_goes_without_being_closed() -> None:
    engine, pool = ToyEngine(max_bs=4), dg.GraphMemoryPool(dg.get_device_adapter("cpu"))
    gone, runner = (
        dg.DecodeCudaGraphRunner(engine, config=config(bs=[4]), graph_pool=pool, debug_outputs=True) for _ in range(2)
    )
    for each in (gone, runner):
        each.capture()
    gone.run(engine.batch([3]))
    batch = engine.batch([3, 5])
    output, want = runner.run(batch), engine.forward(batch)
    del gone, each
    gc.collect()
    assert torch.equal(output, want)
    runner.close()


def test_every_tensor_of_a_nested_output_is_borrowed_and_the_rest_passes_through() -> None:
    engine = Nested(max_bs=4)
    with dg.DecodeCudaGraphRunner(engine, config=config(bs=[4]), debug_outputs=True) as runner:
        runner.capture()
        output = runner.run(engine.batch([3, 5]))
        assert type(output) is dict
        assert output["pair"][1] == "label"
        runner.run(engine.batch([3, 5]))
        for tensor in (output["logits"], output["pair"][0]):
            with pytest.raises(dg.ReplayError, match="stale-output"):
                tensor.sum()


def test_a_borrowed_output_can_be_the_next_batchs_input(runner: Any, engine: ToyEngine) -> None:
    batch = engine.batch([3, 5])
    tokens = runner.run(batch)[:, 0].to(torch.int64).clamp(0, 31)
    batch.input_ids = tokens
    want = engine.forward(batch)
    assert torch.equal(runner.run(batch), want)


def test_debugging_is_off_unless_it_is_asked_for_by_argument_or_environment(
    monkeypatch: pytest.MonkeyPatch, engine: ToyEngine
) -> None:
    def kind_of_output(**options: Any) -> type:
        with dg.DecodeCudaGraphRunner(engine, config=config(bs=[2]), **options) as runner:
            runner.capture()
            return type(runner.run(engine.batch([3])))

    monkeypatch.delenv("DEVICEGRAPH_DEBUG", raising=False)
    assert kind_of_output() is torch.Tensor
    monkeypatch.setenv("DEVICEGRAPH_DEBUG", "1")
    assert kind_of_output() is BorrowedTensor
    assert kind_of_output(debug_outputs=False) is torch.Tensor
    assert kind_of_output(clone_outputs=True) is torch.Tensor, "an owned output has no time to be read in"
    monkeypatch.setenv("DEVICEGRAPH_DEBUG", "0")
    assert kind_of_output() is torch.Tensor
