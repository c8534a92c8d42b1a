"""The usual registries: which fields they have, with which padding, and whose buffers."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from devicegraph import (
    InputBufferPool,
    SlotError,
    build_decode_registry,
    build_eager_registry,
    build_prefill_registry,
)
from layout_tables import DECODE, PREFILL, SIZES, table


def test_decode_has_its_fields_with_the_padding_that_each_needs() -> None:
    registry = build_decode_registry(**SIZES, seq_len_fill_value=1)
    assert table(registry) == DECODE
    assert [slot.name for slot in registry.slots if slot.is_host] == ["seq_lens_cpu"]
    assert (registry.max_bs, registry.max_num_tokens) == (4, 8)


def test_prefill_has_its_fields_all_padded_with_zeros() -> None:
    assert table(build_prefill_registry(**SIZES)) == PREFILL


def test_eager_has_decodes_fields_with_padding_that_is_safe_to_compute_on() -> None:
    assert table(build_eager_registry(**SIZES)) == {**DECODE, "input_ids": PREFILL["input_ids"]}


def test_the_dtype_of_cache_locations_and_the_fill_of_lengths_are_the_engines() -> None:
    registries = [
        build_decode_registry(**SIZES, seq_len_fill_value=0, cache_loc_dtype=torch.int32),
        build_prefill_registry(**SIZES, cache_loc_dtype=torch.int32),
        build_eager_registry(**SIZES, seq_len_fill_value=0, cache_loc_dtype=torch.int32),
    ]
    for registry in registries:
        dtypes = {slot.name: slot.buffer.dtype for slot in registry.slots}
        assert dtypes.pop("out_cache_loc") == torch.int32
        assert set(dtypes.values()) == {torch.int64}
    for registry in (registries[0], registries[2]):
        assert registry.get_slot("seq_lens").buffer.tolist() == [0] * 4


@pytest.mark.parametrize("kind", ["object", "mapping"])
def test_an_engines_own_buffers_are_adopted_and_the_rest_allocated(kind: str) -> None:
    own = {"input_ids": torch.arange(8), "mrope_positions": torch.ones(3, 8, dtype=torch.int64), "seq_lens": None}
    source = own if kind == "mapping" else types.SimpleNamespace(**own)
    registry = build_decode_registry(**SIZES, seq_len_fill_value=1, source=source)
    assert registry.get_slot("input_ids").buffer is own["input_ids"]
    assert registry.get_slot("mrope_positions").buffer is own["mrope_positions"]
    assert own["input_ids"].tolist() == list(range(8))
    assert registry.get_slot("seq_lens").buffer.tolist() == [1] * 4


def test_an_engines_buffer_that_does_not_fit_is_named() -> None:
    with pytest.raises(SlotError) as caught:
        build_decode_registry(**SIZES, seq_len_fill_value=1, source={"positions": torch.zeros(9, dtype=torch.int64)})
    assert str(caught.value) == "slot `positions`: the bound tensor has shape [9], expected [8] [bound-shape]"


def test_phases_share_memory_through_the_pool_and_it_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = InputBufferPool()
    monkeypatch.setattr("devicegraph.registry.input_buffer_pool", pool)
    square: dict[str, Any] = {**SIZES, "max_bs": 8, "share_pool": True}
    decode, prefill = build_decode_registry(**square, seq_len_fill_value=1), build_prefill_registry(**square)
    for name in PREFILL:
        assert decode.get_slot(name).buffer.data_ptr() == prefill.get_slot(name).buffer.data_ptr()
    eager = build_eager_registry(**square)
    assert eager.get_slot("positions").buffer.data_ptr() == prefill.get_slot("positions").buffer.data_ptr()
    assert str(pool).split("\n")[1].endswith("decode [8], prefill [8], eager [8]")
    private = build_prefill_registry(**{**square, "share_pool": False})
    assert private.get_slot("positions").buffer.data_ptr() != prefill.get_slot("positions").buffer.data_ptr()


def test_a_step_with_several_tokens_a_request_is_padded_along_both_axes() -> None:
    registry = build_decode_registry(device="cpu", max_bs=4, max_num_token=12, seq_len_fill_value=1)
    for slot in registry.slots:
        slot.buffer.fill_(99)
    batch = {"positions": torch.arange(1, 10), "req_pool_indices": torch.tensor([5, 6, 7])}
    registry.fill_from(batch, raw_bs=3, padded_bs=4, raw_num_tokens=9, padded_num_tokens=12)
    assert registry.get_slot("positions").buffer.tolist() == [*range(1, 10), 0, 0, 0]
    assert registry.get_slot("req_pool_indices").buffer.tolist() == [5, 6, 7, 0]


def test_an_eager_step_shows_its_own_rows_and_what_it_lacks_stays_absent() -> None:
    registry = build_eager_registry(**SIZES)
    batch = types.SimpleNamespace(
        batch_size=2, input_ids=torch.arange(5), seq_lens=torch.tensor([2, 3]), out_cache_loc=None
    )
    sizes = {"raw_bs": 2, "padded_bs": 2, "raw_num_tokens": 5, "padded_num_tokens": 5}
    registry.fill_from(batch, **sizes)
    shown = registry.extract_buffer(padded_bs=2, padded_num_tokens=5, forward_batch_template=batch)
    assert (shown.input_ids.tolist(), shown.seq_lens.tolist(), shown.out_cache_loc) == ([0, 1, 2, 3, 4], [2, 3], None)
