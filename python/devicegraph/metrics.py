"""What a runner did: replays by graph, eager steps by reason, real and padded rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from devicegraph.runners.shape_key import ShapeKey

__all__ = ["StepMetrics"]


@dataclass(frozen=True)
class StepMetrics:
    """The counts of a runner at one moment.

    Attributes:
        replays: steps that were replayed, by graph.
        eager: steps that ran eagerly, by the code of the decision.
        raw_rows: real rows in replayed steps: requests in decode, tokens in prefill.
        padded_rows: rows that were computed for nothing in replayed steps.
        recompiles: how often torch.compile has traced the forward since `capture()`; anything but 0 cost a step dearly.
    """

    replays: dict[ShapeKey, int] = field(default_factory=dict)
    eager: dict[str, int] = field(default_factory=dict)
    raw_rows: int = 0
    padded_rows: int = 0
    recompiles: int = 0

    @property
    def steps(self) -> int:
        """All steps."""
        return sum(self.replays.values()) + sum(self.eager.values())

    @property
    def hit_rate(self) -> float:
        """The share of steps that were replayed; 0 before the first step."""
        return sum(self.replays.values()) / self.steps if self.steps else 0.0

    @property
    def waste(self) -> float:
        """The share of computed rows that were padding, in replayed steps; 0 before the first one."""
        rows = self.raw_rows + self.padded_rows
        return self.padded_rows / rows if rows else 0.0
