"""What runners of both phases do alike in a step: decide, fill, prepare, replay; or run eagerly."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Self

from devicegraph._core import as_size
from devicegraph.backends.breaks import batch_in_use
from devicegraph.batches import read_fields, showing_proxies, unchanged_on_failure
from devicegraph.borrowed import Loan, lent
from devicegraph.errors import CaptureError, ReplayError
from devicegraph.metrics import StepMetrics
from devicegraph.outputs import map_tensors
from devicegraph.parallel import Proposal
from devicegraph.runners.capture import ask_ranks
from devicegraph.runners.capturing import CapturingRunner
from devicegraph.runners.decision import EAGER, Decision
from devicegraph.slots import shown
from devicegraph.verifying import verify_capture

if TYPE_CHECKING:
    from collections.abc import Callable

    from devicegraph._core import FillNode
    from devicegraph.runners.captured import CapturedGraph
    from devicegraph.runners.shape_key import ShapeKey


class BaseCudaGraphRunner(CapturingRunner):
    """Captures the shapes of one phase and runs batches through them, or eagerly, always with a reason.

    A step goes: `pre_replay` hook, choice of the bucket, fill and pad, attention metadata on the padded views, its
    upgrade, replay. One step at a time; runners that share a graph memory pool take turns.

    Args:
        model_runner: the engine; see `ModelRunner`.
        config: the configuration of both phases.
        registry: the static input buffers; by default the usual fields of the phase, for the engine's limits.
        backend: how to capture; by default what the configuration asks for on this device. It serves one runner, and
            none of a phase that the configuration disables.
        capture_error_mode: see `BaseCudaGraphBackend`.
        order: `descending` captures the largest shape first, so that the smaller ones fit into its memory.
        on_error: `drop` goes on without a graph that ran out of memory or of the device's streams, `raise` stops.
            Anything else that goes wrong in a capture is raised in both.
        clone_outputs: return copies that the caller owns, instead of views that are valid until the next replay in the
            same graph memory pool.
        debug_outputs: return views that refuse to be read (`stale-output`) once a later replay in the same graph memory
            pool, whichever runner's, or a capture there has overwritten them, or their graph was dropped; by default
            where the environment has `DEVICEGRAPH_DEBUG=1`. Every operation on an output is slower.
        verify_on_capture: let `capture()` prove each graph before it returns, see `verify`: on the engine's
            `verify_batches()`, or else on idle batches, which show less.
        output_axes: where the rows of each tensor of the output are; by default inferred from two sizes.
        graph_pool: the graph memory pool; by default the one that all runners of the device share.
        progress: called with a `CaptureProgress` for each graph; by default, on rank 0, a bar in a terminal and log
            records elsewhere. `json_progress()` writes lines for programs.
        nvtx: mark the fill, the preparation and the replay of each step as NVTX ranges, named by phase and graph, for a
            profiler. Costs nothing where it is off.
        profile: a folder: each `capture()` runs under torch's profiler and leaves there what it did, as a trace and as
            a table of operators, named by mode (or phase) and rank, `decode-rank0.json` and `.txt`, and numbered from
            the second on. Graphs of a capture, and parts of steps, are ranges of that profiler, named as for `nvtx`.
            Not for serving: a profiled capture is slow and takes memory.

    Raises:
        ConfigError: an argument that is none of its choices (`choice-unknown`) or of another class than it has to be
            (`wrong-type`), a backend that another runner uses (`backend-in-use`), an engine that lacks something
            (`engine-incomplete`), or a registry that does not fit it (`registry-device`, `registry-too-small`).
        BackendError: the device or the backend is not available here; `nvtx-not-available` where the device has no such
            ranges.
    """

    # What a phase says of itself, beside how it captures.

    @abstractmethod
    def _live_size(self, bs: int, num_tokens: int) -> int | str:
        """A batch's size in units of the bucket, or the code of the decision that its form forces."""

    def _wastes_too_much(self, size: int, bucket: int) -> bool:
        """Whether padding a size to its bucket costs more than running it eagerly."""
        return False

    # A step.

    def can_run(self, forward_batch: Any) -> Decision:
        """Whether the batch would be replayed, and if not why. Does not synchronise.

        Where ranks vote on steps this is the vote, so that every rank has to ask once in a step, and give the answer to
        `replay`.

        Raises:
            ReplayError: the runner is closed or paused.
            SlotError: `wrong-shape`: encoded lengths on the host that are not those of the batch's requests.
        """
        self._check_running()
        return self._decide(forward_batch, *self._sizes(forward_batch))

    def run(self, forward_batch: Any) -> Any:
        """One step: a replay where `can_run` says so, else the eager forward; hooks, metadata and counts in both.

        What a hook, a break or the forward raises passes through. The batch has the fields then that it was given with,
        the step is not counted, and it can be run again; the static buffers may hold it, and the next step fills them
        anew.

        Returns:
            The output with the real rows, as the forward returns it. After a replay its tensors are views into the
            graph memory pool, valid until the next replay there, unless the runner was made with `clone_outputs`.

        Raises:
            ReplayError: the runner is closed or paused, or a hook or a break of its own replay calls for another one.
            SlotError: a field of the batch does not fit its slot; nothing was written.
        """
        self._check_running()
        return self._run(forward_batch) if self.hooks.pre_replay is None else self._begun(self._run, forward_batch)

    def _run(self, forward_batch: Any) -> Any:
        bs, num_tokens = self._sizes(forward_batch)
        decision = self._decide(forward_batch, bs, num_tokens)
        if decision.key is not None:
            return self._replay(forward_batch, decision.key, bs, num_tokens)
        with torch.no_grad(), unchanged_on_failure(forward_batch):
            self._prepare_metadata(forward_batch, None)
            output = self._run_forward(forward_batch, None)
        self._eager_steps.count(decision.code, self._live_size(bs, num_tokens))
        return output

    def replay(self, forward_batch: Any, decision: Decision | None = None) -> Any:
        """One step through a graph; see `run`.

        Args:
            forward_batch: the live batch.
            decision: what `can_run` said of this batch, so that it is not asked again.

        Raises:
            ReplayError: the batch cannot be replayed, with the decision's code; the runner is closed or paused.
            SlotError: a field of the batch does not fit its slot; nothing was written.
        """
        self._check_running()
        if self.hooks.pre_replay is None:
            return self._replay_as(forward_batch, decision)
        return self._begun(self._replay_as, forward_batch, decision)

    def _replay_as(self, forward_batch: Any, decision: Decision | None) -> Any:
        bs, num_tokens = self._sizes(forward_batch)
        key = self._graph_for(forward_batch, decision, bs, num_tokens)
        return self._replay(forward_batch, key, bs, num_tokens)

    def replay_prepare(self, forward_batch: Any, decision: Decision | None = None) -> Any:
        """Fills the static buffers of the batch's bucket, prepares metadata on them, and returns the static batch.

        The static batch is a copy of `forward_batch` whose slot fields are the padded views. `replay` does this itself;
        it is for runners that launch the graph in a way of their own, and for looking. What a hook raises passes
        through: the static buffers hold the batch then, and its metadata in part; the next step writes both anew.

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
        sizes = self.hooks.sizes(forward_batch)
        try:
            bs, num_tokens = sizes
        except (TypeError, ValueError) as error:
            raise ReplayError(
                f"the engine's `sizes` gave `{shown(sizes)}`, no pair of numbers",
                code="sizes-unknown",
                hint="return the requests and the tokens of the batch",
            ) from error
        if type(bs) is int is type(num_tokens) and bs >= 0 <= num_tokens:
            return bs, num_tokens
        return as_size("requests of the batch", bs), as_size("tokens of the batch", num_tokens)

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
        elif size and self._why_eager is not None and (refusal := self._why_eager(forward_batch, bs)) is not None:
            decision = EAGER[refusal]
        else:
            decision = self._decide_for(forward_batch, size, variant)
        if self.hooks.vote is None or not self.hooks.votes_each_step:
            return decision
        # An idle rank has nothing to run, but can join the graph that the others run.
        can_join = decision.key is not None or decision.code == "idle"
        agreed = self.hooks.vote(Proposal(can_join, size if isinstance(size, int) else 0, phase=self.purpose))
        if can_join and not agreed.graph:
            return EAGER["voted-eager"]
        return self._decide_for(forward_batch, agreed.size, variant, idle=size == 0) if can_join else decision

    def _decide_for(self, forward_batch: Any, size: int, variant: str | None, *, idle: bool = False) -> Decision:
        """The decision for a size, which with several ranks is the largest among them.

        An idle rank's batch has no row that a field could be missing for.
        """
        graph = self._routes.get((size, variant)) or self._route(size, variant)
        if isinstance(graph, Decision):
            return graph
        present = self.buffer_registry.presence(forward_batch)
        if present != graph.exposed and not idle:
            registry = self.buffer_registry
            if missing := registry.missing_required(present, graph.exposed):
                return Decision("field-missing", fields=missing)
            if unexpected := registry.unexpected(present, graph.exposed):
                return Decision("field-unexpected", fields=unexpected)
        if graph.launch is None and not self.backend.can_run(forward_batch, graph.key):  # type: ignore[union-attr]
            return EAGER["backend-refused"]
        return graph.decision

    def _route(self, size: int, variant: str | None) -> CapturedGraph | Decision:
        """The graph that takes a size, or the decision of a size that none takes."""
        if size == 0:
            return EAGER["idle"]
        bucket = self.buckets.fit(size)
        if bucket is None:
            return EAGER["above-largest" if size > self.buckets.maximum else "no-exact-bucket"]
        graph = self.graphs.get(self._make_graph_key(bucket, variant)) or self._larger_graph(bucket, variant)
        if graph is None:
            return EAGER["bucket-dropped"]
        if self._wastes_too_much(size, graph.key.size):
            return EAGER["padding-too-large"]
        self._routes[size, variant] = graph
        return graph

    def _larger_graph(self, bucket: int, variant: str | None) -> CapturedGraph | None:
        """The graph that takes the batches of a bucket without one."""
        larger = (size for size in self.buckets if size > bucket) if self.config.padding else ()
        graphs = (self.graphs.get(self._make_graph_key(size, variant)) for size in larger)
        return next((graph for graph in graphs if graph is not None), None)

    def _graph_for(self, forward_batch: Any, decision: Decision | None, bs: int, num_tokens: int) -> ShapeKey:
        if decision is None:
            decision = self._decide(forward_batch, bs, num_tokens)
        elif isinstance(size := self._live_size(bs, num_tokens), str):
            decision = EAGER[size]  # whatever batch it was made for, this one has no size
        if decision.key is None or decision.key not in self.graphs:
            raise ReplayError(
                f"{self.phase}: the batch cannot be replayed: {decision.reason}",
                code=decision.code if decision.key is None else "bucket-dropped",
                hint="ask `can_run` first, or call `run`, which falls back to the eager forward",
            )
        return decision.key

    def _prepare(self, forward_batch: Any, key: ShapeKey, bs: int, num_tokens: int) -> Any:
        self._check_free()
        self._in_step = True
        try:
            static_batch = self._fill_now(forward_batch, key, bs, num_tokens)
            self._prepare_metadata(static_batch, key)
        finally:
            self._in_step = False
        return static_batch

    def _fill_now(self, forward_batch: Any, key: ShapeKey, bs: int, num_tokens: int) -> Any:
        """Fills the buffers, so that whoever looks finds them filled, and a replay leaves them; the static batch."""
        self._fill(forward_batch, key, bs, num_tokens, None)
        node = self.graphs[key].node
        if node is not None:
            node.clear()
        return self._shown(forward_batch, key, bs)

    def _fill(self, forward_batch: Any, key: ShapeKey, bs: int, num_tokens: int, node: FillNode | None) -> None:
        registry = self.buffer_registry
        padded_bs, padded_tokens = self._padded_sizes(key.size, bs)
        sizes = {
            "raw_bs": bs,
            "padded_bs": padded_bs,
            "raw_num_tokens": num_tokens,
            "padded_num_tokens": padded_tokens,
        }
        proxies = read_fields(forward_batch, ("pp_proxy_tensors",))[0] if registry.calls_functions else None
        if node is None:
            registry.fill_from(forward_batch, **sizes, pp_proxy_tensors=proxies)
        else:
            registry.fill_in(node, forward_batch, **sizes, pp_proxy_tensors=proxies)

    def _shown(self, forward_batch: Any, key: ShapeKey, bs: int) -> Any:
        """The static batch, without metadata."""
        padded_bs, padded_tokens = self._padded_sizes(key.size, bs)
        registry = self.buffer_registry
        shown = registry.extract_buffer(
            padded_bs=padded_bs, padded_num_tokens=padded_tokens, forward_batch_template=forward_batch
        )
        if not registry.has_proxies:
            return shown
        proxies = registry.group("pp_proxy_tensors", padded_bs=padded_bs, padded_num_tokens=padded_tokens)
        return showing_proxies(shown, proxies)

    def _launch(self, graph: CapturedGraph, static_batch: Any) -> None:
        """Replays a graph; where its backend looks at the batch, or runs Python on it in between, by that."""
        launch, backend = graph.launch, self.backend
        try:
            if launch is not None:
                launch()
            else:
                self._replaying = static_batch
                with batch_in_use(static_batch), backend.replay_session():  # type: ignore[union-attr]
                    backend.replay(graph.key, static_batch)  # type: ignore[union-attr]
        except BaseException:
            backend.graph_pool.overwrite()  # type: ignore[union-attr]
            raise
        finally:
            self._replaying = None

    def _replay(self, forward_batch: Any, key: ShapeKey, bs: int, num_tokens: int) -> Any:
        if self._in_step:
            self._check_free()
        self._in_step = True
        try:
            graph = self.graphs[key]
            node = graph.node
            self._fill(forward_batch, key, bs, num_tokens, node)
            static_batch = None
            if graph.launch is None or self._prepares:
                static_batch = self._shown(forward_batch, key, bs)
                self._prepare_metadata(static_batch, key)
            self._launch(graph, static_batch)
            if node is not None:
                node.launched()
        finally:
            self._in_step = False
        size = self._live_size(bs, num_tokens)
        graph.count(size)  # type: ignore[arg-type]
        output = graph.trim(size, clone=self.clone_outputs)  # type: ignore[arg-type]
        return output if not self.debug_outputs or self.clone_outputs else self._lend(output, graph)

    def _lend(self, output: Any, graph: CapturedGraph) -> Any:
        loan = Loan(self.phase, self.backend.graph_pool, graph)  # type: ignore[union-attr]
        return map_tensors(output, partial(lent, loan=loan))

    def _verify_capture(self) -> None:
        error: Exception | None = None
        try:
            report = verify_capture(self)
            if not report:
                error = CaptureError(
                    f"the graphs do not pass verification: {report}",
                    code="verify-failed",
                    hint="see docs/troubleshooting.md, and run `verify` on live batches to look closer",
                    phase=self.phase,
                )
        except Exception as caught:
            error = caught
        # Graphs that one rank drops must not be chosen on any.
        proposal = Proposal(error is None, self.buckets.maximum, failed=error is not None, phase=self.purpose)
        ask_ranks(self, proposal, error, "verifying the graphs")

    # Counts and life cycle.

    def metrics(self) -> StepMetrics:
        """The counts since the last capture, and of eager steps since the runner was made.

        May be called from another thread, while steps run. Does not synchronise.
        """
        return StepMetrics.of(
            {graph.key: graph.counts for graph in list(self.graphs.values())},
            self._eager_steps,
            recompiles=0 if self.backend is None else self.backend.traces - self._traces,
            phase=self.phase,
            mode=getattr(self, "mode", None),
        )

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
        """Waits for the device and drops the graphs and what they hold. Calling it twice is fine.

        What the device raises passes through, and the runner goes on without graphs: call it again to let go of them.
        In a child process that was forked, where the graphs are the parent's, it does nothing.

        Raises:
            ReplayError: `step-in-progress`: it is called by a hook or a break of a replay.
        """
        if self._state not in ("closed", "forked"):
            self._check_free()
            self._drop_graphs()
            self._state = "closed"

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begun(self, step: Callable[..., Any], forward_batch: Any, *rest: Any) -> Any:
        """A step with the hook before it, whose doing is undone with the step's where either fails."""
        with unchanged_on_failure(forward_batch):
            self.hooks.pre_replay(forward_batch)  # type: ignore[misc]  # there is one
            return step(forward_batch, *rest)

    def _check_running(self) -> None:
        if self._state != "open":
            self._check_open()
            raise ReplayError(f"the {self.phase} runner is paused", code="paused", hint="call `resume()` first")
