"""Walking outputs and finding their rows."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import Self

import devicegraph as dg
from devicegraph.outputs import (
    bytes_of,
    check_row_axes,
    infer_row_axes,
    map_tensors,
    replace_tensors,
    shapes_of,
    tensors_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable


class Named(NamedTuple):
    a: torch.Tensor
    b: object


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    rest: object = None
    derived: int = field(init=False, default=7)


@dataclass
class Counted:
    made = 0
    x: torch.Tensor

    def __post_init__(self) -> None:
        Counted.made += 1


def test_every_container_comes_back_in_its_own_class_and_the_original_is_left_alone() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    ordered, default = OrderedDict(b=one, a=two), defaultdict(list, k=three)
    output = (one, [two, "text"], Named(three, None), Frozen(one, {"n": two}), ordered, default, 5)
    mapped = map_tensors(output, lambda tensor: tensor + 1)
    assert [tensor.tolist() for tensor in tensors_of(mapped)] == [(t + 1).tolist() for t in tensors_of(output)]
    assert [type(part) for part in mapped] == [type(part) for part in output]
    assert (mapped[1][1], mapped[2].b, mapped[3].derived, mapped[6]) == ("text", None, 7, 5)
    assert list(mapped[4]) == ["b", "a"]
    assert mapped[5]["new"] == []
    assert tensors_of(output) == [one, two, three, one, two, one, two, three]


class Tagged(tuple[torch.Tensor, ...]):
    tag: str


class Rows(list[torch.Tensor]):
    pass


class Checked(NamedTuple):
    x: torch.Tensor


class Subclassed(Checked):
    def __new__(cls, x: object) -> Self:
        if not isinstance(x, torch.Tensor):
            raise TypeError(x)
        return super().__new__(cls, x)


def test_subclasses_and_the_results_of_torch_operators_keep_their_class() -> None:
    tagged = Tagged([torch.ones(1)])
    tagged.tag = "t"
    output = [
        tagged,
        Rows([torch.ones(2)]),
        Subclassed(torch.ones(3)),
        torch.ones(4, 2).topk(1),
        SimpleNamespace(x=torch.ones(1), y=[torch.ones(1)], z=3),
    ]
    mapped = map_tensors(output, lambda tensor: tuple(tensor.shape))
    assert [type(part) for part in mapped] == [type(part) for part in output]
    assert (list(mapped[0]), mapped[0].tag, list(mapped[1]), mapped[2].x) == ([(1,)], "t", [(2,)], (3,))
    assert (mapped[3].values, mapped[3].indices) == ((4, 1), (4, 1))
    assert mapped[4] == SimpleNamespace(x=(1,), y=[(1,)], z=3)
    assert torch.equal(output[4].x, torch.ones(1))


def test_an_output_class_of_transformers_is_replaced_by_item_and_by_attribute() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    output = outputs.CausalLMOutputWithPast(logits=torch.ones(2, 3), hidden_states=(torch.ones(1), torch.ones(2)))
    mapped = map_tensors(output, lambda tensor: tensor + 1)
    assert type(mapped) is type(output)
    assert mapped.logits is mapped["logits"]
    assert torch.equal(mapped.logits, torch.full((2, 3), 2.0))
    assert torch.equal(mapped.hidden_states[1], torch.full((2,), 2.0))
    assert mapped.loss is None
    assert torch.equal(output.logits, torch.ones(2, 3))


def test_parts_without_tensors_pass_through_as_they_are() -> None:
    class Odd(tuple[int, ...]):
        def __new__(cls) -> Self:
            return super().__new__(cls, (1, 2))

    module = torch.nn.Linear(1, 1)
    parts = [torch.Size([2]), Odd(), [1, [2]], {"a": {3}}, SimpleNamespace(n=1), module, deque([1]), object()]
    mapped = map_tensors({"x": torch.ones(1), "parts": parts}, lambda tensor: tensor)
    assert mapped["parts"] is parts
    nothing = {"a": [1]}
    assert map_tensors(nothing, lambda tensor: tensor) is nothing


class Holder:
    def __init__(self, held: object) -> None:
        self.held = held


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held


@pytest.mark.parametrize(
    "make",
    [
        Holder,
        Slotted,
        lambda tensor: Holder([tensor]),
        lambda tensor: Slotted({"k": tensor}),
        lambda tensor: {tensor},
        lambda tensor: deque([tensor]),
        lambda tensor: MappingProxyType({"k": tensor}),
        lambda tensor: UserDict(k=tensor),
    ],
)
def test_tensors_in_an_object_of_another_kind_are_refused(make: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(dg.CaptureError, match="has tensors in a `") as caught:
        tensors_of([make(torch.ones(1))])
    assert caught.value.code == "output-unknown"


@pytest.mark.parametrize(
    ("axes", "shapes"),
    [
        ([], [(4, 2)]),
        ([dg.RowAxis(2)], [(4, 2)]),
        ([dg.RowAxis(0, 2)], [(4, 2)]),
        ([None, dg.RowAxis(0, 1, 1)], [(1,), (4,)]),
        ([dg.RowAxis(0)], [()]),
    ],
)
def test_row_axes_that_an_output_has_no_place_for_are_refused(
    axes: list[dg.RowAxis | None], shapes: list[tuple[int, ...]]
) -> None:
    with pytest.raises(dg.CaptureError) as caught:
        check_row_axes(axes, shapes, 4)
    assert caught.value.code == "output-rows"


def test_row_axes_may_leave_rows_over_and_count_from_the_end() -> None:
    check_row_axes([dg.RowAxis(-1), dg.RowAxis(0, 2, 1), None], [(2, 8), (9,), ()], 4)


def test_a_dataclass_is_copied_without_running_its_constructor_again() -> None:
    output = Counted(torch.ones(1))
    made = Counted.made
    assert torch.equal(replace_tensors(output, [torch.zeros(1)]).x, torch.zeros(1))
    assert Counted.made == made


shapes = st.lists(st.integers(0, 9), max_size=3)


@given(
    st.lists(st.tuples(shapes, st.integers(1, 4), st.integers(0, 3), st.booleans()), max_size=4),
    st.integers(1, 64),
    st.integers(1, 64),
)
def test_rows_are_found_wherever_they_are(
    tensors: list[tuple[list[int], int, int, bool]], first: int, second: int
) -> None:
    if first == second:
        second += 1
    want = tuple(
        dg.RowAxis(len(rest) // 2, scale, offset) if follows else None for rest, scale, offset, follows in tensors
    )

    def at(size: int) -> list[tuple[int, ...]]:
        found = []
        for (rest, _, _, _), axis in zip(tensors, want, strict=True):
            shape = list(rest)
            if axis is not None:
                shape.insert(axis.axis, axis.rows(size))
            found.append(tuple(shape))
        return found

    assert infer_row_axes(at(first), first, at(second), second) == want


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([(8, 8)], [(4, 4)]),
        ([(8,)], [(4, 1)]),
        ([(8,)], [(8,), (4,)]),
        ([(7,)], [(4,)]),
        ([(4,)], [(8,)]),
        ([(8,)], [(0,)]),
    ],
    ids=["two axes", "other dimensions", "other tensors", "no whole number", "shrinking", "negative offset"],
)
def test_rows_that_cannot_be_told_are_refused(first: list[tuple[int, ...]], second: list[tuple[int, ...]]) -> None:
    with pytest.raises(dg.CaptureError) as caught:
        infer_row_axes(first, 8, second, 4)
    assert caught.value.code == "output-rows"
    assert "output_axes" in (caught.value.hint or "")


def test_shapes_are_those_of_the_tensors_in_order() -> None:
    assert shapes_of({"a": torch.ones(2, 3), "b": [torch.ones(())]}) == [(2, 3), ()]


def test_bytes_are_those_of_the_elements_whatever_the_strides() -> None:
    table = torch.arange(12.0).view(3, 4)
    pairs = torch.view_as_complex(table.view(3, 2, 2))
    views = [
        table,
        table.t(),
        table[:1, 1],
        table[1:2].t()[2],
        table[0, 0],
        table[:0, 1],
        pairs.conj(),
        pairs.conj().imag,
    ]
    for view in [*views, table[:, :1].expand(-1, 3)]:
        plain = torch.tensor(view.tolist(), dtype=view.dtype).view(view.shape)
        assert bytes_of(view).tolist() == plain.reshape(-1).view(torch.uint8).tolist()
