"""A backend under test, driven as a runner drives it, with eyes on everything that goes through its adapter."""

from __future__ import annotations

import copy
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from devicegraph.backends.breaks import batch_in_use
from devicegraph.devices import GraphMemoryPool
from devicegraph.outputs import map_tensors
from devicegraph.runners.capture_mode import model_capture_mode
from devicegraph.testing.expectations import expect_equal, expect_same
from devicegraph.testing.model import Batch, Model

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator
    from contextlib import AbstractContextManager

    from typing_extensions import Self

    from devicegraph.backends import BaseCudaGraphBackend
    from devicegraph.devices import CaptureErrorMode, DeviceAdapter

PHASE = "prefill"


class Subject(NamedTuple):
    """What is checked."""

    make_backend: Callable[..., BaseCudaGraphBackend]
    adapter: DeviceAdapter


class CaptureArguments(NamedTuple):
    """What the adapter was given for one capture."""

    pool: GraphMemoryPool
    stream: Any
    capture_error_mode: str


class Fault(NamedTuple):
    """Where the next run is to go wrong, and with what.

    `barrier`, `warm-up` and `hook` are around the first warm-up; `head`, `attention` and `end` are places in the run
    that is captured. Without an error, the run does there what no capture can record.
    """

    place: str
    error: BaseException | None = None


