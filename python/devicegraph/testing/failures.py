"""Clauses about captures that fail: what is raised, and that nothing is left behind."""

from __future__ import annotations

import gc
import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from devicegraph.errors import CaptureError
from devicegraph.testing.expectations import expect, expect_equal, expect_raises
from devicegraph.testing.stage import PHASE, Fault, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from devicegraph.testing.stage import Subject

#: Around the warm-ups, and in the run that is captured.
PLACES = ("barrier", "warm-up", "hook", "head", "attention", "end")


def failing_forwards(subject: Subject) -> None:
    """A forward, hook or barrier that raises is a CaptureError with phase, key and cause, and nothing is left of it."""
    with Stage(subject) as stage:
        stage.capture(4, 2)
        # Whoever captures has switched the collector off, or has not: it is not for the backend to change.
        for place, collects in itertools.product(PLACES, (True, False)):
            error = ValueError(f"raised in {place}")
            raised = _fail(stage, Fault(place, error), CaptureError, collects=collects)
            _expect_named(raised, f"the error of a failure in {place}", "forward-failed")
            seen = raised.__cause__
            expect(seen is error, f"the error of a failure in {place} has the cause {seen!r}, not the one raised there")
            del raised


def interrupted_captures(subject: Subject) -> None:
    """A KeyboardInterrupt passes through a capture as it is, and nothing is left of the capture."""
    with Stage(subject) as stage:
        stage.capture(4, 2)
        for place in PLACES:
            error = KeyboardInterrupt(f"raised in {place}")
            raised = _fail(stage, Fault(place, error), KeyboardInterrupt)
            expect(raised is error, f"an interrupt in {place} came out as {raised!r}")
            del raised


def out_of_memory(subject: Subject) -> None:
    """Where memory runs out, in a warm-up or in the capture, the error has the code `out-of-memory`."""
    with Stage(subject) as stage:
        stage.capture(4, 2)
        for place in ("warm-up", "attention", "end"):
            for error in (torch.OutOfMemoryError("no device memory left"), MemoryError("no host memory left")):
                raised = _fail(stage, Fault(place, error), CaptureError)
                _expect_named(raised, f"the error of {type(error).__name__} in {place}", "out-of-memory")
                del raised


def forbidden_operations(subject: Subject) -> None:
    """A run that does what no capture can record is a CaptureError with phase, key and cause, and leaves nothing."""
    with Stage(subject) as stage:
        stage.capture(4, 2)
        for _ in range(2):
            raised = _fail(stage, Fault("head"), CaptureError)
            _expect_named(raised, "the error of a value read in the capture", None)
            expect(raised.__cause__ is not None, "the error of a value read in the capture has no cause")
            del raised


def failing_recaptures(subject: Subject) -> None:
    """A key whose capture fails has no graph, not even the one from before."""
    with Stage(subject) as stage:
        stage.capture(4, 2)
        for place in ("warm-up", "end"):
            _fail(stage, Fault(place, ValueError(place)), CaptureError, key=4)
            stage.capture(4)
            for key in (4, 2):
                stage.step(key, f"a replay after a recapture that failed in {place}")


def _fail(
    stage: Stage, fault: Fault, kind: type[BaseException], *, key: int = 8, collects: bool = True
) -> BaseException:
    """Fails in a capture between two good ones, and expects everything to be as without it; returns what was raised."""
    where = f"after a failure in {fault.place}"
    before, graphs = stage.adapter.current_stream(), stage.pool.graphs
    kept = [size for size in stage.backend.captured if size != key]
    with _collector(collects), stage.session() as current:
        batch = stage.batch(key)
        stage.fault = fault
        raised = expect_raises(f"a failure in {fault.place}", kind, lambda: stage.capture_one(key, batch))
        stage.fault = None
        expect_equal(f"whether the garbage collector is on, {where}", gc.isenabled(), collects)
        expect(not stage.adapter.is_capturing(), f"a capture goes on {where}")
        expect_equal(f"current stream in the session, {where}", stage.adapter.current_stream(), current)
        expect_equal(f"`captured` {where}", list(stage.backend.captured), kept)
        expect(not stage.backend.can_run(batch, key), f"`can_run` says yes to the key {where}")
        stage.capture_one("next", stage.batch(3))
    expect_equal(f"current stream after the session, {where}", stage.adapter.current_stream(), before)
    for size in (*kept, "next"):
        stage.step(size, f"a replay {where},")
    stage.backend.discard("next")
    expect(stage.pool.graphs <= graphs, f"the pool has {stage.pool.graphs} graphs {where}, and {graphs} before")
    return raised


def _expect_named(error: BaseException, what: str, code: str | None, key: int = 8) -> None:
    expect_equal(f"`phase` of {what}", getattr(error, "phase", None), PHASE)
    expect_equal(f"`shape_key` of {what}", getattr(error, "shape_key", None), key)
    if code is not None:
        expect_equal(f"`code` of {what}", getattr(error, "code", None), code)
    for part in (PHASE, str(key)):
        expect(part in str(error), f"{what} does not name {part!r}: {error}")


@contextmanager
def _collector(collects: bool) -> Iterator[None]:
    """The garbage collector on or off in the block, and afterwards as it was."""
    was_on = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        yield
    finally:
        (gc.enable if was_on else gc.disable)()


CLAUSES: tuple[Callable[[Subject], None], ...] = (
    failing_forwards,
    interrupted_captures,
    out_of_memory,
    forbidden_operations,
    failing_recaptures,
)
