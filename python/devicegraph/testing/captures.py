"""Clauses about captures: what is called with what, how often, in which order, and what it leaves behind."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from devicegraph.backends.breaks import batch_in_use
from devicegraph.devices import CAPTURE_ERROR_MODES, DEFAULT_CAPTURE_ERROR_MODE
from devicegraph.errors import BackendError
from devicegraph.testing.expectations import expect, expect_equal, expect_raises, expect_same
from devicegraph.testing.stage import PHASE, Stage, on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from typing import Any

    from devicegraph.devices import CaptureErrorMode
    from devicegraph.testing.model import Batch
    from devicegraph.testing.stage import Subject


def constructor(subject: Subject) -> None:
    """It is made from an adapter and a phase, all else by default or by keyword, and refuses an unknown error mode."""
    adapter = subject.adapter
    backend = subject.make_backend(adapter, phase="decode")
    expect(bool(backend.name), f"`name` is {backend.name!r}")
    expect_equal("`captured` of a new backend", dict(backend.captured), {})
    other = subject.make_backend(adapter=adapter, phase=PHASE)
    expect(
        backend.graph_pool is other.graph_pool,
        f"two backends that were given no pool use {backend.graph_pool} and {other.graph_pool}, "
        "not the one that all backends of the device share",
    )
    error = expect_raises(
        "capture_error_mode='unsafe'",
        BackendError,
        lambda: subject.make_backend(adapter, phase=PHASE, capture_error_mode="unsafe"),
    )
    expect_equal("the error's code", getattr(error, "code", None), "capture-error-mode-unknown")


def arguments(subject: Subject) -> None:
    """Every argument of every method can be given by position and by keyword, and those with defaults left out."""
    with Stage(subject) as stage:
        backend, model = stage.backend, stage.model
        prepare, forward = backend.wrap_prepare(prepare=model.prepare), backend.wrap_forward(forward=model.forward)
        stage.prepare, stage.forward = prepare, forward
        batches: dict[Hashable, Batch] = {key: stage.batch(2) for key in ("position", "keyword", "default")}
        backend.mark_rows(tensor=batches["keyword"].x, axis=0)
        functions = {key: stage.forward_fn(key, batch) for key, batch in batches.items()}
        stream = stage.adapter.stream()
        with backend.capture_session(stream):
            if backend.wants_largest_output:
                with batch_in_use(batches["default"]):
                    backend.size_outputs(output=forward(batches["default"]))
            outputs: dict[Hashable, Any] = {
                "position": backend.capture_one("position", functions["position"], object(), stage.hook)
            }
        with backend.capture_session(stream=stream):
            outputs["keyword"] = backend.capture_one(
                shape_key="keyword", forward_fn=functions["keyword"], capture_inputs=object(),
                post_warmup_hook=stage.hook,
            )  # fmt: skip
        expect_equal("hooks of two captures", stage.log.count("hook"), 2 * backend.WARMUPS)
        with backend.capture_session():
            outputs["default"] = backend.capture_one("default", functions["default"])
        stage.batches |= batches
        stage.outputs |= outputs
        for key in batches:
            stage.step(key)
        batch = batches["keyword"]
        expect(bool(backend.can_run(batch, "position")), "`can_run` by position refuses a captured key")
        expect(bool(backend.can_run(forward_batch=batch, shape_key="keyword")), "`can_run` refuses a captured key")
        with batch_in_use(batch), backend.replay_session():
            seen = on_host(backend.replay(shape_key="keyword", static_forward_batch=batch))
        expect_same("a replay by keyword, beside eager", seen, stage.eager("keyword"))
        kinds = [parameter.kind for parameter in inspect.signature(backend.replay).parameters.values()]
        expect(inspect.Parameter.VAR_KEYWORD in kinds, "`replay` takes no further keyword arguments")
        backend.discard(shape_key="keyword")
        backend.discard("position")


def warm_ups(subject: Subject) -> None:
    """Before a capture the forward runs `WARMUPS` times, after a wait and the barrier each time; then the hook."""
    with Stage(subject) as stage:
        with stage.session():
            batch = stage.batch(4)
            stage.log.clear()
            stage.capture_one(4, batch)
        wanted = ["synchronize", "barrier", "forward", "hook"] * stage.backend.WARMUPS + ["synchronize"]
        seen = [event for event in stage.log if event not in ("head", "attention")]
        expect(stage.backend.WARMUPS >= 1, f"`WARMUPS` is {stage.backend.WARMUPS}")
        expect_equal("what happened before the capture, in order", seen[: len(wanted)], wanted)
        # The session's own wait at its end is the last.
        between = [event for event in seen[len(wanted) : -1] if event not in ("begin", "end")]
        expect_equal("what happened behind the last wait, but begins and ends of captures", between, ["forward"])
        heads = stage.log.count("head")
        expect_equal("runs of the Python before the forward", heads, stage.backend.WARMUPS + 1)


def captures_execute_nothing(subject: Subject) -> None:
    """A capture leaves the state of its warm-ups, or, where breaks need real values, of one whole run more."""
    with Stage(subject) as stage:
        stage.capture(4, tells_largest=False)
        batch = stage.batches[4]
        count, total, added = int(stage.model.count.item()), on_host(batch.total), stage.model.added(batch)
        runs = stage.backend.WARMUPS + stage.has_breaks(4)
        expect_equal("runs on the device", count, runs)
        expect_same(f"what {runs} runs add to a cache", total, runs * added)


def capture_error_mode(subject: Subject) -> None:
    """Every capture is made through the adapter, with the error mode and the pool given and the session's stream."""
    modes: tuple[CaptureErrorMode, ...] = CAPTURE_ERROR_MODES
    if not subject.adapter.has_capture_error_modes:
        modes = (DEFAULT_CAPTURE_ERROR_MODE,)
    for mode in modes:
        with Stage(subject, capture_error_mode=mode) as stage:
            with stage.session() as stream:
                stage.capture_one(2, stage.batch(2))
            expect(bool(stage.captures), "no capture was made through the adapter")
            for number, seen in enumerate(stage.captures):
                expect_equal(f"error mode of capture {number}", seen.capture_error_mode, mode)
                expect(seen.pool is stage.pool, f"capture {number} went to {seen.pool}, not to the pool given")
                expect_equal(f"stream of capture {number}", seen.stream, stream)
            stage.step(2, f"a replay of a capture in the mode `{mode}`")


