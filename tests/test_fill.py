"""Carrying out fills: equal to the specification whatever the slots, in the fewest calls."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from devicegraph import (
    CudaGraphBufferRegistry,
    FillContext,
    GraphSlot,
    PaddingPolicy,
    SlotError,
    build_decode_registry,
    fill,
    grouped_foreach_copy_,
    native,
)
from naive_fill import Declared, naive_fill

MAX_BS, MAX_TOKENS = 8, 16
DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float8_e4m3fn, torch.float16,
    torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip
MODES = [contextlib.nullcontext, torch.no_grad, torch.inference_mode]


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values that some of the dtypes hold and some do not."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 300, shape, generator=generator).to(torch.float32).to(dtype)


def strided(tensor: torch.Tensor, order: list[int], gap: int) -> torch.Tensor:
    """The same values in memory of another order of dimensions, with gaps between the innermost elements."""
    order = [dim for dim in order if dim < tensor.ndim]
    memory = torch.zeros([*(tensor.shape[dim] for dim in order), 1 + gap], dtype=tensor.dtype)
    view = memory.select(-1, 0).permute([order.index(dim) for dim in range(tensor.ndim)])
    return view.copy_(tensor)


@st.composite
def slots(draw: st.DrawFn, name: str) -> Declared:
    axis = draw(st.sampled_from(["bs", "tokens", "tokens", "none"]))
    capacity = MAX_BS if axis == "bs" else MAX_TOKENS
    base, step, unit = draw(st.sampled_from([(0, 1, 1), (0, 1, 1), (1, 1, 1), (0, 1, 2), (0, 3, 2)]))
    shape = draw(st.lists(st.integers(1, 3), max_size=2))
    dim = draw(st.integers(0, len(shape)))
    full = base + step * (capacity // unit)
    shape.insert(dim, 3 if axis == "none" else full)
    trailing = "prefix" if draw(st.booleans()) and (axis == "none" or dim < len(shape) - 1) else "exact"
    origins = ["field", "field", "field", "source_fn", "elsewhere"]
    if len(shape) == 1 and trailing == "exact":
        origins.append("value_fn")
    origin = draw(st.sampled_from(origins))
    dtype = draw(st.sampled_from(DTYPES))
    is_default = axis == "none" or (dim == 0 and (base, step, unit) == (0, 1, 1))
    slot = GraphSlot(
        name,
        lambda bs, tokens: tuple(shape),
        dtype,
        axis=axis,
        padding_policy=PaddingPolicy.KEEP_PAD if axis == "none" else draw(st.sampled_from(PaddingPolicy)),
        pad_value=draw(st.integers(0, 1)),
        slice_fn=None if is_default else lambda buffer, n: buffer.narrow(dim, 0, base + step * (n // unit)),
        source_fn=(lambda batch, context: batch.get(name)) if origin == "source_fn" else None,
        value_fn=(lambda context: context.pp_proxy_tensors[name]) if origin == "value_fn" else None,
        copy_from_fb=origin != "elsewhere",
        allow_narrowing=True,
        trailing=trailing,
    )
    return Declared(slot, dim, lambda n: base + step * (n // unit))


@dataclass
class Step:
    sizes: dict[str, int]
    batch: dict[str, torch.Tensor]
    values: dict[str, Any]
    mode: Any
    #: Written over every buffer before the fill, where given.
    poison: int | None


@st.composite
def steps(draw: st.DrawFn, declared: list[Declared]) -> Step:
    padded_bs, padded_tokens = 2 * draw(st.integers(0, MAX_BS // 2)), 2 * draw(st.integers(0, MAX_TOKENS // 2))
    raw_bs, raw_tokens = draw(st.integers(0, padded_bs)), draw(st.integers(0, padded_tokens))
    sizes = {"raw_bs": raw_bs, "padded_bs": padded_bs, "raw_num_tokens": raw_tokens, "padded_num_tokens": padded_tokens}
    batch: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for each in declared:
        slot = each.slot
        raw, padded = (raw_bs, padded_bs) if slot.axis == "bs" else (raw_tokens, padded_tokens)
        shape = list(slot.shape_fn(MAX_BS, MAX_TOKENS))
        if slot.axis != "none":
            any_rows = slot.source_fn is not None or slot.value_fn is not None
            shape[each.dim] = draw(st.integers(0, each.rows(padded))) if any_rows else each.rows(raw)
        if slot.value_fn is not None:
            # One for each live row at least, and whatever more the bucket has room for.
            length = shape[0] if slot.axis == "none" else max(shape[0], each.rows(raw))
            numbers = draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
            values[slot.name] = draw(st.sampled_from([numbers, tuple(numbers), 1]))
            continue
        if slot.trailing == "prefix":
            shape[-1] = draw(st.integers(0, shape[-1]))
        if draw(st.integers(0, 3)):
            dtype = draw(st.sampled_from([slot.dtype, slot.dtype, *DTYPES]))
            source = random(tuple(shape), dtype, draw(st.integers(0, 999)))
            if draw(st.booleans()):
                source = strided(source, draw(st.permutations([0, 1, 2])), draw(st.integers(0, 1)))
            batch[slot.name] = source
    poison = draw(st.none() | st.integers(0, 255))
    return Step(sizes, batch, values, draw(st.sampled_from(MODES)), poison)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Declared], list[Step], list[torch.Tensor | None]]:
    declared = [draw(slots(f"slot{index}")) for index in range(draw(st.integers(1, 4)))]
    bound: list[torch.Tensor | None] = []
    for each in declared:
        buffer = torch.zeros(each.slot.shape_fn(MAX_BS, MAX_TOKENS), dtype=each.slot.dtype)
        is_bound = draw(st.booleans())
        bound.append(strided(buffer, draw(st.permutations([0, 1, 2])), draw(st.integers(0, 1))) if is_bound else None)
    return declared, [draw(steps(declared)) for _ in range(draw(st.integers(1, 4)))], bound


def raw_bytes(tensor: torch.Tensor) -> list[int]:
    """All memory that a tensor's storage has, the gaps between its elements too."""
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).tolist()


