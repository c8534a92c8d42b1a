"""The full backend: one device graph for a whole forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from devicegraph.backends import BaseCudaGraphBackend, Captured, capture_failed
from devicegraph.outputs import replace_tensors, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from devicegraph._core import FillNode
    from devicegraph.devices import DeviceGraph


class FullCudaGraphBackend(BaseCudaGraphBackend):
    """One graph for each shape key, all in one graph memory pool.

    Outputs are held weakly: their memory is the pool's, later captures may use it, and a replay writes it anew. Nothing
    is copied, and a list of buckets takes little more memory than its largest one.
    """

    name: ClassVar[str] = "full"
    can_fill: ClassVar[bool] = True

    _captured: dict[Hashable, Captured[DeviceGraph]]

    def capture_one(
        self,
        shape_key: Hashable,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> Any:
        """See `BaseCudaGraphBackend.capture_one`."""
        self.discard(shape_key)
        graph = self.adapter.filling_graph() if self.fills else self.adapter.graph()
        try:
            self._warm_up(forward_fn, post_warmup_hook)
            with self.adapter.capture(
                graph, pool=self.graph_pool, stream=self._stream, capture_error_mode=self.capture_error_mode
            ):
                output = forward_fn()
            weak = self.adapter.weak_outputs(tensors_of(output), self.graph_pool)
        except Exception as error:
            graph.reset()
            raise capture_failed(self.phase, shape_key, error) from error
        output = replace_tensors(output, weak)
        self._captured[shape_key] = Captured(graph, output, capture_inputs)
        return output

    def launcher(self, shape_key: Hashable) -> Callable[[], None] | None:
        """See `BaseCudaGraphBackend.launcher`."""
        kind, own = type(self), FullCudaGraphBackend
        is_own = kind.replay is own.replay and kind.replay_session is own.replay_session and kind.can_run is own.can_run
        return self._captured[shape_key].recording.replay if is_own else None

    def fill_node(self, shape_key: Hashable) -> FillNode | None:
        """See `BaseCudaGraphBackend.fill_node`."""
        return self.adapter.fill_node(self._captured[shape_key].recording) if self.fills else None

    def replay(self, shape_key: Hashable, static_forward_batch: Any, **kwargs: Any) -> Any:
        """See `BaseCudaGraphBackend.replay`."""
        captured = self._captured[shape_key]
        captured.recording.replay()
        return captured.output
