"""What a runner keeps for one captured graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from devicegraph.outputs import replace_tensors, tensors_of
from devicegraph.runners.decision import Decision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from devicegraph.outputs import RowAxis
    from devicegraph.runners.shape_key import ShapeKey


class CapturedGraph:
    """A graph's key and output, what its batch exposed, and how often it was replayed.

    Attributes:
        key: the graph's key.
        decision: the decision for this graph, made once.
        exposed: the plain slots that the captured batch exposed, as the registry's mask.
        axes: where the rows of each tensor of the output are; set once all sizes are captured.
        counts: replays so far, by live size.
    """

    __slots__ = ("_output", "_tensors", "_trimmed", "axes", "counts", "decision", "exposed", "key")

    def __init__(self, key: ShapeKey, exposed: int, output: Any) -> None:
        self.key = key
        self.decision = Decision("graph", key)
        self.exposed = exposed
        self.axes: Sequence[RowAxis | None] = ()
        self.counts: dict[int, int] = {}
        self._output = output
        self._tensors = tensors_of(output)
        #: The output's tensors cut to each live size that came up: their addresses never change.
        self._trimmed: dict[int, list[torch.Tensor]] = {}

    def count(self, size: int) -> None:
        """Counts a replay with so many live units."""
        self.counts[size] = self.counts.get(size, 0) + 1

    def trim(self, size: int, *, clone: bool) -> Any:
        """The output with the rows of `size` live units: views, or copies with `clone`."""
        tensors = self._trimmed.get(size)
        if tensors is None:
            tensors = self._trimmed[size] = [
                tensor if axis is None else tensor.narrow(axis.axis, 0, axis.rows(size))
                for tensor, axis in zip(self._tensors, self.axes, strict=True)
            ]
        if clone:
            tensors = [tensor.clone() for tensor in tensors]
        # Containers are made anew for each step, since samplers like to write into them.
        return tensors[0] if isinstance(self._output, torch.Tensor) else replace_tensors(self._output, tensors)
