"""What padded rows hold: mistakes that graph runtimes of serving engines have made in public, made impossible."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest
import torch

from devicegraph import (
    CudaGraphBufferRegistry,
    FillContext,
    GraphSlot,
    PaddingPolicy,
    SlotError,
    build_decode_registry,
)

FILL_SENTINEL, ZERO = PaddingPolicy.FILL_SENTINEL, PaddingPolicy.ZERO
BUCKETS = (1, 2, 4, 8)


def registry_of(*slots: GraphSlot, max_num_tokens: int = 8, share_pool: bool = False) -> CudaGraphBufferRegistry:
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=8, max_num_tokens=max_num_tokens, share_pool=share_pool)
    for slot in slots:
        registry.register_slot(slot)
    return registry


def sizes(raw: int, padded: int) -> dict[str, int]:
    return {"raw_bs": raw, "padded_bs": padded, "raw_num_tokens": raw, "padded_num_tokens": padded}


def by_token(name: str, policy: PaddingPolicy, **options: Any) -> GraphSlot:
    return GraphSlot(name, lambda bs, tokens: (tokens,), torch.int64, padding_policy=policy, **options)


# Sentinels


def test_a_sentinel_is_the_slots_own_and_nothing_indexes_with_it() -> None:
    skipped = by_token("skipped", FILL_SENTINEL, pad_value=-1)
    marked = by_token("marked", FILL_SENTINEL, pad_value=-7)
    registry = registry_of(skipped, marked)
    rows = torch.tensor([3, 4, 5])
    registry.fill_from({"skipped": rows, "marked": rows}, **sizes(3, 8))
    assert skipped.buffer.tolist() == [3, 4, 5, -1, -1, -1, -1, -1]
    assert marked.buffer.tolist() == [3, 4, 5, -7, -7, -7, -7, -7]


def test_a_padded_batch_scattered_by_zero_locations_touches_its_rows_and_row_0_only() -> None:
    registry = build_decode_registry(device="cpu", max_bs=8, max_num_token=8, seq_len_fill_value=1)
    locations = registry.get_slot("out_cache_loc")
    cache = torch.zeros(10)
    registry.fill_from({"out_cache_loc": torch.tensor([7, 8, 9, 4, 5, 6, 1, 2])}, **sizes(8, 8))
    registry.fill_from({"out_cache_loc": torch.tensor([3, 5])}, **sizes(2, 8))
    cache[locations.slice_for(8, 8)] = 1.0
    assert cache.nonzero().flatten().tolist() == [0, 3, 5]


@pytest.mark.parametrize("fill_value", [0, 1])
def test_padded_lengths_are_the_backends_fill_value_in_every_bucket_from_the_start(fill_value: int) -> None:
    registry = build_decode_registry(device="cpu", max_bs=8, max_num_token=8, seq_len_fill_value=fill_value)
    names = ("seq_lens", "seq_lens_cpu")
    for bucket in BUCKETS:
        views = registry.views(padded_bs=bucket, padded_num_tokens=bucket)
        assert all(views[name].tolist() == [fill_value] * bucket for name in names), "a capture sees it too"
    registry.fill_from({name: torch.arange(11, 19) for name in names}, **sizes(8, 8))
    registry.fill_from({name: torch.arange(21, 24) for name in names}, **sizes(3, 8))
    for name in names:
        assert registry.get_slot(name).buffer.tolist() == [21, 22, 23] + [fill_value] * 5


# Shapes


def test_columns_beyond_a_shorter_row_are_padded_not_left_from_a_longer_one() -> None:
    for policy in PaddingPolicy:
        pages = GraphSlot(
            "pages", lambda bs, tokens: (bs, 6), torch.int32, axis="bs", padding_policy=policy, pad_value=-1,
            trailing="prefix",
        )  # fmt: skip
        registry = registry_of(pages)
        registry.fill_from({"pages": torch.arange(1, 49, dtype=torch.int32).view(8, 6)}, **sizes(8, 8))
        for rows in (1, 8):
            registry.fill_from({"pages": torch.full((rows, 2), 99, dtype=torch.int32)}, **sizes(rows, 8))
            assert pages.buffer[:rows].tolist() == [[99, 99, -1, -1, -1, -1]] * rows
        with pytest.raises(SlotError) as caught:
            registry.fill_from({"pages": torch.zeros(2, 7, dtype=torch.int32)}, **sizes(2, 8))
        assert str(caught.value) == "slot `pages`: the source is 7 wide, the slot 6 [too-wide]"
        assert pages.buffer[0].tolist() == [99, 99, -1, -1, -1, -1]


def test_each_plane_of_rotary_positions_is_padded_and_planes_stay_distinct() -> None:
    registry = build_decode_registry(device="cpu", max_bs=8, max_num_token=8, seq_len_fill_value=1)
    slot = registry.get_slot("mrope_positions")
    registry.fill_from({"mrope_positions": torch.arange(1, 16).view(3, 5)}, **sizes(5, 8))
    registry.fill_from({"mrope_positions": torch.tensor([[1, 2], [3, 4], [5, 6]])}, **sizes(2, 4))
    view = slot.slice_for(4, 4)
    assert view.tolist() == [[1, 2, 0, 0], [3, 4, 0, 0], [5, 6, 0, 0]]
    assert (tuple(view.shape), view.data_ptr()) == ((3, 4), slot.buffer.data_ptr())
    for flat in (torch.arange(2), torch.arange(6)):
        with pytest.raises(SlotError, match="wrong-shape"):
            registry.fill_from({"mrope_positions": flat}, **sizes(2, 4))
    assert view.tolist() == [[1, 2, 0, 0], [3, 4, 0, 0], [5, 6, 0, 0]]


@pytest.mark.parametrize("lengths", [[0, 0], [4, 7]])
def test_padded_encoder_lengths_do_not_make_a_uniform_batch_mixed(lengths: list[int]) -> None:
    encoder_lens = GraphSlot(
        "encoder_lens", lambda bs, tokens: (bs,), torch.int32, axis="bs", padding_policy=FILL_SENTINEL,
        pad_value=min(lengths),
    )  # fmt: skip
    registry = registry_of(encoder_lens)
    registry.fill_from({"encoder_lens": torch.full((8,), 5, dtype=torch.int32)}, **sizes(8, 8))
    registry.fill_from({"encoder_lens": torch.tensor(lengths, dtype=torch.int32)}, **sizes(2, 4))
    padded = encoder_lens.slice_for(4, 4)
    assert padded.tolist() == lengths + [min(lengths)] * 2
    assert bool((padded > 0).all()) == bool((padded > 0).any())


def proxy(key: str) -> GraphSlot:
    def source(batch: Any, context: FillContext) -> torch.Tensor | None:
        return None if context.pp_proxy_tensors is None else context.pp_proxy_tensors[key]

    return GraphSlot(
        f"pp_proxy_tensors.{key}", lambda bs, tokens: (tokens // 4, 2), torch.float32, source_fn=source,
        slice_fn=lambda buffer, n: buffer[: n // 4], padding_policy=ZERO,
    )  # fmt: skip


def test_rows_that_are_a_quarter_of_the_bucket_are_cut_and_filled_so() -> None:
    hidden, residual = proxy("hidden"), proxy("residual")
    registry = registry_of(hidden, residual, max_num_tokens=32)
    for slot in (hidden, residual):
        assert tuple(slot.slice_for(8, 32).shape) == (8, 2)
        assert tuple(slot.slice_for(8, 8).shape) == (2, 2)
        slot.buffer.fill_(5)
    sent = {"hidden": torch.full((3, 2), 1.0), "residual": torch.full((4, 2), 2.0)}
    registry.fill_from(
        {"other": 0}, **{**sizes(8, 8), "raw_num_tokens": 12, "padded_num_tokens": 16}, pp_proxy_tensors=sent
    )
    assert hidden.buffer[:, 0].tolist() == [1, 1, 1, 0, 5, 5, 5, 5]
    assert residual.buffer[:, 0].tolist() == [2, 2, 2, 2, 5, 5, 5, 5]
    registry.fill_from({"other": 0}, **sizes(8, 8))
    assert hidden.buffer[:, 0].tolist() == [1, 1, 1, 0, 5, 5, 5, 5], "a first stage is sent nothing"


def test_a_bucket_without_whole_rows_is_refused_at_registration_and_at_each_use() -> None:
    with pytest.raises(SlotError) as caught:
        registry_of(proxy("hidden"), max_num_tokens=30)
    told = "slot `pp_proxy_tensors.hidden`: a bucket of {} is not a multiple of 4 [bucket-not-divisible]"
    assert str(caught.value).split("\n")[0] == told.format(30)
    registry = registry_of(proxy("hidden"), max_num_tokens=32)
    odd = {"padded_bs": 8, "padded_num_tokens": 18}
    for use in (
        lambda: registry.views(**odd),
        lambda: registry.slots[0].slice_for(8, 18),
        lambda: registry.fill_from({}, raw_bs=0, raw_num_tokens=0, **odd),
        lambda: registry.extract_buffer(forward_batch_template={}, **odd),
    ):
        with pytest.raises(SlotError) as caught:
            use()
        assert str(caught.value).split("\n")[0] == told.format(18)


def test_boundaries_have_one_row_more_than_requests() -> None:
    boundaries = GraphSlot(
        "cu_seqlens", lambda bs, tokens: (bs + 1,), torch.int32, axis="bs", padding_policy=FILL_SENTINEL, pad_value=9,
        slice_fn=lambda buffer, n: buffer[: n + 1],
    )  # fmt: skip
    registry = registry_of(boundaries)
    registry.fill_from({"cu_seqlens": torch.tensor([0, 2, 5], dtype=torch.int32)}, **sizes(2, 4))
    assert boundaries.buffer.tolist() == [0, 2, 5, 9, 9, 9, 9, 9, 9]
    assert tuple(boundaries.slice_for(8, 8).shape) == (9,)


# Types and presence


def test_a_declared_dtype_is_what_every_view_has_and_nothing_is_narrowed_silently() -> None:
    registry = build_decode_registry(device="cpu", max_bs=8, max_num_token=8, seq_len_fill_value=1)
    big = torch.tensor([2**31 + 5])
    batch = types.SimpleNamespace(seq_lens=big, seq_lens_cpu=big, batch_size=1, positions=None)
    registry.fill_from(batch, **sizes(1, 1))
    shown = registry.extract_buffer(padded_bs=1, padded_num_tokens=1, forward_batch_template=batch)
    views = registry.views(padded_bs=1, padded_num_tokens=1)
    for view in (shown.seq_lens, shown.seq_lens_cpu, views["seq_lens"], views["seq_lens_cpu"]):
        assert (view.dtype, view.tolist()) == (torch.int64, [2**31 + 5])
    assert shown.positions is None, "absent, and not the buffer's zeros"

    narrow = GraphSlot("lens", lambda bs, tokens: (bs,), torch.int32, axis="bs")
    with pytest.raises(SlotError, match="narrowing-cast"):
        registry_of(narrow).fill_from({"lens": big}, **sizes(1, 1))
    assert narrow.buffer[0].item() == 0


# Inference mode

MODES = {"normal": contextlib.nullcontext, "no grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("share_pool", [False, True], ids=["private", "pooled"])
@pytest.mark.parametrize("made", MODES)
@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("second", MODES)
def test_buffers_are_ordinary_whatever_mode_made_or_filled_them(
    share_pool: bool, made: str, first: str, second: str
) -> None:
    def slots() -> list[GraphSlot]:
        shape: Any = lambda bs, tokens: (tokens,)  # noqa: E731
        value = lambda context: context.raw_num_tokens  # noqa: E731
        return [
            GraphSlot("hidden", shape, torch.float32, padding_policy=ZERO),
            GraphSlot("ids", shape, torch.int64, padding_policy=ZERO),
            GraphSlot("count", lambda bs, tokens: (1,), torch.int64, axis="none", value_fn=value),
        ]

    with MODES[made]():
        registry = registry_of(*slots(), share_pool=share_pool)
    source = torch.ones(3, requires_grad=True)
    for mode in (first, second, first):
        with MODES[mode]():
            other = registry_of(*slots(), share_pool=share_pool)
            ids = torch.arange(3)
            for each in (other, registry):
                each.fill_from({"hidden": source * 2, "ids": ids}, **sizes(3, 6))
                each.reset_index_buffers()
                each.fill_from({"hidden": source, "ids": ids}, **sizes(3, 6))
    for slot in registry.slots:
        assert not slot.buffer.is_inference()
        assert not slot.buffer.requires_grad
        assert slot.buffer.grad_fn is None
        slot.buffer.add_(0)
    assert registry.get_slot("hidden").buffer.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert registry.get_slot("ids").buffer.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert registry.get_slot("count").buffer.tolist() == [3]


@pytest.mark.parametrize("step", [1, 2], ids=["contiguous", "strided"])
def test_a_source_that_needs_gradients_gives_a_buffer_no_history(step: int) -> None:
    registry = registry_of(GraphSlot("hidden", lambda bs, tokens: (tokens,), torch.float32, padding_policy=ZERO))
    buffer = registry.slots[0].buffer
    source = torch.ones(3 * step, requires_grad=True)
    with torch.enable_grad():
        registry.fill_from({"hidden": (source * 2)[::step]}, **sizes(3, 6))
    assert (buffer.requires_grad, buffer.grad_fn) == (False, None)
    assert buffer.tolist() == [2, 2, 2, 0, 0, 0, 0, 0]
