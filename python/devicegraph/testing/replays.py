"""Clauses about replays and graphs: values, outputs, keys, and from where a graph may be replayed."""

from __future__ import annotations

import gc
import threading
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch

from devicegraph.runners.shape_key import ShapeKey
from devicegraph.testing.expectations import expect, expect_equal, expect_raises, expect_same
from devicegraph.testing.model import NestedModel, SilentModel
from devicegraph.testing.stage import Stage, on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from devicegraph.testing.stage import Subject


def replays_equal_eager(subject: Subject) -> None:
    """Graphs of several sizes in one pool give, in any order, what an eager run gives on the inputs of the moment."""
    with Stage(subject) as stage:
        stage.capture(8, 4, 2, 1)
        for size in (8, 2, 8, 4, 8, 1, 1, 8, 2):
            stage.step(size)


def capture_order(subject: Subject) -> None:
    """Sizes may be captured in any order, whether or not the largest output was told of before."""
    with Stage(subject) as stage:
        for order in ((2, 4, 8), (4, 8, 2), (8, 2, 4)):
            for tells_largest in (False, True):
                stage.capture(*order, tells_largest=tells_largest)
                for size in (2, 8, 4, 2):
                    stage.step(size, f"a replay after captures in the order {order}")
                for size in order:
                    stage.backend.discard(size)


def replays_run_no_python(subject: Subject) -> None:
    """A replay runs no Python of the forward but that of its breaks, and does not wait for the device."""
    with Stage(subject) as stage:
        stage.capture(4)
        stage.log.clear()
        for _ in range(3):
            stage.replay(4)
        expect_equal("what three replays ran", [event for event in stage.log if event != "attention"], [])


def outputs_keep_their_classes(subject: Subject) -> None:
    """Outputs come back in the containers of the forward, with the parts that are no tensors; so does no output."""
    with Stage(subject, model=NestedModel) as stage:
        stage.capture(8, 3)
        for size in (3, 8, 3):
            stage.step(size)
    with Stage(subject, model=SilentModel) as stage:
        stage.capture(4)
        stage.step(4)


def outputs_stay(subject: Subject) -> None:
    """An output is as the replay left it until the next replay, whatever runs and is filled in between."""
    with Stage(subject) as stage:
        stage.capture(8, 4)
        for size in (8, 4):
            stage.draw(stage.batches[size])
            wanted = stage.eager(size)
            output = stage.replay(size)
            for batch in stage.batches.values():
                stage.draw(batch)
            for other in (8, 4):
                stage.eager(other)
            scratch = [torch.full_like(part, 7) for part in (stage.batches[8].x, stage.batches[4].x) for _ in range(8)]
            gc.collect()
            stage.adapter.synchronize()
            expect_same(f"the output of {size}, after eager work and new inputs", on_host(output), wanted)
            expect_same(f"what `capture_one` returned for {size}, after these", on_host(stage.outputs[size]), wanted)
            del scratch


def keys(subject: Subject) -> None:
    """`can_run` and `captured` know the captured keys, of whatever type, and a replay of another is a KeyError."""
    names: list[Hashable] = [3, "large", ("tokens", 3), ShapeKey(3), ShapeKey(3, None, "lora")]
    with Stage(subject) as stage:
        with stage.session():
            for name in names:
                stage.capture_one(name, stage.batch(3))
        for name in names:
            expect(bool(stage.backend.can_run(stage.batches[name], name)), f"`can_run` refuses the captured {name!r}")
            stage.step(name)
        expect_equal("`captured`", set(stage.backend.captured), set(names))
        _expect_no_graph(stage, 4, "that was never captured")


def recapture(subject: Subject) -> None:
    """A key that is captured again means the new graph, and the old one is gone."""
    with Stage(subject) as stage:
        stage.capture(4, 2)
        graphs, old = stage.pool.graphs, stage.batches[4]
        total = on_host(old.total)
        for _ in range(2):
            stage.capture(4)
            for key in (4, 2):
                stage.step(key, "a replay after a recapture")
        expect_same("the cache that the old graph wrote, after replays of the new one", on_host(old.total), total)
        expect_equal("`captured`", sorted(stage.backend.captured), [2, 4])
        expect_equal("graphs in the pool, after recaptures", stage.pool.graphs, graphs)


def discard(subject: Subject) -> None:
    """`discard` drops one graph and no other, and does nothing where there is none."""
    with Stage(subject) as stage:
        stage.capture(8, 4, 2)
        graphs = stage.pool.graphs
        stage.backend.discard(4)
        expect(not graphs or stage.pool.graphs < graphs, f"the pool has {stage.pool.graphs} graphs, as before")
        _expect_no_graph(stage, 4, "that was discarded")
        for _ in range(2):
            stage.backend.discard(4)
            stage.backend.discard("never captured")
        for size in (8, 2):
            stage.step(size, "a replay beside a discarded graph")
        stage.capture(4)
        for size in (8, 4, 2):
            stage.step(size, "a replay after the discarded key was captured again")