@pytest.mark.parametrize(
    ("executor", "grouped", "exchange"),
    [("foreach", True, True), ("foreach", False, True), ("native", True, True), ("native", True, False)],
    ids=["grouped", "one by one", "native", "native by attributes"],
)
@settings(max_examples=250, deadline=None)
@given(program=programs())
def test_a_fill_leaves_what_the_policies_say(
    executor: Any,
    grouped: bool,
    exchange: bool,
    program: tuple[list[Declared], list[Step], list[torch.Tensor | None]],
) -> None:
    declared, sequence, bound = program
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=MAX_BS, max_num_tokens=MAX_TOKENS, executor=executor)
    for each, buffer in zip(declared, bound, strict=True):
        registry.register_slot(each.slot, bind=buffer)
    copy = torch._foreach_copy_ if grouped else None
    kept = native.EXCHANGE if exchange else None
    with mock.patch.object(fill, "_foreach_copy", copy), mock.patch.object(native, "EXCHANGE", kept):
        for step in [*sequence, *sequence]:
            if step.poison is not None:
                for each in declared:
                    memory = torch.tensor([], dtype=torch.uint8).set_(each.slot.buffer.untyped_storage())
                    memory.fill_(step.poison if each.slot.dtype != torch.bool else step.poison % 2)
            expected = []
            for each in declared:
                slot, axis = each.slot, each.slot.axis
                raw, padded = ("raw_bs", "padded_bs") if axis == "bs" else ("raw_num_tokens", "padded_num_tokens")
                source = step.batch.get(slot.name) if slot.copy_from_fb else None
                if slot.name in step.values:
                    value = step.values[slot.name]
                    rows = 3 if axis == "none" else each.rows(step.sizes[raw])
                    source = torch.tensor([value] * rows if value == 1 else value).to(slot.dtype)
                copied = slot.buffer.untyped_storage().clone()
                after = torch.tensor([], dtype=slot.dtype).set_(
                    copied, slot.buffer.storage_offset(), slot.buffer.shape, slot.buffer.stride()
                )
                naive_fill(each, after, source, step.sizes[raw], step.sizes[padded], not step.batch)
                expected.append(raw_bytes(after))
            with step.mode():
                registry.fill_from(step.batch, **step.sizes, pp_proxy_tensors=step.values)
            for each, after in zip(declared, expected, strict=True):
                assert raw_bytes(each.slot.buffer) == after, each.slot
                assert not each.slot.buffer.requires_grad
                assert not each.slot.buffer.is_inference()


