"""Outputs of a forward: walking them, finding the axis of the rows, cutting padded rows off.

An output is a tensor, or tensors in tuples, named tuples, lists, dictionaries, dataclasses and simple namespaces, and
in subclasses of these, nested as one likes. Parts without tensors pass through untouched; tensors in anything else are
refused, since their rows would be left as they are.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from devicegraph.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["RowAxis"]


def map_tensors(output: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same structure in new containers, with `function` applied to each tensor, in a fixed order.

    Raises:
        CaptureError: `output-unknown`: a tensor in an object of another kind.
    """
    return _map(output, function)[1]


def arrived(output: Any) -> Any:
    """The output without tensors whose data functional collectives may still have on its way.

    A graph has to hold the wait: whoever reads the output later would wait for the collective of the capture.
    """
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is None or not torch.distributed.is_initialized():
        return output
    on_its_way = functional.AsyncCollectiveTensor
    return map_tensors(output, lambda t: t.trigger_wait() if isinstance(t, on_its_way) else t)


def _map(output: Any, function: Callable[[torch.Tensor], Any]) -> tuple[bool, Any]:
    """Whether there is a tensor in it, and what became of it."""
    if isinstance(output, torch.Tensor):
        return True, function(output)
    mapped = {key: _map(part, function) for key, part in _parts(output).items()}
    if not any(holds for holds, _ in mapped.values()):
        return False, output
    return True, _rebuilt(output, {key: part for key, (_, part) in mapped.items()})


def _parts(output: Any) -> dict[Any, Any]:
    """What a container holds, by position, key or name; nothing for what is none."""
    if isinstance(output, (tuple, list)):
        return dict(enumerate(output))
    if isinstance(output, dict):
        return dict(output.items())
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        names = [field.name for field in dataclasses.fields(output)]
        return {name: getattr(output, name) for name in names if hasattr(output, name)}
    if isinstance(output, SimpleNamespace):
        return dict(vars(output))
    if _hides_tensors(output):
        raise CaptureError(
            f"the output has tensors in a `{type(output).__qualname__}`",
            code="output-unknown",
            hint="return them in a tuple, list, dict, named tuple, dataclass or SimpleNamespace",
        )
    return {}


def _rebuilt(output: Any, parts: dict[Any, Any]) -> Any:
    """A container like `output` with these parts. Constructors are not called: they may check, convert, or refuse."""
    if isinstance(output, tuple):
        if hasattr(output, "n_sequence_fields"):  # what torch's operators with several results return
            return type(output)(parts.values())
        rebuilt = tuple.__new__(type(output), parts.values())
        if hasattr(output, "__dict__"):
            rebuilt.__dict__.update(output.__dict__)
        return rebuilt
    copied: Any = copy.copy(output)
    for key, part in parts.items():
        if isinstance(output, (list, dict)):
            copied[key] = part
        else:
            object.__setattr__(copied, key, part)
    return copied


def _hides_tensors(value: Any) -> bool:
    """Whether an object that is no known container holds tensors, as an item or an attribute, or in one of those.

    Modules do not count: what they hold is parameters, and no result.
    """
    if isinstance(value, (type, torch.nn.Module)):
        return False
    held = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        held += [getattr(value, name, None) for name in ((slots,) if isinstance(slots, str) else slots)]
    if isinstance(value, (AbstractSet, deque)):
        held += value
    elif isinstance(value, Mapping):
        held += value.values()
    held += [item for part in held if isinstance(part, (list, tuple)) for item in part]
    held += [item for part in held if isinstance(part, dict) for item in part.values()]
    return any(isinstance(part, torch.Tensor) for part in held)


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The tensors of an output, in the order of `map_tensors`."""
    found: list[torch.Tensor] = []
    map_tensors(output, found.append)
    return found


def outline_of(output: Any) -> Any:
    """What an output is made of, without its values: `torch.Tensor` for a tensor, None for a part without tensors."""
    if isinstance(output, torch.Tensor):
        return torch.Tensor
    parts = tuple((key, outline_of(part)) for key, part in _parts(output).items())
    return (type(output), parts) if any(part is not None for _, part in parts) else None


def replace_tensors(output: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The same structure in new containers, with its tensors replaced in order."""
    remaining: Iterator[torch.Tensor] = iter(tensors)
    return map_tensors(output, lambda _: next(remaining))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of its elements in order, `[numel * itemsize]`; a view where that is what lies in memory."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    # One element, or none, is contiguous whatever its strides are, and those may be none that bytes can have.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


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


