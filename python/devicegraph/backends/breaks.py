"""Breaks: places where a breakable capture runs eagerly, marked in the model.

Outside of a breakable capture a mark does nothing, so that a model can carry its marks into every backend.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, overload

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_flatten, tree_unflatten

from devicegraph.backends.autocast import autocast_as, autocast_state
from devicegraph.backends.bridges import Bridges, with_rows_of
from devicegraph.errors import BackendError, CaptureError
from devicegraph.outputs import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from devicegraph.backends.segmented import Steps
    from devicegraph.devices import SegmentedCapture

__all__ = ["break_graph", "current_batch", "eager_on_graph"]

_Function = TypeVar("_Function", bound="Callable[..., Any]")

_batch: ContextVar[Any] = ContextVar("devicegraph.batch", default=None)
_recorder: ContextVar[BreakRecorder | CalledBreaks | None] = ContextVar("devicegraph.breaks", default=None)


def current_batch() -> Any:
    """The batch of the step that runs now, in the thread that runs it.

    In a break and in an eager step it is the live one: the static batch of the bucket being replayed, with its
    metadata, or the engine's own. While a graph is warmed up and captured it is the static batch that the graph is
    captured with. A break must take what changes from step to step from here: what the model left on itself is from the
    last capture.

    Raises:
        RuntimeError: no step is running.
    """
    batch = _batch.get()
    if batch is None:
        raise RuntimeError("`current_batch()` outside of a step: it is set while a runner runs, captures or replays")
    return batch


@contextmanager
def batch_in_use(batch: Any) -> Iterator[None]:
    """Makes `batch` the current one for the block; runners do it around every step."""
    token = _batch.set(batch)
    try:
        yield
    finally:
        _batch.reset(token)


@overload
def eager_on_graph(function: _Function) -> _Function: ...
@overload
def eager_on_graph(
    *, enable: bool | Callable[[], bool] = True, capture_stub: Callable[..., Any] | None = None
) -> Callable[[_Function], _Function]: ...
def eager_on_graph(
    function: _Function | None = None,
    *,
    enable: bool | Callable[[], bool] = True,
    capture_stub: Callable[..., Any] | None = None,
) -> Any:
    """Marks a function to run eagerly in a breakable capture: the graph ends before it and goes on behind it.

    On every replay the function is called again, with the arguments of the capture: tensors at fixed addresses, whose
    values are those of the step, and Python values as they were. What it returns is copied to where the rest of the
    graph reads it, unless it is one of its arguments. It may return fewer rows than at capture (attention over the live
    tokens): the rows that it does not return are zeroed. Rows of an output that it writes in place and leaves out keep
    what they hold, so allocate such an output with zeros.

    Args:
        function: what to mark; left out where options are given.
        enable: whether to break at all, or what says so whenever the function is called while a forward is captured.
        capture_stub: called at capture instead of the function, with the same arguments: it must return new tensors of
            the same shapes, and need not compute anything.

    Raises:
        BackendError: `mark-invalid`: what is marked cannot be called and done with, such as a generator function or a
            `classmethod` object; or an option that is of no use.
    """
    _check_mark(function, enable, capture_stub)
    if function is None:
        return functools.partial(eager_on_graph, enable=enable, capture_stub=capture_stub)
    marked = function

    @functools.wraps(marked)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return marked(*args, **kwargs)  # torch.compile sees through the mark; it has split operators of its own
        recorder = _recorder.get()
        if recorder is None or not (enable() if callable(enable) else enable):
            return marked(*args, **kwargs)
        return recorder.call(MarkedCall(marked, args, kwargs, capture_stub or marked))

    return cast("_Function", call)


def _check_mark(function: object, enable: object, capture_stub: object) -> None:
    problem = hint = None
    if function is not None and not callable(function):
        problem, hint = f"{function!r} cannot be called", "mark the function below `@classmethod` or `@property`"
    elif inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        problem, hint = f"{function!r} runs after its call has returned", "mark what it calls"
    elif not isinstance(enable, bool) and not callable(enable):
        problem = f"`enable` is {enable!r}, neither a boolean nor a function"
    elif capture_stub is not None and not callable(capture_stub):
        problem = f"`capture_stub` is {capture_stub!r}, which cannot be called"
    if problem is not None:
        raise BackendError(f"`eager_on_graph`: {problem}", code="mark-invalid", hint=hint)


def break_graph() -> None:
    """Ends the segment of a breakable capture here and begins another one; elsewhere it does nothing."""
    recorder = _recorder.get()
    if recorder is not None:
        recorder.cut()


class Break:
    """A call between two segments.

    It is made under the autocast of its capture.

    Attributes:
        name: what is called, for reports and errors.
        output: what the forward goes on with at capture.
        call: what a replay calls.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        *,
        name: str | None = None,
    ) -> None:
        # Containers are copied: what the forward does to a list afterwards is not in the arguments of the capture.
        leaves, structure = tree_flatten((args, kwargs))
        args, kwargs = tree_unflatten(leaves, structure)
        self.name = _name_of(function) if name is None else name
        # ADDRESS: the tensors among the arguments lie in the graph memory pool. Held weakly they would be overwritten
        # by the next capture; they live as long as the break, which lives as long as its graph.
        call = functools.partial(function, *args, **kwargs)
        autocast = autocast_state()
        again: Callable[[], Any] = autocast_as(autocast)(call) if autocast else call
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        bridges = Bridges(output, given, self.name)
        self.output = bridges.output
        # The function itself where nothing of its result crosses. No method of the break, which would be a cycle: what
        # it holds of the graph memory pool has to go with the last reference, also where the collector is off.
        self.call = functools.partial(_call_and_refresh, again, bridges) if bridges else again