@contextlib.contextmanager
def calls() -> Any:
    """Records the grouped copies that are made: (dtypes written, dtypes read)."""
    made: list[tuple[set[torch.dtype], set[torch.dtype]]] = []

    def copy(dsts: list[torch.Tensor], srcs: list[torch.Tensor]) -> None:
        assert dsts, "no grouped copy of nothing"
        made.append(({dst.dtype for dst in dsts}, {src.dtype for src in srcs}))
        for dst, src in zip(dsts, srcs, strict=True):
            assert dst.stride() == src.stride(), "other strides would take the slow path of a device"
        torch._foreach_copy_(dsts, srcs)

    with mock.patch.object(fill, "_foreach_copy", copy):
        yield made


def by_token(name: str, dtype: torch.dtype = torch.int64, **options: Any) -> GraphSlot:
    return GraphSlot(name, lambda bs, tokens: (tokens,), dtype, **{"padding_policy": PaddingPolicy.ZERO, **options})


def registry_of(
    *slots: GraphSlot, max_bs: int = 8, max_num_tokens: int = 16, executor: Any = "foreach"
) -> CudaGraphBufferRegistry:
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=max_bs, max_num_tokens=max_num_tokens, executor=executor)
    for slot in slots:
        registry.register_slot(slot)
    return registry


def sizes(raw: int, padded: int) -> dict[str, int]:
    return {"raw_bs": raw, "padded_bs": padded, "raw_num_tokens": raw, "padded_num_tokens": padded}


def test_a_decode_step_is_one_grouped_copy() -> None:
    registry = build_decode_registry(device="cpu", max_bs=8, max_num_token=8, seq_len_fill_value=1, executor="foreach")
    batch = {name: torch.arange(5) for name in registry.slot_names} | {"mrope_positions": torch.arange(15).view(3, 5)}
    with calls() as made:
        registry.fill_from(batch, **sizes(5, 8))
    assert made == [({torch.int64}, {torch.int64})]


def test_slots_of_several_dtypes_are_one_grouped_copy_of_the_narrowest_integers() -> None:
    registry = registry_of(
        by_token("ids"), by_token("locs", torch.int32), by_token("scale", torch.bfloat16, pad_value=2)
    )
    batch = {
        "ids": torch.arange(5), "locs": torch.arange(5, dtype=torch.int32), "scale": torch.ones(5).bfloat16(),
    }  # fmt: skip
    with calls() as made:
        registry.fill_from(batch, **sizes(5, 8))
    assert made == [({torch.int16}, {torch.int16})]
    assert registry.get_slot("scale").buffer.tolist()[:8] == [1, 1, 1, 1, 1, 0, 0, 0]


def test_each_pair_of_dtypes_to_cast_is_one_more_grouped_copy() -> None:
    registry = registry_of(by_token("a"), by_token("b"), by_token("c"), by_token("d", torch.float32))
    batch = {
        "a": torch.arange(5, dtype=torch.int32), "b": torch.arange(5, dtype=torch.int32), "c": torch.arange(5),
        "d": torch.arange(5, dtype=torch.float16),
    }  # fmt: skip
    with calls() as made:
        registry.fill_from(batch, **sizes(5, 5))
    assert made == [
        ({torch.int64}, {torch.int32}),
        ({torch.int64}, {torch.int64}),
        ({torch.float32}, {torch.float16}),
    ]


