"""What a child process of `os.fork` inherits and must not use: graphs, and the device memory that they hold.

A fork copies the objects of the parent, and nothing of its device. The child is told by an error, whatever it tries,
and never destroys what it cannot own. Nothing of this runs before a fork.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, Protocol

from devicegraph.errors import ReplayError


class LeftBehind(Protocol):
    """Something that belongs to the process that made it."""

    def leave_to_parent(self) -> None:
        """Called in a child, right after the fork."""


_things: weakref.WeakSet[LeftBehind] = weakref.WeakSet()


def watch_forks(thing: LeftBehind) -> None:
    """Has `thing.leave_to_parent()` called in every child that is forked while it lives."""
    _things.add(thing)


def made_before_fork(what: str) -> ReplayError:
    """The error of a child that uses what its parent made."""
    return ReplayError(
        f"{what} was made before `os.fork`, and its graphs are the parent process's",
        code="forked",
        hint="make runners in the process that uses them: fork before, or start workers by `spawn`",
    )


class ParentsGraphs(dict[Any, Any]):
    """What a backend of the parent has captured, as a child sees it: nothing, and an error for who asks for a graph."""

    def __init__(self, what: str, graphs: object) -> None:
        super().__init__()
        self._what = what
        # Never destroyed, not even when the child ends: a driver that was forked refuses to.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(graphs))

    def __missing__(self, key: object) -> Any:
        raise made_before_fork(self._what)


def _leave_to_parent() -> None:
    for thing in list(_things):
        thing.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
