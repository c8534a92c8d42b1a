"""Where the results of two launches differ: in a bit, or by more than a tolerance."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from devicegraph.outputs import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Result", "first_difference", "first_far", "first_moved", "moved_rows"]

#: The tolerance of dtypes that have none of their own: those of 8 bits.
_COARSEST: Final = 0.25


class Result(NamedTuple):
    """What a launch gave: copies of the tensors of its output, and of the state but for the reserved rows."""

    output: list[torch.Tensor]
    state: dict[str, torch.Tensor]


def first_moved(plain: Result, other: Result) -> str | None:
    """The first place where two results differ in a bit."""
    return _first_place(plain, other, first_difference)


def first_far(eager: Result, replayed: Result, tolerances: Mapping[torch.dtype, float]) -> str | None:
    """The first place where a replay is too far from eager."""
    shapes = [[list(tensor.shape) for tensor in result.output] for result in (eager, replayed)]
    if shapes[0] != shapes[1]:
        return f"the output, whose tensors are {shapes[0]} eagerly and {shapes[1]} replayed"
    dtypes = [[str(tensor.dtype).removeprefix("torch.") for tensor in result.output] for result in (eager, replayed)]
    if dtypes[0] != dtypes[1]:
        return f"the output, whose tensors are of {dtypes[0]} eagerly and of {dtypes[1]} replayed"
    return _first_place(eager, replayed, partial(_first_far_element, tolerances=tolerances))


def _first_place(
    one: Result, other: Result, difference: Callable[[torch.Tensor, torch.Tensor], list[int] | None]
) -> str | None:
    for position, pair in enumerate(zip(one.output, other.output, strict=True)):
        index = difference(*pair)
        if index is not None:
            return f"tensor {position} of the output at {index}"
    for name, before in one.state.items():
        index = difference(before, other.state[name])
        if index is not None:
            return f"state `{name}` at {[index[0] + 1, *index[1:]]}"
    return None


def first_difference(one: torch.Tensor, other: torch.Tensor) -> list[int] | None:
    """The index of the first element whose bits differ; NaN is like itself, and 0.0 unlike -0.0."""
    return _first_index(_bytes(one) != _bytes(other), one.shape)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """`[elements, bytes of one]`."""
    return bytes_of(tensor).view(tensor.numel(), tensor.itemsize)


def _first_far_element(
    want: torch.Tensor, got: torch.Tensor, *, tolerances: Mapping[torch.dtype, float]
) -> list[int] | None:
    if first_difference(want, got) is None:
        return None
    if want.is_complex():
        want, got = torch.view_as_real(want), torch.view_as_real(got)
    if not want.dtype.is_floating_point:
        return _first_index(want != got, want.shape)
    tolerance = tolerances.get(want.dtype, _COARSEST)
    if want.dtype != torch.float64:
        want, got = want.float(), got.float()
    largest = want.abs().nan_to_num(0.0, 0.0, 0.0).max()
    is_near = ((want - got).abs() <= tolerance * largest) | (want == got) | (want.isnan() & got.isnan())
    return _first_index(~is_near, want.shape)


def _first_index(is_different: torch.Tensor, shape: Sequence[int]) -> list[int] | None:
    flat = is_different.reshape(math.prod(shape), -1).any(1) if is_different.numel() else is_different.reshape(-1)
    if not flat.any():
        return None
    # As numbers, since booleans have no largest on every device.
    position = int(flat.to(torch.int32).argmax())
    index = []
    for size in reversed(shape):
        position, place = divmod(position, size)
        index.append(place)
    return index[::-1]


def moved_rows(plain: Result, other: Result) -> set[tuple[str, int]]:
    """The rows of the state that differ."""
    moved = set()
    for name, before in plain.state.items():
        rows = (_bytes(before) != _bytes(other.state[name])).reshape(len(before), -1).any(1)
        moved |= {(name, row) for row in rows.nonzero().flatten().tolist()}
    return moved
