"""Broken backends: each of them breaks one clause of the contract, whose name is beside it."""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

import devicegraph as dg
from devicegraph.backends import breakable
from devicegraph.backends.base import Captured
from devicegraph.backends.breaks import Break, BreakRecorder, recording_breaks
from devicegraph.outputs import tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MUTANTS: list[tuple[str, type[dg.BaseCudaGraphBackend]]] = []

Full, Breakable = dg.FullCudaGraphBackend, dg.BreakableCudaGraphBackend


def breaks(clause: str) -> Callable[[type], type]:
    def add(mutant: type) -> type:
        MUTANTS.append((clause, mutant))
        return mutant

    return add


@breaks("constructor")
class PoolOfItsOwn(Full):
    def __init__(self, adapter: Any, *, graph_pool: Any = None, **options: Any) -> None:
        super().__init__(adapter, graph_pool=graph_pool or dg.GraphMemoryPool(adapter), **options)


@breaks("constructor")
class TakesAnyErrorMode(Full):
    def __init__(self, *args: Any, capture_error_mode: Any = "thread_local", **options: Any) -> None:
        super().__init__(*args, **options)
        self.capture_error_mode = capture_error_mode


@breaks("arguments")
class TakesNoHook(Full):
    def capture_one(self, shape_key: Any, forward_fn: Any, capture_inputs: Any = None) -> Any:
        return super().capture_one(shape_key, forward_fn, capture_inputs)


@breaks("arguments")
class IgnoresTheHook(Full):
    def _warm_up(self, forward_fn: Any, post_warmup_hook: Any) -> Any:
        return super()._warm_up(forward_fn, None)


@breaks("arguments")
class RenamesAnArgument(Full):
    def replay(self, key: Any, batch: Any, **kwargs: Any) -> Any:
        return super().replay(key, batch)


@breaks("arguments")
class TakesNoFurtherArguments(Full):
    def replay(self, shape_key: Any, static_forward_batch: Any) -> Any:
        return super().replay(shape_key, static_forward_batch)


@breaks("warm_ups")
class WarmsUpOnce(Full):
    def _warm_up(self, forward_fn: Any, post_warmup_hook: Any) -> Any:
        self.adapter.synchronize()
        self._barrier()
        forward_fn()
        if post_warmup_hook is not None:
            post_warmup_hook()
        self.adapter.synchronize()


@breaks("warm_ups")
class NoBarrier(Full):
    def __init__(self, *args: Any, barrier: Any = None, **options: Any) -> None:
        super().__init__(*args, **options)


@breaks("warm_ups")
class HookAfterTheLastOnly(Full):
    def _warm_up(self, forward_fn: Any, post_warmup_hook: Any) -> Any:
        super()._warm_up(forward_fn, None)
        post_warmup_hook()


@breaks("warm_ups")
class HookInTheCapture(Full):
    def capture_one(self, shape_key: Any, forward_fn: Any, capture_inputs: Any = None, hook: Any = None) -> Any:
        def forward() -> Any:
            hook()
            return forward_fn()

        return super().capture_one(shape_key, forward, capture_inputs)


@breaks("warm_ups")
class NoLastWait(Full):
    def _end_warm_up(self) -> None:
        self.adapter.empty_cache()


@breaks("warm_ups")
class SomethingBetween(Full):
    def _end_warm_up(self) -> None:
        super()._end_warm_up()
        self._barrier()


@breaks("captures_execute_nothing")
class ReplaysAfterTheCapture(Full):
    def capture_one(self, shape_key: Any, *args: Any) -> Any:
        output = super().capture_one(shape_key, *args)
        self.captured[shape_key].graph.replay()
        return output


@breaks("capture_error_mode")
class OneErrorModeForAll(Full):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.capture_error_mode = "thread_local"


@breaks("capture_error_mode")
class PoolForEachGraph(Full):
    def capture_one(self, *args: Any) -> Any:
        self.graph_pool = dg.GraphMemoryPool(self.adapter)
        return super().capture_one(*args)


@breaks("capture_error_mode")
class CapturesNothing(Breakable):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, debug=True, **options)


@breaks("capture_session")
class IgnoresTheStream(Full):
    @contextmanager
    def capture_session(self, stream: Any = None) -> Iterator[Any]:
        with super().capture_session() as own:
            yield own


