"""Clauses about what a graph holds, for how long, and how much memory it takes."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

from devicegraph.errors import CaptureError
from devicegraph.outputs import tensors_of
from devicegraph.testing.expectations import expect, expect_raises
from devicegraph.testing.model import WideModel
from devicegraph.testing.stage import Fault, Stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from devicegraph.testing.stage import Subject


#: What small tensors may take: allocators reserve memory in pieces.
_SLACK_BYTES = 4 * 2**20


class _Inputs:
    """Something to hold that nothing else holds."""


def capture_inputs_live_with_the_graph(subject: Subject) -> None:
    """What was given as `capture_inputs` lives until its graph is discarded, replaced or cleaned up, and no longer."""
    with Stage(subject) as stage:

        def capture(size: int) -> weakref.ref[_Inputs]:
            inputs = _Inputs()
            with stage.session():
                stage.capture_one(size, stage.batch(size), inputs)
            return weakref.ref(inputs)

        def expect_alive(inputs: weakref.ref[_Inputs], when: str) -> None:
            gc.collect()
            expect(inputs() is not None, f"`capture_inputs` were let go {when}")

        def expect_gone(inputs: weakref.ref[_Inputs], when: str) -> None:
            gc.collect()
            expect(inputs() is None, f"`capture_inputs` are held {when}")

        first, other = capture(4), capture(2)
        expect_alive(first, "after the capture")
        for size in (4, 2, 4):
            stage.step(size)
        expect_alive(first, "while their graph was there, after replays")
        second = capture(4)
        expect_gone(first, "after their key was captured again")
        expect_alive(second, "after a recapture")
        stage.backend.discard(4)
        expect_gone(second, "after `discard`")
        expect_alive(other, "when another graph was discarded")
        stage.backend.cleanup()
        expect_gone(other, "after `cleanup`")
        expect_gone(_fail(stage, _Inputs()), "after a capture that failed")


def cleanup_lets_go(subject: Subject) -> None:
    """After `cleanup` nothing holds outputs and batches but who else wanted them."""
    with Stage(subject) as stage:
        stage.capture(8, 4)
        for size in (4, 8):
            stage.step(size)
        held: list[weakref.ref[Any]] = [
            weakref.ref(thing)
            for size in (8, 4)
            for thing in (stage.batches[size], stage.batches[size].x, *tensors_of(stage.outputs[size]))
        ]
        stage.backend.cleanup()
        stage.batches.clear()
        stage.outputs.clear()
        gc.collect()
        left = [type(thing).__name__ for thing in (reference() for reference in held) if thing is not None]
        expect(not left, f"after `cleanup`, {len(left)} of {len(held)} are still held: {', '.join(left)}")


def graphs_share_memory(subject: Subject) -> None:
    """Many graphs take little more memory than the largest of them."""
    with Stage(subject, model=WideModel) as stage:
        _warm(stage)
        before = _reserved(stage)
        stage.capture(8)
        first = _reserved(stage) - before
        with stage.session():
            for number in range(5):
                stage.capture_one(f"graph {number}", stage.batch(8))
        taken = _reserved(stage) - before
        expect(taken <= 2 * first + _SLACK_BYTES, f"one graph takes {_mib(first)}, six of its size {_mib(taken)}")
        for key in ("graph 0", 8, "graph 4"):
            stage.step(key)


def cleanup_returns_memory(subject: Subject) -> None:
    """After `cleanup` the device has its memory back."""
    with Stage(subject, model=WideModel) as stage:
        _warm(stage)
        before = _reserved(stage)
        for _ in range(2):
            stage.capture(8, 4)
            stage.step(8)
            taken = _reserved(stage) - before
            stage.outputs.clear()
            stage.backend.cleanup()
            left = _reserved(stage) - before
            expect(
                left <= taken // 4 + _SLACK_BYTES,
                f"the graphs took {_mib(taken)}, and {_mib(left)} are held after `cleanup`",
            )


def failures_leak_no_memory(subject: Subject) -> None:
    """Captures that fail take no memory for good."""
    with Stage(subject, model=WideModel) as stage:
        _warm(stage)
        stage.capture(8)
        before = _reserved(stage)
        _fail(stage)
        # After a failure the pool may go on with memory of another handle, once.
        one = max(_reserved(stage) - before, WideModel.BYTES)
        for _ in range(5):
            _fail(stage)
        six = _reserved(stage) - before
        expect(six <= 3 * one, f"one failing capture takes {_mib(one)} or less, six of them {_mib(six)}")
        stage.step(8, "a replay after captures that failed")


def _fail(stage: Stage, inputs: object = None) -> weakref.ref[Any]:
    """Fails at the end of a capture; returns a reference to what it was to keep."""
    stage.fault = Fault("end", ValueError("at the end"))
    with stage.session():
        batch = stage.batch(8)
        expect_raises("a failing capture", CaptureError, lambda: stage.capture_one("failing", batch, inputs))
    stage.fault = None
    return weakref.ref(batch if inputs is None else inputs)


def _warm(stage: Stage) -> None:
    """What libraries allocate once and for all on a stream is none of the graphs' memory."""
    stage.capture(8)
    stage.step(8)
    stage.outputs.clear()
    stage.backend.cleanup()


def _reserved(stage: Stage) -> int:
    gc.collect()
    stage.adapter.synchronize()
    stage.adapter.empty_cache()
    return stage.adapter.memory().reserved


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


CLAUSES: tuple[Callable[[Subject], None], ...] = (
    capture_inputs_live_with_the_graph,
    cleanup_lets_go,
    graphs_share_memory,
    cleanup_returns_memory,
    failures_leak_no_memory,
)
