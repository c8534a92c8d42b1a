"""Sharing executables: graphs of one form take turns on one, which is made to do what each of them recorded.

What a device makes of a recording to launch it, its executable, takes memory of its own, about as much for a small
bucket as for a large one. Devices can update an executable to another recording of the same form (the same operations
in the same order, with other sizes and addresses). That costs time whenever the graph changes, and saves the memory of
all executables but one for each form.

Whether an update does what it says is checked once for each graph, when it is captured: its outputs, filled with wrong
values first, have to be those of its warm-up, bit for bit. A graph for which there is any doubt keeps an executable of
its own.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import torch

from devicegraph.devices import DeviceGraph
from devicegraph.outputs import bytes_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

__all__ = ["SharedExecutables"]


class UpdatableGraph(DeviceGraph, Protocol):
    """A recording, and apart from it its executable, which it does not have until it is told to make one."""

    def instantiate(self) -> None:
        """Makes the graph's executable."""

    def launch(self) -> None:
        """Launches the graph's executable on the current stream, whatever it was updated to."""

    def update(self, recorded: Any) -> bool:
        """Makes this graph's executable do what another one recorded, from the next launch on.

        Returns:
            False where their forms differ; what the executable does is not defined then.
        """


class _Executable:
    """One executable, and the graphs that take turns on it; it belongs to the first of them."""

    def __init__(self, graph: UpdatableGraph) -> None:
        graph.instantiate()
        self.graphs = [graph]
        self.is_shared = False
        self._holds: UpdatableGraph | None = graph

    def launch(self) -> None:
        self.graphs[0].launch()

    def switch(self, graph: UpdatableGraph) -> bool:
        """Whether it does from now on what the graph recorded."""
        if self._holds is graph:
            return True
        self._holds = None
        if self.graphs[0].update(graph):
            self._holds = graph
        elif graph is self.graphs[0]:
            graph.instantiate()
            self._holds = graph
        return self._holds is graph

    def leave(self, graph: UpdatableGraph) -> None:
        """Lets a graph go; the next one gets an executable where this was its owner.

        First of all, so that nothing has changed where that fails.
        """
        if self.graphs[0] is graph and len(self.graphs) > 1:
            heir = self.graphs[1]
            heir.instantiate()
            self.graphs[:2] = heir, graph
            self._holds = heir
        graph.reset()
        self.graphs.remove(graph)
        if self._holds is graph:
            self._holds = None


class _SharedGraph:
    """A graph in its turn."""

    def __init__(self, owner: SharedExecutables, key: Hashable, graph: UpdatableGraph, executable: _Executable) -> None:
        self._owner = owner
        self._key = key
        self._graph = graph
        self._executable = executable

    @property
    def is_empty(self) -> bool:
        """See `DeviceGraph`."""
        return self._graph.is_empty

    def replay(self) -> None:
        """See `DeviceGraph`; updates the executable first where it was another graph's turn.

        One that cannot be updated, though it was when the graph was captured, is left to the others.
        """
        if not self._executable.switch(self._graph):
            self._executable = self._owner.part(self._key, self._graph, self._executable)
        self._executable.launch()

    def reset(self) -> None:
        """See `DeviceGraph`."""
        if self._graph in self._executable.graphs:
            self._executable.leave(self._graph)


class SharedExecutables:
    """The executables of a backend; printing it says how many there are, what a switch takes, and who shares none.

    Attributes:
        alone: the graphs that share no executable though another one may have their form, and why, by key.
    """

    def __init__(self) -> None:
        self.alone: dict[Hashable, str] = {}
        self._executables: list[_Executable] = []
        self._seconds: list[float] = []

    def place(
        self, key: Hashable, graph: UpdatableGraph, outputs: Sequence[torch.Tensor], warmed: Sequence[torch.Tensor]
    ) -> DeviceGraph:
        """Finds an executable for a graph that was just captured. Waits for the device.

        Args:
            key: the graph's key, for what is printed.
            graph: without an executable. It is launched on the current stream to be checked.
            outputs: what it writes, all in its memory pool.
            warmed: what the forward returned for the same inputs; empty where that says nothing.

        Returns:
            What replays and resets the graph from now on.
        """
        self.alone.pop(key, None)
        executable = self._shared(key, graph, outputs, warmed) if warmed else None
        if executable is None:
            executable = _Executable(graph)
            self._executables.append(executable)
            if not warmed:
                self.alone[key] = "its outputs cannot be checked"
            elif key not in self.alone:
                try:
                    executable.is_shared = _writes(executable, graph, outputs, warmed)
                except BaseException:
                    executable.graphs.clear()  # who captures resets the graph
                    raise
                if not executable.is_shared:
                    self.alone[key] = "its outputs differ from run to run"
        return _SharedGraph(self, key, graph, executable)

    def part(self, key: Hashable, graph: UpdatableGraph, shared: _Executable) -> _Executable:
        """Makes an executable for a graph that shared one until now."""
        own = _Executable(graph)
        shared.graphs.remove(graph)
        self._executables.append(own)
        self.alone[key] = "the executable that it shared could not be updated to it any more"
        return own

    def _shared(
        self, key: Hashable, graph: UpdatableGraph, outputs: Sequence[torch.Tensor], warmed: Sequence[torch.Tensor]
    ) -> _Executable | None:
        """The executable that takes the graph, if there is one."""
        self._executables = [executable for executable in self._executables if executable.graphs]
        # The latest first: neighbours in size are most alike.
        for executable in reversed(self._executables):
            begun = time.perf_counter()
            if not executable.is_shared or not executable.switch(graph):
                continue
            self._seconds.append(time.perf_counter() - begun)
            if not _writes(executable, graph, outputs, warmed):
                self.alone[key] = "its outputs on a shared executable are not those of its warm-up"
                return None
            executable.graphs.append(graph)
            return executable
        return None

    @property
    def count(self) -> int:
        """Executables that there are now."""
        return sum(bool(executable.graphs) for executable in self._executables)

    @property
    def seconds_per_switch(self) -> float | None:
        """What an update took on average when graphs were captured; None where none was made."""
        return sum(self._seconds) / len(self._seconds) if self._seconds else None

    def __str__(self) -> str:
        graphs = sum(len(executable.graphs) for executable in self._executables)
        switch = self.seconds_per_switch
        cost = "" if switch is None else f"; a switch takes {switch * 1e3:.2f} ms"
        alone = [f"{key} has one of its own: {reason}" for key, reason in self.alone.items()]
        return "\n".join([f"{graphs} graphs on {self.count} executables{cost}", *alone])


def _writes(
    executable: _Executable, graph: UpdatableGraph, outputs: Sequence[torch.Tensor], warmed: Sequence[torch.Tensor]
) -> bool:
    """Whether a launch writes these outputs, none of whose bytes is right before."""
    for output, right in zip(outputs, warmed, strict=True):
        _spoil(output, right)
    executable.launch()
    return all(torch.equal(bytes_of(output), bytes_of(right)) for output, right in zip(outputs, warmed, strict=True))


def _spoil(output: torch.Tensor, right: torch.Tensor) -> None:
    """Writes an output so that none of its bytes is right; of an expanded one each element once."""
    wrong = (~bytes_of(right)).view(right.dtype).view(right.shape)
    for dim, stride in enumerate(output.stride()):
        if stride == 0 and output.shape[dim] > 1:
            output, wrong = output.narrow(dim, 0, 1), wrong.narrow(dim, 0, 1)
    output.copy_(wrong)


def random_state(device: torch.device) -> torch.Tensor:
    """The state of the device's own generator, on the host: it differs after whatever draws from it."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state