def capture_session(subject: Subject) -> None:
    """A session makes a stream current, its own or the one given, waits at both ends, and puts back what was before."""
    with Stage(subject) as stage:
        before = stage.adapter.current_stream()
        given = stage.adapter.stream()
        for key, stream in enumerate((None, given, None)):
            name = "its own stream" if stream is None else "a stream given"
            stage.log.clear()
            with stage.session(stream) as current:
                expect("synchronize" in stage.log, f"a session on {name} began without waiting for the device")
                expect(stream is None or current == stream, f"a session on {name} yields {current}, not {stream}")
                expect_equal(f"current stream in a session on {name}", stage.adapter.current_stream(), current)
                expect(current != before, f"a session on {name} is on the stream from before, where no capture can be")
                stage.capture_one(key, stage.batch(2))
                stage.log.clear()
            expect("synchronize" in stage.log, f"a session on {name} ended without waiting for the device")
            expect_equal(f"current stream after a session on {name}", stage.adapter.current_stream(), before)
            stage.step(key, f"a replay of a capture on {name}")
        error = ValueError("in the session")

        def fail() -> None:
            with stage.session():
                raise error

        raised = expect_raises("an error in a session", ValueError, fail)
        expect(raised is error, f"an error in a session came out as {raised!r}")
        expect_equal("current stream after an error in a session", stage.adapter.current_stream(), before)


CLAUSES: tuple[Callable[[Subject], None], ...] = (
    constructor,
    arguments,
    warm_ups,
    captures_execute_nothing,
    capture_error_mode,
    capture_session,
)
