"""The full backend of an NPU: graphs whose operators keep arguments from the host, which each replay updates.

A captured operator with such arguments waits, in the graph, for an update of this step, and takes it away: each replay
needs exactly one, and the next one may not come before it was taken. So a step waits for the last replay of its graph,
updates, and only then launches the graph. A device that waits for an update that never comes hangs.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from devicegraph.backends.base import capture_failed
from devicegraph.backends.full import FullCudaGraphBackend
from devicegraph.backends.input_update import (
    InputUpdate,
    UpdatePlan,
    for_every_call,
    host_value,
    unexpected,
)
from devicegraph.errors import BackendError, CaptureError, ConfigError, ReplayError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from devicegraph.devices import UpdatableCall
    from devicegraph.runners.capturing import CapturingRunner

__all__ = ["NPUCudaGraphBackend"]

#: Two threads that update at once make the device fail, or wait for ever: one stream serves the updates of a process.
_updating = threading.Lock()


@dataclass
class _Updates:
    """What a graph with host arguments needs for a replay."""

    calls: list[UpdatableCall]
    plan: UpdatePlan | None
    is_inference: bool
    is_grad: bool
    #: Recorded behind each replay; None before the first.
    fence: Any = None


class NPUCudaGraphBackend(FullCudaGraphBackend):
    """One NPU graph for each shape key, with updates of what its operators take from the host.

    Args:
        input_updates: which host arguments each replay updates, and from what; see `InputUpdate`. Without any, graphs
            that have such arguments are replayed with `replay_with_input_update`.
        overlap_input_updates: launch the graph before it is updated, so that what comes before the first such operator
            runs meanwhile. Should an update fail then, the graph has run with old values: it is dropped.
        queue_input_updates: have the device wait for the last replay of the graph instead of the host. Right only where
            a device carries updates out in the order of their stream; where it does so at once, a replay that is still
            to come has the values of the next one.

    The other arguments are those of `BaseCudaGraphBackend`.

    Raises:
        BackendError: `task-queue`: TASK_QUEUE_ENABLE is 2, which torch_npu does not capture under.
        ConfigError: `wrong-type`: an entry of `input_updates` that is none.
    """

    def __init__(
        self,
        *args: Any,
        input_updates: Sequence[InputUpdate] = (),
        overlap_input_updates: bool = False,
        queue_input_updates: bool = False,
        **kwargs: Any,
    ) -> None:
        if os.environ.get("TASK_QUEUE_ENABLE") == "2":
            raise BackendError(
                "TASK_QUEUE_ENABLE is 2, and torch_npu captures no graph then",
                code="task-queue",
                hint="set TASK_QUEUE_ENABLE=1 before the process starts, or use the backend `disabled`",
            )
        if os.environ.get("ASCEND_LAUNCH_BLOCKING") == "1":
            warnings.warn(
                "ASCEND_LAUNCH_BLOCKING is 1: it waits after every launch, which a capture does not bear",
                UserWarning,
                stacklevel=2,
            )
        for update in input_updates:
            if not isinstance(update, InputUpdate):
                raise ConfigError(f"input_updates: {update!r} is no `InputUpdate`", code="wrong-type")
        super().__init__(*args, **kwargs)
        self.input_updates = tuple(input_updates)
        self.overlap_input_updates = overlap_input_updates
        self.queue_input_updates = queue_input_updates
        self._updates: dict[Hashable, _Updates] = {}

    @classmethod
    def options_from(cls, runner: CapturingRunner) -> dict[str, Any]:
        """See `BaseCudaGraphBackend.options_from`."""
        hooks = runner.hooks
        names = ("input_updates", "overlap_input_updates", "queue_input_updates")
        return {name: getattr(hooks, name) for name in names}

    def capture_one(
        self,
        shape_key: Hashable,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> Any:
        """See `BaseCudaGraphBackend.capture_one`.

        Raises:
            CaptureError: beside what that raises, what `UpdatePlan` does, and `update-stream-device` on a second device
                of a process: torch_npu updates on one stream, of the device that it first captured on.
        """
        output = super().capture_one(shape_key, forward_fn, capture_inputs, post_warmup_hook)
        try:
            updates = self._find_updates(self._captured[shape_key].recording)
        except CaptureError as error:
            self.discard(shape_key)
            raise capture_failed(self.phase, shape_key, error) from error
        if updates is not None:
            self._updates[shape_key] = updates
        return output

    def _find_updates(self, graph: Any) -> _Updates | None:
        calls = graph.updatable_calls()
        plan = UpdatePlan(self.input_updates, calls) if self.input_updates else None
        if not calls:
            return None
        if graph.update_stream.device != self.adapter.device:
            raise CaptureError(
                f"torch_npu updates on a stream of `{graph.update_stream.device}`, and the graph is on "
                f"`{self.adapter.device}`",
                code="update-stream-device",
                hint="serve each device from a process of its own",
            )
        return _Updates(calls, plan, torch.is_inference_mode_enabled(), torch.is_grad_enabled())

    def updatable_calls(self, shape_key: Hashable) -> list[UpdatableCall]:
        """The calls of a captured graph that have host arguments, in the order of the capture."""
        updates = self._updates.get(shape_key)
        return [] if updates is None else updates.calls

    def replay(self, shape_key: Hashable, static_forward_batch: Any, **kwargs: Any) -> Any:
        """Updates the graph of the key from the batch, where it has host arguments, and launches it.

        Waits on the host for the last replay of the same graph, where it has host arguments and the backend does not
        have `queue_input_updates`; else for nothing.

        Raises:
            KeyError: no graph for the key.
            ReplayError: `update-missing` for a graph with host arguments and a backend without `input_updates`;
                `update-type` and `update-length` for values that do not fit it, and nothing was changed then;
                `update-failed`.
        """
        captured = self._captured[shape_key]
        updates = self._updates.get(shape_key)
        if updates is None:
            captured.recording.replay()
            return captured.output
        if updates.plan is None:
            raise ReplayError(
                f"{self.phase}: the graph of {shape_key} has {len(updates.calls)} calls that wait for an input update, "
                "and none was given",
                code="update-missing",
                hint="declare the engine's `input_updates`, or call `replay_with_input_update`",
            )
        return self._replay_updated(shape_key, updates, updates.plan.updates_for(static_forward_batch))

    def replay_with_input_update(
        self,
        shape_key: Hashable,
        seq_lens: Sequence[int] | torch.Tensor,
        attr_name: str,
        attr_type: type | list[Any] | torch.Tensor,
        cpu_update_input: Sequence[Mapping[str, Any]] | None = None,
    ) -> Any:
        """Updates the graph of the key with the values given, and launches it; see `replay`.

        Args:
            shape_key: the graph's name.
            seq_lens: the values for all calls, as many as were captured, in host memory.
            attr_name: the update key.
            attr_type: what the operators take it as: `list` or `torch.Tensor`, or an instance of one of them.
            cpu_update_input: updates by key instead of the three arguments before: one for each call, or one for all.

        Raises:
            KeyError: no graph for the key.
            ReplayError: `update-unexpected` for a graph without host arguments; `update-unknown-key`, `update-count`,
                `update-missing`, `update-type` and `update-length` for updates that do not fit it, and nothing was
                changed then; `update-failed`.
        """
        self._captured[shape_key]  # a KeyError before anything else
        updates = self._updates.get(shape_key)
        if updates is None:
            raise unexpected(ReplayError)
        if cpu_update_input is None:
            as_tensor = attr_type is torch.Tensor or isinstance(attr_type, torch.Tensor)
            if not as_tensor and attr_type is not list and not isinstance(attr_type, list):
                raise ReplayError(
                    f"attr_type: {attr_type!r} is neither `list` nor `torch.Tensor`, nor an instance of one of them",
                    code="update-type",
                )
            cpu_update_input = [{attr_name: host_value(attr_name, seq_lens, as_tensor=as_tensor)}]
        return self._replay_updated(shape_key, updates, for_every_call(updates.calls, cpu_update_input))

    def _replay_updated(self, shape_key: Hashable, updates: _Updates, values: list[dict[str, Any]]) -> Any:
        captured = self._captured[shape_key]
        graph: Any = captured.recording
        # On the stream of the updates a graph would wait for an update that is queued behind it.
        overlaps = self.overlap_input_updates and self.adapter.current_stream() != graph.update_stream
        with _updating:
            if updates.fence is not None:
                # Else an update could come before the last replay has taken the one before, and one of them would be
                # lost: the device would wait for it for ever.
                if self.queue_input_updates:
                    updates.fence.wait(graph.update_stream)
                else:
                    updates.fence.synchronize()
            if overlaps:
                graph.replay()
            try:
                # In the capture's modes: operators that write into tensors made in inference mode refuse to run
                # outside of it.
                with torch.inference_mode(updates.is_inference), torch.set_grad_enabled(updates.is_grad):
                    graph.update(values)
            except BaseException as error:
                self._end_failed_update(shape_key, graph, is_launched=overlaps)
                if not isinstance(error, Exception):
                    raise
                raise ReplayError(
                    f"{self.phase}: updating the graph of {shape_key} failed: {type(error).__name__}: {error}",
                    code="update-failed",
                    hint="the graph ran with old values and is dropped"
                    if overlaps
                    else "the graph was not launched; the next replay updates all of it",
                ) from error
            if not overlaps:
                graph.replay()
            if updates.fence is None:
                updates.fence = self.adapter.event()
            updates.fence.record(self.adapter.current_stream())
        return captured.output

    def _end_failed_update(self, shape_key: Hashable, graph: Any, *, is_launched: bool) -> None:
        with contextlib.suppress(Exception):
            graph.end_update()
        if is_launched:
            # It is queued, and would wait for ever for what was not updated.
            graph.release()
            self.adapter.synchronize()
            self.discard(shape_key)

    def discard(self, shape_key: Hashable) -> None:
        """See `BaseCudaGraphBackend.discard`."""
        self._updates.pop(shape_key, None)
        super().discard(shape_key)
