"""The full backend: one device graph for a whole forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from devicegraph.backends.base import BaseCudaGraphBackend, Captured
from devicegraph.devices.executables import SharedExecutables, random_state
from devicegraph.outputs import replace_tensors, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from devicegraph._core import FillNode
    from devicegraph.devices import DeviceGraph


class FullCudaGraphBackend(BaseCudaGraphBackend):
    """One graph for each shape key, all in one graph memory pool.

    Outputs are held weakly: their memory is the pool's, later captures may use it, and a replay writes it anew. Nothing
    is copied, and a list of buckets takes little more memory than its largest one.

    Args:
        share_executables: let graphs of one form take turns on one executable, which saves the memory of the others
            (about 2 MiB each for a decoder of 28 layers on CUDA) and costs an update whenever another graph is replayed
            than the time before (about 0.8 ms there). For engines that are bound by memory and stay on few buckets.
            Each graph is launched once more when it is captured, to check its outputs; `executables` says what came of
            it.

    The other arguments are those of `BaseCudaGraphBackend`.

    Raises:
        BackendError: `executables-fixed` where the device or this torch cannot share them.
    """

    name: ClassVar[str] = "full"
    can_fill: bool = True

    _captured: dict[Hashable, Captured[DeviceGraph]]

    def __init__(self, *args: Any, share_executables: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Who shares which executable; None without `share_executables`.
        self.executables = SharedExecutables() if share_executables else None
        # The fill is pointed at sources in one executable; a shared one would have to be pointed anew at every switch.
        # A replay that looks at the batch first would find it as the last step left it.
        self.can_fill = not share_executables and self._replays_alone
        #: The fills that graphs begin with.
        self._nodes: dict[Hashable, FillNode] = {}
        if share_executables:
            self.adapter.updatable_graph()  # a device that has none says so here

    def capture_one(
        self,
        shape_key: Hashable,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> Any:
        """See `BaseCudaGraphBackend.capture_one`."""
        self.discard(shape_key)
        graph: Any = self._new_graph()
        with self._dropped_on_failure(shape_key, graph):
            graph, output = self._capture(graph, shape_key, forward_fn, post_warmup_hook)
        self._captured[shape_key] = Captured(graph, output, capture_inputs)
        return output

    def _capture(
        self,
        graph: Any,
        shape_key: Hashable,
        forward_fn: Callable[[], Any],
        post_warmup_hook: Callable[[], None] | None,
    ) -> tuple[Any, Any]:
        """Captures into a new graph; what replays it, and its output, held weakly.

        Apart from `capture_one`, so that an error of it that somebody keeps holds none of these tensors.
        """
        warmed = self._warm_up_to_check(forward_fn, post_warmup_hook)
        self._end_warm_up()
        with self.adapter.capture(
            graph, pool=self.graph_pool, stream=self._stream, capture_error_mode=self.capture_error_mode
        ):
            output = forward_fn()
        tensors = tensors_of(output)
        weak = self.adapter.weak_outputs(tensors, self.graph_pool)
        if self.executables is not None:
            in_pool = not any(mine is its for mine, its in zip(weak, tensors, strict=True))
            graph = self.executables.place(shape_key, graph, weak, warmed if in_pool else ())
        return graph, replace_tensors(output, weak)

    def launcher(self, shape_key: Hashable) -> Callable[[], None] | None:
        """See `BaseCudaGraphBackend.launcher`."""
        return self._captured[shape_key].recording.replay if self._replays_alone else None

    @property
    def _replays_alone(self) -> bool:
        """Whether no subclass does anything about a replay."""
        kind, own = type(self), FullCudaGraphBackend
        return kind.replay is own.replay and kind.replay_session is own.replay_session and kind.can_run is own.can_run

    def fill_node(self, shape_key: Hashable) -> FillNode | None:
        """See `BaseCudaGraphBackend.fill_node`."""
        node = self.adapter.fill_node(self._captured[shape_key].recording) if self.fills else None
        if node is not None:
            self._nodes[shape_key] = node
        return node

    def discard(self, shape_key: Hashable) -> None:
        """See `BaseCudaGraphBackend.discard`."""
        self._nodes.pop(shape_key, None)
        super().discard(shape_key)

    def _new_graph(self) -> DeviceGraph:
        if self.executables is not None:
            updatable: DeviceGraph = self.adapter.updatable_graph()
            return updatable
        return self.adapter.graph()

    def _warm_up_to_check(
        self, forward_fn: Callable[[], Any], post_warmup_hook: Callable[[], None] | None
    ) -> list[torch.Tensor]:
        """Warms up; the tensors of the output where they are to be compared with the graph's, else none."""
        if self.executables is None:
            self._warm_up(forward_fn, post_warmup_hook)
            return []
        before = random_state(self.adapter.device)
        warmed = tensors_of(self._warm_up(forward_fn, post_warmup_hook))
        # What is drawn differs each time; and a replay advances the generator by what its executable's own graph drew.
        return warmed if torch.equal(before, random_state(self.adapter.device)) else []

    def replay(self, shape_key: Hashable, static_forward_batch: Any, **kwargs: Any) -> Any:
        """See `BaseCudaGraphBackend.replay`; of what the buffers hold."""
        captured = self._captured[shape_key]
        node = self._nodes.get(shape_key)
        if node is not None:
            # A step launches the graph itself. Whoever comes here has filled the buffers, and the sources that the last
            # step pointed the node at may be gone.
            node.clear()
        captured.recording.replay()
        return captured.output