def check_row_axes(axes: Sequence[RowAxis | None], shapes: Sequence[tuple[int, ...]], size: int) -> None:
    """Checks that the tensors of an output at one size have the rows that `axes` speaks of.

    Raises:
        CaptureError: `output-rows`.
    """
    if len(axes) != len(shapes):
        raise unclear_rows(f"it has {len(shapes)} tensors at size {size}, and there are {len(axes)} row axes")
    for position, (axis, shape) in enumerate(zip(axes, shapes, strict=True)):
        if axis is None:
            continue
        if not -len(shape) <= axis.axis < len(shape) or axis.rows(size) > shape[axis.axis]:
            raise unclear_rows(f"tensor {position} is {list(shape)} at size {size}, which has no place for {axis}")


def infer_row_axes(
    first: Sequence[tuple[int, ...]],
    first_size: int,
    second: Sequence[tuple[int, ...]],
    second_size: int,
    *,
    shares: tuple[int | None, int | None] = (None, None),
) -> tuple[RowAxis | None, ...]:
    """The row axis of each tensor, from the shapes at two sizes; None for a tensor whose shape does not follow the
    size, or that has this rank's share of the bucket's tokens: which of its rows are live is another rank's business
    too, and all of it is what the next one expects.

    Args:
        first: shapes at the first size.
        first_size: in units of the bucket.
        second: shapes at the second size.
        second_size: in units of the bucket.
        shares: the rows of a share at either size, where tokens are spread over ranks.

    Raises:
        CaptureError: `output-rows`, where the structure differs between the sizes, or a tensor follows the size in more
            than one axis, by no whole number of rows, or as a share and by units alike: then `output_axes` has to tell.
    """
    if len(first) != len(second):
        raise unclear_rows(f"it has {len(first)} tensors at size {first_size} and {len(second)} at size {second_size}")
    return tuple(
        _infer_row_axis(position, a, first_size, b, second_size, shares)
        for position, (a, b) in enumerate(zip(first, second, strict=True))
    )


def _infer_row_axis(
    position: int,
    first: tuple[int, ...],
    first_size: int,
    second: tuple[int, ...],
    second_size: int,
    shares: tuple[int | None, int | None],
) -> RowAxis | None:
    shapes = f"tensor {position} is {list(first)} at size {first_size} and {list(second)} at {second_size}"
    if len(first) != len(second):
        raise unclear_rows(shapes)
    differing = [axis for axis, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if not differing:
        return None
    axis = differing[0]
    scale, rest = divmod(first[axis] - second[axis], first_size - second_size)
    offset = first[axis] - scale * first_size
    if len(differing) == 1 and (first[axis], second[axis]) == shares:
        if rest:
            return None
        raise unclear_rows(f"{shapes}, which is {scale} for each unit, or this rank's share of the tokens")
    if len(differing) > 1 or rest or scale < 1 or offset < 0:
        raise unclear_rows(shapes)
    return RowAxis(axis, scale, offset)


def unclear_rows(what: str) -> CaptureError:
    """The error for an output whose rows cannot be told."""
    return CaptureError(
        f"the rows of the output cannot be told: {what}",
        code="output-rows",
        hint="give the runner `output_axes`, one `RowAxis` or None for each tensor of the output",
    )
