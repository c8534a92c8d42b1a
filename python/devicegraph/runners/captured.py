"""What a runner keeps for one captured graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from devicegraph.outputs import RowAxis, replace_tensors, tensors_of
from devicegraph.runners.decision import Decision

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from devicegraph._core import FillNode
    from devicegraph.devices import GraphMemoryPool
    from devicegraph.runners.shape_key import ShapeKey


class CapturedGraph:
    """A graph's key and output, what its batch exposed, and how often it was replayed.

    Attributes:
        key: the graph's key.
        decision: the decision for this graph, made once.
        exposed: the plain slots that the captured batch exposed, as the registry's mask.
        axes: where the rows of each tensor of the output are; None as long as only one row was seen, which is not cut.
        launch: what replays it where the backend has to be asked for nothing else; else None.
        node: the fill that it begins with; None where it is filled before.
        counts: replays so far, by live size.
        is_dropped: whether the graph, and the memory of its output, is gone.
    """

    __slots__ = (
        "__weakref__",
        "_output",
        "_pool",
        "_tensors",
        "_trimmed",
        "axes",
        "counts",
        "decision",
        "exposed",
        "is_dropped",
        "key",
        "launch",
        "node",
    )

    def __init__(
        self,
        key: ShapeKey,
        exposed: int,
        output: Any,
        pool: GraphMemoryPool,
        *,
        launch: Callable[[], None] | None,
        node: FillNode | None,
    ) -> None:
        self.key = key
        self.launch = launch
        self.node = node
        self.decision = Decision("graph", key)
        self.exposed = exposed
        self.axes: Sequence[RowAxis | None] | None = None
        self.counts: dict[int, int] = {}
        self.is_dropped = False
        self._pool = pool
        pool.follow(self)
        self._output = output
        self._tensors = tensors_of(output)
        #: The output's tensors cut to each live size that came up: their addresses never change.
        self._trimmed: dict[int, list[torch.Tensor]] = {}

    def drop(self) -> None:
        """Says that the graph is gone."""
        if not self.is_dropped:
            self.is_dropped = True
            self.node = None  # ADDRESS: it is part of the graph's executable
            self._pool.unfollow(self)

    def __del__(self) -> None:
        self.drop()

    def has_rows(self, axes: Sequence[RowAxis | None]) -> bool:
        """Whether the output has its rows, and no more, where others have theirs: one request may lose a dimension."""
        return len(axes) == len(self._tensors) and all(
            axis is None or (axis.axis < tensor.dim() and tensor.shape[axis.axis] == axis.rows(self.key.size))
            for axis, tensor in zip(axes, self._tensors, strict=True)
        )

    def find_rows(self, axes: Sequence[RowAxis | None] | None) -> None:
        """Says where the rows of each tensor of the output are."""
        self.axes = axes
        self._trimmed.clear()

    def count(self, size: int) -> None:
        """Counts a replay with so many live units."""
        self.counts[size] = self.counts.get(size, 0) + 1

    @property
    def replays(self) -> int:
        """Replays so far."""
        return sum(self.counts.values())

    def trim(self, size: int, *, clone: bool) -> Any:
        """The output with the rows of `size` live units: views, or copies with `clone`."""
        tensors = self._trimmed.get(size)
        if tensors is None:
            axes = self.axes
            if axes is None:  # all rows are one unit's; where it is nobody's, there is none
                axes = [RowAxis(0) if size == 0 and tensor.dim() > 0 else None for tensor in self._tensors]
            tensors = self._trimmed[size] = [
                tensor if axis is None else tensor.narrow(axis.axis, 0, axis.rows(size))
                for tensor, axis in zip(self._tensors, axes, strict=True)
            ]
        # Containers and tensors are made anew for each step: callers like to write into the ones, and to reshape the
        # others in place.
        tensors = [tensor.clone() if clone else tensor.detach() for tensor in tensors]
        return tensors[0] if isinstance(self._output, torch.Tensor) else replace_tensors(self._output, tensors)