def test_a_source_that_is_not_contiguous_leaves_the_group_fast() -> None:
    registry = registry_of(by_token("ids"), by_token("positions"))
    batch = {"ids": torch.arange(5), "positions": torch.arange(10)[::2]}
    with calls() as made:
        registry.fill_from(batch, **sizes(5, 8))
    assert len(made) == 1
    assert registry.get_slot("positions").buffer.tolist()[:8] == [0, 2, 4, 6, 8, 0, 0, 0]


def test_contiguous_data_with_stray_strides_is_copied_right() -> None:
    slot = GraphSlot("pages", lambda bs, tokens: (tokens, 1), torch.int32)
    registry = registry_of(slot, by_token("mask", torch.bool))
    pages = torch.arange(35, dtype=torch.int32).view(7, 5).t()[:, :1]
    assert pages.is_contiguous()
    with calls():
        registry.fill_from({"pages": pages, "mask": torch.ones(5, dtype=torch.bool)}, **sizes(5, 5))
    assert slot.buffer[:5, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("executor", ["foreach", "native"])
@pytest.mark.parametrize("name", ["ids", "mask", "pages"])
def test_one_row_of_other_strides_is_filled_after_one_without(name: str, executor: str) -> None:
    pages = GraphSlot("pages", lambda bs, tokens: (tokens, 4), torch.int32)
    registry = registry_of(by_token("ids"), by_token("mask", torch.int32), pages, executor=executor)
    batch = {"ids": torch.ones(1).long(), "mask": torch.ones(1).int(), "pages": torch.ones(1, 4).int()}
    with torch.no_grad():
        for _ in range(2):
            registry.fill_from(batch, **sizes(1, 2))
        column = torch.arange(10).view(1, 10)[:, 3]
        odd = {"ids": column, "mask": column.int(), "pages": torch.arange(20).int().view(4, 5)[1:2, 1:]}[name]
        for _ in range(2):
            registry.fill_from({**batch, name: odd}, **sizes(1, 2))
            assert torch.equal(registry.get_slot(name).buffer[:1], odd)


def test_a_buffer_without_dimensions_takes_a_source_without_dimensions() -> None:
    count = GraphSlot("count", lambda bs, tokens: (), torch.int32, axis="none")
    registry = registry_of(count, by_token("ids"))
    registry.fill_from({"count": torch.tensor(7, dtype=torch.int32), "ids": torch.arange(5)}, **sizes(5, 8))
    assert count.buffer.item() == 7


def test_a_large_source_and_a_large_tail_take_calls_of_their_own() -> None:
    rows = GraphSlot(
        "input_embeds", lambda bs, tokens: (tokens, 1 << 18), torch.float32, padding_policy=PaddingPolicy.FILL_SENTINEL,
        pad_value=-1.5,
    )  # fmt: skip
    registry = registry_of(rows, max_bs=16)
    source = torch.ones(8, 1 << 18)
    with calls() as made:
        registry.fill_from({"input_embeds": source}, **sizes(8, 10))
    assert made == []
    assert rows.buffer[:, 0].tolist() == [1.0] * 8 + [-1.5] * 2 + [-1.5] * 6


def test_a_computed_value_is_written_in_the_same_call_and_made_once() -> None:
    seen: list[FillContext] = []

    def count(context: FillContext) -> int:
        seen.append(context)
        return context.raw_num_tokens

    tokens = GraphSlot("count", lambda bs, tokens: (1,), torch.int32, axis="none", value_fn=count)
    registry = registry_of(by_token("ids", torch.int32), tokens)
    batch = {"ids": torch.arange(5, dtype=torch.int32)}
    with calls() as made, mock.patch.object(fill.torch, "full", wraps=torch.full) as full:
        registry.fill_from(batch, **sizes(5, 5))
        assert len(made) == 1
        made_before = full.call_count
        registry.fill_from(batch, **sizes(5, 5))
        registry.fill_from(batch, **sizes(5, 8))
        assert full.call_count == made_before + 1, "the constant of the new tail, and no value"
    assert tokens.buffer.tolist() == [5]
    assert seen[0] == (5, 5, 5, 5, None)


def test_a_number_is_for_each_live_row_and_a_sequence_has_one_for_each_row() -> None:
    def value(context: FillContext) -> Any:
        return context.pp_proxy_tensors

    counts = by_token("counts", torch.int32, value_fn=value, padding_policy=PaddingPolicy.FILL_SENTINEL, pad_value=9)
    registry = registry_of(counts)
    for given_value, after in (
        (3, [3, 3, 9, 9]), ([4, 5, 6], [4, 5, 6, 9]), ((7, 8), [7, 8, 9, 9]), (range(2), [0, 1, 9, 9]),
        (True, [1, 1, 9, 9]),
    ):  # fmt: skip
        registry.fill_from({}, **sizes(2, 4), pp_proxy_tensors=given_value)
        assert counts.buffer.tolist()[:4] == after
    registry.fill_from({}, **sizes(0, 4), pp_proxy_tensors=[])
    assert counts.buffer.tolist()[:4] == [9] * 4


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("length", [0, 1])
def test_a_sequence_that_has_no_number_for_a_live_row_is_refused_before_anything_is_written(
    length: int, is_warm: bool
) -> None:
    counts = by_token("counts", torch.int32, value_fn=lambda context: [7] * context.pp_proxy_tensors)
    registry = registry_of(by_token("ids"), counts)
    batch = {"ids": torch.arange(1, 3)}
    if is_warm:
        registry.fill_from({"ids": torch.arange(length)}, **sizes(length, 4), pp_proxy_tensors=length)
    before = [slot.buffer.tolist() for slot in registry.slots]
    with pytest.raises(SlotError) as caught:
        registry.fill_from(batch, **sizes(2, 4), pp_proxy_tensors=length)
    error = caught.value
    assert str(error) == (
        f"slot `counts`: `value_fn` gave a sequence of length {length} for 2 live rows [bad-value]\n\n"
        "hint: give a number for each, or a single one for all of them"
    )
    assert (error.expected, error.given) == ("at least 2", str(length))
    assert [slot.buffer.tolist() for slot in registry.slots] == before


class Number(int):
    """An integer that prints as another."""

    def __repr__(self) -> str:
        return "0"


@pytest.mark.parametrize("as_sequence", [False, True])
def test_values_that_are_equal_are_still_told_apart(as_sequence: bool) -> None:
    given_value: list[Any] = []
    options: dict[str, Any] = {
        "axis": "none",
        "value_fn": lambda context: given_value if as_sequence else given_value[0],
    }
    scale = GraphSlot("scale", lambda bs, tokens: (1,), torch.float32, **options)
    registry = registry_of(scale)

    def filled(value: object) -> bytes:
        given_value[:] = [value]
        registry.fill_from({"nothing": 0}, **sizes(1, 1))
        return bytes(raw_bytes(scale.buffer))

    for value in (0.0, -0.0, False, 0, 1, True, 1.0, Number(7), float("nan"), float("-inf"), 10**30, -0.0):
        assert filled(value) == bytes(raw_bytes(torch.tensor([float(value)]))), value
    with mock.patch.object(fill, "_tensor_of", side_effect=AssertionError("made again")):
        for value in (0.0, -0.0, float("nan"), Number(7)):
            filled(value)


def test_a_value_that_a_dtype_cannot_hold_is_refused_whatever_it_equals() -> None:
    count = GraphSlot(
        "count", lambda bs, tokens: (1,), torch.int32, axis="none", value_fn=lambda context: context.pp_proxy_tensors
    )
    registry = registry_of(count)
    for held in (1, True, [1]):
        registry.fill_from({"nothing": 0}, **sizes(1, 1), pp_proxy_tensors=held)
    for refused in (1.0, [1.0], "1", b"1"):
        with pytest.raises(SlotError, match=r"\[bad-value\]"):
            registry.fill_from({"nothing": 0}, **sizes(1, 1), pp_proxy_tensors=refused)


def test_padding_with_an_integer_past_64_bits_is_padding_with_the_float() -> None:
    pages = GraphSlot("pages", lambda bs, tokens: (tokens, 3), torch.float64, trailing="prefix", pad_value=10**30)
    registry = registry_of(pages)
    registry.fill_from({"pages": torch.ones(2, 2, dtype=torch.float64)}, **sizes(2, 4))
    assert pages.buffer.tolist()[:3] == [[1, 1, 1e30], [1, 1, 1e30], [0, 0, 0]]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (2**31, "slot `count`: `value_fn` gave `2147483648`, which is no `int32` number [bad-value]"),
        (1.0, "slot `count`: `value_fn` gave `1.0`, which is no `int32` number [bad-value]"),
        (None, "slot `count`: `value_fn` gave `None`, which is no `int32` number [bad-value]"),
        ([[1]], "slot `count`: `value_fn` gave `[1]`, which is no `int32` number [bad-value]"),
        (torch.tensor(1), "slot `count`: `value_fn` gave `tensor(1)`, which is no `int32` number [bad-value]"),
        (10**400, f"slot `count`: `value_fn` gave `1{'0' * 59}...`, which is no `int32` number [bad-value]"),
        pytest.param(
            10**9999, "slot `count`: `value_fn` gave `<int>`, which is no `int32` number [bad-value]", id="unprintable"
        ),
        ([10**9999], "slot `count`: `value_fn` gave `<list>`, which is no `int32` number [bad-value]"),
        ([1, 2], "slot `count`: the source has shape [2], expected [1] [wrong-shape]"),
    ],
)
def test_a_computed_value_that_does_not_fit_is_refused_before_anything_is_written(value: object, told: str) -> None:
    count = GraphSlot("count", lambda bs, tokens: (1,), torch.int32, axis="none", value_fn=lambda context: value)
    registry = registry_of(by_token("ids"), count)
    with pytest.raises(SlotError) as caught:
        registry.fill_from({"ids": torch.arange(5)}, **sizes(5, 8))
    assert str(caught.value).split("\n")[0] == told
    assert registry.get_slot("ids").buffer.sum() == 0


