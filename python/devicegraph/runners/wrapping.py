"""Wrapping what a runner does, on the instance."""

from __future__ import annotations

import functools
import weakref
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

_Function = TypeVar("_Function", bound="Callable[..., Any]")


def unheld(method: _Function) -> _Function:
    """A method that does not hold what it is bound to, for a function that this will hold itself.

    Else the two would be a cycle, and the memory of a runner would wait for the collector, which engines turn off.
    """
    if not isinstance(method, MethodType):
        return method
    function, reference = method.__func__, weakref.ref(method.__self__)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(reference(), *args, **kwargs)

    return cast("_Function", call)
