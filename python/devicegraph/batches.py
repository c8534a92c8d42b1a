"""Batches as the registry sees them: any object with attributes, or a mapping."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from devicegraph.errors import SlotError

__all__ = ["is_mapping", "read_fields", "replaced", "set_field", "showing_proxies", "unchanged_on_failure"]


@lru_cache(maxsize=256)
def _are_mappings(kind: Any) -> bool:
    return issubclass(kind, Mapping)


def is_mapping(batch: Any) -> bool:
    """Whether a batch is a mapping: of a class that was seen before, known without asking."""
    return _are_mappings(type(batch))  # type: ignore[arg-type]  # every class that is not made to be unhashable is


def read_fields(batch: Any, names: Iterable[str | None]) -> list[Any]:
    """The value of each field; None where the batch lacks it, or where there is no name."""
    if is_mapping(batch):
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


def set_field(batch: Any, name: str, value: Any) -> None:
    """Sets a field of a batch that is the package's own: one that the engine gave is not changed.

    Raises:
        SlotError: `field-not-settable`: the batch's type has no place for it.
    """
    if isinstance(batch, MutableMapping):
        batch[name] = value
    elif not _set(batch, name, value):
        raise _not_settable(batch, name)


def showing_proxies(batch: Any, views: Mapping[str, Any]) -> Any:
    """A shallow copy of a batch whose `pp_proxy_tensors`, where it has some, are these, in an object of their class."""
    (proxies,) = read_fields(batch, ("pp_proxy_tensors",))
    if proxies is None:
        return batch
    shown = dict(views) if is_mapping(proxies) else replaced(proxies, {"tensors": dict(views)}, {})
    return replaced(batch, {"pp_proxy_tensors": shown}, {})


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


@contextmanager
def unchanged_on_failure(batch: Any) -> Iterator[None]:
    """Gives a batch the fields back that it had, and no others, where the block raises.

    What the fields hold is not looked into: values written into a tensor or a list of the batch stay written.
    """
    before = _fields(batch)
    try:
        yield
    except BaseException:
        is_mapping = isinstance(batch, MutableMapping)
        for name in _fields(batch).keys() - before.keys():
            batch.__delitem__(name) if is_mapping else object.__delattr__(batch, name)
        for name, value in before.items():
            batch.__setitem__(name, value) if is_mapping else object.__setattr__(batch, name, value)
        raise


def _fields(batch: Any) -> dict[str, Any]:
    """What can be set on a batch, by name."""
    if isinstance(batch, Mapping):
        return dict(batch) if isinstance(batch, MutableMapping) else {}
    slots = [name for kind in type(batch).__mro__ for name in _slots(kind) if hasattr(batch, name)]
    return {name: getattr(batch, name) for name in slots} | getattr(batch, "__dict__", {})


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
