"""Outputs of a forward: walking them, finding the axis of the rows, cutting padded rows off.

An output is a tensor, or tensors in tuples, named tuples, lists, dictionaries and dataclasses, nested as one likes;
everything else in it passes through untouched.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from devicegraph.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["RowAxis"]


def map_tensors(output: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same structure in new containers, with `function` applied to each tensor, in a fixed order."""
    if isinstance(output, torch.Tensor):
        return function(output)
    if isinstance(output, tuple):
        items = [map_tensors(item, function) for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else tuple(items)
    if isinstance(output, list):
        return [map_tensors(item, function) for item in output]
    if isinstance(output, dict):
        mapped = copy.copy(output)  # keeps the class, and the factory of a defaultdict
        mapped.update((key, map_tensors(value, function)) for key, value in output.items())
        return mapped
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        # Not `dataclasses.replace`: it runs `__init__`, and refuses fields that it does not take.
        replaced = copy.copy(output)
        for field in dataclasses.fields(output):
            if hasattr(output, field.name):
                object.__setattr__(replaced, field.name, map_tensors(getattr(output, field.name), function))
        return replaced
    return output


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The tensors of an output, in the order of `map_tensors`."""
    found: list[torch.Tensor] = []
    map_tensors(output, found.append)
    return found


def replace_tensors(output: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The same structure in new containers, with its tensors replaced in order."""
    remaining: Iterator[torch.Tensor] = iter(tensors)
    return map_tensors(output, lambda _: next(remaining))


class RowAxis(NamedTuple):
    """Where one tensor of an output has a row for each unit of the bucket: `scale * size + offset` along `axis`.

    The unit is the bucket's, requests in decode and tokens in prefill: with 4 tokens a request, logits `[4 * bs,
    vocab]` have the scale 4. Cumulative lengths `[bs + 1]` have the offset 1.
    """

    axis: int
    scale: int = 1
    offset: int = 0

    def rows(self, size: int) -> int:
        """How many rows belong to `size` units."""
        return self.scale * size + self.offset


def shapes_of(output: Any) -> list[tuple[int, ...]]:
    """The shapes of the tensors of an output, in the order of `map_tensors`."""
    return [tuple(tensor.shape) for tensor in tensors_of(output)]


def infer_row_axes(
    first: Sequence[tuple[int, ...]], first_size: int, second: Sequence[tuple[int, ...]], second_size: int
) -> tuple[RowAxis | None, ...]:
    """The row axis of each tensor, from the shapes at two sizes; None for a tensor whose shape does not follow the
    size.

    Raises:
        CaptureError: `output-rows`, where the structure differs between the sizes, or a tensor follows the size in more
            than one axis or by no whole number of rows: then `output_axes` has to tell.
    """
    if len(first) != len(second):
        raise _unclear(f"it has {len(first)} tensors at size {first_size} and {len(second)} at size {second_size}")
    return tuple(
        _infer_row_axis(position, a, first_size, b, second_size)
        for position, (a, b) in enumerate(zip(first, second, strict=True))
    )


def _infer_row_axis(
    position: int, first: tuple[int, ...], first_size: int, second: tuple[int, ...], second_size: int
) -> RowAxis | None:
    shapes = f"tensor {position} is {list(first)} at size {first_size} and {list(second)} at {second_size}"
    if len(first) != len(second):
        raise _unclear(shapes)
    differing = [axis for axis, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if not differing:
        return None
    axis = differing[0]
    scale, rest = divmod(first[axis] - second[axis], first_size - second_size)
    offset = first[axis] - scale * first_size
    if len(differing) > 1 or rest or scale < 1 or offset < 0:
        raise _unclear(shapes)
    return RowAxis(axis, scale, offset)


def _unclear(what: str) -> CaptureError:
    return CaptureError(
        f"the rows of the output cannot be told: {what}",
        code="output-rows",
        hint="give the runner `output_axes`, one `RowAxis` or None for each tensor of the output",
    )