def test_values_that_were_not_used_for_longest_go_first() -> None:
    count = GraphSlot("count", lambda bs, tokens: (1,), torch.int64, axis="none", value_fn=lambda context: 0)
    registry_of(count)
    values = fill.HostValues()
    first = values.tensor(count, 0, 0)
    for number in range(1, values.CAPACITY):
        values.tensor(count, number, 0)
        assert values.tensor(count, 0, 0) is first
    second = values.tensor(count, 1, 0)
    values.tensor(count, values.CAPACITY, 0)
    assert values.tensor(count, 0, 0) is first
    assert values.tensor(count, 1, 0) is second
    assert values.tensor(count, 2, 0).tolist() == [2], "made again"


# grouped_foreach_copy_


@given(
    kinds=st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.integers(0, 4)), max_size=8),
    grouped=st.booleans(),
)
def test_grouped_copies_copy_and_cast_whatever_is_mixed(
    kinds: list[tuple[torch.dtype, torch.dtype, int]], grouped: bool
) -> None:
    srcs = [random((size,), src, index) for index, (_, src, size) in enumerate(kinds)]
    dsts = [torch.zeros(size, dtype=dst) for dst, _, size in kinds]
    with mock.patch.object(fill, "_foreach_copy", torch._foreach_copy_ if grouped else None):
        grouped_foreach_copy_(dsts, srcs)
    for dst, src in zip(dsts, srcs, strict=True):
        assert raw_bytes(dst) == raw_bytes(src.to(dst.dtype))


