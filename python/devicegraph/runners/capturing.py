"""How a runner captures, and what it tells of that: reports, estimates, audits."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from devicegraph.auditing import audit
from devicegraph.backends.base import as_cause, capture_failed
from devicegraph.backends.breaks import batch_in_use
from devicegraph.errors import CaptureError, DeviceGraphError
from devicegraph.outputs import shapes_of
from devicegraph.pool import input_buffer_pool
from devicegraph.report import CapturedBucket, CaptureEstimate, CaptureReport, DroppedCapture, InputBuffer
from devicegraph.runners.capture import capture_shapes, find_rows
from devicegraph.runners.capture_mode import freeze_gc, model_capture_mode
from devicegraph.runners.captured import CapturedGraph
from devicegraph.runners.filling import NOT_FOUND, Filling, choose_filling, no_node
from devicegraph.runners.parts import RunnerParts
from devicegraph.runners.progress import log_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from devicegraph.auditing.findings import AuditReport
    from devicegraph.buckets import DroppedBucket
    from devicegraph.registry import CudaGraphBufferRegistry
    from devicegraph.runners.progress import CaptureProgress
    from devicegraph.runners.shape_key import ShapeKey


class CapturingRunner(RunnerParts):
    """The part of `BaseCudaGraphRunner` that makes graphs; arguments and errors are described there."""

    def capture(self) -> CaptureReport:
        """Captures every shape, anew if it was done before, and returns what that took. Waits for the device.

        Raises:
            CaptureError: a forward that cannot be captured, naming the graph and chaining the cause; `capture-failed`,
                with its cause, for what fails before, between or behind the graphs, be it the device or a hook;
                `verify-failed`, with what was found, where the runner was made with `verify_on_capture`. No graph is
                left then, eager steps work, and `capture()` can be called again. An interrupt passes through as it is,
                and leaves as little.
            ReplayError: the runner is closed, or in the middle of a replay.
        """
        self._check_free()
        if self.backend is None:
            reason = self.config[self.phase].reason
            note = "the phase is disabled" if reason is None else f"the phase is disabled: {reason}"
            return CaptureReport(self.phase, "disabled", note=note)
        filling = self._start_over()
        keys = self._keys()
        if not keys:
            note = "no bucket fits the engine's limits"
            return CaptureReport(self.phase, self.backend.name, left_out=self._left_out(), note=note)
        traced = self.backend.traces
        captured, dropped = self._capture_keys(keys, self.progress, verify=self.verify_on_capture)
        self._traces = self.backend.traces
        if filling.executor == "node" and any(graph.node is None for graph in self.graphs.values()):
            filling = Filling(self.buffer_registry.executor, NOT_FOUND)
        report = CaptureReport(
            self.phase,
            self.backend.name,
            captured,
            dropped,
            left_out=self._left_out(),
            fallback=self.fallback,
            traces=self._traces - traced,
            executor=filling.executor,
            executor_reason=filling.reason,
            estimate=self._estimate,
            inputs=input_buffers(self.buffer_registry),
        )
        log_report(report, self.hooks.rank)
        return report

    def _left_out(self) -> tuple[DroppedBucket, ...]:
        """What the configuration names and `buckets` lacks; of default lists nothing, which fit themselves."""
        phase = self.config[self.phase]
        return () if phase.bs is None and phase.max_bs is None else self.buckets.dropped

    def estimate_capture(self) -> CaptureEstimate:
        """What `capture()` is going to take, for an engine that shares out memory before. Waits for the device.

        Captures the first graph, the second one and the last, measures them and drops them again; the method is that of
        `CaptureEstimate`. The report of `capture()` shows how far off it was. Where ranks vote, each has to call it.

        Raises:
            CaptureError: as in `capture()`; `already-captured`; `estimate-failed` where one of the graphs does not fit
                into memory.
            ReplayError: the runner is closed, or in the middle of a replay.
        """
        self._check_free()
        if self.graphs:
            raise CaptureError(
                f"{self.phase}: there are graphs already, which an estimate would drop",
                code="already-captured",
                hint="call `estimate_capture()` before `capture()`",
                phase=self.phase,
            )
        keys = self._keys() if self.backend is not None else []
        if not keys:
            return CaptureEstimate(0, 0.0, 0, None, ())
        samples = list(dict.fromkeys((*keys[:2], keys[-1])))
        captured, dropped = self._capture_keys(samples, lambda event: None)
        self._has_captured = False
        with self._all_or_nothing():
            self._drop_graphs()
            self.adapter.empty_cache()
        if dropped:
            raise CaptureError(
                f"{self.phase}: {dropped[0].key} was captured for an estimate, and dropped: {dropped[0].reason}",
                code="estimate-failed",
                hint="capture smaller buckets (`max_bs`, `bs`), or leave the graphs more memory",
                phase=self.phase,
                shape_key=dropped[0].key,
            )
        self._estimate = CaptureEstimate.of(captured, [key.size for key in keys])
        return self._estimate

    def _start_over(self) -> Filling:
        """Drops what was captured; how what is captured next is filled."""
        with self._all_or_nothing():
            self._drop_graphs()
            filling = choose_filling(self)
        self._has_captured = True
        return filling

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Drops all graphs where the block fails, and lets an error out as a `CaptureError`, an interrupt as it is."""
        try:
            with self._failing_typed():
                yield
        except BaseException:
            self._has_captured = False
            with suppress(Exception):  # a device that is broken fails again, and the first error says more
                self._drop_graphs()
            raise

    @contextmanager
    def _failing_typed(self) -> Iterator[None]:
        try:
            yield
        except DeviceGraphError:
            raise
        except Exception as error:
            raise capture_failed(self.phase, None, error) from as_cause(error)

    def _keys(self) -> list[ShapeKey]:
        """Every graph to capture, in order."""
        sizes = sorted(self.buckets, reverse=self.order == "descending")
        return [self._make_graph_key(size, label) for label in self.hooks.variants for size in sizes]

    def _capture_keys(
        self, keys: list[ShapeKey], progress: Callable[[CaptureProgress], None], *, verify: bool = False
    ) -> tuple[tuple[CapturedBucket, ...], tuple[DroppedCapture, ...]]:
        backend = self.backend
        assert backend is not None  # who captures has looked
        with self._all_or_nothing():
            backend.fills = choose_filling(self).executor == "node"
            self.buffer_registry.reset_index_buffers()
            with freeze_gc(), model_capture_mode(), torch.no_grad(), backend.capture_session():
                if backend.wants_largest_output:
                    for label in self.hooks.variants:
                        self._size_outputs(max(self.buckets), label)
                done = capture_shapes(self, keys, progress)
            if verify:
                self._verify_capture()
        return done

    def audit(
        self, size: int | None = None, *, variant_label: str | None = None, constants: object = ()
    ) -> AuditReport:
        """Lists what a graph of this runner would refuse or get wrong; see `audit`, and call it before `capture()`.

        The forward runs twice, eagerly, on the idle batch that the graph would be captured with, and what
        `prepare_in_graph` does is part of it. What the backend leaves out of its graphs is left out here. The batch is
        made and its metadata prepared twice: what lies at another address then is lost to a graph.

        Args:
            size: one of `buckets`; the smallest by default.
            variant_label: which of the engine's `variants`.
            constants: tensors, or what holds them, whose addresses stay for as long as graphs live.

        Raises:
            CaptureError: `bucket-unknown` for another size.
            ReplayError: the runner is closed, or in the middle of a replay.
        """
        self._check_free()
        if (size is None and not self.buckets) or (size is not None and size not in self.buckets):
            raise self._unknown_bucket(size)
        key = self._make_graph_key(min(self.buckets) if size is None else size, variant_label)
        # Closed over by themselves, as findings name tensors by what holds them: the engine, and not this runner.
        engine, prepare = self.model_runner, self._prepare_in_graph

        def forward(batch: Any) -> Any:
            with batch_in_use(batch):
                if prepare is not None:
                    prepare(batch, key)
                return engine.forward(batch)

        def prepared() -> Any:
            batch = self._idle_batch(key)
            self._prepare_metadata(batch, key)
            return batch

        with model_capture_mode(), torch.no_grad():
            other_batch, batch = prepared(), prepared()
            return audit(
                forward,
                batch,
                other_batch=other_batch,
                constants=constants,
                registry=self.buffer_registry,
                backend="full" if self.backend is None else self.backend.name,
            )

    def capture_one_shape(self, size: int, *, variant_label: str | None = None) -> Any:
        """Captures one shape inside the backend's `capture_session`, and returns its output.

        The graph sees an idle batch: every row is padding, and every index points at the reserved row 0. Ranks do not
        vote on it: each of them has to do the same.

        Args:
            size: one of `buckets`.
            variant_label: which of the engine's `variants`.

        Raises:
            CaptureError: `bucket-unknown` for another size; a forward, or a preparation of metadata, that failed, or an
                output whose rows cannot be told: there is no graph for the shape then.
            ReplayError: the runner is closed, or in the middle of a replay.
        """
        self._check_free()
        if self.backend is None or size not in self.buckets:
            raise self._unknown_bucket(size)
        key = self._make_graph_key(size, variant_label)
        with freeze_gc(), model_capture_mode(), torch.no_grad():
            try:
                with self._failing_typed():
                    output = self.capture_key(key)
                    find_rows(self, variant_label, {size: shapes_of(output)})
            except BaseException:
                self.drop_graph(key)
                raise
        return output

    def _unknown_bucket(self, size: object) -> CaptureError:
        have = ", ".join(map(str, self.buckets)) or "none, for none fits the engine's limits"
        if self.backend is None:
            have = "none, the phase is disabled"
        message = f"{self.phase}: {size!r} is not one of the buckets: {have}"
        return CaptureError(message, code="bucket-unknown", phase=self.phase)

    def capture_key(self, key: ShapeKey) -> Any:
        """Captures the graph of a key; the rows of its output are still to be found."""
        self._check_open()
        backend = self.backend
        assert backend is not None  # who captures has looked
        try:
            batch = self._idle_batch(key)
            self._prepare_metadata(batch, key)
        except Exception as error:
            raise capture_failed(self.phase, key, error) from as_cause(error)
        # Its segments run, and write where outputs of the pool are.
        backend.graph_pool.overwrite()
        forward = partial(self._fill_and_run if backend.fills else self._run_forward, batch, key)
        output = backend.capture_one(key, forward, batch, self.hooks.after_warmup)
        node = backend.fill_node(key)
        if node is None and backend.fills and self.buffer_registry.wanted_executor == "node":
            raise no_node(NOT_FOUND)
        exposed = self.buffer_registry.presence(batch)
        self._check_open()  # a hook may have closed the runner
        self._routes.clear()
        self.graphs[key] = CapturedGraph(
            key, exposed, output, backend.graph_pool, launch=backend.launcher(key), node=node
        )
        return output

    def _fill_and_run(self, batch: Any, key: ShapeKey) -> Any:
        """What a graph holds that begins with its fill, which has nothing to do until a step points it at sources."""
        self.adapter.record_fill()
        return self._run_forward(batch, key)

    def _size_outputs(self, size: int, variant_label: str | None) -> None:
        """Tells the backend how large an output can be, where that can be told.

        A run that fails here fails in the capture of its bucket, too, which names it, drops it if it ran out of memory,
        and asks the other ranks.
        """
        assert self.backend is not None  # who captures has looked
        with suppress(Exception):
            self.backend.size_outputs(self.run_idle(size, variant_label))

    def drop_graph(self, key: ShapeKey) -> None:
        """Drops one captured graph, if it is there; the next larger one takes its batches, if they may be padded.

        Raises:
            ReplayError: `step-in-progress`: it is called by a hook or a break of a replay.
        """
        if self._in_step:
            self._check_free()
        graph = self.graphs.pop(key, None)
        if graph is not None:
            graph.drop()
        self._routes.clear()
        if self.backend is not None:
            self.backend.discard(key)

    @abstractmethod
    def _verify_capture(self) -> None:
        """Proves the graphs that were captured."""

    def _drop_graphs(self) -> None:
        for graph in self.graphs.values():
            graph.drop()
        self.graphs.clear()
        self._routes.clear()
        if self.backend is not None:
            self.backend.cleanup()


def input_buffers(registry: CudaGraphBufferRegistry) -> tuple[InputBuffer, ...]:
    """The buffers of a registry, and who else uses the memory of each."""
    found = []
    for slot in registry.slots:
        if slot.buffer is not None:
            users = list(input_buffer_pool.users(slot.buffer))
            if registry.label in users:
                users.remove(registry.label)
            found.append(InputBuffer(slot.name, slot.buffer.numel() * slot.buffer.itemsize, tuple(users)))
    return tuple(found)
