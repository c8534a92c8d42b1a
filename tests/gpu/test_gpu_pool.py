"""Shared and adopted input buffers on a GPU: one memory where it should be one, no source in written memory."""

from __future__ import annotations

import gc

import pytest
import torch

import devicegraph as dg
from engines import ToyEngine, eager


def registry(max_bs: int, *, share_pool: bool = True, source: object = None) -> dg.CudaGraphBufferRegistry:
    return dg.build_decode_registry(
        device="cuda",
        max_bs=max_bs,
        max_num_token=max_bs,
        seq_len_fill_value=1,
        cache_loc_dtype=torch.int64,
        share_pool=share_pool,
        source=source,
    )


def addresses(of: dg.CudaGraphBufferRegistry) -> dict[str, int]:
    return {slot.name: slot.buffer.data_ptr() for slot in of.slots}


def test_registries_of_one_size_share_memory_whatever_the_device_is_called_and_others_have_their_own() -> None:
    first, second, larger = registry(8), registry(8), registry(16)
    assert addresses(first) == addresses(second)
    assert not set(addresses(first).values()) & set(addresses(larger).values())
    named = torch.zeros(8, dtype=torch.int64, device="cuda:0")
    assert dg.share_input_buffer("input_ids", named).data_ptr() == addresses(first)["input_ids"]
    assert registry(8, share_pool=False).get_slot("input_ids").buffer.data_ptr() != addresses(first)["input_ids"]


def test_shared_memory_is_forgotten_with_its_last_user() -> None:
    before = str(dg.input_buffer_pool)
    users = [registry(24), registry(24)]
    assert "input_ids" in str(dg.input_buffer_pool)
    del users
    gc.collect()
    assert str(dg.input_buffer_pool) == before


def test_two_runners_on_shared_buffers_take_turns() -> None:
    pool = dg.GraphMemoryPool(dg.get_device_adapter("cuda"))
    engines = [ToyEngine("cuda", max_bs=8), ToyEngine("cuda", max_bs=8)]
    runners = [
        dg.DecodeCudaGraphRunner(engine, config=dg.CudaGraphConfig(), registry=registry(8), graph_pool=pool)
        for engine in engines
    ]
    for runner in runners:
        runner.capture()
    for seed, lengths in enumerate([[3] * 8, [4, 2, 5], [6], [2] * 5]):
        for engine, runner in zip(engines, runners, strict=True):
            batch = engine.batch(lengths, seed)
            assert torch.equal(runner.run(batch), eager(engine, batch))
    for runner in runners:
        runner.close()


def test_an_engines_own_buffers_are_adopted_and_filled() -> None:
    class Buffers:
        input_ids = torch.full((8,), 7, device="cuda")

    own = registry(8, share_pool=False, source=Buffers)
    assert own.get_slot("input_ids").buffer is Buffers.input_ids
    assert Buffers.input_ids.tolist() == [7] * 8
    own.fill_from(
        {"input_ids": torch.tensor([1, 2], device="cuda")}, raw_bs=2, padded_bs=4, raw_num_tokens=2, padded_num_tokens=4
    )
    assert Buffers.input_ids.tolist() == [1, 2, 7, 7, 7, 7, 7, 7]


def test_a_source_in_memory_that_the_fill_writes_is_refused_and_a_slots_own_rows_are_not() -> None:
    own = registry(8, share_pool=False)
    sizes = {"raw_bs": 2, "padded_bs": 4, "raw_num_tokens": 2, "padded_num_tokens": 4}
    positions = own.get_slot("positions").buffer
    own.fill_from({"positions": positions[:2]}, **sizes)
    with pytest.raises(dg.SlotError) as caught:
        own.fill_from({"positions": positions[1:3]}, **sizes)
    assert caught.value.code == "source-overlap"
    with pytest.raises(dg.SlotError) as caught:
        own.fill_from({"out_cache_loc": positions[:2]}, **sizes)
    assert caught.value.code == "source-overlap"


def test_a_source_on_another_device_is_refused_before_anything_is_written() -> None:
    own = registry(8, share_pool=False)
    before = {slot.name: slot.buffer.clone() for slot in own.slots}
    with pytest.raises(dg.SlotError) as caught:
        own.fill_from(
            {"input_ids": torch.tensor([1], device="cuda"), "positions": torch.tensor([1])},
            raw_bs=1,
            padded_bs=4,
            raw_num_tokens=1,
            padded_num_tokens=4,
        )
    assert (caught.value.code, caught.value.slot) == ("wrong-device", "positions")
    assert all(torch.equal(slot.buffer, before[slot.name]) for slot in own.slots)
