"""Agreement between data-parallel ranks on what to do in a step, and on which graphs they have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Proposal", "agree"]


@dataclass(frozen=True)
class Proposal:
    """What a rank could do by itself, and, as the result of a vote, what all ranks do.

    Attributes:
        graph: in a step, whether this rank could replay a graph; after a captured bucket, whether it has the graph.
        size: in a step, the live size on this rank in units of the bucket (requests in decode, tokens in prefill), 0
            when it is idle; after a captured bucket, the bucket.
        failed: after a bucket, whether this rank gives up with an error; as a result, whether any does.
        phase: of the runner that asks, its mode where it has one: a graph is of one phase. Empty where a vote does not
            say; not compared.
        against: as a result, the ranks because of which there is no graph, where the vote knows them; for messages.
    """

    graph: bool
    size: int
    failed: bool = False
    phase: str = field(default="", compare=False)
    against: tuple[int, ...] = ()


def agree(proposals: Iterable[Proposal]) -> Proposal:
    """What ranks with these proposals do together: a graph if all can in one phase, of the largest size among them.

    An engine's `vote` gathers the proposals of all ranks and returns this; any rank gets the same answer from the same
    proposals, in any order. The size is the maximum and not the sum, for a bucket is chosen on each rank by itself.
    """
    gathered = list(proposals)
    return Proposal(
        graph=all(p.graph for p in gathered) and len({p.phase for p in gathered} - {""}) < 2,
        size=max((p.size for p in gathered), default=0),
        failed=any(p.failed for p in gathered),
    )


def named(ranks: Sequence[int]) -> str:
    """Ranks, in a message."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
