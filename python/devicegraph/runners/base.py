"""What runners of both phases do alike: capture a list of shapes, and carry a live batch through one of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import torch
from typing_extensions import Self

from devicegraph._core import as_size
from devicegraph.backends import BaseCudaGraphBackend, capture_failed
from devicegraph.batches import read_fields
from devicegraph.config import CudaGraphConfig
from devicegraph.devices import GraphMemoryPool, get_device_adapter
from devicegraph.engine import Hooks
from devicegraph.errors import CaptureError, ConfigError, ReplayError
from devicegraph.metrics import StepMetrics
from devicegraph.outputs import RowAxis, shapes_of
from devicegraph.parallel import Proposal
from devicegraph.registry import CudaGraphBufferRegistry
from devicegraph.report import CaptureReport
from devicegraph.runners.capture import capture_shapes, find_rows
from devicegraph.runners.capture_mode import freeze_gc, model_capture_mode
from devicegraph.runners.captured import CapturedGraph
from devicegraph.runners.decision import EAGER, Decision
from devicegraph.runners.progress import show_progress
from devicegraph.runners.shape_key import ShapeKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from devicegraph.buckets import Buckets
    from devicegraph.devices import CaptureErrorMode
    from devicegraph.engine import ModelRunner
    from devicegraph.runners.progress import CaptureProgress

_ORDERS: Final = ("descending", "ascending")
_ON_ERROR: Final = ("drop", "raise")


class BaseCudaGraphRunner(ABC):
    """Captures the shapes of one phase and runs batches through them, or eagerly, always with a reason.

    A step goes: `pre_replay` hook, choice of the bucket, fill and pad, attention metadata on the padded views, its
    upgrade, replay. One step at a time; runners that share a graph memory pool take turns.

    Args:
        model_runner: the engine; see `ModelRunner`.
        config: the configuration of both phases.
        registry: the static input buffers; by default the usual fields of the phase, for the engine's limits.
        backend: how to capture; by default what the configuration asks for on this device.
        capture_error_mode: see `BaseCudaGraphBackend`.
        order: `descending` captures the largest shape first, so that the smaller ones fit into its memory.
        on_error: `drop` goes on without a graph that ran out of memory, `raise` stops. Anything else that goes wrong in
            a capture is raised in both.
        clone_outputs: return copies that the caller owns, instead of views that are valid until the next replay in the
            same graph memory pool.
        output_axes: where the rows of each tensor of the output are; by default inferred from two sizes.
        graph_pool: the graph memory pool; by default the one that all runners of the device share.
        progress: called with a `CaptureProgress` for each graph; by default a bar on rank 0 of a terminal.

    Raises:
        ConfigError: an argument that is none of its choices (`choice-unknown`) or of another class than it has to be
            (`wrong-type`), an engine that lacks something (`engine-incomplete`), or a registry that does not fit it
            (`registry-device`, `registry-too-small`).
        BackendError: the device or the backend is not available here.
    """

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
        output_axes: Sequence[RowAxis | None] | None = None,
        graph_pool: GraphMemoryPool | None = None,
        progress: Callable[[CaptureProgress], None] | None = None,
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
        self.output_axes = output_axes
        self.progress = show_progress(self.hooks.rank) if progress is None else progress
        self.buckets = self._make_buckets()
        self.buffer_registry = self._make_registry() if registry is None else registry
        self._check_registry()
        for slot in self.buffer_registry.slots:
            if slot.is_host and slot.buffer is not None:
                self.adapter.declare_host(slot.buffer)
        self.backend = self._resolve_backend() if backend is None else backend
        #: The captured graphs by key; `capture()` fills it.
        self.graphs: dict[ShapeKey, CapturedGraph] = {}
        self._eager_steps: dict[str, int] = {}
        self._has_captured = False
        self._state: Literal["open", "paused", "closed"] = "open"

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
    def _padded_sizes(self, size: int) -> tuple[int, int]:
        """Requests and tokens of a bucket."""

    @abstractmethod
    def _live_size(self, bs: int, num_tokens: int) -> int | str:
        """A batch's size in units of the bucket, or the code of the decision that its form forces."""

    def _check_registry(self) -> None:
        registry = self.buffer_registry
        if registry.device != self.adapter.device:
            raise ConfigError(
                f"registry: its buffers are on `{registry.device}`, the engine is on `{self.adapter.device}`",
                code="registry-device",
            )
        bs, num_tokens = self._padded_sizes(self.buckets.maximum)
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
            CaptureError: a forward that cannot be captured, naming the graph and chaining the cause. No graph is left
                then, eager steps work, and `capture()` can be called again.
            ReplayError: the runner is closed.
        """
        self._check_open()
        if self.backend is None:
            reason = self.config[self.phase].reason
            note = "the phase is disabled" if reason is None else f"the phase is disabled: {reason}"
            return CaptureReport(self.phase, "disabled", note=note)
        self._drop_graphs()
        self._has_captured = True
        sizes = sorted(self.buckets, reverse=self.order == "descending")
        if not sizes:
            return CaptureReport(self.phase, self.backend.name, note="no bucket fits the engine's limits")
        self.buffer_registry.reset_index_buffers()
        try:
            with freeze_gc(), model_capture_mode(), torch.no_grad(), self.backend.capture_session():
                keys = [self._make_graph_key(size, label) for label in self.hooks.variants for size in sizes]
                captured, dropped = capture_shapes(self, keys)
        except BaseException:
            self._drop_graphs()
            self._has_captured = False
            raise
        return CaptureReport(self.phase, self.backend.name, captured, dropped)

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
            have = ", ".join(map(str, self.buckets)) if self.backend is not None else "none, the phase is disabled"
            raise CaptureError(
                f"{self.phase}: {size!r} is not one of the buckets: {have}", code="bucket-unknown", phase=self.phase
            )
        key = self._make_graph_key(size, variant_label)
        with freeze_gc(), model_capture_mode(), torch.no_grad():
            output = self.capture_key(key)
            try:
                find_rows(self, variant_label, {size: shapes_of(output)})
            except BaseException:
                self.drop_graph(key)
                raise
        return output

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
        output = backend.capture_one(key, partial(self._forward, batch, key), batch, self.hooks.after_warmup)
        self.graphs[key] = CapturedGraph(key, self.buffer_registry.presence(batch), output)
        return output

    def run_idle(self, size: int, variant_label: str | None = None) -> Any:
        """Runs the forward eagerly on an idle batch of any size; what it returns shows the shapes of an output."""
        batch = self._idle_batch(self._make_graph_key(size, variant_label))
        self._prepare_metadata(batch, None)
        return self._forward(batch, None)

    def drop_graph(self, key: ShapeKey) -> None:
        """Drops one captured graph, if it is there; the next larger one takes its batches, if they may be padded."""
        self.graphs.pop(key, None)
        if self.backend is not None:
            self.backend.discard(key)

    def _idle_batch(self, key: ShapeKey) -> Any:
        padded_bs, padded_tokens = self._padded_sizes(key.size)
        registry = self.buffer_registry
        registry.fill_from({}, raw_bs=0, padded_bs=padded_bs, raw_num_tokens=0, padded_num_tokens=padded_tokens)
        return self.hooks.make_batch(registry.views(padded_bs=padded_bs, padded_num_tokens=padded_tokens), key)

    # A step.

    def can_run(self, forward_batch: Any) -> Decision:
        """Whether the batch would be replayed, and if not why. Does not synchronise.

        Where ranks vote this is the vote, so that every rank has to ask once in a step, and give the answer to
        `replay`.

        Raises:
            ReplayError: the runner is closed or paused.
        """
        self._check_running()
        return self._decide(forward_batch, *self._sizes(forward_batch))

    def run(self, forward_batch: Any) -> Any:
        """One step: a replay where `can_run` says so, else the eager forward; hooks, metadata and counts in both.

        Returns:
            The output with the real rows, as the forward returns it. After a replay its tensors are views into the
            graph memory pool, valid until the next replay there, unless the runner was made with `clone_outputs`.

        Raises:
            ReplayError: the runner is closed or paused.
            SlotError: a field of the batch does not fit its slot; nothing was written.
        """
        self._begin_step(forward_batch)
        bs, num_tokens = self._sizes(forward_batch)
        decision = self._decide(forward_batch, bs, num_tokens)
        if decision.key is not None:
            return self._replay(forward_batch, decision.key, bs, num_tokens)
        self._eager_steps[decision.code] = self._eager_steps.get(decision.code, 0) + 1
        with torch.no_grad():
            self._prepare_metadata(forward_batch, None)
            return self._forward(forward_batch, None)

    def replay(self, forward_batch: Any, decision: Decision | None = None) -> Any:
        """One step through a graph; see `run`.

        Args:
            forward_batch: the live batch.
            decision: what `can_run` said of this batch, so that it is not asked again.

        Raises:
            ReplayError: the batch cannot be replayed, with the decision's code; the runner is closed or paused.
            SlotError: a field of the batch does not fit its slot; nothing was written.
        """
        self._begin_step(forward_batch)
        bs, num_tokens = self._sizes(forward_batch)
        key = self._graph_for(forward_batch, decision, bs, num_tokens)
        return self._replay(forward_batch, key, bs, num_tokens)

    def replay_prepare(self, forward_batch: Any, decision: Decision | None = None) -> Any:
        """Fills the static buffers of the batch's bucket, prepares metadata on them, and returns the static batch.

        The static batch is a copy of `forward_batch` whose slot fields are the padded views. `replay` does this itself;
        it is for runners that launch the graph in a way of their own, and for looking.

        Raises:
            ReplayError: the batch cannot be replayed, with the decision's code; the runner is closed or paused.
            SlotError: a field of the batch does not fit its slot; nothing was written.
        """
        self._check_running()
        bs, num_tokens = self._sizes(forward_batch)
        key = self._graph_for(forward_batch, decision, bs, num_tokens)
        return self._prepare(forward_batch, key, bs, num_tokens)

    def populate_from_forward_batch(
        self,
        forward_batch: Any,
        *,
        raw_bs: int,
        padded_bs: int,
        raw_num_tokens: int,
        padded_num_tokens: int,
        pp_proxy_tensors: Any = None,
    ) -> None:
        """Fills the static buffers; see `CudaGraphBufferRegistry.fill_from`."""
        self.buffer_registry.fill_from(
            forward_batch,
            raw_bs=raw_bs,
            padded_bs=padded_bs,
            raw_num_tokens=raw_num_tokens,
            padded_num_tokens=padded_num_tokens,
            pp_proxy_tensors=pp_proxy_tensors,
        )

    def _sizes(self, forward_batch: Any) -> tuple[int, int]:
        """Requests and tokens of a live batch, as plain integers: they are keys."""
        bs, num_tokens = self.hooks.sizes(forward_batch)
        return as_size("requests of the batch", bs), as_size("tokens of the batch", num_tokens)

    def _make_graph_key(self, size: int, variant_label: str | None = None) -> ShapeKey:
        """The one place where a graph's key is made: for capture, eligibility and replay alike."""
        return ShapeKey(size, None, variant_label)

    def _decide(self, forward_batch: Any, bs: int, num_tokens: int) -> Decision:
        variant = self.hooks.variant(forward_batch) if self.hooks.variant is not None else None
        size = self._live_size(bs, num_tokens)
        if not self.graphs:
            code = "nothing-captured" if self._has_captured else "not-captured"
            decision = EAGER["disabled" if self.backend is None else code]
        elif variant not in self.hooks.variants:
            decision = EAGER["variant-unknown"]
        elif isinstance(size, str):
            decision = EAGER[size]
        else:
            decision = self._decide_for(forward_batch, size, variant)
        if self.hooks.vote is None:
            return decision
        # An idle rank has nothing to run, but can join the graph that the others run.
        can_join = decision.key is not None or decision.code == "idle"
        agreed = self.hooks.vote(Proposal(can_join, size if isinstance(size, int) else 0))
        if can_join and not agreed.graph:
            return EAGER["voted-eager"]
        return self._decide_for(forward_batch, agreed.size, variant, idle=size == 0) if can_join else decision

    def _decide_for(self, forward_batch: Any, size: int, variant: str | None, *, idle: bool = False) -> Decision:
        """The decision for a size, which with several ranks is the largest among them.

        An idle rank's batch has no row that a field could be missing for.
        """
        if size == 0:
            return EAGER["idle"]
        bucket = self.buckets.fit(size)
        if bucket is None:
            return EAGER["above-largest" if size > self.buckets.maximum else "no-exact-bucket"]
        graph = self.graphs.get(self._make_graph_key(bucket, variant)) or self._larger_graph(bucket, variant)
        if graph is None:
            return EAGER["bucket-dropped"]
        present = self.buffer_registry.presence(forward_batch)
        if present != graph.exposed and not idle:
            registry = self.buffer_registry
            if missing := registry.missing_required(present):
                return Decision("field-missing", fields=missing)
            if unexpected := registry.unexpected(present, graph.exposed):
                return Decision("field-unexpected", fields=unexpected)
        if not self.backend.can_run(forward_batch, graph.key):  # type: ignore[union-attr]
            return EAGER["backend-refused"]
        return graph.decision

    def _larger_graph(self, bucket: int, variant: str | None) -> CapturedGraph | None:
        """The graph that takes the batches of a bucket without one."""
        larger = (size for size in self.buckets if size > bucket) if self.config.padding else ()
        graphs = (self.graphs.get(self._make_graph_key(size, variant)) for size in larger)
        return next((graph for graph in graphs if graph is not None), None)

    def _graph_for(self, forward_batch: Any, decision: Decision | None, bs: int, num_tokens: int) -> ShapeKey:
        if decision is None:
            decision = self._decide(forward_batch, bs, num_tokens)
        if decision.key is None or decision.key not in self.graphs:
            raise ReplayError(
                f"{self.phase}: the batch cannot be replayed: {decision.reason}",
                code=decision.code if decision.key is None else "bucket-dropped",
                hint="ask `can_run` first, or call `run`, which falls back to the eager forward",
            )
        return decision.key

    def _prepare(self, forward_batch: Any, key: ShapeKey, bs: int, num_tokens: int) -> Any:
        padded_bs, padded_tokens = self._padded_sizes(key.size)
        self.buffer_registry.fill_from(
            forward_batch,
            raw_bs=bs,
            padded_bs=padded_bs,
            raw_num_tokens=num_tokens,
            padded_num_tokens=padded_tokens,
            pp_proxy_tensors=read_fields(forward_batch, ("pp_proxy_tensors",))[0],
        )
        static_batch = self.buffer_registry.extract_buffer(
            padded_bs=padded_bs, padded_num_tokens=padded_tokens, forward_batch_template=forward_batch
        )
        self._prepare_metadata(static_batch, key)
        return static_batch

    def _replay(self, forward_batch: Any, key: ShapeKey, bs: int, num_tokens: int) -> Any:
        static_batch = self._prepare(forward_batch, key, bs, num_tokens)
        backend, graph = self.backend, self.graphs[key]
        with backend.replay_session():  # type: ignore[union-attr]
            backend.replay(key, static_batch)  # type: ignore[union-attr]
        size = self._live_size(bs, num_tokens)
        graph.replays += 1
        graph.raw_rows += size  # type: ignore[operator]
        return graph.trim(size, clone=self.clone_outputs)  # type: ignore[arg-type]

    def _prepare_metadata(self, batch: Any, key: ShapeKey | None) -> None:
        """Preparing and upgrading belong together: layers that met the raw form of the metadata would fail."""
        if self.hooks.prepare_metadata is not None:
            self.hooks.prepare_metadata(batch, key)
        if self.hooks.upgrade_metadata is not None:
            self.hooks.upgrade_metadata(batch, key)

    def _forward(self, batch: Any, key: ShapeKey | None) -> Any:
        if self.hooks.prepare_in_graph is not None:
            self.hooks.prepare_in_graph(batch, key)
        return self.model_runner.forward(batch)

    # Counts and life cycle.

    def metrics(self) -> StepMetrics:
        """The counts since the last capture, and of eager steps since the runner was made."""
        replays = {graph.key: graph.replays for graph in self.graphs.values() if graph.replays}
        raw_rows = sum(graph.raw_rows for graph in self.graphs.values())
        computed = sum(key.size * count for key, count in replays.items())
        return StepMetrics(replays, dict(self._eager_steps), raw_rows, computed - raw_rows)

    def pause(self) -> None:
        """Waits for the work in flight and refuses steps until `resume()`; graphs and addresses stay.

        Raises:
            ReplayError: the runner is closed.
        """
        self._check_open()
        self.adapter.synchronize()
        self._state = "paused"

    def resume(self) -> None:
        """Takes steps again after `pause()`.

        Raises:
            ReplayError: the runner is closed.
        """
        self._check_open()
        self._state = "open"

    def close(self) -> None:
        """Waits for the device and drops the graphs and what they hold. Calling it twice is fine."""
        if self._state != "closed":
            self._drop_graphs()
            self._state = "closed"

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _drop_graphs(self) -> None:
        self.graphs.clear()
        if self.backend is not None:
            self.backend.cleanup()

    def _begin_step(self, forward_batch: Any) -> None:
        self._check_running()
        if self.hooks.pre_replay is not None:
            self.hooks.pre_replay(forward_batch)

    def _check_open(self) -> None:
        if self._state == "closed":
            raise ReplayError(f"the {self.phase} runner is closed", code="closed", hint="make a new one")

    def _check_running(self) -> None:
        if self._state != "open":
            self._check_open()
            raise ReplayError(f"the {self.phase} runner is paused", code="paused", hint="call `resume()` first")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuses an argument that is none of its choices."""
    if value not in choices:
        raise ConfigError(f"{name}: {value!r} is not one of {', '.join(choices)}", code="choice-unknown")
