"""What an audit can find, and the report of what it found."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from devicegraph.devices.tape_rules import REFUSALS

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The refusals of a capture that a forward can run into by what it computes, and how it asks for it.
_REFUSED: Final = (
    "host-read",
    "synchronize",
    "host-copy",
    "data-dependent-shape",
    "device-mismatch",
    "unregistered-generator",
    "no-fake-kernel",
    "tape-limit",
)
#: Every code that a finding can have: what was seen, for names to be put into, and what to do about it.
AUDIT_CODES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        **{code: REFUSALS[code] for code in _REFUSED},
        "random": (
            "`{operator}` draws random numbers",
            "call `eval()` on the model if it is dropout; where the numbers are wanted, each replay draws them anew, "
            "and not those that the eager forward would have drawn",
        ),
        "outlives-step": (
            "what `{operator}` makes is kept after the step and is no part of the output",
            "return it, or copy it into a tensor that was made beforehand: a graph's memory is overwritten by replays, "
            "and Python that keeps it does not run again",
        ),
        "unknown-tensor": (
            "`{operator}` takes {detail}, which is no slot, parameter, buffer or constant",
            "make it a slot if a step may replace it, else a buffer (`register_buffer`), or name it in `constants`: "
            "a graph goes on with the address that it had at capture",
        ),
        "frozen-value": (
            "`{operator}` takes values of {detail} on the host: a graph keeps those that it was captured with",
            "use the values on the device, or take them in `prepare_metadata`, which runs in every step",
        ),
        "forward-failed": (
            "the forward raised {detail}",
            "it must run eagerly before it can be captured; what comes after this line was not audited",
        ),
    }
)


@dataclass(frozen=True)
class AuditFinding:
    """One thing at one line of a forward that a graph would refuse or get wrong.

    Attributes:
        code: one of `AUDIT_CODES`.
        what: what was seen there.
        hint: what to do about it.
        operator: what was called: an operator of torch's dispatcher, or a function that never reaches it.
        module: the qualified name of the module whose forward ran; the class of an outermost module, and an empty
            string outside of modules.
        file: of the innermost line that belongs neither to torch nor to this package.
        line: its number.
        count: how often it was seen in one run.
    """

    code: str
    what: str
    hint: str
    operator: str
    module: str
    file: str
    line: int
    count: int = 1


@dataclass(frozen=True)
class AuditReport:
    """What an audit found; printing it lists it with what to do.

    Attributes:
        device: where the forward ran.
        findings: in the order in which they were met.
    """

    device: str
    findings: tuple[AuditFinding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return {"ok": self.ok, "device": self.device, "findings": [vars(finding) for finding in self.findings]}

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        if self.ok:
            return f"audit on {self.device}: nothing found"
        counts = Counter(finding.code for finding in self.findings)
        lines = [f"audit on {self.device}: " + ", ".join(f"{count} {code}" for code, count in counts.items())]
        for finding in self.findings:
            within = f" in `{finding.module}`" if finding.module else ""
            often = f", {finding.count} times" if finding.count > 1 else ""
            lines += [
                f"{_shown(finding.file)}:{finding.line}{within}: {finding.code}{often}",
                f"  {finding.what}",
                f"  hint: {finding.hint}",
            ]
        return "\n".join(lines)


def _shown(file: str) -> str:
    """A file's name from the working directory on, where it lies below."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
