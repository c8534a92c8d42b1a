"""Batches as the registry sees them: any object with attributes, or a mapping."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from devicegraph.errors import SlotError

__all__ = ["read_fields", "replaced"]


def read_fields(batch: Any, names: Iterable[str | None]) -> list[Any]:
    """The value of each field; None where the batch lacks it, or where there is no name."""
    if isinstance(batch, Mapping):
        return [None if name is None else batch.get(name) for name in names]
    return [None if name is None else getattr(batch, name, None) for name in names]


def replaced(template: Any, fields: Mapping[str, Any], optional: Mapping[str, Any]) -> Any:
    """A shallow copy of a batch with some fields replaced or added; the template is not changed.

    Constructors are not called, so that what one computes or checks cannot undo the replacement.

    Args:
        template: any object with attributes (frozen and slotted ones too), a named tuple, or a mapping.
        fields: what the copy must have.
        optional: what the copy gets where it can hold it.

    Raises:
        SlotError: `field-not-settable`: the batch's type has no place for one of `fields`.
    """
    if isinstance(template, Mapping):
        if isinstance(template, MutableMapping):
            result = copy.copy(template)
            result.update({**optional, **fields})
            return result
        return {**template, **optional, **fields}
    if isinstance(template, tuple) and hasattr(template, "_replace"):
        known = set(getattr(template, "_fields", ()))
        for name in fields.keys() - known:
            raise _not_settable(template, name)
        return template._replace(**{name: value for name, value in {**optional, **fields}.items() if name in known})
    result = copy.copy(template)
    for name, value in optional.items():
        _set(result, name, value)
    for name, value in fields.items():
        if not _set(result, name, value):
            raise _not_settable(template, name)
    return result


#: The second is for frozen classes, whose own refuses.
_SETTERS: tuple[Callable[[Any, str, Any], None], ...] = (setattr, object.__setattr__)


def _set(target: Any, name: str, value: Any) -> bool:
    for setter in _SETTERS:
        try:
            setter(target, name, value)
        except AttributeError:
            continue
        return True
    return False


def _not_settable(template: Any, name: str) -> SlotError:
    kind = type(template).__name__
    message = f"slot `{name}`: a `{kind}` has no field to show it in"
    return SlotError(message, code="field-not-settable", hint=f"add the field `{name}` to `{kind}`", slot=name)
