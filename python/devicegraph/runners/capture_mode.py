"""Being inside a capture: what a model can ask, and what a capture asks of the garbage collector."""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, TypeVar, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

__all__ = ["compile_in_capture_mode", "freeze_gc", "get_is_capture_mode", "model_capture_mode"]

_Function = TypeVar("_Function", bound="Callable[..., Any]")

_capture_mode: ContextVar[bool] = ContextVar("devicegraph.capture_mode", default=False)


def get_is_capture_mode() -> bool:
    """Whether a runner of this thread is warming up or capturing: what runs now will be replayed without its Python."""
    return _capture_mode.get()


@contextmanager
def model_capture_mode() -> Iterator[None]:
    """Marks the block as capture; runners do it around every capture."""
    token = _capture_mode.set(True)
    try:
        yield
    finally:
        _capture_mode.reset(token)


def compile_in_capture_mode(function: _Function) -> _Function:
    """Compiles a function that is defined during a capture, and leaves one that is defined outside of it as it is.

    For helpers that a model defines inside its forward: a captured graph gets the compiled form, and eager steps do not
    pay for compiling.
    """
    return cast("_Function", torch.compile(function)) if get_is_capture_mode() else function


#: Python 3.12 and newer set immortal objects aside at each collection, some hundreds; an engine has a hundred thousand.
_IMMORTAL: Final = 4096

_freeze_lock = threading.Lock()
_freeze_depth = 0
_was_enabled = False
_has_set_aside = False


@contextmanager
def freeze_gc(enable_cudagraph_gc: bool = False) -> Iterator[None]:
    """Keeps the garbage collector out of a capture: a finalizer that frees device memory would break it.

    Collects once on the way in, so that what is garbage already does not stay, and once on the way out, what was made
    in between. Nested and concurrent uses count as one. Afterwards the collector is on or off as it was before, also
    when the block raises.

    Args:
        enable_cudagraph_gc: leave the collector running; for debugging.
    """
    global _freeze_depth, _was_enabled, _has_set_aside
    if enable_cudagraph_gc:
        yield
        return
    with _freeze_lock:
        _freeze_depth += 1
        if _freeze_depth == 1:
            _was_enabled = gc.isenabled()
            gc.collect()
            gc.disable()
            # Going through all objects of an engine takes longer than to capture a graph: what is there now is set
            # aside, unless somebody did so before, whose objects could not be told from the others then.
            _has_set_aside = gc.get_freeze_count() <= _IMMORTAL
            if _has_set_aside:
                gc.freeze()
    try:
        yield
    finally:
        with _freeze_lock:
            _freeze_depth -= 1
            if _freeze_depth == 0:
                if _was_enabled:
                    gc.enable()
                gc.collect()
                if _has_set_aside:
                    gc.unfreeze()
