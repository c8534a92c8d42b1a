"""The exceptions that the package raises, each with a stable code and, where there is one, a way out."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from devicegraph._core import ConfigIssue

__all__ = [
    "BackendError",
    "CaptureError",
    "ConfigError",
    "DeviceGraphError",
    "RankError",
    "ReplayError",
    "SlotError",
]


class DeviceGraphError(Exception):
    """Base of everything that the package raises on purpose.

    Attributes:
        message: what happened, where, and with which value, in one sentence.
        code: a stable kebab-case word to branch on; messages may be reworded, codes are not.
        hint: what to do about it, or None.
    """

    def __init__(self, message: str, *, code: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.message} [{self.code}]"
        return text if self.hint is None else f"{text}\n\nhint: {self.hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle by positional arguments; ours are keywords, and worker processes send errors home by pickle.
        return _rebuild, (type(self), dict(self.__dict__), self.args)


def _rebuild(kind: type[DeviceGraphError], state: dict[str, Any], args: tuple[Any, ...]) -> DeviceGraphError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(DeviceGraphError, ValueError):
    """A configuration that cannot be used, with every problem in it.

    Attributes:
        issues: all problems found, in document order; each has a path, a value, what is allowed and a code of its own.
    """

    def __init__(self, message: str, *, code: str, hint: str | None = None, issues: Sequence[ConfigIssue] = ()) -> None:
        super().__init__(message, code=code, hint=hint)
        self.issues = tuple(issues)

    def __str__(self) -> str:
        # A message that was made from issues lists them already, each with its own code and hint.
        return self.message if self.issues else super().__str__()


class SlotError(DeviceGraphError, ValueError):
    """A slot, a source or a bound tensor that does not fit; nothing was written.

    Attributes:
        slot: the slot's name, or None where the fault is not one slot's.
        expected: what would have fitted, as text.
        given: what was there, as text.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        hint: str | None = None,
        slot: str | None = None,
        expected: str | None = None,
        given: str | None = None,
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.slot = slot
        self.expected = expected
        self.given = given


class BackendError(DeviceGraphError, RuntimeError):
    """A device or backend that is not available here; the hint says what to install or set."""


class CaptureError(DeviceGraphError, RuntimeError):
    """A capture that failed; it left no graph behind, and its cause is chained.

    Attributes:
        phase: the phase that was being captured, or None outside a runner.
        shape_key: the key of the graph that failed, or None.
        operator: the operator that cannot be captured, where it is known.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        hint: str | None = None,
        phase: str | None = None,
        shape_key: object = None,
        operator: str | None = None,
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.phase = phase
        self.shape_key = shape_key
        self.operator = operator


class ReplayError(DeviceGraphError, RuntimeError):
    """A replay that would break its contract: a moved address, a closed runner, a stale output, an unknown size."""


class RankError(DeviceGraphError, RuntimeError):
    """Ranks that do not act together: one that is late, has left, does something else, or has another plan.

    Attributes:
        ranks: those that it is about, ascending, as `torch.distributed` counts in the whole job; none where that is not
            known.
    """

    def __init__(self, message: str, *, code: str, hint: str | None = None, ranks: Sequence[int] = ()) -> None:
        super().__init__(message, code=code, hint=hint)
        self.ranks = tuple(ranks)