@breaks("capture_session")
class DoesNotWait(Full):
    @contextmanager
    def capture_session(self, stream: Any = None) -> Iterator[Any]:
        self._stream = self.adapter.stream() if stream is None else stream
        with self.adapter.stream_context(self._stream):
            yield self._stream


@breaks("capture_session")
class LeavesItsStream(Full):
    @contextmanager
    def capture_session(self, stream: Any = None) -> Iterator[Any]:
        with super().capture_session(stream) as current:
            yield current
        _make_current(self.adapter, current)


_entered: list[Any] = []


def _make_current(adapter: Any, stream: Any) -> None:
    """Makes a stream current until somebody makes another one current."""
    _entered.append(adapter.stream_context(stream))  # a context that is collected would leave
    _entered[-1].__enter__()


@breaks("replays_equal_eager")
class OnePlaceForAllBreaks(Breakable):
    """What crosses one break is overwritten by the next one, or by that of another size."""

    def _capture(self, forward_fn: Any, steps: Any) -> Any:
        place = self.__dict__.setdefault("place", torch.zeros(8, 4, device=self.adapter.device))

        class Recorder(BreakRecorder):
            def call(self, function: Any, args: Any, kwargs: Any, at_capture: Any) -> Any:
                with self._segments.pause(), recording_breaks(None):
                    result = at_capture(*args, **kwargs)
                    output = place[: len(result)].copy_(result)
                    self._steps.add_break(Break(function, args, kwargs, output))
                return output

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(breakable, "BreakRecorder", Recorder)
            return super()._capture(forward_fn, steps)


@breaks("replays_equal_eager")
class ReplaysTwice(Full):
    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        self.captured[shape_key].graph.replay()
        return super().replay(shape_key, static_forward_batch)


@breaks("replays_equal_eager")
class ReplaysTheLastCaptured(Full):
    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        return super().replay(list(self.captured)[-1], static_forward_batch)


@breaks("replays_equal_eager")
class ReturnsCopies(Full):
    """Runners read what `capture_one` returned."""

    def capture_one(self, *args: Any) -> Any:
        return super().capture_one(*args).clone()


@breaks("replays_equal_eager")
class LeavesThePreparationOut(Full):
    def wrap_prepare(self, prepare: Any) -> Any:
        return lambda *args: None if self.adapter.is_capturing() else prepare(*args)


@breaks("capture_order")
class RoomForTheFirst(Breakable):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        make_room = self._shared.make_room
        self._shared.make_room = lambda output: None if self._shared._tensors else make_room(output)


@breaks("replays_run_no_python")
class RunsTheForwardAgain(Full):
    def capture_one(self, shape_key: Any, forward_fn: Any, *args: Any) -> Any:
        output = super().capture_one(shape_key, forward_fn, *args)
        self.forwards = {**self.__dict__.get("forwards", {}), shape_key: forward_fn}
        return output

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        output = self.captured[shape_key].output
        return output.copy_(self.forwards[shape_key]())


@breaks("replays_run_no_python")
class WaitsInReplays(Full):
    def replay(self, *args: Any, **kwargs: Any) -> Any:
        output = super().replay(*args, **kwargs)
        self.adapter.synchronize()
        return output


@breaks("outputs_keep_their_classes")
class FlattensOutputs(Full):
    def capture_one(self, shape_key: Any, forward_fn: Any, *args: Any) -> Any:
        def forward() -> Any:
            output = forward_fn()
            return output if isinstance(output, torch.Tensor) else tuple(tensors_of(output))

        return super().capture_one(shape_key, forward, *args)


@breaks("outputs_stay")
class PutsOutputsIntoInputs(Full):
    def capture_one(self, shape_key: Any, forward_fn: Any, capture_inputs: Any = None, hook: Any = None) -> Any:
        def forward() -> Any:
            output = forward_fn()
            return capture_inputs.x.copy_(output) if self.adapter.is_capturing() else output

        return super().capture_one(shape_key, forward, capture_inputs, hook)


@breaks("keys")
class RunsEverything(Full):
    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return True


@breaks("keys")
class ReplaysNothingWithoutAWord(Full):
    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        return super().replay(shape_key, static_forward_batch) if shape_key in self.captured else None


@breaks("keys")
class TellsKeysByTheirText(Full):
    def capture_one(self, shape_key: Any, *args: Any) -> Any:
        return super().capture_one(str(shape_key), *args)

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return str(shape_key) in self.captured

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        return super().replay(str(shape_key), static_forward_batch)


