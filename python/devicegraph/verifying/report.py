"""What a verification found."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from devicegraph.errors import ReplayError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from devicegraph.runners.shape_key import ShapeKey
    from devicegraph.slots import HostValue

Proof: TypeAlias = Literal["eager", "repeat", "padding", "stale"]

__all__ = ["SkippedBatch", "VerifyFinding", "VerifyReport"]


@dataclass(frozen=True)
class VerifyFinding:
    """One proof that failed, for one batch in one graph.

    Attributes:
        proof: `eager`, `repeat`, `padding` or `stale`; see `verify`.
        key: the graph.
        batch: the position of the batch among those that were given.
        slots: through which slots, or which state (`state cache`), it got there; one as a rule, several where only all
            of them together do it, none where slots have nothing to do with it.
        place: the first element that is not what it has to be.
    """

    proof: Proof
    key: ShapeKey
    batch: int
    slots: tuple[str, ...]
    place: str

    def __str__(self) -> str:
        through = " and ".join(f"`{name}`" for name in self.slots)
        what = {
            "eager": f"the replay is not what eager gives, in {self.place}",
            "repeat": f"two replays differ, in {self.place}",
            "padding": f"padding leaks through {through} into {self.place}",
            "stale": f"stale values of {through} reach {self.place}",
        }[self.proof]
        return f"{self.key}, batch {self.batch}: {what}"

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain values."""
        return {
            "proof": self.proof,
            "key": self.key.to_dict(),
            "batch": self.batch,
            "slots": list(self.slots),
            "place": self.place,
        }


@dataclass(frozen=True)
class SkippedBatch:
    """A batch that no graph takes, and the code of the decision."""

    batch: int
    code: str


@dataclass(frozen=True)
class VerifyReport:
    """What a verification found; printing it gives a line for each finding, and for what was not proved.

    True where nothing was found and at least one graph was verified.

    Attributes:
        phase: the phase.
        verified: the graphs that a batch went through.
        padded: those of them in which there were padded rows to poison.
        missed: the graphs that no batch fits into.
        findings: what failed, in the order of batches and graphs.
        skipped: batches that run eagerly.
        poisons: the two values that padded rows were given, by slot or state.
        held: slots whose padding was left as it was, and why: nothing is proved of what reads it.
    """

    phase: str
    verified: tuple[ShapeKey, ...]
    padded: tuple[ShapeKey, ...]
    missed: tuple[ShapeKey, ...]
    findings: tuple[VerifyFinding, ...]
    skipped: tuple[SkippedBatch, ...]
    poisons: Mapping[str, tuple[HostValue, HostValue]]
    held: Mapping[str, str]

    def __bool__(self) -> bool:
        return bool(self.verified) and not self.findings

    def check(self) -> VerifyReport:
        """Returns the report where it is true.

        Raises:
            ReplayError: `verify-failed`, with the report as the message.
        """
        if not self:
            raise ReplayError(str(self), code="verify-failed", hint="see docs/troubleshooting.md, `my output is wrong`")
        return self

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "phase": self.phase,
            "ok": bool(self),
            "verified": [key.to_dict() for key in self.verified],
            "padded": [key.to_dict() for key in self.padded],
            "missed": [key.to_dict() for key in self.missed],
            "findings": [finding.to_dict() for finding in self.findings],
            "skipped": [{"batch": each.batch, "code": each.code} for each in self.skipped],
            "poisons": {name: list(pair) for name, pair in self.poisons.items()},
            "held": dict(self.held),
        }

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        found = _count(len(self.findings), "finding") if self.findings else "nothing found"
        graphs = f"{_count(len(self.verified), 'graph')} verified, {len(self.padded)} of them with padding: {found}"
        if not self.verified:
            graphs = f"nothing verified: {'no graph takes a batch' if self.skipped else 'there is no batch'}"
        lines = [f"{self.phase}: {graphs}", *(f"  {finding}" for finding in self.findings)]
        if self.missed:
            lines.append(f"  not verified, as no batch fits: {', '.join(map(str, self.missed))}")
        lines += [f"  batch {each.batch} runs eagerly: {each.code}" for each in self.skipped]
        lines += [f"  padding of `{name}` left as it is: {reason}" for name, reason in self.held.items()]
        return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
