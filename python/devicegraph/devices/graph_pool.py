"""The graph memory pool: who holds its memory, and how often it was overwritten."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from devicegraph.devices.adapter import DeviceAdapter


class Replayed(Protocol):
    """A graph that counts its replays."""

    @property
    def replays(self) -> int:
        """Replays so far."""


class GraphMemoryPool:
    """The graph memory pool of an adapter: where captures place what they allocate.

    Graphs that share a pool share memory, so that only one of them may run at a time, and each replay overwrites the
    outputs of the one before, whichever graph they came from.
    """

    def __init__(self, adapter: DeviceAdapter) -> None:
        self._adapter = adapter
        self._handle: Any = None
        self._graphs = 0
        self._captured: weakref.WeakSet[Replayed] = weakref.WeakSet()
        self._overwritten = 0

    @property
    def device(self) -> torch.device:
        """The device whose memory this is."""
        return self._adapter.device

    @property
    def handle(self) -> Any:
        """What the device's own capture call takes. It is made when first asked for, and anew after `renew`."""
        if self._handle is None:
            self._handle = self._adapter.new_pool_handle()
        return self._handle

    @property
    def graphs(self) -> int:
        """How many graphs hold memory of the current handle."""
        return self._graphs

    def hold(self) -> Callable[[], None]:
        """Counts a graph that holds memory of the current handle; what is returned uncounts it, once."""
        handle = self.handle
        self._graphs += 1
        held = True

        def release() -> None:
            nonlocal held
            if held and self._handle is handle:
                self._graphs -= 1
                if not self._graphs:
                    # Allocators refuse a handle whose last graph is gone while a tensor of it lives on.
                    self.renew()
            held = False

        return release

    @property
    def generation(self) -> int:
        """How often runners have replayed and captured in the pool: each time, older outputs may be overwritten.

        It is summed up from the counts that graphs keep anyway, so that a step pays nothing for it.
        """
        return self._overwritten + sum(graph.replays for graph in self._captured)

    def follow(self, graph: Replayed) -> None:
        """Lets the replays of a graph count as generations."""
        self._captured.add(graph)

    def unfollow(self, graph: Replayed) -> None:
        """Keeps the count of a graph that goes."""
        self._captured.discard(graph)
        self.overwrite(graph.replays)

    def overwrite(self, times: int = 1) -> None:
        """Counts what no graph counts: captures, whose segments may run, and replays that failed or were no steps."""
        self._overwritten += times

    def renew(self) -> None:
        """Goes on with fresh memory. Graphs captured before keep theirs, and that memory goes when they do."""
        self._handle = None
        self._graphs = 0

    def __repr__(self) -> str:
        return f"GraphMemoryPool(device={str(self.device)!r}, graphs={self.graphs})"
