"""The input-buffer pool: one memory for one kind of buffer, where no user can tell, for as long as it is used."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from devicegraph import (
    CudaGraphBufferRegistry,
    ForwardInputBuffers,
    GraphSlot,
    InputBufferPool,
    PaddingPolicy,
    SlotError,
    share_input_buffer,
)
from odd_tensors import not_dense, without_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

KEEP_PAD, FILL_SENTINEL, ZERO = PaddingPolicy.KEEP_PAD, PaddingPolicy.FILL_SENTINEL, PaddingPolicy.ZERO
FOREACH_COPY, FILL_ONCE = PaddingPolicy.FOREACH_COPY, PaddingPolicy.FILL_ONCE


@pytest.fixture(autouse=True)
def process_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[InputBufferPool]:
    """A pool of the test's own in place of the process's; the test must leave nothing in it."""
    fresh = InputBufferPool()
    for module in ("pool", "registry"):
        monkeypatch.setattr(f"devicegraph.{module}.input_buffer_pool", fresh)
    yield fresh
    gc.collect()
    assert len(fresh) == 0, str(fresh)


def ids(size: int = 8, **options: Any) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int64, **options)


def slot(policy: PaddingPolicy, pad_value: int = 0, name: str = "lens", **options: Any) -> GraphSlot:
    return GraphSlot(
        name, lambda bs, tokens: (tokens,), torch.int64, padding_policy=policy, pad_value=pad_value, **options
    )


def registry_of(*slots: GraphSlot, max_num_tokens: int = 8) -> CudaGraphBufferRegistry:
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=8, max_num_tokens=max_num_tokens, share_pool=True)
    for each in slots:
        registry.register_slot(each)
    return registry


def fill(registry: CudaGraphBufferRegistry, raw: int, padded: int, **batch: torch.Tensor) -> None:
    registry.fill_from(
        batch or {"nothing": 0}, raw_bs=raw, padded_bs=padded, raw_num_tokens=raw, padded_num_tokens=padded
    )


# Which buffers are one


def test_the_first_buffer_stays_and_later_ones_become_views_of_it() -> None:
    first = ids()
    assert share_input_buffer("ids", first) is first
    second = share_input_buffer("ids", ids())
    assert second.data_ptr() == first.data_ptr()
    assert share_input_buffer("ids", first) is first, "sharing again changes nothing"
    assert share_input_buffer("ids", second) is second


def test_another_name_size_or_dtype_is_another_memory() -> None:
    buffers = [
        share_input_buffer("ids", ids()),
        share_input_buffer("locs", ids()),
        share_input_buffer("ids", ids(16)),
        share_input_buffer("ids", ids(4)),
        share_input_buffer("ids", ids().int()),
    ]
    assert len({buffer.data_ptr() for buffer in buffers}) == 5
    assert share_input_buffer("ids", ids(16)).data_ptr() == buffers[2].data_ptr(), "whatever the order"


def test_aliases_of_a_dtype_are_one_key() -> None:
    first = share_input_buffer("ids", torch.zeros(8, dtype=torch.long))
    assert share_input_buffer("ids", torch.zeros(8, dtype=torch.int64)).data_ptr() == first.data_ptr()


def test_spellings_of_a_device_are_one_key() -> None:
    registries = [
        CudaGraphBufferRegistry(device=device, max_bs=8, max_num_tokens=8, share_pool=True)
        for device in ("cpu", "cpu:0")
    ]
    slots = [registry.register_slot(slot(ZERO)) for registry in registries]
    slots.append(registries[0].register_slot(slot(ZERO, name="other", device="cpu:0")))
    assert slots[0].buffer.data_ptr() == slots[1].buffer.data_ptr()


def test_each_view_has_its_own_shape() -> None:
    flat = share_input_buffer("x", torch.arange(8))
    square = share_input_buffer("x", torch.zeros(4, 2, dtype=torch.int64))
    assert (tuple(flat.shape), tuple(square.shape)) == ((8,), (4, 2))
    assert square.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("name", "buffer", "told"),
    [
        ("ids", [1], "slot `ids`: a `list` cannot be pooled [not-a-tensor]"),
        (1, torch.zeros(2), "`1` is no name of an input [bad-name]"),
        (None, torch.zeros(2), "`None` is no name of an input [bad-name]"),
        *(
            ("x", tensor, f"slot `x`: a {kind} cannot be pooled [not-a-tensor]")
            for tensor, kind in not_dense().values()
        ),
        *(
            ("x", tensor, "slot `x`: the buffer has no memory [not-a-tensor]")
            for tensor in without_memory(torch.ones(3)).values()
        ),
    ],
)
def test_what_is_no_memory_under_a_name_is_not_pooled(name: Any, buffer: Any, told: str) -> None:
    with pytest.raises(SlotError) as caught:
        share_input_buffer(name, buffer)
    assert str(caught.value).split("\n")[0] == told


def test_a_buffer_made_in_inference_mode_can_be_written_everywhere() -> None:
    with torch.inference_mode():
        first = share_input_buffer("ids", ids())
        second = share_input_buffer("ids", ids())
    for buffer in (first, second):
        buffer.add_(1)
        assert not buffer.is_inference()
    assert second.tolist() == [2] * 8
    with torch.inference_mode():
        first.add_(1)


def test_buffers_that_cannot_be_shared_are_refused() -> None:
    messages = []
    for buffer in (
        torch.zeros(4, 2, dtype=torch.int64).t(),
        torch.zeros(8, requires_grad=True),
        torch.zeros(8, dtype=torch.complex64),
    ):
        with pytest.raises(SlotError) as caught:
            share_input_buffer("x", buffer)
        messages.append(str(caught.value).replace("\n\n", " | "))
    assert messages == [
        "slot `x`: a pooled buffer must be contiguous [not-contiguous] | hint: pass a contiguous tensor",
        "slot `x`: an input buffer has no gradient [requires-grad] | hint: pass `tensor.detach()`",
        "slot `x`: `complex64` is no slot dtype [unsupported-dtype]",
    ]


def test_on_private_devices_every_buffer_is_its_own() -> None:
    assert InputBufferPool().private_devices == {"npu"}
    private = InputBufferPool(private_devices=["cpu"])
    first, second = private.share("ids", ids()), private.share("ids", ids())
    owner = registry_of()
    third = private.allocate(slot(ZERO), (8,), torch.device("cpu"), owner=owner, label="")
    assert len({buffer.data_ptr() for buffer in (first, second, third)}) == 3
    assert len(private) == 0


def test_threads_that_share_at_once_get_one_memory() -> None:
    buffers: list[torch.Tensor] = []
    barrier = threading.Barrier(8)

    def share() -> None:
        barrier.wait()
        buffers.append(share_input_buffer("ids", ids()))

    threads = [threading.Thread(target=share) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({buffer.data_ptr() for buffer in buffers}) == 1


# Policies in one memory


@pytest.mark.parametrize(
    ("one", "other", "is_shared"),
    [
        ((ZERO, 0), (ZERO, 0), True),
        ((ZERO, 0), (FILL_SENTINEL, 1), True),
        ((FILL_SENTINEL, 1), (FILL_SENTINEL, 2), True),
        ((KEEP_PAD, 0), (KEEP_PAD, 0), True),
        ((KEEP_PAD, 0), (KEEP_PAD, 1), False),
        ((KEEP_PAD, 0), (ZERO, 0), False),
        ((FILL_ONCE, 1), (FILL_ONCE, 1), True),
        ((FILL_ONCE, 1), (FILL_ONCE, 2), False),
        ((FILL_ONCE, 1), (FILL_SENTINEL, 1), False),
        ((FOREACH_COPY, 0), (FOREACH_COPY, 0), True),
        ((FOREACH_COPY, 0), (ZERO, 0), True),
        ((FOREACH_COPY, 0), (FILL_SENTINEL, -1), False),
        ((FOREACH_COPY, 0), (KEEP_PAD, 0), False),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_slots_share_where_neither_can_tell(
    one: tuple[PaddingPolicy, int], other: tuple[PaddingPolicy, int], is_shared: bool, swapped: bool
) -> None:
    first, second = slot(*(other if swapped else one)), slot(*(one if swapped else other))
    registries = [registry_of(first), registry_of(second)]
    assert (first.buffer.data_ptr() == second.buffer.data_ptr()) == is_shared
    assert len(registries) == 2


def test_a_registry_keeps_its_memory_to_itself_unless_it_is_told_to_share() -> None:
    shares, keeps = registry_of(slot(ZERO)), CudaGraphBufferRegistry(device="cpu", max_bs=8, max_num_tokens=8)
    own = keeps.register_slot(slot(ZERO))
    assert not keeps.share_pool
    assert own.buffer.data_ptr() != shares.slots[0].buffer.data_ptr()


def test_each_user_finds_its_own_padding_whatever_another_left() -> None:
    zeros, ones = slot(FILL_SENTINEL, 0), slot(FILL_SENTINEL, 1)
    a, b = registry_of(zeros), registry_of(ones)
    assert zeros.buffer.data_ptr() == ones.buffer.data_ptr()
    fill(a, 8, 8, lens=torch.arange(11, 19))
    fill(b, 3, 8, lens=torch.arange(21, 24))
    assert ones.buffer.tolist() == [21, 22, 23, 1, 1, 1, 1, 1]
    fill(a, 3, 8, lens=torch.arange(31, 34))
    assert zeros.buffer.tolist() == [31, 32, 33, 0, 0, 0, 0, 0]
    fill(b, 3, 8, lens=torch.arange(21, 24))
    fill(a, 3, 8)
    assert zeros.buffer.tolist() == [0] * 8, "absent: all of it is padding"


def test_a_newcomer_finds_its_start_value_and_earlier_users_lose_nothing_that_they_rely_on() -> None:
    a = registry_of(slot(ZERO))
    fill(a, 8, 8, lens=torch.arange(11, 19))
    late = slot(FILL_SENTINEL, 1)
    b = registry_of(late)
    assert late.buffer.tolist() == [1] * 8
    fill(a, 2, 4, lens=torch.tensor([5, 6]))
    assert a.slots[0].slice_for(4, 4).tolist() == [5, 6, 0, 0]
    assert b.slots == (late,)


def test_what_was_written_once_is_never_written_by_a_runner_that_writes_it_each_step() -> None:
    once, each_step = slot(FILL_ONCE, 7), slot(FILL_SENTINEL, 7)
    never_fed = slot(FILL_ONCE, 7, copy_from_fb=False)
    registries = [registry_of(each) for each in (once, each_step, never_fed)]
    for registry in registries:
        fill(registry, 5, 8, lens=torch.arange(5))
    fill(registries[1], 8, 8, lens=torch.arange(8))
    assert once.buffer.tolist() == [0, 1, 2, 3, 4, 7, 7, 7]
    assert never_fed.buffer.tolist() == [7] * 8


def test_kept_rows_stay_among_their_like() -> None:
    kept, like = slot(KEEP_PAD), slot(KEEP_PAD)
    square = GraphSlot("lens", lambda bs, tokens: (tokens // 2, 2), torch.int64, slice_fn=lambda b, n: b[: n // 2])
    registries = [registry_of(each) for each in (kept, like, square)]
    fill(registries[0], 8, 8, lens=torch.arange(8))
    assert like.buffer.tolist() == list(range(8)), "as the policy says: what earlier fills left"
    assert square.buffer.tolist() == [[0, 0]] * 4, "rows of another shape are other rows"


def test_rows_of_another_shape_in_one_memory_are_padded_right() -> None:
    wide = GraphSlot(
        "x", lambda bs, tokens: (3, tokens), torch.int64, slice_fn=lambda b, n: b[:, :n], padding_policy=ZERO
    )
    tall = GraphSlot("x", lambda bs, tokens: (tokens, 3), torch.int64, padding_policy=FILL_SENTINEL, pad_value=1)
    a, b = registry_of(wide), registry_of(tall)
    assert wide.buffer.data_ptr() == tall.buffer.data_ptr()
    assert (tuple(wide.buffer.shape), tuple(tall.buffer.shape)) == ((3, 8), (8, 3))
    for _ in range(2):
        fill(b, 3, 8, x=torch.full((3, 3), 5))
        assert tall.buffer.tolist() == [[5, 5, 5]] * 3 + [[1, 1, 1]] * 5
        fill(a, 2, 6, x=torch.full((3, 2), 4))
        assert wide.slice_for(6, 6).tolist() == [[4, 4, 0, 0, 0, 0]] * 3


def test_a_function_that_may_give_nothing_keeps_its_memory_to_itself() -> None:
    given = slot(ZERO, source_fn=lambda batch, context: batch.get("given"))
    plain = slot(ZERO)
    a, b = registry_of(given), registry_of(plain)
    fill(a, 4, 8, given=torch.arange(1, 5))
    fill(b, 8, 8, lens=torch.full((8,), 9))
    fill(a, 4, 8)
    assert given.buffer.tolist() == [1, 2, 3, 4, 0, 0, 0, 0]


# Lifetime


def test_a_memory_lives_for_as_long_as_a_buffer_or_a_view_of_it(process_pool: InputBufferPool) -> None:
    first = share_input_buffer("ids", ids())
    storage = weakref.ref(first)
    second = share_input_buffer("ids", ids())
    address = first.data_ptr()
    del first
    gc.collect()
    assert storage() is None
    assert share_input_buffer("ids", ids()).data_ptr() == address == second.data_ptr()
    part = second[2:4]
    del second
    gc.collect()
    assert len(process_pool) == 1, "a view is a user"
    assert part.data_ptr() == address + 16
    del part
    gc.collect()
    assert len(process_pool) == 0


def test_a_registrys_memory_is_forgotten_with_the_last_registry_that_uses_it(process_pool: InputBufferPool) -> None:
    live = registry_of(slot(ZERO), slot(ZERO, name="other"))
    fill(live, 3, 8, lens=torch.arange(3))
    addresses = [each.buffer.data_ptr() for each in live.slots]
    for _ in range(20):
        passing = registry_of(slot(ZERO), slot(KEEP_PAD, name="kept"))
        assert passing.get_slot("lens").buffer.data_ptr() == addresses[0]
        assert len(process_pool) == 3
        del passing
        gc.collect()
        assert len(process_pool) == 2
    assert [each.buffer.data_ptr() for each in live.slots] == addresses
    fill(live, 2, 4, lens=torch.arange(2))
    assert live.slots[0].slice_for(4, 4).tolist() == [0, 1, 0, 0]


def test_a_buffer_outlives_the_registry_for_whoever_holds_it() -> None:
    registry = registry_of(slot(ZERO))
    held = registry.slots[0].buffer
    del registry
    gc.collect()
    held.fill_(3)
    assert registry_of(slot(ZERO)).slots[0].buffer.data_ptr() != held.data_ptr()
    assert held.tolist() == [3] * 8


def test_a_slot_that_is_refused_leaves_no_user_behind(process_pool: InputBufferPool) -> None:
    registry = registry_of()
    with pytest.raises(SlotError):
        registry.register_slot(slot(ZERO, slice_fn=lambda buffer, n: buffer))
    assert len(process_pool) == 0


def test_a_bound_buffer_is_not_pooled(process_pool: InputBufferPool) -> None:
    buffer = ids()
    registry = registry_of()
    registry.register_slot(slot(ZERO), bind=buffer)
    assert len(process_pool) == 0
    assert registry_of(slot(ZERO)).slots[0].buffer.data_ptr() != buffer.data_ptr()


# What it shows


def test_the_pool_prints_who_shares_what(process_pool: InputBufferPool) -> None:
    assert str(process_pool) == "input-buffer pool: 0 buffers, 0 bytes, 0 bytes saved by sharing"
    held = [
        process_pool.share("input_ids", ids(), owner="DecodeBuffers"),
        process_pool.share("positions", ids(16).view(2, 8), owner="DecodeBuffers"),
        process_pool.share("input_ids", ids().view(4, 2), owner="PrefillBuffers"),
    ]
    assert str(process_pool) == (
        "input-buffer pool: 2 buffers, 192 bytes, 64 bytes saved by sharing\n"
        "  input_ids  int64     cpu               64 bytes  DecodeBuffers [8], PrefillBuffers [4, 2]\n"
        "  positions  int64     cpu              128 bytes  DecodeBuffers [2, 8]"
    )
    assert repr(process_pool) == "<InputBufferPool of 2 buffers, 192 bytes>"
    assert (process_pool.total_bytes, process_pool.saved_bytes, len(held)) == (192, 64, 3)


def test_registries_are_named_by_their_sizes(process_pool: InputBufferPool) -> None:
    registry = registry_of(slot(ZERO))
    assert str(process_pool).endswith("registry of 8 requests, 8 tokens [8]")
    assert registry.share_pool


# ForwardInputBuffers


@dataclass
class DecodeBuffers(ForwardInputBuffers):
    input_ids: torch.Tensor
    proxy: dict[str, Any]
    lens: torch.Tensor | None = None
    max_bs: int = 8


def decode_buffers() -> DecodeBuffers:
    return DecodeBuffers(ids(), {"hidden": torch.zeros(2, 3), "residual": torch.zeros(2, 3), "note": 1})


def test_each_tensor_of_a_dataclass_is_replaced_by_the_pools(process_pool: InputBufferPool) -> None:
    one, other = decode_buffers(), decode_buffers()
    before = one.input_ids
    one.share_buffers()
    other.share_buffers()
    assert one.input_ids is before
    assert other.input_ids.data_ptr() == before.data_ptr()
    for key in ("hidden", "residual"):
        assert one.proxy[key].data_ptr() == other.proxy[key].data_ptr()
    assert one.proxy["hidden"].data_ptr() != one.proxy["residual"].data_ptr()
    assert (other.lens, other.max_bs, other.proxy["note"]) == (None, 8, 1)
    addresses = [other.input_ids.data_ptr(), other.proxy["hidden"].data_ptr()]
    other.share_buffers()
    assert addresses == [other.input_ids.data_ptr(), other.proxy["hidden"].data_ptr()]
    assert len(process_pool) == 3
    assert "DecodeBuffers [8], DecodeBuffers [8]" in str(process_pool)


def test_a_frozen_dataclass_can_share_too() -> None:
    @dataclass(frozen=True)
    class Frozen(ForwardInputBuffers):
        ids: torch.Tensor

    one, other = Frozen(ids()), Frozen(ids())
    one.share_buffers()
    other.share_buffers()
    assert one.ids.data_ptr() == other.ids.data_ptr()


def test_a_dataclass_with_one_bad_tensor_is_left_as_it_was(process_pool: InputBufferPool) -> None:
    buffers = decode_buffers()
    buffers.lens = torch.zeros(4, 2).t()
    before = buffers.input_ids
    with pytest.raises(SlotError, match=r"^slot `lens`: a pooled buffer must be contiguous"):
        buffers.share_buffers()
    assert buffers.input_ids is before
    assert len(process_pool) == 0


def test_sharing_needs_declared_fields() -> None:
    class Bare(ForwardInputBuffers):
        pass

    with pytest.raises(SlotError, match=r"^`Bare` is no dataclass \[not-a-dataclass\]"):
        Bare().share_buffers()
