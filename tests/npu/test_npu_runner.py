"""The decode runner on an NPU, with an engine whose operators keep lengths from the host."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import devicegraph as dg
from lengths import LengthsEngine, decode, fault

# torch_npu copies host tensors of a call with `deepcopy`, and torch warns of the way it does so.
pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")


def _check(runner: Any, engine: LengthsEngine, lengths: list[int], first_id: int = 1) -> None:
    batch = engine.batch(lengths, first_id)
    assert torch.equal(runner.run(batch).cpu(), engine.expected(batch))


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_of_changing_buckets_are_right_without_a_wait_in_between(overlap: bool) -> None:
    engine: Any = LengthsEngine()
    engine.overlap_input_updates = overlap
    draw = random.Random(0)
    with dg.DecodeCudaGraphRunner(engine, config=decode(max_bs=8), clone_outputs=True) as runner:
        assert len(runner.capture().captured) == 4
        steps = []
        for step in range(60):
            batch = engine.batch([draw.randint(1, 9) for _ in range(draw.randint(1, 8))], first_id=step)
            steps.append((batch, runner.run(batch)))
        for batch, output in steps:
            assert torch.equal(output.cpu(), engine.expected(batch))
        metrics = runner.metrics()
        assert sum(metrics.replays.values()) == 60
        assert metrics.eager == {}


def test_an_engine_may_have_updates_queued_on_the_device() -> None:
    engine: Any = LengthsEngine()
    engine.queue_input_updates = True
    with dg.DecodeCudaGraphRunner(engine, config=decode(max_bs=2)) as runner:
        runner.capture()
        assert runner.backend.queue_input_updates
        for lengths in ([3, 4], [5, 6], [7]):
            _check(runner, engine, lengths)  # reads the result, so that no step is still to come


def test_lengths_are_padded_to_the_bucket_with_the_fill_value() -> None:
    engine: Any = LengthsEngine()
    engine.seq_len_fill_value = 7
    seen: list[list[int]] = []
    engine.input_updates = (
        dg.InputUpdate("lengths", values=lambda batch: seen.append(batch.seq_lens_cpu.tolist()) or seen[-1]),
    )
    with dg.DecodeCudaGraphRunner(engine, config=decode(max_bs=8)) as runner:
        runner.capture()
        for lengths in ([3, 4, 5], [9] * 8, [2], [3, 4, 5, 6, 1]):
            _check(runner, engine, lengths)
    assert seen == [[3, 4, 5, 7], [9] * 8, [2], [3, 4, 5, 6, 1, 7, 7, 7]]


def test_lengths_on_the_host_and_on_the_device_have_the_buckets_length() -> None:
    engine: Any = LengthsEngine()
    with dg.DecodeCudaGraphRunner(engine, config=decode(max_bs=8)) as runner:
        runner.capture()
        batch = engine.batch([3, 4, 5])
        batch.seq_lens = batch.seq_lens_cpu.to(engine.device)
        static = runner.replay_prepare(batch)
        assert static.seq_lens_cpu.tolist() == static.seq_lens.tolist() == [3, 4, 5, 1]


def test_cache_locations_are_int32_and_an_engine_may_say_otherwise() -> None:
    engine: Any = LengthsEngine()
    for dtype in (torch.int32, torch.int64):
        with dg.DecodeCudaGraphRunner(engine, config=decode(max_bs=2)) as runner:
            assert runner.buffer_registry.get_slot("out_cache_loc").buffer.dtype == dtype
        engine.cache_loc_dtype = torch.int64


def test_runners_share_no_input_buffers() -> None:
    engine = LengthsEngine()
    with (
        dg.DecodeCudaGraphRunner(engine, config=decode(max_bs=2)) as one,
        dg.DecodeCudaGraphRunner(engine, config=decode(max_bs=2)) as other,
    ):
        registries = [one.buffer_registry, other.buffer_registry]
        sizes: dict[str, Any] = {"max_bs": 2, "max_num_token": 2, "seq_len_fill_value": 1, "share_pool": True}
        # Nor do those that ask for it: no ordering is made between the streams that would use them.
        registries += [dg.build_decode_registry(device=engine.device, **sizes) for _ in range(2)]
        places = [slot.buffer.data_ptr() for r in registries for slot in r.slots if not slot.is_host]
        assert len(set(places)) == len(places)


def test_prefill_is_a_configuration_error_that_says_so() -> None:
    engine: Any = LengthsEngine()
    with pytest.raises(dg.ConfigError) as caught:
        dg.PrefillCudaGraphRunner(engine, config=dg.CudaGraphConfig())
    assert str(caught.value) == (
        "prefill.backend: `tc_piecewise`: device `npu` captures graphs of decode only [phase-not-on-device]\n\n"
        "hint: set it to `disabled`, or resolve the configuration with the fact `device`, which does it"
    )
    resolved = dg.resolve_config(dg.CudaGraphConfig(), {"device": "npu"})
    with dg.PrefillCudaGraphRunner(engine, config=resolved) as runner:
        assert runner.can_run(engine.batch([1])).code == "disabled"


@pytest.mark.parametrize("backend", ["breakable", "tc_piecewise"])
def test_decode_is_captured_whole_or_not_at_all(backend: str) -> None:
    with pytest.raises(dg.BackendError) as caught:
        dg.DecodeCudaGraphRunner(LengthsEngine(), config=decode(backend=backend, max_bs=2))
    assert caught.value.code == ("backend-not-available")
    assert caught.value.hint == "on `npu` there are: full, disabled"


@pytest.mark.parametrize(("streams", "sizes"), [(1, [1, 2, 4, 8]), (600, [1, 4, 8]), (900, [1, 8]), (1800, [8])])
def test_buckets_are_cut_to_the_streams_of_the_device(streams: int, sizes: list[int]) -> None:
    engine: Any = LengthsEngine()
    engine.streams_per_graph = streams
    with dg.DecodeCudaGraphRunner(engine, config=decode(max_bs=8)) as runner:
        assert {min(runner.buckets), max(runner.buckets)} == {sizes[0], sizes[-1]}
        assert len(runner.buckets) == len(sizes)
        assert dg.get_batch_sizes_to_capture(engine, config=decode(max_bs=8))[0] == list(runner.buckets)
        runner.capture()
        _check(runner, engine, [3, 5])


def test_a_failing_update_ends_its_step_only() -> None:
    engine = LengthsEngine()
    with dg.DecodeCudaGraphRunner(engine, config=decode(max_bs=4)) as runner:
        runner.capture()
        _check(runner, engine, [3, 4])
        fault.error = ValueError("in the operator")
        try:
            with pytest.raises(dg.ReplayError) as caught:
                runner.run(engine.batch([5, 6]))
        finally:
            fault.error = None
        assert caught.value.code == "update-failed"
        for lengths in ([7, 8], [1, 2, 3], [4, 4]):
            _check(runner, engine, lengths)


def test_a_graph_that_an_overlapping_update_lost_is_run_eagerly() -> None:
    engine: Any = LengthsEngine()
    engine.overlap_input_updates = True
    with dg.DecodeCudaGraphRunner(engine, config=decode(max_bs=4)) as runner:
        runner.capture()
        fault.error = ValueError("in the operator")
        try:
            with pytest.raises(dg.ReplayError):
                runner.run(engine.batch([5, 6]))
        finally:
            fault.error = None
        assert runner.can_run(engine.batch([5, 6])).code == "backend-refused"
        _check(runner, engine, [5, 6])
        _check(runner, engine, [5, 6, 7])
        assert runner.metrics().eager == {"backend-refused": 1}