def _call_and_refresh(function: Callable[[], Any], bridges: Bridges) -> None:
    bridges.refresh(function())


class MarkedCall(NamedTuple):
    """A call of a marked function, met while a forward is captured.

    Attributes:
        at_capture: what is called instead of the function at capture, or the function.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    at_capture: Callable[..., Any]


class BreakRecorder:
    """Takes the breaks of a forward that is being captured.

    Args:
        segments: the capture, which opens gaps for them.
        steps: where they are added.
    """

    def __init__(self, segments: SegmentedCapture, steps: Steps) -> None:
        self._segments = segments
        self._steps = steps
        #: What the first break that failed has raised: a forward that goes on after it is not captured any more.
        self.error: BaseException | None = None

    def call(self, marked: MarkedCall) -> Any:
        """Runs a marked function in a gap, and remembers to run it on every replay."""
        function, args, kwargs, at_capture = marked
        try:
            with self._segments.pause(), recording_breaks(None):
                step = Break(function, args, kwargs, at_capture(*args, **kwargs))
                self._steps.add_break(step)
        except BaseException as error:
            self.error = self.error or error
            raise
        return step.output

    def check(self) -> None:
        """Refuses a forward that went on after a break had failed: from there on nothing was captured.

        Raises:
            CaptureError: `break-failed`.
        """
        if self.error is not None:
            raise CaptureError(
                f"a break raised {type(self.error).__name__}, and the forward went on",
                code="break-failed",
                hint="catch it inside of the break: a replay does not run what is around it",
            ) from self.error

    def cut(self) -> None:
        """Opens a gap in which nothing runs."""
        with self._segments.pause():
            pass


class CalledBreaks:
    """Takes the breaks of a forward that is called anew in every replay, and of which nothing is captured.

    What follows a break meets the same rows as beside a graph: those of the first call, with zeros for what is missing.
    """

    def __init__(self) -> None:
        self._first: list[tuple[Callable[..., Any], Any]] = []
        self._is_first = True
        self._position = 0

    def run(self, forward: Callable[[], Any]) -> Any:
        """Calls the forward; the first time is the capture."""
        self._position = 0
        with recording_breaks(self):
            output = forward()
        self._is_first = False
        return output

    def call(self, marked: MarkedCall) -> Any:
        """Runs a marked function, and gives what it returns the rows that it had in the first call of the forward."""
        function, args, kwargs, at_capture = marked
        with recording_breaks(None):
            output = (at_capture if self._is_first else function)(*args, **kwargs)
        position, self._position = self._position, self._position + 1
        if self._is_first:
            self._first.append((function, map_tensors(output, torch.empty_like)))
        elif position < len(self._first) and self._first[position][0] == function:  # else the forward took another way
            output = with_rows_of(self._first[position][1], output, _name_of(function))
        return output

    def cut(self) -> None:
        """Nothing is captured that could be cut."""


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return str(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


@contextmanager
def recording_breaks(recorder: BreakRecorder | CalledBreaks | None) -> Iterator[None]:
    """Makes marks of the block report to `recorder`; with None they do nothing."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)
