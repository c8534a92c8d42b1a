"""What a runner is made of, and how it captures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import torch

from devicegraph.auditing import audit
from devicegraph.backends.base import BaseCudaGraphBackend, capture_failed
from devicegraph.backends.breaks import batch_in_use
from devicegraph.borrowed import outputs_are_debugged
from devicegraph.config import CudaGraphConfig
from devicegraph.devices import GraphMemoryPool, get_device_adapter
from devicegraph.engine import Hooks, StaticBatch
from devicegraph.errors import CaptureError, ConfigError, ReplayError
from devicegraph.metrics import EagerSteps
from devicegraph.outputs import RowAxis, shapes_of
from devicegraph.pool import input_buffer_pool
from devicegraph.registry import CudaGraphBufferRegistry
from devicegraph.report import CapturedBucket, CaptureEstimate, CaptureReport, DroppedCapture, InputBuffer
from devicegraph.runners.capture import capture_shapes, find_rows
from devicegraph.runners.capture_mode import freeze_gc, model_capture_mode
from devicegraph.runners.captured import CapturedGraph
from devicegraph.runners.filling import choose_filling, no_node
from devicegraph.runners.progress import log_report, show_progress
from devicegraph.runners.ranges import mark_steps
from devicegraph.runners.shape_key import ShapeKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from devicegraph.auditing.findings import AuditReport
    from devicegraph.buckets import Buckets
    from devicegraph.devices import CaptureErrorMode
    from devicegraph.engine import ModelRunner
    from devicegraph.runners.progress import CaptureProgress

_ORDERS: Final = ("descending", "ascending")
_ON_ERROR: Final = ("drop", "raise")


class CapturingRunner(ABC):
    """The part of `BaseCudaGraphRunner` that makes graphs; arguments and errors are described there."""

    #: The phase, as in the configuration.
    phase: ClassVar[Literal["decode", "prefill"]]

    def __init__(
        self,
        model_runner: ModelRunner,
        *,
        config: CudaGraphConfig,
        registry: CudaGraphBufferRegistry | None = None,
        backend: BaseCudaGraphBackend | None = None,
        capture_error_mode: CaptureErrorMode = "thread_local",
        order: Literal["descending", "ascending"] = "descending",
        on_error: Literal["drop", "raise"] = "drop",
        clone_outputs: bool = False,
        debug_outputs: bool | None = None,
        verify_on_capture: bool = False,
        output_axes: Sequence[RowAxis | None] | None = None,
        graph_pool: GraphMemoryPool | None = None,
        progress: Callable[[CaptureProgress], None] | None = None,
        nvtx: bool = False,
    ) -> None:
        check_choice("order", order, _ORDERS)
        check_choice("on_error", on_error, _ON_ERROR)
        for name, value, kind in (
            ("config", config, CudaGraphConfig),
            ("registry", registry, CudaGraphBufferRegistry),
            ("backend", backend, BaseCudaGraphBackend),
            ("graph_pool", graph_pool, GraphMemoryPool),
            *(("output_axes", axis, RowAxis) for axis in output_axes or ()),
        ):
            if not isinstance(value, kind) and (value is not None or name == "config"):
                raise ConfigError(f"{name}: {value!r} is no `{kind.__name__}`", code="wrong-type")
        self.model_runner = model_runner
        self.config = config
        self.hooks = Hooks(model_runner)
        self.adapter = get_device_adapter(model_runner.device)
        self.graph_pool = graph_pool
        self.capture_error_mode: CaptureErrorMode = capture_error_mode
        self.order = order
        self.on_error = on_error
        self.clone_outputs = clone_outputs
        self.debug_outputs = outputs_are_debugged() if debug_outputs is None else debug_outputs
        self.verify_on_capture = verify_on_capture
        self.output_axes = output_axes
        self.progress = show_progress(self.hooks.rank) if progress is None else progress
        self.buckets = self._make_buckets()
        self.buffer_registry = self._make_registry() if registry is None else registry
        self._check_registry()
        for slot in self.buffer_registry.slots:
            if slot.is_host and slot.buffer is not None:
                self.adapter.declare_host(slot.buffer)
        #: Why the backend is another one than the configuration names, or None.
        self.fallback: str | None = None
        self.backend = self._resolve_backend() if backend is None else backend
        # What a graph holds; eager steps call the engine itself.
        self._forward: Callable[[Any], Any] = model_runner.forward
        self._prepare_in_graph = self.hooks.prepare_in_graph
        if self.backend is not None:
            self._forward = self.backend.wrap_forward(model_runner.forward)
            if self._prepare_in_graph is not None:
                self._prepare_in_graph = self.backend.wrap_prepare(self._prepare_in_graph)
        #: The captured graphs by key; `capture()` fills it.
        self.graphs: dict[ShapeKey, CapturedGraph] = {}
        #: Which of them takes a size and a variant, as found before; emptied with every change of `graphs`.
        self._routes: dict[tuple[int, str | None], CapturedGraph] = {}
        self._row_axes: dict[str, int] | None = None
        self._traces = 0
        #: Whether the engine prepares metadata on the static batch of a step.
        self._prepares = self.hooks.prepare_metadata is not None or self.hooks.upgrade_metadata is not None
        self._estimate: CaptureEstimate | None = None
        #: The static batch of the replay that runs now.
        self._replaying: Any = None
        self._eager_steps = EagerSteps()
        self._has_captured = False
        self._state: Literal["open", "paused", "closed"] = "open"
        if nvtx:
            mark_steps(self)

    # What a phase says of itself.

    @abstractmethod
    def _make_buckets(self) -> Buckets:
        """The sizes to capture."""

    @abstractmethod
    def _make_registry(self) -> CudaGraphBufferRegistry:
        """The usual slots of the phase, for the engine's limits."""

    @abstractmethod
    def _resolve_backend(self) -> BaseCudaGraphBackend | None:
        """The backend that the configuration asks for."""

    @abstractmethod
    def _padded_sizes(self, size: int, bs: int) -> tuple[int, int]:
        """Requests and tokens of a bucket for a batch of so many requests."""

    @abstractmethod
    def _idle_requests(self, size: int) -> int:
        """Requests of the idle batch that a bucket is captured with."""

    def _check_registry(self) -> None:
        registry = self.buffer_registry
        if registry.device != self.adapter.device:
            raise ConfigError(
                f"registry: its buffers are on `{registry.device}`, the engine is on `{self.adapter.device}`",
                code="registry-device",
            )
        bs, num_tokens = self._padded_sizes(self.buckets.maximum, self._idle_requests(self.buckets.maximum))
        if bs > registry.max_bs or num_tokens > registry.max_num_tokens:
            raise ConfigError(
                f"registry: it holds {registry.max_bs} requests and {registry.max_num_tokens} tokens, "
                f"the largest bucket has {bs} and {num_tokens}",
                code="registry-too-small",
                hint="build the registry for the engine's limits, or capture smaller buckets",
            )

    # Capture.

    def capture(self) -> CaptureReport:
        """Captures every shape, anew if it was done before, and returns what that took. Waits for the device.

        Raises:
            CaptureError: a forward that cannot be captured, naming the graph and chaining the cause; `verify-failed`,
                with what was found, where the runner was made with `verify_on_capture`. No graph is left then, eager
                steps work, and `capture()` can be called again.
            ReplayError: the runner is closed.
        """
        self._check_open()
        if self.backend is None:
            reason = self.config[self.phase].reason
            note = "the phase is disabled" if reason is None else f"the phase is disabled: {reason}"
            return CaptureReport(self.phase, "disabled", note=note)
        self._drop_graphs()
        self._has_captured = True
        keys = self._keys()
        if not keys:
            return CaptureReport(self.phase, self.backend.name, note="no bucket fits the engine's limits")
        filling = choose_filling(self)
        traced = self.backend.traces
        captured, dropped = self._capture_keys(keys, self.progress, verify=self.verify_on_capture)
        self._traces = self.backend.traces
        report = CaptureReport(
            self.phase,
            self.backend.name,
            captured,
            dropped,
            fallback=self.fallback,
            traces=self._traces - traced,
            executor=filling.executor,
            executor_reason=filling.reason,
            estimate=self._estimate,
            inputs=input_buffers(self.buffer_registry),
        )
        log_report(report, self.hooks.rank)
        return report

    def estimate_capture(self) -> CaptureEstimate:
        """What `capture()` is going to take, for an engine that shares out memory before. Waits for the device.

        Captures the first graph, the second one and the last, measures them and drops them again; the method is that of
        `CaptureEstimate`. The report of `capture()` shows how far off it was. Where ranks vote, each has to call it.

        Raises:
            CaptureError: as in `capture()`; `already-captured`; `estimate-failed` where one of the graphs does not fit
                into memory.
            ReplayError: the runner is closed.
        """
        self._check_open()
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
        self._drop_graphs()
        self._has_captured = False
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

    def _keys(self) -> list[ShapeKey]:
        """Every graph to capture, in order."""
        sizes = sorted(self.buckets, reverse=self.order == "descending")
        return [self._make_graph_key(size, label) for label in self.hooks.variants for size in sizes]

    def _capture_keys(
        self, keys: list[ShapeKey], progress: Callable[[CaptureProgress], None], *, verify: bool = False
    ) -> tuple[tuple[CapturedBucket, ...], tuple[DroppedCapture, ...]]:
        backend = self.backend
        assert backend is not None  # who captures has looked
        backend.fills = choose_filling(self).executor == "node"
        self.buffer_registry.reset_index_buffers()
        try:
            with freeze_gc(), model_capture_mode(), torch.no_grad(), backend.capture_session():
                if backend.wants_largest_output:
                    for label in self.hooks.variants:
                        self._size_outputs(max(self.buckets), label)
                done = capture_shapes(self, keys, progress)
            if verify:
                self._verify_capture()
            return done
        except BaseException:
            self._drop_graphs()
            self._has_captured = False
            raise

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
            ReplayError: the runner is closed.
        """
        self._check_open()
        if (size is None and not self.buckets) or (size is not None and size not in self.buckets):
            raise self._unknown_bucket(size)
        key = self._make_graph_key(min(self.buckets) if size is None else size, variant_label)
        engine, prepare = self.model_runner, self.hooks.prepare_in_graph

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
            ReplayError: the runner is closed.
        """
        if self.backend is None or size not in self.buckets:
            raise self._unknown_bucket(size)
        key = self._make_graph_key(size, variant_label)
        with freeze_gc(), model_capture_mode(), torch.no_grad():
            try:
                output = self.capture_key(key)
                find_rows(self, variant_label, {size: shapes_of(output)})
            except BaseException:
                self.drop_graph(key)
                raise
        return output

    def _unknown_bucket(self, size: object) -> CaptureError:
        have = ", ".join(map(str, self.buckets)) if self.backend is not None else "none, the phase is disabled"
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
            raise capture_failed(self.phase, key, error) from error
        # Its segments run, and write where outputs of the pool are.
        backend.graph_pool.overwrite()
        forward = partial(self._fill_and_run if backend.fills else self._run_forward, batch, key)
        output = backend.capture_one(key, forward, batch, self.hooks.after_warmup)
        node = backend.fill_node(key)
        if node is None and backend.fills and self.buffer_registry.wanted_executor == "node":
            raise no_node("the fill cannot be told apart in the captured graph")
        exposed = self.buffer_registry.presence(batch)
        self._routes.clear()
        self.graphs[key] = CapturedGraph(
            key, exposed, output, backend.graph_pool, launch=backend.launcher(key), node=node
        )
        return output

    def _fill_and_run(self, batch: Any, key: ShapeKey) -> Any:
        """What a graph holds that begins with its fill, which has nothing to do until a step points it at sources."""
        self.adapter.record_fill()
        return self._run_forward(batch, key)

    def run_idle(self, size: int, variant_label: str | None = None) -> Any:
        """Runs the forward eagerly on an idle batch of any size; what it returns shows the shapes of an output."""
        batch = self._idle_batch(self._make_graph_key(size, variant_label))
        self._prepare_metadata(batch, None)
        return self._run_forward(batch, None)

    def _size_outputs(self, size: int, variant_label: str | None) -> None:
        """Tells the backend how large an output can be, where that can be told.

        A run that fails here fails in the capture of its bucket, too, which names it, drops it if it ran out of memory,
        and asks the other ranks.
        """
        assert self.backend is not None  # who captures has looked
        with suppress(Exception):
            self.backend.size_outputs(self.run_idle(size, variant_label))

    def drop_graph(self, key: ShapeKey) -> None:
        """Drops one captured graph, if it is there; the next larger one takes its batches, if they may be padded."""
        graph = self.graphs.pop(key, None)
        if graph is not None:
            graph.drop()
        self._routes.clear()
        if self.backend is not None:
            self.backend.discard(key)

    def _find_row_axes(self, smallest: int, largest: int) -> dict[str, int]:
        """Along which axis each slot's view grows with the bucket; slots that do not grow are left out."""
        small, large = (
            self.buffer_registry.views(padded_bs=bs, padded_num_tokens=tokens)
            for bs, tokens in (self._padded_sizes(size, self._idle_requests(size)) for size in (smallest, largest))
        )
        differing = {
            name: [axis for axis, rows in enumerate(view.shape) if rows != small[name].shape[axis]]
            for name, view in large.items()
        }
        return {name: axes[0] for name, axes in differing.items() if axes}

    def _idle_batch(self, key: ShapeKey) -> Any:
        requests = self._idle_requests(key.size)
        padded_bs, padded_tokens = self._padded_sizes(key.size, requests)
        registry = self.buffer_registry
        registry.fill_from({}, raw_bs=0, padded_bs=padded_bs, raw_num_tokens=0, padded_num_tokens=padded_tokens)
        views = registry.views(padded_bs=padded_bs, padded_num_tokens=padded_tokens)
        if self.backend is not None:
            if self._row_axes is None:
                self._row_axes = self._find_row_axes(min(self.buckets), max(self.buckets))
            for name, axis in self._row_axes.items():
                self.backend.mark_rows(views[name], axis)
        if self.hooks.make_batch is not None:
            return self.hooks.make_batch(views, key)
        return StaticBatch(**views, batch_size=requests)

    # What a graph holds, and what comes before it.

    def _make_graph_key(self, size: int, variant_label: str | None = None) -> ShapeKey:
        """The one place where a graph's key is made: for capture, eligibility and replay alike."""
        return ShapeKey(size, None, variant_label)

    def _prepare_metadata(self, batch: Any, key: ShapeKey | None) -> None:
        """Preparing and upgrading belong together: layers that met the raw form of the metadata would fail."""
        hooks = (self.hooks.prepare_metadata, self.hooks.upgrade_metadata)
        if any(hooks):
            # Else buffers that are computed from parameters would keep the history of every step.
            with torch.no_grad():
                for hook in hooks:
                    if hook is not None:
                        hook(batch, key)

    def _run_forward(self, batch: Any, key: ShapeKey | None) -> Any:
        """What a graph holds, and without a key what an eager step runs."""
        if key is not None and self._replaying is not None:
            # A backend that replays by calling, as `breakable` does to debug: the step's batch, not the capture's.
            batch = self._replaying
        prepare = self.hooks.prepare_in_graph if key is None else self._prepare_in_graph
        forward = self.model_runner.forward if key is None else self._forward
        with batch_in_use(batch):
            if prepare is not None:
                prepare(batch, key)
            return forward(batch)

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

    def _check_open(self) -> None:
        if self._state == "closed":
            raise ReplayError(f"the {self.phase} runner is closed", code="closed", hint="make a new one")


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


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuses an argument that is none of its choices."""
    if value not in choices:
        raise ConfigError(f"{name}: {value!r} is not one of {', '.join(choices)}", code="choice-unknown")
