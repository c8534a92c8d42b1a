"""Classes of other packages, found through entry points."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from devicegraph.errors import BackendError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["load_class"]

_Base = TypeVar("_Base")


def load_class(point: EntryPoint, base: type[_Base], what: str) -> type[_Base]:
    """The class that an entry point promises, with nothing left abstract.

    Args:
        point: it is loaded, which may run any code; of what it raises, interrupts pass.
        base: what the class has to be a subclass of.
        what: whose class it is, for the message.

    Raises:
        BackendError: `plugin-failed`: it cannot be loaded, is something else, or lacks methods; what was raised is
            chained.
    """
    hint = f"repair or remove the package that provides the entry point `{point.name}` of `{point.group}`"
    try:
        found = point.load()
    except (Exception, SystemExit) as error:  # a script may be imported as a plug-in
        message = f"{what} cannot be loaded from `{point.value}`: {error}"
        raise BackendError(message, code="plugin-failed", hint=hint) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        message = f"{what} cannot be loaded from `{point.value}`: that is no class derived from `{base.__name__}`"
        raise BackendError(message, code="plugin-failed", hint=hint)
    if lacking := sorted(getattr(found, "__abstractmethods__", ())):
        message = f"{what} cannot be made from `{point.value}`: it lacks {', '.join(f'`{name}`' for name in lacking)}"
        raise BackendError(message, code="plugin-failed", hint=hint)
    return found