def test_grouped_copies_take_one_call_for_each_pair_of_dtypes() -> None:
    dsts = [torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.zeros(3)]
    srcs = [torch.ones(2), torch.ones(2).half(), torch.ones(2, dtype=torch.int64), torch.ones(3)]
    with calls() as made:
        grouped_foreach_copy_(dsts, srcs)
    assert len(made) == 3


def test_grouped_copies_of_nothing_do_nothing() -> None:
    with calls() as made:
        grouped_foreach_copy_([], [])
    assert made == []


def test_a_grouped_copy_reads_a_view_that_negates_as_what_it_says() -> None:
    dst = torch.zeros(2)
    grouped_foreach_copy_([dst], [torch._neg_view(torch.ones(2))])
    assert dst.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("dst", "src", "told"),
    [
        (torch.zeros(2), [1, 2], "source 1 is a `list` [not-a-tensor]"),
        ([1, 2], torch.zeros(2), "destination 1 is a `list` [not-a-tensor]"),
        (torch.zeros(2), torch.ones(2).to_sparse(), "source 1 is a `torch.sparse_coo tensor` [not-a-tensor]"),
        (torch.zeros(2), torch.ones(1), "source 1 has shape [1], its destination [2] [wrong-shape]"),
        (torch.zeros(2), torch.ones(3), "source 1 has shape [3], its destination [2] [wrong-shape]"),
    ],
)
def test_a_grouped_copy_of_what_does_not_fit_copies_nothing(dst: Any, src: Any, told: str) -> None:
    first = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(SlotError) as caught:
        grouped_foreach_copy_([first, dst], [torch.ones(2, dtype=torch.int64), src])
    assert str(caught.value).split("\n")[0] == told
    assert first.sum() == 0