@breaks("recapture")
class KeepsTheFirst(Full):
    def capture_one(self, shape_key: Any, *args: Any) -> Any:
        if shape_key in self.captured:
            return self.captured[shape_key].output
        return super().capture_one(shape_key, *args)


@breaks("recapture")
class KeepsWhatIsReplaced(Full):
    def capture_one(self, shape_key: Any, *args: Any) -> Any:
        self.replaced = [*self.__dict__.get("replaced", []), self.captured.pop(shape_key, None)]
        return super().capture_one(shape_key, *args)


class KnowsItsCaptures(Full):
    """Can tell a caller's `discard` from that of a capture."""

    captures = False

    def capture_one(self, *args: Any) -> Any:
        self.captures = True
        try:
            return super().capture_one(*args)
        finally:
            self.captures = False


@breaks("discard")
class DiscardsNothing(KnowsItsCaptures):
    def discard(self, shape_key: Any) -> None:
        if self.captures:
            super().discard(shape_key)


@breaks("discard")
class DiscardsEverything(KnowsItsCaptures):
    def discard(self, shape_key: Any) -> None:
        if self.captures:
            super().discard(shape_key)
        else:
            self.cleanup()


@breaks("discard")
class DiscardsKnownKeysOnly(KnowsItsCaptures):
    def discard(self, shape_key: Any) -> None:
        if not self.captures and shape_key not in self.captured:
            raise KeyError(shape_key)
        super().discard(shape_key)


@breaks("cleanup")
class CleansUpOnce(Full):
    is_clean = False

    def cleanup(self) -> None:
        super().cleanup()
        if self.is_clean:
            raise RuntimeError("clean already")
        self.is_clean = True


@breaks("cleanup")
class KeepsItsGraphs(Full):
    def cleanup(self) -> None:
        self.kept = list(self.captured.values())
        self.captured.clear()


@breaks("cleanup")
class CapturesUntilCleanup(Full):
    def cleanup(self) -> None:
        if self.captured:
            self.capture_one = None  # type: ignore[assignment, method-assign]
        super().cleanup()


@breaks("two_backends_in_one_pool")
class OneTableForAll(Full):
    table: dict[Any, Captured[Any]] = {}

    @property
    def captured(self) -> dict[Any, Captured[Any]]:
        return self.table

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._captured = self.table