def cleanup(subject: Subject) -> None:
    """`cleanup` drops every graph, can be called twice, and captures can follow."""
    with Stage(subject) as stage:
        stage.backend.cleanup()
        for _ in range(2):
            stage.capture(4, 2)
            for size in (4, 2):
                stage.step(size, "a replay")
            for _ in range(2):
                stage.backend.cleanup()
            for size in (4, 2):
                _expect_no_graph(stage, size, "after `cleanup`")
            expect_equal("graphs in the pool after `cleanup`", stage.pool.graphs, 0)


def two_backends_in_one_pool(subject: Subject) -> None:
    """Backends that share a pool leave each other's graphs alone, whatever is captured, replayed and dropped."""
    with Stage(subject) as one, Stage(subject, pool=one.pool) as other:
        one.capture(8, 2)
        other.capture(8, 4)
        one.capture(4)
        for stage, size in ((one, 8), (other, 8), (one, 2), (one, 4), (other, 4), (one, 8)):
            stage.step(size, "a replay in a shared pool")
        one.backend.cleanup()
        for size in (8, 4):
            other.step(size, "a replay after the other backend's `cleanup`")
        one.capture(8)
        for stage, size in ((other, 4), (one, 8), (other, 8)):
            stage.step(size, "a replay after the other backend captured again")


def replay_session(subject: Subject) -> None:
    """Replays run in a session on the caller's stream, one or several, and what a caller raises there passes."""
    with Stage(subject) as stage:
        stage.capture(4)
        before = stage.adapter.current_stream()
        for _ in range(2):
            with stage.backend.replay_session():
                expect_equal("current stream in a replay session", stage.adapter.current_stream(), before)
                stage.step(4)
                stage.step(4)
            expect_equal("current stream after a replay session", stage.adapter.current_stream(), before)
        error = ValueError("in the session")

        def fail() -> None:
            with stage.backend.replay_session():
                raise error

        raised = expect_raises("an error in a replay session", ValueError, fail)
        expect(raised is error, f"an error in a replay session came out as {raised!r}")
        expect_equal("current stream after an error in a replay session", stage.adapter.current_stream(), before)
        stage.step(4, "a replay after an error in a replay session")


def replays_anywhere(subject: Subject) -> None:
    """A graph can be replayed from another thread and on another stream than it was captured on."""
    with Stage(subject) as stage:
        stage.capture(4, 2)
        for size in (4, 2):
            _in_thread(partial(stage.step, size, "a replay in another thread"))
        stage.adapter.synchronize()
        with stage.adapter.stream_context(stage.adapter.stream()):
            for size in (2, 4):
                stage.step(size, "a replay on another stream")
            stage.adapter.synchronize()
        stage.step(4, "a replay in the first thread again")


def callers_modes(subject: Subject) -> None:
    """Callers may be in inference mode or not, at capture and at replay, in any combination."""
    for captured_in in (nullcontext, torch.inference_mode):
        with Stage(subject) as stage:
            batches = {size: stage.batch(size) for size in (4, 2)}
            with captured_in(), stage.session():
                for size, batch in batches.items():
                    stage.capture_one(size, batch)
            for replayed_in in (nullcontext, torch.no_grad, torch.inference_mode, nullcontext):
                with replayed_in():
                    for size in (4, 2):
                        stage.step(size, f"a replay in `{_mode(replayed_in)}` of a capture in `{_mode(captured_in)}`")


def _mode(kind: type) -> str:
    return "no mode" if kind is nullcontext else kind.__name__


def _expect_no_graph(stage: Stage, key: Hashable, which: str) -> None:
    batch = next(iter(stage.batches.values()))
    expect(not stage.backend.can_run(batch, key), f"`can_run` says yes to {key!r}, {which}")
    expect(key not in stage.backend.captured, f"`captured` has {key!r}, {which}")
    expect_raises(f"a replay of {key!r}, {which}", KeyError, lambda: stage.backend.replay(key, batch))


def _in_thread(function: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in errors:
        raise error


CLAUSES: tuple[Callable[[Subject], None], ...] = (
    replays_equal_eager,
    capture_order,
    replays_run_no_python,
    outputs_keep_their_classes,
    outputs_stay,
    keys,
    recapture,
    discard,
    cleanup,
    two_backends_in_one_pool,
    replay_session,
    replays_anywhere,
    callers_modes,
)