def test_grouped_copies_of_lists_that_do_not_match_are_refused() -> None:
    dsts = [torch.zeros(2), torch.zeros(2)]
    with pytest.raises(SlotError, match=r"^2 destinations for 1 sources \[length-mismatch\]$"):
        grouped_foreach_copy_(dsts, [torch.ones(2)])
    assert dsts[0].sum() == 0


def test_a_grouped_copy_into_what_cannot_be_written_copies_nothing() -> None:
    with torch.inference_mode():
        inference = torch.zeros(3)
    freed = torch.zeros(3)
    freed.untyped_storage().resize_(0)
    for bad, code in (
        (torch.zeros(1).expand(3), "shared-elements"),
        (inference, "bound-inference"),
        (torch.zeros(3, requires_grad=True), "bound-grad"),
        (freed, "not-a-tensor"),
        (torch._neg_view(torch.zeros(3)), "not-a-tensor"),
        (torch.nn.Parameter(torch.zeros(4))[:3].double(), None),
        (torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))[:3], "bound-grad"),
        (torch.zeros(3, dtype=torch.bits8), "unsupported-dtype"),
        (torch.zeros(3, dtype=torch.float8_e5m2), None),
    ):
        good = torch.zeros(3)
        if code is None:
            grouped_foreach_copy_([good, bad], [torch.ones(3), torch.ones(3)])
            assert bad.float().tolist() == good.tolist() == [1, 1, 1]
            continue
        with pytest.raises(SlotError) as caught:
            grouped_foreach_copy_([good, bad], [torch.ones(3), torch.ones(3)])
        assert (caught.value.code, good.tolist()) == (code, [0, 0, 0])
    with pytest.raises(SlotError, match="source 0 has no memory"):
        grouped_foreach_copy_([torch.zeros(3)], [torch.ones(3, device="meta")])