@breaks("replay_session")
class SwallowsErrors(Full):
    @contextmanager
    def replay_session(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            return


@breaks("replay_session")
class ReplaysOnAStreamOfItsOwn(Full):
    @contextmanager
    def replay_session(self) -> Iterator[None]:
        with self.adapter.stream_context(self.adapter.stream()):
            yield


@breaks("replays_anywhere")
class BoundToItsThread(Full):
    def replay(self, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("another thread")
        return super().replay(*args, **kwargs)


@breaks("replays_anywhere")
class BoundToItsStream(Full):
    @contextmanager
    def capture_session(self, stream: Any = None) -> Iterator[Any]:
        self.home = self.adapter.current_stream()
        with super().capture_session(stream) as current:
            yield current

    def replay(self, *args: Any, **kwargs: Any) -> Any:
        if self.adapter.current_stream() == self.home:
            return super().replay(*args, **kwargs)
        return self.captured[args[0]].output


@breaks("callers_modes")
class LeavesBreaksInTheCallersMode(Breakable):
    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        for call in self.captured[shape_key].recording.calls:
            call()
        return self.captured[shape_key].output


class ChangesErrors(Full):
    """Makes something else of what goes wrong in a capture."""

    def capture_one(self, shape_key: Any, *args: Any) -> Any:
        try:
            return super().capture_one(shape_key, *args)
        except BaseException as error:
            self.failed(shape_key, error)
            raise

    def failed(self, shape_key: Any, error: BaseException) -> None:
        raise NotImplementedError


@breaks("failing_forwards")
class RaisesTheCause(ChangesErrors):
    def failed(self, shape_key: Any, error: BaseException) -> None:
        raise error.__cause__ or error


@breaks("failing_forwards")
class HidesTheCause(ChangesErrors):
    def failed(self, shape_key: Any, error: BaseException) -> None:
        error.__cause__ = None


@breaks("failing_forwards")
class NamesNothing(ChangesErrors):
    def failed(self, shape_key: Any, error: BaseException) -> None:
        raise dg.CaptureError("it failed", code="forward-failed") from error.__cause__


@breaks("failing_forwards")
class LeavesAnEntry(ChangesErrors):
    def failed(self, shape_key: Any, error: BaseException) -> None:
        self.captured[shape_key] = Captured(self.adapter.graph(), None, None)


@breaks("failing_forwards")
class LeavesTheCollectorOff(ChangesErrors):
    def failed(self, shape_key: Any, error: BaseException) -> None:
        gc.disable()


@breaks("failing_forwards")
class LeavesAnotherStream(ChangesErrors):
    def failed(self, shape_key: Any, error: BaseException) -> None:
        _make_current(self.adapter, self.adapter.stream())


@breaks("failing_forwards")
class DropsAllGraphs(ChangesErrors):
    def failed(self, shape_key: Any, error: BaseException) -> None:
        self.cleanup()


@breaks("interrupted_captures")
class WrapsInterrupts(ChangesErrors):
    def failed(self, shape_key: Any, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            raise dg.CaptureError("interrupted", code="interrupted") from error


@breaks("interrupted_captures")
class HoldsInterruptedGraphs(ChangesErrors):
    def failed(self, shape_key: Any, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            self.captured[shape_key] = Captured(self.adapter.graph(), None, None)


@breaks("out_of_memory")
class OneCodeForAll(ChangesErrors):
    def failed(self, shape_key: Any, error: BaseException) -> None:
        error.code = "forward-failed"  # type: ignore[attr-defined]


@breaks("forbidden_operations")
class PassesCaptureErrors(ChangesErrors):
    def failed(self, shape_key: Any, error: BaseException) -> None:
        if isinstance(error.__cause__, dg.CaptureError):
            raise error.__cause__


@breaks("failing_recaptures")
class GoesBackToTheOldGraph(Full):
    def capture_one(self, shape_key: Any, *args: Any) -> Any:
        old = self.captured.pop(shape_key, None)
        try:
            output = super().capture_one(shape_key, *args)
        except Exception:
            if old is not None:
                self.captured[shape_key] = old
            raise
        if old is not None:
            old.graph.reset()
        return output


@breaks("capture_inputs_live_with_the_graph")
class DropsInputs(Full):
    def capture_one(self, shape_key: Any, forward_fn: Any, capture_inputs: Any = None, hook: Any = None) -> Any:
        return super().capture_one(shape_key, forward_fn, None, hook)


@breaks("capture_inputs_live_with_the_graph")
class KeepsInputs(Full):
    kept: list[Any] = []

    def capture_one(self, shape_key: Any, forward_fn: Any, capture_inputs: Any = None, hook: Any = None) -> Any:
        output = super().capture_one(shape_key, forward_fn, capture_inputs, hook)
        self.kept = [*self.kept, capture_inputs]
        return output


@breaks("capture_inputs_live_with_the_graph")
class KeepsInputsOfFailures(Full):
    kept: list[Any] = []

    def capture_one(self, shape_key: Any, forward_fn: Any, capture_inputs: Any = None, hook: Any = None) -> Any:
        try:
            return super().capture_one(shape_key, forward_fn, capture_inputs, hook)
        except dg.CaptureError:
            self.kept = [*self.kept, capture_inputs]
            raise


@breaks("cleanup_lets_go")
class KeepsOutputs(Full):
    def cleanup(self) -> None:
        self.kept = [captured.output for captured in self.captured.values()]
        super().cleanup()


@breaks("graphs_share_memory")
class StagingForEachGraph(Full):
    def capture_one(self, shape_key: Any, forward_fn: Any, *args: Any) -> Any:
        def forward() -> Any:
            output = forward_fn()
            if self.adapter.is_capturing():
                staging = torch.zeros(32 * 2**20, dtype=torch.uint8, device=self.adapter.device)
                self.staging = [*self.__dict__.get("staging", []), staging]
            return output

        return super().capture_one(shape_key, forward, *args)


@breaks("cleanup_returns_memory")
class HoldsThePoolsMemory(Full):
    def cleanup(self) -> None:
        if self.graph_pool.graphs:
            self.held = [*self.__dict__.get("held", []), self.graph_pool.handle]
        super().cleanup()


@breaks("failures_leak_no_memory")
class AbandonsThePoolsMemory(ChangesErrors):
    def failed(self, shape_key: Any, error: BaseException) -> None:
        self.abandoned = [*self.__dict__.get("abandoned", []), self.graph_pool.handle]
        self.graph_pool.renew()
