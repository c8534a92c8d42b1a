"""The registry: what it takes as a slot, what a fill leaves and refuses, and what it shows of a bucket."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import types
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

from devicegraph import (
    CudaGraphBufferRegistry,
    FillContext,
    GraphSlot,
    PaddingPolicy,
    SlotError,
    build_decode_registry,
    reset_index_buffers,
)
from devicegraph.fill import ForeachExecutor
from devicegraph.native import NativeExecutor
from odd_tensors import not_dense, without_memory

KEEP_PAD, FILL_SENTINEL, ZERO = PaddingPolicy.KEEP_PAD, PaddingPolicy.FILL_SENTINEL, PaddingPolicy.ZERO
FOREACH_COPY, FILL_ONCE = PaddingPolicy.FOREACH_COPY, PaddingPolicy.FILL_ONCE


def by_token(name: str, policy: PaddingPolicy = ZERO, dtype: torch.dtype = torch.int64, **options: Any) -> GraphSlot:
    return GraphSlot(name, lambda bs, tokens: (tokens,), dtype, padding_policy=policy, **options)


def by_request(name: str, policy: PaddingPolicy = ZERO, dtype: torch.dtype = torch.int64, **options: Any) -> GraphSlot:
    return GraphSlot(name, lambda bs, tokens: (bs,), dtype, axis="bs", padding_policy=policy, **options)


def planes(name: str = "mrope_positions", policy: PaddingPolicy = ZERO, **options: Any) -> GraphSlot:
    options = {"slice_fn": lambda buffer, n: buffer[:, :n], **options}
    return GraphSlot(name, lambda bs, tokens: (3, tokens), torch.int64, padding_policy=policy, **options)


def registry_of(*slots: GraphSlot, max_bs: int = 8, max_num_tokens: int = 8) -> CudaGraphBufferRegistry:
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=max_bs, max_num_tokens=max_num_tokens)
    for slot in slots:
        registry.register_slot(slot)
    return registry


def sizes(raw: int, padded: int) -> dict[str, int]:
    return {"raw_bs": raw, "padded_bs": padded, "raw_num_tokens": raw, "padded_num_tokens": padded}


def told(error: SlotError) -> str:
    return str(error).replace("\n\n", " | ")


# The table of policies


@pytest.mark.parametrize(
    ("policy", "start", "after_3_of_6", "after_absent"),
    [
        (KEEP_PAD, 0, [1, 2, 3, 5, 5, 5, 5, 5], [1, 2, 3, 5, 5, 5, 5, 5]),
        (FILL_SENTINEL, 9, [1, 2, 3, 9, 9, 9, 5, 5], [9, 9, 9, 9, 9, 9, 5, 5]),
        (ZERO, 0, [1, 2, 3, 0, 0, 0, 5, 5], [0, 0, 0, 0, 0, 0, 5, 5]),
        (FOREACH_COPY, 0, [1, 2, 3, 5, 5, 5, 5, 5], [1, 2, 3, 5, 5, 5, 5, 5]),
        (FILL_ONCE, 9, [1, 2, 3, 5, 5, 5, 5, 5], [1, 2, 3, 5, 5, 5, 5, 5]),
    ],
)
def test_each_policy_starts_pads_and_leaves_as_the_table_says(
    policy: PaddingPolicy, start: int, after_3_of_6: list[int], after_absent: list[int]
) -> None:
    slot = by_token("ids", policy, pad_value=9)
    registry = registry_of(slot)
    assert slot.buffer.tolist() == [start] * 8
    slot.buffer.fill_(5)
    registry.fill_from({"ids": torch.tensor([1, 2, 3])}, **sizes(3, 6))
    assert slot.buffer.tolist() == after_3_of_6
    registry.fill_from({"other": None}, **sizes(3, 6))
    assert slot.buffer.tolist() == after_absent


def test_rows_that_the_model_writes_get_their_padding_only() -> None:
    slot = by_token("computed", copy_from_fb=False)
    registry = registry_of(slot)
    slot.buffer.fill_(5)
    registry.fill_from({"computed": torch.tensor([1, 2, 3])}, **sizes(3, 6))
    assert slot.buffer.tolist() == [5, 5, 5, 0, 0, 0, 5, 5]


def test_a_slot_without_rows_is_copied_whole() -> None:
    slot = GraphSlot("bias", lambda bs, tokens: (3,), torch.float32, axis="none")
    registry = registry_of(slot)
    registry.fill_from({"bias": torch.tensor([1.0, 2.0, 3.0])}, **sizes(1, 2))
    registry.fill_from({}, **sizes(0, 2))
    assert slot.buffer.tolist() == [1, 2, 3]


# Origins other than a field


def test_a_function_gives_any_number_of_rows_and_nothing_leaves_the_slot_alone() -> None:
    slot = by_token("proxy.hidden", source_fn=lambda batch, context: batch["hidden"])
    registry = registry_of(slot)
    slot.buffer.fill_(5)
    registry.fill_from({"hidden": torch.tensor([1, 2])}, **sizes(3, 6))
    assert slot.buffer.tolist() == [1, 2, 0, 0, 0, 0, 5, 5]
    registry.fill_from({"hidden": None}, **sizes(3, 6))
    assert slot.buffer.tolist() == [1, 2, 0, 0, 0, 0, 5, 5]


def test_a_function_is_called_whatever_it_is_as_a_truth_value() -> None:
    class Gives:
        def __len__(self) -> int:
            return 0

        def __call__(self, *_: object) -> torch.Tensor:
            return torch.tensor([7])

    slot = by_token("given", source_fn=Gives())
    registry_of(slot).fill_from({"other": 1}, **sizes(1, 2))
    assert slot.buffer.tolist()[:2] == [7, 0]


def test_functions_and_hooks_get_the_batch_and_the_sizes() -> None:
    seen: list[Any] = []

    def give(batch: Any, context: FillContext) -> None:
        seen.append((batch, context))

    def hook(buffer: torch.Tensor, batch: Any, context: FillContext) -> None:
        seen.append((buffer, batch, context))

    given, hooked = by_token("given", source_fn=give), by_token("hooked", post_fill=hook)
    registry = registry_of(given, hooked)
    batch = {"hooked": torch.tensor([1, 2])}
    registry.fill_from(
        batch, raw_bs=1, padded_bs=3, raw_num_tokens=2, padded_num_tokens=4, pp_proxy_tensors="from the stage before"
    )
    context = FillContext(1, 3, 2, 4, "from the stage before")
    assert seen[0] == (batch, context)
    assert seen[0][1].forward_batch is batch
    for replaced in (seen[0][1]._replace(raw_bs=2), seen[1][2].__replace__(raw_bs=2)):
        assert replaced == context._replace(raw_bs=2)
        assert replaced.forward_batch is batch
    assert seen[1][0] is hooked.buffer
    assert seen[1][1:] == (batch, context)


def test_padding_and_copies_come_before_hooks_which_run_in_order_of_registration() -> None:
    order: list[str] = []

    def hook(name: str) -> Any:
        def run(buffer: torch.Tensor, batch: Any, context: FillContext) -> None:
            order.append(name)
            assert last.buffer.tolist()[:4] == [7, 8, 0, 0], "everything is filled"

        return run

    first, last = by_token("first", post_fill=hook("first")), by_token("last", post_fill=hook("last"))
    registry = registry_of(first, last)
    last.buffer.fill_(5)
    registry.fill_from({"first": torch.tensor([1, 2]), "last": torch.tensor([7, 8])}, **sizes(2, 4))
    assert order == ["first", "last"]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_hooks_run_after_every_fill_in_every_mode_of_gradients(mode: Any) -> None:
    hooked = by_token("hooked", post_fill=lambda buffer, batch, context: buffer[: context.raw_bs].mul_(2))
    registry = registry_of(hooked)
    with mode():
        for _ in range(2):
            registry.fill_from({"hooked": torch.tensor([1, 2])}, **sizes(2, 4))
            assert hooked.buffer.tolist()[:4] == [2, 4, 0, 0]


@pytest.mark.parametrize("executor", ["foreach", "native"])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_source_that_requires_grad_gives_its_buffer_no_history(dtype: torch.dtype, step: int, executor: Any) -> None:
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=8, max_num_tokens=8, executor=executor)
    slot = registry.register_slot(by_token("x", dtype=torch.float32))
    source = torch.ones(2 * step, requires_grad=True, dtype=dtype)[::step]
    for _ in range(3):
        registry.fill_from({"x": source}, **sizes(2, 4))
        assert (slot.buffer.requires_grad, slot.buffer.grad_fn) == (False, None)
        assert slot.buffer.tolist()[:4] == [1, 1, 0, 0]


@pytest.mark.parametrize("origin", ["source_fn", "value_fn"])
def test_a_function_that_raises_leaves_every_buffer_as_it_was(origin: str) -> None:
    def broken(*arguments: object) -> torch.Tensor:
        raise ZeroDivisionError

    ids, computed = by_token("ids"), by_token("computed", **{origin: broken})
    registry = registry_of(ids, computed)
    ids.buffer.fill_(5)
    with pytest.raises(ZeroDivisionError):
        registry.fill_from({"ids": torch.tensor([1, 2])}, **sizes(2, 4))
    assert ids.buffer.tolist() == [5] * 8


def test_a_hook_that_raises_leaves_all_slots_filled_and_the_next_fill_whole() -> None:
    is_broken = [True]

    def hook(buffer: torch.Tensor, batch: Any, context: FillContext) -> None:
        if is_broken[0]:
            raise ZeroDivisionError

    ids, hooked = by_token("ids"), by_token("hooked", post_fill=hook)
    registry = registry_of(hooked, ids)
    with pytest.raises(ZeroDivisionError):
        registry.fill_from({"ids": torch.tensor([1, 2])}, **sizes(2, 4))
    assert ids.buffer.tolist()[:2] == [1, 2]
    is_broken[0] = False
    registry.fill_from({"ids": torch.tensor([3, 4])}, **sizes(2, 4))
    assert ids.buffer.tolist()[:2] == [3, 4]


def test_functions_and_hooks_are_known_to_be_called() -> None:
    for options, is_called in (
        ({}, False),
        ({"source_fn": lambda batch, context: None}, True),
        ({"copy_from_fb": False, "post_fill": lambda buffer, batch, context: None}, True),
    ):
        assert registry_of(by_token("ids"), by_token("other", **options)).calls_functions is is_called


# The idle step


def test_an_idle_step_pads_every_slot_whole_and_calls_no_source() -> None:
    def refuses(batch: Any, context: FillContext) -> torch.Tensor:
        raise AssertionError("there is no batch to read")

    seen: list[Any] = []
    ids = by_token("ids", required=True)
    lens = by_request("lens", FILL_SENTINEL, pad_value=1)
    given = by_token("given", source_fn=refuses)
    count = GraphSlot("count", lambda bs, tokens: (1,), torch.int32, axis="none", value_fn=lambda c: c.raw_num_tokens)
    hooked = by_token("hooked", post_fill=lambda buffer, batch, context: seen.append(batch))
    registry = registry_of(ids, lens, given, count, hooked, planes())
    for slot in registry.slots:
        slot.buffer.fill_(5)
    registry.fill_from({}, **sizes(0, 6))
    for slot in (ids, given, hooked):
        assert slot.buffer.tolist() == [0, 0, 0, 0, 0, 0, 5, 5]
    assert lens.buffer.tolist() == [1, 1, 1, 1, 1, 1, 5, 5]
    assert registry.get_slot("mrope_positions").buffer.tolist() == [[0, 0, 0, 0, 0, 0, 5, 5]] * 3
    assert count.buffer.tolist() == [0]
    assert seen == [{}]


def test_an_idle_batch_of_an_engine_is_read_like_any_other() -> None:
    count = GraphSlot("count", lambda bs, tokens: (1,), torch.int32, axis="none")
    ids = by_token("ids")
    registry = registry_of(count, ids)
    ids.buffer.fill_(5)
    batch = {"count": torch.tensor([7], dtype=torch.int32), "ids": torch.tensor([], dtype=torch.int64)}
    registry.fill_from(batch, **sizes(0, 4))
    assert (count.buffer.tolist(), ids.buffer.tolist()) == ([7], [0, 0, 0, 0, 5, 5, 5, 5])


# What a fill refuses, before the first byte


class Case(NamedTuple):
    slot: GraphSlot
    source: Any
    message: str


OF = "slot `bad`: "
REFUSED = {
    "too few rows": Case(by_token("bad"), torch.arange(2), OF + "the source has 2 rows, the batch 3 [wrong-rows]"),
    "too many rows": Case(by_token("bad"), torch.arange(4), OF + "the source has 4 rows, the batch 3 [wrong-rows]"),
    "one row": Case(by_token("bad"), torch.arange(1), OF + "the source has 1 row, the batch 3 [wrong-rows]"),
    "a scalar": Case(by_token("bad"), torch.tensor(1), OF + "the source has shape [], expected [3] [wrong-shape]"),
    "another trailing shape": Case(
        GraphSlot("bad", lambda bs, tokens: (tokens, 4), torch.int64),
        torch.ones(3, 5, dtype=torch.int64),
        OF + "the source has shape [3, 5], expected [3, 4] [wrong-shape]",
    ),
    "a trailing length of one": Case(
        GraphSlot("bad", lambda bs, tokens: (tokens, 4), torch.int64),
        torch.ones(3, 1, dtype=torch.int64),
        OF + "the source has shape [3, 1], expected [3, 4] [wrong-shape]",
    ),
    "one plane for three": Case(
        planes("bad"), torch.arange(3), OF + "the source has shape [3], expected [3, 3] [wrong-shape]"
    ),
    "a source wider than the slot": Case(
        GraphSlot("bad", lambda bs, tokens: (tokens, 4), torch.int64, trailing="prefix"),
        torch.ones(3, 5, dtype=torch.int64),
        OF + "the source is 5 wide, the slot 4 [too-wide]",
    ),
    "more rows than the bucket": Case(
        by_token("bad", source_fn=lambda batch, context: batch["bad"]),
        torch.arange(7),
        OF + "the source has 7 rows, the bucket 6 [too-many-rows]",
    ),
    "another device": Case(
        by_token("bad"),
        torch.arange(3, device="meta"),
        OF
        + "the source is on `meta`, expected `cpu` [wrong-device] | hint: move the source, or say where it may be with "
        '`source_device="cpu"` or `"any"`',
    ),
    "a host source that is on a device": Case(
        by_token("bad", source_device="cpu"),
        torch.arange(3, device="meta"),
        OF
        + "the source is on `meta`, expected `cpu` [wrong-device] | hint: move the source, or say where it may be with "
        '`source_device="cpu"` or `"any"`',
    ),
    "a narrowing cast": Case(
        by_token("bad", dtype=torch.int32),
        torch.arange(3),
        OF
        + "a cast from `int64` to `int32` can change values [narrowing-cast] | hint: declare the slot as `int64`, or "
        "accept the loss with `allow_narrowing=True`",
    ),
    "a dtype that no slot has": Case(
        by_token("bad", dtype=torch.float64, allow_narrowing=True),
        torch.ones(3, dtype=torch.complex64),
        OF + "`complex64` is no slot dtype [unsupported-dtype]",
    ),
    "a list": Case(
        by_token("bad"), [1, 2, 3], OF + "the source is a `list` [not-a-tensor] | hint: pass a dense tensor"
    ),
    "an array": Case(
        by_token("bad"),
        torch.arange(3).numpy(),
        OF + "the source is a `ndarray` [not-a-tensor] | hint: pass a dense tensor",
    ),
    "a sparse tensor": Case(
        by_token("bad"),
        torch.arange(3).to_sparse(),
        OF + "the source is a `torch.sparse_coo tensor` [not-a-tensor] | hint: pass a dense tensor",
    ),
    "a required field that is missing": Case(
        by_token("bad", required=True), None, OF + "the batch lacks this required field [field-missing]"
    ),
    "a tensor that is only declared, where any device will do": Case(
        by_token("bad", dtype=torch.float32, source_device="any"),
        torch.ones(3, device="meta"),
        OF + "the source has no memory [not-a-tensor] | hint: pass a dense tensor",
    ),
    **{
        f"a tensor that is {name}": Case(
            by_token("bad", dtype=torch.float32),
            source,
            OF + f"the source is a {kind} [not-a-tensor] | hint: pass a dense tensor",
        )
        for name, (source, kind) in not_dense().items()
    },
    **{
        f"a tensor that is {name}": Case(
            by_token("bad", dtype=torch.float32),
            source,
            OF + "the source has no memory [not-a-tensor] | hint: pass a dense tensor",
        )
        for name, source in without_memory(torch.ones(3)).items()
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_source_that_does_not_fit_is_refused_before_any_slot_is_written(name: str) -> None:
    case = REFUSED[name]
    before, after = by_token("before"), by_token("after")
    bad = dataclasses.replace(case.slot)
    registry = registry_of(before, bad, after)
    for slot in registry.slots:
        slot.buffer.fill_(5)
    with pytest.raises(SlotError) as caught:
        registry.fill_from({"before": torch.arange(3), "bad": case.source, "after": torch.arange(3)}, **sizes(3, 6))
    assert told(caught.value) == case.message
    assert caught.value.slot == "bad"
    for slot in registry.slots:
        assert slot.buffer.eq(5).all()


def test_a_refusal_has_both_sides_to_read() -> None:
    registry = registry_of(by_token("ids", dtype=torch.int32))
    with pytest.raises(SlotError) as caught:
        registry.fill_from({"ids": torch.arange(3)}, **sizes(3, 6))
    error = caught.value
    assert (error.code, error.slot, error.expected, error.given) == ("narrowing-cast", "ids", "int32", "int64")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"raw_bs": 7},
            "`raw_bs`: 7 is more than `padded_bs`, which is 6 [raw-above-padded] | hint: pad to a bucket that "
            "holds the live size",
        ),
        ({"padded_num_tokens": 9}, "`padded_num_tokens`: 9 is more than the 8 that the buffers hold [above-capacity]"),
        ({"raw_num_tokens": -1}, "`raw_num_tokens`: -1 is negative [negative-size]"),
        ({"raw_bs": True}, "`raw_bs`: True is no size [not-a-size]"),
        ({"padded_bs": 6.5}, "`padded_bs`: 6.5 is no size [not-a-size]"),
        ({"padded_bs": [6]}, "`padded_bs`: [6] is no size [not-a-size]"),
        ({"raw_bs": np.True_}, "`raw_bs`: np.True_ is no size [not-a-size]"),
        ({"raw_bs": torch.tensor(True)}, "`raw_bs`: tensor(True) is no size [not-a-size]"),
        ({"raw_bs": torch.arange(3)}, "`raw_bs`: tensor([0, 1, 2]) is no size [not-a-size]"),
        ({"raw_bs": 10**80}, f"`raw_bs`: 1{'0' * 59}... is no size [not-a-size]"),
        ({"raw_bs": 10**9999}, "`raw_bs`: <class 'int'> is no size [not-a-size]"),
    ],
)
def test_sizes_that_are_no_step_are_refused(change: dict[str, Any], message: str) -> None:
    slot = by_token("ids")
    registry = registry_of(slot)
    with pytest.raises(SlotError) as caught:
        registry.fill_from({"ids": torch.arange(3)}, **{**sizes(3, 6), **change})
    assert told(caught.value) == message
    assert slot.buffer.sum() == 0


def test_what_was_checked_once_is_checked_again_where_it_changes() -> None:
    registry = registry_of(by_token("x", dtype=torch.float32))
    registry.fill_from({"x": torch.ones(3)}, **sizes(3, 6))
    others = [
        torch.arange(3),
        torch.ones(2),
        torch.ones(3, device="meta"),
        [1, 2, 3],
        *without_memory(torch.ones(3)).values(),
    ]
    for source in (*others, *(source for source, _ in not_dense().values())):
        with pytest.raises(SlotError):
            registry.fill_from({"x": source}, **sizes(3, 6))
    assert registry.get_slot("x").buffer.tolist()[:6] == [1, 1, 1, 0, 0, 0]


# Sizes


class Stands:
    """Stands for an integer."""

    def __init__(self, number: object) -> None:
        self.number = number

    def __index__(self) -> Any:
        return self.number


@pytest.mark.parametrize("make", [int, np.int64, np.uint8, np.array, torch.tensor, Stands])
def test_whatever_stands_for_an_integer_is_a_size(make: Any) -> None:
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=make(4), max_num_tokens=make(8))
    assert [(type(size), size) for size in (registry.max_bs, registry.max_num_tokens)] == [(int, 4), (int, 8)]
    seen: list[FillContext] = []
    slot = GraphSlot("ids", lambda bs, tokens: (make(tokens),), torch.int64, padding_policy=ZERO)
    count = GraphSlot(
        "count", lambda bs, tokens: [make(1)], torch.int64, axis="none", value_fn=lambda c: seen.append(c) or 7
    )
    for each in (slot, count, planes()):
        registry.register_slot(each)
    batch = {"ids": torch.arange(1, 4)}
    for _ in range(2):
        slot.buffer.fill_(5)
        registry.fill_from(batch, **{name: make(size) for name, size in sizes(3, 4).items()})
        assert slot.buffer.tolist() == [1, 2, 3, 0, 5, 5, 5, 5]
    assert {type(size) for context in seen for size in context[:4]} == {int}
    bucket = {"padded_bs": make(4), "padded_num_tokens": make(4)}
    assert registry.views(**bucket)["ids"] is registry.views(padded_bs=4, padded_num_tokens=4)["ids"]
    shown = registry.extract_buffer(**bucket, forward_batch_template=batch)
    assert (type(shown["batch_size"]), shown["batch_size"], shown["ids"].shape) == (int, 4, (4,))
    assert registry.get_slot("mrope_positions").slice_for(make(4), make(4)).shape == (3, 4)
    decode = build_decode_registry(device="cpu", max_bs=make(4), max_num_token=make(8), seq_len_fill_value=1)
    assert decode.get_slot("seq_lens").buffer.shape == (4,)


def test_what_is_kept_for_a_size_is_not_found_by_what_equals_it() -> None:
    registry = registry_of(by_token("ids"))
    batch, bucket = {"ids": torch.arange(1)}, {"padded_bs": 1, "padded_num_tokens": 1}
    registry.fill_from(batch, **sizes(1, 1))
    registry.views(**bucket)
    given = list(sizes(1, 1))
    for one in (True, 1.0, Stands(True), "1", None):
        for names in itertools.chain.from_iterable(itertools.combinations(given, count) for count in range(1, 5)):
            with pytest.raises(SlotError, match=rf"^`{names[0]}`: .* is no size \[not-a-size\]"):
                registry.fill_from(batch, **{**sizes(1, 1), **dict.fromkeys(names, one)})
        for name in bucket:
            with pytest.raises(SlotError, match=rf"^`{name}`: .* is no size \[not-a-size\]"):
                registry.views(**{**bucket, name: one})
            with pytest.raises(SlotError, match=rf"^`{name}`: .* is no size \[not-a-size\]"):
                registry.extract_buffer(**{**bucket, name: one}, forward_batch_template=batch)
            with pytest.raises(SlotError, match=rf"^`{name}`: .* is no size \[not-a-size\]"):
                registry.get_slot("ids").slice_for(*{**bucket, name: one}.values())


@pytest.mark.parametrize(("executor", "compiler"), [("foreach", ForeachExecutor), ("native", NativeExecutor)])
def test_steps_that_take_turns_at_one_size_are_each_prepared_once(executor: Any, compiler: Any) -> None:
    slot = by_token("ids")
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=8, max_num_tokens=8, executor=executor)
    registry.register_slot(slot)
    kinds = [torch.arange(3), torch.arange(3, dtype=torch.int32), torch.arange(6)[::2], None]
    afters = [[0, 1, 2, 0], [0, 1, 2, 0], [0, 2, 4, 0], [0, 0, 0, 0]]
    with mock.patch.object(compiler, "compile", autospec=True, side_effect=compiler.compile) as compiled:
        for _ in range(3):
            for source, after in zip(kinds, afters, strict=True):
                registry.fill_from({"ids": source}, **sizes(3, 4))
                assert slot.buffer[:4].tolist() == after
    assert compiled.call_count == len(kinds)


# Sources in memory that the fill writes


def test_a_slots_own_rows_may_be_its_source() -> None:
    ids, mrope = by_token("ids"), planes()
    registry = registry_of(ids, mrope)
    batch = {"ids": torch.arange(6), "mrope_positions": torch.arange(18).view(3, 6)}
    registry.fill_from(batch, **sizes(6, 6))
    registry.fill_from({"ids": ids.buffer[:4], "mrope_positions": mrope.buffer[:, :4]}, **sizes(4, 6))
    assert ids.buffer.tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    assert mrope.buffer.tolist() == [[0, 1, 2, 3, 0, 0, 0, 0], [6, 7, 8, 9, 0, 0, 0, 0], [12, 13, 14, 15, 0, 0, 0, 0]]


@pytest.mark.parametrize("name", ["shifted", "other slot", "reversed planes", "narrower rows"])
def test_any_other_source_in_a_slots_memory_is_refused(name: str) -> None:
    ids, locs, square = by_token("ids"), by_token("locs"), planes("square", slice_fn=lambda buffer, n: buffer[:, :n])
    pages = GraphSlot("pages", lambda bs, tokens: (tokens, 4), torch.int64, trailing="prefix")
    registry = registry_of(ids, locs, square, pages)
    batch, message = {
        "shifted": ({"ids": ids.buffer[1:4]}, "slot `ids`: the source shares memory with slot `ids`"),
        "other slot": ({"ids": locs.buffer[:3]}, "slot `ids`: the source shares memory with slot `locs`"),
        "reversed planes": (
            {"square": square.buffer[:, :3].t()}, "slot `square`: the source shares memory with slot `square`",
        ),
        "narrower rows": (
            {"pages": pages.buffer[:3, :2]}, "slot `pages`: the source shares memory with slot `pages`",
        ),
    }[name]  # fmt: skip
    for slot in registry.slots:
        slot.buffer.fill_(5)
    with pytest.raises(SlotError) as caught:
        registry.fill_from(batch, **sizes(3, 6))
    assert told(caught.value) == f"{message} [source-overlap] | hint: pass a copy, or the slot's own rows"
    assert all(slot.buffer.eq(5).all() for slot in registry.slots)


def test_a_source_right_beside_a_buffer_is_not_in_it() -> None:
    memory = torch.arange(24)
    ids = by_token("ids")
    registry = registry_of()
    registry.register_slot(ids, bind=memory[8:16])
    registry.fill_from({"ids": memory[5:8]}, **sizes(3, 3))
    registry.fill_from({"ids": memory[16:19]}, **sizes(3, 3))
    assert memory.tolist() == [*range(8), 16, 17, 18, *range(11, 24)]
    with pytest.raises(SlotError, match="source-overlap"):
        registry.fill_from({"ids": memory[6:9]}, **sizes(3, 3))


# Batches


class Slotted:
    __slots__ = ("batch_size", "ids", "note")

    def __init__(self, ids: torch.Tensor | None) -> None:
        self.ids, self.note, self.batch_size = ids, "kept", 3


@dataclasses.dataclass
class Plain:
    ids: torch.Tensor | None
    note: str = "kept"
    batch_size: int = 3
    total: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        assert self.batch_size == 3, "a copy is not constructed anew"


@dataclasses.dataclass(frozen=True)
class Frozen:
    ids: torch.Tensor | None
    note: str = "kept"
    batch_size: int = 3


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    ids: torch.Tensor | None
    note: str = "kept"
    batch_size: int = 3


class Named(NamedTuple):
    ids: torch.Tensor | None
    note: str = "kept"
    batch_size: int = 3


BATCHES: dict[str, Any] = {
    "dataclass": Plain,
    "frozen dataclass": Frozen,
    "frozen slots dataclass": FrozenSlots,
    "slots": Slotted,
    "named tuple": Named,
    "namespace": lambda ids: types.SimpleNamespace(ids=ids, note="kept", batch_size=3),
    "dict": lambda ids: {"ids": ids, "note": "kept", "batch_size": 3},
    "user dict": lambda ids: collections.UserDict(ids=ids, note="kept", batch_size=3),
    "read-only mapping": lambda ids: types.MappingProxyType({"ids": ids, "note": "kept", "batch_size": 3}),
}


def field(batch: Any, name: str) -> Any:
    return batch[name] if hasattr(batch, "keys") else getattr(batch, name)


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_of_any_kind_is_read_and_shown_again(kind: str) -> None:
    slot = by_token("ids")
    registry = registry_of(slot)
    ids = torch.arange(3)
    batch = BATCHES[kind](ids)
    registry.fill_from(batch, **sizes(3, 6))
    assert slot.buffer.tolist()[:6] == [0, 1, 2, 0, 0, 0]
    shown = registry.extract_buffer(padded_bs=6, padded_num_tokens=6, forward_batch_template=batch)
    assert field(shown, "ids").data_ptr() == slot.buffer.data_ptr()
    assert (tuple(field(shown, "ids").shape), field(shown, "batch_size"), field(shown, "note")) == ((6,), 6, "kept")
    assert (field(batch, "ids") is ids, field(batch, "batch_size")) == (True, 3), "the template is not changed"
    if kind != "read-only mapping":
        assert type(shown) is type(batch)


@pytest.mark.parametrize("kind", BATCHES)
def test_a_field_that_a_batch_lacks_stays_absent(kind: str) -> None:
    registry = registry_of(by_token("ids"), by_token("locs"))
    batch = BATCHES[kind](None)
    registry.fill_from(batch, **sizes(3, 6))
    shown = registry.extract_buffer(padded_bs=6, padded_num_tokens=6, forward_batch_template=batch)
    assert field(shown, "ids") is None
    assert "locs" not in shown if hasattr(shown, "keys") else not hasattr(shown, "locs")


def test_computed_slots_always_show_and_dotted_ones_never() -> None:
    registry = registry_of(
        by_token("written", copy_from_fb=False),
        by_token("given", source_fn=lambda batch, context: None),
        by_token("valued", value_fn=lambda context: 1),
        by_token("proxy.hidden", source_fn=lambda batch, context: None),
    )
    shown = registry.extract_buffer(padded_bs=2, padded_num_tokens=4, forward_batch_template=types.SimpleNamespace())
    assert {name: tuple(view.shape) for name, view in vars(shown).items() if name != "batch_size"} == {
        "written": (4,), "given": (4,), "valued": (4,),
    }  # fmt: skip


@pytest.mark.parametrize("batch", [Named(None), Slotted(None)], ids=["named tuple", "slots"])
def test_a_computed_slot_that_a_batch_has_no_place_for_is_an_error(batch: Any) -> None:
    registry = registry_of(by_token("computed", copy_from_fb=False))
    with pytest.raises(SlotError) as caught:
        registry.extract_buffer(padded_bs=2, padded_num_tokens=4, forward_batch_template=batch)
    kind = type(batch).__name__
    assert told(caught.value) == (
        f"slot `computed`: a `{kind}` has no field to show it in [field-not-settable] | hint: add the "
        f"field `computed` to `{kind}`"
    )


def test_a_batch_size_that_is_computed_is_left_to_the_batch() -> None:
    class Derived:
        def __init__(self, ids: torch.Tensor) -> None:
            self.ids = ids

        @property
        def batch_size(self) -> int:
            return self.ids.shape[0]

    registry = registry_of(by_token("ids"))
    shown = registry.extract_buffer(padded_bs=6, padded_num_tokens=6, forward_batch_template=Derived(torch.arange(3)))
    assert shown.batch_size == 6


# What a graph is about


def test_views_are_the_same_tensors_on_each_call_and_cannot_be_spoiled() -> None:
    registry = registry_of(by_token("ids"), by_request("lens"), by_token("proxy.x", source_fn=lambda batch, c: None))
    views = registry.views(padded_bs=2, padded_num_tokens=4)
    assert {name: tuple(view.shape) for name, view in views.items()} == {"ids": (4,), "lens": (2,)}
    first = views.pop("ids")
    again = registry.views(padded_bs=2, padded_num_tokens=4)
    assert again["ids"] is first
    assert registry.views(padded_bs=8, padded_num_tokens=8)["ids"].data_ptr() == first.data_ptr()
    assert first.data_ptr() == registry.get_slot("ids").buffer.data_ptr()


def test_views_of_a_bucket_that_cannot_be_are_refused() -> None:
    registry = registry_of(by_token("ids"))
    with pytest.raises(SlotError, match=r"^`padded_bs`: 9 is more than the 8 that the buffers hold"):
        registry.views(padded_bs=9, padded_num_tokens=4)


def test_presence_tells_what_a_batch_brings() -> None:
    registry = registry_of(
        by_token("ids", required=True),
        by_token("given", source_fn=lambda batch, context: None),
        by_request("lens"),
        by_request("locs", required=True),
    )
    all_of_them, some, none = {"ids": 1, "lens": 2, "locs": 3}, types.SimpleNamespace(lens=2, ids=None), {}
    masks = [registry.presence(batch) for batch in (all_of_them, some, none)]
    assert masks == [0b111, 0b010, 0]
    assert [registry.missing_required(mask) for mask in masks] == [(), ("ids", "locs"), ("ids", "locs")]
    assert registry.missing_required(0b011) == ("locs",)
    assert registry.unexpected(masks[0], exposed_mask=masks[1]) == ("ids", "locs")
    assert registry.unexpected(masks[1], exposed_mask=masks[0]) == ()


def test_resetting_zeroes_all_rows_of_zero_slots_and_no_other() -> None:
    slots = [by_token(policy.value, policy, pad_value=9) for policy in PaddingPolicy]
    computed = by_request("computed", copy_from_fb=False)
    registry, other = registry_of(*slots, computed), registry_of(by_token("ids"))
    for slot in (*registry.slots, *other.slots):
        slot.buffer.fill_(5)
    reset_index_buffers(registry, other)
    zeroed = {slot.name for slot in (*registry.slots, *other.slots) if slot.buffer.eq(0).all()}
    kept = {slot.name for slot in (*registry.slots, *other.slots) if slot.buffer.eq(5).all()}
    assert zeroed == {"zero", "computed", "ids"}
    assert kept == {"keep_pad", "fill_sentinel", "foreach_copy", "fill_once"}


# Registration


def test_slots_are_looked_up_by_name() -> None:
    ids, lens = by_token("ids"), by_request("lens")
    registry = registry_of(ids, lens)
    assert registry.slot_names == ("ids", "lens")
    assert registry.slots == (ids, lens)
    assert registry.get_slot("lens") is lens
    assert registry.has_slot("ids")
    assert not registry.has_slot("locs")
    with pytest.raises(SlotError) as caught:
        registry.get_slot("locs")
    assert told(caught.value) == "slot `locs`: is not registered [unknown-slot] | hint: registered: `ids`, `lens`"
    assert repr(registry) == "<CudaGraphBufferRegistry on cpu, max_bs=8, max_num_tokens=8: ids, lens>"


def test_a_disabled_slot_is_left_out() -> None:
    slot = by_token("ids", enabled=False)
    registry = registry_of(slot)
    assert (registry.slot_names, slot.buffer) == ((), None)
    registry.fill_from({"ids": "anything"}, **sizes(2, 4))


def test_a_duplicate_is_refused_and_the_first_stays() -> None:
    first = by_token("ids")
    registry = registry_of(first)
    with pytest.raises(SlotError) as caught:
        registry.register_slot(by_token("ids"))
    assert told(caught.value) == "slot `ids`: is registered already [duplicate-slot] | hint: give it another name"
    assert registry.slots == (first,)


def test_a_slot_belongs_to_one_registry() -> None:
    slot = by_token("ids")
    registry_of(slot)
    with pytest.raises(SlotError) as caught:
        registry_of(slot)
    assert told(caught.value) == (
        "slot `ids`: belongs to another registry [already-registered] | hint: declare a slot for each"
    )


def test_only_a_slot_is_registered() -> None:
    with pytest.raises(SlotError) as caught:
        registry_of("ids")  # type: ignore[arg-type]
    assert told(caught.value) == "`'ids'` is no slot [not-a-slot] | hint: pass a `GraphSlot`"


def test_buffers_that_memory_cannot_address_are_refused_and_smaller_ones_are_not() -> None:
    registry = registry_of(max_bs=2**63 - 1)
    with pytest.raises(SlotError, match=r"is more than memory can address \[bad-shape\]"):
        registry.register_slot(by_request("lens"))
    slot = registry.register_slot(GraphSlot("ids", lambda bs, tokens: (tokens,), torch.int64))
    registry.fill_from({"ids": torch.arange(3)}, raw_bs=1, padded_bs=2**62, raw_num_tokens=3, padded_num_tokens=8)
    assert slot.buffer.tolist()[:3] == [0, 1, 2]


def test_buckets_are_multiples_of_what_gives_every_slot_whole_rows_and_every_rank_its_tokens() -> None:
    def shared(name: str, count: int, axis: Any = "tokens") -> GraphSlot:
        return GraphSlot(
            name,
            lambda bs, tokens: ((bs if axis == "bs" else tokens) // count,),
            torch.int64,
            axis=axis,
            slice_fn=lambda buffer, size: buffer[: size // count],
        )

    registry = registry_of(by_token("ids"), by_request("lens"), planes(), max_bs=12, max_num_tokens=24)
    assert registry.alignment == (1, 1)
    registry.register_slot(shared("quarters", 4))
    assert registry.alignment == (1, 4)
    registry.register_slot(shared("sixths", 6))
    registry.register_slot(shared("pairs", 2, axis="bs"))
    assert registry.alignment == (2, 12)
    registry.token_alignment = 8
    assert registry.alignment == (2, 24)


def test_a_later_slot_moves_nothing() -> None:
    registry = registry_of(by_token("ids"))
    before = registry.views(padded_bs=4, padded_num_tokens=4)["ids"].data_ptr()
    registry.fill_from({"ids": torch.arange(3)}, **sizes(3, 4))
    registry.register_slot(by_request("lens"))
    views = registry.views(padded_bs=4, padded_num_tokens=4)
    assert (views["ids"].data_ptr(), views["ids"].tolist()) == (before, [0, 1, 2, 0])
    registry.fill_from({"ids": torch.arange(4), "lens": torch.arange(4)}, **sizes(4, 4))
    assert views["lens"].tolist() == [0, 1, 2, 3]


NO_PREFIX = "[slice-no-prefix] | hint: cut a prefix along one dimension, as `lambda buffer, size: buffer[:, :size]`"
AS_DIMENSION = (
    "[capacity-too-small] | hint: size it by the second argument of `shape_fn`, or cut another dimension with a "
    "`slice_fn`"
)


@pytest.mark.parametrize(
    ("slot", "message"),
    [
        (
            GraphSlot("x", lambda bs, tokens: (3, tokens), torch.int64),
            "slot `x`: shape [3, 8] grows with `tokens` along dimension 1, but dimension 0 is cut [bad-shape] | "
            "hint: give `slice_fn=lambda buffer, size: buffer[:, :size]`",
        ),
        (
            GraphSlot("x", lambda bs, tokens: (3, 4), torch.int64),
            f"slot `x`: shape [3, 4] has too few rows along dimension 0 {AS_DIMENSION}",
        ),
        (
            GraphSlot("x", lambda bs, tokens: (7,), torch.int64),
            f"slot `x`: shape [7] has too few rows along dimension 0 {AS_DIMENSION}",
        ),
        (
            GraphSlot("x", lambda bs, tokens: (), torch.int64),
            f"slot `x`: shape [] has too few rows along dimension 0 {AS_DIMENSION}",
        ),
        (
            GraphSlot("x", lambda bs, tokens: tokens, torch.int64),  # type: ignore[arg-type, return-value]
            "slot `x`: `shape_fn` gave `8` [bad-shape] | hint: return a tuple of sizes",
        ),
        (
            GraphSlot("x", lambda bs, tokens: (-1, tokens), torch.int64),
            "slot `x`: `shape_fn` gave `(-1, 8)` [bad-shape] | hint: return a tuple of sizes",
        ),
        (
            GraphSlot("x", lambda bs, tokens: (tokens / 1,), torch.int64),  # type: ignore[arg-type, return-value]
            "slot `x`: `shape_fn` gave `(8.0,)` [bad-shape] | hint: return a tuple of sizes",
        ),
        (
            GraphSlot("x", lambda bs, tokens: (True, tokens), torch.int64),
            "slot `x`: `shape_fn` gave `(True, 8)` [bad-shape] | hint: return a tuple of sizes",
        ),
        (
            GraphSlot("x", lambda bs, tokens: "8", torch.int64),  # type: ignore[arg-type, return-value]
            "slot `x`: `shape_fn` gave `'8'` [bad-shape] | hint: return a tuple of sizes",
        ),
        (
            GraphSlot("x", lambda bs, tokens: (2**70,), torch.int64),
            "slot `x`: `shape_fn` gave `(1180591620717411303424,)` [bad-shape] | hint: return a tuple of sizes",
        ),
        (
            GraphSlot("x", lambda bs, tokens: (2**60, tokens), torch.bool, axis="none"),
            "slot `x`: shape [1152921504606846976, 8] is more than memory can address [bad-shape]",
        ),
        (
            GraphSlot("x", lambda bs, tokens: (tokens,) * (tokens - 6), torch.int64),
            "slot `x`: `shape_fn` gave 2 dimensions, and 3 for one more along `tokens` [bad-shape] | hint: return as "
            "many dimensions for every size",
        ),
        (
            by_token("x", slice_fn=lambda buffer, n: buffer[:n].to_sparse()),
            f"slot `x`: `slice_fn` gave something else than the buffer's first rows at size 0 {NO_PREFIX}",
        ),
        (
            by_token("x", slice_fn=lambda buffer, n: torch._neg_view(buffer)[:n]),
            f"slot `x`: `slice_fn` gave something else than the buffer's first rows at size 0 {NO_PREFIX}",
        ),
        (
            GraphSlot("x", lambda bs, tokens: (tokens, 0), torch.int64),
            "slot `x`: shape [8, 0] holds no element [empty-shape]",
        ),
        (
            GraphSlot("x", lambda bs, tokens: (tokens,), torch.int64, trailing="prefix"),
            'slot `x`: shape [8] has no axis after its rows for `trailing="prefix"` [no-trailing-axis]',
        ),
        (
            GraphSlot("x", lambda bs, tokens: (tokens, 2), torch.int64, value_fn=lambda context: 1),
            "slot `x`: `value_fn` has no value for shape [8, 2] [bad-shape] | hint: use at most one dimension",
        ),
        (
            by_token("x", slice_fn=lambda buffer, n: buffer[1 : n + 1]),
            f"slot `x`: `slice_fn` gave something else than the buffer's first rows at size 0 {NO_PREFIX}",
        ),
        (
            by_token("x", slice_fn=lambda buffer, n: buffer[:n].clone()),
            f"slot `x`: `slice_fn` gave something else than the buffer's first rows at size 0 {NO_PREFIX}",
        ),
        (
            by_token("x", slice_fn=lambda buffer, n: buffer[::2][:n]),
            f"slot `x`: `slice_fn` gave something else than the buffer's first rows at size 0 {NO_PREFIX}",
        ),
        (
            by_token("x", slice_fn=lambda buffer, n: None),
            f"slot `x`: `slice_fn` gave something else than the buffer's first rows at size 0 {NO_PREFIX}",
        ),
        (
            by_token("x", slice_fn=lambda buffer, n: buffer),
            f"slot `x`: `slice_fn` cuts nothing {NO_PREFIX}",
        ),
        (
            planes("x", slice_fn=lambda buffer, n: buffer[:n, :n]),
            f"slot `x`: `slice_fn` cuts dimensions [0, 1] {NO_PREFIX}",
        ),
        (
            by_token("x", slice_fn=lambda buffer, n: buffer[: 8 - n]),
            f"slot `x`: `slice_fn` gives 0 rows at size 8 and 8 at size 0 {NO_PREFIX}",
        ),
        (
            by_token("x", slice_fn=lambda buffer, n: buffer[: -(-n // 4)]),
            f"slot `x`: `slice_fn` gives 1 rows at size 2, where sizes 0 and 1 promise 2 {NO_PREFIX}",
        ),
        (
            by_token("x", slice_fn=lambda buffer, n: buffer[: n // 3]),
            "slot `x`: a bucket of 8 is not a multiple of 3 [bucket-not-divisible] | hint: use 6 or 9",
        ),
    ],
)
@pytest.mark.parametrize("share_pool", [False, True], ids=["private", "pooled"])
def test_a_slot_whose_functions_do_not_fit_is_refused_and_nothing_is_registered(
    slot: GraphSlot, message: str, share_pool: bool
) -> None:
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=8, max_num_tokens=8, share_pool=share_pool)
    with pytest.raises(SlotError) as caught:
        registry.register_slot(slot)
    assert told(caught.value) == message
    assert (registry.slot_names, slot.buffer) == ((), None)


def bad_buffers() -> dict[str, tuple[Any, str]]:
    with torch.inference_mode():
        inference = torch.zeros(8, dtype=torch.int64)
    of = "slot `ids`: "
    shared = of + "elements of shape [8] with strides [0] share memory [shared-elements]"
    return {
        "shape": (torch.zeros(9, dtype=torch.int64), of + "the bound tensor has shape [9], expected [8] [bound-shape]"),
        "dtype": (
            torch.zeros(8, dtype=torch.int32), of + "the bound tensor has dtype int32, expected int64 [bound-dtype]",
        ),
        "device": (
            torch.zeros(8, dtype=torch.int64, device="meta"),
            of + "the bound tensor has device meta, expected cpu [bound-device]",
        ),
        "inference": (
            inference,
            of + "the bound tensor was made in `inference_mode` and cannot be written outside it [bound-inference] | "
            "hint: make it under `torch.inference_mode(False)`",
        ),
        "expanded": (torch.zeros(1, dtype=torch.int64).expand(8), shared),
        "no tensor": ([0] * 8, of + "a `list` cannot be its buffer [not-a-tensor] | hint: bind a dense tensor"),
        "no memory": (
            without_memory(torch.zeros(8, dtype=torch.int64))["freed"],
            of + "the bound tensor has no memory [not-a-tensor] | hint: bind a dense tensor",
        ),
        **{
            name: (tensor, of + f"a {kind} cannot be its buffer [not-a-tensor] | hint: bind a dense tensor")
            for name, (tensor, kind) in not_dense().items()
        },
    }  # fmt: skip


@pytest.mark.parametrize("name", bad_buffers())
def test_a_tensor_that_does_not_fit_is_not_bound(name: str) -> None:
    buffer, message = bad_buffers()[name]
    registry = registry_of()
    for register in (
        lambda: registry.register_slot(by_token("ids"), bind=buffer),
        lambda: registry.register_slot(by_token("ids", buffer=buffer)),
    ):
        with pytest.raises(SlotError) as caught:
            register()
        assert told(caught.value) == message
        assert registry.slot_names == ()


def test_a_tensor_that_needs_gradients_is_not_bound() -> None:
    with pytest.raises(SlotError) as caught:
        registry_of().register_slot(by_token("x", dtype=torch.float32), bind=torch.zeros(8, requires_grad=True))
    assert told(caught.value) == (
        "slot `x`: the bound tensor requires grad [bound-grad] | hint: bind `tensor.detach()`"
    )


def test_a_bound_tensor_is_adopted_where_it_is_and_not_written() -> None:
    buffer = torch.arange(8)
    slot = by_token("ids", FILL_ONCE, pad_value=9)
    registry_of().register_slot(slot, bind=buffer)
    assert slot.buffer is buffer
    assert buffer.tolist() == list(range(8))


def test_a_slot_cannot_be_bound_to_two_tensors() -> None:
    buffer = torch.zeros(8, dtype=torch.int64)
    with pytest.raises(SlotError, match=r"^slot `ids`: has a buffer of its own besides `bind` \[bound-twice\]"):
        registry_of().register_slot(by_token("ids", buffer=buffer), bind=buffer.clone())
    assert registry_of().register_slot(by_token("ids", buffer=buffer), bind=buffer).buffer is buffer


def test_two_slots_of_a_registry_share_no_memory() -> None:
    memory = torch.zeros(16, dtype=torch.int64)
    registry = registry_of()
    registry.register_slot(by_token("ids"), bind=memory[:8])
    with pytest.raises(SlotError) as caught:
        registry.register_slot(by_token("locs"), bind=memory[7:15])
    assert told(caught.value) == (
        "slot `locs`: the bound tensor shares memory with slot `ids` [bound-overlap] | hint: no two slots of a "
        "registry can share memory"
    )
    registry.register_slot(by_token("locs"), bind=memory[8:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_bs": 0}, "`max_bs`: 0 is no size [bad-capacity] | hint: use an integer from 1 to 2**63 - 1"),
        (
            {"max_num_tokens": True},
            "`max_num_tokens`: True is no size [bad-capacity] | hint: use an integer from 1 to 2**63 - 1",
        ),
        (
            {"max_bs": 2**64},
            "`max_bs`: 18446744073709551616 is no size [bad-capacity] | hint: use an integer from 1 to 2**63 - 1",
        ),
        ({"max_bs": 10**9999}, "`max_bs`: <int> is no size [bad-capacity] | hint: use an integer from 1 to 2**63 - 1"),
        ({"max_bs": "4"}, "`max_bs`: '4' is no size [bad-capacity] | hint: use an integer from 1 to 2**63 - 1"),
        ({"device": "abacus"}, "`abacus` is no device of this machine [bad-device]"),
        ({"device": None}, "`None` is no device of this machine [bad-device]"),
        ({"device": 2**70}, "`1180591620717411303424` is no device of this machine [bad-device]"),
        ({"share_pool": "x"}, "`share_pool`: `'x'` is no flag [bad-option] | hint: use True or False"),
    ],
)
def test_a_registry_that_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SlotError) as caught:
        CudaGraphBufferRegistry(**{"device": "cpu", "max_bs": 2, "max_num_tokens": 2, **arguments})
    assert told(caught.value) == message


def test_spellings_of_a_device_are_one_device() -> None:
    for device in ("cpu", "cpu:0", torch.device("cpu")):
        assert CudaGraphBufferRegistry(device=device, max_bs=1, max_num_tokens=1).device == torch.device("cpu")


def test_what_is_kept_for_later_steps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("devicegraph.steps.CACHE_SIZE", 3)
    slot = by_token("ids")
    registry = registry_of(slot)
    for _ in range(2):
        for raw in range(1, 7):
            registry.fill_from({"ids": torch.arange(raw)}, **sizes(raw, 6))
            assert slot.buffer.tolist()[:6] == [*range(raw), *[0] * (6 - raw)]
            assert registry.views(padded_bs=raw, padded_num_tokens=raw)["ids"].shape == (raw,)
    assert len(registry._steps._steps) == len(registry._steps.latest) == len(registry._views) == 3
