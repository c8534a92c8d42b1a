"""Rules: which backends do not go with what else an engine does, and what follows.

An engine gives its facts, a rule says when it holds, and the core decides: a backend that nobody chose gives way, one
that somebody chose stays with a warning, or is an error where the rule is hard.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from devicegraph._core import CudaGraphConfig, check_rule, resolve
from devicegraph.errors import ConfigError

__all__ = ["Rule", "resolve_config"]


@dataclass(frozen=True)
class Rule:
    """That some backends of a phase do not go with something the engine does.

    Attributes:
        name: a word for it, unique within its phase.
        phase: one of `Phase.ALL`.
        backends: those it is against; a phase that is `disabled` has no rule.
        when: whether it holds, from the facts. A fact that it indexes and that was not given, or is None, turns the
            rule off.
        hard: whether even somebody who names the backend cannot have it.
        reason: why, in a few words that go after a colon.

    Raises:
        ConfigError: with everything that is wrong with the parts in `issues`.
    """

    name: str
    phase: str
    backends: tuple[str, ...]
    when: Callable[[Mapping[str, Any]], object]
    hard: bool
    reason: str

    def __post_init__(self) -> None:
        check_rule(self)
        if not callable(self.when):
            raise ConfigError(f"when: `{self.when!r}` is not a function of the facts", code="wrong-type")
        object.__setattr__(self, "backends", tuple(self.backends))

    def holds(self, facts: Mapping[str, Any]) -> bool:
        """Whether the rule holds; False where it needs a fact that was not given.

        Raises:
            ConfigError: `when` raised something else (`rule-failed`), which is chained.
        """
        try:
            return bool(self.when(facts if isinstance(facts, _Facts) else _Facts(facts)))
        except _NotGivenError:
            return False
        except Exception as error:
            raise ConfigError(
                f"rule `{self.name}` of {self.phase} failed: {type(error).__name__}: {error}", code="rule-failed"
            ) from error


def resolve_config(
    config: CudaGraphConfig, facts: Mapping[str, Any], rules: Iterable[Rule] | None = None
) -> CudaGraphConfig:
    """The configuration that is left under an engine's facts.

    | the backend is | soft rule | hard rule |
    | --- | --- | --- |
    | the default | the phase is disabled, with the reason | the phase is disabled, with the reason |
    | explicit | kept, with a warning (`rule-outweighed`) | an error (`rule-forbids`) |

    The order of the rules does not matter. The result replaces that of an earlier call, so resolving twice gives the
    same, and resolving under other facts starts from what people named. Nothing is warned of here: see
    `config.warnings`, and `set_active_config`, which says them.

    Args:
        config: what people named.
        facts: what the engine does, by name; those that the ready rules read are in `FACTS`. A given name that no rule
            reads is a `UserWarning` where it is nearly one that a rule wanted.
        rules: `READY_RULES` unless given; for these and others `(*READY_RULES, other)`.

    Raises:
        ConfigError: with everything that is wrong in `issues`: every hard rule against an explicit backend, and rules
            with the name of another of their phase (`repeated-rule`). A rule that fails is `rule-failed`.
    """
    if rules is None:
        from devicegraph.ready_rules import READY_RULES

        rules = READY_RULES
    given = _Facts(facts)
    resolved = resolve(config, [(rule, rule.holds(given)) for rule in rules])
    for name in given.unread():
        nearest = difflib.get_close_matches(name, given.missing, n=1, cutoff=0.85)
        if nearest:
            warnings.warn(f"no rule reads the fact `{name}`; did you mean `{nearest[0]}`?", UserWarning, stacklevel=2)
    return resolved


class _NotGivenError(KeyError):
    """A fact that a rule reads and the engine did not give."""


class _Facts(Mapping[str, Any]):
    """Facts that know which of them were read, and what was looked for in vain."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts
        self._read: set[str] = set()
        self.missing: set[str] = set()

    def unread(self) -> list[str]:
        return [name for name in self._facts if name not in self._read]

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        value = self._facts.get(name)
        if value is None:
            self.missing.add(name)
            raise _NotGivenError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)
