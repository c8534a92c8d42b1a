"""Bridges: what a break returns, on its way into the segment behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from devicegraph.errors import ReplayError
from devicegraph.outputs import outline_of, replace_tensors, tensors_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Bridges", "with_rows_of"]


class Bridges:
    """The tensors in which a segment finds what the break before it returned.

    They are memory of their own, so that no replay writes what belongs to the model. Only an argument that the break
    returns again stays what it is.

    Args:
        output: what the break returned at capture.
        given: the tensors that it was called with.
        name: the break's, for errors.

    Attributes:
        output: what the forward goes on with.
    """

    def __init__(self, output: Any, given: Sequence[torch.Tensor], name: str) -> None:
        results = tensors_of(output)
        self._outline = outline_of(output)
        self._name = name
        self._are_given = [any(_is_same_view(result, tensor) for tensor in given) for result in results]
        # ADDRESS: what the segments behind read; it lives as long as the break, which lives as long as its graph.
        self._tensors = [
            result if is_given else result.clone() for result, is_given in zip(results, self._are_given, strict=True)
        ]
        self.output = replace_tensors(output, self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def refresh(self, output: Any) -> None:
        """Copies what the break returned in a replay, and zeroes the rows that it did not return.

        Raises:
            ReplayError: `break-output`; what was refreshed before the tensor that does not fit stays so.
        """
        if type(output) is torch.Tensor and self._outline is torch.Tensor:
            self._refresh(self._tensors[0], output, is_given=self._are_given[0])
            return
        if outline_of(output) != self._outline:
            raise _mismatch(self._name, "something of another structure than when it was captured")
        for bridge, result, is_given in zip(self._tensors, tensors_of(output), self._are_given, strict=True):
            self._refresh(bridge, result, is_given=is_given)

    def _refresh(self, bridge: torch.Tensor, result: torch.Tensor, *, is_given: bool) -> None:
        live = bridge
        if result.shape != bridge.shape or result.dtype is not bridge.dtype:
            axis = _shorter_axis(bridge, result, self._name)
            live = bridge.narrow(axis, 0, result.shape[axis])
            bridge.narrow(axis, result.shape[axis], bridge.shape[axis] - result.shape[axis]).zero_()
        if not is_given:
            live.copy_(result)
        elif result.numel() and not _is_same_view(live, result):
            raise _mismatch(self._name, "a tensor of its own, and one of its arguments when it was captured")


def with_rows_of(first: Any, output: Any, name: str) -> Any:
    """An output with the rows that the break's first one had: those that are missing are zeros.

    Raises:
        ReplayError: `break-output`.
    """
    if outline_of(output) != outline_of(first):
        raise _mismatch(name, "something of another structure than when it was captured")
    tensors = [_padded(*pair, name) for pair in zip(tensors_of(first), tensors_of(output), strict=True)]
    return replace_tensors(output, tensors)


def _padded(first: torch.Tensor, result: torch.Tensor, name: str) -> torch.Tensor:
    if result.shape == first.shape and result.dtype is first.dtype:
        return result
    axis = _shorter_axis(first, result, name)
    padded = torch.zeros_like(first)
    padded.narrow(axis, 0, result.shape[axis]).copy_(result)
    return padded


def _is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype is other.dtype
    )


def _shorter_axis(bridge: torch.Tensor, result: torch.Tensor, name: str) -> int:
    if result.dtype is bridge.dtype and result.dim() == bridge.dim():
        differing = [axis for axis in range(bridge.dim()) if result.shape[axis] != bridge.shape[axis]]
        if len(differing) == 1 and result.shape[differing[0]] < bridge.shape[differing[0]]:
            return differing[0]
    raise _mismatch(name, f"{_kind(result)}, and {_kind(bridge)} when it was captured")


def _kind(tensor: torch.Tensor) -> str:
    return f"a {str(tensor.dtype).removeprefix('torch.')} tensor of {list(tensor.shape)}"


def _mismatch(name: str, what: str) -> ReplayError:
    return ReplayError(
        f"break `{name}` returned {what}",
        code="break-output",
        hint="return what the capture has seen, or fewer rows of it",
    )
