"""Walking outputs and finding their rows."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import devicegraph as dg
from devicegraph.outputs import infer_row_axes, map_tensors, replace_tensors, shapes_of, tensors_of


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
