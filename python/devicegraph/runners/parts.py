"""What a runner is made of, and what its graphs hold."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import torch

from devicegraph.backends.base import BaseCudaGraphBackend
from devicegraph.backends.breaks import batch_in_use
from devicegraph.borrowed import outputs_are_debugged
from devicegraph.config import CudaGraphConfig
from devicegraph.devices import GraphMemoryPool, get_device_adapter
from devicegraph.engine import Hooks, StaticBatch
from devicegraph.errors import ConfigError, ReplayError
from devicegraph.forking import made_before_fork, watch_forks
from devicegraph.metrics import EagerSteps
from devicegraph.outputs import RowAxis, arrived
from devicegraph.registry import CudaGraphBufferRegistry
from devicegraph.runners.profiling import profile_captures
from devicegraph.runners.progress import show_progress
from devicegraph.runners.ranges import mark_steps, nvtx_ranges
from devicegraph.runners.shape_key import ShapeKey
from devicegraph.slots import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from devicegraph.buckets import Buckets
    from devicegraph.devices import CaptureErrorMode
    from devicegraph.engine import ModelRunner
    from devicegraph.report import CaptureEstimate
    from devicegraph.runners.captured import CapturedGraph
    from devicegraph.runners.progress import CaptureProgress

_ORDERS: Final = ("descending", "ascending")
_ON_ERROR: Final = ("drop", "raise")


class RunnerParts(ABC):
    """The part of `BaseCudaGraphRunner` that others build on; arguments and errors are described there."""

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
        profile: str | PathLike[str] | None = None,
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
                raise ConfigError(f"{name}: {shown(value)} is no `{kind.__name__}`", code="wrong-type")
        if config[self.phase].backend == "disabled":
            backend = None
        if backend is not None and getattr(backend.owner(), "_state", "closed") != "closed":
            raise ConfigError(
                "backend: it has the graphs of another runner, whose keys are the same",
                code="backend-in-use",
                hint="make one for each runner, or close the other one first",
            )
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
        #: What requests and tokens of every bucket are multiples of.
        self.alignment = self._find_alignment((1, 1) if registry is None else registry.alignment)
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
        #: What looks at a batch of so many requests for a reason against a graph: the decision's code; None where
        #: nothing has to.
        self._why_eager: Callable[[Any, int], str | None] | None = None
        self._row_axes: dict[str, int] | None = None
        self._traces = 0
        #: Whether the engine prepares metadata on the static batch of a step.
        self._prepares = self.hooks.prepare_metadata is not None or self.hooks.upgrade_metadata is not None
        self._estimate: CaptureEstimate | None = None
        #: The static batch of the replay that runs now.
        self._replaying: Any = None
        #: Whether the static buffers are those of a replay that has not been launched yet, or runs Python in between.
        self._in_step = False
        self._eager_steps = EagerSteps()
        self._has_captured = False
        self._state: Literal["open", "paused", "closed", "forked"] = "open"
        watch_forks(self)
        if backend is not None:
            backend.owner = weakref.ref(self)
        if nvtx:
            mark_steps(self, nvtx_ranges(self))
        if profile is not None:
            profile_captures(self, profile)  # type: ignore[arg-type]  # it is one, by now

    @property
    def purpose(self) -> str:
        """What the graphs are for: the phase, or the mode of a runner that has modes."""
        return getattr(self, "mode", self.phase)

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

    def _find_alignment(self, slots: tuple[int, int]) -> tuple[int, int]:
        """What requests and tokens of every bucket are multiples of, from what the slots need."""
        return slots

    @property
    @abstractmethod
    def bucket_unit(self) -> int:
        """What every bucket is a multiple of."""

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
            return forward(batch) if key is None else arrived(forward(batch))

    def run_idle(self, size: int, variant_label: str | None = None) -> Any:
        """Runs the forward eagerly on an idle batch of any size; what it returns shows the shapes of an output.

        With a key, as all batches that the engine has not made itself: without one it may look for what its own have.
        """
        key = self._make_graph_key(size, variant_label)
        batch = self._idle_batch(key)
        self._prepare_metadata(batch, key)
        with batch_in_use(batch):
            if self._prepare_in_graph is not None:
                self._prepare_in_graph(batch, key)
            return self.model_runner.forward(batch)

    def share_rows(self, size: int) -> int | None:
        """The rows of this rank's share of the tokens of a bucket; None where every rank has all of them."""
        ranks = self.buffer_registry.token_alignment
        tokens = self._padded_sizes(size, self._idle_requests(size))[1]
        return tokens // ranks if ranks > 1 else None

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
        batch = StaticBatch(**views, batch_size=requests)
        if registry.has_proxies:
            batch.pp_proxy_tensors = registry.group(
                "pp_proxy_tensors", padded_bs=padded_bs, padded_num_tokens=padded_tokens
            )
        return batch

    def leave_to_parent(self) -> None:
        """See `forking`: in a child, whatever is asked of the runner is a `ReplayError` (`forked`)."""
        if self._state != "closed":
            self._state = "forked"

    def _check_open(self) -> None:
        if self._state == "forked":
            raise made_before_fork(f"the {self.phase} runner")
        if self._state == "closed":
            raise ReplayError(f"the {self.phase} runner is closed", code="closed", hint="make a new one")

    def _check_free(self) -> None:
        """Open, and nobody's buffers and graph are in use."""
        self._check_open()
        if self._in_step:
            raise ReplayError(
                f"the {self.phase} runner is in the middle of a replay, whose buffers and graph would be changed",
                code="step-in-progress",
                hint="its hooks and breaks cannot replay, capture, drop or close: do that before or after the step",
            )


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuses an argument that is none of its choices."""
    if value not in choices:
        raise ConfigError(f"{name}: {value!r} is not one of {', '.join(choices)}", code="choice-unknown")