class Stage:
    """A backend of the subject, with a model and its batches. It is cleaned up when the block ends.

    Attributes:
        adapter: the device's own adapter.
        log: what happened, in order: `synchronize`, `barrier`, `forward`, `head` and `attention` (their Python), `hook`
            or `hook in a capture`, `begin` and `end` (of a capture).
        captures: what the adapter was given, for each capture that went through it.
        batches: the static batches by key.
        outputs: what `capture_one` returned, by key.
        fault: what is to go wrong.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        model: type[Model] = Model,
        pool: GraphMemoryPool | None = None,
        capture_error_mode: CaptureErrorMode = "thread_local",
    ) -> None:
        self.log: list[str] = []
        self.captures: list[CaptureArguments] = []
        self.adapter = subject.adapter
        self.pool = GraphMemoryPool(self.adapter) if pool is None else pool
        self.backend = subject.make_backend(
            watched(self.adapter, self.log, self.captures),
            phase=PHASE,
            graph_pool=self.pool,
            capture_error_mode=capture_error_mode,
            barrier=lambda: self._reach("barrier"),
        )
        self.model = model(self.adapter.device)
        self.model.on_prepare = lambda: self._reach("head")
        self.model.on_attention = lambda: self._reach("attention")
        self.forward = self.backend.wrap_forward(self.model.forward)
        self.prepare = self.backend.wrap_prepare(self.model.prepare)
        self.batches: dict[Hashable, Batch] = {}
        self.outputs: dict[Hashable, Any] = {}
        self.fault: Fault | None = None
        self._runs = 0
        self._seed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.outputs.clear()
        if kind is None:
            self.backend.cleanup()
        else:
            with suppress(Exception):  # the clause's own failure is the one to be told
                self.backend.cleanup()

    # Captures.

    def batch(self, size: int) -> Batch:
        """A new static batch whose rows the backend was told of."""
        batch = Batch(self.model, size)
        for tensor in (batch.x, batch.bias, batch.total):
            self.backend.mark_rows(tensor, 0)
        self.draw(batch)
        return batch

    def capture(self, *sizes: int, tells_largest: bool = True) -> None:
        """Captures a graph for each size, whose key it is, in a session of their own."""
        with self.session():
            if tells_largest and self.backend.wants_largest_output:
                self.backend.size_outputs(self._run(self.batch(max(sizes)), None))
            for size in sizes:
                self.capture_one(size, self.batch(size))

    @contextmanager
    def session(self, stream: Any = None) -> Iterator[Any]:
        """A capture session as a runner opens it."""
        with model_capture_mode(), torch.no_grad(), self.backend.capture_session(stream) as current:
            yield current

    def capture_one(self, key: Hashable, batch: Batch, inputs: Any = None) -> None:
        """Captures a graph inside a session; `inputs` or the batch are what it is to keep."""
        output = self.backend.capture_one(key, self.forward_fn(key, batch), inputs or batch, self.hook)
        self.batches[key], self.outputs[key] = batch, output

    def forward_fn(self, key: Hashable, batch: Batch) -> Callable[[], Any]:
        """What a runner gives a backend to capture."""
        self._runs = 0

        def run() -> Any:
            self._runs += 1
            self._reach("forward", "warm-up")
            output = self._run(batch, key)
            self._reach(None, "end")
            return output

        return run

    def hook(self) -> None:
        """The hook after each warm-up."""
        self._reach("hook in a capture" if self.adapter.is_capturing() else "hook", "hook")

    def _run(self, batch: Batch, key: Hashable) -> Any:
        with batch_in_use(batch):
            self.prepare(batch, key)
            return self.forward(batch)

    def _reach(self, event: str | None, place: str | None = None) -> None:
        """Notes an event, and goes wrong where that is wanted."""
        if event is not None:
            self.log.append(event)
        place = event if place is None else place
        is_captured_run = self._runs > self.backend.WARMUPS
        if self.fault is None or place != self.fault.place:
            return
        if is_captured_run == (place in ("barrier", "warm-up", "hook")):
            return
        if self.fault.error is None:
            self.model.count.item()
        else:
            raise self.fault.error

    # Steps.

    def draw(self, batch: Batch) -> None:
        """Puts values into a batch's input that it has not had."""
        self._seed += 1
        batch.draw(self._seed)

    def replay(self, key: Hashable) -> Any:
        """A replay as a runner does it: the batch of a step is a new object with the tensors of the static one."""
        batch = copy.copy(self.batches[key])
        with batch_in_use(batch), self.backend.replay_session():
            return self.backend.replay(key, batch)

    def eager(self, key: Hashable) -> Any:
        """What the model gives on a batch, copied to the host; its state is as before afterwards."""
        batch = self.batches[key]
        kept = [(tensor, tensor.clone()) for tensor in (self.model.count, batch.total)]
        with torch.no_grad(), batch_in_use(batch):
            self.model.prepare(batch, key)
            output = on_host(self.model.forward(batch))
        for tensor, before in kept:
            tensor.copy_(before)
        batch.bias.fill_(99)  # what the graph has to prepare again
        return output

    def step(self, key: Hashable, what: str = "a replay") -> None:
        """Replays on new inputs, and compares all that it does with eager: outputs, effects on state, how often."""
        batch = self.batches[key]
        self.draw(batch)
        wanted = self.eager(key)
        count, total = on_host(self.model.count), on_host(batch.total) + self.model.added(batch)
        seen = self.replay(key)
        expect_same(f"the output of {what} of {key!r}, beside eager", on_host(seen), wanted)
        expect_same(f"what `capture_one` returned, after {what} of {key!r}", on_host(self.outputs[key]), wanted)
        expect_equal(f"runs in {what} of {key!r}", int((on_host(self.model.count) - count).item()), 1)
        expect_same(f"a cache after {what} of {key!r}", on_host(batch.total), total)

    def has_breaks(self, key: Hashable) -> bool:
        """Whether a replay runs the Python of attention."""
        before = self.log.count("attention")
        self.replay(key)
        return self.log.count("attention") > before


def watched(adapter: DeviceAdapter, log: list[str], captures: list[CaptureArguments]) -> DeviceAdapter:
    """An adapter of the same class that notes captures and waits."""
    kind: Any = type(adapter)

    class Watched(kind):  # type: ignore[misc]
        def synchronize(self) -> None:
            log.append("synchronize")
            super().synchronize()

        def capture(self, graph: Any, **arguments: Any) -> AbstractContextManager[Any]:
            return noted(super().capture(graph, **arguments), arguments)

        def capture_segments(self, **arguments: Any) -> AbstractContextManager[Any]:
            return noted(super().capture_segments(**arguments), arguments)

    @contextmanager
    def noted(capture: AbstractContextManager[Any], arguments: dict[str, Any]) -> Iterator[Any]:
        captures.append(CaptureArguments(*(arguments[name] for name in CaptureArguments._fields)))
        log.append("begin")
        with capture as given:
            yield given
        log.append("end")

    result: DeviceAdapter = Watched(adapter.device)
    return result


def on_host(output: Any) -> Any:
    """A copy of an output in host memory."""
    return map_tensors(output, lambda tensor: tensor.detach().cpu().clone())
