"""Breakable captures that the CPU tape and a GPU are both held to: each case is a function of a device adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from typing_extensions import Self

import devicegraph as dg

if TYPE_CHECKING:
    from collections.abc import Callable

CASES: list[Callable[[dg.DeviceAdapter], None]] = []


def case(function: Callable[[dg.DeviceAdapter], None]) -> Callable[[dg.DeviceAdapter], None]:
    CASES.append(function)
    return function


class Captured:
    """A backend in a pool of its own, its input, and forwards captured on the first rows of it."""

    def __init__(self, adapter: dg.DeviceAdapter, **options: Any) -> None:
        self.adapter = adapter
        self.backend = dg.BreakableCudaGraphBackend(
            adapter, phase="prefill", graph_pool=dg.GraphMemoryPool(adapter), **options
        )
        self.x = torch.zeros(8, 4, device=adapter.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.backend.cleanup()
        assert self.backend.graph_pool.graphs == 0

    def capture(self, forward: Callable[[torch.Tensor], Any], *sizes: int) -> None:
        with torch.no_grad(), self.backend.capture_session():
            for size in sizes:
                self.backend.capture_one(size, lambda size=size: forward(self.x[:size]))

    def check(self, forward: Callable[[torch.Tensor], Any], *sizes: int) -> None:
        """Replays equal eager runs on new values, in this order of sizes."""
        for step, size in enumerate(sizes, start=1):
            self.x.copy_(torch.randint(-4, 5, (8, 4), generator=torch.Generator().manual_seed(step)))
            got = self.backend.replay(size, None)
            self.adapter.synchronize()
            assert torch.equal(got, forward(self.x[:size])), f"step {step}, size {size}"


attend = dg.eager_on_graph(lambda hidden: hidden.cumsum(0) * 2)


@case
def buckets_of_one_pool_replay_in_any_order(adapter: dg.DeviceAdapter) -> None:
    """Public fault 16: what a bucket keeps across its breaks is not another one's."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden = attend((x + 1) * 2)
        return attend(hidden + x) - hidden

    with Captured(adapter) as captured:
        captured.capture(forward, 8, 4, 2)
        captured.check(forward, 8, 2, 8, 4, 8)


@case
def a_fork_is_joined_behind_the_break(adapter: dg.DeviceAdapter) -> None:
    side = adapter.stream()

    def forward(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(adapter.current_stream())
        with adapter.stream_context(side):
            a = x + 1
        b = attend(x + 2)
        with adapter.stream_context(side):
            a = a * 3
        adapter.current_stream().wait_stream(side)
        return a + b

    with Captured(adapter) as captured:
        captured.capture(forward, 8, 2)
        captured.check(forward, 8, 2, 8)


@case
def a_fork_is_not_joined_at_all(adapter: dg.DeviceAdapter) -> None:
    """Beside a GPU an eager run would race; the end of each segment joins what the model forgot."""
    side = adapter.stream()

    def forward(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(adapter.current_stream())
        with adapter.stream_context(side):
            a = x + 1
        return attend(x + 2) + a

    def joined(x: torch.Tensor) -> torch.Tensor:
        return attend(x + 2) + (x + 1)

    with Captured(adapter) as captured:
        captured.capture(forward, 4)
        captured.check(joined, 4, 4)


@case
def an_event_of_one_segment_is_waited_for_in_the_next(adapter: dg.DeviceAdapter) -> None:
    side, done = adapter.stream(), adapter.event()

    def forward(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(adapter.current_stream())
        with adapter.stream_context(side):
            a = x + 1
            done.record(side)
        b = attend(x + 2)
        adapter.current_stream().wait_event(done)
        return a + b

    with Captured(adapter) as captured:
        captured.capture(forward, 4)
        captured.check(forward, 4, 4)


@case
def a_stream_is_forked_by_an_event_of_the_segment_before(adapter: dg.DeviceAdapter) -> None:
    side, ready = adapter.stream(), adapter.event()

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        ready.record()
        b = attend(x + 2)
        side.wait_event(ready)
        with adapter.stream_context(side):
            y = y * 3
        adapter.current_stream().wait_stream(side)
        return y + b

    with Captured(adapter) as captured:
        captured.capture(forward, 4)
        captured.check(forward, 4, 4)


@case
def a_break_on_a_side_stream(adapter: dg.DeviceAdapter) -> None:
    side = adapter.stream()

    def forward(x: torch.Tensor) -> torch.Tensor:
        capturing = adapter.current_stream()
        side.wait_stream(capturing)
        with adapter.stream_context(side):
            b = attend(x + 2) * 3
        capturing.wait_stream(side)
        return b + x

    with Captured(adapter) as captured:
        captured.capture(forward, 4)
        captured.check(forward, 4, 4)


@case
def segments_may_be_empty(adapter: dg.DeviceAdapter) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        dg.break_graph()
        dg.break_graph()
        return attend(attend(x))

    with Captured(adapter) as captured:
        captured.capture(forward, 8)
        captured.check(forward, 8, 8)
        # What remains is the copy into the shared output.
        assert captured.backend.coverage(8).segments == 1


@case
def a_break_returns_live_rows_only(adapter: dg.DeviceAdapter) -> None:
    live = [8]

    @dg.eager_on_graph
    def part(hidden: torch.Tensor) -> torch.Tensor:
        return hidden[: live[0]] * 2

    def padded(x: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros_like(x)
        rows[: live[0]] = x[: live[0]] * 2
        return rows + 1

    with Captured(adapter) as captured:
        captured.capture(lambda x: part(x) + 1, 8)
        for live[0] in (3, 8, 1):
            captured.check(padded, 8)


@case
def a_failure_leaves_the_pool_usable(adapter: dg.DeviceAdapter) -> None:
    calls_left = [0]

    @dg.eager_on_graph
    def breaks(hidden: torch.Tensor) -> torch.Tensor:
        calls_left[0] -= 1
        if calls_left[0] == 0:
            raise ValueError("in the break")
        return hidden * 2

    def forward(x: torch.Tensor) -> torch.Tensor:
        return breaks(breaks(x + 1) + 1) + 1

    with Captured(adapter) as captured:
        captured.capture(lambda x: attend(x) + 1, 2)
        # Two breaks in each of two warm-ups, and two in the capture.
        for calls_left[0] in (6, 5, 1):
            with pytest.raises(dg.CaptureError) as caught:
                captured.capture(forward, 8)
            assert isinstance(caught.value.__cause__, ValueError)
            assert not adapter.is_capturing()
            assert list(captured.backend.captured) == [2]
            del caught
        captured.capture(forward, 8)
        captured.check(lambda x: ((x + 1) * 2 + 1) * 2 + 1, 8)
        captured.check(lambda x: attend(x) + 1, 2)
