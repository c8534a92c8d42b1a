"""Declaring slots: what is checked when one is made, and what it says of itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from devicegraph import CudaGraphBufferRegistry, FillContext, GraphSlot, PaddingPolicy, SlotError


def slot(name: Any = "input_ids", **options: Any) -> GraphSlot:
    return GraphSlot(name, **{"shape_fn": lambda bs, tokens: (tokens,), "dtype": torch.int64, **options})


def told(error: SlotError) -> str:
    return str(error).replace("\n\n", " | ")


ZERO = PaddingPolicy.ZERO


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"name": ""},
            "slot ``: the name is no identifier [bad-name] | hint: name a field, as `input_ids`",
        ),
        (
            {"name": "seq lens"},
            "slot `seq lens`: the name is no identifier [bad-name] | hint: name a field, as `input_ids`",
        ),
        (
            {"name": "batch_size"},
            "slot `batch_size`: the name is the batch's own size [bad-name] | hint: name a field, as `input_ids`",
        ),
        (
            {"name": "proxy.hidden"},
            "slot `proxy.hidden`: a dotted name is no field of a batch [bad-name] | hint: say where the rows come "
            "from, with `source_fn`",
        ),
        (
            {"axis": "rows"},
            "slot `input_ids`: `rows` is no axis [bad-axis] | hint: use `bs`, `tokens` or `none`",
        ),
        (
            {"dtype": "int64"},
            "slot `input_ids`: `int64` is no dtype [bad-dtype] | hint: use a torch dtype",
        ),
        ({"dtype": torch.complex64}, "slot `input_ids`: `complex64` is no slot dtype [unsupported-dtype]"),
        ({"dtype": torch.quint8}, "slot `input_ids`: `quint8` is no slot dtype [unsupported-dtype]"),
        (
            {"padding_policy": "zero"},
            "slot `input_ids`: `zero` is no padding policy [bad-policy] | hint: use `KEEP_PAD`, `FILL_SENTINEL`, "
            "`ZERO`, `FOREACH_COPY`, `FILL_ONCE`",
        ),
        (
            {"axis": "none", "padding_policy": ZERO},
            "slot `input_ids`: a slot without rows has nothing to pad by `ZERO` [bad-policy] | hint: use `KEEP_PAD` "
            'with `axis="none"`',
        ),
        (
            {"axis": "none", "slice_fn": lambda buffer, n: buffer},
            "slot `input_ids`: a slot without rows has nothing to slice [bad-option] | hint: drop `slice_fn`",
        ),
        ({"pad_value": 1.5}, "slot `input_ids`: `1.5` is no `int64` [bad-pad-value]"),
        ({"pad_value": 300, "dtype": torch.uint8}, "slot `input_ids`: `300` is no `uint8` [bad-pad-value]"),
        ({"pad_value": 2, "dtype": torch.bool}, "slot `input_ids`: `2` is no `bool` [bad-pad-value]"),
        ({"pad_value": 1e6, "dtype": torch.float16}, "slot `input_ids`: `1000000.0` is no `float16` [bad-pad-value]"),
        ({"pad_value": None}, "slot `input_ids`: `None` is no `int64` [bad-pad-value]"),
        ({"pad_value": "0"}, "slot `input_ids`: `'0'` is no `int64` [bad-pad-value]"),
        (
            {"pad_value": 10**400, "dtype": torch.float32},
            f"slot `input_ids`: `1{'0' * 59}...` is no `float32` [bad-pad-value]",
        ),
        ({"pad_value": -(10**400)}, f"slot `input_ids`: `-1{'0' * 58}...` is no `int64` [bad-pad-value]"),
        ({"pad_value": 10**9999}, "slot `input_ids`: `<int>` is no `int64` [bad-pad-value]"),
        (
            {"axis": np.array(["bs", "tokens"])},
            "slot `input_ids`: `array(['bs', 'tokens'], dtype='<U6')` is no axis [bad-axis] | hint: use `bs`, `tokens` "
            "or `none`",
        ),
        ({"axis": None}, "slot `input_ids`: `None` is no axis [bad-axis] | hint: use `bs`, `tokens` or `none`"),
        (
            {"device": "abacus"},
            "slot `input_ids`: `abacus` is no device [bad-device] | hint: write it as `cuda:0` or `cpu`",
        ),
        (
            {"device": 1.5},
            "slot `input_ids`: `1.5` is no device [bad-device] | hint: write it as `cuda:0` or `cpu`",
        ),
        (
            {"device": 2**70},
            "slot `input_ids`: `1180591620717411303424` is no device [bad-device] | hint: write it as `cuda:0` or "
            "`cpu`",
        ),
        *(
            (
                {flag: value},
                f"slot `input_ids`: `{flag}`: `{value!r}` is no flag [bad-option] | hint: use True or False",
            )
            for flag in ("required", "copy_from_fb", "enabled", "allow_narrowing")
            for value in ("x", 1, None, np.array([1, 2]))
        ),
        ({"shape_fn": None}, "slot `input_ids`: `shape_fn` is not callable [bad-option]"),
        ({"post_fill": 1}, "slot `input_ids`: `post_fill` is not callable [bad-option]"),
        (
            {"source_fn": lambda batch, context: None, "value_fn": lambda context: 1},
            "slot `input_ids`: `source_fn`, `value_fn` and `copy_from_fb=False` are three origins of the live rows "
            "[bad-option] | hint: give at most one",
        ),
        (
            {"source_fn": lambda batch, context: None, "required": True},
            "slot `input_ids`: `required` is for a field of the batch [bad-option] | hint: drop `required`",
        ),
        (
            {"source_device": "cuda"},
            "slot `input_ids`: `cuda` is no place for a source [bad-option] | hint: use None, `cpu` or `any`",
        ),
        (
            {"source_device": torch.device("cpu")},
            "slot `input_ids`: `device(type='cpu')` is no place for a source [bad-option] | hint: use None, `cpu` or "
            "`any`",
        ),
        (
            {"source_device": np.array(["cpu", "any"])},
            "slot `input_ids`: `array(['cpu', 'any'], dtype='<U3')` is no place for a source [bad-option] | hint: use "
            "None, `cpu` or `any`",
        ),
        (
            {"trailing": np.array([1, 2])},
            "slot `input_ids`: `array([1, 2])` is no rule for the last dimension [bad-option] | hint: use `exact` or "
            "`prefix`",
        ),
        (
            {"trailing": "suffix"},
            "slot `input_ids`: `suffix` is no rule for the last dimension [bad-option] | hint: use `exact` or `prefix`",
        ),
    ],
)
def test_a_slot_that_cannot_be_is_refused_when_it_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SlotError) as caught:
        slot(**options)
    assert told(caught.value) == message
    assert caught.value.slot == options.get("name", "input_ids")


def test_the_signature_is_the_ancestors_with_the_rest_by_keyword() -> None:
    fields = [field for field in dataclasses.fields(GraphSlot) if field.init]
    assert [field.name for field in fields if not field.kw_only] == [
        "name", "shape_fn", "dtype", "axis", "device", "padding_policy", "pad_value", "post_fill", "slice_fn",
        "source_fn", "copy_from_fb", "enabled", "buffer",
    ]  # fmt: skip
    assert {field.name: field.default for field in fields if field.kw_only} == {
        "required": False, "source_device": None, "allow_narrowing": False, "trailing": "exact", "value_fn": None,
    }  # fmt: skip
    plain = slot()
    assert (plain.axis, plain.padding_policy, plain.pad_value) == ("tokens", PaddingPolicy.KEEP_PAD, 0)
    assert plain.copy_from_fb
    assert plain.enabled


class Seven(int):
    def __repr__(self) -> str:
        return "0"


@pytest.mark.parametrize(
    ("pad_value", "dtype", "kept"),
    [
        (7, torch.float32, 7.0),
        (10**30, torch.float32, 1e30),
        (True, torch.int32, 1),
        (1, torch.bool, True),
        (Seven(7), torch.int64, 7),
        (2**64 - 1, torch.uint64, 2**64 - 1),
    ],
)
def test_a_pad_value_is_kept_as_the_plain_number_of_its_dtype(pad_value: Any, dtype: torch.dtype, kept: Any) -> None:
    padded = slot(pad_value=pad_value, dtype=dtype, padding_policy=PaddingPolicy.FILL_ONCE)
    assert (type(padded.pad_value), padded.pad_value) == (type(kept), kept)
    CudaGraphBufferRegistry(device="cpu", max_bs=2, max_num_tokens=2).register_slot(padded)
    assert padded.buffer.tolist() == torch.tensor([kept, kept], dtype=dtype).tolist()


def test_a_slot_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        slot().padding_policy = ZERO  # type: ignore[misc]


def test_a_context_is_its_sizes() -> None:
    assert FillContext(1, 2, 3, 4) == (1, 2, 3, 4, None)
    assert FillContext(1, 2, 3, 4).forward_batch == {}
    assert FillContext(raw_bs=1, padded_bs=2, raw_num_tokens=3, padded_num_tokens=4).padded_num_tokens == 4


def test_a_slot_says_what_it_is() -> None:
    ids = slot(padding_policy=ZERO)
    assert repr(ids) == "<GraphSlot input_ids: not registered, int64, axis=tokens, ZERO>"
    CudaGraphBufferRegistry(device="cpu", max_bs=2, max_num_tokens=4).register_slot(ids)
    assert repr(ids) == "<GraphSlot input_ids: [4] on cpu, int64, axis=tokens, ZERO>"


def test_a_host_slot_is_one_that_says_so() -> None:
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=2, max_num_tokens=4)
    inherits, says = registry.register_slot(slot("a")), registry.register_slot(slot("b", device="cpu"))
    assert (inherits.is_host, says.is_host) == (False, True)
    assert inherits.buffer.device == says.buffer.device


@pytest.mark.parametrize(
    ("options", "is_plain"),
    [
        ({}, True),
        ({"source_fn": lambda batch, context: None}, False),
        ({"value_fn": lambda context: 1}, False),
        ({"copy_from_fb": False}, False),
    ],
)
def test_a_plain_slot_is_a_field_of_the_batch(options: dict[str, Any], is_plain: bool) -> None:
    assert slot(**options).is_plain == is_plain


def test_a_slice_starts_where_the_buffer_does() -> None:
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=4, max_num_tokens=16)
    ids = registry.register_slot(slot("ids"))
    lens = registry.register_slot(slot("lens", shape_fn=lambda bs, tokens: (bs,), axis="bs"))
    planes = registry.register_slot(
        slot("planes", shape_fn=lambda bs, tokens: (3, tokens), slice_fn=lambda buffer, n: buffer[:, :n])
    )
    count = registry.register_slot(slot("count", shape_fn=lambda bs, tokens: (1,), axis="none"))
    shapes = {each.name: tuple(each.slice_for(2, 8).shape) for each in (ids, lens, planes, count)}
    assert shapes == {"ids": (8,), "lens": (2,), "planes": (3, 8), "count": (1,)}
    for each in registry.slots:
        assert each.slice_for(1, 4).data_ptr() == each.slice_for(4, 16).data_ptr() == each.buffer.data_ptr()


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (17, "`padded_num_tokens`: 17 is more than the 16 that the buffers hold [above-capacity]"),
        (-1, "`padded_num_tokens`: -1 is negative [negative-size]"),
        (True, "`padded_num_tokens`: True is no size [not-a-size]"),
        (4.0, "`padded_num_tokens`: 4.0 is no size [not-a-size]"),
        (2**70, "`padded_num_tokens`: 1180591620717411303424 is no size [not-a-size]"),
    ],
)
def test_a_slice_of_a_bucket_that_cannot_be_is_refused(size: Any, message: str) -> None:
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=4, max_num_tokens=16)
    ids = registry.register_slot(slot())
    with pytest.raises(SlotError) as caught:
        ids.slice_for(1, size)
    assert str(caught.value) == message


def test_a_slot_has_no_slice_before_it_is_registered() -> None:
    with pytest.raises(SlotError, match=r"^slot `input_ids`: has no buffer yet \[not-registered\]"):
        slot().slice_for(1, 4)
    given = slot(buffer=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(SlotError, match=r"^slot `input_ids`: has no buffer yet \[not-registered\]"):
        given.slice_for(1, 4)
